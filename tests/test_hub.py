"""A model by its hub id: downloaded once with a progress bar, then used from the cache; what fails is one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import hub_server
import pytest

ROOT = Path(__file__).resolve().parent.parent
ASK = ["-m", "stage_d_paged", "--device", "cpu", "--prompt", "What is prefill?", "--max-tokens", "8"]
RESOLVE = """
import json, sys
from stage_a_naive.checkpoints.loading import ModelError, resolve
for name in sys.argv[1:]:
    try:
        print(json.dumps([name, str(resolve(name).path)]))
    except ModelError as error:
        print(json.dumps([name, str(error)]))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a user whose hub is our server and whose cache is empty."""
    server = hub_server.start()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
    variables["HF_HOME"] = str(tmp_path_factory.mktemp("huggingface"))
    variables["no_proxy"] = "127.0.0.1"
    yield variables
    server.shutdown()
    server.server_close()


def python(environment: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *argv]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def resolve(environment: dict[str, str], *names: str) -> dict[str, str]:
    """For each hub id, the directory that it was found in, or the error."""
    done = python(environment, "-c", RESOLVE, *names)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_a_model_is_downloaded_with_a_progress_bar_and_then_needs_no_hub(environment: dict[str, str]) -> None:
    done = python(environment, *ASK, "--model", "course/tutor")
    assert done.returncode == 0 and "100%" in done.stderr, done.stderr
    assert "[answer]\nPrefill is the first phase of a\n" in done.stdout
    unreachable = environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    found = resolve(unreachable, "course/tutor", "course/never-downloaded")
    assert found["course/tutor"].startswith(environment["HF_HOME"])
    assert {file.name for file in Path(found["course/tutor"]).iterdir()} == set(hub_server.READ)
    assert "not in the cache" in found["course/never-downloaded"]


def test_what_the_hub_does_not_give_is_one_line(environment: dict[str, str]) -> None:
    says = {
        "course/nothing": "no such model",
        "course/gated": "access is restricted",
        "course/broken": "peer closed connection",
    }
    for name, error in resolve(environment, *says).items():
        assert says[name] in error and "\n" not in error and len(error) < 400, error
