"""What `python -m tools.mutants` changes, and that its lists still match the code."""

from __future__ import annotations

import pytest

from tools.changed_tree import ROOT, spans_of
from tools.mutants import __main__ as run


@pytest.fixture
def changes(tmp_path):
    """All that a text becomes, line by line."""

    def of(text: str) -> set[tuple[str, str]]:
        file = tmp_path / "file.py"
        file.write_text(text)
        source = run.Source(str(file), ())
        return {(mutant.before, mutant.after) for mutant in map(source.mutant, range(len(source.found)))}

    return of


def test_an_operator_a_number_a_default_a_condition_and_a_statement_are_changed_one_at_a_time(changes):
    assert changes("def f(a, b):\n    while a < 3 and b:\n        g(a, key=b)\n") == {
        ("while a < 3 and b:", "while a <= 3 and b:"),
        ("while a < 3 and b:", "while a < 4 and b:"),
        ("while a < 3 and b:", "while a < 3 or b:"),
        ("while a < 3 and b:", "while not (a < 3 and b):"),
        ("g(a, key=b)", "g(a, )"),
        ("g(a, key=b)", "pass"),
    }


def test_texts_types_and_decorators_stay_as_they_are(changes):
    assert not changes('@cache(1)\ndef f(a: int | None) -> list[3]:\n    """A text."""\n    return f"{a + 1}" "text"\n')


def test_the_same_seed_chooses_the_same_mutants():
    chosen = [[mutant.key for mutant in run.sample("input_batch", seed, 8)] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) == 8


def test_a_mutant_is_in_the_function_that_is_named():
    place = "stage_f_graph_tp/ranks.py::StepCommand"
    source = run.Source(place, run.TESTS[place])
    functions = {source.mutant(number).function for number in range(len(source.found))}
    assert functions == {"StepCommand", "StepCommand.encode", "StepCommand.decode"}


def test_the_tests_that_should_notice_are_there():
    for place, tests in run.TESTS.items():
        file, _, function = place.partition("::")
        assert spans_of(file, (ROOT / file).read_text(encoding="utf-8"), function)
        assert all((ROOT / test).is_file() for test in tests if test.endswith(".py"))


@pytest.mark.parametrize(("place", "before", "after"), run.load_equivalent())
def test_what_is_called_equivalent_is_about_a_line_that_is_there(place, before, after):
    file, _, function = place.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = [line.strip() for start, end in spans_of(file, text, function) for line in text[start:end].splitlines()]
    assert set(before.splitlines()) <= set(lines)
    assert before != after
