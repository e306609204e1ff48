"""`make export STAGE=d OUT=folder`: one stage with everything that it needs, in a separate folder.

The folder contains the stage, the earlier stages that it imports, the C++ and CUDA sources if one of them builds any,
the tutor, and a Makefile of three lines. It needs nothing else from the course, so it can be copied anywhere.
"""

from __future__ import annotations

from stage_a_naive.entrypoints.interrupts import run_command  # before all other imports

# isort: split
import argparse
import ast
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = {path.name[len("stage_")]: path for path in sorted(ROOT.glob("stage_?_*"))}
LEFT_OUT = shutil.ignore_patterns("__pycache__")
MAKEFILE = """run: .venv/ready
\tPYTHONSAFEPATH=1 PYTHONPATH="$(CURDIR)" .venv/bin/python -m {stage} $(ARGS)
.venv/ready: requirements.txt; python3 -m venv .venv && .venv/bin/pip install -r $< && touch $@
"""


def imported_stages(package: Path) -> set[str]:
    """Return the names of all stages that a package imports, directly or not, including itself."""
    found, new = set(), {package.name}
    while new:
        found |= new
        files = [file.relative_to(ROOT) for name in new for file in (ROOT / name).rglob("*.py")]
        packages = {imported.parts[0] for file in files for imported in imported_files(file)}
        new = {name for name in packages if ROOT / name in STAGES.values()} - found
    return found


def imported_files(file: Path) -> set[Path]:
    """Return the repository's files that a Python file imports, also inside functions, relative to the root."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            path = Path(*name.split("."))
            found |= {p for p in (path.with_suffix(".py"), path / "__init__.py") if (ROOT / p).is_file()}
    return found


def export(letter: str, out: Path) -> list[str]:
    """Write a stage's folder.

    Args:
        letter: of the stage.
        out: the folder, which must be new or empty.

    Returns:
        The names of its entries.

    Raises:
        ValueError: there is no such stage, or the folder is not empty.
    """
    if letter not in STAGES:
        raise ValueError(f"no stage is called {letter!r}; choose from {', '.join(STAGES)}")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: give a new folder")
    stages = imported_stages(STAGES[letter])
    folders = [*sorted(stages), *(["csrc"] if "stage_c_fused_mlp" in stages else []), "models/tutor"]
    for name in folders:
        shutil.copytree(ROOT / name, out / name, ignore=LEFT_OUT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    needed = [requirement.partition(">=")[0] for requirement in project["dependencies"]]
    (out / "requirements.txt").write_text("".join(f"{name}=={pinned[name]}\n" for name in needed))
    (out / "Makefile").write_text(MAKEFILE.format(stage=STAGES[letter].name))
    shutil.copy(ROOT / "LICENSE", out)
    return sorted(path.name for path in out.iterdir())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.export", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("stage", help=f"one of {', '.join(STAGES)}")
    parser.add_argument("out", type=Path, help="a new folder")
    arguments = parser.parse_args(argv)
    try:
        names = export(arguments.stage, arguments.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out}: {', '.join(names)}\nrun it: make -C {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
