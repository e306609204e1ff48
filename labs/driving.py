"""Run the drivers of a lab, `labs/tests/test_lab_x.py`, on an answer, and send the values that they yield.

A driver makes inputs, calls an exercise and yields labelled values. It knows no expected value: the judge runs the same
driver on the reference elsewhere and compares (`values.py`). So no decision is made here.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

Send = Callable[[dict[str, object]], object]
numbers = random.Random(0)  # random numbers of the running driver: the same for the same seed and test
MOST_FRAMES = 30


class Skip(Exception):
    """This machine cannot run the driver, such as one without a compiler."""


class Compared:
    """A value with the way in which it is compared.

    Args:
        value: the value. how: `atol` and `rtol` of its numbers; or `error`, the relative error of a whole tensor; or
        `least` and `most`, its limits; or `unsaid`, if no reason may contain it.
    """

    def __init__(self, value: object, **how: float) -> None:
        self.value, self.how = value, how


def close(value: object, atol: float = 1e-4, rtol: float = 1e-4) -> Compared:
    """A value of which every number may differ by `atol + rtol * |expected|`."""
    return Compared(value, atol=atol, rtol=rtol)


def unsaid(value: object) -> Compared:
    """A value that no reason may contain."""
    return Compared(value, unsaid=1)


def near(value: torch.Tensor, error: float) -> Compared:
    """A tensor whose total relative error is at most `error`."""
    return Compared(value, error=error)


def error_of(call: Callable[[], object], *expected: type[BaseException]) -> str:
    """Return the name of the expected error that a call raises, "" if it raises none. Other errors propagate."""
    try:
        call()
    except expected as error:
        return next(kind.__name__ for kind in expected if isinstance(error, kind))
    return ""


def plain(value: object) -> object:
    """Convert a value to JSON: numbers, texts, lists, and tensors as dtype, shape and numbers."""
    if isinstance(value, torch.Tensor):
        kept = value.detach().cpu()
        listed = (kept.float() if kept.element_size() < 2 and kept.is_floating_point() else kept).flatten().tolist()
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(kept.shape), "values": listed}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": value.ravel().tolist()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    if isinstance(value, dict):
        return [[plain(key), plain(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple, range)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def tests_of(module: ModuleType, classes: tuple[str, ...]) -> Iterator[tuple[str, Callable[[], Iterator]]]:
    """Return the tests of some classes with their names, in the order in which they are written."""
    for name in classes:
        cls = getattr(module, name)
        for test in [name for name in vars(cls) if name.startswith("test_")]:
            yield test, lambda cls=cls, test=test: getattr(cls(), test)()


def run(module: ModuleType, classes: tuple[str, ...], seed: int, send: Send) -> None:
    """Run tests; the others run even if one fails."""
    for name, test in tests_of(module, classes):
        send({"test": name})
        numbers.seed(f"{seed} {name}")
        torch.manual_seed(numbers.randrange(2**31))
        begin = time.perf_counter()
        try:
            found = test()
            for label, value in found if inspect.isgenerator(found) else ():
                how = value.how if isinstance(value, Compared) else {}
                send({"label": label, "value": plain(value.value if how else value), "how": how})
        except Skip as reason:
            send({"skip": str(reason)})
        except BaseException as error:
            with contextlib.suppress(OSError):  # it has printed more than it may
                traceback.print_exc()
            send({"error": text_of(error), "frames": frames_of(error)})
        send({"seconds": time.perf_counter() - begin})


def text_of(error: BaseException) -> str:
    """Describe an error in one line; a driver's assertion is shown as it is."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, AssertionError) and lines[0] else f"{type(error).__name__}: {lines[0]}"


def frames_of(error: BaseException) -> list[list[object]]:
    """Return the files and lines of this tree in an error's traceback, the innermost first."""
    root = Path(__file__).resolve().parent.parent
    found = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(root):
            found.append([str(file.relative_to(root)), line])
    return found[::-1][:MOST_FRAMES]


def run_pytest(file: Path, send: Send) -> None:
    """Run a learner's test file; send whether it passed, and the first error."""
    import pytest

    class First:
        """Keeps the first error."""

        said = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.said:
                lines = str(report.longrepr).splitlines()
                self.said = next((line[2:].strip() for line in lines if line.startswith("E ")), lines[-1])

    first = First()
    options = ["-q", "-x", "-p", "no:cacheprovider", "-c", "/dev/null", "--tb=short", "--import-mode=importlib"]
    code = int(pytest.main([*options, f"--rootdir={file.parent}", str(file)], plugins=[first]))
    sys.stdout.flush()
    send({"passed": code == 0, "error": first.said or f"no test ran (pytest's status is {code})" * bool(code)})
