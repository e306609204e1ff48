"""Constrained decoding for many rows: states as numbers, a tree of tokens, masks that rows share, and drafts.

`beyond/structured/loop.py` answers one question: its states are patterns, and every token is tried from its first
character. Here the states of a pattern are numbers in a table, and tokens with the same beginning are checked together.
`python -m labs.variants.masks` chooses tokens at random, for rows with a constraint and for one without.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from beyond.structured import constraints, loop
from stage_a_naive.checkpoints.tutor import TUTOR_PATH

POWERS = 2 ** torch.arange(8, dtype=torch.uint8)


class Table(NamedTuple):
    """A finite automaton. State 0 is the beginning; every state can still lead to an end.

    Attributes:
        moves: for each state, the next state by character; a missing character is not allowed.
        ends: the states where the text may end.
    """

    moves: list[dict[str, int]]
    ends: frozenset[int]

    def after(self, state: int, text: str) -> int | None:
        """Return the state after more text, or None if the text is not allowed."""
        for char in text:
            if char not in self.moves[state]:
                return None
            state = self.moves[state][char]
        return state


class Node(NamedTuple):
    """A common beginning of tokens.

    Attributes:
        ids: the tokens with exactly this text.
        children: the beginnings with one more character, by that character.
    """

    ids: list[int]
    children: dict[str, Node]


class Point(NamedTuple):
    """The position of an answer in its grammar: the grammar's name, and a state of its table."""

    form: str
    state: int


def tree_of(texts: Sequence[str]) -> Node:
    """Put the tokens of a vocabulary into a tree; special tokens, which have no text, are not in it."""
    root = Node([], {})
    for token_id, text in enumerate(texts):
        node = root
        for char in text:
            node = node.children.setdefault(char, Node([], {}))
        if text:
            node.ids.append(token_id)
    return root


def packed(allowed: np.ndarray) -> np.ndarray:
    """Pack a mask, bool `[vocab]`, into bits as in the engine: int32 `[ceil(vocab / 32)]`."""
    padded = np.pad(allowed, (0, -len(allowed) % 32))
    return np.packbits(padded, bitorder="little").view(np.int32)


def table_of(pattern: str, chars: Sequence[str], most: int = 1000) -> Table:
    """Number the states of a pattern, and record where each character leads.

    Args:
        pattern: as `loop.parse` reads it, which gives the first state; `loop.after` gives the others.
        chars: the characters of all texts.
        most: the most states that the table may have.

    Raises:
        ValueError: there are more states.
    """
    states, numbers = [loop.parse(deque(pattern))], {loop.parse(deque(pattern)): 0}
    moves: list[dict[str, int]] = []
    for state in states:  # the list grows meanwhile
        moves.append({})
        for char in chars:
            found = loop.after(state, char)
            if found == loop.DEAD:
                continue
            if found not in numbers:
                if len(states) == most:
                    raise ValueError(f"the pattern {pattern!r} has more than {most} states; make it simpler")
                numbers[found] = len(states)
                states.append(found)
            moves[-1][char] = numbers[found]
    return Table(moves, frozenset(number for state, number in numbers.items() if loop.may_end(state)))


def mask_of(table: Table, state: int, tree: Node, vocab_size: int, eos_ids: Sequence[int]) -> np.ndarray:
    """Return which tokens are allowed in a state, bool `[vocab_size]`.

    A token is allowed if all of its characters are. `eos_ids`, which end an answer, are allowed where the text may end.
    Everything below a forbidden character is skipped.
    """
    allowed = np.zeros(vocab_size, bool)
    left = [(tree, state)]
    while left:
        node, here = left.pop()
        allowed[node.ids] = True
        left += [(child, table.moves[here][c]) for c, child in node.children.items() if c in table.moves[here]]
    allowed[list(eos_ids)] = state in table.ends
    return allowed


def choose_again(
    logits: Tensor,
    ids: Tensor,
    points: Sequence[Point | None],
    mask_at: Callable[[Point], np.ndarray],
    choose: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Choose the tokens of constrained rows again, into `ids`; all other rows keep theirs.

    Args:
        logits: `[rows, vocab]`, of the model. They stay unchanged.
        ids: int64 `[rows]`, chosen without masks.
        points: each row's position in its grammar; None for a row without a constraint.
        mask_at: returns the mask of a point, packed. It is slow: call it once per point, for any number of rows.
        choose: the sampler: from scores `[n, vocab]` and the numbers of their rows, int64 `[n]`, to ids, int64 `[n]`.
            Call it once, with only the constrained rows; not at all if there are none.
    """
    rows = [row for row, point in enumerate(points) if point is not None]
    if not rows:
        return
    masks = {point: mask_at(point) for point in {points[row] for row in rows}}
    bits = torch.from_numpy(np.stack([masks[points[row]] for row in rows]))
    places = torch.tensor(rows)
    ids[places] = choose(constraints.forbid(logits[places], bits, POWERS), places)


def verify(
    table: Table,
    texts: Sequence[str],
    eos_id: int,
    state: int,
    draft: Sequence[int],
    choose: Callable[[list[int]], list[int]],
) -> tuple[list[int], int | None]:
    """Check a draft in one step of the model; return the tokens that the step gives, and the state after them.

    The draft ends before the first guess that the grammar forbids or that has no text, such as the end of an answer.

    Args:
        texts: of the tokens; `texts[eos_id]` is "".
        state: after the last known token.
        draft: guesses of the next tokens.
        choose: the model and the sampler: from the states before n tokens to these tokens, each allowed in its state.
            The first follows the last known token, the others one guess each. Call it once.

    Returns:
        the tokens that are certain, and the state after the last of them; None if that is `eos_id`.
    """
    states = [state]
    for guess in draft:
        found = table.after(states[-1], texts[guess])
        if found is None or not texts[guess]:
            break
        states.append(found)
    chosen = choose(states)
    count = 1
    while count < len(chosen) and chosen[count - 1] == draft[count - 1]:
        count += 1
    last = chosen[count - 1]
    return chosen[:count], None if last == eos_id else table.after(states[count - 1], texts[last])


FORMS = {"stage": loop.PATTERN, "yes or no": "yes|no", "number": "[1-9][0-9]*"}
ROWS = (*["stage"] * 4, *["number"] * 4, "yes or no", None)


def answers(rows: Sequence[str | None], seed: int, most_tokens: int = 40) -> Iterator[tuple[list[int | None], int]]:
    """Choose tokens at random, all rows together; yield the tokens of each step and how many masks it filled in.

    A row that is done has None. Rows without a constraint end after `most_tokens`, like all rows.
    """
    texts, eos_id = vocabulary()
    tree, generator = tree_of(texts), torch.Generator().manual_seed(seed)
    tables = {form: table_of(pattern, sorted(set("".join(texts)))) for form, pattern in FORMS.items()}
    filled: list[Point] = []

    def mask_at(point: Point) -> np.ndarray:
        filled.append(point)
        return packed(mask_of(tables[point.form], point.state, tree, len(texts), [eos_id]))

    points, running = [form and Point(form, 0) for form in rows], [True] * len(rows)
    for _ in range(most_tokens):
        logits = torch.randn(len(rows), len(texts), generator=generator)
        ids, before = logits.argmax(-1), len(filled)
        on = [point if here else None for point, here in zip(points, running, strict=True)]
        choose_again(logits, ids, on, mask_at, lambda scores, places: scores.argmax(-1))
        yield [token if here else None for token, here in zip(ids.tolist(), running, strict=True)], len(filled) - before
        for row, token in enumerate(ids.tolist()):
            running[row] = running[row] and token != eos_id
            if on[row] and running[row]:
                points[row] = Point(on[row].form, tables[on[row].form].after(on[row].state, texts[token]))


@cache
def vocabulary() -> tuple[tuple[str, ...], int]:
    """The text of each of the tutor's tokens, "" for a special one, and which one ends an answer."""
    tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)
    special = set(tokenizer.all_special_ids)
    return tuple("" if i in special else tokenizer.decode([i]) for i in range(len(tokenizer))), tokenizer.eos_token_id


def main() -> None:
    steps = list(answers(ROWS, seed=0))
    texts, _ = vocabulary()
    for row, form in enumerate(ROWS):
        text = "".join(texts[tokens[row]] for tokens, _ in steps if tokens[row] is not None)
        fits = "" if form is None else "fits" if re.fullmatch(FORMS[form], text) else "cut off"
        print(f"{form or '(free)':10} {fits:8} {text[:60]!r}")
    with_form = sum(tokens[row] is not None for tokens, _ in steps for row, form in enumerate(ROWS) if form)
    print(f"masks filled in: {sum(filled for _, filled in steps)}, for {with_form} tokens of constrained rows")


if __name__ == "__main__":
    main()
