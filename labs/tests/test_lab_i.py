"""Drives lab I. Only the test of the whole engine needs a model."""

from __future__ import annotations

from beyond.speculation import LLM
from beyond.speculation.drafts import HostDrafts
from beyond.speculation.ngram import NgramDrafter
from beyond.speculation.rows import shrink
from beyond.speculation.sequence import Guesses, guessing_sequence
from labs.driving import Compared, numbers
from labs.tests.support import Values, completion_of, some
from stage_a_naive.sampling import SamplingParams
from stage_d_paged.block_manager import BlockManager
from stage_e_batching.step import BatchSequence


def sequence_of(tokens: list[int], max_tokens: int = 500) -> BatchSequence:
    return guessing_sequence(completion_of(tokens, max_tokens))


class TestFind:
    def test_the_latest_earlier_occurrence_is_found(self) -> Values:
        for size in (1, 2, 3):
            for length in range(1, 40):
                tokens = some(length, 1, 3)
                yield (
                    f"n-grams of {size} in {tokens}: where the latest earlier one ends",
                    NgramDrafter(4, size)._find(sequence_of(tokens)),
                )

    def test_tokens_that_come_later_are_entered_too(self) -> Values:
        drafter, sequence = NgramDrafter(4, 2), sequence_of([1])
        for i in range(60):
            if i % 3:  # it is not asked after every token
                yield f"n-grams of 2, asked again and again: {sequence.token_ids}", drafter._find(sequence)
            sequence.token_ids.append(numbers.randint(1, 3))

    def test_a_token_is_entered_once(self) -> Values:
        sequence, drafter = sequence_of(list(range(1000))), NgramDrafter(4, 3)
        drafter._find(sequence)
        index = sequence.guesses.memory
        positions = index.positions = CountingDict(index.positions)
        for token in range(5):
            sequence.token_ids.append(2000 + token)
            drafter._find(sequence)
        yield "n-grams entered for 5 new tokens", Compared(positions.entered, most=5)
        yield "the index of the last call is used again, and no new one made", sequence.guesses.memory is index


class CountingDict(dict):
    entered = 0

    def __setitem__(self, key, value):
        self.entered += 1
        super().__setitem__(key, value)

    def update(self, items):
        for key, value in items.items() if hasattr(items, "items") else items:
            self[key] = value


class FoundAt(NgramDrafter):
    """Finds a given position."""

    at: int | None = None

    def _find(self, sequence):
        return self.at


class TestDraft:
    def test_it_goes_on_as_it_did(self) -> Values:
        cases = [
            ([1, 2, 3, 4, 5, 6, 7, 1, 2], 2, 4),
            ([1, 2, 9, 1, 2], 2, 4),
            ([7, 7, 7], 2, 4),
            ([1, 2, 1, 2, 1], 3, 4),
        ]
        cases += [([1, 2, 3], None, 4)]
        for _ in range(100):
            tokens = some(numbers.randint(2, 12), 1, 9)
            cases.append((tokens, numbers.randint(1, len(tokens) - 1), numbers.randint(1, 8)))
        for tokens, at, count in cases:
            drafter = FoundAt(count, 2)
            drafter.at = at
            sequence = sequence_of(tokens)
            given = f"known are {tokens}, the earlier occurrence goes on at {at}"
            yield f"{given}: up to {count} guesses", drafter.draft(sequence)
            yield f"{given}: the sequence is as it was", sequence.token_ids


class TestCountRight:
    def test_guesses_count_until_one_is_wrong(self) -> Values:
        cases = [
            ([5, 6, 7], sampled) for sampled in ([5, 6, 7, 8], [5, 6, 9, 8], [4, 6, 7, 8], [5, 7, 7, 8], [6, 5, 7, 8])
        ]
        for _ in range(200):
            draft = some(numbers.randint(0, 5), 0, 2)
            cases.append((draft, some(len(draft) + 1, 0, 2)))
        for draft, sampled in cases:
            found = HostDrafts.count_right(None, list(draft), list(sampled))
            yield f"draft {draft}, sampled {sampled}: right are", found


class TestShrink:
    def test_blocks_past_the_certain_tokens_are_free(self) -> Values:
        for computed in (8, 9, 11, 12, numbers.randint(1, 12)):
            manager, sequence = BlockManager(10, 4), sequence_of(list(range(12)))
            assert manager.allocate(sequence, 20)
            table = list(sequence.block_table)
            sequence.num_computed_tokens = computed
            for time in (1, 2):
                shrink(manager, sequence)
                given = f"20 tokens have blocks of 4, {computed} are certain, call {time}"
                yield f"{given}: blocks that stay", [table.index(block) for block in sequence.block_table]
                yield f"{given}: free blocks of 10", manager.num_free
                manager.check_invariants([sequence])

    def test_they_are_handed_out_before_blocks_that_can_be_found(self) -> Values:
        manager = BlockManager(4, 4)
        cached = sequence_of(list(range(100, 108)))
        manager.allocate(cached, 8)
        cached.num_computed_tokens = 8
        manager.index_computed(cached)
        manager.free(cached)
        sequence = sequence_of(list(range(4)))
        manager.allocate(sequence, 8)
        sequence.num_computed_tokens = 4
        shrink(manager, sequence)
        manager.allocate(sequence_of([50]), 1)
        found = manager.count_cached_tokens(sequence_of(list(range(100, 109))))
        yield "a freed block is taken before cached ones: tokens still in the cache", found


class TestSettle:
    def test_the_balance_and_the_pause(self) -> Values:
        cases = [
            [3],
            [4, 4, 4],
            [0],
            [0, 0],
            [0, 0, 0],
            [0, 0, 0, 0],
            [4, 0, 0],
            [4, 0, 0, 0, 0],
            [0, 0, 0, 4],
            [0, 0, 1],
        ]
        for rights in [*cases, *(some(numbers.randint(1, 9), 0, 4) for _ in range(30))]:
            guesses = Guesses()
            for right in rights:
                guesses.settle(right, 10)
            given = f"10 tokens, verifications with {rights} right"
            yield (
                f"{given}: the balance, num_right - COST each, up to MOST_CREDIT, and 0 when a pause begins",
                guesses.balance,
            )
            yield (
                f"{given}: resume_at; the pause doubles with every loss that no credit pays",
                max(guesses.resume_at, 10),
            )
            yield f"{given}: the next pause; a gain of more than COST brings FIRST_PAUSE back", guesses.pause


class TestWholeStage:
    def test_the_tutor_repeats_its_answer_in_few_steps(self) -> Values:
        question = {"role": "user", "content": "What is prefill?"}
        params = SamplingParams(temperature=0.0, max_tokens=60)
        on_the_host = {"speculation": "ngram", "without": "overlap"}  # it guesses and checks
        llm = LLM("tutor", device="cpu", num_kvcache_blocks=64, **on_the_host)
        answer = llm.chat([question], params, False)[0]
        before = llm.engine.counters.num_steps
        again = llm.chat([question, {"role": "assistant", "content": answer["text"]}, question], params, False)[0]
        yield "the answer, and again", [answer["token_ids"], again["token_ids"]]
        yield "steps for the repeated answer", llm.engine.counters.num_steps - before
        llm.close()
