"""Tools that measure and evaluate servers: what they send. `test_beyond_serving_real_clients.py` runs them."""

from __future__ import annotations

import pytest
from serving import QUESTION, engine, httpx, messages, served

llm = engine(max_num_seqs=8, num_kvcache_blocks=256)
server = served()


PARTS = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
AT_END = {"stream": True, "stream_options": {"include_usage": True}}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
# What these tools send, but for the prompt. GuideLLM's chat is recorded; its completion and those of `vllm bench serve`
# are written after what is known of these tools.
SENT = {
    "GuideLLM 0.8 chat": (CHAT, CONTINUOUS | {"max_completion_tokens": 9, "ignore_eos": True, "messages": PARTS}),
    "GuideLLM 0.8 text": (TEXT, CONTINUOUS | {"max_tokens": 9, "stop": None, "ignore_eos": True, "prompt": QUESTION}),
    "vllm bench serve text": (
        TEXT,
        AT_END | {"max_tokens": 9, "repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True, "prompt": QUESTION},
    ),
    "vllm bench serve chat": (CHAT, AT_END | {"max_completion_tokens": 9, "messages": PARTS, "ignore_eos": True}),
}


@pytest.mark.parametrize("tool", SENT)
def test_a_load_generators_request_is_answered_with_the_tokens_that_it_counts(server, tool):
    path, body = SENT[tool]
    headers = {"x-request-id": "benchmark-0"}
    response = httpx.post(server.url + path, json={"model": "tutor"} | body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    *tokens, end = messages(response.text)
    assert len(tokens) == end["usage"]["completion_tokens"] == 9
    if body["stream_options"].get("continuous_usage_stats"):
        prompt = end["usage"]["prompt_tokens"]
        assert [message["usage"]["completion_tokens"] for message in tokens] == list(range(1, 10))
        assert all(message["usage"]["prompt_tokens"] == prompt for message in tokens)
        assert tokens[-1]["usage"]["total_tokens"] == end["usage"]["total_tokens"] == prompt + 9
    else:
        assert all(message["usage"] is None for message in tokens)


CONTINUATIONS = [(QUESTION + " It keeps the", " keys and values"), (QUESTION + " It keeps the", " bananas")]


def test_an_evaluations_batch_of_token_ids_has_a_score_for_every_token_but_the_first(server, llm):
    """lm-evaluation-harness 0.4 reads `token_logprobs[length of the context:-1]`."""
    prompts = [llm.tokenizer.encode(context + answer) for context, answer in CONTINUATIONS]
    shape = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    body = {"model": "tutor", "prompt": prompts} | shape
    choices = httpx.post(server.url + TEXT, json=body, timeout=60).json()["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(prompt) + 1
        assert told["token_logprobs"][0] is None and None not in told["token_logprobs"][1:]
        for value, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
            assert max(top.values()) >= value and value in top.values()  # the same number, not a rounded one
