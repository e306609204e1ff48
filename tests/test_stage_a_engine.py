"""What only stage A can show: it is transformers' model, one request after another."""

from __future__ import annotations

import pytest
import torch

from stage_a_naive import LLM, SamplingParams
from stage_a_naive.chat import chatml, render_chat

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("model", ["tutor", "random:qwen2-tiny", "random:qwen3-tiny", "random:llama-tiny"])
def test_greedy_tokens_are_those_of_transformers_generate(model: str) -> None:
    llm = LLM(model, device="cpu")
    prompt = llm.tokenizer.encode("What is a KV cache?")
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    ids = torch.tensor([prompt])
    reference = llm.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=None
    )
    assert output["token_ids"] == reference[0, len(prompt) :].tolist()


def test_the_second_request_of_a_call_counts_its_wait_in_the_ttft() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = LLM("random:qwen2-tiny", device="cpu").generate(["abc", "xyz"], greedy, use_tqdm=False)
    first, second = (output["metrics"] for output in outputs)
    assert second["ttft"] >= first["prefill_time"] + first["decode_time"] + second["prefill_time"]


def test_chat_renders_the_template_and_falls_back_to_chatml() -> None:
    tokenizer = LLM("tutor", device="cpu").tokenizer
    messages = [{"role": "user", "content": "hi"}]
    assert "hi<|im_end|>" in render_chat(tokenizer, messages)
    assert chatml(messages) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tokenizer.chat_template = None
    assert render_chat(tokenizer, messages) == chatml(messages)
