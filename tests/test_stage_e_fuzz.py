"""Whatever arrives, is aborted or fails, every request gets the answer that it would get alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from examples import examples
from fake_model import VOCAB, answer_alone, check_books, make_calls, make_request
from hypothesis import given
from hypothesis import strategies as st

from stage_e_batching.calls import Calls

pytestmark = pytest.mark.fast
PHRASES = [[(3 * i + phrase * 7) % (VOCAB - 1) + 1 for i in range(60)] for phrase in range(3)]


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes, and when it is aborted (in steps)."""

    step: int
    phrase: int  # requests of one phrase share a prefix
    length: int
    tail: int  # what the last token is changed to
    max_tokens: int
    ignore_eos: bool
    abort_after: int | None
    penalty: float

    @property
    def prompt(self) -> list[int]:
        return [*PHRASES[self.phrase][: self.length - 1], self.tail]


def arrivals_of(longest: int, last_step: int) -> st.SearchStrategy[Arrival]:
    """Requests of at most `longest` tokens and as many more that come in one of the first steps."""
    return st.builds(
        Arrival,
        step=st.integers(0, last_step),
        phrase=st.integers(0, len(PHRASES) - 1),
        length=st.integers(1, longest),
        tail=st.integers(1, 4),
        max_tokens=st.integers(1, longest),
        ignore_eos=st.booleans(),
        abort_after=st.none() | st.none() | st.integers(0, 25),
        penalty=st.sampled_from([0.0, 0.0, 0.5]),
    )


arrivals = arrivals_of(40, 30)


@st.composite
def settings_of_engine(draw) -> dict[str, object]:
    block_size = draw(st.sampled_from([1, 2, 4, 5, 16]))
    max_num_seqs = draw(st.integers(1, 12))
    return {
        "block_size": block_size,
        "num_blocks": draw(st.integers(-(-40 // block_size), 120 // block_size)),
        "max_num_seqs": max_num_seqs,
        "max_num_penalty_seqs": draw(st.none() | st.integers(1, max_num_seqs)),
        "max_num_batched_tokens": draw(st.integers(max(40, max_num_seqs), 64) | st.integers(max_num_seqs, 20)),
        "enable_prefix_caching": draw(st.booleans()),
        "max_model_len": draw(st.sampled_from([45, 4096])),
        "fail_at": frozenset(draw(st.lists(st.integers(1, 40), max_size=3))),
    }


def run_and_compare(
    requests: list[Arrival], options: dict[str, object], make: Callable[..., Calls] = make_calls
) -> Calls:
    calls = make(**options)
    scheduler = calls.engine.scheduler
    max_total_len = min(options["max_model_len"], scheduler.capacity + 1)
    expected, outputs, aborts, num_aborted = {}, {}, {}, 0
    coming = sorted(enumerate(requests), key=lambda pair: pair[1].step)
    now = 0
    while coming or calls.has_unfinished():
        while coming and coming[0][1].step <= now:
            index, arrival = coming.pop(0)
            request = make_request(index, arrival.prompt, arrival.max_tokens, arrival.ignore_eos, arrival.penalty)
            request_id = calls.add_request(request, streams=False)
            expected[request_id] = answer_alone(request, max_total_len)
            if arrival.abort_after is not None:
                aborts.setdefault(now + arrival.abort_after, []).append(request_id)
        for request_id in aborts.pop(now, []):
            was_there = calls.knows(request_id)
            assert calls.abort(request_id) == was_there
            assert not calls.abort(request_id)
            if was_there:
                num_aborted += 1
                del expected[request_id]
        try:
            events = calls.step()
        except RuntimeError as error:
            assert str(error) == "the device failed"
            events = []
        for event in events:
            if event.output is not None:
                outputs[event.request_id] = (event.output["token_ids"], event.output["finish_reason"])
                metrics = event.output["metrics"]
                assert metrics["num_cached_tokens"] < metrics["num_prompt_tokens"], "of its own prompt, and not all"
        check_books(calls)
        now += 1
        assert now < 3000, f"no end in sight: {calls.stats()}"
    assert outputs == expected and calls.engine.counters.num_aborted == num_aborted
    assert scheduler.block_manager.num_used == 0
    return calls


@examples(50)
@given(st.lists(arrivals, min_size=1, max_size=20), settings_of_engine())
def test_every_request_gets_the_answer_it_would_get_alone(requests, options):
    run_and_compare(requests, options)


@examples(17)
@given(st.lists(arrivals, min_size=1, max_size=20), settings_of_engine())
def test_answers_do_not_depend_on_chunking(requests, options):
    options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], 40)
    run_and_compare(requests, options | {"enable_chunked_prefill": False})


def test_the_fake_model_notices_a_wrong_block():
    calls = make_calls(num_blocks=20, block_size=2, max_num_seqs=4, max_num_batched_tokens=64)
    request = make_request(0, [5, 6, 7, 8, 9], 20, ignore_eos=True)
    calls.add_request(request, streams=False)
    calls.step()
    [sequence] = calls.engine.scheduler.decoding
    calls.engine.runner.check_input = lambda step: step.num_decodes  # which would notice it first
    sequence.block_table[0], sequence.block_table[1] = sequence.block_table[1], sequence.block_table[0]
    events = []
    while calls.has_unfinished():
        events += calls.step()
    assert events[-1].output["token_ids"] != answer_alone(request, 4096)[0]
