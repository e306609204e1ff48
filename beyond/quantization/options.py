"""The options that 8-bit weights and an 8-bit KV cache add to stage F's, and all of them on the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.options import add_options as add_graph_options

WEIGHT_FORMATS = ("int8", "fp8")
CACHE_FORMATS = ("auto", "int8", "fp8")
GROUP_SIZE = 128  # input features that share a scale, with quantization_group_size=128


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions(GraphOptions):
    """Options of this package's `LLM`.

    Attributes:
        quantization: the format of the layers' matrices: None (as loaded), `int8` or `fp8` (e4m3).
        quantization_group_size: None: a scale per output feature; 128: a scale per output feature and 128 inputs.
        quantize_lm_head: the LM head too, and with tied embeddings the table that it is.
        kv_cache_dtype: the format of stored keys and values: `auto` (the model's dtype), `int8` or `fp8`.
    """

    quantization: str | None = None
    quantization_group_size: int | None = None
    quantize_lm_head: bool = False
    kv_cache_dtype: str = "auto"

    @property
    def uses_eight_bits(self) -> bool:
        """Whether anything is in 8 bits."""
        return self.quantization is not None or self.kv_cache_dtype != "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.quantization
        if name is not None and name not in WEIGHT_FORMATS:
            raise ValueError(f"quantization must be None or one of {', '.join(WEIGHT_FORMATS)}, got {name!r}")
        if self.kv_cache_dtype not in CACHE_FORMATS:
            raise ValueError(f"kv_cache_dtype must be one of {', '.join(CACHE_FORMATS)}, got {self.kv_cache_dtype!r}")
        if self.quantization_group_size not in (None, GROUP_SIZE):
            raise ValueError(
                f"quantization_group_size must be None (a scale per row) or {GROUP_SIZE}, "
                f"got {self.quantization_group_size!r}"
            )
        for option in ("quantization_group_size", "quantize_lm_head"):
            if getattr(self, option) and name is None:
                raise ValueError(f"{option}={getattr(self, option)!r} needs quantization='int8' or 'fp8'")
        if self.fused_mlp == "on" and name is not None:
            raise ValueError("fused_mlp='on' is not possible: stage C's operator reads no 8-bit weights; use 'auto'")
        if self.quantize_lm_head and self.tensor_parallel_size > 1:
            raise ValueError("quantize_lm_head=True cannot be combined with tensor_parallel_size above 1")
        if self.attention_backend == "flash" and self.kv_cache_dtype != "auto":
            raise ValueError(
                f"attention_backend='flash' cannot read kv_cache_dtype={self.kv_cache_dtype!r}; "
                "use 'triton' or 'reference'"
            )


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to the command line."""
    add_graph_options(group)
    group.add_argument("--quantization", metavar="FORMAT", help="8-bit weights: int8 | fp8 (default: as loaded)")
    group.add_argument(
        "--quantization-group-size", type=int, metavar="N", help=f"{GROUP_SIZE}: a scale per {GROUP_SIZE} inputs"
    )
    group.add_argument("--quantize-lm-head", action="store_true", help="the LM head in 8 bits too")
    group.add_argument(
        "--kv-cache-dtype", metavar="FORMAT", default="auto", help="auto | int8 | fp8 (default: %(default)s)"
    )
