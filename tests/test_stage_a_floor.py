"""The floor that every stage's command line prints: bytes per token, bandwidth, and the ratio of the two times."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from stage_a_naive import LLM, SamplingParams, floor
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
    """Another number of threads than the process has, which is another device for a copy."""
    before = torch.get_num_threads()
    yield lambda: torch.set_num_threads(before + 1)
    torch.set_num_threads(before)


@pytest.mark.parametrize("preset", ["qwen2-tiny", "qwen3-tiny", "llama-tiny"])
def test_a_step_reads_every_weight_once_and_of_the_embedding_only_the_lm_head(preset: str) -> None:
    llm = LLM(f"random:{preset}", device="cpu", dtype="float32")
    tied = llm.model.config.tie_word_embeddings
    embedding = llm.model.get_input_embeddings().weight.numel()
    read = sum(p.numel() for p in llm.model.parameters()) - (0 if tied else embedding)
    assert ModelBytes(llm.source.config, 4).weight_bytes == 4 * read


@pytest.mark.parametrize("preset", ["qwen2-tiny", "qwen3-tiny"])
def test_kv_bytes_are_those_of_the_cache_of_transformers(preset: str) -> None:
    llm = LLM(f"random:{preset}", device="cpu", dtype="float32")
    with torch.inference_mode():
        cache = llm.model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    stored = sum(4 * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers)
    assert 3 * ModelBytes(llm.source.config, 4).kv_bytes_per_token == stored


def test_the_lesson_on_timing_derives_the_bytes_of_a_step_that_are_counted_from_the_shape() -> None:
    lesson, model = (
        Path(floor.__file__).with_name("timing.md").read_text("utf-8"),
        ModelBytes(preset_config("qwen2.5-0.5b"), 2),
    )
    for num_bytes in (model.weight_bytes, model.kv_bytes_per_token, model.step_bytes(384)):
        assert f"{num_bytes:,} bytes" in lesson


def test_the_program_on_timing_prints_two_wrong_times_the_correct_one_and_the_floor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(floor, "measure_copy_bandwidth", lambda device: 1e9)
    program = Path(floor.__file__).with_name("timing.py").read_text("utf-8")
    assert len(program.splitlines()) <= 25
    exec(program.replace("8192", "512"), {})  # the same on a matrix of 1 MB
    line = r"(wrong, the first call|wrong, no synchronisation|correct) +[\d.]+ ms, from [\d.]+ to [\d.]+\n"
    assert re.fullmatch(rf"({line}){{3}}floor +1\.049 ms: 1 MB at the speed of a copy\n", capsys.readouterr().out)


def test_the_line_has_bytes_bandwidth_and_the_ratio(rates: list[float]) -> None:
    config = preset_config("qwen2.5-0.5b")
    rates.append(4e12)
    metrics = make_metrics(prefill_time=1.0, decode_time=0.1, ttft=1.0, num_prompt=128, num_generated=101)
    line = against_floor(ModelBytes(config, 2), CPU, metrics)  # 1 ms per token
    # 0.988 GB of weights and 12,288 bytes for each of 128 + 50.5 tokens
    assert line.strip() == "990.3 MB read per token, 990.3 of 4000.0 GB/s: 4.0 × the floor of 0.248 ms"


def test_there_is_no_line_without_a_decode_step() -> None:
    metrics = make_metrics(prefill_time=1.0, decode_time=0.0, ttft=1.0, num_prompt=3, num_generated=1)
    assert against_floor(ModelBytes(preset_config("qwen2-tiny"), 4), CPU, metrics) == ""
    assert not cache_file().exists()


def test_the_bandwidth_is_measured_once_per_device(rates: list[float], more_threads: Callable) -> None:
    rates += [5e9, 6e9]
    assert copy_bandwidth(CPU) == copy_bandwidth(CPU) == 5e9
    more_threads()
    assert copy_bandwidth(CPU) == 6e9
    assert rates == [] and len(json.loads(cache_file().read_text())) == 2


def test_a_bandwidth_that_is_old_or_of_no_known_age_is_measured_again(rates: list[float]) -> None:
    rates += [5e9, 6e9, 7e9]
    assert copy_bandwidth(CPU) == 5e9
    for kept, expected in (({"bytes_per_s": 5e9, "measured": time.time() - 8 * 86400}, 6e9), (5e9, 7e9)):
        [name] = json.loads(cache_file().read_text())
        cache_file().write_text(json.dumps({name: kept}))
        assert copy_bandwidth(CPU) == copy_bandwidth(CPU) == expected


def test_a_file_of_bandwidths_that_is_half_written_is_read_by_nobody(
    rates: list[float], more_threads: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text

    def write_half(path: Path, text: str, **options: str) -> None:
        write_text(path, text[: len(text) // 2], **options)
        raise KeyboardInterrupt

    rates += [5e9, 5e9, 5e9]
    copy_bandwidth(CPU)
    more_threads()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", write_half)
        copy_bandwidth(CPU)
    assert copy_bandwidth(CPU) == 5e9 and len(json.loads(cache_file().read_text())) == 2


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


def test_a_copy_takes_time_and_so_has_a_bandwidth() -> None:
    assert 1e7 < floor.measure_copy_bandwidth(CPU, num_bytes=2**22, repeats=2) < 1e13


def test_a_stage_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    from stage_a_naive.entrypoints.cli import performance_summary

    llm = LLM("random:qwen2-tiny", device="cpu")
    [output] = llm.generate([[1, 2]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert "× the floor of" in performance_summary(llm, output)
