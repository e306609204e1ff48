"""Continuous batching behind the same `generate` and `chat` as before, and `stream`.

    prompts -> token ids -> queue -> [schedule -> run -> postprocess] -> text

Stage D prefilled a batch, decoded it to the end of its longest answer, and only then admitted other requests. Here the
engine decides before every step what runs: a finished answer frees its batch slot at once, and a new prompt shares its
steps with the decodes of other requests.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from os import PathLike
from typing import Any

import torch

from stage_a_naive.contract.logprobs import PromptLogprobs
from stage_a_naive.contract.outputs import GenerationOutput, OnText, Request, returned
from stage_a_naive.contract.requests import only_answer
from stage_a_naive.entrypoints.frontend import Frontend, Prompts
from stage_a_naive.entrypoints.progress import progress_bar
from stage_a_naive.sampling import SamplingParams
from stage_d_paged.runtime import Runtime, choose_num_blocks, load_runtime
from stage_d_paged.scoring import check_can_score
from stage_e_batching.calls import Calls, Event
from stage_e_batching.engine import Engine
from stage_e_batching.options import BatchingOptions
from stage_e_batching.rates import Rates
from stage_e_batching.runner import ModelRunner
from stage_e_batching.sampler import Constraints, Sampler
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.scoring import score_prompts
from stage_e_batching.stepping import Stepping
from stage_e_batching.trace import Trace


class LLM(Frontend):
    """The model of stage D behind an engine that batches continuously.

    Args:
        model: `tutor`, a directory, a hub id, or `random:<preset>`.
        device, dtype, seed: as in stage A.
        options: see `BatchingOptions`; passed by name.

    Raises:
        ModelError: the model cannot be loaded or is not supported.
        TypeError: an option is unknown.
        ValueError: an option is out of range.
        MemoryError: there is no room for one block of KV cache.
        OSError: the trace file cannot be written.
    """

    options_class = BatchingOptions

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        **options: Any,
    ) -> None:
        start = time.perf_counter()
        self.options = self.options_class.by_name(options)
        super().__init__(model, device, dtype, seed)
        self.runtime, self.runner = self._build(seed)
        for note in self.runtime.notes:
            print(f"[{type(self).__module__.removesuffix('.llm')}] {note}", file=sys.stderr)
        self.vocab_size = self.runtime.config.vocab_size
        self.max_model_len = self.runtime.max_model_len
        self.kv_cache = self.runner.kv_cache
        self.trace = Trace(self.options.trace) if self.options.trace else None
        self.engine = self._engine()
        self.calls = Calls(
            self.engine,
            tokenizer=self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
        )
        self._stepping = Stepping(self.calls)
        self.build_time = time.perf_counter() - start

    def _build(self, seed: int) -> tuple[Runtime, ModelRunner]:
        """Build the model and the runner of its steps, on one device."""
        options = self.options
        options.refuse_several_ranks()
        runtime = load_runtime(self.source, options, self.device, self.dtype, seed)
        sampler = make_sampler(runtime, options)  # before the pool, which takes the remaining memory
        kv_cache = runtime.make_pool(choose_num_blocks(runtime, options))
        return runtime, ModelRunner(runtime, kv_cache, sampler)

    def _engine(self) -> Engine:
        return Engine(self._scheduler(), self.runner, trace=self.trace)

    def _scheduler(self, make: Callable[..., Scheduler] = Scheduler) -> Scheduler:
        return make(
            num_blocks=self.kv_cache.num_blocks,
            block_size=self.kv_cache.block_size,
            max_num_seqs=self.options.max_num_seqs,
            max_num_penalty_seqs=self.options.max_num_penalty_seqs,
            max_num_batched_tokens=self.options.max_num_batched_tokens,
            enable_prefix_caching=self.options.enable_prefix_caching,
            enable_chunked_prefill=self.options.enable_chunked_prefill,
        )

    def stream(
        self, prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[str] | Iterator[tuple[int, str]]:
        """Complete prompts, yielding pieces of text as they become known.

        The pieces of an answer join to exactly the text that `generate` returns. Stop reading to abort the request.

        Returns:
            the pieces, for one string; pairs of an answer's index and a piece, for a list.

        Raises:
            ValueError: at the call, as in `generate`.
            Exception: the error that ended a request, once all have ended, as in `generate`.
        """
        requests = self.requests(prompts, sampling_params)
        pieces = self._stream([only_answer(requests)] if isinstance(prompts, str) else requests)
        return (piece for _, piece in pieces) if isinstance(prompts, str) else pieces

    def _stream(self, requests: list[Request]) -> Iterator[tuple[int, str]]:
        self._check_usable()
        outputs: dict[int, GenerationOutput] = {}
        with closing(serve(self.calls, requests, streams=True)) as events:
            for request, event in events:
                if event.text:
                    yield request.index, event.text
                if event.output is not None:
                    outputs[request.index] = event.output
        returned([outputs[request.index] for request in requests])

    def add_request(self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt for `step`; returns its id. Used with `step` and `is_finished`, as in nano-vllm."""
        request = only_answer(self.requests([prompt], sampling_params))
        return self._stepping.add(request)

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step of all requests that were added.

        Returns:
            (id, generated token ids) of each request that finished, and the step's number of tokens: the prompt tokens,
            or, if none were prefilled, minus the number of decoded tokens.

        Raises:
            Exception: the error that ended a request. That request is dropped; the others go on.
        """
        self._check_usable()
        return self._stepping.step()

    def is_finished(self) -> bool:
        """Tell whether `step` has returned every request that was added, or raised its error."""
        return self._stepping.is_finished()

    def exit(self) -> None:
        """Close the engine (nano-vllm's name for `close`)."""
        self.close()

    def close(self) -> None:
        """Close the trace file, if there is one, and refuse later calls. A second call is a no-op."""
        super().close()
        if self.trace is not None:
            self.trace.close()

    def _one_call(self) -> AbstractContextManager[None]:
        return nullcontext()  # every call has a mailbox, and calls share the engine's steps

    def _request(self, *given: Any) -> Request:
        request = super()._request(*given)
        if request.params.prompt_logprobs is not None:
            check_can_score(self.options)
        try:
            self.engine.scheduler.check_prompt(len(request.prompt_token_ids))
        except ValueError as error:
            raise ValueError(f"prompt {request.index}: {error}") from None
        return request

    def _score(self, prompt_token_ids: list[int], count: int) -> PromptLogprobs:
        mailbox = self.calls.new_mailbox()
        with closing(score_prompts([prompt_token_ids], count, self.calls)) as scoring:
            while (scores := next(scoring)) is None:
                if self.calls.has_unfinished():  # requests of other calls
                    self.calls.advance(mailbox)
        return scores[0]

    def _generate(self, requests: list[Request], use_tqdm: bool, on_text: OnText | None) -> list[GenerationOutput]:
        outputs: dict[int, GenerationOutput] = {}
        errors: dict[int, Exception] = {}  # of the callback
        bar = progress_bar(total=len(requests), desc="generate", unit="request") if use_tqdm else None
        rates = Rates(bar, self.engine.counters) if bar is not None else None
        with bar or nullcontext(), closing(serve(self.calls, requests, on_text is not None, rates)) as events:
            for request, event in events:
                if event.text and on_text is not None and request.index not in errors:
                    try:
                        on_text(request.index, event.text)
                    except Exception as error:
                        errors[request.index] = error
                        self.calls.abort(event.request_id)
                if event.output is not None:
                    outputs[request.index] = event.output
                    if bar is not None:
                        bar.update()
        for index, error in errors.items():
            outputs[index].update(finish_reason="error", error=error)
        return [outputs[request.index] for request in requests]


def make_sampler(runtime: Runtime, options: BatchingOptions, constraints: Constraints | None = None) -> Sampler:
    """Make the sampler, and print how much memory it takes on a GPU."""
    num_penalised = min(options.max_num_penalty_seqs, options.max_num_seqs)
    sampler = Sampler(
        options.max_num_seqs,
        num_penalised,
        runtime.config.vocab_size,
        runtime.max_model_len,
        runtime.device,
        constraints,
    )
    if runtime.device.type == "cuda":
        size = sampler.counts.nbytes / 2**20
        print(f"sampler: {size:.0f} MiB of counts for {num_penalised} requests with penalties", file=sys.stderr)
    return sampler


def serve(
    calls: Calls, requests: Sequence[Request], streams: bool, rates: Rates | None = None
) -> Generator[tuple[Request, Event], None, None]:
    """Run the engine until all of `requests` have ended, yielding their events.

    An error, Ctrl-C, or a reader that stops reading drops the requests that are not done. Close the generator
    (`contextlib.closing`) to drop them at once.

    Args:
        streams: True yields text as it is generated, False only the end.
        rates: updated after every step.
    """
    mailbox = calls.new_mailbox()
    pending: dict[int, Request] = {}
    try:
        for request in requests:
            pending[calls.add_request(request, mailbox, streams)] = request
        while pending:
            for event in mailbox.take():
                request = pending[event.request_id]
                if event.output is not None:
                    del pending[event.request_id]
                yield request, event
            if pending:
                calls.advance(mailbox)
                if rates is not None:
                    rates.show()
    finally:
        if mailbox.owner.unfinished:
            mailbox.close()
            calls.settle()
