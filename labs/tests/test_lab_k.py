"""Drives lab K. Only the test of the whole engine needs a model."""

from __future__ import annotations

import contextlib
import io
import re
from collections import deque
from functools import reduce
from itertools import product

import numpy as np
import torch

from beyond import LLM
from beyond.structured import constraints, loop
from labs.driving import error_of, numbers
from labs.tests.support import Values, questions
from labs.variants import masks
from labs.variants.masks import Node, Point, Table
from stage_a_naive.sampling import SamplingParams

SHORT = ["".join(letters) for length in range(5) for letters in product("ab", repeat=length)]
TEXTS = ("n", "no", "y", "yes", "you", "", "o", "es", "e", "s", "nono")  # 5 ends an answer
EOS_ID = 5


def random_pattern(size: int) -> str:
    """A pattern over a and b that matches some text of at most four characters."""
    if size <= 1:
        return numbers.choice(["a", "b", "[a-b]"])
    kind, left = numbers.choice(["then", "either", "many"]), numbers.randint(1, size - 1)
    if kind == "many":
        return f"({random_pattern(size - 1)})*"
    parts = random_pattern(left), random_pattern(size - left)
    return f"({parts[0]}|{parts[1]})" if kind == "either" else f"{parts[0]}{parts[1]}"


def random_patterns(count: int) -> list[str]:
    return [random_pattern(numbers.randint(1, 5)) for _ in range(count)]


def state_of(pattern: str) -> tuple:
    return loop.parse(deque(pattern))


class TestAfter:
    def test_what_is_still_to_come(self) -> Values:
        cases = [("a*b", "a"), ("(ab)*c", "a"), ("no|yes", "y"), ("[0-9]x", "7"), ("a|ab", "a")]
        for pattern, text in cases:
            state = reduce(loop.after, text, state_of(pattern))
            rests = ("", "b", "ab", "aab", "bab", "babc", "es", "s", "x", "c")
            yield (
                f"{pattern} after {text!r}: what ends it",
                [rest for rest in rests if loop.may_end(reduce(loop.after, rest, state))],
            )

    def test_random_patterns(self) -> Values:
        for pattern in random_patterns(60) + [random_pattern(numbers.randint(6, 9)) for _ in range(10)]:
            states = {text: reduce(loop.after, text, state_of(pattern)) for text in SHORT}
            yield f"texts of {pattern}", [text for text, state in states.items() if loop.may_end(state)]
            yield (
                f"{pattern}: beginnings of its texts, with which it is not DEAD",
                [text for text, state in states.items() if state != loop.DEAD],
            )
        ends = [loop.after(state, "a") == loop.DEAD for state in (loop.DONE, loop.DEAD)]
        yield "nothing comes behind the end: DONE and DEAD are DEAD after another character", ends


class TestTableOf:
    def test_equal_states_have_one_number_and_the_dead_none(self) -> Values:
        for pattern in ("no|yes", "a*b", "(ab)*"):
            table = masks.table_of(pattern, "abenosy")
            yield f"{pattern}: states, and how many of them end it", [len(table.moves), len(table.ends)]

    def test_random_patterns(self) -> Values:
        for pattern in random_patterns(40):
            found: list[Table] = []
            error = error_of(lambda p=pattern, found=found: found.append(masks.table_of(p, "ab", 60)), ValueError)
            yield f"{pattern}, at most 60 states: raises", error
            for table in found:
                states = {text: table.after(0, text) for text in SHORT}
                yield f"{pattern}: beginnings of its texts", [text for text, s in states.items() if s is not None]
                yield f"{pattern}: its texts", [text for text, state in states.items() if state in table.ends]

    def test_every_state_can_be_reached_by_the_given_characters_and_no_other_is_there(self) -> Values:
        table = masks.table_of("(a|b)*c", "ab")
        reached = {0, *(state for moves in table.moves for state in moves.values())}
        yield "(a|b)*c over a and b: states, and those that are reached", [len(table.moves), len(reached)]
        yield "characters of the moves", {char for moves in table.moves for char in moves}

    def test_as_many_states_as_there_may_be_are_no_error_and_one_more_is(self) -> Values:
        for pattern, size in (("no|yes", 5), ("a(b|c)(b|c)d", 5), ("abcd", 5)):
            yield f"{pattern}, at most {size} states", len(masks.table_of(pattern, "abcdenosy", size).moves)
            yield (
                f"{pattern}, at most {size - 1} states: raises",
                error_of(lambda pattern=pattern, size=size: masks.table_of(pattern, "abcdenosy", size - 1), ValueError),
            )
        long = "(a|b)*a" + "(a|b)" * 10
        yield (
            f"{long}, with thousands of states, at most 100: raises",
            error_of(lambda: masks.table_of(long, "ab", 100), ValueError),
        )


def words(*ends: str) -> Table:
    """The automaton of some words, made without the exercises."""
    moves, ending = [{}], set()
    for word in ends:
        state = 0
        for char in word:
            if char not in moves[state]:
                moves.append({})
                moves[state][char] = len(moves) - 1
            state = moves[state][char]
        ending.add(state)
    return Table(moves, frozenset(ending))


def random_table(num_states: int = 5, chars: str = "nesoy") -> Table:
    moves = [{c: numbers.randrange(num_states) for c in chars if numbers.random() < 0.6} for _ in range(num_states)]
    return Table(moves, frozenset(numbers.sample(range(num_states), 2)))


def tokens(mask: np.ndarray) -> list[str | int]:
    """Return the tokens of a mask: their texts, or their numbers where there is no text."""
    return [TEXTS[i] if i < len(TEXTS) and TEXTS[i] else i for i in np.flatnonzero(mask).tolist()]


class NotLookedAt(dict):
    """Children that must not be visited."""

    def __getattribute__(self, name):
        raise AssertionError("the tree below a character that cannot come is not looked at")

    __iter__ = __getitem__ = __contains__ = __len__ = lambda *given: NotLookedAt.keys


class TestMaskOf:
    def test_all_characters_of_a_token_must_be_able_to_come(self) -> Values:
        for table, name, befores in (
            (words("no", "yes"), "no|yes", ["", "n", "y", "no"]),
            (words("no", "nono"), "no|nono", ["no"]),
        ):
            for before in befores:
                mask = masks.mask_of(table, table.after(0, before), masks.tree_of(TEXTS), len(TEXTS), [EOS_ID])
                yield f"{name} after {before!r}", tokens(mask)

    def test_random_automata_and_every_token(self) -> Values:
        for _ in range(30):
            texts = ["".join(numbers.choices("nesoy", k=numbers.randint(0, 4))) for _ in range(40)]
            table, eos_ids = random_table(), numbers.sample(range(40, 50), 2)
            for state in range(len(table.moves)):
                found = masks.mask_of(table, state, masks.tree_of(texts), 50, eos_ids)
                yield f"{texts}, ends {eos_ids}, {table}, state {state}: tokens allowed", np.flatnonzero(found)
        table = random_table()
        yield "bool [vocab]", masks.mask_of(table, 0, masks.tree_of(TEXTS), 70, [EOS_ID, 40])

    def test_two_tokens_may_have_one_text(self) -> Values:
        yield (
            "tokens a, b, a, none, ab; the text is ab",
            masks.mask_of(words("ab"), 0, masks.tree_of(["a", "b", "a", "", "ab"]), 5, [3]),
        )

    def test_nothing_below_a_character_that_cannot_come_is_looked_at(self) -> Values:
        tree = Node([], {"n": Node([0], {"x": Node([1], NotLookedAt())}), "x": Node([2], NotLookedAt())})
        yield "no, where tokens begin with n, nx and x", masks.mask_of(words("no"), 0, tree, 4, [3])


def bits_of(*rows: list[int], words: int) -> torch.Tensor:
    """Bits of masks, `[rows, words]`, of the tokens that may come."""
    bits = np.zeros((len(rows), words), np.uint32)
    for row, ids in enumerate(rows):
        for token_id in ids:
            bits[row, token_id // 32] |= np.uint32(1 << token_id % 32)
    return torch.from_numpy(bits.view(np.int32))


class TestForbid:
    def test_a_bit_per_token_the_lowest_first(self) -> Values:
        for vocab in (8, 40, 64, 70):
            rows = [sorted(numbers.sample(range(vocab), numbers.randint(1, 5))) for _ in range(6)] + [[0], [vocab - 1]]
            logits = torch.randn(len(rows), vocab)
            before = logits.clone()
            found = constraints.forbid(logits, bits_of(*rows, words=-(-vocab // 32)), masks.POWERS)
            yield f"{vocab} tokens, of which {rows} may come and keep their scores", found
            yield "a new tensor, please: scores of the model that were changed", int((logits != before).sum())

    def test_token_31_is_the_sign_of_a_word(self) -> Values:
        bits = torch.tensor([[-(2**31), 0]], dtype=torch.int32)
        yield "token 31 alone may come", constraints.forbid(torch.zeros(1, 64), bits, masks.POWERS)

    def test_the_lowest_score_is_a_number_and_lower_than_all_others(self) -> Values:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            logits = torch.full((1, 32), -60000.0).to(dtype)
            found = constraints.forbid(logits, bits_of([3], words=1), masks.POWERS)
            yield (
                f"scores of -60000 in {dtype}, token 3 may come: the lowest is finite, and a number of the dtype",
                found,
            )


class Sampler:
    """Notes its calls, and takes the best token of each row; or the `nth` best."""

    def __init__(self, nth: int = 0) -> None:
        self.rows: list[list[int]] = []
        self.nth = nth

    def __call__(self, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert len(scores) == len(rows), f"scores of {len(scores)} rows, and {len(rows)} numbers of rows"
        self.rows.append(torch.as_tensor(rows).tolist())
        return scores.sort(descending=True).indices[:, self.nth]


A, B, C = Point("stage", 3), Point("number", 3), Point("stage", 4)


class TestChooseAgain:
    def test_rows_with_a_form_are_chosen_under_their_masks_and_the_others_keep_their_tokens(self) -> Values:
        vocab = 50
        cases = (
            [A, None, A, B],
            [None, None, C],
            [A],
            [B, A, C, None, C, B, A, None],
            [None, None],
            [A, B, A, C, None, B],
        )
        for points in (*cases, numbers.choices([A, B, C, None], k=8)):
            for nth in (0, 3):
                sampler, filled = Sampler(nth), []
                allowed = {p: np.isin(np.arange(vocab), numbers.sample(range(vocab), 8)) for p in (A, B, C)}

                def mask_at(point: Point, filled=filled, allowed=allowed) -> np.ndarray:
                    filled.append(point)
                    return masks.packed(allowed[point])

                logits = torch.randn(len(points), vocab)
                ids, before = logits.argmin(-1), logits.clone()
                masks.choose_again(logits, ids, points, mask_at, sampler)
                given = f"rows at {[point and (point.form, point.state) for point in points]}"
                yield f"{given}: tokens; a row without a grammar keeps its own", ids
                yield f"{given}: masks filled in, one per point", sorted(map(str, filled))
                yield (
                    f"{given}: calls of the sampler, once, with the numbers of the rows",
                    [sorted(r) for r in sampler.rows],
                )
                yield f"{given}: the model's scores that were changed", int((logits != before).sum())


class TestVerify:
    def verified(self, given: str, table: Table, draft: list[str], chosen: list[str], state: int = 0) -> Values:
        asked: list[list[int]] = []

        def choose(states):
            asked.append(list(states))
            return [TEXTS.index(text) for text in chosen[: len(states)]]

        ids, found = masks.verify(table, TEXTS, EOS_ID, state, [TEXTS.index(text) for text in draft], choose)
        given = f"{given}, draft {draft}, chosen {chosen}"
        yield f"{given}: the states that the model ran with, in one step", asked
        yield f"{given}: tokens that are certain", [TEXTS[token_id] for token_id in ids]
        yield f"{given}: the state behind them; None behind the end", found

    def test_tokens_are_certain_up_to_the_first_wrong_guess(self) -> Values:
        ends = "noyesno", "noyyy", "yesno", "nonono"
        for draft, chosen in (
            (["no", "yes", "no"], ["no", "yes", "no", ""]),
            (["no", "yes", "n"], ["no", "y", "n", "o"]),
            (["no", "yes"], ["yes", "yes", "n"]),
            (["no", "no", "n"], ["no", "n", "n", "o"]),
            ([], ["no"]),
        ):
            yield from self.verified(f"texts {ends}", words(*ends), draft, chosen)

    def test_each_guess_needs_the_state_in_front_of_the_token_behind_it(self) -> Values:
        yield from self.verified("the text noyesno", words("noyesno"), ["no", "y", "es"], ["no", "y", "e", "n"])

    def test_a_guess_that_the_form_forbids_ends_the_draft(self) -> Values:
        yield from self.verified("the text noyes", words("noyes"), ["no", "you", "n"], ["no", "yes", "n"])

    def test_no_guess_comes_behind_the_end(self) -> Values:
        yield from self.verified("texts no and noyes", words("no", "noyes"), ["no", "", "yes"], ["no", "", "n"])

    def test_random_drafts(self) -> Values:
        for _ in range(200):
            table = random_table()
            table = Table(table.moves, frozenset(range(len(table.moves))))  # so that some token is always allowed
            draft = [numbers.choice([text for text in TEXTS if text]) for _ in range(numbers.randint(0, 4))]
            states = [0]
            while len(states) <= len(draft) and (found := table.after(states[-1], draft[len(states) - 1])) is not None:
                states.append(found)
            chosen = []
            for i, state in enumerate(states):
                may = [t for t in TEXTS if t == "" or table.after(state, t) is not None]
                guessed = i < len(draft) and draft[i] in may and numbers.random() < 0.6
                chosen.append(draft[i] if guessed else numbers.choice(may))
            yield from self.verified(f"{table}", table, draft, chosen)


class TestWholeStage:
    def test_the_tutor_answers_in_a_form_beside_free_requests(self) -> Values:
        prompts, params = questions()
        seed = numbers.randrange(1000)
        form = SamplingParams(temperature=1.0, seed=seed, max_tokens=60, structured_outputs={"regex": loop.PATTERN})
        llm = LLM("tutor", device="cpu", num_kvcache_blocks=64)
        try:
            outputs = llm.generate([*prompts, *prompts], [*params, *[form] * len(prompts)], use_tqdm=False)
        finally:
            llm.close()
        for number, output in enumerate(outputs):
            yield f"request {number}, {'free' if number < len(prompts) else 'constrained'}: tokens", output["token_ids"]
            if number >= len(prompts):
                fits = re.fullmatch(loop.PATTERN, output["text"]) is not None
                yield f"{output['text']!r} matches the pattern", fits

    def test_rows_of_all_forms_are_in_their_forms(self) -> Values:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            masks.main()
        yield "rows that match their pattern", said.getvalue().count(" fits ")
