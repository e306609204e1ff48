"""Every idea of stage F can be switched off, by its name; with all of them off, the launches are stage E's."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from contract.engines import GREEDY, MODEL, PROMPTS, ask
from stand_ins import EagerRecorder, forwards_of, with_megakernel
from torch.utils._python_dispatch import TorchDispatchMode

import stage_e_batching
import stage_f_graph_tp
from stage_a_naive.checkpoints.presets import preset_config
from stage_d_paged.config import ModelConfig
from stage_f_graph_tp import kernels
from stage_f_graph_tp.cuda_graph import DecodeGraphs
from stage_f_graph_tp.options import IDEAS, GraphOptions
from stage_f_graph_tp.prefill_graphs import PrefillGraphs

POOL = {"device": "cpu", "kvcache_block_size": 4, "num_kvcache_blocks": 256}


class Launches(TorchDispatchMode):
    """Counts the operators that run, by name and result shape."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, object]] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else None
        self.counts[str(function), shape] += 1
        return result


def launches(llm: stage_e_batching.LLM) -> tuple[list[list[int]], Counter]:
    with Launches() as counted:
        tokens = ask(llm, PROMPTS, GREEDY) + ask(llm, PROMPTS[:1], GREEDY)
    return tokens, counted.counts


@pytest.mark.compiler
@pytest.mark.parametrize("fused_mlp", ["off", "on"])
def test_with_all_ideas_off_every_launch_is_stage_es(fused_mlp):
    found = launches(stage_f_graph_tp.LLM(MODEL, without=tuple(IDEAS), fused_mlp=fused_mlp, **POOL))
    expected = launches(stage_e_batching.LLM(MODEL, fused_mlp=fused_mlp, **POOL))
    assert found == expected
    operator = any("six_engines" in name for name, _ in found[1])
    assert operator == (fused_mlp == "on"), "stage C's operator runs where it is asked for"


@pytest.mark.parametrize("idea", IDEAS)
def test_one_name_switches_one_idea_off(idea):
    options = GraphOptions(without=idea)
    assert [name for name in IDEAS if not options.uses(name)] == [idea]


def test_names_are_read_from_a_sequence_or_from_one_string():
    for given in ("pdl, graphs", ["graphs", "pdl"], {"pdl", "graphs"}, ("pdl", "graphs", "pdl")):
        assert GraphOptions(without=given).without == ("graphs", "pdl")
    assert GraphOptions(without="").without == GraphOptions().without == ()


@pytest.mark.parametrize("given", ["graph", ("graphs", "fused"), 3, None, True])
def test_a_name_that_is_none_is_refused_with_those_that_there_are(given):
    with pytest.raises(ValueError, match="without.*one_shot_all_reduce"):
        GraphOptions(without=given)


def test_eager_means_no_graphs_and_nothing_else():
    eager, plain = GraphOptions(enforce_eager=True), GraphOptions(without="graphs,prefill_graphs")
    assert [eager.uses(idea) for idea in IDEAS] == [plain.uses(idea) for idea in IDEAS]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_the_megakernel_needs_no_graphs(graphs):
    llm = stage_f_graph_tp.LLM(MODEL, max_num_seqs=8, **POOL)
    expected = ask(stage_e_batching.LLM(MODEL, **POOL), PROMPTS, GREEDY)
    runner, fake = with_megakernel(llm)
    runner.capture(EagerRecorder(), [1, 2, 4, 8] if graphs else [], [16])
    assert bool(forwards_of(runner, DecodeGraphs)) == (graphs and runner.forwards[0].most_rows < 8)
    assert forwards_of(runner, PrefillGraphs)
    assert ask(llm, PROMPTS, GREEDY) == expected and fake.sizes


BEYOND = [
    ("gemma3-tiny", {}, "four norms per layer, the activation gelu_pytorch_tanh"),
    ("llama-tiny", {"attention_bias": True, "mlp_bias": True}, "a bias behind attention, biases in the MLP"),
    ("qwen2-tiny", {"hidden_act": "gelu"}, "the activation gelu"),
]


@pytest.mark.parametrize("without", ["fused_layers", "skinny_gemm", "pdl", ""])
def test_layers_are_fused_between_products_inside_them_or_both(without, monkeypatch):
    fused = pytest.importorskip("stage_f_graph_tp.kernels.fused_layers")
    calls = []
    monkeypatch.setattr(fused, "fuse_layers", lambda _, most, **kwargs: calls.append((most > 0, kwargs)))
    model = SimpleNamespace(config=SimpleNamespace(beyond_kernels="", hidden_size=896))
    line = kernels.choose_layers(model, GraphOptions(without=without), torch.device("cuda"))
    expected = {"elementwise": without != "fused_layers", "pdl": without != "pdl"}
    assert calls == [(without != "skinny_gemm", expected)]
    assert ("between the matrix products" in line) == (without != "fused_layers")


@pytest.mark.parametrize(("preset", "changes", "what"), BEYOND)
def test_layers_that_our_kernels_do_not_compute_are_passed_over_in_one_line(preset, changes, what, monkeypatch):
    fused = pytest.importorskip("stage_f_graph_tp.kernels.fused_layers")
    monkeypatch.setattr(fused, "fuse_layers", lambda *_, **__: pytest.fail("they were fused"))
    config = preset_config(preset)
    config.update(changes)
    model = SimpleNamespace(config=ModelConfig.from_hf(config))
    line = kernels.choose_layers(model, GraphOptions(), torch.device("cuda"))
    assert line == f"layers: stage D's (our Triton kernels do not compute {what})"
