"""The floor with 8-bit weights and an 8-bit KV cache: the bytes that a decode step reads."""

from __future__ import annotations

from dataclasses import dataclass

from beyond.quantization.options import QuantizationOptions
from stage_a_naive.checkpoints.experts import experts_of_layers
from stage_a_naive.floor import ModelBytes

SCALE_BYTES = 4


@dataclass(frozen=True)
class QuantizedBytes:
    """Stage A's count of bytes, adjusted for the matrices and caches that the options put in 8 bits.

    Args:
        plain: the count without quantisation.
        options: say what is in 8 bits.
    """

    plain: ModelBytes
    options: QuantizationOptions

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights and scales that one decode step reads."""
        if self.options.quantization is None:
            return self.plain.weight_bytes
        c, own, head_dim = self.plain.config, self.plain.bytes_per_number, self.plain.head_dim
        layers, head = self.plain.matmul_parameters
        queries, keys = c.num_attention_heads * head_dim, c.num_key_value_heads * head_dim
        attention = self._matrix(queries + 2 * keys, c.hidden_size) + self._matrix(c.hidden_size, queries)
        mlps = sum(
            self._mlp(c.intermediate_size)
            if e is None
            else e.per_token * self._mlp(e.size) + self._mlp(e.shared_size) + own * e.router_rows * c.hidden_size
            for e in experts_of_layers(c)
        )
        small = self.plain.weight_bytes - own * (layers + head)  # norms and biases
        lm_head = self._matrix(c.vocab_size, c.hidden_size) if self.options.quantize_lm_head else own * head
        return c.num_hidden_layers * attention + mlps + lm_head + small

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, with their scales."""
        if self.options.kv_cache_dtype == "auto":
            return self.plain.kv_bytes_per_token
        c = self.plain.config
        return 2 * c.num_hidden_layers * c.num_key_value_heads * (self.plain.head_dim + SCALE_BYTES)

    def step_bytes(self, context: float) -> float:
        """Return the bytes that a decode step of one sequence with `context` tokens in its KV cache reads."""
        return self.weight_bytes + self.plain.tokens_read(context) * self.kv_bytes_per_token

    def _mlp(self, size: int) -> int:
        hidden = self.plain.config.hidden_size
        return self._matrix(2 * size, hidden) + (self._matrix(hidden, size) if size else 0)

    def _matrix(self, rows: int, columns: int) -> int:
        scales = -(-columns // (self.options.quantization_group_size or columns))  # of each row
        return rows * (columns + SCALE_BYTES * scales)
