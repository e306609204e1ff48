"""Rotary embeddings stretched to longer contexts: stages A to C run what transformers runs, D to F refuse by name."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from stage_a_naive import SamplingParams
from stage_a_naive.contract.errors import ModelError

PROMPT = [(i * 37 + 5) % 4000 + 1 for i in range(20)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {  # the answer passes the 32nd position
        "short_factor": [1 + i / 8 for i in range(32)],
        "long_factor": [1 + i / 4 for i in range(32)],
        "original_max_position_embeddings": 32,
    },
}
PAGED = ["stage_d_paged", "stage_e_batching", "stage_f_graph_tp", "beyond.quantization"]


@pytest.fixture(params=SCALINGS)
def stretched(request: pytest.FixtureRequest, tutor_copy: Path) -> Path:
    """The tutor with another way to turn heads."""
    config = json.loads((tutor_copy / "config.json").read_text())
    rope = {"rope_type": request.param, "rope_theta": 10000.0, **SCALINGS[request.param]}
    (tutor_copy / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    return tutor_copy


@torch.inference_mode()
def greedy_of_transformers(path: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = model(torch.tensor([PROMPT]), use_cache=True)
    ids = [int(out.logits[0, -1].argmax())]
    while len(ids) < GREEDY.max_tokens:
        out = model(torch.tensor([ids[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        ids.append(int(out.logits[0, -1].argmax()))
    return ids


@pytest.mark.compiler
def test_stages_a_to_c_give_the_tokens_of_transformers(stretched: Path) -> None:
    expected = greedy_of_transformers(stretched)
    for package in ("stage_a_naive", "stage_b_decode_step", "stage_c_fused_mlp"):
        llm = importlib.import_module(package).LLM(stretched, device="cpu", dtype="float32")
        assert llm.generate([PROMPT], GREEDY, False)[0]["token_ids"] == expected, package


def test_a_compiled_step_refuses_frequencies_that_depend_on_the_position(stretched: Path) -> None:
    rope_type = json.loads((stretched / "config.json").read_text())["rope_parameters"]["rope_type"]
    if rope_type in ("linear", "yarn"):
        pytest.skip("the frequencies are fixed")
    with pytest.raises(ValueError, match=f"compile=True cannot .* {rope_type!r}.*leave compile off"):
        importlib.import_module("stage_b_decode_step").LLM(stretched, device="cpu", compile=True)


@pytest.mark.parametrize("package", PAGED)
def test_stages_with_a_model_of_their_own_refuse_by_name(stretched: Path, package: str) -> None:
    with pytest.raises(ModelError, match="rope scaling type '.*' is not supported; these are: default, llama3"):
        importlib.import_module(package).LLM(stretched, device="cpu")
