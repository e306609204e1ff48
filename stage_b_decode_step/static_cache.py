"""A KV cache with fixed shapes and addresses.

Stage A's cache grows: in every layer, every step allocates a cache that is one token longer and copies the old one into
it. Each step has tensors with new shapes at new addresses, so it is a new program, and nothing prepared for one step
can be reused in the next. A static cache is allocated once, longer than needed. A step writes one position and reads
all of them, with a mask over those that are not filled yet. Only one number changes from step to step, and that number
is a tensor on the device.

The cost is the padding: attention also reads the unfilled positions. So cache lengths come in fixed sizes: close to
what a request needs, and few enough to compile the step for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, StaticLayer

from stage_a_naive.checkpoints.model_config import layer_kinds

SMALLEST_CACHE = 256


def cache_length(positions: int) -> int:
    """Return the smallest cache size for this many positions: 256, 512, 768, 1024, then 1.5 and 2 times powers of two.

    A cache is at most twice its need for small requests and at most 1.5 times from 512 on.
    """
    size = SMALLEST_CACHE
    while size < positions:
        if size < 1024:
            size += SMALLEST_CACHE
        else:
            is_power_of_two = size & (size - 1) == 0
            size = size * 3 // 2 if is_power_of_two else size * 4 // 3
    return size


class StaticKVCache(Cache):
    """One sequence's keys and values in tensors of fixed shape and address.

    transformers' `StaticCache` counts its length separately in every layer: three launches per layer and step. Here one
    `position` serves all layers, and a step advances it once.

    Args:
        config: the model's.
        length: the number of positions.
        dtype, device: of keys and values.

    Attributes:
        position: `[1]` int64 on the device, where the next token goes; the positions before it are filled.

    Raises:
        ValueError: there is not enough memory; the message says how much it needs.
    """

    layers: list[Any]  # `StaticLayer`s; their keys and values are allocated from the start

    def __init__(self, config: PretrainedConfig, length: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers=[StaticLayer(max_cache_len=length) for _ in range(config.num_hidden_layers)])
        kv_heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        try:
            self.early_initialization(1, kv_heads, head_dim, dtype, device)  # marks the addresses as static
        except torch.OutOfMemoryError as error:
            size = 2 * config.num_hidden_layers * kv_heads * head_dim * length * dtype.itemsize
            raise ValueError(
                f"a KV cache of {length} positions takes {size / 2**30:.2f} GiB, more than {device} has left; "
                "lower max_tokens or shorten the prompt"
            ) from error
        self.length = length
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._filled = torch.full((1, 1, 1, length), -torch.inf, dtype=dtype, device=device)
        self._positions = torch.arange(length, device=device)
        self._kinds, self._window = set(layer_kinds(config)), getattr(config, "sliding_window", None) or length
        # The marks tell CUDA graphs that these tensors stay where they are and need no copy at every replay.
        torch._dynamo.mark_static_address(self.position)
        torch._dynamo.mark_static_address(self._filled)
        torch._dynamo.mark_static_address(self._positions)

    @property
    def mask(self) -> Tensor | dict[str, Tensor]:
        """The mask that a decode step adds to its scores, `[1, 1, 1, length]`; with two kinds of layers, one for each.

        It is 0 where a position is visible, and -inf where it is empty or outside a layer's window (so a layer with a
        window costs as much as a full one). It holds numbers, because SDPA would convert booleans to numbers in every
        layer.
        """
        if self._kinds == {"full_attention"}:
            return self._filled
        hidden = self._positions <= self.position - self._window
        windowed = self._filled.masked_fill(hidden, -torch.inf)
        return windowed if len(self._kinds) == 1 else {"full_attention": self._filled, "sliding_attention": windowed}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values `[1, kv_heads, tokens, head_dim]`; return those to attend to.

        Several tokens are a prompt: they start the sequence and attend only to one another. One token is a decode step:
        it is stored at `position`, and all positions are returned; `mask` hides the empty ones.
        """
        layer = self.layers[layer_idx]
        tokens = key_states.shape[-2]
        if tokens > 1:
            layer.keys[:, :, :tokens].copy_(key_states)
            layer.values[:, :, :tokens].copy_(value_states)
            return key_states, value_states
        layer.keys.index_copy_(2, self.position, key_states)
        layer.values.index_copy_(2, self.position, value_states)
        return layer.keys, layer.values

    def begin_step(self) -> None:
        """Make the position of the new token visible to itself and to all later tokens."""
        self._filled.index_fill_(-1, self.position, 0)

    def end_step(self) -> None:
        """Move to the next position."""
        self.position.add_(1)

    def end_prefill(self, tokens: int) -> None:
        """Set the position after a prompt of this many tokens."""
        self._filled[..., :tokens] = 0
        self.position.fill_(tokens)

    def reset(self) -> None:
        """Empty the cache. Old values are erased, because even a masked-out NaN would spread."""
        super().reset()
        self._filled.fill_(-torch.inf)
        self.position.zero_()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: transformers calls this for a prompt, which always starts with an empty cache."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the size of a prompt's mask, for transformers: a prompt attends to itself."""
        return query_length, 0
