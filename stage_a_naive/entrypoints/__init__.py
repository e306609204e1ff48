"""The ways in that all six stages share: `generate` and `chat` before their loop, and the command line."""
