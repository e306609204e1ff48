"""A model for tests of the scheduler: its next token is a hash of everything that it sees through the blocks.

The pool holds, for every slot, the token and position written there. A sequence's next token is a hash of all visible
slots in order, read through its block table: one wrong block, slot, position or order, one stale block in the prefix
cache, one token fed twice, and the text is another. No tensor, no weights. For stage F, the input that the real runner
would send to the device is also built for every step, and compared with the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import accumulate
from types import SimpleNamespace

import numpy as np

from stage_a_naive.contract.outputs import Completion, Request
from stage_a_naive.contract.token_rules import TokenRules
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.calls import Calls
from stage_e_batching.engine import Engine
from stage_e_batching.parts import Sampled
from stage_e_batching.scheduler import MAX_OVERTAKES, Scheduler
from stage_e_batching.step import BatchSequence, ScheduledStep
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.step_input import TokenSource, host_views

VOCAB = 61
EOS = 0
DEFAULT_PARAMS = SamplingParams()


class FakeTokenizer:
    """Enough of a tokenizer for requests that make their text at the end."""

    backend_tokenizer = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: "".join(f"<{i}>" for i in ids),
        id_to_token=lambda token_id: f"<{token_id}>" if token_id < VOCAB else None,
    )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(token_id) for token_id in text.split()]


def completion_of(prompt: Iterable[int], params: SamplingParams = DEFAULT_PARAMS, seed: int = 0) -> Completion:
    """A completion of a prompt, for sequences that no engine makes."""
    rules = TokenRules.of(0, params, FakeTokenizer(), frozenset({EOS}), VOCAB) if params.has_token_rules else None
    request = Request(0, list(prompt), params, seed, token_rules=rules)
    return Completion(request, FakeTokenizer(), frozenset({EOS}), max_total_len=4096, text_at_end=True)


def next_token(visible: list[tuple[int, int]]) -> int:
    """Hash of (token, position) pairs in order."""
    state = 17
    for token, position in visible:
        state = (state * 1_000_003 ^ (token * 8191 + position)) & 0xFFFFFFFF
    return (state >> 7) % VOCAB


def answer_alone(request: Request, max_total_len: int) -> tuple[list[int], str]:
    """What the model answers to a request that runs alone."""
    tokens = list(request.prompt_token_ids)
    limit = min(len(tokens) + request.params.max_tokens, max_total_len)
    while True:
        tokens.append(next_token([(token, i) for i, token in enumerate(tokens)]))
        if tokens[-1] == EOS and not request.params.ignore_eos:
            return tokens[len(request.prompt_token_ids) :], "stop"
        if len(tokens) == limit:
            return tokens[len(request.prompt_token_ids) :], "length"


class LateTokens:
    """A step's tokens, which the host has not seen yet."""

    def __init__(self, sampled: Sampled, fails: bool) -> None:
        self._sampled = sampled
        self._fails = fails
        self.waited = False

    def wait(self) -> Sampled:
        self.waited = True
        if self._fails:
            raise RuntimeError("the device failed")
        return self._sampled


class FakeRunner:
    """Runs scheduled steps on the fake model, like a device whose results are waited for.

    `fail_at`: numbers of steps that raise: half-way through, or, if even, when they are waited for.
    """

    def __init__(self, scheduler: Scheduler, fail_at: frozenset[int] = frozenset()) -> None:
        self.block_size = scheduler.block_manager.block_size
        self.pool: list[tuple[int, int] | None] = [None] * scheduler.capacity
        self.last_tokens = [-1] * scheduler.max_num_seqs  # as on a device: the last sampled token, by row
        self.steps: list[ScheduledStep] = []
        self.num_tokens_run = 0
        self._fail_at = fail_at
        self.launched: list[LateTokens] = []
        self.batch = InputBatch(scheduler.max_num_seqs, scheduler.capacity + 1, self.block_size)

    def launch(self, step: ScheduledStep) -> LateTokens:
        on_device = self.check_input(step)
        number = len(self.steps) + 1
        late = number % 2 == 0 and number in self._fail_at
        if late:
            self._fail_at -= {number}
        self.launched.append(LateTokens(self.compute(step, on_device), late))
        return self.launched[-1]

    def forget(self) -> None:
        for step in self.launched:
            if not step.waited:
                with suppress(RuntimeError):
                    step.wait()

    def compute(self, step: ScheduledStep, on_device: int) -> Sampled:
        """Run a step. The tokens of its first `on_device` entries are those that were sampled last."""
        self.steps.append(step)
        for i, (sequence, start, count, _) in enumerate(step):
            tokens = self.known_tokens(sequence, start, start + count)
            if i < on_device:
                assert tokens in ([], [self.last_tokens[sequence.batch_slot]])
                tokens = [self.last_tokens[sequence.batch_slot]]
            assert len(tokens) == count > 0
            if len(self.steps) in self._fail_at and i == len(step) // 2:
                raise RuntimeError("the device failed")
            for offset, token in enumerate(tokens):
                self.pool[self._slot(sequence, start + offset)] = (token, start + offset)
            self.num_tokens_run += count
        sampled = []
        for sequence, start, count, samples in step:
            if samples:
                token = next_token([self.pool[self._slot(sequence, i)] for i in range(start + count)])
                self.last_tokens[sequence.batch_slot] = token
                sampled.append(token)
        return Sampled(sampled)

    def known_tokens(self, sequence: BatchSequence, start: int, end: int) -> list[int]:
        """The tokens at these positions, as far as the host knows them."""
        return sequence.token_ids[start:end]

    def check_input(self, step: ScheduledStep) -> int:
        """Check that the real runner would send what the step says.

        Returns:
            how many tokens it would not send, because they are on the device.
        """
        self.batch.update(step)
        if not step.sequences:
            return 0
        shape = self.batch.shape_of(step)
        found = host_views(np.full(shape.num_bytes, 99, np.uint8), shape)
        generated = self.batch.fill(step, found)
        entries = list(step)
        on_device = shape.num_decodes if shape.source == TokenSource.DEVICE else 0
        spans = [(e, range(e.start, e.start + e.num_tokens)) for e in entries]
        ends = list(accumulate(step.num_tokens))
        assert found.positions.tolist() == [i for _, span in spans for i in span]
        assert found.slot_mapping.tolist() == [self._slot(e.sequence, i) for e, span in spans for i in span]
        assert found.cu_seqlens_q.tolist() == [0, *ends]
        assert found.context_lens.tolist() == [span.stop for _, span in spans]
        assert found.batch_slots.tolist() == [e.sequence.batch_slot for e in entries]
        for (entry, span), table in zip(spans, found.block_tables.tolist(), strict=True):
            blocks = entry.sequence.block_table[: shape.table_width]
            assert len(blocks) * self.block_size >= span.stop, "all of the context"
            self.check_table(table, blocks)
        known = [self.known_tokens(e.sequence, span.start, span.stop) for e, span in spans[on_device:]]
        assert found.input_ids.tolist() == [0] * on_device + [token for tokens in known for token in tokens]
        sampling = [(e, end) for e, end in zip(entries, ends, strict=True) if e.samples]
        assert found.sample_slots.tolist() == [e.sequence.batch_slot for e, _ in sampling]
        assert found.sample_tokens.tolist() == [end - 1 for _, end in sampling]
        assert generated.tolist() == [e.start + e.num_tokens - e.sequence.num_prompt_tokens for e, _ in sampling]
        return on_device

    def check_table(self, table: list[int], blocks: list[int]) -> None:
        assert table == blocks + [-1] * (len(table) - len(blocks))

    def _slot(self, sequence, position: int) -> int:
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size


class CountedTokens:
    """A step's tokens: every one is a 1."""

    def __init__(self, count: int) -> None:
        self._count = count

    def wait(self) -> Sampled:
        return Sampled([1] * self._count)


class CountingRunner:
    """Takes no time. For tests that count steps and need no right answers."""

    def launch(self, step: ScheduledStep) -> CountedTokens:
        return CountedTokens(sum(step.samples))

    def forget(self) -> None:
        """Nothing is in flight."""


def make_calls(
    *,
    late: bool = False,
    fail_at: frozenset[int] = frozenset(),
    max_model_len: int = 4096,
    runner: CountingRunner | None = None,
    runner_class: type[FakeRunner] = FakeRunner,
    tokenizer: object = None,
    **options: object,
) -> Calls:
    """An engine on the fake model. `late`: it schedules a step before the previous step's tokens are known."""
    scheduler = Scheduler(**options)
    engine = Engine(scheduler, runner or runner_class(scheduler, fail_at), depth=int(late))
    return calls_of(engine, max_model_len, tokenizer or FakeTokenizer())


def calls_of(engine: Engine, max_model_len: int = 4096, tokenizer: object = FakeTokenizer) -> Calls:
    return Calls(engine, tokenizer=tokenizer, eos_token_ids=frozenset({EOS}), max_model_len=max_model_len)


def check_books(calls: Calls) -> None:
    """The engine's counts agree with one another between two steps."""
    calls.settle()
    scheduler = calls.engine.scheduler
    scheduler.block_manager.check_invariants(scheduler.unfinished)
    assert scheduler.num_running <= scheduler.max_num_seqs
    running = [*scheduler.prefilling, *scheduler.decoding]
    assert len({sequence.batch_slot for sequence in running}) == len(running)
    assert all(sequence.times_overtaken <= MAX_OVERTAKES for sequence in scheduler.unfinished)
    assert all(sequence.batch_slot == -1 and not sequence.block_table for sequence in scheduler.waiting)
    assert all(sequence.num_computed_tokens == 0 for sequence in scheduler.waiting)
    for queue in (scheduler.waiting, scheduler.prefilling, scheduler.decoding):
        assert [s.request_id for s in queue] == sorted(s.request_id for s in queue)
    if calls.engine.runner.steps:
        step = calls.engine.runner.steps[-1]
        assert step.total_tokens <= scheduler.max_num_batched_tokens
        assert len(set(step.sequences)) <= scheduler.max_num_seqs
        assert step.sequences or step.idle_reason


def make_request(
    index: int, prompt: list[int], max_tokens: int, ignore_eos: bool = False, penalty: float = 0.0
) -> Request:
    """A request. The fake model has no scores: a penalty changes which batch slots it may have, and no token."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, presence_penalty=penalty)
    return Request(index, prompt, params, seed=index)


def run_all(calls: Calls, limit: int = 10_000) -> dict[int, object]:
    """Step until nothing is left; returns the outputs by request id."""
    outputs = {}
    for _ in range(limit):
        if not calls.has_unfinished():
            return outputs
        for event in calls.step():
            if event.output is not None:
                outputs[event.request_id] = event.output
    raise AssertionError(f"still unfinished after {limit} steps: {calls.stats()}")
