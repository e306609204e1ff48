"""One engine called from several threads, from its own callbacks, after it was closed, and in a forked child."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from interrupts import interrupt_after

from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams
from stage_b_decode_step import LLM as DecodeStepLLM
from stage_d_paged import LLM as PagedLLM
from stage_e_batching import LLM as BatchingLLM
from stage_f_graph_tp import LLM as GraphLLM

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MODEL = "random:qwen2-tiny"
TIGHT_POOL = {"num_kvcache_blocks": 8, "kvcache_block_size": 4}  # one request of GREEDY at a time

ONE_CALL_AT_A_TIME = [
    pytest.param(NaiveLLM, {}, id="a"),
    pytest.param(DecodeStepLLM, {}, id="b"),
    pytest.param(PagedLLM, TIGHT_POOL, id="d"),
]
EVERY_STAGE = [
    *ONE_CALL_AT_A_TIME,
    pytest.param(BatchingLLM, TIGHT_POOL, id="e"),
    pytest.param(GraphLLM, TIGHT_POOL, id="f"),
]


@pytest.mark.parametrize(("llm_class", "options"), ONE_CALL_AT_A_TIME)
def test_threads_that_share_an_engine_get_the_answers_that_they_get_alone(llm_class: type, options: dict) -> None:
    llm = llm_class(MODEL, device="cpu", **options)
    prompts = [f"question {i}" for i in range(6)]
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0]["token_ids"] for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(lambda p: llm.generate(p, GREEDY, use_tqdm=False)[0]["token_ids"], prompts))
    assert together == alone


@pytest.mark.parametrize("inside", ["callback", "sampler"])
@pytest.mark.parametrize(("llm_class", "options"), ONE_CALL_AT_A_TIME)
def test_a_call_from_inside_a_call_is_refused_and_changes_no_answer(
    llm_class: type, options: dict, inside: str
) -> None:
    llm = llm_class(MODEL, device="cpu", **options)
    alone = llm.generate("outer", GREEDY, use_tqdm=False)
    refused: list[str] = []

    def call_again(*_: object) -> None:
        with pytest.raises(RuntimeError, match="from inside a callback or sampler of the same engine") as caught:
            llm.generate("inner", GREEDY, use_tqdm=False)
        refused.append(str(caught.value))

    def sampler(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        call_again()
        return logits.argmax(-1)

    if inside == "sampler":
        llm.sampling_fn = sampler
    [output] = llm.generate("outer", GREEDY, use_tqdm=False, on_text=call_again if inside == "callback" else None)
    assert refused and not any("\n" in message for message in refused)
    assert output["token_ids"] == alone[0]["token_ids"] and output["text"] == alone[0]["text"]
    llm.sampling_fn = None
    assert llm.generate("outer", GREEDY, use_tqdm=False)[0]["token_ids"] == alone[0]["token_ids"]


def test_an_error_or_an_interrupt_lets_the_next_thread_in() -> None:
    llm = NaiveLLM(MODEL, device="cpu")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", GREEDY, use_tqdm=False, on_text=stop)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(llm.generate, "abc", GREEDY, use_tqdm=False).result(timeout=60)


@pytest.mark.parametrize(("llm_class", "options"), [(NaiveLLM, {}), (DecodeStepLLM, {"sync_every": 3})], ids="ab")
def test_an_interrupt_at_any_line_costs_the_next_call_nothing(llm_class: type, options: dict) -> None:
    llm = llm_class(MODEL, device="cpu", **options)
    params = [
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True, stop="zzz"),
    ]

    def answers(lines: int = 0) -> tuple[list, int]:
        with interrupt_after(lines) as countdown:
            outputs = llm.generate([[5, 6, 7, 8], [9, 10, 11]], params, use_tqdm=False)
        return [(o["token_ids"], o["text"], o.get("logprobs")) for o in outputs], countdown.seen

    answers()  # the warm-up
    expected, num_lines = answers()
    for lines in range(1, num_lines, num_lines // 40):
        with pytest.raises(KeyboardInterrupt):
            answers(lines)
        assert answers()[0] == expected
        assert torch.is_grad_enabled() and torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("llm_class", "options"), EVERY_STAGE)
def test_a_closed_engine_refuses_calls_in_the_same_words_and_closes_twice(llm_class: type, options: dict) -> None:
    llm = llm_class(MODEL, device="cpu", **options)
    llm.close()
    llm.close()
    for call in (llm.generate, getattr(llm, "stream", llm.generate), lambda text: llm.chat([{"content": text}])):
        with pytest.raises(RuntimeError, match="^this engine is closed; make a new LLM$"):
            call("abc")


def test_a_call_that_waited_for_its_turn_while_the_engine_was_closed_is_refused() -> None:
    llm = NaiveLLM(MODEL, device="cpu")
    running, waiting = threading.Event(), threading.Event()

    class ToldLock(nullcontext):
        """The engine's lock, which tells when a second call comes for it."""

        def __enter__(self) -> None:
            if running.is_set():
                waiting.set()
            self.enter_result.acquire()

        def __exit__(self, *_: object) -> None:
            self.enter_result.release()

    def wait(*_: object) -> None:
        running.set()
        assert waiting.wait(60)
        llm.close()

    llm._lock = ToldLock(llm._lock)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(llm.generate, "abc", GREEDY, use_tqdm=False, on_text=wait)
        assert running.wait(60)
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate("abc", GREEDY, use_tqdm=False)
        assert len(first.result(60)[0]["token_ids"]) == 12


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(("llm_class", "options"), EVERY_STAGE)
def test_a_forked_child_is_refused_the_engine_even_while_a_call_runs(llm_class: type, options: dict) -> None:
    llm = llm_class(MODEL, device="cpu", **options)
    alone = llm.generate("abc", GREEDY, use_tqdm=False)[0]["token_ids"]
    read_end, write_end = os.pipe()
    children: list[int] = []

    def fork(*_: object) -> None:
        if children:
            return
        children.append(os.fork())
        if children[0] == 0:
            try:
                llm.chat([{"role": "user", "content": "abc"}])
            except RuntimeError as error:
                os.write(write_end, str(error).encode())
            finally:
                os._exit(0)

    output = llm.generate("abc", GREEDY, use_tqdm=False, on_text=fork)[0]
    os.waitpid(children[0], 0)
    os.close(write_end)
    with os.fdopen(read_end) as said:
        assert f"belongs to process {os.getpid()}" in said.read()
    assert output["token_ids"] == alone
