"""The one-screen programs: each has one idea, runs alone, and generates the engines' tokens."""

from __future__ import annotations

import asyncio
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.excerpts import excerpt
from benchmarks.loops import PROGRAMS, idea, module_name, result
from benchmarks.results import ROOT
from stage_a_naive import SamplingParams
from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_a_naive.loop import encode
from stage_e_batching import LLM

MOST_TOKENS = 150


def one_by_one(loop: ModuleType, prompts: list[list[int]], eos_id: int, *steps: str) -> list[list[int]]:
    """Answers of a `generate` with transformers' model, which may take a step, and may return more than tokens."""
    first = [getattr(loop, step) for step in steps]
    found = [loop.generate(*first, hf_model(), prompt, eos_id, MOST_TOKENS) for prompt in prompts]
    return [answer[0] if isinstance(answer, tuple) else answer for answer in found]


def with_the_kernel(loop: ModuleType, prompts: list[list[int]], eos_id: int) -> list[list[int]]:
    loop.load_extension("fused_mlp")
    model = load_hf_model()
    loop.replace_mlp(model)
    return [loop.generate(model, prompt, eos_id, MOST_TOKENS) for prompt in prompts]


def in_blocks(loop: ModuleType, prompts: list[list[int]], eos_id: int) -> list[list[int]]:
    model = loop.load(loop.PagedAttention())
    return loop.generate(model, loop.Pool(model.config, 64, loop.BLOCK_SIZE), prompts, eos_id)


def on_two_ranks(loop: ModuleType, prompts: list[list[int]], eos_id: int) -> list[list[int]]:
    return loop.in_two_processes(prompts, eos_id)[0]


def with_guesses(loop: ModuleType, prompts: list[list[int]], eos_id: int) -> list[list[int]]:
    models = loop.load(loop.PagedAttention()), loop.load(loop.PagedAttention(), TUTOR_PATH.parent / "tutor_draft")
    return [loop.generate(models, prompt, eos_id, loop.GUESSES, loop.keep_equal, 0)[0] for prompt in prompts]


def in_two_stages(loop: ModuleType, prompts: list[list[int]], eos_id: int) -> list[list[int]]:
    pool = loop.Pool(loop.load(loop.PagedAttention()).config, len(prompts), loop.LONGEST)
    return loop.generate(loop.TWO_IN_FLIGHT, pool, prompts, eos_id)[0]


def streamed(loop: ModuleType, prompts: list[list[int]], eos_id: int) -> list[list[int]]:
    """The tokens that the engine's thread hands to the event loop, and the last one, for which it says that it ends."""

    async def answer(sequence: object) -> list[int]:
        tokens = []
        while (token := await sequence.tokens.get()) is not None:
            tokens.append(token)
        return [*tokens, sequence.ids[-1]]

    async def answers() -> list[list[int]]:
        inbox, sequences = loop.SimpleQueue(), [loop.Sequence(list(prompt)) for prompt in prompts]
        work = loop.load(loop.PagedAttention()), inbox, asyncio.get_running_loop()
        loop.Thread(target=loop.run_engine, args=work, daemon=True).start()
        for sequence in sequences:
            sequence.tokens = asyncio.Queue()
            inbox.put(sequence)
        return await asyncio.gather(*map(answer, sequences))

    return asyncio.run(answers())


@dataclass(frozen=True)
class Loop:
    """A program of the course, and its expected properties.

    Attributes:
        path: of the program.
        most_lines: the limit of its length.
        idea, before: names in it. With the idea replaced by `before`, it prints the old number again.
        answers: the function above that runs it on prompts of token ids; "" where it generates no tokens.
        steps: names in it that its `generate` takes first.
        own: modules of the project that it may import, besides the model's and the earlier programs.
        compiles: it needs a C++ compiler.
        counts_calls: it prints how often PyTorch is called, which is not the same in every version.
        grows: the idea makes the number larger.
        interpreted: without a GPU it needs Triton's interpreter, and so a separate process.
    """

    path: str
    most_lines: int
    idea: str
    before: str
    answers: str = ""
    steps: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    compiles: bool = False
    counts_calls: bool = False
    grows: bool = False
    interpreted: bool = False


IN_CPP = "stage_f_graph_tp/megakernel/mini.py"  # runs csrc/stage_f/mini.cu; test_stage_f_mini.py reads its lesson
LOOPS = [Loop(**row) for row in tomllib.loads(Path(__file__).with_name("loops.toml").read_text("utf-8"))["loop"]]
MODEL = {
    "stage_a_naive.checkpoints.tutor",
    *(f"stage_d_paged.{name}" for name in ("model", "layers", "config", "weights")),
}
OWN_IMPORT = re.compile(r"^from ((?:stage_|beyond|benchmarks|labs)[\w.]*) import (.+)$", re.MULTILINE)


def row(loop: Loop, *marks: pytest.MarkDecorator) -> object:
    return pytest.param(loop, id=loop.path, marks=[*marks, *[pytest.mark.compiler] * loop.compiles])


each_loop = pytest.mark.parametrize("loop", [row(loop) for loop in LOOPS])


def load_hf_model() -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(TUTOR_PATH).float().eval()


hf_model = cache(load_hf_model)


def source(loop: Loop) -> str:
    return (ROOT / loop.path).read_text(encoding="utf-8")


def load(loop: Loop) -> ModuleType:
    return importlib.import_module(module_name(loop.path))


@pytest.fixture
def forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the second process of a program a fork of this one, which has imported what it needs."""
    monkeypatch.setattr("stage_f_graph_tp.tensor_parallel.loop.get_context", lambda _: get_context("fork"))


@pytest.fixture
def last_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Run a program, on request without its idea and on less work, and return the last line that it prints."""

    def run(loop: Loop, is_without_idea: bool = False) -> str:
        if loop.interpreted:
            pytest.importorskip("triton")
            change = f"loop.{loop.idea} = loop.{loop.before}" if is_without_idea else "pass"
            code = f"import {module_name(loop.path)} as loop; {change}; loop.main()"
            program = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
            return program.stdout.splitlines()[-1]
        module = load(loop)
        changes = {(sys, "argv"): ["loop.py", "--once"]}  # the program that serves asks itself, and ends
        if is_without_idea:
            changes[module, loop.idea] = getattr(module, loop.before)
            if hasattr(module, "read_faq"):
                changes[module, "read_faq"] = lambda: read_faq()[:3]
            if hasattr(module, "QUESTIONS"):
                changes[module, "QUESTIONS"] = module.QUESTIONS[:1]
        for (owner, name), value in changes.items():
            monkeypatch.setattr(owner, name, value)
        module.main()
        return capsys.readouterr().out.splitlines()[-1]

    return run


def imported_modules(program: str) -> set[str]:
    """The modules of the project that a program imports."""
    found = set()
    for package, names in OWN_IMPORT.findall(program):
        inside = {f"{package}.{name.split()[0]}" for name in names.split(", ")}
        found |= inside if (ROOT / package.replace(".", "/")).is_dir() else {package}
    return found


def test_the_programs_are_those_of_make_loops() -> None:
    assert [loop.path for loop in LOOPS] == list(PROGRAMS)


@each_loop
def test_a_program_imports_earlier_programs_and_the_model_and_nothing_of_an_engine(loop: Loop) -> None:
    earlier = {module_name(other.path) for other in LOOPS[: LOOPS.index(loop)]}
    assert imported_modules(source(loop)) <= earlier | MODEL | set(loop.own)


@each_loop
def test_a_program_fits_on_its_screens(loop: Loop) -> None:
    assert len(source(loop).splitlines()) <= loop.most_lines
    assert idea(loop.path)


@pytest.mark.slow
@each_loop
def test_a_program_runs_and_its_idea_changes_the_number(loop: Loop, last_line: Callable[..., str]) -> None:
    line = last_line(loop)
    found = result(line)
    before, after = (float(re.match(r"[\d,.]+", found[way])[0].replace(",", "")) for way in ("before", "after"))
    assert before < after if loop.grows else 0 <= after < before
    if not (loop.counts_calls or loop.compiles):  # how often PyTorch is called depends on its version
        assert line in (ROOT / loop.path).with_name("README.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("forked_process")
@pytest.mark.parametrize(  # those that choose tokens run in the next test, and that in C++ in a separate one
    "loop", [row(loop, *[pytest.mark.slow] * bool(loop.answers or loop.path == IN_CPP)) for loop in LOOPS]
)
def test_without_the_idea_the_number_is_what_it_was_before(loop: Loop, last_line: Callable[..., str]) -> None:
    found = result(last_line(loop, is_without_idea=True))
    assert found["after"] == found["before"]


@pytest.fixture(scope="module")
def answered() -> tuple[list[list[int]], int, list[list[int]]]:
    """Prompts, the token that ends an answer, and the answers of every engine: a long one and short ones."""
    tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)
    prompts = [encode(tokenizer, text) for text in ("What is decode?", "给小猫起个名字。", "Name a fruit.")]
    params = SamplingParams(temperature=0, max_tokens=MOST_TOKENS)
    outputs = LLM("tutor", device="cpu").generate(prompts, params, use_tqdm=False)
    assert {output["finish_reason"] for output in outputs} == {"stop"}
    return prompts, tokenizer.eos_token_id, [output["token_ids"] for output in outputs]


@pytest.mark.usefixtures("forked_process")
@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop.answers], ids=lambda loop: loop.path)
def test_a_program_chooses_the_tokens_of_the_engines(loop: Loop, answered: tuple) -> None:
    prompts, eos_id, expected = answered
    assert globals()[loop.answers](load(loop), prompts, eos_id, *loop.steps) == expected


def test_the_standard_rule_of_speculation_samples_by_the_probabilities_of_the_large_model() -> None:
    loop = importlib.import_module("beyond.speculation.loop")
    torch.manual_seed(0)
    p, q = torch.tensor([0.5, 0.3, 0.1, 0.1]), torch.tensor([0.1, 0.6, 0.2, 0.1])
    guesses = q.multinomial(4000, replacement=True).tolist()
    kept = [loop.keep_by_chance([guess], [q], torch.stack([p, p]).log(), 1.0, 0)[0] for guess in guesses]
    torch.testing.assert_close(torch.bincount(torch.tensor(kept)) / len(kept), p, rtol=0, atol=0.03)


# ---- the lessons: the program first, then where its lines are in the engine ----------------------------------------

READMES = sorted({Path(loop.path).parent / "README.md" for loop in LOOPS if loop.path != IN_CPP})
HEAD = "| in the loop | in the engine | what was added, and why |"
ROW = re.compile(r"\| `(?P<own>[\w.]+(?:::[\w.]+)?)` \| \[`(?P<at>[\w./]+::[\w.]+)`\]\((?P<link>[\w./]+)\) \| \S.*\|")


def rows_of_the_engine(text: str) -> list[str]:
    return [row for table in text.split(HEAD)[1:] for row in table.partition("\n\n")[0].splitlines()[2:]]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.as_posix())
def test_a_lesson_says_where_each_part_of_its_program_is_in_the_engine(readme: Path) -> None:
    rows = rows_of_the_engine((ROOT / readme).read_text(encoding="utf-8"))
    assert len(rows) >= 2
    for row in rows:
        found = ROW.fullmatch(row)
        assert found, row
        program, _, symbol = found["own"].rpartition("::")
        text = (ROOT / readme.parent / (program or "loop.py")).read_text(encoding="utf-8")
        assert re.search(rf"\b{symbol}\b", text)  # read, not imported: one program has Triton interpret
        file, _, symbol = found["at"].partition("::")
        assert file == found["link"] and excerpt(f"{readme.parent / file}::{symbol}")
