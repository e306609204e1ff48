"""Say which constructs of an answer serve no exercise, but would serve to forge a mark.

An answer runs in the process of the tests that judge it, so a function that may do anything could change the tests,
PyTorch's comparisons or the judge itself. This list is short and errs on the side of the learner: it forbids other
modules than those an engine's function needs, files, the interpreter's own machinery, assignments to what other modules
own, and of an imported module its private names and the ways to a name that is not written down. It is a fence and no
wall: see `instructors.md`.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from labs.exercises import Exercise

MODULES = frozenset(
    {
        "bisect",
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "enum",
        "functools",
        "heapq",
        "itertools",
        "math",
        "numpy",
        "operator",
        "random",
        "re",
        "statistics",
        "string",
        "time",
        "torch",
        "transformers",
        "triton",
        "typing",
    }
)
STAGES = (
    "stage_a_naive",
    "stage_b_decode_step",
    "stage_c_fused_mlp",
    "stage_d_paged",
    "stage_e_batching",
    "stage_f_graph_tp",
    "beyond",
)
NAMES = frozenset(
    {
        "__builtins__",
        "__import__",
        "breakpoint",
        "builtins",
        "compile",
        "delattr",
        "eval",
        "exec",
        "exit",
        "gc",
        "globals",
        "importlib",
        "input",
        "inspect",
        "locals",
        "open",
        "os",
        "pathlib",
        "quit",
        "setattr",
        "shutil",
        "subprocess",
        "sys",
        "vars",
    }
)
# Refused also where a parameter or a variable has the name: it may be one of another function in the answer.
ALWAYS = frozenset({"__builtins__", "__import__", "breakpoint", "compile", "eval", "exec", "globals", "locals", "open"})
# What objects of an engine have too: a model has .eval() and .modules(), an engine .exit().
HARMLESS_OF_OBJECTS = {"compile", "eval", "exit", "input", "modules"}
# What leads from a module that may be imported to the interpreter's own machinery, or to files.
WAYS_OUT = {
    "bltns",
    "ctypes",
    "f_trace",
    "from_file",
    "fromfile",
    "genfromtxt",
    "get_type_hints",
    "loadtxt",
    "make_dataclass",
    "memmap",
    "open_memmap",
    "pythonapi",
}
ATTRIBUTES = (
    (NAMES - HARMLESS_OF_OBJECTS)
    | WAYS_OUT
    | {
        "_getframe",
        "f_back",
        "f_globals",
        "f_locals",
        "gi_frame",
        "monkeypatch",
        "read_bytes",
        "read_text",
        "tb_frame",
        "write_bytes",
        "write_text",
    }
)
HARMLESS = ("__init__", "__name__", "__slots__")
NATIVE = re.compile(
    r"#|\b(asm|__asm__|system|popen|exec[lv]p?e?|fork|vfork|kill|raise|signal|ptrace|syscall|dlopen|dlsym|mmap|mprotect|"
    r"fopen|open(?:at)?|creat|v?dprintf|p?writev?|send(?:to|msg)?|socket|ofstream|fstream|freopen|_?exit|quick_exit|"
    r"abort|longjmp|setjmp|extern\s*\"C\")\s*[(<\"{]?"
)
ALLOWED_DIRECTIVES = ("#pragma unroll", "#if ", "#ifdef ", "#ifndef ", "#else", "#endif")


class Forbidden(NamedTuple):
    """What an answer must not do, and in which line of the given source, from 1."""

    what: str
    line: int


def find_forbidden(source: str, exercise: Exercise) -> Forbidden | None:
    """The first construct of an answer that the judge refuses, or None."""
    source = source.replace("gc.collect()", "None")  # what measures memory needs it
    return _in_python(source, exercise) if exercise.is_python else _in_native(source)


def _in_python(source: str, exercise: Exercise) -> Forbidden | None:
    indented = source[:1] in (" ", "\t")
    tree = ast.parse(f"if True:\n{source}" if indented else source)
    function = tree.body[0].body[0] if indented else tree.body[0]
    imported = _imported(function, ast.Import | ast.ImportFrom)
    local = {arg.arg for node in ast.walk(function) if isinstance(node, ast.arguments) for arg in _all_arguments(node)}
    local |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    modules = _imported(function, ast.Import) | (_modules_of(exercise.reference) - local)
    named = {id(name) for node in ast.walk(function) for name in _bases_of_names(node)}
    for statement in function.body:
        for node in ast.walk(statement):
            what = _of_node(node, exercise, local - imported) or _of_module(node, modules, named)
            if what is not None:
                return Forbidden(what, getattr(node, "lineno", 1) - indented)
    return None


def _imported(tree: ast.AST, kind: object) -> set[str]:
    """The names that import statements of this kind bind."""
    return {
        name.asname or name.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, kind)
        for name in node.names
    }


@cache
def _modules_of(file: Path) -> frozenset[str]:
    """The modules that a file has under a name of their own."""
    return frozenset(_imported(ast.parse(file.read_text(encoding="utf-8")), ast.Import))


def _bases_of_names(node: ast.AST) -> list[ast.AST]:
    """What a node takes an attribute of whose name is written down and not private."""
    match node:
        case ast.Attribute(value=base, attr=name):
            return [base] if not _is_private(name) else []
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[base, ast.Constant(value=str(name)), *_]):
            return [base] if not _is_private(name) and name not in ATTRIBUTES else []
    return []


def _is_private(name: str) -> bool:
    return name.startswith("_") and name not in HARMLESS


def _of_module(node: ast.AST, modules: set[str], named: set[int]) -> str | None:
    """A module is for the names in it: what else an answer does with one is refused."""
    match node:
        case ast.Attribute(attr="exit" | "input" | "modules" as name) if _root(node) in modules:
            return f"use of {_root(node)}.{name}"
        case ast.Attribute(attr=name) if _is_private(name) and _root(node) in modules:
            return f"the private name {name} of the module {_root(node)}"
        case ast.Name(id=name, ctx=ast.Load()) if name in modules and id(node) not in named:
            return f"the module {name} as a value, write the names that you need of it, such as {name}.…"
    return None


def _of_node(node: ast.AST, exercise: Exercise, local: set[str]) -> str | None:
    match node:
        case ast.Import():
            refused = [alias.name for alias in node.names if not _may_import(alias.name, exercise)]
            return f"import of {refused[0]}" if refused else None
        case ast.ImportFrom():
            inner = {alias.name for alias in node.names} & ATTRIBUTES
            if node.level or not _may_import(node.module or "", exercise) or inner:
                return f"import from {node.module or '.'}"
        case ast.Name(id=name) | ast.arg(arg=name) if name in ALWAYS or (name in NAMES and name not in local):
            return f"use of {name}"
        case ast.Attribute(attr=name) if name in ATTRIBUTES or _is_dunder(name):
            return f"use of .{name}"
        case ast.Attribute(value=ast.Call(func=ast.Name(id="type")), ctx=ast.Store() | ast.Del()):
            return "assignment to an attribute of a type"
        case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
            root = _root(node)
            if root is not None and root not in local and isinstance(node, ast.Attribute):
                return f"assignment to an attribute of {root}"
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name) if _is_dunder(name):
            return f"definition of {name}"
        case ast.Name(id=name, ctx=ast.Store()) | ast.alias(asname=str(name)) if _is_dunder(name):
            return f"assignment to {name}"
        case ast.Global(names=names):
            return f"global {names[0]}"
        case ast.Constant(value=str(text)) if _is_dunder(text):
            return f"the name {text} in a string"
        case ast.Call(func=ast.Name(id="type"), args=args) if len(args) > 1:
            return "a class made by type()"
    return None


def _all_arguments(arguments: ast.arguments) -> list[ast.arg]:
    extra = [arg for arg in (arguments.vararg, arguments.kwarg) if arg is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra]


def _may_import(module: str, exercise: Exercise) -> bool:
    """Whether an answer may import it: a module of the list, or of a stage that is not later than its own."""
    top = module.split(".")[0]
    if top in STAGES:
        own = exercise.path.split("/")[0]
        return own not in STAGES or STAGES.index(top) <= STAGES.index(own)  # what is built on the stages has them all
    if top == "pytest":
        return exercise.is_break_it
    return top in MODULES and not ATTRIBUTES.intersection(module.split("."))


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_dunder(name: str) -> bool:
    return bool(re.fullmatch(r"__\w+__", name)) and name not in HARMLESS


def _in_native(body: str) -> Forbidden | None:
    comment = r"//[^\n]*|/\*.*?\*/"
    code = re.sub(comment, lambda match: re.sub(r"[^\n]", "", match.group()), body, flags=re.DOTALL)
    for match in NATIVE.finditer(code):
        line = code[match.start() :].split("\n", 1)[0]
        if match.group() == "#" and line.startswith(ALLOWED_DIRECTIVES):
            continue
        return Forbidden(f"`{line.strip()[:60]}`", code.count("\n", 0, match.start()) + 1)
    return None
