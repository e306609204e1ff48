"""The option of a pool per kind of layer, which `beyond.options` adds to stage F's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How the KV cache of a model is divided whose layers see differently far back.

    Attributes:
        hybrid_kv_cache: layers with a window have a pool of their own, in the memory that one pool would take, and give
            blocks back that no later token sees. A model without such layers runs as without the option.
    """

    hybrid_kv_cache: bool = False


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the option to the command line."""
    group.add_argument(
        "--hybrid-kv-cache", action="store_true", help="a pool of their own for layers that see only the last tokens"
    )
