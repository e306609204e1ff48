"""What the lab tests share: requests without a tokenizer, a model that counts, tokens that are pieces of text."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from stage_a_naive.outputs import Completion, Request
from stage_a_naive.sampling import SamplingParams


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


def answer_of_the_tutor(count: int) -> tuple[list[int], list[int]]:
    """A prompt's ids and the tutor's greedy answer to it, by transformers' own `generate`."""
    from transformers import AutoModelForCausalLM

    from stage_a_naive.loading import load_tokenizer, resolve

    source = resolve("tutor")
    tokenizer = load_tokenizer(source)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is a KV cache?"}], tokenize=False,
                                           add_generation_prompt=True)  # fmt: skip
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    model = AutoModelForCausalLM.from_pretrained(source.path).eval()
    with torch.inference_mode():
        out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return ids, out[0, len(ids) :].tolist()


def check_whole_stage(make_llm: object, **options: object) -> None:
    """The learner's engine, nothing exchanged, answers as transformers does."""
    prompt, expected = answer_of_the_tutor(24)
    llm = make_llm("tutor", device="cpu", **options)
    try:
        [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
        assert output["token_ids"] == expected, f"the engine says {output['text']!r}"
    finally:
        getattr(llm, "close", lambda: None)()
