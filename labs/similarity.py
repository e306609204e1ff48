"""Find answers that are more alike than chance and the reference explain: winnowed fingerprints, as in MOSS.

An answer becomes a sequence of tokens in which all names are equal, and all literals; every run of `LENGTH` tokens is
hashed, and the smallest hash of each `WINDOW` neighbours is kept (Schleimer, Wilkerson and Aiken, "Winnowing", SIGMOD
2003). Fingerprints that the reference has too are left out, because the right solution is not evidence. The report
shows where to look, and proves nothing.
"""

from __future__ import annotations

import io
import keyword
import re
import tokenize
import zlib
from itertools import combinations
from pathlib import Path

from labs import bodies
from labs.exercises import Exercise, Lab
from labs.submission import Unusable, read_answer

LENGTH, WINDOW = 8, 4
LEAST = 0.6  # of the fingerprints in common, to be reported
FEWEST = 6  # fingerprints of an answer that can be compared


def tokens_of(text: str, is_python: bool) -> list[str]:
    """Return the shape of a piece of code: keywords and operators, `n` for every name, `0` for every literal."""
    if not is_python:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
        found = re.findall(r'[A-Za-z_]\w*|\d[\w.]*|"[^"]*"|[^\s\w]', text)
        return ["0" if word[0].isdigit() or word[0] == '"' else "n" if word[0].isalpha() else word for word in found]
    kept = []
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            kept.append(token.string if keyword.iskeyword(token.string) else "n")
        elif token.type in (tokenize.NUMBER, tokenize.STRING):
            kept.append("0")
        elif token.type not in skipped:
            kept.append(token.string)
    return kept


def fingerprints(text: str, is_python: bool) -> set[int]:
    """Return the winnowed hashes of a piece of code."""
    words = tokens_of(text, is_python)
    hashes = [zlib.crc32(" ".join(words[i : i + LENGTH]).encode()) for i in range(len(words) - LENGTH + 1)]
    return {min(hashes[i : i + WINDOW]) for i in range(max(1, len(hashes) - WINDOW + 1))} if hashes else set()


def similar_pairs(lab: Lab, works: dict[str, Path]) -> list[tuple[str, str, str, float]]:
    """Return (exercise, student, other, share of common fingerprints), the most similar first."""
    pairs = []
    for exercise in lab.exercises:
        reference = exercise.reference.read_text(encoding="utf-8")
        usual = fingerprints(_body(reference, exercise), exercise.is_python)
        prints = {}
        for student, work in works.items():
            try:
                answer = read_answer(exercise, work)
            except Unusable:
                continue
            if answer is not None:
                prints[student] = fingerprints(_dedented(answer.body), exercise.is_python) - usual
        for one, other in combinations(prints, 2):
            common, fewest = prints[one] & prints[other], min(len(prints[one]), len(prints[other]))
            if fewest >= FEWEST and len(common) / fewest >= LEAST:
                pairs.append((exercise.id, one, other, round(len(common) / fewest, 2)))
    return sorted(pairs, key=lambda pair: -pair[3])


def _body(text: str, exercise: Exercise) -> str:
    span = bodies.find(text, exercise.name, exercise.path)
    return _dedented(text[span.body_start : span.body_end])


def _dedented(body: str) -> str:
    return "if x:\n" + body if body[:1] in (" ", "\t") else body
