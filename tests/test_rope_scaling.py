"""Rotary embeddings stretched to longer contexts: what transformers computes, or refused by name."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from contract.engines import PACKAGES, PAGED
from test_stage_a_loading import edit_json
from transformers import AutoModelForCausalLM

from stage_a_naive import SamplingParams, loop
from stage_a_naive.contract.errors import ModelError

PROMPT = [(i * 37 + 5) % 4000 + 1 for i in range(20)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
MODELS = PACKAGES[:4]  # the stages after D run its model
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, all numbers": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {  # the answer passes the 32nd position
        "short_factor": [1 + i / 8 for i in range(32)],
        "long_factor": [1 + i / 4 for i in range(32)],
        "original_max_position_embeddings": 32,
    },
}


@pytest.fixture(params=SCALINGS)
def rope_type(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def stretched(rope_type: str, tutor_copy: Path) -> Path:
    """The tutor with another way to turn heads."""
    rope = {"rope_type": rope_type.partition(",")[0], "rope_theta": 10000.0, **SCALINGS[rope_type]}
    edit_json(tutor_copy / "config.json", rope_parameters=rope)
    return tutor_copy


@pytest.mark.compiler
def test_all_models_give_the_tokens_of_transformers(stretched: Path, rope_type: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(stretched, dtype=torch.float32)
    expected = loop.generate(model, PROMPT, eos_id=-1, max_tokens=GREEDY.max_tokens)
    for package in MODELS if rope_type != "longrope" else set(PACKAGES).difference(PAGED):
        llm = importlib.import_module(package).LLM(stretched, device="cpu", dtype="float32")
        assert llm.generate([PROMPT], GREEDY, False)[0]["token_ids"] == expected, package


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_compiled_step_refuses_frequencies_that_depend_on_the_position(stretched: Path, rope_type: str) -> None:
    with pytest.raises(ValueError, match=f"compile=True cannot .* {rope_type!r}.*leave compile off"):
        importlib.import_module("stage_b_decode_step").LLM(stretched, device="cpu", compile=True)


@pytest.mark.parametrize("rope_type", ["longrope"])
@pytest.mark.parametrize("package", PAGED)
def test_stages_with_a_model_of_their_own_refuse_longrope_by_name(stretched: Path, package: str) -> None:
    with pytest.raises(ModelError, match="rope scaling type 'longrope' is not supported; these are: default, linear"):
        importlib.import_module(package).LLM(stretched, device="cpu")
