"""The options of 8-bit weights and an 8-bit KV cache, which `beyond.options` adds to stage F's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

WEIGHT_FORMATS = ("int8", "fp8")
CACHE_FORMATS = ("auto", "int8", "fp8")
GROUP_SIZE = 128  # input features that share a scale, with quantization_group_size=128


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions:
    """The options of quantisation.

    Attributes:
        quantization: the format of the layers' matrices: None (as loaded), `int8` or `fp8` (e4m3).
        quantization_group_size: None: a scale per output feature; 128: a scale per output feature and 128 inputs.
        quantize_lm_head: quantise the LM head too, and with tied embeddings the embedding table.
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


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to the command line."""
    group.add_argument("--quantization", metavar="FORMAT", help="8-bit weights: int8 | fp8 (default: as loaded)")
    group.add_argument(
        "--quantization-group-size", type=int, metavar="N", help=f"{GROUP_SIZE}: a scale per {GROUP_SIZE} inputs"
    )
    group.add_argument("--quantize-lm-head", action="store_true", help="the LM head in 8 bits too")
    group.add_argument(
        "--kv-cache-dtype", metavar="FORMAT", default="auto", help="auto | int8 | fp8 (default: %(default)s)"
    )
