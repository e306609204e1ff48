"""What commands say in the reader's language: the catalogue has every text, and the locale chooses."""

from __future__ import annotations

import ast
import gettext
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import labs.report
from labs import hint, progress
from labs.exercises import load_labs
from labs.report import Mark, Report
from stage_a_naive.entrypoints import language

pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parent.parent
SPEAKING = ["tools/doctor.py", "labs/report.py", "stage_a_naive/__main__.py", "stage_a_naive/floor.py"]
SPEAKING += ["stage_a_naive/entrypoints/cli.py", "labs/progress.py", "labs/hint.py", "labs/starter.py"]
SPEAKING += [f"{stage}/__main__.py" for stage in ("stage_b_decode_step", "stage_c_fused_mlp", "stage_d_paged")]
SPEAKING += ["stage_e_batching/__main__.py", "stage_f_graph_tp/__main__.py"]
LOCALE = Path(language.__file__).with_name("locale")
CHINESE = gettext.translation("six_engines", LOCALE, ["zh"])


def texts(path: str) -> list[str]:
    """The texts that a program hands to `tr`; of a plural the one for many."""
    calls = [node for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))) if isinstance(node, ast.Call)]
    named = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "tr"]
    return [text.value for text in named if isinstance(text, ast.Constant)]


@pytest.mark.parametrize("path", SPEAKING)
def test_the_catalogue_has_every_text_of_a_program(path: str) -> None:
    assert texts(path) and [text for text in texts(path) if CHINESE.gettext(text) == text] == []


def test_the_catalogue_has_every_title_and_every_hint_of_the_labs() -> None:
    labs = load_labs().values()
    said = [lab.title for lab in labs]
    said += [text for lab in labs for exercise in lab.exercises for text in (exercise.title, *exercise.hints)]
    assert [text for text in said if text not in CHINESE._catalog] == []


@pytest.mark.skipif(not shutil.which("msgfmt"), reason="needs msgfmt of gettext")
def test_the_catalogue_is_made_from_its_source(tmp_path: Path) -> None:
    source = LOCALE / "zh" / "LC_MESSAGES" / "six_engines.po"
    subprocess.run(["msgfmt", "--check", "-o", tmp_path / "made.mo", source], check=True)
    with (tmp_path / "made.mo").open("rb") as made:
        assert gettext.GNUTranslations(made)._catalog == CHINESE._catalog, "run msgfmt: see language.py"


@pytest.mark.parametrize(("locale", "first"), [("zh_CN.UTF-8", "这台机器："), ("C.UTF-8", "This machine:")])
def test_the_doctor_speaks_the_language_of_the_locale(locale: str, first: str) -> None:
    environment = {"PATH": os.environ["PATH"], "LANG": locale, "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-m", "tools.doctor"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert first in done.stdout.splitlines()


def test_the_grader_s_table_is_chinese_and_its_reasons_stay_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs.report, "tr", CHINESE.gettext)
    monkeypatch.setattr(labs.report, "counted", CHINESE.ngettext)
    marks = [Mark("D.8", "RMSNorm", 3, "passed"), Mark("D.4", "find a cached prefix", 7, "failed", "expected 1, got 2")]
    said = str(Report("d", "the paged engine", marks, whole="the tokens differ"))
    assert said.splitlines()[0] == "实验 D：分页引擎"
    assert "没通过" in said and "expected 1, got 2" in said and "the tokens differ（扣 3 分）" in said
    passed, failed = said.splitlines()[2:4]
    ends = [language.columns(line.split("  通过")[0].split("  没通过")[0]) for line in (passed, failed)]
    assert ends[0] == ends[1], "a Chinese character takes two columns"


def test_the_progress_and_the_hints_are_chinese_and_name_the_chinese_handout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "tr", CHINESE.gettext)
    monkeypatch.setattr(hint, "tr", CHINESE.gettext)
    monkeypatch.setattr(hint.next_hints, "__defaults__", (tmp_path,))
    assert "下一题：A.0 分几段处理提示词（20 分钟，labs/lab_a.zh-CN.md）" in progress.table(tmp_path)
    assert hint.main(["A.6"]) == 0
    title, first, left = capsys.readouterr().out.splitlines()
    assert title == "A.6 预填充与解码" and first.startswith("  1. 先用整段提示词") and "还有 2 条" in left


def test_one_gpu_is_not_called_gpus() -> None:
    one, many = "; tensor parallelism over up to {count} GPU", "; tensor parallelism over up to {count} GPUs"
    assert [language.counted(one, many, count) for count in (1, 2)] == [one, many]
    assert CHINESE.ngettext(one, many, 1) == CHINESE.ngettext(one, many, 2) != one
