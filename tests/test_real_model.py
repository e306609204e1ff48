"""Every engine computes with a pretrained model what transformers computes; where `make real-model` has built it.

The texts are the course's own lessons. Rounding decides between two tokens whose scores are almost equal: a first
difference counts where the two best logits are further apart than `CLOSE`, and all are printed (`pytest -s`). On two
CPU cores the file takes most of an hour.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from contract.engines import record
from fake_model import completion_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_d_paged import LLM as PagedLLM
from stage_d_paged.batch import Chunk, flat_batch
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.sequence import Sequence

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "build" / "models" / "gemma-3-270m"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not MODEL.is_dir(), reason=f"no {MODEL.relative_to(ROOT)}: `make real-model` builds it"),
]
WINDOW, CLOSE = 512, 1e-3
LENGTHS = [2 * WINDOW + 30, *range(8, 46, 2)]  # of 20 prompts; the first one is longer than two windows
ANSWER = 200  # tokens
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 1300, "kvcache_block_size": 16, "max_num_seqs": 24}
ENGINES = {
    "d": ("stage_d_paged", {}),
    "e, in pieces": ("stage_e_batching", {"max_num_batched_tokens": 200}),
    "e, preempted": ("stage_e_batching", {"num_kvcache_blocks": 90}),
    "f, recorded": ("stage_f_graph_tp", {"max_num_batched_tokens": 200}),
    "f, two ranks": ("stage_f_graph_tp", {"tensor_parallel_size": 2}),
}


@cache
def text() -> list[int]:
    lessons = [ROOT / name / "README.md" for name in ("stage_a_naive", "stage_d_paged")]
    tokenizer = load_tokenizer(resolve(MODEL))
    return tokenizer.encode("\n".join(lesson.read_text(encoding="utf-8") for lesson in lessons))


@cache
def prompts() -> list[list[int]]:
    """Pieces of the text, one behind another, each behind the token that begins a text."""
    starts = [50 + sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return [[text()[0], *text()[start : start + length]] for start, length in zip(starts, LENGTHS, strict=True)]


@cache
def transformers_model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()


@contextmanager
def engine(package: str, **options: object) -> Iterator[NaiveLLM]:
    llm = importlib.import_module(package).LLM(MODEL, **options)
    try:
        yield llm
    finally:
        llm.close()


def greedy(llm: NaiveLLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    return [output["token_ids"] for output in llm.generate(prompts(), params, False)]


@torch.inference_mode()
def logits_of(prompt: list[int], answer: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What transformers computes for the place of each token of an answer, `[tokens, vocabulary]`, in float32."""
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    return transformers_model(dtype)(ids, logits_to_keep=len(answer)).logits[0].float()


def check(answers: list[list[int]], dtype: torch.dtype = torch.float32) -> None:
    """Compare answers with transformers in float32, token by token up to the first difference of each.

    In bfloat16 a difference counts where the token's logit is further below the best than transformers' own bfloat16
    moves the difference of two logits anywhere in that answer.
    """
    equal, close, smallest, compared = 0, [], float("inf"), 0
    for index, (prompt, answer) in enumerate(zip(prompts(), answers, strict=True)):
        logits = logits_of(prompt, answer)
        best, second = logits.topk(2)[0].unbind(-1)
        differing = (logits.argmax(-1) != torch.tensor(answer)).nonzero().flatten().tolist()
        end = differing[0] if differing else len(answer)
        equal, compared, smallest = equal + end, compared + len(answer), min(smallest, (best - second).min().item())
        if differing:
            allowed = CLOSE if dtype == torch.float32 else 2 * (logits_of(prompt, answer, dtype) - logits).abs().max()
            below = (best[end] - logits[end, answer[end]]).item()
            assert below < allowed, f"prompt {index}, token {end}: {answer[end]} is {below:.4f} below the best"
            close.append((index, end, round(below, 4)))
    print(f"\n{equal} of {compared} tokens equal, smallest margin {smallest:.5f}; first differences: {close or 'none'}")


@torch.inference_mode()
def final_states(llm: PagedLLM, ids: list[int]) -> torch.Tensor:
    """Stage D's states of all positions, `[tokens, hidden]`, on a CPU."""
    runtime, sequence = llm.runtime, Sequence(completion_of(ids))
    manager = BlockManager(len(ids) // runtime.block_size + 1, runtime.block_size)
    assert manager.allocate(sequence, len(sequence))
    batch = flat_batch([Chunk(sequence, 0, len(ids))], runtime.block_size, llm.device)
    pool = runtime.make_pool(manager.num_blocks)
    return runtime.model(batch.input_ids, batch.positions, pool, batch.metadata).cpu()


@torch.inference_mode()
def test_logits_of_every_position_of_a_text_longer_than_two_windows_equal_transformers() -> None:
    ids = text()[: 2 * WINDOW + 76]
    with engine("stage_d_paged", **OPTIONS) as llm:
        ours, theirs = final_states(llm, ids), transformers_model().model(torch.tensor([ids])).last_hidden_state[0]
        off, equal, margin = 0.0, 0, float("inf")
        for own, right in zip(ours.split(100), theirs.split(100), strict=True):  # all at once would take gigabytes
            found, wanted = llm.runtime.model.compute_logits(own), transformers_model().lm_head(right)
            off = max(off, (found - wanted).abs().max().item())
            best, second = wanted.topk(2).values.unbind(-1)
            same = found.argmax(-1) == wanted.argmax(-1)
            assert (same | (best - second < CLOSE)).all()
            equal, margin = equal + int(same.sum()), min(margin, (best - second).min().item())
    print(f"\n{equal} of {len(ids)} next tokens equal, logits off by {off:.1e} at most, smallest margin {margin:.1e}")
    assert off < CLOSE


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    package, options = ENGINES[name]
    with engine(package, **OPTIONS | options) as llm:
        if name == "f, recorded":
            record(llm)
        answers = greedy(llm)
        check(answers)
        if name == "e, preempted":
            assert llm.calls.stats()["num_preemptions"] > 0
        if name == "e, in pieces":  # the long prompt's blocks are there
            outputs = llm.generate(prompts()[:1], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), False)
            assert outputs[0]["token_ids"] == answers[0][:8]
            assert outputs[0]["metrics"]["num_cached_tokens"] >= 2 * WINDOW


@pytest.mark.compiler
@pytest.mark.parametrize("package", ["stage_a_naive", "stage_b_decode_step", "stage_c_fused_mlp"])
def test_greedy_tokens_of_stages_with_one_request_at_a_time_are_too(package: str) -> None:
    with engine(package, device="cpu", dtype="float32") as llm:
        check(greedy(llm))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["d", "e, in pieces", "e, preempted", "f, recorded"])
def test_greedy_tokens_in_bfloat16_on_a_gpu_differ_where_rounding_decides(name: str) -> None:
    package, options = ENGINES[name]
    with engine(package, **OPTIONS | options | {"device": "cuda", "dtype": "bfloat16"}) as llm:
        check(greedy(llm), torch.bfloat16)


@torch.inference_mode()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16_is(device: str) -> None:
    ids = text()[: WINDOW + 88]
    right = transformers_model().model(torch.tensor([ids])).last_hidden_state[0]
    theirs = transformers_model(torch.bfloat16).model(torch.tensor([ids])).last_hidden_state[0].float()
    with engine("stage_d_paged", **OPTIONS | {"device": device, "dtype": "bfloat16"}) as llm:
        ours = final_states(llm, ids).float()
    distance = [((states - right).norm() / right.norm()).item() for states in (ours, theirs)]
    last = [transformers_model().lm_head(states[-200:]) for states in (right, ours, theirs)]
    best, second = last[0].topk(2).values.unbind(-1)
    equal = [int((logits.argmax(-1) == last[0].argmax(-1)).sum()) for logits in last[1:]]
    print(
        f"\nstates off by {distance[0]:.2%} (transformers: {distance[1]:.2%}); of 200 next tokens {equal[0]} are equal"
    )
    print(f"(transformers: {equal[1]}); of these, {int((best - second < 0.1).sum())} have margins under 0.1")
    assert distance[0] < 1.2 * distance[1]
