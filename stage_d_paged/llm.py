"""The paged engine: a model from scratch, many requests at once, their KV cache in blocks.

    prompts -> token ids -> [prefill (flat batches) -> sample -> decode, all together -> ...] -> text

The part in brackets is in `engine.py`. Its batch is *static*: the requests are prefilled, then decoded together until
the last one is done. The next stage removes the cost of this for answers of different lengths.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from os import PathLike
from typing import Any

import torch

from stage_a_naive.contract.logprobs import PromptLogprobs
from stage_a_naive.contract.outputs import Completion, GenerationOutput, OnText, Request
from stage_a_naive.contract.params import SamplingParams
from stage_a_naive.contract.requests import only_answer
from stage_a_naive.entrypoints.frontend import Frontend
from stage_a_naive.entrypoints.progress import progress_bar
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.engine import StaticEngine
from stage_d_paged.kv_cache import MemoryReport
from stage_d_paged.options import EngineOptions
from stage_d_paged.runtime import choose_num_blocks, load_runtime
from stage_d_paged.scoring import Scoring
from stage_d_paged.sequence import Sequence
from stage_d_paged.stepping import Stepping


class LLM(Frontend):
    """A model written from scratch on a paged KV cache, which decodes a static batch.

    Args:
        model: `tutor`, a directory, a hub id, or `random:<preset>`.
        device, dtype, seed: as in stage A.
        options: the options of `EngineOptions`, by name.

    Raises:
        ModelError: the model cannot be loaded or is not supported.
        TypeError: an option is unknown.
        ValueError: an option is out of range.
        MemoryError: there is no room for one block of KV cache.
    """

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
        self.options = EngineOptions.by_name(options)
        self.options.refuse_several_ranks()
        super().__init__(model, device, dtype, seed)
        self.runtime = load_runtime(self.source, self.options, self.device, self.dtype, seed)
        for note in self.runtime.notes:
            print(f"[{__package__}] {note}", file=sys.stderr)
        self.vocab_size = self.runtime.config.vocab_size
        self.max_model_len = self.runtime.max_model_len
        self.kv_cache = self.runtime.make_pool(choose_num_blocks(self.runtime, self.options))
        self.engine = StaticEngine(self.runtime, self.kv_cache, self.options)
        self._stepping: Stepping | None = None  # made by the first `add_request`
        self.build_time = time.perf_counter() - start

    @property
    def block_manager(self) -> BlockManager:
        """The block manager, which knows which sequence holds which block of the pool."""
        return self.engine.block_manager

    @property
    def memory(self) -> MemoryReport | None:
        """Memory that the last static batch held in blocks when it ended, compared with contiguous reservations."""
        return self.engine.memory

    def _request(self, *given: Any) -> Request:
        request = super()._request(*given)
        try:
            self.block_manager.check_prompt(len(request.prompt_token_ids))
        except ValueError as error:
            raise ValueError(f"prompt {request.index}: {error}") from None
        return request

    def _generate(self, requests: list[Request], use_tqdm: bool, on_text: OnText | None) -> list[GenerationOutput]:
        engine = self.engine
        added = self._stepping or ()
        engine.drop([sequence for sequence in engine.unfinished if sequence not in added])  # of an earlier call
        sequences = [self._sequence(request, text_at_end=on_text is None) for request in requests]
        engine.waiting.extend(sequences)
        bar = progress_bar(total=len(sequences), desc="generate", unit="request") if use_tqdm else None
        try:
            with bar or nullcontext():
                while not all(sequence.is_finished for sequence in sequences):
                    for sequence, piece in engine.step()[0]:
                        if sequence in (self._stepping or ()):
                            continue
                        sequence.completion.tell(on_text, piece)
                        if bar is not None:
                            bar.update(sequence.is_finished)
        finally:  # also after an error or Ctrl-C, so that no request of this call keeps a block
            engine.drop([sequence for sequence in sequences if not sequence.is_finished])
        return [s.completion.to_output(s.request.arrival_time, *s.times, s.num_cached_tokens) for s in sequences]

    def _score(self, prompt_token_ids: list[int], count: int) -> PromptLogprobs:
        scoring = Scoring([prompt_token_ids], count, self.runtime.model, self.kv_cache)
        try:
            while not scoring.is_done:
                if not scoring.step(self.block_manager):
                    self.engine.step()  # requests from `add_request` hold the blocks
        finally:
            scoring.end(self.block_manager)
        return scoring.scores[0]

    def _sequence(self, request: Request, text_at_end: bool = True) -> Sequence:
        # The last generated token takes no slot, because no later token reads its K and V. A request that would outgrow
        # the whole pool ends there with "length".
        longest = min(self.max_model_len, self.block_manager.capacity + 1)
        return Sequence(Completion(request, self.tokenizer, self.eos_token_ids, longest, text_at_end))

    def add_request(self, prompt: str | list[int], sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt for `step` to run, and return its id. Used with `step` and `is_finished`, as in nano-vllm.

        It waits while a call of another thread runs, but not if it is called from a callback of this thread's call.
        """
        request = only_answer(self.requests([prompt], sampling_params))
        sequence = self._sequence(request)
        with self._lock:
            self._stepping = self._stepping or Stepping(self.engine)
            return self._stepping.add(sequence)

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step of the current static batch.

        Returns:
            (id, generated token ids) of each finished request, and the step's number of tokens: prompt tokens, or minus
            the number of sequences in a decode step.

        Raises:
            Exception: the error that ended a request or interrupted the step; other requests continue.
        """
        with self._one_call():
            return (self._stepping or Stepping(self.engine)).step()

    def is_finished(self) -> bool:
        """Return whether `step` has returned all added requests, or raised the errors that ended them."""
        return self._stepping is None or self._stepping.is_finished()

    def exit(self) -> None:
        """Close the engine (nano-vllm's name for `close`)."""
        self.close()
