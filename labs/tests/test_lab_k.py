"""Judges lab K. Python itself says what random patterns mean. No model is needed but for the whole."""

from __future__ import annotations

import re
from collections import deque
from functools import reduce
from itertools import product

import numpy as np
import pytest
import torch

from beyond import LLM
from beyond.structured import constraints, loop
from labs.mutants import assert_catches
from labs.tests.support import answers_of_transformers, student_random
from labs.variants import masks
from labs.variants.masks import Node, Point, Table
from stage_a_naive.sampling import SamplingParams

STRINGS = ["".join(letters) for length in range(9) for letters in product("ab", repeat=length)]
SHORT = [text for text in STRINGS if len(text) <= 4]
TEXTS = ("n", "no", "y", "yes", "you", "", "o", "es", "e", "s", "nono")  # 5 ends an answer
EOS_ID = 5


def random_pattern(random, size: int) -> str:
    """A pattern over a and b, of which some text of at most four characters is one."""
    if size <= 1:
        return random.choice(["a", "b", "[a-b]"])
    kind, left = random.choice(["then", "either", "many"]), random.randint(1, size - 1)
    if kind == "many":
        return f"({random_pattern(random, size - 1)})*"
    parts = random_pattern(random, left), random_pattern(random, size - left)
    return f"({parts[0]}|{parts[1]})" if kind == "either" else f"{parts[0]}{parts[1]}"


def random_patterns(count: int) -> list[str]:
    random = student_random()
    return [random_pattern(random, random.randint(1, 5)) for _ in range(count)]


def state_of(pattern: str) -> tuple:
    return loop.parse(deque(pattern))


def may_begin(pattern: str) -> set[str]:
    """What texts of a pattern may begin with, up to four characters, by trying all."""
    whole = [text for text in STRINGS if re.fullmatch(pattern, text)]
    return {text[:length] for text in whole for length in range(5)}


class TestAfter:
    @pytest.mark.parametrize(
        ("pattern", "text", "same_as"),
        [
            ("a*b", "a", "a*b"),
            ("(ab)*c", "a", "b(ab)*c"),
            ("no|yes", "y", "es"),
            ("[0-9]x", "7", "x"),
            ("a|ab", "a", "|b"),
        ],
    )
    def test_what_is_still_to_come(self, pattern, text, same_as):
        found, expected = reduce(loop.after, text, state_of(pattern)), state_of(same_as)
        for rest in ("", "b", "ab", "aab", "bab", "babc", "es", "s", "x", "c"):
            ends, right = (loop.may_end(reduce(loop.after, rest, state)) for state in (found, expected))
            assert ends == right, (
                f"{pattern} after {text!r} is {found}; {rest!r} {'ends' if right else 'is no end of'} it"
            )

    def test_random_patterns_are_read_as_python_reads_them(self):
        for pattern in random_patterns(60):
            for text in SHORT:
                state = reduce(loop.after, text, state_of(pattern))
                expected = re.fullmatch(pattern, text) is not None
                assert loop.may_end(state) == expected, f"{text!r} is{'' if expected else ' not'} a text of {pattern}"

    def test_what_no_text_begins_with_is_dead(self):
        for pattern in random_patterns(40):
            begins = may_begin(pattern)
            for text in SHORT:
                state = reduce(loop.after, text, state_of(pattern))
                assert (state != loop.DEAD) == (text in begins), (
                    f"{pattern} after {text!r}: {'a text goes on from here' if text in begins else 'DEAD'} expected, "
                    f"got {state}"
                )
        assert loop.after(loop.DONE, "a") == loop.after(loop.DEAD, "a") == loop.DEAD, "nothing comes behind the end"


class TestTableOf:
    @pytest.mark.parametrize(("pattern", "num_states", "num_ends"), [("no|yes", 5, 1), ("a*b", 2, 1), ("(ab)*", 2, 1)])
    def test_equal_states_have_one_number_and_the_dead_none(self, pattern, num_states, num_ends):
        table = masks.table_of(pattern, "abenosy")
        assert len(table.moves) == num_states, f"{pattern} has {num_states} states, got {len(table.moves)}"
        assert len(table.ends) == num_ends, f"{pattern} may end in {num_ends} of them, got {sorted(table.ends)}"

    def test_random_patterns_are_read_as_python_reads_them(self):
        for pattern in random_patterns(40):
            try:
                table = masks.table_of(pattern, "ab", 60)
            except ValueError:
                continue  # few of them, as the next tests say
            begins = may_begin(pattern)
            for text in SHORT:
                state = table.after(0, text)
                assert (state is not None) == (text in begins), (
                    f"{pattern}: may a text begin with {text!r}? Got {state}"
                )
                ends = state in table.ends
                assert ends == (re.fullmatch(pattern, text) is not None), f"{pattern}: may a text end after {text!r}?"

    def test_every_state_can_be_reached_by_the_given_characters_and_no_other_is_there(self):
        table = masks.table_of("(a|b)*c", "ab")
        reached = {0, *(state for moves in table.moves for state in moves.values())}
        assert reached == set(range(len(table.moves))), f"states 0 to {len(table.moves) - 1}, reached are {reached}"
        assert all(set(moves) <= {"a", "b"} for moves in table.moves), "characters that were not given"

    @pytest.mark.parametrize(("pattern", "size"), [("no|yes", 5), ("a(b|c)(b|c)d", 5), ("abcd", 5)])
    def test_as_many_states_as_there_may_be_are_no_error_and_one_more_is(self, pattern, size):
        assert len(masks.table_of(pattern, "abcdenosy", size).moves) == size
        with pytest.raises(ValueError):  # noqa: PT011 (whose words are the learner's)
            masks.table_of(pattern, "abcdenosy", size - 1)

    def test_a_short_pattern_with_thousands_of_states_is_refused(self):
        with pytest.raises(ValueError):  # noqa: PT011
            masks.table_of("(a|b)*a" + "(a|b)" * 10, "ab", 100)


def words(*ends: str) -> Table:
    """The automaton of some words, made without any exercise."""
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


def random_table(random, num_states: int = 5, chars: str = "nesoy") -> Table:
    moves = [{c: random.randrange(num_states) for c in chars if random.random() < 0.6} for _ in range(num_states)]
    return Table(moves, frozenset(random.sample(range(num_states), 2)))


def tokens(mask: np.ndarray) -> list[str | int]:
    """The tokens of a mask: their texts, or the number where there is no text."""
    return [TEXTS[i] if i < len(TEXTS) and TEXTS[i] else i for i in np.flatnonzero(mask).tolist()]


class NotLookedAt(dict):
    """Children that nobody may look at."""

    def __getattribute__(self, name):
        raise AssertionError("the tree below a character that cannot come is not looked at")

    __iter__ = __getitem__ = __contains__ = __len__ = lambda *given: NotLookedAt.keys


class TestMaskOf:
    @pytest.mark.parametrize(
        ("before", "expected"), [("", ["n", "no", "y", "yes"]), ("n", ["o"]), ("y", ["es", "e"]), ("no", [EOS_ID])]
    )
    def test_all_characters_of_a_token_must_be_able_to_come(self, before, expected):
        table = words("no", "yes")
        mask = masks.mask_of(table, table.after(0, before), masks.tree_of(TEXTS), len(TEXTS), [EOS_ID])
        assert tokens(mask) == expected, f"no|yes after {before!r}: {expected} expected, got {tokens(mask)}"

    def test_random_automata_and_every_token(self):
        random, tree = student_random(), masks.tree_of(TEXTS)
        for _ in range(40):
            table = random_table(random)
            for state in range(len(table.moves)):
                right = [t != "" and table.after(state, t) is not None for t in TEXTS]
                right[EOS_ID] = state in table.ends
                found = masks.mask_of(table, state, tree, len(TEXTS), [EOS_ID])
                assert tokens(found) == tokens(np.array(right)), f"{tokens(np.array(right))} expected in {table}"

    def test_a_text_that_may_end_may_also_go_on(self):
        table = words("no", "nono")
        mask = masks.mask_of(table, table.after(0, "no"), masks.tree_of(TEXTS), len(TEXTS), [EOS_ID])
        assert tokens(mask) == ["n", "no", EOS_ID], f"got {tokens(mask)}"

    def test_a_larger_vocabulary_with_two_ends(self):
        table = words("no")
        for before, expected in (("", ["n", "no"]), ("no", [EOS_ID, 40])):
            mask = masks.mask_of(table, table.after(0, before), masks.tree_of(TEXTS), 70, [EOS_ID, 40])
            assert mask.shape == (70,) and mask.dtype == bool, f"bool [70] expected, got {mask.dtype} {mask.shape}"
            assert tokens(mask) == expected, f"after {before!r}: {expected} expected, got {tokens(mask)}"

    def test_two_tokens_may_have_one_text(self):
        mask = masks.mask_of(words("ab"), 0, masks.tree_of(["a", "b", "a", "", "ab"]), 5, [3])
        assert mask.tolist() == [True, False, True, False, True], f"got {mask.tolist()}"

    def test_nothing_below_a_character_that_cannot_come_is_looked_at(self):
        tree = Node([], {"n": Node([0], {"x": Node([1], NotLookedAt())}), "x": Node([2], NotLookedAt())})
        mask = masks.mask_of(words("no"), 0, tree, 4, [3])
        assert mask.tolist() == [True, False, False, False]


def bits_of(*rows: list[int], words: int) -> torch.Tensor:
    """Bits of masks, `[rows, words]`, of the tokens that may come."""
    bits = np.zeros((len(rows), words), np.uint32)
    for row, ids in enumerate(rows):
        for token_id in ids:
            bits[row, token_id // 32] |= np.uint32(1 << token_id % 32)
    return torch.from_numpy(bits.view(np.int32))


class TestForbid:
    @pytest.mark.parametrize("vocab", [8, 40, 64, 70])
    def test_a_bit_per_token_the_lowest_first(self, vocab):
        random = student_random()
        rows = [sorted(random.sample(range(vocab), random.randint(1, 5))) for _ in range(6)] + [[0], [vocab - 1]]
        logits = torch.randn(len(rows), vocab)
        found = constraints.forbid(logits, bits_of(*rows, words=-(-vocab // 32)), masks.POWERS)
        assert found.shape == logits.shape, f"[rows, vocab] = {list(logits.shape)} expected, got {list(found.shape)}"
        for row, ids in enumerate(rows):
            may = (found[row] > torch.finfo(torch.float32).min).nonzero().flatten().tolist()
            assert may == ids, f"of {vocab} tokens {ids} may come, got {may}"
            assert torch.equal(found[row, ids], logits[row, ids]), "tokens that may come keep their scores"

    def test_token_31_is_the_sign_of_a_word(self):
        found = constraints.forbid(torch.zeros(1, 64), torch.tensor([[-(2**31), 0]], dtype=torch.int32), masks.POWERS)
        assert found.argmax() == 31 and (found == 0).sum() == 1

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_the_lowest_score_is_a_number_and_lower_than_all_others(self, dtype):
        logits = torch.full((1, 32), -60000.0).to(dtype)
        found = constraints.forbid(logits, bits_of([3], words=1), masks.POWERS)
        assert torch.isfinite(found).all(), "kernels subtract the highest score of a part, which may be forbidden whole"
        lowest = torch.finfo(torch.float32 if dtype == torch.float16 else dtype).min
        assert found[0, 0] == lowest and found[0, 3] == -60000.0, f"{dtype}: forbidden is {found[0, 0]}"
        assert found.dtype == (torch.float32 if dtype == torch.float16 else dtype), f"{dtype} became {found.dtype}"

    def test_the_scores_of_the_model_stay(self):
        logits = torch.randn(2, 40)
        before = logits.clone()
        constraints.forbid(logits, bits_of([1], [2], words=2), masks.POWERS)
        assert torch.equal(logits, before), "a new tensor, please: the model's scores are used again"


class Sampler:
    """Notes its calls, and takes the best token of each row; or the `nth` best."""

    def __init__(self, nth: int = 0) -> None:
        self.rows: list[list[int]] = []
        self.nth = nth

    def __call__(self, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert len(scores) == len(rows), f"scores of {len(scores)} rows, and {len(rows)} numbers of rows"
        self.rows.append(torch.as_tensor(rows).tolist())
        return scores.sort(descending=True).indices[:, self.nth]


def chosen_again(points: list, vocab: int = 50, nth: int = 0) -> tuple:
    """Ids before and after, the masks that were filled in, by point, and the sampler's calls."""
    random, sampler, filled = student_random(), Sampler(nth), []
    allowed = {p: np.isin(np.arange(vocab), random.sample(range(vocab), 8)) for p in dict.fromkeys(points) if p}

    def mask_at(point):
        filled.append(point)
        return masks.packed(allowed[point])

    torch.manual_seed(random.randrange(1000))
    logits = torch.randn(len(points), vocab)
    ids, given = logits.argmin(-1), logits.clone()
    before = ids.clone()
    masks.choose_again(logits, ids, points, mask_at, sampler)
    assert torch.equal(logits, given), "the model's scores stay: log-probabilities are made of them"
    expected = before.clone()
    for row, point in enumerate(points):
        if point:
            best = logits[row].masked_fill(torch.from_numpy(~allowed[point]), -torch.inf)
            expected[row] = best.sort(descending=True).indices[nth]
    return before.tolist(), ids.tolist(), expected.tolist(), filled, sampler.rows


A, B, C = Point("stage", 3), Point("number", 3), Point("stage", 4)


class TestChooseAgain:
    @pytest.mark.parametrize("points", [[A, None, A, B], [None, None, C], [A], [B, A, C, None, C, B, A, None]])
    def test_rows_with_a_form_are_chosen_under_their_masks_and_the_others_keep_their_tokens(self, points):
        for nth in (0, 3):
            before, ids, expected, *_ = chosen_again(points, nth=nth)
            for row, point in enumerate(points):
                what = f"is at {point}" if point else "has no form and keeps its token"
                assert ids[row] == expected[row], f"row {row} {what}: {expected[row]} expected, got {ids[row]}"

    def test_a_mask_is_filled_in_once_per_point(self):
        *_, filled, _ = chosen_again([A, None, A, B, A, C, None, B])
        assert sorted(filled) == sorted([A, B, C]), f"three points, and the masks of {filled} were filled in"

    def test_the_sampler_is_called_once_and_knows_the_rows(self):
        *_, rows = chosen_again([None, A, None, B, A])
        assert len(rows) == 1, f"one call expected, got {len(rows)}"
        assert sorted(rows[0]) == [1, 3, 4], f"rows 1, 3 and 4 have a form; the sampler was given {rows[0]}"

    def test_without_a_form_there_is_nothing_to_do(self):
        before, ids, _, filled, rows = chosen_again([None, None])
        assert (ids, filled, rows) == (before, [], []), "no mask, no call of the sampler, and the tokens stay"


class TestVerify:
    def verified(self, table: Table, draft: list[str], chosen: list[str], state: int = 0) -> tuple:
        """What comes of texts: the tokens' texts, the state, and the states that the model ran with."""
        asked: list[list[int]] = []

        def choose(states):
            asked.append(list(states))
            return [TEXTS.index(text) for text in chosen[: len(states)]]

        ids, found = masks.verify(table, TEXTS, EOS_ID, state, [TEXTS.index(text) for text in draft], choose)
        assert len(asked) == 1, f"one step of the model, got {len(asked)}"
        return [TEXTS[token_id] for token_id in ids], found, asked[0]

    def test_tokens_are_certain_up_to_the_first_wrong_guess(self):
        table = words("noyesno", "noyyy", "yesno", "nonono")
        at = table.after
        for draft, chosen, right in (
            (["no", "yes", "no"], ["no", "yes", "no", ""], 4),
            (["no", "yes", "n"], ["no", "y", "n", "o"], 2),
            (["no", "yes"], ["yes", "yes", "n"], 1),
            (["no", "no", "n"], ["no", "n", "n", "o"], 2),
            ([], ["no"], 1),
        ):
            texts, state, _ = self.verified(table, draft, chosen)
            assert texts == chosen[:right], f"draft {draft}, chosen {chosen}: {chosen[:right]} expected, got {texts}"
            expected = None if texts[-1] == "" else at(0, "".join(texts))
            assert state == expected, (
                f"draft {draft}, chosen {chosen}: the state behind {texts} is {expected}, got {state}"
            )

    def test_each_guess_needs_the_state_in_front_of_the_token_behind_it(self):
        table = words("noyesno")
        *_, asked = self.verified(table, ["no", "y", "es"], ["no", "y", "e", "n"])
        assert asked == [0, *(table.after(0, text) for text in ("no", "noy", "noyes"))], f"got {asked}"

    def test_a_guess_that_the_form_forbids_ends_the_draft(self):
        table = words("noyes")
        texts, state, asked = self.verified(table, ["no", "you", "n"], ["no", "yes", "n"])
        assert asked == [0, table.after(0, "no")], f"you cannot come: two states expected, got {asked}"
        assert (texts, state) == (["no", "yes"], table.after(0, "noyes")), f"got {texts}, {state}"

    def test_no_guess_comes_behind_the_end(self):
        table = words("no", "noyes")
        texts, state, asked = self.verified(table, ["no", "", "yes"], ["no", "", "n"])
        assert asked == [0, table.after(0, "no")], f"the end is no guess: two states expected, got {asked}"
        assert (texts, state) == (["no", ""], None), f"an answer that has ended has no state, got {texts}, {state}"

    def test_random_drafts(self):
        random = student_random()
        for _ in range(200):
            table = random_table(random)
            table = Table(table.moves, frozenset(range(len(table.moves))))  # so that something may always come
            draft = [random.choice([text for text in TEXTS if text]) for _ in range(random.randint(0, 4))]
            picks = [random.random() for _ in range(6)]

            def pick(state: int, at: int, table=table, picks=picks, draft=draft) -> str:
                may = [t for t in TEXTS if t == "" or table.after(state, t) is not None]
                guessed = at < len(draft) and draft[at] in may and picks[at] < 0.6
                return draft[at] if guessed else may[int(picks[at] * len(may))]

            states = [0]
            while len(states) <= len(draft) and (found := table.after(states[-1], draft[len(states) - 1])) is not None:
                states.append(found)
            chosen = [pick(state, i) for i, state in enumerate(states)]
            count = next((i + 1 for i, state in enumerate(states[1:]) if chosen[i] != draft[i]), len(states))
            texts, state, asked = self.verified(table, draft, chosen)
            last = None if chosen[count - 1] == "" else table.after(states[count - 1], chosen[count - 1])
            assert (texts, state, asked) == (chosen[:count], last, states), (
                f"draft {draft}, chosen {chosen}, {table}: {chosen[:count]}, {last} and {states} expected, "
                f"got {texts}, {state} and {asked}"
            )


class TestBreakIt:
    def test_your_test_tells_the_broken_engines_from_the_reference(self):
        assert_catches("k")


class TestWholeStage:
    def test_the_tutor_answers_in_a_form_beside_free_requests(self):
        prompts, params, expected = zip(*answers_of_transformers(), strict=True)
        form = SamplingParams(temperature=1.0, seed=3, max_tokens=60, structured_outputs={"regex": loop.PATTERN})
        llm = LLM("tutor", device="cpu", num_kvcache_blocks=64)
        try:
            prompts, params = [*prompts, *prompts], [*params, *[form] * len(prompts)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
        finally:
            llm.close()
        free, formed = outputs[: len(expected)], outputs[len(expected) :]
        assert [output["token_ids"] for output in free] == list(expected), "requests without a form keep their tokens"
        for output in formed:
            assert re.fullmatch(loop.PATTERN, output["text"]), f"{output['text']!r} is not in the form"

    def test_rows_of_all_forms_are_in_their_forms(self, capsys):
        masks.main()
        said = capsys.readouterr().out
        assert said.count(" fits ") == sum(form is not None for form in masks.ROWS), said
