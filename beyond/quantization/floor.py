"""The floor moves with the bytes: what a decode step reads of 8-bit weights and an 8-bit KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from beyond.quantization.options import QuantizationOptions
from stage_a_naive.floor import ModelBytes

SCALE_BYTES = 4


@dataclass(frozen=True)
class QuantizedBytes(ModelBytes):
    """Stage A's count of bytes, with those matrices and caches in 8 bits that the options say.

    Args:
        config: the Hugging Face configuration.
        bytes_per_number: of what is not in 8 bits.
        options: what is.
    """

    options: QuantizationOptions

    @property
    def weight_bytes(self) -> int:
        """What one decode step reads of the weights, with their scales."""
        if self.options.quantization is None:
            return super().weight_bytes
        c, own = self.config, self.bytes_per_number
        layers, head = self.matmul_parameters
        queries, keys = c.num_attention_heads * self.head_dim, c.num_key_value_heads * self.head_dim
        layer = (
            self._matrix(queries + 2 * keys, c.hidden_size)
            + self._matrix(c.hidden_size, queries)
            + self._matrix(2 * c.intermediate_size, c.hidden_size)
            + self._matrix(c.hidden_size, c.intermediate_size)
        )
        small = super().weight_bytes - own * (layers + head)  # norms and biases
        lm_head = self._matrix(c.vocab_size, c.hidden_size) if self.options.quantize_lm_head else own * head
        return c.num_hidden_layers * layer + lm_head + small

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, with their scales."""
        if self.options.kv_cache_dtype == "auto":
            return super().kv_bytes_per_token
        c = self.config
        return 2 * c.num_hidden_layers * c.num_key_value_heads * (self.head_dim + SCALE_BYTES)

    def _matrix(self, rows: int, columns: int) -> int:
        scales = -(-columns // (self.options.quantization_group_size or columns))  # of each row
        return rows * (columns + SCALE_BYTES * scales)
