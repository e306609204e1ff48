"""The scheduler's decisions for one step, as a value, and counts over all steps.

The scheduler does not run anything. It returns a `ScheduledStep` that says which sequences run, from which position,
and how many tokens of each. Such a value can be printed, compared in a test, written to a trace and drawn as a
timeline.

The step is kept in columns, one list for each fact, and not as a list of records: with 256 sequences a record for each
would be built and torn down every few milliseconds, and the columns become numpy arrays in one call each.
`for entry in step` gives the records where they are easier to read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from stage_a_naive.contract.outputs import GenerationOutput
from stage_d_paged.sequence import Sequence


class State(Enum):
    """The state of a sequence.

    WAITING -> PREFILLING -> DECODING -> FINISHED; back to WAITING by preemption; to FINISHED from anywhere by abort.
    There are no other moves.
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class BatchSequence(Sequence):
    """A sequence with its position in the queue and its batch slot."""

    request_id: int = -1  # counts up, so it is also the order of arrival
    state: State = State.WAITING
    batch_slot: int = -1  # while it runs: its row of the sampler's and the runner's tables; -1 = none
    num_preemptions: int = 0  # times its blocks were taken away
    highest_computed: int = 0  # most tokens computed before it lost its blocks: tokens below that are computed again
    times_overtaken: int = 0  # later requests that were admitted earlier
    num_in_flight: int = 0  # tokens that were launched and are not known yet

    guesses: Any = None  # what an engine that guesses tokens ahead knows about it
    owner: Any = None  # weak reference to the mailbox of its call
    output: GenerationOutput | None = None  # set when it is complete or has failed
    streams: bool = True  # whether its call reads tokens as they are generated, or only the end
    num_read: int = 0  # tokens that its call has read
    end_was_read: bool = False

    def __len__(self) -> int:
        """Return the number of tokens, including those in flight."""
        return len(self.completion.all_token_ids) + self.num_in_flight

    @property
    def is_new(self) -> bool:
        """Whether nothing of it has ever run, not even before a preemption."""
        return self.highest_computed == 0

    def append(self, token_id: int, logprobs: dict[int, float] | None, now: float) -> bool:
        """Add the next token; returns whether it is the last one, also if decoding its text raised an error."""
        if self.first_token_time == 0.0:
            self.first_token_time = now
        self.completion.append(token_id, logprobs)
        return self.completion.finish_reason is not None

    def end(self, now: float) -> None:
        """Make the output of a request that is complete or has failed, perhaps before its first step."""
        self.first_scheduled_time = self.first_scheduled_time or now
        self.first_token_time = self.first_token_time or now
        self.finish_time = now
        self.output = self.completion.to_output(self.request.arrival_time, *self.times, self.num_cached_tokens)


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step: it runs positions `start` … `start + num_tokens - 1`."""

    sequence: BatchSequence
    start: int
    num_tokens: int
    samples: bool  # whether a token is sampled from the last position's logits


class Preemption(NamedTuple):
    """A preempted sequence, and why it was preempted."""

    sequence: BatchSequence
    num_blocks: int
    num_tokens: int  # computed tokens that were lost
    reason: str


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """One step, stored in columns: entry i of each list belongs to the same sequence. Decodes come first."""

    number: int
    time: float  # when it was scheduled (monotonic clock)
    sequences: list[BatchSequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # position of the first token that runs
    num_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    num_decodes: int = 0  # the first entries, which run one token each: the last one sampled
    admitted: list[BatchSequence] = field(default_factory=list)  # those that were given a batch slot in this step
    grown: list[BatchSequence] = field(default_factory=list)  # those whose block table is longer than before
    preempted: list[Preemption] = field(default_factory=list)
    num_recomputed: int = 0  # tokens of this step that ran before and were lost by preemption
    idle_reason: str = ""  # why nothing runs, if nothing does

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return map(ScheduledSequence, self.sequences, self.starts, self.num_tokens, self.samples)

    @property
    def sampling(self) -> list[BatchSequence]:
        """The sequences that a token is sampled for."""
        if all(self.samples):
            return self.sequences
        return [sequence for sequence, samples in zip(self.sequences, self.samples, strict=True) if samples]

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    def __str__(self) -> str:
        parts = [f"step {self.number}: {len(self)} sequences, {self.total_tokens} tokens"]
        for e in self:
            parts.append(f"{e.sequence.request_id}[{e.start}:{e.start + e.num_tokens}]{'*' if e.samples else ''}")
        parts += [f"preempted {p.sequence.request_id} ({p.reason})" for p in self.preempted]
        return " ".join(parts) + (f" ({self.idle_reason})" if self.idle_reason else "")


@dataclass
class Counters:
    """Totals since the engine was made."""

    num_steps: int = 0
    # Prompt tokens computed (without those from the prefix cache), and one for each return from a preemption: the last
    # sampled token, which runs for the first time then.
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0  # of the requests that were admitted
    num_cached_tokens: int = 0  # how many of these the prefix cache had
    num_recomputed_tokens: int = 0  # tokens computed again after a preemption
    num_preemptions: int = 0
    num_finished: int = 0
    num_aborted: int = 0  # including those that failed

    @property
    def num_run_prefill_tokens(self) -> int:
        """Prefill tokens that ran, whether for the first time or again."""
        return self.num_prefill_tokens + self.num_recomputed_tokens

    def count_step(self, step: ScheduledStep) -> None:
        """Count a step that has run."""
        self.num_steps += len(step) > 0
        self.num_prefill_tokens += step.total_tokens - step.num_decodes - step.num_recomputed
        self.num_recomputed_tokens += step.num_recomputed
        self.num_preemptions += len(step.preempted)

    def count_admitted(self, step: ScheduledStep) -> None:
        """Count the prompts that a step begins; later they may be preempted, and be longer."""
        for sequence in step.admitted:
            if sequence.is_new:
                self.num_prompt_tokens += sequence.num_prompt_tokens
                self.num_cached_tokens += sequence.num_cached_tokens
