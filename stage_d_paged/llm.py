"""The paged engine: our own model, many requests at once, their KV cache in pages.

    prompts -> token ids -> prefill (flat batches) -> sample -> decode, all together -> ... -> text

The batch is *static*: its requests are prefilled, then decoded together until the last of them is done. One that has
finished keeps its seat as a padding row, and no waiting request may take it. What that costs when answers differ in
length is what the next stage is about.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from os import PathLike

import torch
from torch import Tensor

from stage_a_naive.frontend import Frontend, OnText
from stage_a_naive.logprobs import top_logprobs
from stage_a_naive.outputs import Completion, GenerationOutput, Request, make_metrics, synchronized_time
from stage_a_naive.params import SamplingParams
from stage_a_naive.progress import progress_bar
from stage_a_naive.sampling import choose_tokens
from stage_d_paged.batch import Chunk, flat_batch
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.kv_cache import MemoryReport, memory_report
from stage_d_paged.options import EngineOptions
from stage_d_paged.runtime import choose_num_blocks, load_runtime
from stage_d_paged.sequence import Sequence


class LLM(Frontend):
    """The model from scratch on a paged KV cache, decoding a static batch.

    Args:
        model: `tutor`, a directory, a hub id, or `random:<preset>`.
        device, dtype, seed: as in stage A.
        options: those of `EngineOptions`, by name.

    Attributes:
        memory: what the last static batch held in pages when it ended, next to contiguous reservations.

    Raises:
        ModelError: the model cannot be loaded or is not supported.
        TypeError: an option is unknown.
        ValueError: an option is out of range.
        MemoryError: there is no room for one page of KV cache.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        **options: object,
    ) -> None:
        start = time.perf_counter()
        self.options = EngineOptions(**options)
        self.options.refuse_several_ranks()
        super().__init__(model, device, dtype, seed)
        self.runtime = load_runtime(self.source, self.options, self.device, self.dtype, seed)
        for note in self.runtime.notes:
            print(f"[{__package__}] {note}", file=sys.stderr)
        self.vocab_size = self.runtime.config.vocab_size
        self.max_model_len = self.runtime.max_model_len
        self.kv_cache = self.runtime.make_pool(choose_num_blocks(self.runtime, self.options))
        self.block_manager = BlockManager(
            self.kv_cache.num_blocks, self.kv_cache.block_size, self.options.enable_prefix_caching
        )
        self.memory: MemoryReport | None = None
        self.build_time = time.perf_counter() - start

    def _request(self, index: int, prompt: object, params: SamplingParams) -> Request:
        request = super()._request(index, prompt, params)
        check_fits_pool(request, self.block_manager)
        return request

    @torch.inference_mode()
    def _generate(self, requests: list[Request], use_tqdm: bool, on_text: OnText | None) -> list[GenerationOutput]:
        arrival = synchronized_time(self.device)
        sequences = [
            Sequence(request, Completion(request, self.tokenizer, self.eos_token_ids, self.max_model_len))
            for request in requests
        ]
        with progress_bar(total=len(sequences), desc="generate", unit="request", disable=not use_tqdm) as progress:

            def emit(sequence: Sequence, piece: str) -> None:
                if piece and on_text is not None:
                    on_text(sequence.request.index, piece)
                progress.update(sequence.is_finished)

            for batch in self._static_batches(sequences):
                try:
                    self._run_batch(batch, emit)
                finally:  # also after an error or Ctrl-C: no request of this call keeps a page
                    self.block_manager.revoke()
                    for sequence in batch:
                        self.block_manager.free(sequence)
        return [output_of(sequence, arrival) for sequence in sequences]

    def _static_batches(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        """Cut the requests, in order, into batches that the pool holds to their full lengths."""
        batches: list[list[Sequence]] = []
        room = 0
        for sequence in sequences:
            # The last token generated is never run, so its K and V take no slot.
            most_tokens = len(sequence) + sequence.completion.num_remaining_tokens - 1
            blocks = self.block_manager.blocks_for(most_tokens)
            if not batches or blocks > room or len(batches[-1]) == self.options.max_num_seqs:
                batches.append([])
                room = self.block_manager.num_blocks
            batches[-1].append(sequence)
            room -= blocks
        return batches

    def _run_batch(self, batch: list[Sequence], emit: Callable[[Sequence, str], None]) -> None:
        # Prefill: the prompts one after another, as many tokens a step as are allowed.
        while chunks := self._prefill_chunks(batch):
            self._step(chunks, emit)
        # Decode: one token of every sequence a step. Only a sequence that is alone can outgrow the pool.
        while live := [sequence for sequence in batch if not sequence.is_finished]:
            for sequence in live:
                if not self.block_manager.append(sequence):
                    emit(sequence, sequence.completion.finish("length"))
            if not all(sequence.is_finished for sequence in live):
                self._step([self._chunk(sequence, 1) for sequence in batch], emit)
        self.memory = memory_report(batch, self.kv_cache.block_size, self.max_model_len, self.runtime.bytes_per_token)

    def _prefill_chunks(self, batch: list[Sequence]) -> list[Chunk]:
        """The next `max_num_batched_tokens` prompt tokens, first come first served; empty when all have been run."""
        chunks: list[Chunk] = []
        budget = self.options.max_num_batched_tokens
        for sequence in batch:
            if budget and sequence.num_generated_tokens == 0:
                if not sequence.block_table:
                    self.block_manager.allocate(sequence, len(sequence))  # fits: the batch was cut to
                    sequence.first_scheduled_time = time.perf_counter()
                count = min(budget, sequence.num_uncomputed_tokens)
                chunks.append(self._chunk(sequence, count))
                budget -= count
        return chunks

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        """Plan a sequence's next tokens. Those planned after it, even for the same step, find its pages."""
        start = sequence.num_computed_tokens
        if not sequence.is_finished:
            sequence.num_computed_tokens += count
            self.block_manager.index_computed(sequence)
        return Chunk(sequence, start, count)

    def _step(self, chunks: list[Chunk], emit: Callable[[Sequence, str], None]) -> None:
        """Run the planned tokens; a sequence that has no more to run gets its next token."""
        batch = flat_batch(chunks, self.kv_cache.block_size, self.device)
        hidden = self.runtime.model(batch.input_ids, batch.positions, self.kv_cache, batch.metadata)
        live = [chunk.sequence for chunk in chunks if not chunk.sequence.is_finished]  # one of batch.last_rows each
        ready = [(row, sequence) for row, sequence in enumerate(live) if sequence.num_uncomputed_tokens == 0]
        if ready:
            self._sample(hidden, batch.last_rows, ready, emit)
        self.block_manager.confirm()

    def _sample(
        self,
        hidden: Tensor,  # [tokens, hidden]
        last_rows: Tensor,  # [live sequences]
        ready: list[tuple[int, Sequence]],  # with its row in last_rows
        emit: Callable[[Sequence, str], None],
    ) -> None:
        rows = last_rows[torch.tensor([row for row, _ in ready], device=self.device)]
        logits = self.runtime.model.compute_logits(hidden[rows]).float()  # [rows, vocab]
        sequences = [sequence for _, sequence in ready]
        generated = [sequence.completion.token_ids for sequence in sequences]
        ids = choose_tokens(logits, [sequence.request for sequence in sequences], generated).tolist()  # waits
        now = time.perf_counter()
        for row, (token_id, sequence) in enumerate(zip(ids, sequences, strict=True)):
            count = sequence.request.params.logprobs
            logprobs = None if count is None else top_logprobs(logits[row], count, token_id)
            sequence.token_ids.append(token_id)
            sequence.first_token_time = sequence.first_token_time or now
            sequence.finish_time = now
            emit(sequence, sequence.completion.append(token_id, logprobs))


def check_fits_pool(request: Request, block_manager: BlockManager) -> None:
    """Refuse a prompt that the whole pool could not hold."""
    tokens = len(request.prompt_token_ids)
    blocks = block_manager.blocks_for(tokens)
    if blocks > block_manager.num_blocks:
        raise ValueError(
            f"prompt {request.index} has {tokens} tokens, which take {blocks} pages of {block_manager.block_size}; the "
            f"KV pool has {block_manager.num_blocks}. Shorten it, or raise num_kvcache_blocks or gpu_memory_utilization"
        )


def output_of(sequence: Sequence, arrival: float) -> GenerationOutput:
    """A finished sequence as the caller sees it. `arrival`: when the call came in."""
    metrics = make_metrics(
        prefill_time=sequence.first_token_time - sequence.first_scheduled_time,
        decode_time=sequence.finish_time - sequence.first_token_time,
        ttft=sequence.first_token_time - arrival,
        num_prompt=sequence.num_prompt_tokens,
        num_generated=sequence.num_generated_tokens,
        num_cached=sequence.num_cached_tokens,
    )
    return sequence.completion.to_output(metrics)
