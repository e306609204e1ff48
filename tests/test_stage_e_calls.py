"""Several calls on one engine, from threads and from callbacks; what goes wrong for one request ends that one alone."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from typing import ClassVar

import pytest
import torch
from interrupts import fail_at_token

import stage_d_paged
import stage_e_batching
import stage_f_graph_tp
from stage_a_naive.outputs import Completion, Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.mailbox import Mailbox, unread
from stage_e_batching.step import BatchSequence

PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (3, 33, 17, 9, 50, 21)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEVENTH = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=7)
POOL = {"num_kvcache_blocks": 48, "kvcache_block_size": 4, "max_num_seqs": 4}
SIDE_BY_SIDE = [stage_e_batching, stage_f_graph_tp]


@pytest.fixture(scope="module", params=SIDE_BY_SIDE, ids=lambda stage: stage.__name__)
def llm(request):
    return request.param.LLM("random:qwen2-tiny", device="cpu", **POOL)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    llm = stage_d_paged.LLM("random:qwen2-tiny", device="cpu")
    return [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, False)]


@pytest.fixture(autouse=True)
def nothing_stays_behind(request):
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").engine
        assert not engine.has_unfinished() and engine.stats()["num_used_blocks"] == 0


def ids(outputs: list) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def text_of(llm, token_ids: list[int]) -> str:
    return llm.tokenizer.decode(token_ids, skip_special_tokens=True)


def test_threads_that_generate_stream_and_give_up_are_served_side_by_side(llm, alone):
    texts = [output["text"] for output in llm.generate(PROMPTS, GREEDY, False)]

    def call(i: int) -> None:
        which = i % len(PROMPTS)
        if i % 3 == 0:
            assert ids(llm.generate([PROMPTS[which], PROMPTS[0]], GREEDY, False)) == [alone[which], alone[0]]
        elif i % 3 == 1:
            assert "".join(piece for _, piece in llm.stream([PROMPTS[which]], GREEDY)) == texts[which]
        else:
            stream = llm.stream([PROMPTS[which]] * 2, GREEDY)
            next(stream)
            stream.close()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(call, range(24), timeout=120))


def test_two_threads_may_wake_up_those_that_wait(llm, monkeypatch):
    class Raced(deque):
        """All but the first are taken out by another thread."""

        def popleft(self) -> Mailbox:
            first = super().popleft()
            self.clear()
            return first

    waiting = [llm.engine.new_mailbox() for _ in range(3)]
    monkeypatch.setattr(llm.engine, "_waiting", Raced(waiting))
    llm.engine.settle()
    assert waiting[0].wait(0.0)


def test_what_a_step_brought_is_read_by_one_thread_at_a_time(llm, monkeypatch):
    take, held = Mailbox.take, []
    monkeypatch.setattr(Mailbox, "take", lambda box: held.append(llm.engine._lock._is_owned()) or take(box))
    llm.step()
    assert held == [True]


def test_text_that_another_threads_step_adds_while_it_is_read_is_read_later(llm):
    class Busy(Completion):
        """Gets its next token, from another thread's step, as soon as its text has been looked at."""

        late: ClassVar[list[int]] = []

        def __getattribute__(self, name: str) -> object:
            found = super().__getattribute__(name)
            if name == "text" and self.late:
                self.append(self.late.pop())
            return found

    token_ids = llm.tokenizer.encode("one two three four")
    request = Request(0, [1], SamplingParams(max_tokens=100), seed=0)
    sequence = BatchSequence(Busy(request, llm.tokenizer, frozenset(), 4096), streams=True)
    for token_id in token_ids[:-1]:
        sequence.completion.append(token_id)
    Busy.late.append(token_ids[-1])
    first, second = unread(sequence), unread(sequence)
    assert [len(event.tokens) for event in (first, second)] == [len(token_ids) - 1, 1]
    assert first.text + second.text == "one two three four"


def test_a_short_call_beside_a_long_one_does_not_wait_for_its_end(llm, alone):
    begun, short_ended = threading.Event(), threading.Event()
    pieces: list[str] = []

    def take(index: int, piece: str) -> None:
        pieces.append(piece)
        begun.set()
        if len(pieces) == 40:
            assert short_ended.wait(60), "the short call waits for the long one"

    with ThreadPoolExecutor(1) as threads:
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        running = threads.submit(llm.generate, [PROMPTS[0]], params, False, take)
        assert begun.wait(60)
        assert ids(llm.generate([PROMPTS[2]], GREEDY, False)) == [alone[2]]
        short_ended.set()
        assert running.result(60)[0]["text"] == "".join(pieces) and len(pieces) > 40


def test_a_thread_that_waits_for_anothers_step_is_woken_at_its_end(llm, monkeypatch):
    engine = llm.engine
    monkeypatch.setattr(engine, "longest_wait", 600)  # seconds
    begun, may_end = threading.Event(), threading.Event()

    def slow_step() -> None:
        begun.set()
        assert may_end.wait(60)

    monkeypatch.setattr(engine, "run_step", slow_step)
    waiting = engine.new_mailbox()
    try:
        with ThreadPoolExecutor(2) as threads:
            step = threads.submit(engine.step)
            assert begun.wait(60)
            waiter = threads.submit(engine.advance, waiting)
            while not engine._waiting:
                time.sleep(0.001)
            may_end.set()
            step.result(60)
            done, _ = wait([waiter], timeout=30)
            waiting.ring()  # so that the test ends whatever the engine does
    finally:
        may_end.set()
    assert done, "it would have waited ten minutes"


def test_a_call_that_drives_no_step_still_lets_the_others_through(llm, alone):
    """A stream that nobody reads holds neither the engine nor its lock."""
    stream = llm.stream([PROMPTS[1]], GREEDY)
    pieces = [next(stream)[1]]
    with ThreadPoolExecutor(1) as threads:
        outputs = threads.submit(llm.generate, PROMPTS[:3], GREEDY, False).result(60)
    assert ids(outputs) == alone[:3]
    pieces += [piece for _, piece in stream]
    assert "".join(pieces) == outputs[1]["text"]


def test_an_abort_from_another_thread_is_an_error_of_the_call_that_waits(llm):
    begun, aborted = threading.Event(), threading.Event()

    def wait_for_the_abort(*_: object) -> None:
        begun.set()
        assert aborted.wait(60)

    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(llm.generate, [PROMPTS[0]], GREEDY, False, wait_for_the_abort)
        assert begun.wait(60)
        [sequence] = llm.engine.scheduler.unfinished
        assert llm.engine.abort(sequence.request_id)
        aborted.set()
        with pytest.raises(RuntimeError, match=r"request \d+ was aborted by another call"):
            call.result(60)


def test_a_callback_may_generate_and_a_sampler_is_refused(llm, alone, monkeypatch):
    nested: list[list[int]] = []

    def call_again(index: int, piece: str) -> None:
        if len(nested) < 2:
            nested.extend(ids(llm.generate([PROMPTS[3]], GREEDY, False)))

    assert ids(llm.generate([PROMPTS[2]], GREEDY, False, call_again)) == [alone[2]]
    assert nested == [alone[3]] * 2
    monkeypatch.setattr(llm, "sampling_fn", lambda logits, params: llm.generate([PROMPTS[3]], GREEDY, False))
    with pytest.raises(RuntimeError, match="called from inside one of its own steps"):
        llm.generate([PROMPTS[2]], GREEDY, False)


def test_a_replaced_sampler_belongs_to_the_requests_that_came_while_it_was_set(llm, alone, monkeypatch):
    before = llm.stream([PROMPTS[1]], GREEDY)
    pieces = [next(before)[1]]
    rows: list[int] = []
    monkeypatch.setattr(llm, "sampling_fn", lambda logits, params: rows.append(len(params)) or logits.argmin(-1))
    during = llm.stream([PROMPTS[2]] * 2, GREEDY)
    monkeypatch.setattr(llm, "sampling_fn", None)
    after = llm.generate([PROMPTS[3]], GREEDY, False)
    joined = ["", ""]
    for index, piece in during:
        joined[index] += piece
    pieces += [piece for _, piece in before]
    assert after[0]["token_ids"] == alone[3] and "".join(pieces) == text_of(llm, alone[1])
    assert joined[0] == joined[1] != text_of(llm, alone[2])
    assert max(rows) == 2, "asked for its own rows only"


@pytest.mark.parametrize("fault", ["raises", "outside the vocabulary", "of no integer type"])
def test_a_sampler_that_fails_for_one_request_ends_that_request_alone(llm, alone, monkeypatch, fault):
    def sampler(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        chosen = logits.argmax(-1)
        for row, asked in enumerate(params):
            if asked.seed == 7 and fault == "raises":
                raise LookupError("no token for seed 7")
            if asked.seed == 7:
                chosen[row] = logits.shape[-1]
        bad_type = fault == "of no integer type" and any(asked.seed == 7 for asked in params)
        return chosen.float() if bad_type else chosen

    errors = {"raises": "no token for seed 7", "outside the vocabulary": "4096, outside the vocabulary of 4096"}
    monkeypatch.setattr(llm, "sampling_fn", sampler)
    good = llm.stream([PROMPTS[1]], GREEDY)
    pieces = [next(good)[1]]
    with pytest.raises((LookupError, ValueError), match=errors.get(fault, "must return a tensor of integer ids")):
        llm.generate([PROMPTS[2], PROMPTS[3]], [GREEDY, SEVENTH], False)
    assert "".join(pieces + [piece for _, piece in good]) == text_of(llm, alone[1])


@pytest.mark.parametrize("stage", SIDE_BY_SIDE, ids=lambda stage: stage.__name__)
def test_two_samplers_that_fail_in_one_step_end_their_requests_and_step_tells_of_both(alone, stage):
    llm = stage.LLM("random:qwen2-tiny", device="cpu", **POOL)
    for name in ("one", "two"):

        def sampler(logits: torch.Tensor, params: list[SamplingParams], name: str = name) -> torch.Tensor:
            raise LookupError(f"sampler {name} fails")

        llm.sampling_fn = sampler
        llm.add_request(PROMPTS[2], GREEDY)
    llm.sampling_fn = None
    kept = llm.add_request(PROMPTS[3], GREEDY)
    found, errors = [], []
    while not llm.is_finished():
        try:
            found += llm.step()[0]
        except LookupError as error:
            errors.append(str(error))
    assert errors == ["sampler one fails", "sampler two fails"] and found == [(kept, alone[3])]


def test_an_error_in_one_requests_text_ends_that_request_alone(llm, alone, monkeypatch):
    bad = next(token for token in alone[2][3:] if token not in alone[1] + alone[3])
    fail_at_token(monkeypatch, bad)
    good, failed = llm.stream([PROMPTS[1]], GREEDY), llm.stream([PROMPTS[2]], GREEDY)
    next(failed)
    pieces = [piece for _, piece in good]  # runs the steps of both
    assert "".join(pieces) == text_of(llm, alone[1])
    with pytest.raises(UnicodeError, match="has no text"):
        list(failed)
    assert ids(llm.generate([PROMPTS[3]], GREEDY, False, lambda *_: None)) == [alone[3]]


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_an_error_in_a_callback_ends_its_own_call_alone(llm, alone, error):
    def stop(index: int, piece: str) -> None:
        raise error("stop here")

    good = llm.stream([PROMPTS[1]], GREEDY)
    pieces = [next(good)[1]]
    with pytest.raises(error, match="stop here"):
        llm.generate(PROMPTS[2:4], GREEDY, False, stop)
    pieces += [piece for _, piece in good]
    assert "".join(pieces) == text_of(llm, alone[1])


def test_a_stream_is_refused_at_the_call_not_at_its_first_piece(llm):
    for prompts, params, message in (
        ("", GREEDY, "is empty"),
        ([[4096]], GREEDY, "outside the vocabulary"),
        ([[1], [2]], [GREEDY], "2 prompts but 1"),
        ([[1] * 300], GREEDY, "300 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.stream(prompts, params)


@pytest.mark.parametrize("stage", [stage_d_paged, *SIDE_BY_SIDE], ids=lambda stage: stage.__name__)
def test_requests_are_added_and_stepped_as_in_nano_vllm(alone, stage):
    llm = stage.LLM("random:qwen2-tiny", device="cpu", max_num_batched_tokens=64, **POOL)
    for prompt in PROMPTS[:4]:
        llm.add_request(prompt, GREEDY)
    outputs, rates = {}, []
    while not llm.is_finished():
        finished, num_tokens = llm.step()
        outputs.update(finished)
        rates.append(num_tokens)
    assert [outputs[key] for key in sorted(outputs)] == alone[:4]
    assert sum(n for n in rates if n > 0) == sum(map(len, PROMPTS[:4]))
    assert max(rates) <= 64 and -4 in rates
    first = llm.add_request("hello", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert ids(llm.generate([PROMPTS[4]], GREEDY, False)) == [alone[4]], "beside a request that was added"
    found = []
    while not llm.is_finished():
        found += llm.step()[0]
    assert [key for key, _ in found] == [first] and len(found[0][1]) == 2
    assert llm.step() == ([], 0), "nothing to do"
    llm.exit()
    with pytest.raises(RuntimeError, match="this engine is closed; make a new LLM"):
        llm.add_request("hello", GREEDY)
    with pytest.raises(RuntimeError, match="this engine is closed; make a new LLM"):
        llm.step()


@pytest.mark.parametrize("stage", SIDE_BY_SIDE, ids=lambda stage: stage.__name__)
def test_a_trace_counts_the_blocks_of_the_step_that_it_describes(tmp_path, stage):
    path = tmp_path / "trace.jsonl"
    options = {"num_kvcache_blocks": 40, "kvcache_block_size": 2, "enable_prefix_caching": False, "max_num_seqs": 4}
    llm = stage.LLM("random:qwen2-tiny", device="cpu", trace=str(path), **options)
    llm.generate([[5] * 7, [6] * 4, [7] * 9], GREEDY, False)
    llm.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    decodes = [record for record in records if record["num_decodes"] == len(record["sequences"]) > 0]
    assert len(decodes) > 5
    for record in decodes:
        for entry in record["sequences"]:
            assert entry["blocks"] == -(-(entry["start"] + 1) // 2)
        assert record["used_blocks"] >= sum(entry["blocks"] for entry in record["sequences"])


@pytest.mark.parametrize("stage", SIDE_BY_SIDE, ids=lambda stage: stage.__name__)
def test_a_request_that_was_added_and_aborted_is_no_error_of_the_step_after(alone, stage):
    llm = stage.LLM("random:qwen2-tiny", device="cpu", **POOL)
    aborted, kept = (llm.add_request(prompt, GREEDY) for prompt in PROMPTS[:2])
    llm.step()
    assert llm.engine.abort(aborted)
    found = []
    while not llm.is_finished():
        found += llm.step()[0]
    assert found == [(kept, alone[1])]
