"""What strangers rely on: CI calls one script, and hooks name commands that there are."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PROJECT, MAKEFILE = ((ROOT / name).read_text("utf-8") for name in ("pyproject.toml", "Makefile"))
CITATION, HOOKS = (yaml.safe_load((ROOT / name).read_text()) for name in ("CITATION.cff", ".pre-commit-config.yaml"))


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").iterdir()), ids=lambda path: path.stem)
def test_a_workflow_runs_the_script_or_the_target_that_contributors_run(path):
    steps = [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
    [run] = [step["run"] for step in steps if "run" in step]
    assert run == ".ci/run" or f"\n{run.split()[1]}:" in MAKEFILE


@pytest.mark.parametrize("command", [hook["entry"] for hook in HOOKS["repos"][0]["hooks"]])
def test_a_hook_runs_a_module_or_a_target_of_make_that_there_is(command):
    module = re.match(r"\.venv/bin/python -m (\w+)", command)
    assert importlib.util.find_spec(module[1]) if module else f"\n{command.removeprefix('make ')}:" in MAKEFILE


def test_the_citation_and_the_newest_release_of_the_changelog_have_the_version_of_the_project():
    newest = re.search(r"^## \[(\d\S*)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[1]
    assert CITATION["version"] == newest == tomllib.loads(PROJECT)["project"]["version"]
