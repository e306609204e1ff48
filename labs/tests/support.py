"""What the lab tests share: requests without a tokenizer, a model that counts, tokens that are pieces of text."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.noise import gumbel_noise
from stage_a_naive.contract.outputs import Completion, Request
from stage_a_naive.sampling import SamplingParams

SEED_VARIABLE = "SIX_ENGINES_LAB_SEED"  # the environment variable with a student's seed for hidden tests


def student_random() -> random.Random:
    """Random numbers of the student who is graded; without a seed those of seed 0."""
    return random.Random(int(os.environ.get(SEED_VARIABLE, "0")))


class DigitTokenizer:
    """A tokenizer with one digit per token, for completions that make their text at the end."""

    backend_tokenizer = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: "".join(str(i % 10) for i in ids), id_to_token=lambda i: str(i % 10)
    )


def request_of(prompt: list[int], max_tokens: int = 8, **params: object) -> Request:
    return Request(0, list(prompt), SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens} | params), seed=0)


def completion_of(prompt: list[int], max_tokens: int = 8, eos: int = -1, **params: object) -> Completion:
    """A completion that makes its text at the end."""
    request = request_of(prompt, max_tokens, **params)
    return Completion(request, DigitTokenizer(), frozenset({eos}), max_total_len=1000, text_at_end=True)


def one_hot(ids: Tensor, vocab: int) -> Tensor:
    """Scores that are 1 for these ids and 0 for all others: `[…]` -> `[…, vocab]`."""
    return torch.nn.functional.one_hot(ids, vocab).float()


def noisy_argmax(logits: Tensor, params: SamplingParams, seed: int, step: int) -> int:
    """The token of one row `[vocab]` by the course's definition: argmax of the logits, or of those plus noise."""
    if params.temperature == 0:
        return int(logits.argmax())
    scores = (logits - logits.max()) / params.temperature
    if params.top_k:
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[-1], -torch.inf)
    return int((scores + gumbel_noise(seed, step, len(logits), logits.device)).argmax())


GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
RANDOM = SamplingParams(temperature=1.5, top_k=30, seed=11, max_tokens=20)
QUESTIONS = ("What is a KV cache?", "What is a KV cache?", "Why does paging help?")


@cache
def answers_of_transformers() -> list[tuple[list[int], SamplingParams, list[int]]]:
    """Prompts, sampling parameters and the tutor's answers: transformers' model, in a loop of its own."""
    source = resolve("tutor")
    tokenizer = load_tokenizer(source)
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval()
    found = []
    for question, params in zip(QUESTIONS, (GREEDY, RANDOM, GREEDY), strict=True):
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompt, answer, cache = tokenizer.encode(text, add_special_tokens=False), [], None
        with torch.inference_mode():
            while len(answer) < params.max_tokens and tokenizer.eos_token_id not in answer:
                out = model(torch.tensor([answer[-1:] or prompt]), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                answer.append(noisy_argmax(out.logits[0, -1].float(), params, params.seed or 0, len(answer)))
        found.append((prompt, params, answer))
    return found


def check_whole_stage(make_llm: Callable[..., object], *variants: dict[str, object], **options: object) -> None:
    """The learner's engine, all of it the learner's, keeps the contract: tokens, text, stop strings, times.

    Args:
        make_llm: the stage's `LLM`.
        variants: options of the stage under which it must give the same tokens; the first is used for the rest.
        options: for all of them.
    """
    prompts, params, expected = zip(*answers_of_transformers(), strict=True)
    for variant in variants or ({},):
        llm = make_llm("tutor", device="cpu", **options | variant)
        try:
            outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
            for output, kind, ids in zip(outputs, ("greedy", "sampled", "greedy"), expected, strict=True):
                got = output["token_ids"]
                assert got == ids, f"{kind}, with {variant}: {ids[:8]}… expected, got {got[:8]}…"
            if variant == (variants or ({},))[0]:
                _check_text_and_times(llm, list(prompts), list(params), outputs)
        finally:
            llm.close()


def _check_text_and_times(llm: object, prompts: list, params: list[SamplingParams], outputs: list) -> None:
    pieces: dict[int, str] = {}

    def on_text(index: int, piece: str) -> None:
        pieces[index] = pieces.get(index, "") + piece

    llm.generate(prompts, params, use_tqdm=False, on_text=on_text)
    texts = [output["text"] for output in outputs]
    assert pieces == dict(enumerate(texts)), f"the pieces given to on_text make {pieces}, the texts are {texts}"
    middle = texts[0][len(texts[0]) // 2 :][:4]
    [stopped] = llm.generate(prompts[:1], replace(GREEDY, stop=(middle,)), use_tqdm=False)
    assert stopped["text"] == texts[0].partition(middle)[0], f"stop={middle!r} must end the text before it"
    assert stopped["finish_reason"] == "stop", f"a stop string's reason is 'stop', got {stopped['finish_reason']!r}"
    for output in outputs:
        metrics = output["metrics"]
        assert metrics["num_generated_tokens"] == len(output["token_ids"]), f"got {metrics}"
        assert metrics["ttft"] >= metrics["prefill_time"] > 0, f"ttft counts from the call's arrival, got {metrics}"
