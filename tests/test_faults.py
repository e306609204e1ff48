"""Each fault of the list can be applied. `python tests/faults/run.py` runs the tests on them: half an hour."""

from __future__ import annotations

from collections import Counter

import pytest
from faults.run import ROOT, load_faults

FAULTS = load_faults()


def test_there_are_many_faults_of_every_stage_and_few_of_them_are_equivalent():
    real = [fault for fault in FAULTS if not fault.equivalent]
    stages = Counter(fault.file.split("_")[1] for fault in real if fault.file.startswith("stage_"))
    assert len(real) >= 60
    assert all(stages[stage] >= 5 for stage in "bcdef")
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_to_change_is_there_exactly_once(fault):
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.old != fault.new
    assert fault.tests and all((ROOT / test.split("::")[0]).is_file() for test in fault.tests)
