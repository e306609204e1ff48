"""The notebooks run, and their committed versions are readable: in step with their code, with pictures, clean."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# An interpreter that was made for something else may lack them; `make test` installs them.
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))

import run  # noqa: E402  (notebooks/run.py: the folder is no package)
from try_it import check, check_digest, digest  # noqa: E402

from benchmarks.loops import PROGRAMS  # noqa: E402
from labs import first_cell  # noqa: E402

MOST_BYTES = 600_000
ABSOLUTE_PATH = re.compile(r"""(?:^|[\s'"(=])(/[\w.-]+/|[A-Z]:\\)""")

EDITIONS = [edition for path in run.notebooks() if (edition := path.with_suffix(run.CHINESE)).exists()]
each_notebook = pytest.mark.parametrize("path", run.notebooks(), ids=lambda path: path.stem)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def has_image(cell: nbformat.NotebookNode) -> bool:
    return any("image/png" in output.get("data", {}) for output in cell.outputs)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # each cell has a separate limit
@each_notebook
def test_the_notebook_runs(path):
    if path.stem.startswith(("0", "b", "c")) and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "c++"))):
        pytest.skip("a compiled step and stage C need a C++ compiler")
    if path.stem.startswith("g"):
        pytest.importorskip("uvicorn", reason="the server of beyond/serving: pip install -e .[serve]")
    notebook = run.execute(path)
    assert any(map(has_image, code_cells(notebook)))


def test_a_run_names_each_notebook_makes_a_dot_per_cell_and_ends_a_cell_over_its_time_limit(tmp_path):
    source = Path(run.__file__).read_text(encoding="utf-8")
    (tmp_path / "run.py").write_text(source.replace("CELL_SECONDS = 300", "CELL_SECONDS = 3"), encoding="utf-8")
    cells = [new_code_cell("x = 1"), new_markdown_cell("text"), new_code_cell("import time\ntime.sleep(600)\n")]
    for name, notebook in {"quick": new_notebook(cells=cells[:1]), "slow": new_notebook(cells=cells)}.items():
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    command, pipes = [sys.executable, "run.py", "q", "s"], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes) as done:
        assert done.stdout.read(len("quick.ipynb: ")) == "quick.ipynb: " and done.poll() is None  # before it has run
        said, error = done.stdout.read(), done.stderr.read()
    assert re.fullmatch(r"\. \d+ s\nslow\.ipynb: \.{3}", said)
    assert "\nslow.ipynb: code cell 2 ran longer than 3 s: import time\n" in error and done.returncode == 1


def first_code_cell(path: Path) -> str:
    return code_cells(nbformat.read(path, as_version=4))[0].source


def outside(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code as a kernel does that was started in a folder, by a system that knows nothing of the course."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | environment
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=ours, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "path", [*run.notebooks(), *EDITIONS, *sorted(ROOT.glob("labs/notebooks/*.ipynb"))], ids=lambda p: p.stem
)
def test_every_notebook_has_the_same_first_cell_and_a_way_to_colab_if_the_course_has_an_address(path):
    where = "notebooks" if path.parent.name == "notebooks" and path.parent.parent == ROOT else "."
    assert first_code_cell(path).startswith(first_cell.FIRST_CELL.replace("{folder}", where))
    title = nbformat.read(path, as_version=4).cells[0].source
    assert title == first_cell.with_badge(title, path.relative_to(ROOT), first_cell.REPOSITORY)


@each_notebook
def test_its_imports_are_found_from_wherever_a_kernel_starts_once_the_first_cell_has_run(path):
    source = "\n".join(cell.source for cell in code_cells(run.read(path))[1:])
    names = set(re.findall(r"^\s*(?:from|import) (\w+)", source, re.MULTILINE))
    find = f"import importlib.util\nprint([n for n in {sorted(names)} if importlib.util.find_spec(n) is None])"
    for folder in (path.parent, ROOT, ROOT / "benchmarks" / "micro"):
        done = outside(f"{first_code_cell(path)}\n{find}", folder)
        assert (done.stdout, done.stderr) == ("[]\n", ""), "and it prints nothing where nothing is missing"


def test_a_notebook_alone_clones_the_course_once_and_asks_for_its_address(tmp_path):
    git = tmp_path / "git"
    git.write_text(f'#!/bin/sh\necho "$@" >> calls\nmkdir "$5" && ln -s {ROOT}/labs {ROOT}/stage_* "$5"\n')
    git.chmod(0o755)
    cell = first_cell.FIRST_CELL.replace("{folder}", ".").replace("prepare(", "print(course, ")
    cell = first_cell.with_address(cell, "")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    refused = outside(cell, tmp_path, PATH=path)
    assert refused.stderr.splitlines()[-1].endswith("the course is not here: put its address into REPOSITORY, above")
    cell = first_cell.with_address(cell, "https://github.com/me/mine")
    for _ in range(2):
        assert outside(cell, tmp_path, PATH=path).stdout.split() == [str(tmp_path / "six-engines"), "."]
    calls = (tmp_path / "calls").read_text()
    assert calls == f"clone --depth 1 https://github.com/me/mine {tmp_path / 'six-engines'}\n"


@pytest.mark.parametrize(("missing", "transformers"), [("xxhash", "5.0.0"), ("", "4.57.1")])
def test_packages_are_installed_where_one_is_missing_or_too_old(missing, transformers, monkeypatch):
    monkeypatch.setattr(first_cell, "find_spec", lambda name: None if name == missing else name)
    monkeypatch.setattr(first_cell, "version", lambda name: transformers)
    assert first_cell.lacks_packages()
    monkeypatch.setattr(first_cell, "version", lambda name: "5.1.0")
    assert first_cell.lacks_packages() == bool(missing)


@pytest.mark.parametrize(("capability", "hidden"), [("7.5", True), ("8.0", False), ("12.0", False)])
def test_a_gpu_without_triton_is_left_out_and_the_notebook_says_how_to_use_it(
    capability, hidden, monkeypatch, tmp_path
):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho 'Tesla T4, {capability}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    said = first_cell.leave_out_old_gpu()
    assert (os.environ["CUDA_VISIBLE_DEVICES"] == "") == hidden
    assert ("DTYPE=float16" in said and "Tesla T4 has compute capability 7.5" in said) == hidden == bool(said)


def test_a_machine_without_a_gpu_says_nothing_about_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert first_cell.leave_out_old_gpu() == ""


def test_an_address_makes_a_badge_below_the_title_that_can_change_and_go():
    file, text = Path("labs/notebooks/lab_a.ipynb"), "# Lab A\n\nEvery exercise fails at first."
    for repository, path in (
        ("https://github.com/me/mine.git", "me/mine"),
        ("https://github.com/you/yours/", "you/yours"),
    ):
        found = first_cell.with_badge(text, file, repository).splitlines()
        there = f"https://colab.research.google.com/github/{path}/blob/main/labs/notebooks/lab_a.ipynb"
        assert found[:2] == ["# Lab A", ""] and found[2].startswith("[![Open in Colab](") and f"]({there})" in found[2]
        assert found[3:] == text.splitlines()[1:]
    assert first_cell.with_badge("\n".join(found), file, "") == text


@each_notebook
def test_committed_outputs_are_of_the_code_that_is_there(path):
    notebook = run.read(path)
    assert run.is_current(notebook), f"{path.name} was changed after it was run: `make notebooks`"
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "not run once from top to bottom"


@each_notebook
def test_committed_outputs_are_clean(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    notebook = run.read(path)
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type != "error"
            shown = output.get("text", "") + str({k: v for k, v in output.get("data", {}).items() if "image" not in k})
            assert not ABSOLUTE_PATH.search(shown), f"a folder of the machine that ran it: {shown[:200]}"
            assert not any(run.NOISE.search(line) for line in shown.splitlines() if line.strip()), shown[:200]


def test_committed_outputs_quote_the_programs_published_figures_as_they_are_today():
    programs = "".join((ROOT / program).read_text(encoding="utf-8") for program in PROGRAMS)
    cells = [cell for path in run.notebooks() for cell in code_cells(run.read(path))]
    shown = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    quoted = re.findall(r"\[(?:H200|CPU)[,:][^\]]*\]", shown)
    assert quoted and not [figure for figure in quoted if figure not in programs], "`python notebooks/run.py`"


@each_notebook
def test_every_figure_is_there(path):
    for cell in code_cells(run.read(path)):
        last_line = cell.source.strip().splitlines()[-1]
        if last_line.startswith("draw_") and " else " not in last_line:
            assert has_image(cell), cell.source


@each_notebook
def test_committed_times_were_measured_on_an_idle_machine(path):
    assert not run.is_disturbed(run.read(path)), f"run `python notebooks/run.py {path.stem}` where nothing else runs"


@pytest.mark.parametrize(
    ("text", "load", "is_disturbed"),
    [
        ("7.16 ms per token", 3.0, True),
        ("[picture: the time of the block over its rows; 0.3]", 3.0, True),
        ("900 tokens/s", 3.0, True),
        ("7.16 ms per token", 0.3, False),
        ("30 matrix products, in 4 layers", 3.0, False),
    ],
)
def test_times_are_kept_only_from_an_idle_machine_and_a_reader_sees_which(text, load, is_disturbed):
    outputs = [new_output("execute_result", data={"text/plain": text})]
    notebook = new_notebook(
        cells=[new_markdown_cell("title"), new_code_cell("1"), new_code_cell("f()", outputs=outputs)]
    )
    notebook.metadata[run.METADATA] = {}
    run.note(notebook, {"machine": "a CPU, 2 cores", "load": load})
    assert run.is_disturbed(notebook) == is_disturbed
    assert (
        f"recorded on a CPU, 2 cores; programs that ran there before: {load}" in code_cells(notebook)[0].outputs[0].text
    )


def test_a_busy_machine_writes_no_times(tmp_path):
    (tmp_path / "run.py").write_text(Path(run.__file__).read_text(encoding="utf-8").replace("BUSY)", "-1)"), "utf-8")
    for name, said in {"count": "30 products", "time": "7 ms"}.items():
        nbformat.write(new_notebook(cells=[new_code_cell(f"print('{said}')")]), tmp_path / f"{name}.ipynb")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "time.ipynb: not written; a load of " in done.stderr
    count, time = (run.shown_text(run.read(tmp_path / f"{name}.ipynb")) for name in ("count", "time"))
    assert "30 products" in count and "recorded on " in count and not time.strip()


# ---- what pictures show, and the lesson around them ----


def drawn(path: str, picture: str) -> dict[str, str]:
    """The data of a committed picture, `name: values` for each line or bar."""
    [text] = re.findall(rf"\[picture: {picture}(.*)\]", run.shown_text(run.read(ROOT / "notebooks" / path)))
    if not text:
        pytest.skip("recorded before its pictures told their data")
    return dict(part.split(": ", 1) for part in text.split("; ") if ": " in part)


def test_the_picture_of_a_step_has_the_products_that_the_program_counts_and_one_for_the_angles():
    [linear] = re.findall(r"eager: .*?(\d+) linear", run.shown_text(run.read(ROOT / "notebooks/b_decode_step.ipynb")))
    found = drawn("b_decode_step.ipynb", "kernels in one decode step, by kind")
    assert {name: int(found[name].split()[0]) for name in ("stage A", "stage B")} == dict.fromkeys(
        ("stage A", "stage B"), int(linear) + 1
    )


def test_more_rows_take_more_time_in_the_picture_of_the_mlp():
    found = drawn("c_fused_mlp.ipynb", "the time of the MLP block over its rows")
    for values in found.values():
        one, *_, sixteen = map(float, values.split(", "))
        assert one < sixteen


def test_the_notebook_of_the_mlp_prints_the_lessons_rate_of_arithmetic():
    [rate] = set(re.findall(r"(\d+)<!--=a.matmul_rate-->", (ROOT / "stage_a_naive/timing.md").read_text("utf-8")))
    assert f"arithmetic does {rate} T operations" in run.shown_text(run.read(ROOT / "notebooks/c_fused_mlp.ipynb"))


@pytest.mark.parametrize("path", EDITIONS, ids=lambda path: path.stem)
def test_a_chinese_edition_has_its_own_text_and_the_same_code_with_the_same_outputs(path):
    editions = run.read(path), run.read(path.with_name(path.name.replace(run.CHINESE, ".ipynb")))
    chinese, english = ([(cell.id, cell.cell_type) for cell in notebook.cells] for notebook in editions)
    assert chinese == english, "cells of one edition that the other lacks"
    assert code_cells(editions[0]) == code_cells(editions[1]), "run `python notebooks/run.py`"
    texts = [cell.source for cell in editions[0].cells if cell.cell_type == "markdown"]
    assert [text for text in texts if not re.search("[一-鿿]", text)] == []
    for target in re.findall(r"\]\(([^)#:]+)\)", "".join(texts).replace(english_link(path), "")):
        edition = (path.parent / target).with_suffix(f".zh-CN{Path(target).suffix}")
        assert ".zh-CN." in target or not edition.exists(), f"{target} has a Chinese edition"


def english_link(path: Path) -> str:
    return f"[English]({path.name.replace(run.CHINESE, '.ipynb')})"


def test_a_run_writes_its_code_and_outputs_into_the_chinese_edition_and_leaves_its_text(tmp_path):
    new = new_notebook(cells=[new_markdown_cell("text", id="a"), new_code_cell("f()", id="b")])
    old = new_notebook(cells=[new_markdown_cell("文", id="a"), new_code_cell("g()", id="b")])
    nbformat.write(old, tmp_path / "x.zh-CN.ipynb")
    new.cells[1].outputs = [new_output("stream", text="2")]
    run.write(new, tmp_path / "x.ipynb")
    run.write(new_notebook(cells=new.cells[:1]), tmp_path / "y.ipynb")
    english, chinese = run.read(tmp_path / "x.ipynb"), run.read(tmp_path / "x.zh-CN.ipynb")
    assert code_cells(english) == code_cells(chinese) == new.cells[1:] and not list(tmp_path.glob("y.zh*"))
    assert (english.cells[0].source, chinese.cells[0].source) == ("text", "文")


@pytest.mark.parametrize("path", [*run.notebooks(), *EDITIONS], ids=lambda path: path.stem)
def test_its_links_lead_somewhere(path):
    for cell in run.read(path).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#:]+)\)", cell.source):
                assert (path.parent / target).exists(), f"{path.name} links to {target}, which is not there"


def test_a_changed_cell_makes_the_outputs_old():
    notebook = new_notebook(cells=[new_code_cell("1 + 1")])
    notebook.metadata[run.METADATA] = {"source": run.source_hash(notebook)}
    assert run.is_current(notebook)
    notebook.cells[0].source = "1 + 2"
    assert not run.is_current(notebook)


def test_tidying_drops_noise_and_this_machines_folders():
    outputs = [
        new_output("stream", name="stderr", text="Loading:  10%|# |\rLoading: 100%|##|\n"),
        new_output("stream", name="stdout", text=f"wrote {ROOT}{os.sep}build/x\n"),
        new_output("stream", name="stdout", text="and more\n"),
    ]
    notebook = new_notebook(cells=[new_code_cell("f()", outputs=outputs)])
    run.tidy(notebook)
    assert [output.text for output in notebook.cells[0].outputs] == ["wrote build/x\nand more\n"]


@pytest.mark.parametrize(("check", "expected"), [(check, 42), (check_digest, digest(42))])
def test_an_answer_is_checked_and_not_shown(check, expected, capsys):
    check(..., expected, "six times seven")
    assert "42" not in capsys.readouterr().out
    check(42, expected, "six times seven")
    assert capsys.readouterr().out == "42 is right.\n"
    with pytest.raises(AssertionError, match="41 is not it. six times seven"):
        check(41, expected, "six times seven")


@each_notebook
def test_a_cell_to_try_does_not_hold_its_answer(path):
    for cell in code_cells(run.read(path)):
        for call in ast.walk(ast.parse(cell.source)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "check":
                is_literal = not any(isinstance(part, ast.Name) for part in ast.walk(call.args[1]))
                # 0 and None are what a result of the engine is compared with, not an answer.
                assert not is_literal or ast.unparse(call.args[1]) in ("0", "None")
