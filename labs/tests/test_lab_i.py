"""Judges lab I. No model is needed but for the whole."""

from __future__ import annotations

import pytest

from beyond.speculation import LLM
from beyond.speculation.drafts import HostDrafts
from beyond.speculation.ngram import NgramDrafter
from beyond.speculation.rows import ShrinkingBlockManager
from beyond.speculation.sequence import COST, FIRST_PAUSE, MOST_CREDIT, SpeculativeSequence
from labs.tests.support import completion_of, student_random
from stage_a_naive.sampling import SamplingParams


def sequence_of(tokens: list[int], max_tokens: int = 500) -> SpeculativeSequence:
    return SpeculativeSequence(completion_of(tokens, max_tokens))


def latest(tokens: list[int], size: int) -> int | None:
    """The definition, by looking everywhere."""
    found = [i for i in range(size, len(tokens)) if tokens[i - size : i] == tokens[-size:]]
    return found[-1] if found else None


class TestFind:
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_the_latest_earlier_occurrence_is_found(self, size):
        random = student_random()
        for length in range(1, 40):
            tokens = [random.randint(1, 3) for _ in range(length)]
            found = NgramDrafter(4, size)._find(sequence_of(tokens))
            assert found == latest(tokens, size), f"n-grams of {size} in {tokens}"

    def test_tokens_that_come_later_are_entered_too(self):
        random, drafter = student_random(), NgramDrafter(4, 2)
        sequence = sequence_of([1])
        for i in range(60):
            if i % 3:  # it is not asked after every token
                assert drafter._find(sequence) == latest(sequence.token_ids, 2), str(sequence.token_ids)
            sequence.token_ids.append(random.randint(1, 3))

    def test_a_token_is_entered_once(self):
        sequence, drafter = sequence_of(list(range(1000))), NgramDrafter(4, 3)
        drafter._find(sequence)
        positions = sequence.memory.positions = CountingDict(sequence.memory.positions)
        for token in range(5):
            sequence.token_ids.append(2000 + token)
            drafter._find(sequence)
        assert positions.entered <= 5, f"{positions.entered} n-grams were entered for 5 new tokens"
        assert sequence.memory.positions is positions, "the index of the last call is used again, and no new one made"


class CountingDict(dict):
    entered = 0

    def __setitem__(self, key, value):
        self.entered += 1
        super().__setitem__(key, value)

    def update(self, items):
        for key, value in items.items() if hasattr(items, "items") else items:
            self[key] = value


class FoundAt(NgramDrafter):
    """Finds what it is told to."""

    at: int | None = None

    def _find(self, sequence):
        return self.at


class TestDraft:
    @pytest.mark.parametrize(
        ("tokens", "at", "expected"),
        [
            ([1, 2, 3, 4, 5, 6, 7, 1, 2], 2, [3, 4, 5, 6]),
            ([1, 2, 9, 1, 2], 2, [9, 1, 2, 9]),
            ([7, 7, 7], 2, [7, 7, 7, 7]),
            ([1, 2, 1, 2, 1], 3, [2, 1, 2, 1]),
            ([1, 2, 3], None, []),
        ],
    )
    def test_it_goes_on_as_it_did(self, tokens, at, expected):
        drafter = FoundAt(4, 2)
        drafter.at = at
        sequence = sequence_of(tokens)
        assert drafter.draft(sequence) == expected, f"known are {tokens}, the earlier occurrence goes on at {at}"
        assert sequence.token_ids == tokens, "the sequence is as it was"


class TestCountRight:
    @pytest.mark.parametrize(
        ("draft", "sampled", "right"),
        [
            ([5, 6, 7], [5, 6, 7, 8], 3),
            ([5, 6, 7], [5, 6, 9, 8], 2),
            ([5, 6, 7], [4, 6, 7, 8], 0),
            ([5, 6, 7], [5, 7, 7, 8], 1),
            ([5, 6, 7], [6, 5, 7, 8], 0),
            ([], [3], 0),
        ],
    )
    def test_guesses_count_until_one_is_wrong(self, draft, sampled, right):
        found = HostDrafts.count_right(None, list(draft), list(sampled))
        assert found == right, f"draft {draft}, sampled {sampled}: {right} are right, got {found}"


class TestShrink:
    @pytest.mark.parametrize("computed", [8, 9, 11, 12])
    def test_blocks_past_the_certain_tokens_are_free(self, computed):
        manager = ShrinkingBlockManager(10, 4)
        sequence = sequence_of(list(range(12)))
        assert manager.allocate(sequence, 20)
        table = list(sequence.block_table)
        sequence.num_computed_tokens = computed
        manager.shrink(sequence)
        kept = -(-computed // 4)
        assert sequence.block_table == table[:kept], f"{computed} tokens at 4 a block need {kept} blocks"
        assert manager.num_free == 10 - kept, f"of 10 blocks, {kept} stay with the sequence"
        manager.check_invariants([sequence])
        manager.shrink(sequence)
        assert sequence.block_table == table[:kept], "a second call does nothing"

    def test_they_are_handed_out_before_blocks_that_can_be_found(self):
        manager = ShrinkingBlockManager(4, 4)
        cached = sequence_of(list(range(100, 108)))
        manager.allocate(cached, 8)
        cached.num_computed_tokens = 8
        manager.index_computed(cached)
        manager.free(cached)
        sequence = sequence_of(list(range(4)))
        manager.allocate(sequence, 8)
        sequence.num_computed_tokens = 4
        manager.shrink(sequence)
        manager.allocate(sequence_of([50]), 1)
        assert manager.count_cached_tokens(sequence_of(list(range(100, 109)))) == 8, "the cached blocks are still there"


class TestSettle:
    def settled(self, *rights: int) -> SpeculativeSequence:
        sequence = sequence_of(list(range(10)))
        for right in rights:
            sequence.settle(right)
        return sequence

    def test_a_gain_is_credit_up_to_a_limit(self):
        assert self.settled(3).balance == 3 - COST, "a verification adds num_right - COST"
        assert self.settled(4, 4, 4).balance == MOST_CREDIT, "the balance never passes MOST_CREDIT"
        assert self.settled(3).resume_at <= 10, "no pause"

    def test_every_loss_doubles_the_pause(self):
        for losses in range(1, 5):
            sequence = self.settled(*[0] * losses)
            assert sequence.resume_at == 10 + FIRST_PAUSE * 2 ** (losses - 1), f"after {losses} losses"
            assert sequence.balance == 0, f"after {losses} losses: a pause begins with a balance of 0"

    def test_credit_lasts_for_some_losses(self):
        assert self.settled(4, 0, 0).resume_at <= 10, "a gain of 3 lasts for two losses: no pause"
        assert self.settled(4, 0, 0, 0, 0).resume_at == 10 + FIRST_PAUSE, "a gain of 3 does not last for four losses"

    def test_a_gain_brings_the_shortest_pause_back(self):
        assert self.settled(0, 0, 0, 4).pause == FIRST_PAUSE, "a gain of more than COST brings FIRST_PAUSE back"
        assert self.settled(0, 0, 1).pause == 4 * FIRST_PAUSE, "what gained no more than it cost does not"


class TestWholeStage:
    def test_the_tutor_repeats_its_answer_in_few_steps(self):
        question = {"role": "user", "content": "What is prefill?"}
        params = SamplingParams(temperature=0.0, max_tokens=60)
        on_the_host = {"speculation": "ngram", "without": "overlap"}  # it guesses and checks
        llm = LLM("tutor", device="cpu", num_kvcache_blocks=64, **on_the_host)
        answer = llm.chat([question], params, False)[0]
        before = llm.engine.counters.num_steps
        again = llm.chat([question, {"role": "assistant", "content": answer["text"]}, question], params, False)[0]
        assert again["token_ids"] == answer["token_ids"]
        assert llm.engine.counters.num_steps - before < len(answer["token_ids"]) // 2
        llm.close()
