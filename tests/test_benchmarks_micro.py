"""The kernel studies: they are found automatically, count correctly, and their tables agree with their files."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from xml.sax.saxutils import escape

import pytest
import torch
from measured import CEILINGS, ENVIRONMENT, is_drawn
from transformers import AutoTokenizer

import beyond.quantization
from benchmarks import micro
from benchmarks.micro import (
    attention,
    batching,
    block_waste,
    quantized,
    real_model,
    routing,
    scheduling,
    speculation,
    step_cost,
)
from benchmarks.micro import trace as kernels
from benchmarks.micro.__main__ import main
from benchmarks.micro._scripted import ScriptedLLM, ScriptedModelLLM
from benchmarks.micro.trace import record_engine
from benchmarks.pictures.picture import pictures
from benchmarks.render import tables
from benchmarks.results import ROOT, of_kind
from benchmarks.trace import Recording, Span, draw_gaps, from_rows, record, to_rows
from benchmarks.workloads import Call
from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_a_naive.contract.filters import filter_logits
from stage_a_naive.sampling import SamplingParams
from stage_f_graph_tp import LLM
from tools.soak.tally import HOST_GROWTH, Sample, Tally, verdict


def test_every_study_has_what_the_report_asks_for():
    assert {"attention", "mlp", "scheduling"} <= set(micro.names())
    markers = []
    for name in micro.names():
        module = micro.study(name)
        markers += tables(module, of_kind(name))
        assert callable(module.measure) and module.__doc__
    assert len(set(markers)) == len(markers) > len(micro.names())


def test_the_title_of_a_committed_picture_is_what_its_file_says():
    for name in micro.names():
        for file, picture in pictures(micro.study(name), of_kind(name)).items():
            assert escape(picture.drawn.get_suptitle()) in (ROOT / file).read_text(encoding="utf-8"), file


WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no study 'nothing'; there are: all_reduce"),
        (["block_waste", "sise=cpu"], "block_waste has the options size, and not sise"),
        (["block_waste", "size"], "not of the form name=value"),
        (["no_cache", "repeats=0"], "repeats=0: a count is at least 1"),
        pytest.param(["mlp"], "mlp needs an NVIDIA GPU", marks=WITHOUT_GPU),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.compiler
def test_the_mlp_on_a_cpu_is_measured_by_rows(tmp_path, capsys):
    assert main(["mlp_cpu", "models=qwen2-tiny", "repeats=1", "--output", str(tmp_path / "mlp.json")]) == 0
    result = json.loads((tmp_path / "mlp.json").read_text())
    assert {row["rows"] for row in result["rows"]} == {1, 2, 4, 8, 16, 32, 64}
    lines = capsys.readouterr().out.splitlines()
    assert "| rows | qwen2-tiny, float32 | qwen2-tiny, bfloat16 |" in lines
    assert sum(line.count(" ×") for line in lines) == 14


def test_the_study_of_the_guide_is_one_short_file_that_measures_tabulates_and_draws():
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [source] = re.findall(
        r"<!-- tested: this study runs in tests/test_benchmarks_micro.py -->\n```python\n(.*?)```", guide, re.S
    )
    assert len(source.splitlines()) <= 60
    study = ModuleType("softmax")
    exec(source, vars(study))
    result = {"kind": "softmax", "environment": ENVIRONMENT} | study.measure(repeats=3)
    lines = tables(study, [result])["softmax"]
    assert lines[0] == "| numbers in a row | µs | GB/s read and written |" and len(lines) == 8
    assert lines[-2].endswith("float32, 64 rows; medians of 3. `python -m benchmarks.micro softmax`.")
    assert is_drawn(pictures(study, [result]), "stage_e_batching/figures/softmax.svg")


def test_a_study_writes_its_file_and_prints_its_table(tmp_path, capsys):
    assert main(["block_waste", "size=cpu", "--output", str(tmp_path / "waste.json")]) == 0
    result = json.loads((tmp_path / "waste.json").read_text())
    assert result["kind"] == "block_waste" and result["options"] == {"size": "cpu"} and result["environment"]["commit"]
    waste = [1 - row["tokens"] / row["slots"] for row in result["rows"]]
    assert 0 < waste[0] < waste[1] < waste[-1] < 1
    assert result["workload"] in capsys.readouterr().out
    assert is_drawn(pictures(block_waste, [result]))


@pytest.mark.parametrize(("word", "expected"), [("ranks=2", (2,)), ("ranks=2,4", (2, 4)), ("ranks=a,b", ("a", "b"))])
def test_an_option_of_several_values_takes_one_or_several(word, expected, tmp_path, monkeypatch):
    def measure(ranks: tuple[object, ...] = (1,)) -> dict:
        return {"rows": [{"ranks": list(ranks)}]}

    study = SimpleNamespace(measure=measure, TABLES="")
    monkeypatch.setattr(micro, "study", lambda name: study)
    assert main(["x", word, "--output", str(tmp_path / "x.json")]) == 0
    [row] = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert tuple(row["ranks"]) == expected


def test_an_engine_is_closed_when_its_work_is_done_or_fails():
    closed = []
    engine = lambda name: SimpleNamespace(name=name, close=lambda: closed.append(name))  # noqa: E731
    assert micro.with_engine(lambda llm: llm.name, engine, "first") == "first"
    with pytest.raises(ZeroDivisionError):
        micro.with_engine(lambda llm: 1 / 0, engine, name="second")
    assert closed == ["first", "second"]


def test_ways_take_turns_and_the_first_turn_is_not_counted():
    order: list[str] = []
    found = micro.take_turns(lambda way: order.append(way) or len(order), "ab", repeats=2)
    assert order == list("ababab") and found == {"a": [3, 5], "b": [4, 6]}


def test_a_study_on_one_thread_gives_the_others_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert micro.one_thread()(torch.get_num_threads)() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_every_launch_of_attention_reads_blocks_of_its_own():
    case = attention.Case("decode", 2, query=1, context=20, heads=2, kv_heads=1, head_dim=8)
    sets = attention.arguments_of(case, 16, torch.device("cpu"))
    tables = torch.cat([metadata.block_tables.flatten() for *_, metadata in sets])
    num_blocks = 4 * attention.MAX_LAUNCHES
    assert sorted(tables.tolist()) == list(range(num_blocks))
    assert all(pool.shape[0] == num_blocks for _, pool, *_ in sets)
    (query, _, _, metadata), *_ = sets
    assert query.shape == (2, 2, 8) and metadata.cu_seqlens_q.tolist() == [0, 1, 2]


def test_the_cost_of_a_step_is_measured():
    row = step_cost.measure_row(3, steps=4, repeats=2)
    assert row["sequences"] == 3
    assert len(row["samples"]) == 2 and min(row["samples"]) > 0


def test_the_watermark_lowers_the_recomputation():
    assert list(scheduling.POOLS) == ["no watermark", "watermark", "watermark that doubles"]
    without, fixed, with_it = (scheduling.counts(scheduling.tight_pool(rule)) for rule in scheduling.POOLS.values())
    assert with_it["recomputed"] < fixed["recomputed"] < without["recomputed"] / 2
    assert with_it["preemptions"] < without["preemptions"]


def test_the_rules_of_admission_are_timed_on_the_same_requests():
    sizes = {"model": "random:qwen2-tiny", "requests": 6, "input_len": 16, "output_len": 24, "fit": 2, "repeats": 3}
    result = {"kind": "scheduling", "environment": ENVIRONMENT} | scheduling.measure("time", **sizes)
    without, _, doubling = result["rows"]
    assert without["preemptions"] > doubling["preemptions"] >= 0 and without["recomputed_tokens"] > 0
    assert all(len(row["samples"]) == 3 and row["steps"] >= 24 for row in result["rows"])
    lines = tables(scheduling, [result])["preemption-time"]
    assert lines[0] == "| admission | preemptions | tokens computed again | steps | seconds, × the first row |"
    assert [line.split(" | ")[0] for line in lines[2:5]] == [f"| {name}" for name in scheduling.POOLS]
    with pytest.raises(ValueError, match="there is no part 'x'; there are: e, f"):
        scheduling.measure("time", stage="x")


@pytest.mark.gpu
def test_a_prefill_is_timed_with_the_copy_engine_and_without(monkeypatch):
    monkeypatch.setattr(attention, "REPEATS", 1)
    monkeypatch.setattr(attention, "MAX_LAUNCHES", 2)
    result = {"kind": "attention", "environment": ENVIRONMENT, "ceilings": CEILINGS} | attention.measure("prefill")
    engine, loads, separate = result["rows"]
    assert separate["bulk_copies"] > 0 == separate["small_copies"]
    assert engine["bulk_copies"] > 0 == loads["bulk_copies"] and loads["small_copies"] > 0 < loads["products"]
    assert [line.split(" | ")[0] for line in tables(attention, [result])["attention-copies"][2:5]] == [
        "| the copy engine",
        "| ordinary loads",
        "| the copy engine, asked by a separate warp",
    ]


def test_only_operators_that_compute_and_call_no_other_are_recorded():
    x, w = torch.randn(4, 8), torch.randn(16, 8)
    recording = record("two", lambda: torch.relu(torch.nn.functional.linear(x, w)), torch.device("cpu"), steps=1)
    product, activation = (span.name for span in recording.spans)
    assert product in ("addmm", "mm", "linear") and activation in ("relu", "clamp_min")


def test_busy_time_counts_overlapping_spans_once():
    recording = Recording("r", 1, [Span("a", 0, 4), Span("b", 2, 4), Span("c", 10, 2)])
    assert recording.busy == 8
    assert recording.whole == 12


def test_of_three_recordings_the_fastest_is_kept():
    x, calls = torch.randn(8), iter([300, 1, 300])
    recording = record("calls", lambda: [x.exp() for _ in range(next(calls))], torch.device("cpu"), steps=1)
    assert [span.name for span in recording.spans] == ["exp"]


def test_a_run_of_nothing_is_refused():
    with pytest.raises(RuntimeError, match="saw nothing run in 'idle'"):
        record("idle", lambda: None, torch.device("cpu"), steps=1)


def test_an_engine_is_idle_again_after_its_recording_and_the_file_holds_it():
    llm = LLM("random:qwen2-tiny", device="cpu", max_num_seqs=4, num_kvcache_blocks=64, kvcache_block_size=16)
    recording = record_engine("F", llm, num_requests=2, prompt_tokens=20, steps=2)
    assert llm.engine.scheduler.block_manager.num_used == 0
    assert not llm.calls.has_unfinished()
    again = from_rows(json.loads(json.dumps(to_rows([recording]))))
    assert again == [recording]
    assert is_drawn({"gaps": draw_gaps(again, "a CPU")})


def test_stage_cs_operator_counts_as_the_mlp_and_a_flip_as_rotation():
    names = ["Memcpy HtoD", "nvjet_qkv", "index_elementwise_kernel<flip_kernel_impl>", "decode_kernel", "nvjet_output"]
    names += ["void six_engines::(anonymous namespace)::fused_kernel<__nv_bfloat16, 8>", "nvjet_lm_head"]
    found = kernels.account(Recording("a step", 1, [Span(name, 10.0 * i, 3.0) for i, name in enumerate(names)]))
    for part in ("QKV", "norm, rotation, SiLU", "attention", "output", "gate-up", "LM head", "copies"):
        assert found[part] == 3.0, part


def test_every_part_of_a_step_is_in_one_group_of_the_figure():
    assert sorted(part for parts in kernels.GROUPS.values() for part in parts) == sorted(kernels.PARTS)


def soaked(resident: int = 500 << 20, allocated: int = 1 << 20, used_blocks: int = 0, different: int = 0) -> Tally:
    """A calm soak, but for its last sample."""
    calm = [Sample(float(i), i, 500 << 20, 1 << 20, 2 << 20, 0) for i in range(7)]
    last = Sample(7, 7, resident, allocated, 2 << 20, used_blocks)
    return Tally(compared=5, different=different, samples=[*calm, last])


@pytest.mark.parametrize(
    ("tally", "message"),
    [
        (soaked(), ""),
        (soaked(different=1), "differ"),
        (soaked(used_blocks=1), "blocks were in use"),
        (soaked(resident=(500 << 20) + HOST_GROWTH + 1), "resident memory grew"),
        (soaked(allocated=4 << 20), "device's allocated memory grew"),
    ],
)
def test_a_calm_soak_passes_and_another_fails_by_name(tally, message):
    wrong = verdict(tally)
    assert message in wrong[0] if message else wrong == []


def test_static_admission_takes_the_next_batch_when_the_last_of_one_has_ended():
    lengths, pool = [(8, n) for n in (9, 3, 5, 2, 7)], {"num_blocks": 50, "block_size": 4, "max_num_seqs": 2}
    pool |= {"max_num_batched_tokens": 8}  # one prompt per step
    records = scheduling.traced(lengths, batching.StaticAdmission, **pool)
    admitted = [record["admitted"] for record in records if record["admitted"]]
    assert [i for ids in admitted for i in ids] == [0, 1, 2, 3, 4]
    steps = {i: [n for n, r in enumerate(records) if any(e["id"] == i for e in r["sequences"])] for i in range(5)}
    for first, second, later in ((0, 1, 2), (2, 3, 4)):
        assert steps[later][0] > max(steps[first][-1], steps[second][-1])


def test_a_row_of_batching_counts_the_steps_and_rows_of_the_model():
    llm = batching.StaticStageE("random:qwen2-tiny", device="cpu", max_num_seqs=1)
    call = Call("all", ((1, 2, 3), (4, 5)), (4, 1))
    found = batching.run(llm, call, temperature=0.0)
    assert found["steps"] == 4 + 1 and found["computed_rows"] == 3 + 3 + 2


def test_sequences_that_fit_are_counted_from_the_bytes_of_a_loaded_engine():
    options = {"quantization": "int8", "kv_cache_dtype": "int8"}
    shapes = quantized.load_shapes("random:qwen2-tiny", options)
    llm = beyond.quantization.LLM("random:qwen2-tiny", device="cpu", dtype="bfloat16", num_kvcache_blocks=1, **options)
    weights = quantized.weight_bytes(shapes)
    assert weights == quantized.weight_bytes(llm.runtime)
    assert shapes.bytes_per_token == llm.runtime.bytes_per_token
    three = weights + 3 * quantized.SEQUENCE * shapes.bytes_per_token  # in nine tenths of the memory
    fits = [quantized.sequences_that_fit(shapes, int(room / 0.9) + 1) for room in (three, three - 100, weights)]
    assert fits == [3, 2, 0]


def test_a_step_that_takes_three_times_as_long_must_find_two_guesses_right():
    plain, drafted = {"way": "plain", "draft": 4}, {"way": "accepted", "draft": 4, "tokens_per_step": 4.0}
    rows = [plain | {"batch": n, "samples": [1e-3] * 3} for n in (1, 64)]
    rows += [drafted | {"batch": n, "samples": [per_step / 4] * 3} for n, per_step in ((1, 1.5e-3), (64, 3e-3))]
    assert speculation.break_even({"rows": rows}, 4) == pytest.approx({1: 0.5, 64: 2.0})


RATES = [(0.5, 4), (0.83, 8), (1.0, 5)]
SCRIPTS = [(ScriptedLLM, 0.0, 4), *((kind, *rate) for kind in (ScriptedLLM, ScriptedModelLLM) for rate in RATES)]


@pytest.mark.parametrize(("kind", "rate", "drafted"), SCRIPTS)
def test_a_script_calls_the_share_right_that_it_was_given(kind, rate, drafted, monkeypatch):
    monkeypatch.setattr("beyond.speculation.sequence.COST", -1.0)  # drafts go on, however often they are wrong
    options = {"draft_model": "random:qwen3-tiny"} if kind is ScriptedModelLLM else {}
    options |= {"num_kvcache_blocks": 64, "num_speculative_tokens": drafted}
    llm = kind("random:qwen2-tiny", device="cpu", **options)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    llm.script(rate)
    llm.generate([[1, 2, 3]], params, False)
    counters = replace(llm.engine.counters)
    assert counters.num_accepted_tokens == pytest.approx(rate * counters.num_draft_tokens, abs=drafted)
    assert counters.num_generated_tokens == 150
    llm.script(None)
    llm.generate([[1, 2, 3]], params, False)
    assert llm.engine.counters.num_draft_tokens == counters.num_draft_tokens, "switched off it guesses nothing"


def test_a_constrained_step_is_measured_beside_a_free_one(tmp_path, capsys):
    pytest.importorskip("llguidance")
    options = ["models=random:qwen2-tiny", "requests=1,3", "tokens=24", "repeats=1", "device=cpu"]
    assert main(["constrained", *options, "--output", str(tmp_path / "constrained.json")]) == 0
    rows = json.loads((tmp_path / "constrained.json").read_text())["rows"]
    assert [row["requests"] for row in rows] == [1, 3]
    assert all(0 < row["host"][0] < row["form"][0] <= row["form_99"][0] for row in rows)
    assert sum(line.startswith("| random:qwen2-tiny, ") for line in capsys.readouterr().out.splitlines()) == 2


def test_right_guesses_are_counted_step_by_step():
    agreed = [True, True, True, False, True, True, False] + [False] * (real_model.TOKENS - 7)
    runs = real_model.run_lengths(agreed)
    assert runs[:7] == [3, 2, 1, 0, 2, 1, 0]
    counted, plain = real_model.chain([runs], 2)  # 1 and 2 right, then 3 wrong; 4 and 5 right, then 6 wrong; …
    assert counted == [real_model.TOKENS - 7, 0, 2] and plain == 0
    counted, plain = real_model.chain([[None] * real_model.TOKENS], 2)
    assert counted == [0, 0, 0] and plain == real_model.TOKENS - 1


def test_a_look_up_guesses_what_followed_in_the_prompt_or_in_the_answer():
    found = real_model.looked_up([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 9, 4, 5, 9])
    assert found == [2, 1, 0, None, None, None]
    assert [real_model.is_again([7, 1, 2, 3, 4, 5, 1, 2, 3, 4], at) for at in (3, 8, 9)] == [False, False, True]


@torch.inference_mode()
def test_sizes_of_nuclei_are_those_that_the_filters_keep():
    runtime, ids = quantized.load("tutor", "cpu", "float32", {}), list(range(40, 60))
    rows = real_model.sizes({}, runtime, [ids])
    logits = runtime.model.compute_logits(quantized.states_of(runtime, ids)).float()
    for row in rows:
        asked = {"min_p": 0.05} if row["filter"] == "min_p 0.05" else {"top_p": real_model.FILTERS[row["filter"]]}
        params = SamplingParams(temperature=row["temperature"], **asked)
        kept = [filter_logits(one, params).isfinite().sum().item() for one in logits]
        assert row["mean"] == pytest.approx(sum(kept) / len(kept), rel=0.01) and row["positions"] == len(ids)
    assert len(rows) == 8


@torch.inference_mode()
def test_formats_are_judged_against_the_first_one():
    runtimes = {
        kind: quantized.load("tutor", "cpu", "float32", own)
        for kind, own in (("float32", {}), ("8", real_model.WEIGHTS))
    }
    found = real_model.compare(runtimes, list(range(40, 80)))
    same, other = (dict(zip(real_model.SUMS, found[kind].tolist(), strict=True)) for kind in runtimes)
    assert same["positions"] == same["equal"] == 10 and same["kl"] == 0
    assert other["kl"] > 0 and other["loss"] != same["loss"] and other["sure"] == same["sure"]
    rows = [{"kind": kind, "text": text, **own} for kind, own in (("float32", same), ("8", other)) for text in "ab"]
    assert [row["equal_share"] for row in real_model.losses({"rows": rows})] == [1, other["equal"] / 10]


def test_a_real_model_that_was_not_built_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(real_model, "MODEL", real_model.ROOT / "build" / "models" / "none")
    assert main(["real_model"]) == 2 and "no build/models/none: `make real-model` builds it" in capsys.readouterr().err


def test_the_choices_of_a_router_are_counted_by_token_and_by_step(monkeypatch):
    entries = [entry for lang in ("en", "zh") for entry in [e for e in read_faq() if e["lang"] == lang][:2]]
    monkeypatch.setattr(routing, "read_faq", lambda: entries)
    monkeypatch.setattr(routing, "QUESTION", entries[0]["question"])
    result = routing.measure(requests=(1, 4))
    tokens, answer = AutoTokenizer.from_pretrained(TUTOR_PATH), result["answer"]
    assert "".join(answer["tokens"]) == entries[0]["answer"]
    assert [len(layer) for layer in answer["experts"]] == [len(answer["tokens"])] * 2, "in both layers"
    assert {len(set(experts)) for layer in answer["experts"] for experts in layer} == {2}
    for lang, layer in itertools.product(("en", "zh"), (0, 1)):
        chosen = [row["choices"] for row in result["rows"] if (row["lang"], row["layer"]) == (lang, layer)]
        answers = [tokens.encode(entry["answer"]) for entry in entries if entry["lang"] == lang]
        assert len(chosen) == 8 and sum(chosen) == 2 * sum(map(len, answers))
    alone, together = (step["touched"] for step in result["steps"])
    assert alone == 2 < together <= 8
