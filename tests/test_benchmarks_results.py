"""Which results files are accepted, and the tables made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from measured import ENVIRONMENT

from benchmarks import results
from benchmarks.chinese import chinese_table
from benchmarks.groups import WHY_APART, group_results
from benchmarks.measure import TimedCall, figures
from benchmarks.pictures.rates import plot_rates
from benchmarks.report import fill, write_report
from benchmarks.results import ResultsError, load
from benchmarks.tables import Column, caption, front_table, notes, stage_table
from benchmarks.workloads import make_workload, workload_names

OPTIONS = {"size": "cpu", "model": "tutor", "dtype": "float32", "study": None}


def timed_round(name: str, pace: float) -> dict[str, float]:
    """Figures of a round in which a token takes `pace` seconds and each prompt token a tenth of it."""
    workload = make_workload(name, "cpu")
    metrics = [{"ttft": pace, "tpot": pace, "num_cached_tokens": 0}]
    calls = workload.rounds[0]
    return figures(workload, [TimedCall(c, pace * (c.prompt_tokens / 10 + max(c.max_tokens)), metrics) for c in calls])


def payload(pace: float = 0.01, repeats: range = range(3), engines: tuple[str, ...] = ("A", "B", "B[x=1]")) -> dict:
    """A results file with two stages and a variant; stage B is twice as fast as A, which did not run `mixed`."""
    workloads, rows = {}, []
    for name in workload_names():
        floor = {
            f: v / 2 for f, v in timed_round(name, pace).items() if not f.startswith(("ttft_p", "tpot_p", "tokens_"))
        }
        workloads[name] = {"hash": make_workload(name, "cpu").hash, "description": name, "floor": floor}
        for engine in engines:
            package = "stage_a_naive" if engine == "A" else "stage_b_decode_step"
            sample = timed_round(name, pace if engine == "A" else pace / 2)
            row = {"engine": engine, "package": package, "options": {}, "workload": name}
            if engine == "A" and name == "mixed":
                row["not_run"] = "would take about 99 s; the limit was 60 s"
            else:
                samples = [{"repeat": repeat, **sample} for repeat in repeats]
                row |= {"samples": samples, "startup_seconds": [2.0]}
            rows.append(row)
    return {
        "kind": "engines",
        "environment": dict(ENVIRONMENT),
        "options": dict(OPTIONS),
        "workloads": workloads,
        "ceilings": {"copy_bytes_per_s": 1e10, "matmul_operations_per_s": 1e11},
        "rows": rows,
    }


def groups(*payloads: dict) -> list:
    return group_results([{**found, "file": f"{i}.json"} for i, found in enumerate(payloads)])


def broken(path: str, value: object) -> dict:
    """A payload with one field replaced."""
    found = payload()
    *parents, last = path.split("/")
    place = found
    for key in parents:
        place = place[key]
    place[last] = value
    return found


@pytest.fixture
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are put together, and a word is saved in place of the pixels, which are most of the work."""
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: file.write(b"<svg>pixels</svg>"))


def test_what_is_committed_is_what_the_report_makes(quick_figures):
    """Every file is valid, the READMEs are up to date, and no picture is missing."""
    assert write_report(check=True) == []


def test_committed_files_have_a_line_for_each_row():
    for folder in ("results", "history"):
        for path in (results.ROOT / "benchmarks" / folder).glob("*.json"):
            text = path.read_text(encoding="utf-8")
            payload = json.loads(text)
            assert text == results.as_text(payload), f"{path.name}: write it with benchmarks.results.write"
            assert text.count("\n") <= len(payload["rows"]) + 50, path.name


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("kind", None, "no kind"),
        ("environment/commit", None, "no commit"),
        ("environment/commit", "main", "no commit"),
        ("environment/dirty", None, "no commit"),
        ("environment/versions", {}, "no versions"),
        ("environment/device", {}, "no device"),
        ("rows", [], "no rows"),
        (None, '{"kind": "engines"', "is not JSON"),  # half a file
    ],
)
def test_a_file_that_cannot_be_trusted_is_refused(path, value, message, tmp_path):
    if path is None:
        (tmp_path / "bad.json").write_text(value)
    else:
        results.write(broken(path, value), tmp_path / "bad.json")
    with pytest.raises(ResultsError, match=f"bad.json.* {message}"):
        load(tmp_path / "bad.json")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a results file, and READMEs with markers."""
    for folder, marker in ((".", "table"), ("benchmarks", "table"), ("stage_b_decode_step", "stage_b")):
        (tmp_path / folder).mkdir(exist_ok=True)
        text = f"# Title\n\n<!-- bench:{marker} -->\n<!-- /bench:{marker} -->\n\nThe end.\n"
        (tmp_path / folder / "README.md").write_text(text)
    results.write(payload(), tmp_path / "benchmarks" / "results" / "cpu-tutor.json")
    return tmp_path


def test_the_report_fills_the_markers_and_nothing_else_and_is_idempotent(tree, quick_figures):
    texts = [tree / "README.md", tree / "benchmarks" / "README.md", tree / "stage_b_decode_step" / "README.md"]
    wanted = write_report(tree, check=True)
    assert wanted[:3] == texts and {path.suffix for path in wanted[3:]} == {".svg"}
    assert not (tree / "benchmarks" / "plots").exists(), "a check changed something"
    assert write_report(tree) == wanted
    assert (tree / "benchmarks" / "plots" / "cpu-tutor-a-machine-roof.svg").is_file()
    text = (tree / "README.md").read_text()
    assert text.startswith("# Title\n\n<!-- bench:table -->\n**tutor** in float32 on a machine\n")
    assert text.endswith("<!-- /bench:table -->\n\nThe end.\n")
    assert "| [A](stage_a_naive/README.md) |" in text and "| [B](" in text and "B[x=1]" not in text
    stage = (tree / "stage_b_decode_step" / "README.md").read_text()
    assert "| A |" in stage and "| B |" in stage and "| B[x=1] |" in stage
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    assert write_report(tree) == write_report(tree, check=True) == []
    assert before == {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    picture = tree / "benchmarks" / "plots" / "cpu-tutor-a-machine.svg"
    picture.write_bytes(b"of older samples")
    assert write_report(tree, check=True) == [] and write_report(tree) == [picture]
    assert b"pixels" in picture.read_bytes()


def refusal(tree: Path, *payloads: dict) -> str:
    folder = tree / "benchmarks" / "results"
    for file in folder.iterdir():
        file.unlink()
    for i, found in enumerate(payloads):
        results.write(found, folder / f"{i}.json")
    before = {path: path.read_bytes() for path in tree.rglob("*.md")}
    with pytest.raises(ResultsError) as error:
        write_report(tree)
    assert before == {path: path.read_bytes() for path in tree.rglob("*.md")}
    return str(error.value)


def test_a_table_is_one_clean_commit_and_three_repeats_of_todays_work(tree):
    other = payload(engines=("B",))
    other["environment"]["commit"] = "f" * 40
    message = refusal(tree, payload(), other)
    assert "\n" not in message and "0.json: commit 0123456789; 1.json: commit ffffffffff" in message
    assert "commit 0123456789 with changes" in refusal(tree, broken("environment/dirty", True))
    assert "fewer than 3 repeats of B" in refusal(tree, payload(repeats=range(2), engines=("B",)))
    assert "the work of 'single' is not today's" in refusal(tree, broken("workloads/single/hash", "0" * 64))
    study = {"kind": "step_cost", "environment": ENVIRONMENT, "rows": [{"samples": [1.0] * n} for n in (2, 3)]}
    assert "1 rows with fewer than 3 samples" in refusal(tree, study)


def test_a_figure_has_one_value_unless_a_caption_says_why(tree, monkeypatch):
    study = payload(pace=0.02)
    study["options"]["study"] = "quantization"
    message = refusal(tree, payload(), study)
    assert "two values for one figure: prefill_ms of single is " in message and "(quantization: A)" in message
    why = "Measured on another day."
    monkeypatch.setitem(WHY_APART, "quantization", why)
    write_report(tree)
    [group] = [group for group in groups(payload(), study) if group.study]
    assert caption(group)[2].endswith(f"torch 9.9. {why}")


@pytest.mark.parametrize(
    ("commit", "why"), [("0" * 40, "at another commit"), (ENVIRONMENT["commit"], "in another run")]
)
def test_the_caption_of_a_study_says_whether_it_has_the_overviews_commit(commit, why):
    study = payload()
    study["options"]["study"], study["environment"]["commit"] = "stage-b", commit
    [_, group] = groups(payload(), study)
    assert f"Measured {why} than the overview's table" in caption(group)[2]


@pytest.mark.parametrize("commit", ["", "0123456789abcdef"])
def test_another_projects_engine_is_named_with_its_commit(tmp_path, monkeypatch, commit):
    (tmp_path / "nanovllm").mkdir()
    (tmp_path / "nanovllm/__init__.py").touch()
    info = tmp_path / "nano_vllm-0.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nano-vllm\nVersion: 0.2\n")
    (info / "top_level.txt").write_text("nanovllm\n")
    if commit:
        origin = {"url": "https://example.org/x.git", "vcs_info": {"vcs": "git", "commit_id": commit}}
        (info / "direct_url.json").write_text(json.dumps(origin))
    assert "nano-vllm" not in results.versions()
    monkeypatch.syspath_prepend(tmp_path)
    assert results.versions()["nano-vllm"] == ("0.2 commit 0123456789" if commit else "0.2")


def test_files_of_one_commit_are_one_table_with_the_samples_of_all():
    parts = [payload(0.01 * (i + 1), range(1)) for i in range(3)]
    [group] = groups(*parts)
    assert group.problem == ""
    assert group.values("A", "single", "tpot_ms") == pytest.approx(
        [timed_round("single", p)["tpot_ms"] for p in (0.01, 0.02, 0.03)]
    )
    assert group.median("A", "single", "startup_seconds") == 2.0
    assert "fewer than 3 repeats" in groups(*parts[:2])[0].problem


@pytest.mark.parametrize("other", [None, {"tpot_ms": 1.0}], ids=["alone", "compiled before"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_first_visit_that_was_much_slower_is_said(other, order):
    files = payload(), payload()
    for found, visit in zip(files, ({"tpot_ms": 54.6}, other), strict=True):
        next(row for row in found["rows"] if row["engine"] == "A")["first_visit"] = visit
    [group] = groups(*files[::order])
    lines = front_table(group)
    assert any("54.6 ms per token the first time" in line for line in lines)
    assert any("单个请求：进程第一次" in line and "54.6 毫秒/token" in line for line in chinese_table(lines))


def test_an_engine_that_ran_nothing_is_one_line_without_the_names_of_all_workloads():
    found = payload()
    for row in found["rows"]:
        if row["engine"] == "B":
            row |= {"error": "no answers: exit status -11\nits last words", "samples": []}
    [group] = groups(found)
    columns = [Column("", name, "") for name in workload_names()]
    assert notes(group, ["B"], columns) == ["", "- B: failed: no answers: exit status -11"]


def test_a_stages_table_has_its_own_variants_and_not_those_of_the_stage_before():
    found = payload(engines=("B", "B[x=1]", "C", "C[x=1]"))
    for row in found["rows"]:
        row["package"] = "stage_c_fused_mlp" if row["engine"].startswith("C") else "stage_b_decode_step"
    [group] = groups(found)
    lines = stage_table(group, "stage_c_fused_mlp", "stage_b_decode_step")
    cells = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert cells == ["engine", "*floor*", "B", "C", "C[x=1]"]


def test_rows_are_in_the_order_of_the_stages_with_variants_beside_theirs_and_what_is_from_elsewhere_last():
    row = {"engine": "transformers", "workload": "single", "samples": [{"tpot_ms": 3.21}]}
    elsewhere = {"kind": "elsewhere", "environment": ENVIRONMENT, "options": OPTIONS, "rows": [row], "source": "x"}
    [group] = groups(payload(engines=("mine", "C", "B[x=1]", "A", "B")), elsewhere)
    assert group.engines == ["A", "B", "B[x=1]", "C", "mine", "transformers"]


def test_without_rates_there_is_no_picture_of_them():
    only = payload()
    only["rows"] = [row for row in only["rows"] if row["workload"] == "ttft"]
    assert plot_rates(groups(only)[0]) is None


@pytest.mark.parametrize(
    "text", ["<!-- bench:tabel -->\n<!-- /bench:tabel -->", "<!-- bench:table -->\n", "<!-- /x -->"]
)
def test_a_marker_that_is_unknown_or_open_is_refused(text):
    with pytest.raises(ResultsError, match="README.md: no table, or no end, for the marker"):
        fill(text, {"bench:table": []}, Path("README.md"))


def test_a_decode_step_is_the_difference_of_two_calls():
    workload = make_workload("single", "cpu")
    first, whole = workload.rounds[0]
    steps = whole.max_tokens[0] - 1
    found = figures(workload, [TimedCall(first, 3.0, []), TimedCall(whole, 3.0 + 0.002 * steps, [])])
    assert found["tpot_ms"] == pytest.approx(2.0)
    assert found["prefill_ms"] == 3000
