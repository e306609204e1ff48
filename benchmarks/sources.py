"""The code behind a result: the files that a measured engine or study imports, as one hash per folder.

Comments, docstrings and layout do not count, because a file is hashed as its syntax tree (C++: without comments and
white space). Error messages, a study's tables and pictures, the command line and the surrounding benchmark do not count
either. What only several ranks run, their sums and watching, has a separate hash, because results of one rank do not
depend on it. A results file holds the hashes of the code that it measured (`environment` > `code`). They are stored
there and not computed from the commit, because the measuring machine may have no git, and a shallow clone, an archive
or a rewritten history may lack the commit.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

from benchmarks.engines import ENGINES
from benchmarks.results import ROOT

OURS = re.compile(r"(?:stage_[a-f]_\w+|beyond|benchmarks)(?:\.\w+)*(?::\w+)?")  # a module or `module:name`, in a string
HASHED = re.compile(r"stage_|beyond/|csrc/|benchmarks/(?:micro/(?!__init__)|peers)")
RANKS = re.compile(r"stage_f_graph_tp/(?:kernels/rank_sum|tensor_parallel/(?:all_reduce|rank_group|watch/))")
COMMAND_LINE = re.compile(r"stage_\w+/(?:entrypoints/|__main__)")  # it measures nothing, and names all stages
SHOWN = {"TABLES", "PICTURES", "draw"}  # of a study: what is made of its results
KERNELS = {  # the Python file that compiles kernels, and where they are
    "stage_c_fused_mlp/fused_mlp.py": "csrc/stage_c",
    "stage_f_graph_tp/megakernel/kernel.py": "csrc/stage_f",
    "stage_f_graph_tp/megakernel/mini.py": "csrc/stage_f",
}
COMMENTS = re.compile(r"(?://[^\n]*|/\*.*?\*/|\s)+", re.DOTALL)  # and white space
FACTORIES = {engine.name: engine.factory for engine in ENGINES}


def code_of(*starts: str, root: Path = ROOT) -> dict[str, str]:
    """Return a hash for each top folder with code that these modules import, directly or indirectly, and for "ranks".

    Args:
        starts: `module`, or `package:name` as in `engines.toml`; those that are not in this repository are left out.
    """
    files: dict[str, None] = {}
    todo = [file for start in starts for file in files_of(start, root)]
    while todo:
        if (file := todo.pop()) not in files:
            files[file] = None
            todo += used_by(file, root)
    folders: dict[str, list[str]] = {}
    for file in sorted(file for file in files if HASHED.match(file)):
        folders.setdefault(folder_of(file), []).append(file)
    return {folder: hash_of(own, root) for folder, own in folders.items()}


def folder_of(file: str) -> str:
    """Return the name under which a file's code has its hash: the top folder, or "ranks"."""
    return "ranks" if RANKS.match(file) else file.partition("/")[0]


def hash_of(files: Iterable[str], root: Path = ROOT) -> str:
    """Return one hash for the parts of these files that count."""
    return sha256("\n".join(f"{file} {text_of(file, root)}" for file in files).encode()).hexdigest()[:12]


@cache
def used_by(file: str, root: Path) -> list[str]:
    """Return the files that a file imports, names in a string, or compiles."""
    folders = (KERNELS[file], "csrc/common") if file in KERNELS else ()
    found = [p.relative_to(root).as_posix() for f in folders for p in (root / f).glob("*.*") if p.suffix != ".md"]
    if not file.endswith(".py"):
        return found
    package = file.rpartition("/")[0].replace("/", ".")
    is_package, names = file.endswith("__init__.py"), []
    for node in ast.walk(tree_of(file, root)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, [package if node.level else "", node.module]))
            names += [f"{module}:{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_package:
            if OURS.fullmatch(node.value):
                names += [node.value, f"{node.value}.__main__"]
            elif (row := node.value.partition("[")[0]) in FACTORIES and "benchmarks/micro/" in file:
                names.append(FACTORIES[row])
    return [*found, *(path for name in names for path in files_of(name, root))]


def files_of(name: str, root: Path) -> Iterator[str]:
    """Return the files of `module` or `module:name`: its packages, the module, and the file that defines the name."""
    module, _, own = name.partition(":")
    if not OURS.fullmatch(module):
        return
    parts = [*module.split("."), *filter(None, [own])]
    for i in range(1, len(parts) + 1):
        path = "/".join(parts[:i])
        files = f"{path}/__init__.py", f"{path}.py"
        yield from (f for f in files if (root / f).is_file() and not COMMAND_LINE.match(f))
    if own and (root / (package := f"{module.replace('.', '/')}/__init__.py")).is_file():
        for node in ast.walk(tree_of(package, root)):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == own and isinstance(value, ast.Constant):
                        yield from files_of(str(value.value), root)


@cache
def tree_of(file: str, root: Path) -> ast.Module:
    return ast.parse((root / file).read_text(encoding="utf-8"))


@cache
def text_of(file: str, root: Path) -> str:
    """Return the part of a file that counts."""
    if file.endswith(".py"):
        return shape(tree_of(file, root))
    return COMMENTS.sub(" ", (root / file).read_text(encoding="utf-8"))


def shape(node: object) -> str:
    """Return a syntax tree as text, equal in all versions of Python, without the parts that only people read."""
    if isinstance(node, list):
        return f"[{' '.join(shape(item) for item in node if not is_prose(item))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [f"{name}={shape(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])]
    return f"({type(node).__name__} {' '.join(fields)})"


def is_prose(node: object) -> bool:
    """Tell whether a node is a docstring, a raised error, a table, a picture or a function that draws one."""
    if isinstance(node, ast.Raise):
        return True
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id in SHOWN for target in node.targets)
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return is_text or (isinstance(node, ast.FunctionDef) and node.name in SHOWN)
