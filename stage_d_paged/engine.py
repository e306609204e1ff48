"""The static-batch engine: as many requests as fit run together, step by step, until the last one is done.

    queue -> batch -> [prefill step] ... [decode step] ... -> the next batch

A step runs the next tokens of the prompts, at most `max_num_batched_tokens`. When all prompts have been run, a step
runs one token of every sequence. A sequence that has finished keeps its row as padding until the batch ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from stage_a_naive.contract.logprobs import top_logprobs
from stage_d_paged.batch import Chunk, flat_batch
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.kv_cache import KVCache, MemoryReport, memory_report
from stage_d_paged.options import EngineOptions
from stage_d_paged.runtime import Runtime
from stage_d_paged.sampler import BatchSampler
from stage_d_paged.sequence import Sequence

News = list[tuple[Sequence, str]]  # sequences that got a token, each with its new text


class StaticEngine:
    """Runs requests in static batches.

    An error of the sampler, or in the text of a request, ends the affected requests. After any other error during a
    step, the next step starts again from the known tokens, so that it only costs recomputation.

    Args:
        runtime, kv_cache: the model, and the pool of blocks that it writes to.
        options: the limits of a batch and of a step.

    Attributes:
        waiting: requests that are not in a batch yet, in order.
    """

    def __init__(self, runtime: Runtime, kv_cache: KVCache, options: EngineOptions) -> None:
        self.waiting: deque[Sequence] = deque()
        self._last_batch: list[tuple[int, list[int]]] = []  # number of tokens and blocks of each sequence when it ended
        self._runtime = runtime
        self._kv_cache = kv_cache
        self._options = options
        self._batch: list[Sequence] = []
        self._sampler = self._sampler_of([])
        self._to_prefill: deque[Sequence] = deque()  # sequences of the batch whose prompts have not been run
        self._midway = False  # a step has begun and not ended
        self._empty_the_pool()

    def _empty_the_pool(self) -> None:
        pool = self._kv_cache
        self.block_manager = BlockManager(pool.num_blocks, pool.block_size, self._options.enable_prefix_caching)

    @property
    def unfinished(self) -> list[Sequence]:
        """All waiting or running sequences, in order."""
        running = [sequence for sequence in self._batch if not sequence.is_finished]
        return list(dict.fromkeys([*running, *self.waiting]))

    @property
    def memory(self) -> MemoryReport | None:
        """Memory that the last batch held in blocks when it ended, compared with contiguous reservations."""
        if not self._last_batch:
            return None
        runtime = self._runtime
        return memory_report(self._last_batch, runtime.block_size, runtime.max_model_len, runtime.bytes_per_token)

    def drop(self, sequences: Iterable[Sequence]) -> None:
        """Forget unfinished requests. The others of their batch start again from their known tokens.

        If no request of the batch is left, the batch gives its blocks back.
        """
        gone = set(sequences)
        is_certain = not (gone or self._midway)
        self._midway = True
        if is_certain:
            if all(sequence.is_finished for sequence in self._batch):
                self._end_batch()
            self._midway = False
        else:
            self._restart([sequence for sequence in self.unfinished if sequence not in gone])

    def _restart(self, sequences: list[Sequence]) -> None:
        """Start again with an empty pool, because it is unknown what the interrupted step has written."""
        self._empty_the_pool()
        for sequence in sequences:
            sequence.completion.replay()
            sequence.block_table = []
            sequence.num_computed_tokens = sequence.num_indexed_blocks = 0
        self.waiting = deque(sequence for sequence in sequences if not sequence.is_finished)
        self._batch = []
        self._to_prefill.clear()
        self._midway = False

    @torch.inference_mode()
    def step(self) -> tuple[News, int]:
        """Run one step.

        Returns:
            the sequences that got a token, and the step's number of tokens: prompt tokens, or minus the decoded ones.

        Raises:
            Exception: the error that interrupted the step.
        """
        if self._midway:
            self._restart(self.unfinished)
            if not self.waiting:  # the interrupted step had already produced every last token
                return [], 0
        self._midway = True
        if not self._batch:
            self._next_batch()
        news, num_tokens = self._prefill() if self._to_prefill else self._decode()
        if all(sequence.is_finished for sequence in self._batch):
            self._end_batch()
        self._midway = False
        return news, num_tokens

    def _next_batch(self) -> None:
        """Take requests, in order, as long as the pool can hold all of them at their full lengths."""
        room = self.block_manager.num_blocks
        most = min(self._options.max_num_seqs, self._options.max_num_batched_tokens)  # one token each in a decode step
        batch: list[Sequence] = []
        for sequence in self.waiting:
            # The last token generated is never run, so its K and V take no slot.
            room -= self.block_manager.blocks_for(sequence.max_total_tokens - 1)
            # All requests of a batch have the same sampling_fn.
            alike = not batch or sequence.request.sampling_fn is batch[0].request.sampling_fn
            if room < 0 or len(batch) == most or not alike:
                break
            batch.append(sequence)
        self._batch = batch
        self._sampler = self._sampler_of(batch)
        self._to_prefill.extend(batch)
        for _ in batch:
            self.waiting.popleft()

    def _sampler_of(self, batch: list[Sequence]) -> BatchSampler:
        """Make the sampler of a batch. The parameters of its rows stay the same until the batch ends."""
        runtime = self._runtime
        num_penalised = len(batch) if any(s.request.params.needs_penalties for s in batch) else 0
        vocab_size = runtime.config.vocab_size
        sampler = BatchSampler(len(batch), num_penalised, vocab_size, runtime.max_model_len, runtime.device)
        for row, sequence in enumerate(batch):
            sampler.enter(row, sequence.completion)
        return sampler

    def _end_batch(self) -> None:
        if self._batch:
            self._last_batch = [(sequence.num_computed_tokens, sequence.block_table) for sequence in self._batch]
        for sequence in self._batch:
            self.block_manager.free(sequence)
        self._batch = []

    def _prefill(self) -> tuple[News, int]:
        """Run the next prompt tokens, at most `max_num_batched_tokens`, in the order of arrival."""
        chunks: list[Chunk] = []
        budget = self._options.max_num_batched_tokens
        while budget and self._to_prefill:
            sequence = self._to_prefill[0]
            if not sequence.block_table:
                self.block_manager.allocate(sequence, len(sequence))  # always succeeds: the batch fits into the pool
                sequence.first_scheduled_time = sequence.first_scheduled_time or time.perf_counter()
            chunks.append(self._chunk(sequence, min(budget, sequence.num_uncomputed_tokens)))
            budget -= chunks[-1].count
            if sequence.num_uncomputed_tokens == 0:
                self._to_prefill.popleft()
        return self._run(chunks), self._options.max_num_batched_tokens - budget

    def _decode(self) -> tuple[News, int]:
        """Run one token of every sequence."""
        live = [sequence for sequence in self._batch if not sequence.is_finished]
        for sequence in live:
            self.block_manager.append(sequence)  # there are enough, as above
        return self._run([self._chunk(sequence, 1) for sequence in self._batch]), -len(live)

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        """Plan a sequence's next tokens. Sequences planned later, even for the same step, can share its blocks."""
        start = sequence.num_computed_tokens
        if not sequence.is_finished:
            sequence.num_computed_tokens += count
            self.block_manager.index_computed(sequence)
        return Chunk(sequence, start, count)

    def _run(self, chunks: list[Chunk]) -> News:
        """Run the planned tokens; a sequence whose tokens have all run gets its next token."""
        model = self._runtime.model
        batch = flat_batch(chunks, self._kv_cache.block_size, self._runtime.device)
        hidden = model(batch.input_ids, batch.positions, self._kv_cache, batch.metadata)  # [tokens, hidden]
        ready = [s for s, _, _ in chunks if not s.is_finished and s.num_uncomputed_tokens == 0]
        return self._sample(hidden[batch.last_rows], ready) if ready else []

    def _sample(self, hidden: Tensor, sequences: list[Sequence]) -> News:
        """Sample each sequence's next token from the final state of its last token, `[sequences, hidden]`."""
        logits = self._runtime.model.compute_logits(hidden).float()  # [sequences, vocab]
        row_of = {sequence: row for row, sequence in enumerate(self._batch)}
        rows = [row_of[sequence] for sequence in sequences]
        ids = self._sampler.choose_for(logits, [s.completion for s in sequences], rows).tolist()  # waits
        now = time.perf_counter()
        news: News = []
        for row, (token_id, sequence) in enumerate(zip(ids, sequences, strict=True)):
            count = sequence.request.params.logprobs
            logprobs = None if count is None else top_logprobs(logits[row], count, token_id)
            sequence.first_token_time = sequence.first_token_time or now
            sequence.finish_time = now
            news.append((sequence, sequence.completion.append(token_id, logprobs)))
        return news
