"""Layers with experts: the checkpoints that hold them, 8 bits, floors, and what is refused by name."""

from __future__ import annotations

import importlib
import random
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from contract.engines import ask
from measured import ENVIRONMENT
from ranks import forked_ranks
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.micro import expert_ranks, experts
from benchmarks.render import tables
from beyond.experts.parallel import check_expert_parallel
from beyond.options import Options
from beyond.quantization.floor import QuantizedBytes
from beyond.quantization.formats import FORMATS, dequantize_matrix, quantize_matrix
from beyond.quantization.options import QuantizationOptions
from stage_a_naive import SamplingParams, loop
from stage_a_naive.checkpoints.presets import preset_config
from stage_a_naive.contract.errors import ModelError
from stage_a_naive.floor import ModelBytes
from stage_d_paged.config import ModelConfig
from stage_f_graph_tp.tensor_parallel import RankGroup, WorkerError

PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (20, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FAMILIES = ("qwen3-moe-tiny", "qwen2-moe-tiny", "mixtral-tiny")
MODEL = "qwen3-moe-tiny"
RANKS = [{"tensor_parallel_size": 2, "expert_parallel": way} for way in ("sum", "all_to_all")]
F32, BF16 = torch.float32, torch.bfloat16
WITH_EXPERTS = ("stage_a_naive", "stage_b_decode_step", "beyond.experts")


def tokens_of(path: Path, package: str = "beyond.experts", **options: object) -> list[list[int]]:
    llm = importlib.import_module(package).LLM(path, device="cpu", dtype="float32", **options)
    try:
        return ask(llm, PROMPTS, GREEDY)
    finally:
        llm.close()


@cache
def transformers_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def tokens_of_transformers(path: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return [loop.generate(model, prompt, eos_id=-1, max_tokens=GREEDY.max_tokens) for prompt in PROMPTS]


@cache
@torch.inference_mode()
def scores_of_transformers(path: Path, dtype: torch.dtype, *ids: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of every position, and every layer's router scores `[positions, experts]`, in float32."""
    model, routers = transformers_model(path, dtype), []
    gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
    hooks = [gate.register_forward_hook(lambda *call: routers.append(call[-1][0].float())) for gate in gates]
    logits = model(torch.tensor([ids])).logits[0].float()
    for hook in hooks:
        hook.remove()
    return logits, routers


def check_in_bfloat16(path: Path, prompts: list[list[int]], answers: list[list[int]]) -> int:
    """Check answers in bfloat16 by transformers' margins in float32; return the number of tokens that are certain.

    A token is certain if its logit leads by more than transformers' own bfloat16 moves the difference of two logits in
    this text, and at no position before it the last chosen expert leads by less than bfloat16 moves two router scores.
    """
    certain = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        text = prompt + answer[:-1]
        (exact, routers), (rounded, near) = (scores_of_transformers(path, t, *text) for t in (F32, BF16))
        wide = torch.ones(len(text), dtype=torch.bool)
        for scores, moved in zip(routers, near, strict=True):
            per_token = transformers_model(path, F32).config.num_experts_per_tok
            last, next_one = scores.topk(per_token + 1).values[:, -2:].unbind(-1)
            wide &= last - next_one > 2 * (scores - moved).abs().max()
        best, second = exact.topk(2).values.unbind(-1)
        wide = wide.cummin(0).values & (best - second > 2 * (exact - rounded).abs().max())
        for i, token in enumerate(answer, len(prompt) - 1):
            if wide[i]:
                assert token == exact[i].argmax(), f"after {text[: i + 1]}"
                certain += 1
            elif token != exact[i].argmax():
                break
    return certain


def change_weights(path: Path, change) -> Path:
    """Write a checkpoint's tensors again after `change(tensors)`."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_one_tensor_per_expert_and_one_for_all_give_the_tokens_of_transformers(tmp_path: Path, family: str) -> None:
    path = save_tiny(tmp_path / "each", family)
    fused = shutil.copytree(path, tmp_path / "fused")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.save_pretrained(fused, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(fused / "model.safetensors"))
    expected = tokens_of_transformers(path)
    for package in WITH_EXPERTS:
        for form in (path, fused):
            assert tokens_of(form, package) == expected, (package, form.name)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (MODEL, {"norm_topk_prob": False}),
        (MODEL, {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
        (MODEL, {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts_per_tok": 1}),
        (MODEL, {"attention_bias": True, "hidden_act": "gelu"}),
        (MODEL, {"sliding_window": 8, "num_experts_per_tok": 16}),
        ("mixtral-tiny", {"sliding_window": 8}),
        ("qwen2-moe-tiny", {"norm_topk_prob": True, "qkv_bias": False}),
    ],
)
def test_every_field_of_the_config_means_what_it_means_to_transformers(
    tmp_path: Path, family: str, changes: dict
) -> None:
    path = save_tiny(tmp_path, family, **changes)
    assert tokens_of(path) == tokens_of_transformers(path)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_has_two_names_and_the_size_of_a_head_is_the_files(tmp_path: Path, name: str) -> None:
    from stage_a_naive.checkpoints.model_config import read_config

    fields = '"num_hidden_layers": 2, "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128'
    text = f'{{"model_type": "qwen3_moe", "{name}": 24, {fields}}}'
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    config = ModelConfig.from_hf(read_config(tmp_path))
    assert [kind.experts and kind.experts.count for kind in config.layers] == [24, 24] and config.head_dim == 128


@pytest.mark.parametrize(
    ("family", "name", "group"),
    [(MODEL, "int8", 128), (MODEL, "fp8", None), ("qwen2-moe-tiny", "fp8", None), ("mixtral-tiny", "int8", None)],
)
def test_8_bit_experts_give_the_tokens_of_their_dequantised_weights(
    tmp_path: Path, family: str, name: str, group: int | None
) -> None:
    path = save_tiny(tmp_path / "whole", family)

    def round_trip(tensors: dict[str, torch.Tensor]) -> None:
        for key, weight in tensors.items():
            if "proj.weight" in key or ".experts." in key:
                quantized = quantize_matrix(weight, FORMATS[name], group)
                tensors[key] = dequantize_matrix(quantized, torch.float32, group)

    rounded = change_weights(shutil.copytree(path, tmp_path / "rounded"), round_trip)
    found = tokens_of(path, quantization=name, quantization_group_size=group)
    assert found == tokens_of(rounded)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 17}, r"num_experts_per_tok \(17\) is more than num_experts \(16\)"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be 1 or more, got 0"),
        ({"num_experts": 0}, "num_experts must be 1 or more, got 0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be 1 or more, got 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be 1 or more, got 0"),
    ],
)
def test_impossible_numbers_of_experts_are_named(changes: dict, message: str) -> None:
    config = preset_config(MODEL)
    for field, value in changes.items():
        setattr(config, field, value)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(config)


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[EXPERT]


def one_too_many(tensors: dict[str, torch.Tensor]) -> None:
    tensors[EXPERT.replace(".3.", ".16.")] = tensors[EXPERT].clone()


def too_narrow(tensors: dict[str, torch.Tensor]) -> None:
    tensors[EXPERT] = tensors[EXPERT][:, :-1].contiguous()


def not_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.gate.weight"][3, 5] = float("nan")


def fewer_fused(tensors: dict[str, torch.Tensor]) -> None:
    """One tensor for all experts, which has one expert fewer."""
    for part in ("gate_proj", "up_proj", "down_proj"):
        parts = [tensors.pop(f"model.layers.1.mlp.experts.{i}.{part}.weight") for i in range(16)]
        tensors[f"model.layers.1.mlp.experts.{part}"] = torch.stack(parts[:-1])
    names = [f"model.layers.1.mlp.experts.{part}" for part in ("gate_proj", "up_proj")]
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.cat([tensors.pop(name) for name in names], 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, f"the weight {EXPERT} is missing"),
        (one_too_many, r"1 weights that the model does not have: model.layers.1.mlp.experts.16.up_proj.weight"),
        (too_narrow, rf"{EXPERT} has shape \[48, 127\]; the config asks for \[48, 128\]"),
        (not_a_number, "the weight model.layers.1.mlp.gate.weight holds NaN"),
        (fewer_fused, r"model.layers.1.mlp.experts.15.gate_proj.weight is missing"),
    ],
)
@pytest.mark.parametrize("package", ["stage_a_naive", "beyond.experts"])
def test_a_damaged_checkpoint_is_refused_with_the_name_of_the_weight(
    tmp_path: Path, package: str, damage, message: str
) -> None:
    path = change_weights(save_tiny(tmp_path, MODEL), damage)
    with pytest.raises(
        ModelError, match=message if package != "stage_a_naive" or damage is not not_a_number else "NaN"
    ):
        tokens_of(path, package)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2-moe-tiny", {}),
        ("mixtral-tiny", {"pipeline_parallel_size": 2}),
        (MODEL, {"expert_parallel": "sum", "pipeline_parallel_size": 2}),
        ("qwen2-moe-tiny", {"expert_parallel": "sum", "speculation": "ngram"}),
        ("mixtral-tiny", {"expert_parallel": "all_to_all", "pipeline_parallel_size": 2}),
    ],
)
def test_ranks_with_a_part_of_every_expert_or_with_whole_ones_give_the_tokens_of_transformers(
    tmp_path: Path, family: str, options: dict
) -> None:
    path = save_tiny(tmp_path, family)
    with forked_ranks():
        assert tokens_of(path, tensor_parallel_size=2, **options) == tokens_of_transformers(path)


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize(
    ("device", "options"),
    [*(("cpu", options) for options in ({}, *RANKS)), pytest.param("cuda", {}, marks=pytest.mark.gpu)],
    ids=str,
)
def test_in_bfloat16_tokens_are_transformers_where_rounding_cannot_decide(
    tiny: Path, device: str, options: dict
) -> None:
    numbers = random.Random(0)
    prompts = [numbers.choices(range(1, 4000), k=numbers.randint(1, 3)) for _ in range(60)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with forked_ranks():
        llm = importlib.import_module("beyond.experts").LLM(tiny, device=device, dtype="bfloat16", **options)
    try:
        answers = ask(llm, prompts, params)
    finally:
        llm.close()
    assert check_in_bfloat16(tiny, prompts, answers) >= 25, "of 180 tokens"


@pytest.mark.parametrize("way", ["sum", "all_to_all"])
def test_ranks_with_whole_8_bit_experts_give_one_ranks_tokens(tmp_path: Path, way: str) -> None:
    path, options = save_tiny(tmp_path, MODEL), {"quantization": "int8", "quantization_group_size": 128}
    with forked_ranks():
        assert tokens_of(path, tensor_parallel_size=2, expert_parallel=way, **options) == tokens_of(path, **options)


def test_a_row_is_sent_to_the_ranks_of_its_experts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny(tmp_path, MODEL, num_experts_per_tok=1)
    sent_rows: list[int] = []
    all_to_all = RankGroup.all_to_all

    def count(group: RankGroup, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        if x.is_floating_point() and x.shape[1] == 1:  # the weights of the rows' experts
            sent_rows.append(sum(sent))
        return all_to_all(group, x, sent, received)

    monkeypatch.setattr(RankGroup, "all_to_all", count)
    with forked_ranks():
        assert tokens_of(path, tensor_parallel_size=2, expert_parallel="all_to_all") == tokens_of_transformers(path)
    layers, tokens = 2, sum(map(len, PROMPTS))
    assert sent_rows[:layers] == [tokens // 2] * layers, "rank 0 answers for half of the tokens, which have one expert"


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"moe_intermediate_size": 47}, {}, "size=2 does not divide the model's 47 intermediate features of an expert"),
        (
            {"num_experts": 15},
            {"expert_parallel": "sum"},
            "tensor_parallel_size=2 does not divide the model's 15 experts",
        ),
        (
            {},
            {"expert_parallel": "sum", "tensor_parallel_size": 1},
            "one rank has all experts; give tensor_parallel_size",
        ),
        ({}, {"expert_parallel": "yes"}, "expert_parallel='yes' is unknown; choose one of off, sum, all_to_all"),
    ],
)
def test_ranks_that_cannot_divide_the_experts_are_refused(
    tmp_path: Path, changes: dict, options: dict, message: str
) -> None:
    path = save_tiny(tmp_path, MODEL, **changes)
    with pytest.raises(ValueError, match=message):
        tokens_of(path, **{"tensor_parallel_size": 2} | options)


def test_a_model_without_experts_and_all_to_alls_in_graphs_are_refused() -> None:
    with pytest.raises(ValueError, match="expert_parallel='sum', but the model has no experts; leave expert_parallel"):
        importlib.import_module("beyond").LLM("tutor", device="cpu", tensor_parallel_size=2, expert_parallel="sum")
    config = ModelConfig.from_hf(preset_config(MODEL))
    given = {"expert_parallel": "all_to_all", "tensor_parallel_size": 2}
    with pytest.raises(
        ValueError, match="cannot be recorded in CUDA graphs.* use expert_parallel='sum', or enforce_eag"
    ):
        check_expert_parallel(config, Options(**given), "cuda")
    check_expert_parallel(config, Options(**given, enforce_eager=True), "cuda")


@pytest.mark.parametrize("index", [3, 11])
def test_an_expert_that_is_missing_is_named_by_the_rank_that_should_have_it(tmp_path: Path, index: int) -> None:
    name = f"model.layers.1.mlp.experts.{index}.up_proj.weight"
    path = change_weights(save_tiny(tmp_path, MODEL), lambda tensors: tensors.pop(name))
    with forked_ranks(), pytest.raises((ModelError, WorkerError), match=f"the weight {name} is missing"):
        tokens_of(path, tensor_parallel_size=2, expert_parallel="sum")


@pytest.mark.fast
def test_the_floor_of_one_request_counts_the_experts_of_one_token() -> None:
    found = ModelBytes(preset_config("qwen3-30b-a3b"), 2)
    assert found.weight_bytes == pytest.approx(6.08e9, rel=2e-3)
    tiny = preset_config("qwen2-moe-tiny")
    with torch.device("meta"):
        named = dict(AutoModelForCausalLM.from_config(tiny).named_parameters())
    share = {"experts.gate_up_proj": 3 / 12, "experts.down_proj": 3 / 12}
    count = sum(int(w.numel() * share.get(n.split("mlp.")[-1], 1)) for n, w in named.items())
    assert ModelBytes(tiny, 2).weight_bytes == 2 * count
    options = QuantizationOptions(quantization="int8")
    eight = QuantizedBytes(ModelBytes(preset_config("qwen3-30b-a3b"), 2), options).weight_bytes
    assert 0.55 < eight / found.weight_bytes < 0.57, "the head and the routers stay in 16 bits"


@pytest.mark.fast
def test_copies_of_popular_experts_are_on_different_ranks_and_even_out_the_load() -> None:
    popularity = 1 / torch.arange(1.0, 129)
    before, after = (expert_ranks.placed(popularity, copies) for copies in (0, 16))
    assert (before.sum(0) == 1).all() and (before.sum(1) == 16).all()
    assert (after.sum(1) == 18).all() and after.sum(0)[0] == 8 and (after.sum(0) >= 1).all()
    slowest = [(popularity / holds.sum(0) * holds).sum(1).max() for holds in (before, after)]
    mean = popularity.sum() / expert_ranks.BALANCED
    assert slowest[0] > 1.4 * mean and slowest[1] < 1.02 * mean


@pytest.mark.fast
def test_rows_that_other_ranks_need_are_as_many_as_the_formula_says() -> None:
    rank_of = torch.arange(128) // 8  # 16 ranks
    chosen = expert_ranks.choose(4000, 0.0, 0)
    needs = torch.zeros(4000, 16).scatter_(1, rank_of[chosen], 1.0)
    assert needs.mean().item() == pytest.approx(expert_ranks.needed(16), rel=0.01)
    assert expert_ranks.needed(1) == 1


def test_the_study_on_ranks_times_every_way_to_divide_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "MODEL", MODEL)
    monkeypatch.setattr(experts, "BYTES", ModelBytes(preset_config(MODEL), 4))
    monkeypatch.setattr(experts, "STEPS", 2)
    options = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 64}
    with forked_ranks():
        rows = experts.time_ranks((2,), (1, 3), 3, options)
    assert [row["ranks"] for row in rows[::2]] == [1, 2, 2, 2, 2] and all(len(row["samples"]) == 3 for row in rows)
    lines = tables(experts, [{"kind": "experts", "environment": ENVIRONMENT, "part": "ranks", "rows": rows}])
    heads, _, first, *others = lines["experts-ranks"][:7]
    assert heads == "| ms per step | 1 request | 3 requests |" and first.startswith("| 1 GPU: all experts |")
    assert [line.split(" | ")[0] for line in others] == [f"| 2 GPUs: {way}" for way in experts.DIVIDED]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options", [{}, {"expert_parallel": "sum"}, {"expert_parallel": "all_to_all", "enforce_eager": True}], ids=str
)
def test_two_gpus_with_parts_of_experts_or_whole_ones_give_stage_as_tokens(family: str, options: dict) -> None:
    prompts = [PROMPTS[0], PROMPTS[1], [7, 8, 9] * 60]  # together more than few tokens
    found = []
    for package, given in (("stage_a_naive", {}), ("beyond.experts", {"tensor_parallel_size": 2} | options)):
        llm = importlib.import_module(package).LLM(f"random:{family}", device="cuda", dtype="float32", **given)
        found.append(ask(llm, prompts, GREEDY))
        llm.close()
    assert found[0] == found[1]
