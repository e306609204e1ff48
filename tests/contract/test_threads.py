"""One engine called from several threads, from its own callbacks, and in a forked child."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from contract.engines import GREEDY, PROMPTS, ids


def test_threads_and_callbacks_that_share_an_engine_get_their_own_answers_or_a_reason(llm, expected: list) -> None:
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda i: ids(llm.generate([PROMPTS[i % 5]], GREEDY, False))[0], range(8)))
    assert together == [expected[i % 5] for i in range(8)]
    inner: list[object] = []

    def call_again(*_: object) -> None:
        if not inner:
            inner.append(None)
            try:
                inner[0] = ids(llm.generate([PROMPTS[3]], GREEDY, False))
            except RuntimeError as error:
                inner[0] = str(error)

    assert ids(llm.generate([PROMPTS[1]], GREEDY, False, call_again)) == [expected[1]]
    assert inner[0] == [expected[3]] or "called from inside" in inner[0]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused(llm, expected: list) -> None:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate("abc", GREEDY, False)
        except RuntimeError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end) as said:
        assert f"belongs to process {os.getpid()}" in said.read()
    assert ids(llm.generate(PROMPTS[:1], GREEDY, False)) == expected[:1]
