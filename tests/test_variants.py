"""What a configuration may switch on: biases, activations, windows. Every model computes what transformers computes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from contract.engines import PACKAGES, ids
from stand_ins import forked_ranks
from tiny_checkpoints import save_tiny
from transformers import AutoModelForCausalLM

from stage_a_naive import SamplingParams, loop

WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
MODELS = PACKAGES[:4]  # the stages after D run its model
PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (20, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
BIASES = {
    "biases of attention": ("llama-tiny", {"attention_bias": True}),
    "biases of attention, Qwen3": ("qwen3-tiny", {"attention_bias": True}),
    "biases of the MLP": ("llama-tiny", {"mlp_bias": True}),
}
VARIANTS = (
    BIASES
    | {
        "windows, Qwen2": ("qwen2-tiny", WINDOWS),
        "windows, Qwen3": ("qwen3-tiny", WINDOWS | {"layer_types": ["sliding_attention"] * 2}),
        "windows, Mistral": ("mistral-tiny", {}),
        "no window, Mistral": ("mistral-tiny", {"sliding_window": None}),
        "Gemma 3": ("gemma3-tiny", {}),
        "Gemma 3 with biases": ("gemma3-tiny", {"attention_bias": True}),
    }
    | {
        name: ("qwen2-tiny", {"hidden_act": name})
        for name in ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "swish")
    }
)


@torch.inference_mode()
def answers_of_transformers(path: Path) -> tuple[list[list[int]], object]:
    """The tokens, and the log-probability of each answer's first one: it shows what changes no token."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = [loop.generate(model, prompt, eos_id=-1, max_tokens=GREEDY.max_tokens) for prompt in PROMPTS]
    logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    return tokens, pytest.approx([row.log_softmax(-1).max().item() for row in logits], abs=1e-5)


def answers_of(package: str, path: Path, **options: object) -> tuple[list[list[int]], list[float]]:
    llm = importlib.import_module(package).LLM(path, device="cpu", dtype="float32", **options)
    try:
        outputs = llm.generate(PROMPTS, GREEDY, False)
    finally:
        llm.close()
    return ids(outputs), [output["logprobs"][0][output["token_ids"][0]] for output in outputs]


@pytest.mark.compiler
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_model_gives_the_answers_of_transformers(tmp_path: Path, variant: str) -> None:
    preset, changes = VARIANTS[variant]
    path = save_tiny(tmp_path, preset, **changes)
    expected = answers_of_transformers(path)
    for package in MODELS:
        assert answers_of(package, path) == expected, package


@pytest.mark.parametrize("variant", BIASES)
def test_a_bias_is_added_once_by_all_ranks_together(tmp_path: Path, variant: str) -> None:
    preset, changes = BIASES[variant]
    path = save_tiny(tmp_path, preset, **changes)
    with forked_ranks():
        assert answers_of("stage_f_graph_tp", path, tensor_parallel_size=2) == answers_of_transformers(path)


@pytest.mark.compiler
def test_a_model_that_was_saved_without_its_head_has_names_without_a_prefix_and_loads(tmp_path: Path) -> None:
    expected = answers_of_transformers(save_tiny(tmp_path / "whole", "qwen2-tiny"))
    path = save_tiny(tmp_path / "layers", "qwen2-tiny", without_head=True)
    for package in MODELS:
        assert answers_of(package, path) == expected, package


@pytest.mark.compiler
def test_stage_c_says_in_one_line_that_its_operator_does_not_compute_an_activation(tmp_path: Path, capsys) -> None:
    path = save_tiny(tmp_path, "qwen2-tiny", hidden_act="gelu")
    answers_of("stage_c_fused_mlp", path)
    [line] = [line for line in capsys.readouterr().err.splitlines() if "MLP" in line]
    assert "PyTorch's kernels, as in stage B" in line and "its activation is GELU" in line
    with pytest.raises(ValueError, match="its activation is GELU"):
        answers_of("stage_c_fused_mlp", path, mlp_kernel="fused")
    with pytest.raises(ValueError, match="does not compute the activation gelu; use fused_mlp='auto'"):
        answers_of("stage_d_paged", path, fused_mlp="on")
