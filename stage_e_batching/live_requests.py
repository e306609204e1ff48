"""The requests of one engine: how they are aborted, and how they survive a step that breaks off.

Requests may come and go between any two steps, from any thread: one lock is held during a step and during a change of
the queues. A step may break off anywhere, by an error of the device or by Ctrl-C between any two lines, and so may the
change of a queue; a second Ctrl-C may come while the first is dealt with. So nothing depends on what is done on the way
out. A flag says that a change has begun and not ended; whoever takes the lock next and finds it set starts again from
what is certain: the tokens of each request. That costs recomputation and nothing else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from stage_e_batching.mailbox import Mailbox, Owner
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence


@dataclass
class Counters:
    """Totals since the engine was made."""

    num_steps: int = 0
    # Prompt tokens computed (those out of the prefix cache are not), and one for each return from a preemption: the
    # token that was sampled last before it, which runs for the first time then.
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0  # of the requests that were admitted
    num_cached_tokens: int = 0  # of these, those that the prefix cache had
    num_recomputed_tokens: int = 0  # tokens computed again after a preemption
    num_preemptions: int = 0
    num_finished: int = 0
    num_aborted: int = 0  # those that failed are among them

    @property
    def num_run_prefill_tokens(self) -> int:
        """Those computed for the first time and those computed again."""
        return self.num_prefill_tokens + self.num_recomputed_tokens


class LiveRequests:
    """What waits and runs in an engine. `Engine` adds the steps.

    Args:
        scheduler: holds the requests.
        tokenizer, eos_token_ids: to make text and to see its end.
        max_model_len: prompt and answer together are at most this long.
        trace: what notes every step, as a `Trace` does; None notes nothing.
    """

    sequence_class = BatchSequence
    # The engine's own methods.
    _begin: Callable[[], None]
    _tell: Callable[[BatchSequence], None]
    _remove: Callable[[BatchSequence], None]

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        tokenizer: PreTrainedTokenizerFast,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        trace: Any = None,
    ) -> None:
        self.scheduler = scheduler
        self.trace = trace
        self.counters = Counters()
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        # The last token generated takes no slot, so the pool may be outgrown by one. Past that a request ends with
        # "length", alone or in a batch: never because of what else happens to run.
        self._max_total_len = min(max_model_len, scheduler.capacity + 1)
        self._lock = threading.RLock()
        self._midway = False  # a step or a change of the queues has begun and not ended
        self._uncertain: BatchSequence | None = None  # it is being given a token
        self._gone: deque[Owner] = deque()  # their mailboxes have ceased to exist
        self._aborted: deque[int] = deque()  # requests to drop
        self._waiting: deque[Mailbox] = deque()  # of threads that wait for the end of another's step
        self._mailbox = Mailbox(self._gone)  # of requests that bring none

    def abort(self, request_id: int) -> bool:
        """Drop a request wherever it is, and free its blocks. False if it was already gone.

        A call that still waits for the request gets an error. From inside a step, the request goes after the step.
        """
        known = self.knows(request_id)
        if known:
            self._aborted.append(request_id)
            self.settle()
        return known

    def knows(self, request_id: int) -> bool:
        """Tell whether a request still waits or runs."""
        return self.scheduler.find(request_id) is not None

    def has_unfinished(self) -> bool:
        """Tell whether any request waits or runs."""
        self.settle()
        return self.scheduler.has_unfinished()

    def settle(self) -> None:
        """Do what is due between two steps. Inside a step it does nothing: the next thread to take the lock does it."""
        self._wake_up()
        if (self._midway or self._gone or self._aborted) and not self._inside_step:
            with self._lock:
                self._begin()
                self._midway = False

    @property
    def _inside_step(self) -> bool:
        """Whether this thread holds the lock: in a `sampling_fn`, a signal handler, or where garbage is collected."""
        return self._lock._is_owned()  # pyright: ignore[reportAttributeAccessIssue] (an RLock has it since Python 2)

    def _wake_up(self) -> None:
        """Wake the threads that wait for the end of a step."""
        with suppress(IndexError):  # another thread may be waking them up too
            for _ in range(len(self._waiting)):
                self._waiting.popleft().ring()

    # ---- under the lock: all of this may break off, and is done again then ---------------------------------------

    def _catch_up(self) -> None:
        """Recover if the change before broke off, and drop the requests that are to go."""
        if self._midway:
            self._recover()
        self._midway = True
        while self._gone:
            for sequence in list(self._gone[0].unfinished):
                self._remove(sequence)
            self._gone.popleft()
        while self._aborted:
            sequence = self.scheduler.find(self._aborted[0])
            if sequence is not None:
                if sequence.owner is not self._mailbox.owner:
                    sequence.error = RuntimeError(f"request {sequence.request_id} was aborted by another call")
                self._remove(sequence)
            self._aborted.popleft()

    def _recover(self) -> None:
        """Start again from the tokens of each request."""
        if self._uncertain is not None:
            self._replay(self._uncertain)
            self._uncertain = None
        self.scheduler.recover()
        if self.trace:
            self.trace.forget()
        for sequence in self.scheduler.unfinished:
            if sequence.error is not None or sequence.is_finished:
                self._remove(sequence)
            else:
                self._tell(sequence)
        self._mailbox.owner.unfinished.intersection_update(self.scheduler.unfinished)

    def _replay(self, sequence: BatchSequence) -> None:
        """Make a request's text anew from its tokens. What raises again is the request's own error, and its end."""
        try:
            sequence.completion = sequence.completion.replayed()
        except Exception as error:
            sequence.error = error
