"""Stage D: the model written from scratch, on a paged KV cache."""
