"""One word for one thing: lessons, docstrings and messages use the field's words, and the glossary explains them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAGES = sorted(path for path in ROOT.glob("stage_*") if path.is_dir())
LESSONS = [
    ROOT / "README.md",
    *(path for stage in STAGES for path in sorted(stage.rglob("*.md"))),
    *sorted((ROOT / "beyond" / "quantization").glob("*.md")),
    *sorted((ROOT / "beyond" / "scale_out").glob("*.md")),
    *sorted((ROOT / "beyond" / "serving").glob("*.md")),
    *sorted((ROOT / "beyond" / "speculation").glob("*.md")),
    *sorted((ROOT / "labs").glob("lab_?.md")),
]
GLOSSARY = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8")

# What not to write: the pattern, and what to write instead.
WORDS = {
    r"\border(s|ed|ing)? (\w+ )?(kernels?|launches)\b": "launch",
    r"\b(ms|µs|bytes|[KMG]B|seconds|times|\d+ launches|kernels) an? (token|step|request|layer|row)\b": "per",
    r"\bso many\b": "this many, or up to N",
    r"\bdr(aw|awn|aws|awing|ew) ((a|the|its|next) )*(tokens?|ids?|samples?)\b|\bdrawn (ids?|tokens?)\b": "sample",
    r"\bseats?\b": "batch slot",
    r"\bpages?\b": "block",
    r"\b(stands? (at|on|next)|(lies?|lay) (in|at|on|next|side by side))\b": "is stored at, position, offset",
    r"\bfew-rows?\b": "skinny GEMM",
    r"\bone-launch|\bfused decode\b": "persistent megakernel",
    r"\bexchanges?\b": "one-shot all-reduce, or hand-off",
    r"\btagged words?\b": "flag-in-data words",
    r"\bearly start\b": "programmatic dependent launch",
    r"\bsplits and arrivals\b": "split-K, arrival counter",
    r"\bladders?\b": "capture sizes",
    r"\bgenerations? of (a |the )?kernels?\b|\bkernel generations?\b": "kernel variant",
    r"\bobeys?\b|\bmeetings?\b": "execute, rendezvous",
    r"\blets? go of\b|\bvoid\b": "release, invalid",
    r"\b(reads|tells) right\b": "is correct",
    r"\bthe quickest\b": "the fastest",
    r"% of (the |its )?floor\b": "x the floor",
    r"\ball red\b": "every exercise fails at first",
}
# Where such a word means something else.
ALLOWED = {
    "operating system's page table": "the analogy again",
    "pages of virtual memory": "the analogy that paged attention has its name from",
    "front page": "of this repository",
    "pages after a fork": "an operating system's, where copy on write comes from",
    "licence on its page": "on the hub",
    "divides shared memory into pages": "another project's word",
}

# Terms of the field, and their entries in the glossary.
TERMS = {
    r"\blaunch(es|ed|ing)?\b": "launch",
    r"\bsampl(e|es|ed|ing)\b": "sample",
    r"\bbatch slots?\b": "batch slot",
    r"\bblock tables?\b": "block table",
    r"\bblock manager\b": "block manager",
    r"\bslot mapping\b": "slot mapping",
    r"\bskinny\b": "skinny GEMM",
    r"\bmegakernels?\b": "persistent megakernel",
    r"\bone-shot\b": "one-shot all-reduce",
    r"\ball-reduces?\b": "all-reduce",
    r"\bhand-offs?\b": "hand-off through L2",
    r"\bflag-in-data\b": "flag-in-data words",
    r"\bprogrammatic dependent launch(es)?\b|\bPDL\b": "programmatic dependent launch",
    r"\bsplit-K\b": "split-K",
    r"\barrival counters?\b": "arrival counter",
    r"\bcapture sizes?\b": "capture sizes",
    r"\bkernel variants?\b": "kernel variant",
    r"\bthe floor\b": "floor",
    r"\bprefill\b": "prefill",
    r"\bdecode steps?\b": "decode step",
    r"\bKV cache\b": "KV cache",
    r"\bTTFT\b": "TTFT",
    r"\bTPOT\b": "TPOT",
    r"\bcontinuous batching\b": "continuous batching",
    r"\bpreempt(ion|s|ed)?\b": "preemption",
    r"\bprefix cache\b": "prefix cache",
    r"\bCUDA graphs?\b": "CUDA graph",
    r"\btensor parallel(ism)?\b": "tensor parallelism",
    r"\bwatermark\b": "watermark",
    r"\bonline softmax\b": "online softmax",
    r"\bGQA\b": "GQA",
    r"\bRoPE\b": "RoPE",
}


def prose(text: str) -> str:
    """Markdown without code, addresses and what comments hide."""
    text = re.sub(r"^```.*?^```|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\s+", " ", text)


def strings(source: str) -> str:
    """Every docstring and every other string of a Python file that has a space in it, as messages have."""
    found = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    texts = (text for text in found if isinstance(text, str) and " " in text)
    return re.sub(r"\s+", " ", " ¶ ".join(re.sub(r"`[^`]*`", " ", text) for text in texts))


def read(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return strings(text) if path.suffix == ".py" else prose(text)


def about_the_web(path: Path) -> bool:
    """Whether a page is a web page there."""
    return path.parent == ROOT / "beyond" / "serving" or path.name == "served.py"


def avoided_words(text: str) -> list[str]:
    """The words of the list in a text, each with what to write and what is around it."""
    for phrase in ALLOWED:
        text = text.replace(phrase, "")
    return [
        f"{match[0]!r} (write: {instead}) in: {text[max(0, match.start() - 40) : match.end() + 40]}"
        for pattern, instead in WORDS.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def entries() -> dict[str, str]:
    """Each entry of the glossary and its text."""
    parts = re.split(r"^### (.+)\n", GLOSSARY, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def is_written_here(path: Path) -> bool:
    """Whether a file has words of the project: a learner's copies in labs/work are the learner's."""
    return path.suffix in {".md", ".py"} and ROOT / "labs" / "work" not in path.parents


ROOMS = [*STAGES, *(ROOT / name for name in ("benchmarks", "beyond", "labs"))]
CHECKED = [
    ROOT / "README.md",
    ROOT / "GLOSSARY.md",
    *(path for room in ROOMS for path in sorted(room.rglob("*")) if is_written_here(path)),
]


@pytest.mark.parametrize("path", CHECKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_words_of_the_field_are_used(path: Path) -> None:
    text = read(path)
    assert not avoided_words(re.sub(r"\bpages?\b", "", text) if about_the_web(path) else text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("It orders every kernel.", "orders every kernel"),
        ("11 kernels a layer", "kernels a layer"),
        ("the drawn ids", "drawn ids"),
        ("a free seat", "seat"),
        ("a free\npage", "page"),
    ],
)
def test_a_word_to_avoid_is_found(text: str, word: str) -> None:
    [found] = avoided_words(prose(text))
    assert found.startswith(repr(word))


def test_code_addresses_and_comments_are_not_prose() -> None:
    assert not avoided_words(prose("`page` [x](page.md) <!-- page -->\n```\npage\n```\n"))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: str(path.relative_to(ROOT)))
def test_terms_of_a_lesson_are_in_the_glossary(path: Path) -> None:
    text = read(path)
    used = {entry for pattern, entry in TERMS.items() if re.search(pattern, text, re.IGNORECASE)}
    assert used <= entries().keys()


def test_the_glossary_is_alphabetical_and_every_entry_is_short_and_names_its_stage() -> None:
    names = list(entries())
    assert names == sorted(names, key=str.casefold)
    for name, text in entries().items():
        lines = text.strip().splitlines()
        assert len(lines) <= 3 and all(len(line) <= 130 for line in lines), name
        [target] = re.findall(r"\]\(([^)]+)\)", text)
        assert (ROOT / target).is_file(), name


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_lesson_links_to_the_glossary(path: Path) -> None:
    assert "GLOSSARY.md" in path.read_text(encoding="utf-8")
