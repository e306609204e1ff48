"""Stage E: continuous batching."""
