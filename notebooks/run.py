"""Runs the notebooks and keeps their outputs fit to be read: in the repository, on the web, and in a diff.

    python notebooks/run.py                  # run all, in place
    python notebooks/run.py a_naive          # run those whose name begins so
    python notebooks/run.py --check          # write nothing; exit status 1 where one fails or is out of date

`X.zh-CN.ipynb` is the Chinese edition of `X.ipynb`: its own text, and after every run the same code with its outputs.
A notebook notes, in its metadata, a hash of the code that its outputs came from. So it can be told without running it
whether somebody has changed a cell since. Its first cell's output names the machine, and what ran on it before: times
are kept only if they were measured on an idle machine.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
sys.path.insert(0, str(ROOT))

from stage_a_naive.entrypoints.interrupts import end_at_once, run_command

if __name__ == "__main__":
    signal.signal(signal.SIGINT, end_at_once)  # while the rest is imported

# isort: split
import argparse
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode
from nbformat.v4 import new_output
from traitlets.config import Config

from benchmarks.results import BUSY, environment
from labs.first_cell import BEGINS

CHINESE = ".zh-CN.ipynb"
METADATA = "six_engines"
CELL_SECONDS = 300
# Lines of a log that say nothing to a reader: progress bars, the profiler's greeting, tqdm's wish for widgets, and what
# an engine chose on the machine that ran the notebook.
NOISE = re.compile(r"\d+%\||^USDT:|TqdmWarning|notebook_tqdm$|^\[(stage_\w+|(beyond|benchmarks)[.\w]*)\] |^\s*$")

# Outputs that depend on how busy the machine was: times, rates, and pictures of them.
TIMES = re.compile(r"\d ?[mµ]?s\b|/s\b|per second|\[picture: (?:the time|when)")


def notebooks() -> list[Path]:
    """All notebooks, in reading order, without their Chinese editions."""
    return sorted(path for path in FOLDER.glob("*.ipynb") if not path.name.endswith(CHINESE))


def read(path: Path) -> NotebookNode:
    """A notebook, as it is in its file."""
    return nbformat.read(path, as_version=4)


def write(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook, and its code with the outputs into its Chinese edition, if there is one."""
    nbformat.write(notebook, path)
    edition = path.with_suffix(CHINESE)
    if edition.exists():
        texts = {cell.id: cell.source for cell in read(edition).cells if cell.cell_type == "markdown"}
        for cell in notebook.cells:
            cell.source = texts.get(cell.id, cell.source)
        nbformat.write(notebook, edition)


def source_hash(notebook: NotebookNode) -> str:
    """A hash of the code cells after the first, which finds the course: equal exactly if the outputs can be of them."""
    digest = hashlib.sha256()
    for cell in notebook.cells:
        if cell.cell_type == "code" and not cell.source.startswith(BEGINS):
            digest.update(cell.source.encode() + b"\0")
    return digest.hexdigest()[:16]


def execute(path: Path, on_cell: Callable[[], None] | None = None) -> NotebookNode:
    """Run a notebook from its first cell to its last in a fresh kernel, and return it with fresh outputs.

    Args:
        on_cell: called as each cell begins.

    Raises:
        CellExecutionError: a cell raised; the message has the cell and the traceback.
        TimeoutError: a cell ran longer than `CELL_SECONDS`; the message is one line.
    """
    notebook = read(path)
    begun: list[NotebookNode] = []

    def begin(cell: NotebookNode, cell_index: int) -> None:
        begun.append(cell)
        if on_cell is not None:
            on_cell()

    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        # The kernel has socket files and no ports, which another process may take between their choice and their use.
        sockets = {"transport": "ipc", "ip": f"{folder}/kernel"}
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            record_timing=False,
            config=Config(KernelManager=sockets),
            resources={"metadata": {"path": str(FOLDER)}},
            on_cell_start=begin,
        )
        try:
            client.execute(env=environment)
        except CellTimeoutError:
            first, *_ = begun[-1].source.strip().splitlines()
            number = sum(cell.cell_type == "code" for cell in begun)
            raise TimeoutError(f"code cell {number} ran longer than {CELL_SECONDS} s: {first}") from None
    tidy(notebook)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        METADATA: {"source": source_hash(notebook)},
    }
    return notebook


def this_machine() -> dict[str, object]:
    """Name the machine, and count the programs that ran on it in the last minute, on average."""
    device = environment()["device"]
    kind = device["name"] if device["type"] == "cuda" else f"{device['cpu']}, {device['cpu_cores']} cores"
    return {"machine": kind, "load": round(os.getloadavg()[0], 1)}


def note(notebook: NotebookNode, where: dict[str, object]) -> None:
    """Write into the metadata, and for readers into the first code cell's output, where the outputs come from."""
    notebook.metadata[METADATA] |= where
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    text = "The outputs below were recorded on {machine}; programs that ran there before: {load}.\n".format(**where)
    first.outputs = [*first.outputs, new_output("stream", name="stdout", text=text)]


def shown_text(notebook: NotebookNode) -> str:
    """Return all outputs as text; a picture is its text alternative."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            found += [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
    return "\n".join(found)


def is_disturbed(notebook: NotebookNode) -> bool:
    """Tell whether the outputs have times that were measured while other programs ran."""
    return notebook.metadata[METADATA].get("load", 0) > BUSY and bool(TIMES.search(shown_text(notebook)))


def tidy(notebook: NotebookNode) -> None:
    """Take noise and this machine's folders out of the outputs."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        kept = []
        for output in cell.outputs:
            if output.output_type == "stream":
                lines = [line.rsplit("\r", 1)[-1] for line in output.text.replace(f"{ROOT}{os.sep}", "").split("\n")]
                if output.name == "stderr":
                    lines = [line for line in lines if not NOISE.search(line)]
                output.text = "\n".join(lines) + ("\n" if output.name == "stderr" and lines else "")
                if not output.text.strip():
                    continue
                if kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
                    kept[-1].text += output.text
                    continue
            kept.append(output)
        cell.outputs = kept


def is_current(notebook: NotebookNode) -> bool:
    """Whether the outputs are of the code that the notebook holds."""
    return notebook.metadata.get(METADATA, {}).get("source") == source_hash(notebook)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names; all notebooks where none is given")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    chosen = [p for p in notebooks() if not options.names or p.stem.startswith(tuple(options.names))]
    failed, where = False, this_machine()  # before the first: a notebook is a load, too
    for path in chosen:
        if options.check and not is_current(read(path)):
            print(f"{path.name}: its outputs are older than its code; run `make notebooks`", file=sys.stderr)
            failed = True
        start = time.perf_counter()
        print(f"{path.name}: ", end="", flush=True)
        try:
            notebook = execute(path, on_cell=lambda: print(".", end="", flush=True))
        except (CellExecutionError, TimeoutError) as error:
            print(f"\n{path.name}: {error}", file=sys.stderr)
            failed = True
            continue
        note(notebook, where)
        if not options.check and is_disturbed(notebook):
            busy = f"a load of {where['load']} is above {BUSY}: its times need an idle machine"
            print(f"\n{path.name}: not written; {busy}", file=sys.stderr)
            failed = True
        elif not options.check:
            write(notebook, path)
        print(f" {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
