"""A KV cache in blocks: many sequences share one pool, and each takes memory when it has a token to put there.

The length of an answer is not known in advance. A contiguous cache, as in stages A to C, needs room for the longest,
here 512 tokens, and most of it stays empty. So the memory is divided into blocks of 16 tokens. A sequence takes another
block when its last one is full, and its *block table* lists them. Where is token 21 of a sequence with the table [7,
2]? In block 2 (21 // 16 is 1, and table[1] is 2) at offset 5 (21 % 16), which is slot 2 * 16 + 5 of the pool.

Below, five questions are answered in one batch: in blocks of 512 tokens, which are reservations, and in blocks of 16.
"""

from collections import namedtuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stage_a_naive import loop as one_by_one
from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_d_paged.weights import SafetensorsDirectory, WeightLoader

LONGEST = 512  # tokens that a sequence may have, prompt and answer
BLOCK_SIZE = 16  # tokens
Step = namedtuple("Step", ["chunks", "slot_mapping"])  # chunks: [(sequence, positions), …]; a slot for each token


class Sequence:
    """A prompt and the answer so far."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.num_computed = 0  # the first tokens, whose keys and values are in the pool
        self.block_table: list[int] = []


class Pool:
    """The memory of all sequences: per layer, keys and values `[blocks, block_size, kv_heads, head_dim]`."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.layers = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = list(range(num_blocks))  # the blocks that no sequence holds
        self.held: list[int] = []  # number of held blocks in every step so far


def take_blocks(pool: Pool, sequence: Sequence, num_tokens: int) -> None:
    """Give a sequence the missing blocks for its first `num_tokens` tokens."""
    while len(sequence.block_table) * pool.block_size < num_tokens:
        sequence.block_table.append(pool.free.pop())


def release(pool: Pool, sequence: Sequence) -> None:
    """Take back all blocks of a sequence. Its keys and values are lost."""
    pool.free += sequence.block_table
    sequence.block_table, sequence.num_computed = [], 0


class PagedAttention:
    """Attention that finds keys and values through block tables. The model calls both methods in every layer."""

    def store(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Write the new keys and values, `[tokens, kv_heads, head_dim]`, to their slots in this layer's pool."""
        keys.flatten(0, 1)[slot_mapping] = key  # a view: this writes to the pool
        values.flatten(0, 1)[slot_mapping] = value

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, step: Step, scale: float, window: int) -> Tensor:
        """Attend with the queries `[tokens, heads, head_dim]` to their sequence's keys up to their own (no windows)."""
        outputs = []
        for (sequence, span), q in zip(step.chunks, query.split([len(span) for _, span in step.chunks]), strict=True):
            k, v = (cache[sequence.block_table].flatten(0, 1)[: span.stop].transpose(0, 1) for cache in (keys, values))
            mask = q.new_ones(len(span), span.stop, dtype=torch.bool).tril(span.start)  # row i: up to span.start + i
            out = scaled_dot_product_attention(q.transpose(0, 1), k, v, mask, scale=scale, enable_gqa=True)
            outputs.append(out.transpose(0, 1))
        return torch.cat(outputs)


@torch.inference_mode()
def run(model: DecoderModel, pool: Pool, chunks: list[tuple[Sequence, range]]) -> list[int]:
    """Run these positions of the sequences as one flat list of tokens; return the best next token of each."""
    tokens = [(sequence, position) for sequence, span in chunks for position in span]
    slots = [s.block_table[p // pool.block_size] * pool.block_size + p % pool.block_size for s, p in tokens]
    ids, positions = [sequence.ids[p] for sequence, p in tokens], [p for _, p in tokens]
    hidden = model(torch.tensor(ids), torch.tensor(positions), pool, Step(chunks, torch.tensor(slots)))
    for sequence, span in chunks:
        sequence.num_computed = span.stop
    pool.held.append(pool.num_blocks - len(pool.free))
    last_rows = torch.tensor([len(span) for _, span in chunks]).cumsum(0) - 1
    return model.compute_logits(hidden[last_rows]).argmax(-1).tolist()


def generate(model: DecoderModel, pool: Pool, prompts: list[list[int]], eos_id: int) -> list[list[int]]:
    """Answer all prompts together: one step for the prompts, then one per token of the longest answer."""
    sequences = [Sequence(list(prompt)) for prompt in prompts]
    while running := [sequence for sequence in sequences if sequence.ids[-1] != eos_id and len(sequence.ids) < LONGEST]:
        for sequence in running:
            take_blocks(pool, sequence, len(sequence.ids))
        chunks = [(sequence, range(sequence.num_computed, len(sequence.ids))) for sequence in running]
        for sequence, token in zip(running, run(model, pool, chunks), strict=True):
            sequence.ids.append(token)
    for sequence in sequences:
        release(pool, sequence)
    return [sequence.ids[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def load(attention: object, path: object = TUTOR_PATH) -> DecoderModel:
    """Load the tutor into this stage's model (`model.py`), whose layers store and attend with the given object."""
    config = ModelConfig.from_hf(AutoConfig.from_pretrained(path))
    model = DecoderModel(config, attention, LONGEST, torch.float32, torch.device("cpu"))
    model.load(WeightLoader(SafetensorsDirectory(path)))
    return model


def main() -> None:
    model, tokenizer = load(PagedAttention()), AutoTokenizer.from_pretrained(TUTOR_PATH)
    prompts = [one_by_one.encode(tokenizer, entry["question"]) for entry in read_faq()[:5]]
    before = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval()
    expected = [one_by_one.generate(before, prompt, tokenizer.eos_token_id, LONGEST) for prompt in prompts]
    held = []
    for block_size in (LONGEST, BLOCK_SIZE):
        pool = Pool(model.config, 5 * LONGEST // block_size, block_size)
        assert generate(model, pool, prompts, tokenizer.eos_token_id) == expected
        held.append(f"{max(pool.held) * block_size:,} = {max(pool.held)} × {block_size}")
    print(f"slots of five sequences: {held[0]} → {held[1]} [counted, 256 requests: 56 → 0.8 % empty]")


if __name__ == "__main__":
    main()
