"""What the labs' drivers share: requests without a tokenizer, a model that counts, tokens that are pieces of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from labs.driving import Compared, numbers
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.contract.outputs import Completion, Request
from stage_a_naive.sampling import SamplingParams

Values = Iterator[tuple[str, object]]  # what a driver yields: labels and values


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
    """Return scores of 1 for these ids and 0 for all others: `[…]` -> `[…, vocab]`."""
    return torch.nn.functional.one_hot(ids, vocab).float()


def tutor() -> PreTrainedModel:
    """The tutor as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval()


def random_prompt(count: int) -> list[int]:
    """Tokens of the tutor."""
    return [numbers.randrange(5, 300) for _ in range(count)]


def some(count: int, least: int, most: int) -> list[int]:
    """Random numbers from `least` to `most`."""
    return [numbers.randint(least, most) for _ in range(count)]


GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
QUESTIONS = ("What is a KV cache?", "What is a KV cache?", "Why does paging help?")


def questions() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and sampling parameters for the tutor."""
    tokenizer = load_tokenizer(resolve("tutor"))
    texts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    sampled = SamplingParams(temperature=1.5, top_k=30, seed=numbers.randrange(10**6), max_tokens=20)
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts], [GREEDY, sampled, GREEDY]


def whole_stage(make_llm: Callable[..., object], *variants: dict[str, object], **options: object) -> Values:
    """Check that the learner's whole engine keeps the contract: tokens, text, stop strings, times.

    Args:
        make_llm: the stage's `LLM`.
        variants: options of the stage; the first is used for the rest.
        options: for all of them.
    """
    prompts, params = questions()
    for variant in variants or ({},):
        llm = make_llm("tutor", device="cpu", **options | variant)
        try:
            outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
            for output, kind in zip(outputs, ("greedy", "sampled", "greedy again"), strict=True):
                yield f"tokens, {kind}, with {variant}", output["token_ids"]
            if variant == (variants or ({},))[0]:
                yield from _text_and_times(llm, list(prompts), list(params), outputs)
        finally:
            llm.close()


def _text_and_times(llm: object, prompts: list, params: list[SamplingParams], outputs: list) -> Values:
    pieces: dict[int, str] = {}

    def on_text(index: int, piece: str) -> None:
        pieces[index] = pieces.get(index, "") + piece

    texts = [output["text"] for output in outputs]
    yield "the texts", texts
    llm.generate(prompts, params, use_tqdm=False, on_text=on_text)
    yield "the pieces given to on_text make the texts", [pieces.get(i) for i in range(len(texts))]
    middle = texts[0][len(texts[0]) // 2 :][:4]
    [stopped] = llm.generate(prompts[:1], replace(GREEDY, stop=(middle,)), use_tqdm=False)
    yield f"stop={middle!r} ends the text before it", [stopped["text"], stopped["finish_reason"]]
    for output in outputs:
        metrics = output["metrics"]
        yield "num_generated_tokens of the metrics", metrics["num_generated_tokens"]
        yield "prefill_time, in seconds", Compared(metrics["prefill_time"], least=1e-9)
        yield (
            "ttft counts from the call's arrival: ttft less prefill_time",
            Compared(metrics["ttft"] - metrics["prefill_time"], least=0.0),
        )
