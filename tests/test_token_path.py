"""How many files a reader opens to follow one greedy token, and how many functions a decode step passes."""

from __future__ import annotations

import ast
import gc
import importlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from stage_f_graph_tp.cuda_graph import Recorded

pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parent.parent


@cache
def one_liners(path: Path) -> set[int]:
    """First lines of the properties and `__len__`s of a file that return one expression: their names say all."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if (is_property or node.name == "__len__") and len(body) == 1 and isinstance(body[0], ast.Return):
                found.add(min(part.lineno for part in (node, *node.decorator_list)))
    return found


def functions_run(call: Callable[[], object]) -> set[tuple[Path, int]]:
    """The functions of the stages with a name that ran in `call`, by file and first line, one-line properties aside."""
    codes = set()

    def note(frame: object, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name[0] != "<":
            codes.add(frame.f_code)

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # an engine of another test that is found to be garbage during the call would run its own files
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    places = {(Path(code.co_filename), code.co_firstlineno) for code in codes}
    stages = {folder for folder in ROOT.glob("stage_*") if folder.is_dir()}  # not what is installed in a .venv here
    here = {(path, line) for path, line in places if stages.intersection(path.parents)}
    return {(path, line) for path, line in here if line not in one_liners(path)}


@pytest.mark.parametrize(("stage", "most"), [("stage_a_naive", 5), ("stage_d_paged", 14), ("stage_e_batching", 20)])
def test_the_path_of_a_greedy_token_runs_through_few_files(stage: str, most: int) -> None:
    """From the call of `generate` to its return: one prompt, no progress bar, no streaming, no stop string."""
    package = importlib.import_module(stage)
    llm = package.LLM("tutor", device="cpu")
    greedy = package.SamplingParams(temperature=0.0, max_tokens=8)
    files = {path for path, _ in functions_run(lambda: llm.generate(["What is a KV cache?"], greedy, use_tqdm=False))}
    names = sorted(str(path.relative_to(ROOT)) for path in files)
    assert len(files) <= most, f"{len(files)} files, {most} wanted: {', '.join(names)}"
    for path in files:
        text = path.read_text(encoding="utf-8")
        purpose = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
        assert purpose.endswith("."), f"the first line of {path} does not say in a sentence what it is for"
        assert text.count("\n") <= 340, f"{path} is too long to be read as one idea"


@pytest.mark.parametrize(("stage", "functions", "files"), [("stage_e_batching", 32, 17), ("stage_f_graph_tp", 40, 18)])
def test_a_decode_step_passes_few_functions(stage: str, functions: int, files: int) -> None:
    """A call of `step` for one greedy request past its prompt, without the model; stage F replays a graph."""
    package = importlib.import_module(stage)
    llm = package.LLM("tutor", device="cpu", num_kvcache_blocks=16)
    if stage == "stage_f_graph_tp":
        llm.runner.capture(lambda body: Recorded(lambda: None, body()), [1, 2])
    llm.add_request([5, 6, 7], package.SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    for _ in range(5):
        llm.step()
    model = ROOT / "stage_d_paged"
    parts = [model / "model.py", model / "layers.py", *(model / "attention").glob("*.py")]
    found = {(path, line) for path, line in functions_run(llm.step) if path not in parts}
    names = ", ".join(sorted(f"{path.relative_to(ROOT)}:{line}" for path, line in found))
    assert len(found) <= functions, names
    assert len({path for path, _ in found}) <= files, names
