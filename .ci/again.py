"""Tell a red tree from a flaky test: run the failed tests of the last run of pytest again, alone, in one process.

    python .ci/again.py      after a run that failed, in the folder where it ran

Exits 0 if all of at most five failed tests pass now, and prints a line "flaky: TEST" for each that does. Exits 1 if
one fails again, if there are more than five, or if there are none on record (pytest itself failed).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 5
RECORD = Path(".pytest_cache/v/cache/lastfailed")  # pytest writes it at the end of a run, and takes out what passes


def failed_tests() -> set[str]:
    """Read the ids of the tests that failed when they last ran."""
    return set(json.loads(RECORD.read_text(encoding="utf-8"))) if RECORD.is_file() else set()


def main() -> int:
    """Run the failed tests again and return the exit status."""
    failed = failed_tests()
    if not 1 <= len(failed) <= MOST:
        print(f"{len(failed)} failed tests on record; 1 to {MOST} would be run again", file=sys.stderr)
        return 1
    print(f"again, alone: {len(failed)} failed", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", "-q", *sorted(failed)], check=False)
    for test in sorted(failed - failed_tests()):
        print("flaky:", test)
    return 1 if again.returncode or failed_tests() else 0


if __name__ == "__main__":
    sys.exit(main())
