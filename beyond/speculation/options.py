"""The options of speculation, which `beyond.options` adds to stage F's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from stage_a_naive.contract.params import as_integer, check_field

KINDS = ("ngram", "model", "off")
MAX_DRAFT = 64  # tokens
MAX_SPECULATING = 64  # most running sequences with which drafts are made; with more, a step has no spare room


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """The options of speculation.

    Attributes:
        speculation: where drafts come from: "ngram" looks the last tokens up in the prompt and the answer; "model" asks
            a small model; "off" makes none.
        num_speculative_tokens: the longest draft.
        draft_model: the small model, of the same tokenizer; its vocabulary may have fewer padding tokens. The tutor
            comes with one.
    """

    speculation: str = "off"
    num_speculative_tokens: int = 4
    draft_model: str | None = None

    def __post_init__(self) -> None:
        if self.speculation not in KINDS:
            raise ValueError(f"speculation={self.speculation!r} is unknown; choose one of {', '.join(KINDS)}")
        rule = f"an integer from 1 to {MAX_DRAFT}"
        check_field(self, "num_speculative_tokens", as_integer, lambda v: 1 <= v <= MAX_DRAFT, rule)
        if self.draft_model is not None and self.speculation != "model":
            raise ValueError(
                f"draft_model={self.draft_model!r} and speculation={self.speculation!r}: give speculation='model'"
            )


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to the command line."""
    group.add_argument(
        "--speculation", choices=KINDS, default="off", help="where drafts come from (default: %(default)s)"
    )
    group.add_argument("--draft-model", metavar="MODEL", help="a small model of the same tokenizer")
    group.add_argument(
        "--num-speculative-tokens", type=int, default=4, metavar="N", help="the longest draft (default: %(default)s)"
    )
