"""The contract of all six stages: prompts, parameters, outputs, errors, how a token is chosen and becomes text."""
