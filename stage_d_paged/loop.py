"""A KV cache in blocks: sequences share one pool, and take memory when they have a token to put there.

Nobody knows how long an answer gets. Stages A to C keep a request's keys and values in one piece, so each request must
reserve room for the longest answer that it may get, and most of that stays empty. Here the memory is cut into blocks of
16 tokens. A sequence takes one when it needs one; its *block table* says which, in order. Where is token 21 of a
sequence whose block table is [7, 2]? In block 2 (21 // 16 is 1, and table[1] is 2), at offset 5 (21 % 16): in slot
2 * 16 + 5 of the pool. Nothing else changes: attention is the same, it only finds its keys through the table.

The model is our own from here on (`model.py`). It takes the tokens of all sequences in one flat list, `[tokens]`, and
asks an object with the two methods of `PagedAttention` to store and to read keys and values.
`python -m stage_d_paged.loop` answers five questions side by side and prints how many blocks they hold at the most:
once with reservations, once with blocks taken as the answers grow. The answers are those of stage A's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from stage_a_naive import loop as one_by_one
from stage_a_naive.tutor import TUTOR_PATH
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_d_paged.weights import SafetensorsDirectory, WeightLoader

BLOCK_SIZE = 16  # tokens
LONGEST = 512  # tokens that a sequence may have, prompt and answer: a reservation is 32 blocks
QUESTIONS = [
    "What is a KV cache?",
    "What is prefill?",
    "What is decode?",
    "What is paged attention?",
    "What is continuous batching?",
]


@dataclass(eq=False)
class Sequence:
    """A question and the answer so far."""

    ids: list[int]  # the prompt, then what was generated
    num_computed: int = 0  # how many of them have their keys and values in the pool
    block_table: list[int] = field(default_factory=list)


class Pool:
    """The memory of all KV caches: per layer, keys and values `[blocks, block_size, kv_heads, head_dim]`."""

    def __init__(self, config: ModelConfig, num_blocks: int) -> None:
        shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.layers = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]
        self.free = list(range(num_blocks))  # the blocks that no sequence holds
        self.used: list[int] = []  # per step that was run, how many blocks were held


class Step(NamedTuple):
    """What attention must know of a step."""

    chunks: list[tuple[Sequence, int]]  # each sequence, and how many of its tokens run
    slot_mapping: Tensor  # [tokens]: where each token's key and value go


class PagedAttention:
    """Attention through block tables. The model calls both methods in every layer."""

    def store(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Write each token's key and value, `[tokens, kv_heads, head_dim]`, into its slot."""
        keys.flatten(0, 1)[slot_mapping] = key
        values.flatten(0, 1)[slot_mapping] = value

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, step: Step, scale: float) -> Tensor:
        """Attend with each sequence's queries, `[count, heads, head_dim]`, to all keys of its blocks up to their own."""
        attended = []
        counts = [count for _, count in step.chunks]
        for (sequence, count), queries in zip(step.chunks, query.split(counts), strict=True):
            length = sequence.num_computed + count
            k, v = (cache[sequence.block_table].flatten(0, 1)[:length] for cache in (keys, values))
            causal = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            q, k, v = (x.transpose(0, 1) for x in (queries, k, v))  # [heads, tokens, head_dim]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal, scale=scale, enable_gqa=True)
            attended.append(out.transpose(0, 1))
        return torch.cat(attended)


def take_blocks(pool: Pool, sequence: Sequence, num_tokens: int) -> None:
    """Give a sequence the blocks that its first `num_tokens` tokens need and that it has not got yet."""
    while len(sequence.block_table) * BLOCK_SIZE < num_tokens:
        sequence.block_table.append(pool.free.pop())


def reserve(pool: Pool, sequence: Sequence, num_tokens: int) -> None:
    """Give a sequence all blocks that it can ever need, as a cache in one piece does."""
    take_blocks(pool, sequence, LONGEST)


def release(pool: Pool, sequence: Sequence) -> None:
    """Take all blocks back. What was computed is lost."""
    pool.free += sequence.block_table
    sequence.block_table, sequence.num_computed = [], 0


@torch.inference_mode()
def run(model: DecoderModel, pool: Pool, chunks: list[tuple[Sequence, int]]) -> list[int]:
    """Run the next `count` tokens of each sequence in one pass of the model; returns the best token after each chunk."""
    ids, positions, slots = [], [], []
    for sequence, count in chunks:
        for position in range(sequence.num_computed, sequence.num_computed + count):
            ids.append(sequence.ids[position])
            positions.append(position)
            slots.append(sequence.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    hidden = model(torch.tensor(ids), torch.tensor(positions), pool, Step(chunks, torch.tensor(slots)))
    last = torch.tensor([count for _, count in chunks]).cumsum(0) - 1  # the row of each chunk's last token
    for sequence, count in chunks:
        sequence.num_computed += count
    pool.used.append(pool.size - len(pool.free))
    return model.compute_logits(hidden[last]).argmax(-1).tolist()


def generate(
    model: DecoderModel, pool: Pool, prompts: list[list[int]], eos_id: int, take: Callable = take_blocks
) -> list[list[int]]:
    """Answer all prompts side by side: prefill them together, then decode until the last one has ended."""
    sequences = [Sequence(list(prompt)) for prompt in prompts]
    running = sequences
    while running:
        chunks = [(sequence, len(sequence.ids) - sequence.num_computed) for sequence in running]
        for sequence in running:
            take(pool, sequence, len(sequence.ids))
        for sequence, token in zip(running, run(model, pool, chunks), strict=True):
            sequence.ids.append(token)
        for sequence in running: 
            if sequence.ids[-1] == eos_id or len(sequence.ids) == LONGEST:
                release(pool, sequence)
        running = [sequence for sequence in running if sequence.block_table]
    return [sequence.ids[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]
