"""Compare the values that a driver found on an answer with the reference's, and name the first difference.

Everything that comes from an answer's process is data here: lines of JSON, which may be missing, wrong or forged. Only
correct values earn points.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

ATOL, RTOL = 1e-6, 1e-5  # tolerance of numbers without another one
SHOWN = 160  # characters of a value in a reason
LIMIT = 300  # of a reason
NO_DRIVER = "not allowed: it wrote what no driver writes"


@dataclass
class Test:
    """What one test of a driver sent.

    Attributes:
        items: label, value, and how it is compared.
        error: why it stopped; `frames` are the files and lines of the error's traceback.
        skip: why it cannot run on this machine.
    """

    name: str
    items: list[tuple[str, object, dict[str, float]]] = field(default_factory=list)
    error: str = ""
    frames: list[list] = field(default_factory=list)
    skip: str = ""
    seconds: float = 0.0
    ended: bool = False


def read(lines: Iterable[str]) -> list[Test]:
    """Read the tests that a process sent. The first line that no driver writes ends them with an error."""
    found: list[Test] = []
    for text in lines:
        try:
            line = json.loads(text)
            if "test" in line:
                found.append(Test(str(line["test"])))
            elif "label" in line:
                found[-1].items.append((str(line["label"]), line["value"], dict(line["how"])))
            elif "error" in line:
                found[-1].frames = [[str(file), int(at)] for file, at in line["frames"]]
                found[-1].error = str(line["error"]) or "an error without a message"
            elif "skip" in line:
                found[-1].skip = str(line["skip"])
            else:
                found[-1].seconds, found[-1].ended = float(line["seconds"]), True
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return [*found, Test("", error=NO_DRIVER)]
    return found


def failure(expected: Test, got: Test) -> str:
    """Return why a test fails, "" if it has passed."""
    for number, (label, value, how) in enumerate(expected.items):
        if number >= len(got.items) or got.items[number][0] != label:
            return got.error or f"{label}: expected {words(value, how)}, got nothing"
        try:
            said = difference(value, got.items[number][1], how)
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError):
            said = f"expected {words(value, how)}, got what cannot be read"
        if said:
            return f"{label}: {said}"
    if got.error or len(got.items) > len(expected.items) or not got.ended:
        return got.error or "it sent more than the driver asks for"
    return ""


def difference(expected: object, got: object, how: dict[str, float]) -> str:
    """Return what differs, "" if nothing does."""
    if "least" in how or "most" in how:
        least, most = how.get("least", -math.inf), how.get("most", math.inf)
        is_number = isinstance(got, int | float) and not isinstance(got, bool)
        return "" if is_number and least <= got <= most else f"expected {words(expected, how)}, got {words(got)}"
    if is_tensor(expected):
        return _of_tensors(expected, got, how)
    if same(expected, got, how):
        return ""
    if "unsaid" in how:
        return f"not what is counted in the slow copy, got {words(got)}"
    if isinstance(expected, list) and isinstance(got, list) and len(repr(expected)) > SHOWN:
        pairs = enumerate(zip(expected, got, strict=False))
        at = next((i for i, (e, g) in pairs if not same(e, g, how)), min(len(expected), len(got)))
        here = [part[at : at + 6] for part in (expected, got)]
        return f"from place {at} on expected {words(here[0])}, got {words(here[1])}"
    return f"expected {words(expected)}, got {words(got)}"


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor as drivers send it."""
    return isinstance(value, dict) and {"dtype", "shape", "values"} == set(value)


def same(expected: object, got: object, how: dict[str, float]) -> bool:
    """Return whether two values are equal, numbers up to the tolerance; an int may equal a float."""
    if is_tensor(expected) or is_tensor(got):
        return is_tensor(expected) and is_tensor(got) and not _of_tensors(expected, got, how)
    if isinstance(expected, list) and isinstance(got, list):
        return len(expected) == len(got) and all(same(e, g, how) for e, g in zip(expected, got, strict=True))
    if isinstance(expected, bool) or isinstance(got, bool) or not isinstance(expected, int | float):
        return type(expected) is type(got) and expected == got
    if not isinstance(got, int | float):
        return False
    if isinstance(expected, int) and isinstance(got, int) and "atol" not in how:
        return expected == got
    if math.isnan(expected) or math.isinf(expected):
        return expected == got or (math.isnan(expected) and math.isnan(got))
    return abs(expected - got) <= how.get("atol", ATOL) + how.get("rtol", RTOL) * abs(expected)


def _of_tensors(expected: dict, got: object, how: dict[str, float]) -> str:
    if not is_tensor(got):
        return f"expected a tensor {expected['shape']}, got {words(got)}"
    for what in ("shape", "dtype"):
        if expected[what] != got[what]:
            return f"expected the {what} {expected[what]}, got {words(got[what])}"
    if len(expected["values"]) != len(got["values"]):
        return f"expected {len(expected['values'])} numbers, got {len(got['values'])}"
    if "error" in how:
        return _relative_error(expected["values"], got["values"], how["error"])
    pairs = list(zip(expected["values"], got["values"], strict=True))
    at = next((i for i, (e, g) in enumerate(pairs) if not same(e, g, how)), None)
    if at is None:
        return ""
    if len(pairs) <= 8:
        return f"expected {words(expected['values'])}, got {words(got['values'])}"
    wrong = sum(not same(e, g, how) for e, g in pairs)
    place, left = [], at
    for size in expected["shape"][::-1]:
        place.insert(0, left % size)
        left //= size
    return (
        f"at {place} expected {words(pairs[at][0])}, got {words(pairs[at][1])}; {wrong} of {len(pairs)} numbers differ"
    )


def _relative_error(expected: list[float], got: list[float], most: float) -> str:
    difference = math.sqrt(sum((e - g) ** 2 for e, g in zip(expected, got, strict=True)))
    error = difference / (math.sqrt(sum(e * e for e in expected)) or 1.0)
    return "" if error <= most else f"expected a relative error of at most {most:g}, got {error:.3g}"


def words(value: object, how: dict[str, float] | None = None) -> str:
    """Return a value, or its limits, in words."""
    if how and ("least" in how or "most" in how):
        least, most = how.get("least"), how.get("most")
        if least is not None and most is not None:
            return f"{words(least)} to {words(most)}"
        return f"at least {words(least)}" if most is None else f"at most {words(most)}"
    if is_tensor(value):
        return words(value["values"])
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        parts = [words(item) for item in value[:SHOWN]]
        return shortened(f"[{', '.join(parts)}]")
    return shortened(repr(value))


def shortened(text: str, limit: int = SHOWN) -> str:
    """Return the first line of a text, cut to a length."""
    line = (text.strip().splitlines() or [""])[0].strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"
