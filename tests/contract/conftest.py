"""The fixtures of the contract's tests, and the choice of rows by what an engine can do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from contract.engines import ENGINES, FEATURES, MODEL, NOTHING, Engine, held, one_by_one, right_of
from stage_a_naive import LLM as NaiveLLM


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the rows that lack what a test needs."""
    kept, lacking = [], []
    for item in items:
        needed = {feature for mark in item.iter_markers("needs") for feature in mark.args}
        assert needed <= FEATURES, f"{item.nodeid}: there is no {needed - FEATURES}"
        able = not needed or needed <= item.callspec.params["engine"].has
        (kept if able else lacking).append(item)
    config.hook.pytest_deselected(items=lacking)
    items[:] = kept


@pytest.fixture(
    scope="session", params=[pytest.param(engine, id=engine.name, marks=engine.marks) for engine in ENGINES]
)
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param


@pytest.fixture(scope="session")
def llm(engine: Engine) -> Iterator[NaiveLLM]:
    with closing(engine.make()) as llm:  # its ranks are started as a program's are
        yield llm


@pytest.fixture(scope="session")
def tutor(engine: Engine) -> Iterator[NaiveLLM]:
    """The row's `LLM` of the embedded model, which answers in sentences."""
    with engine.made("tutor") as llm:
        yield llm


@pytest.fixture(scope="session")
def naive() -> NaiveLLM:
    return NaiveLLM(MODEL, device="cpu")


@pytest.fixture(scope="session")
def expected(engine: Engine, llm: NaiveLLM) -> list[list[int]]:
    """Stage A's greedy tokens for each of `PROMPTS`; an engine that rounds owes its own for each prompt alone."""
    return right_of(MODEL) if "exact" in engine.has else one_by_one(llm)


@pytest.fixture(autouse=True)
def nothing_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test the row's engines have no request left, and no block of their pools is held."""
    yield
    for name in {"llm", "tutor"}.intersection(request.fixturenames):
        if "pool" in request.getfixturevalue("engine").has:
            llm = request.getfixturevalue(name)
            assert llm.is_finished()
            assert held(llm) == NOTHING
