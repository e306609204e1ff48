"""The first layer that differs from stage A's is named, in models broken on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stage_a_naive import LLM as Reference
from stage_d_paged import LLM, compare
from stage_d_paged.attention import AttentionMetadata

EXACT = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference("tutor", **EXACT)


def nothing(engine: LLM) -> None:
    pass


def before_each(engine: LLM, change: Callable, only_decodes: bool = True) -> None:
    """Change positions and metadata of the model's steps in place, or return other metadata."""

    def hook(model: torch.nn.Module, given: tuple) -> tuple | None:
        *others, metadata = given
        if len(others[0]) == 1 or not only_decodes:
            changed = change(others[1], metadata)
            return (*others, changed) if isinstance(changed, AttentionMetadata) else None
        return None

    engine.runtime.model.register_forward_pre_hook(hook)


def all_positions_one_too_large(engine: LLM) -> None:
    before_each(engine, lambda positions, _: positions.add_(1), only_decodes=False)


def decode_positions_one_too_large(engine: LLM) -> None:
    before_each(engine, lambda positions, _: positions.add_(1))


def stale_block_table(engine: LLM) -> None:
    before_each(engine, lambda _, metadata: metadata.block_tables[:, 1:].copy_(metadata.block_tables[:, :1]))


def keys_one_slot_too_far(engine: LLM) -> None:
    before_each(engine, lambda _, metadata: metadata.slot_mapping.add_(1))


def forgotten_mask(engine: LLM) -> None:
    def see_all(positions: torch.Tensor, metadata: AttentionMetadata) -> AttentionMetadata:
        """Let every query of a prompt see all of its keys, as if each were the last."""
        count, longest = len(positions), metadata.max_context_len
        tables, contexts = metadata.block_tables.expand(count, -1), metadata.context_lens.expand(count)
        starts = torch.arange(count + 1, dtype=torch.int32)
        return AttentionMetadata(starts, contexts, metadata.slot_mapping, tables, 1, longest)

    before_each(engine, see_all, only_decodes=False)


def a_row_of_qkv_missing(engine: LLM) -> None:
    engine.runtime.model.layers[1].self_attn.qkv_proj.weight[3].zero_()


def gate_and_up_swapped(engine: LLM) -> None:
    weight = engine.runtime.model.layers[2].mlp.gate_up_proj.weight
    weight.copy_(torch.cat(weight.chunk(2)[::-1]))


def no_number_in_the_last_layer(engine: LLM) -> None:
    engine.runtime.model.layers[-1].mlp.down_proj.weight[0, 0] = torch.nan


def another_embedding(engine: LLM) -> None:
    engine.runtime.model.embed_tokens.weight.mul_(1.01)


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        (nothing, "no difference"),
        (all_positions_one_too_large, "no difference"),  # RoPE knows distances alone
        (decode_positions_one_too_large, "decode, attention of layer 0:"),
        (stale_block_table, "decode, attention of layer 0:"),
        (keys_one_slot_too_far, "decode, attention of layer 0:"),
        (forgotten_mask, "prefill, attention of layer 0:"),
        (a_row_of_qkv_missing, "prefill, attention of layer 1:"),
        (gate_and_up_swapped, "prefill, MLP of layer 2:"),
        (no_number_in_the_last_layer, "prefill, MLP of layer 3:"),
        (another_embedding, "prefill, embedding:"),
    ],
)
@torch.inference_mode()
def test_the_first_part_that_differs_is_named(mistake: Callable, where: str, reference: Reference) -> None:
    engine = LLM("tutor", **EXACT)
    mistake(engine)
    assert compare.first_difference(reference, engine).startswith(where)
