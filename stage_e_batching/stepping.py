"""nano-vllm's way to drive an engine: `add_request`, then `step` until `is_finished`."""

from __future__ import annotations

from collections import deque

from stage_a_naive.contract.outputs import Request
from stage_e_batching.calls import Calls


class Stepping:
    """Run steps for requests that were added one by one, and collect their results.

    Args:
        calls: of the engine.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def add(self, request: Request) -> int:
        """Queue a request; returns its id."""
        return self._calls.add_request(request, streams=False)

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step of all requests that were added: see `LLM.step`."""
        counters, mailbox = self._calls.engine.counters, self._calls.mailbox
        prefilled, decoded = counters.num_run_prefill_tokens, counters.num_generated_tokens
        self._calls.run_step()
        prefilled = counters.num_run_prefill_tokens - prefilled
        num_tokens = prefilled or decoded - counters.num_generated_tokens
        with self._calls.lock:  # all threads that call `step` share this mailbox
            ended = {sequence: sequence.output for sequence in mailbox.news if sequence.output is not None}
            for sequence in ended:
                if sequence.error is not None:
                    mailbox.news = deque(other for other in ended if other is not sequence)
                    raise sequence.error
            finished = [(sequence.request_id, output["token_ids"]) for sequence, output in ended.items()]
            mailbox.news = deque()  # not earlier: if an interrupt ends this call, the next one returns them
            return finished, num_tokens

    def is_finished(self) -> bool:
        """Tell whether `step` has returned every request that was added, or raised its error."""
        return self._calls.is_finished()
