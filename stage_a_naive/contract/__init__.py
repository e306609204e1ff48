"""What all six stages promise: prompts, parameters, outputs, errors, and how a token is chosen and becomes text."""
