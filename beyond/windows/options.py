"""The option of a pool per kind of layer, which `beyond.options` adds to stage F's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How the KV cache is divided if some layers of the model have a window.

    Attributes:
        hybrid_kv_cache: layers with a window have a separate pool, and free blocks that no later token sees. Both pools
            together take the memory of one. The option has no effect on a model without such layers.
    """

    hybrid_kv_cache: bool = False


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the option to the command line."""
    group.add_argument(
        "--hybrid-kv-cache", action="store_true", help="a pool of their own for layers that see only the last tokens"
    )
