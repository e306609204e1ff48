"""The code that a README shows is the code that runs."""

from __future__ import annotations

import pytest

from benchmarks import excerpts
from benchmarks.report import readmes
from benchmarks.results import ROOT

pytestmark = pytest.mark.fast
SHOWING_CODE = [path for path in readmes(ROOT) if excerpts.EXCERPT.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", SHOWING_CODE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_code_in_a_readme_is_that_of_the_file(path):
    text = path.read_text(encoding="utf-8")
    assert excerpts.fill(text) == text, "`python -m benchmarks.report` writes it"


def test_a_function_is_copied_with_its_decorator_and_a_method_without_its_indentation(tmp_path):
    (tmp_path / "a.py").write_text("class A:\n    @twice\n    def f(self):\n        return 1\n\n\ndef g():\n    pass\n")
    text = "x\n<!-- code: a.py::A.f -->\nold\n<!-- end of code -->\ny\n<!-- code: a.py::g -->\n<!-- end of code -->\n"
    filled = excerpts.fill(text, tmp_path)
    assert "```python\n@twice\ndef f(self):\n    return 1\n```" in filled
    assert "```python\ndef g():\n    pass\n```" in filled
    assert "old" not in filled and filled.startswith("x\n") and excerpts.fill(filled, tmp_path) == filled
    with pytest.raises(LookupError, match=r"a\.py has no A\.h"):
        excerpts.excerpt("a.py::A.h", tmp_path)


def test_lines_are_cut_out_of_a_function_and_lines_that_are_gone_are_an_error(tmp_path):
    (tmp_path / "a.py").write_text("def f():\n    a = 1\n    for b in c:\n        d(b)\n    return a\n")
    text = "<!-- code: a.py::f from `for b` to `d(b)` -->\n<!-- end of code -->\n"
    assert "```python\nfor b in c:\n    d(b)\n```" in excerpts.fill(text, tmp_path)
    with pytest.raises(LookupError, match=r"no lines from 'for b' to 'a = 1' in: def f\(\):"):
        excerpts.fill(text.replace("d(b)", "a = 1"), tmp_path)


def test_an_excerpt_of_a_kernel_leaves_pragmas_out():
    source = "  for (;;) {\n#pragma unroll\n    f();\n  }"
    assert excerpts.cut(source, "for", "f()") == "for (;;) {\n  f();"
