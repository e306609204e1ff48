"""The floor that every stage's command line prints: bytes per token, bandwidth, and the ratio of the two times."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from stage_a_naive import LLM, floor
from stage_a_naive.checkpoints.presets import preset_config
from stage_a_naive.contract.outputs import make_metrics
from stage_a_naive.floor import ModelBytes, against_floor, cache_file, copy_bandwidth

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The bandwidths that the next measurements give; each is measured once."""
    coming: list[float] = []
    monkeypatch.setattr(floor, "measure_copy_bandwidth", lambda device: coming.pop(0))
    return coming


@pytest.fixture
def more_threads() -> Iterator[Callable]:
    """A number of threads other than the process's; for a copy this counts as another device."""
    before = torch.get_num_threads()
    yield lambda: torch.set_num_threads(before + 1)
    torch.set_num_threads(before)


@pytest.mark.parametrize("preset", ["qwen2-tiny", "qwen3-tiny", "llama-tiny", "gemma3-tiny"])
def test_a_step_reads_every_weight_and_cached_number_once_and_of_the_embedding_only_the_lm_head(preset: str) -> None:
    llm = LLM(f"random:{preset}", device="cpu", dtype="float32")
    tied = llm.model.config.tie_word_embeddings
    embedding = llm.model.get_input_embeddings().weight.numel()
    read = sum(p.numel() for p in llm.model.parameters()) - (0 if tied else embedding)
    assert ModelBytes(llm.source.config, 4).weight_bytes == 4 * read
    with torch.inference_mode():
        cache = llm.model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    stored = sum(4 * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers)
    assert 3 * ModelBytes(llm.source.config, 4).kv_bytes_per_token == stored


def test_a_layer_with_a_window_reads_the_last_tokens_alone() -> None:
    model = ModelBytes(preset_config("gemma-3-270m"), 2)
    of_a_layer = model.kv_bytes_per_token // 18
    for context in (100, 512, 30_000):
        read = of_a_layer * (3 * context + 15 * min(context, 512))
        assert round(model.step_bytes(context)) == model.weight_bytes + read


def test_the_program_on_timing_prints_two_wrong_times_the_correct_one_and_the_floor(
    capsys: pytest.CaptureFixture,
) -> None:
    program = Path(floor.__file__).with_name("timing.py").read_text("utf-8")
    exec(program.replace("8192", "512"), {})  # the same on a matrix of 1 MB
    line = r"(wrong, the first call|wrong, no synchronisation|correct) +[\d.]+ ms, from [\d.]+ to [\d.]+\n"
    assert re.fullmatch(rf"({line}){{3}}floor +[\d.]+ ms: 1 MB at the speed of a copy\n", capsys.readouterr().out)


def test_the_line_has_bytes_bandwidth_and_the_ratio_if_there_was_a_decode_step(rates: list[float]) -> None:
    model = ModelBytes(preset_config("qwen2.5-0.5b"), 2)
    metrics = make_metrics(prefill_time=1.0, decode_time=0.0, ttft=1.0, num_prompt=3, num_generated=1)
    assert against_floor(model, CPU, metrics) == "" and not cache_file().exists()
    rates.append(4e12)
    metrics = make_metrics(prefill_time=1.0, decode_time=0.1, ttft=1.0, num_prompt=128, num_generated=101)
    line = against_floor(model, CPU, metrics)  # 1 ms per token
    # 0.988 GB of weights and 12,288 bytes for each of 128 + 50.5 tokens
    assert (
        line.strip()
        == "990.3 MB read per token, 990.3 of 4000.0 GB/s: 4.0 × the floor of 0.248 ms (the time of reading them)"
    )


def test_of_what_a_cpus_caches_may_hold_the_line_says_no_floor(rates: list[float]) -> None:
    model = ModelBytes(preset_config("qwen2-tiny"), 4)
    metrics = make_metrics(prefill_time=1.0, decode_time=0.1, ttft=1.0, num_prompt=3, num_generated=101)
    line = against_floor(model, CPU, metrics)
    assert re.fullmatch(r" *[\d.]+ MB read per token, [\d.]+ GB/s", line) and not cache_file().exists()


def test_the_bandwidth_is_measured_once_per_device_into_a_file_that_is_never_half_written(
    rates: list[float], more_threads: Callable
) -> None:
    rates += [5e9, 6e9]
    assert copy_bandwidth(CPU) == copy_bandwidth(CPU) == 5e9
    with cache_file().open() as whole:
        more_threads()
        assert copy_bandwidth(CPU) == 6e9
        assert len(json.load(whole)) == 1, "another file took its place"
    assert rates == [] and len(json.loads(cache_file().read_text())) == 2


def test_a_bandwidth_that_is_old_or_of_no_known_age_is_measured_again(rates: list[float]) -> None:
    rates += [5e9, 6e9, 7e9]
    assert copy_bandwidth(CPU) == 5e9
    for kept, expected in (({"bytes_per_s": 5e9, "measured": time.time() - 8 * 86400}, 6e9), (5e9, 7e9)):
        [name] = json.loads(cache_file().read_text())
        cache_file().write_text(json.dumps({name: kept}))
        assert copy_bandwidth(CPU) == copy_bandwidth(CPU) == expected


def test_where_nothing_can_be_kept_it_is_measured_every_time(
    rates: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    rates += [5e9, 6e9]
    assert [copy_bandwidth(CPU), copy_bandwidth(CPU)] == [5e9, 6e9]


def test_a_copy_reads_and_writes_and_its_best_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [9.0, 9.0, 0.1, 4.0, 2.0, 8.0]  # the first three are warm-up
    clock = iter([time for i, length in enumerate(seconds) for time in (100.0 * i, 100.0 * i + length)])
    monkeypatch.setattr(floor, "synchronized_time", lambda device: next(clock))
    assert floor.measure_copy_bandwidth(CPU, num_bytes=1000, repeats=3) == pytest.approx(1000)
