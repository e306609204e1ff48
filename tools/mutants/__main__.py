"""Check that tests detect faults: change one operator, number or statement at a time and run the file's tests.

    python -m tools.mutants --seed 0 --count 400          # 400 of them, at random: over an hour on two cores
    python -m tools.mutants --only block_manager          # of files whose name contains this word
    python -m tools.mutants --list --count 20             # print their diffs and run nothing

`tools.faults` does the same for faults written by hand; these are generated with mutmut's operators, so they are not
biased. A mutant *survives* when all tests of its file pass. Then a test is missing, or the mutant changes nothing that
a caller could see: such mutants are in `equivalent.toml`, with the reason, and are not run.
"""

from __future__ import annotations

import argparse
import difflib
import random
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_string

from tools.changed_tree import ROOT, Change, function_at, outcomes, spans_of

FUZZ = "tests/test_stage_e_fuzz.py"  # first where it is quick to fail
SCHEDULING = (FUZZ, "tests/test_stage_e_scheduler.py", "tests/test_stage_e_waiting_order.py")
OVERLAP = ("tests/test_stage_f_overlap.py", "tests/test_stage_f_graphs.py", "-k", "not tutor and not forty")
RANKS = ("tests/test_stage_f_parallel.py", "tests/test_stage_f_workers.py")
COMMANDS = (
    *RANKS,
    "-k",
    "command or collective or travels or notice_first or before_its_end or reports_it or one_rank",
)
F, PARALLEL = "stage_f_graph_tp", "stage_f_graph_tp/tensor_parallel"
WATCH = f"{PARALLEL}/watch"
# The mutated places (a file or one of its functions or classes), and the tests that should fail: arguments of pytest.
# They take seconds. The first one that fails ends the run.
TESTS: dict[str, tuple[str, ...]] = {
    "stage_d_paged/block_manager.py": ("tests/test_stage_d_block_manager.py", FUZZ),
    "stage_e_batching/scheduler.py": SCHEDULING,
    "stage_e_batching/queues.py": (*SCHEDULING, "tests/test_stage_e_interrupts.py"),
    "stage_e_batching/engine.py": (
        *SCHEDULING,
        "tests/test_stage_f_overlap.py",
        "tests/test_stage_e_interrupts.py",
        "tests/test_fake_engines.py",
        "-k",
        "not stages and not device and not ahead",
    ),
    "stage_e_batching/calls/calls.py": ("tests/test_stage_e_calls.py", "tests/test_stage_e_interrupts.py", FUZZ),
    "stage_d_paged/sampler/reference.py": (
        "tests/test_stage_e_sampler.py",
        "-k",
        "not interpreter",
    ),
    f"{F}/step_input.py": OVERLAP,
    f"{F}/input_batch.py": OVERLAP,
    f"{F}/ranks.py::StepCommand": COMMANDS,
    f"{F}/ranks.py::Rank.execute_command": COMMANDS,
    f"{F}/ranks.py::Ranks.begin_command": COMMANDS,
    f"{F}/ranks.py::Ranks.in_step": COMMANDS,
    f"{PARALLEL}/rank_group.py::RankGroup.agree_on": COMMANDS,
    f"{WATCH}/rendezvous.py::WatchedStore": COMMANDS,
    f"{WATCH}/rendezvous.py::Rendezvous": COMMANDS,
    f"{WATCH}/workers.py::check_number": COMMANDS,
    f"{WATCH}/workers.py::Workers.send": COMMANDS,
    f"{WATCH}/workers.py::Workers.in_step": COMMANDS,
    f"{WATCH}/worker_loop.py::execute_commands": COMMANDS,
}
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
SECONDS = 50  # of processor time for a mutant's tests


def drop_last_argument(node: cst.Call) -> Iterable[cst.Call]:
    """Turn `f(a, b)` into `f(a)`, which uses a default if there is one."""
    if len(node.args) > 1:
        yield node.with_changes(args=node.args[:-1])


def negate(node: cst.If | cst.While) -> Iterable[cst.CSTNode]:
    """Turn `if a:` into `if not (a):`."""
    test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield node.with_changes(test=cst.UnaryOperation(cst.Not(), test))


def drop_statement(node: cst.Expr) -> Iterable[cst.Pass]:
    """Turn the statement `f(a)` into `pass`."""
    if not isinstance(node.value, (cst.SimpleString, cst.ConcatenatedString)):  # a docstring
        yield cst.Pass()


# Not mutmut's changes of texts, which are for readers, and not its `f(a, None)`, half of all mutants, which fail in
# the first call.
OPERATORS: list[tuple[type, Callable[[cst.CSTNode], Iterable[cst.CSTNode]]]] = [
    *(pair for pair in mutation_operators if pair[1] not in (operator_string, operator_arg_removal)),
    (cst.Call, drop_last_argument),
    (cst.If, negate),
    (cst.While, negate),
    (cst.Expr, drop_statement),
]


class Finder(cst.CSTVisitor):
    """Collects possible changes in some lines: pairs of a node and its replacement.

    Types, decorators and texts stay as they are.
    """

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, lines: range) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, cst.CSTNode]] = []
        self._lines = lines
        self._line = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.Annotation, cst.Decorator, cst.FormattedString)):
            return False
        place = self.get_metadata(PositionProvider, node, None)
        if place is not None:  # an operator has none: its line is that of the node visited before
            self._line = place.start.line
        for kind, operator in OPERATORS:
            if self._line in self._lines and isinstance(node, kind):
                self.found += [(node, changed) for changed in operator(node)]
        return True


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    line: int
    function: str  # the function that contains it
    before: str  # the lines that change, without indentation
    after: str
    change: Change

    @property
    def key(self) -> tuple[str, str, str]:
        """The parts that stay the same if the lines around it change."""
        return f"{self.file}::{self.function}", self.before, self.after

    def __str__(self) -> str:
        lines = [f"{self.file}:{self.line} in {self.function}"]
        lines += [
            f"    {sign} {line}" for sign, text in (("-", self.before), ("+", self.after)) for line in text.split("\n")
        ]
        return "\n".join(lines)


class Source:
    """A file, or some of its functions, and all possible changes in it."""

    def __init__(self, place: str, tests: tuple[str, ...]) -> None:
        self.file, _, function = place.partition("::")
        self.tests = tests
        self.text = (ROOT / self.file).read_text(encoding="utf-8")
        [(start, end)] = spans_of(self.file, self.text, function)
        finder = Finder(range(self.text.count("\n", 0, start) + 1, self.text.count("\n", 0, end) + 1))
        self._module = MetadataWrapper(cst.parse_module(self.text), unsafe_skip_copy=True).visit(finder)
        self.found = finder.found

    def mutant(self, number: int) -> Mutant:
        """Return one of `len(self.found)` mutants."""
        text = self._module.deep_replace(*self.found[number]).code
        diff = list(difflib.unified_diff(self.text.splitlines(), text.splitlines(), n=0, lineterm=""))
        line = int(diff[2].split()[1].lstrip("-").split(",")[0])
        before, after = ("\n".join(d[1:].strip() for d in diff[3:] if d[0] == sign) for sign in "-+")
        function = function_at(self.text, line)
        return Mutant(self.file, line, function, before, after, Change(self.file, text, self.tests))


def sample(only: str, seed: int, count: int) -> list[Mutant]:
    """Choose `count` mutants of the places whose name contains `only`, in order."""
    sources = [Source(place, tests) for place, tests in TESTS.items() if only in place]
    every = [(source, i) for source in sources for i in range(len(source.found))]
    chosen = sorted(random.Random(seed).sample(range(len(every)), min(count, len(every))))
    return [source.mutant(i) for source, i in (every[number] for number in chosen)]


def load_equivalent() -> dict[tuple[str, str, str], str]:
    """Return the mutants that change nothing, and why."""
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["equivalent"]
    return {(entry["in"], entry["before"], entry["after"]): entry["why"] for entry in entries}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="which mutants are chosen (default 0)")
    parser.add_argument("--count", type=int, default=400, help="how many (default 400)")
    parser.add_argument("--only", default="", help="of files whose name contains this word")
    parser.add_argument("--jobs", type=int, default=2, help="test runs at the same time (default 2)")
    parser.add_argument("--at-least", type=float, default=85, help="per cent that must be caught (default 85)")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    options = parser.parse_args()
    mutants = sample(options.only, options.seed, options.count)
    if options.list:
        print(*mutants, sep="\n")
        return 0
    equivalent = load_equivalent()
    real = [mutant for mutant in mutants if mutant.key not in equivalent]
    caught = 0
    results = outcomes([mutant.change for mutant in real], options.jobs, SECONDS)
    for number, (mutant, outcome) in enumerate(zip(real, results, strict=True), 1):
        caught += outcome != "passed"
        told = f"survived: {mutant}" if outcome == "passed" else f"caught ({outcome}): {mutant.file}:{mutant.line}"
        print(f"{number}/{len(real)} {told}", flush=True)
    share = 100 * caught / max(1, len(real))
    print(f"{caught} of {len(real)} caught ({share:.1f} %), {len(mutants) - len(real)} equivalent")
    return int(share < options.at_least)


if __name__ == "__main__":
    sys.exit(main())
