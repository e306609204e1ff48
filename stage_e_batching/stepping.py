"""nano-vllm's way to drive an engine: `add_request`, then `step` until `is_finished`."""

from __future__ import annotations

from typing import cast

from stage_a_naive.contract.outputs import Request
from stage_e_batching.calls import Calls
from stage_e_batching.calls.mailbox import Event


class Stepping:
    """Run steps for requests that were added one by one, and collect their results.

    Args:
        calls: of the engine.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._ended: list[Event] = []  # ended requests whose result or error `step` has not handed out

    def add(self, request: Request) -> int:
        """Queue a request; returns its id."""
        return self._calls.add_request(request, streams=False)

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step of all requests that were added: see `LLM.step`."""
        counters = self._calls.engine.counters
        prefilled, decoded = counters.num_run_prefill_tokens, counters.num_generated_tokens
        self._ended += self._calls.step()
        for i, event in enumerate(self._ended):
            if event.error is not None:
                raise cast(Exception, self._ended.pop(i).error)
        prefilled = counters.num_run_prefill_tokens - prefilled
        num_tokens = prefilled or decoded - counters.num_generated_tokens
        finished, self._ended = (
            [(event.request_id, event.output["token_ids"]) for event in self._ended if event.output],
            [],
        )
        return finished, num_tokens

    def is_finished(self) -> bool:
        """Tell whether `step` has returned every request that was added, or raised its error."""
        return not self._ended and self._calls.is_finished()
