"""Tensor parallelism: each of two processes holds half of every matrix, and they add up results twice per layer.

A decode step takes as long as reading the weights: two GPUs that read one half each could take half as long, if they
rarely wait for each other. With half of the rows of W, a process computes half of y = W x, from all of x. With half of
the columns it needs half of x, and gets a part of every number: y = W₀ x₀ + W₁ x₁. So cut the first of two matrices by
rows and the second by columns: the process has the half that the second one needs, and only its results are added up.

    process 0   x ─► QKV, half the heads ─► attention ─► output ─┐
    process 1   x ─► QKV, the others ─────► attention ─► output ─┴─ sum ─► x ─► gate-up ─► SwiGLU ─► down … sum ─► x

A process has the keys and values of its half of the heads. This program prints the bytes of weights per process; the
answers equal those of stage D's loop. (Both have the whole embedding, which is the LM head, too.)
"""

from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoTokenizer

from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_a_naive.loop import encode
from stage_d_paged.loop import BLOCK_SIZE, LONGEST, PagedAttention, Pool, generate, load
from stage_d_paged.model import DecoderModel

Result = tuple[list[list[int]], int, float]  # the answers, bytes of weights in this process, sums per step


class SummedLinear(nn.Module):  # `residual + W x`: half of W's columns and half of x are here
    num_sums = 0  # over all of these layers

    def __init__(self, linear: nn.Module, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.chunk(2, dim=1)[rank].clone(), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        part = x @ self.weight.t()
        dist.all_reduce(part)  # adds the other process's part: both have the sum now
        SummedLinear.num_sums += 1
        return residual + part


def keep_rows(linear: nn.Module, rank: int) -> None:
    """Keep half of each packed matrix: of Q, K and V, or of gate and up."""
    for tensor in [linear.weight] + ([] if linear.bias is None else [linear.bias]):
        tensor.data = torch.cat([part.chunk(2)[rank] for part in tensor.split(list(linear.parts.values()))])


def keep_half(model: DecoderModel, rank: int) -> None:
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.num_heads, attention.num_kv_heads = attention.num_heads // 2, attention.num_kv_heads // 2
        keep_rows(attention.qkv_proj, rank)
        keep_rows(mlp.gate_up_proj, rank)
        attention.o_proj, mlp.down_proj = SummedLinear(attention.o_proj, rank), SummedLinear(mlp.down_proj, rank)
    model.config = replace(model.config, num_kv_heads=model.config.num_kv_heads // 2)  # the pool has this many


def in_this_process(prompts: list[list[int]], eos_id: int, rank: int | None = None) -> Result:
    """Generate as stage D's loop does: with the whole model, or with half of it, as one of two processes."""
    model, SummedLinear.num_sums = load(PagedAttention()), 0
    if rank is not None:
        keep_half(model, rank)
    pool = Pool(model.config, len(prompts) * LONGEST // BLOCK_SIZE, BLOCK_SIZE)
    answers = generate(model, pool, prompts, eos_id)
    return answers, sum(weight.nbytes for weight in model.parameters()), SummedLinear.num_sums / len(pool.held)


def as_rank(rank: int, store: str, run: Callable, work: tuple) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    result = run(*work, rank=rank)
    dist.destroy_process_group()
    return result


def in_two_processes(*work: Any, run: Callable = in_this_process) -> Any:
    """Start process 1, and run as process 0. Both run the same steps and choose the same tokens."""
    with TemporaryDirectory() as folder:
        shared = f"{folder}/store", run, work  # a file through which the two find each other
        other = get_context("spawn").Process(target=as_rank, args=(1, *shared), daemon=True)
        other.start()
        result = as_rank(0, *shared)
        other.join()
    return result


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)
    work = [encode(tokenizer, entry["question"]) for entry in read_faq()[:5]], tokenizer.eos_token_id
    (expected, whole, _), (answers, half, sums) = in_this_process(*work), in_two_processes(*work)
    assert answers == expected
    print(f"sums per step: {sums:.0f}")
    print(f"bytes of weights per process: {whole:,} → {half:,} [H200: Qwen2.5-7B, 3.87 → 2.38 ms per token]")


if __name__ == "__main__":
    main()
