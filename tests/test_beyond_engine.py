"""`from beyond import LLM`: the options of all packages, in every pair that there is, or refused with advice."""

from __future__ import annotations

from contextlib import closing
from functools import reduce
from itertools import combinations
from operator import or_

import pytest
from contract.engines import CHATS, ids
from stand_ins import forked_ranks

import beyond
import beyond.experts
import beyond.quantization
import beyond.scale_out
import beyond.speculation
import beyond.windows
from beyond.options import REFUSED, Options
from stage_a_naive import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
POOL = {"num_kvcache_blocks": 64, "max_model_len": 256}
FORMATS = {
    "int8": {"quantization": "int8"},
    "groups and head": {"quantization": "int8", "quantization_group_size": 128, "quantize_lm_head": True},
    "fp8": {"quantization": "fp8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
}
OTHERS = {
    "n-grams": {"speculation": "ngram"},
    "n-grams, no overlap": {"speculation": "ngram", "without": "overlap"},
    "a model": {"speculation": "model"},
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
}
ALL = FORMATS | OTHERS
PAIRS = [pair for pair in combinations(ALL, 2) if not any(ALL[pair[0]].keys() & ALL[pair[1]].keys())]
MORE = [("int8", "int8 cache", name, where) for name in ("n-grams", "a model") for where in ("ranks", "stages")]
TIERED = [
    pytest.param(
        pair, marks=[pytest.mark.slow] * bool({"ranks", "stages", "n-grams, no overlap"} & {*pair}), id=" × ".join(pair)
    )
    for pair in PAIRS  # several processes and no overlap: MORE has formats, guesses and processes at once
]
ANSWERS: dict[tuple[str, ...], list[list[int]]] = {}


def options_of(names: tuple[str, ...]) -> dict[str, object]:
    return reduce(or_, (ALL[name] for name in names), POOL)


def answers(*names: str) -> list[list[int]]:
    """What the tutor answers with these options."""
    with forked_ranks(), closing(beyond.LLM("tutor", device="cpu", **options_of(names))) as llm:
        return ids(llm.chat(CHATS, GREEDY))


def is_refused(names: tuple[str, ...]) -> bool:
    """Whether the table refuses the combination; then the error names both options and what to do."""
    try:
        Options(**options_of(names))
    except ValueError as error:
        [refusal] = [r for r in REFUSED if str(error).endswith(f": {r.advice}")]
        assert f"{refusal.one}=" in str(error) and f"{refusal.other}=" in str(error)
        return True
    return False


@pytest.mark.parametrize("names", [*TIERED, *MORE], ids=" × ".join)
def test_every_combination_gives_the_tokens_of_its_formats_alone_or_is_refused(names: tuple[str, ...]) -> None:
    if is_refused(names):
        return
    formats = tuple(name for name in names if name in FORMATS)
    if formats not in ANSWERS:
        ANSWERS[formats] = answers(*formats)
    assert answers(*names) == ANSWERS[formats]


@pytest.mark.fast
def test_what_is_refused_is_no_more_than_this() -> None:
    refused = {names for names in [*PAIRS, *MORE] if is_refused(names)}
    assert refused == {("groups and head", "ranks"), ("n-grams, no overlap", "stages")}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"quantization": "int8", "fused_mlp": "on"},
            "fused_mlp='on' cannot be combined with quantization='int8': .* use fused_mlp='auto'",
        ),
        (
            {"kv_cache_dtype": "int8", "attention_backend": "flash"},
            "attention_backend='flash' cannot be combined with kv_cache_dtype='int8': .* use .*'triton'",
        ),
        (
            {"quantization": "int8", "quantize_lm_head": True, "tensor_parallel_size": 2},
            "quantize_lm_head=True cannot be combined with tensor_parallel_size=2",
        ),
        (
            {"speculation": "model", "tensor_parallel_size": 2},
            "speculation='model' cannot be combined with tensor_parallel_size=2: .* give num_kvcache_blocks",
        ),
        (
            {"pipeline_parallel_size": 2, "without": "overlap"},
            "without=\\('overlap',\\) cannot be combined with pipeline_parallel_size=2: .* num_micro_batches=1",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_with_advice(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        beyond.LLM("tutor", device="cpu", **options)


@pytest.mark.fast
def test_every_package_exports_the_same_engine() -> None:
    packages = beyond.quantization, beyond.speculation, beyond.scale_out, beyond.windows, beyond.experts
    assert all(package.LLM is beyond.LLM for package in packages)
