"""nano-vllm's way to drive an engine: `add_request`, then `step` until `is_finished`."""

from __future__ import annotations

from stage_a_naive.contract.outputs import Request
from stage_e_batching.calls import Calls


class Stepping:
    """Steps for requests without a call of their own, and what came of them.

    Args:
        calls: of the engine.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._finished: list[tuple[int, list[int]]] = []  # requests that `step` has not returned yet
        self._errors: list[Exception] = []  # what ended others, and `step` has not raised yet

    def add(self, request: Request) -> int:
        """Queue a request; returns its id."""
        return self._calls.add_request(request, streams=False)

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step of everything that was added: see `LLM.step`."""
        counters = self._calls.engine.counters
        prefilled, decoded = counters.num_run_prefill_tokens, counters.num_generated_tokens
        events = self._calls.step()
        for event in events:
            if event.error is not None:
                self._errors.append(event.error)
            elif event.output is not None:
                self._finished.append((event.request_id, event.output["token_ids"]))
        if self._errors:
            raise self._errors.pop(0)
        finished, self._finished = self._finished, []
        prefilled = counters.num_run_prefill_tokens - prefilled
        return finished, prefilled or decoded - counters.num_generated_tokens

    def is_finished(self) -> bool:
        """Tell whether `step` has returned all requests that were added, or raised what ended them."""
        return not self._finished and not self._errors and self._calls.is_finished()
