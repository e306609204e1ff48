"""Error classes and messages: one line that says what was given, what is allowed, and what to do."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be loaded or is not supported; the message says why and what to do."""


class PromptTooLong(ValueError):
    """A prompt that is too long for the model or for the engine's memory."""


class EngineBroken(RuntimeError):
    """A part of the engine has died; only a new engine helps."""


def one_line(error: BaseException) -> str:
    """Return the whole message of another library's error as one line."""
    return " ".join(str(error).split()) or type(error).__name__


def shown(value: object) -> str:
    """Return `repr(value)` for an error message: one line of at most 80 characters, for any value."""
    if isinstance(value, (str, bytes, list, tuple)):
        value = value[:80]  # the rest would not be shown, and may be long
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:79]}…"
