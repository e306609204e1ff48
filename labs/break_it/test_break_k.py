"""Break it, lab K: constrained answers disturb each other.

It takes two requests at the same time; one after the other, each gets what it asks for. The broken engines compile a
grammar once, as the reference does, and differ from it by one line. Write a test that passes with the reference and
fails with the broken ones.
"""

from beyond.structured.grammars import Grammars, Matcher
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.structured_outputs import StructuredOutputs

VOCAB_SIZE = 4096  # of the tutor, whose tokens these are
TOKENIZER = load_tokenizer(resolve("tutor"))


def start(grammars: Grammars, pattern: str) -> Matcher:
    """Admit a request whose answer must match a regular expression."""
    return grammars.start(StructuredOutputs("regex", pattern))


def accept(matcher: Matcher, text: str) -> None:
    """Choose the tokens of a text for a request."""
    matcher.accept(TOKENIZER.encode(text, add_special_tokens=False))


def may_come(matcher: Matcher, text: str) -> bool:
    """Return whether the token with this text, a letter or a digit, may come next."""
    [token_id] = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.count_allowed([token_id]) == 1


def test_answers_do_not_disturb_each_other():
    """All requests of an engine have one `Grammars(resolve("tutor"), VOCAB_SIZE)`."""
    grammars = Grammars(resolve("tutor"), VOCAB_SIZE)
    first, second, digits = (start(grammars, pattern) for pattern in ("[a-c][0-9]", "[a-c][0-9]", "[0-9]+"))
    accept(first, "a")
    assert may_come(first, "7") and not may_come(first, "a")
    assert may_come(second, "a") and not may_come(second, "7"), "the second one has no token yet"
    assert may_come(digits, "7") and not may_come(digits, "a"), "its grammar is a different one"
