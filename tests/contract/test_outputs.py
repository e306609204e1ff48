"""What an output says of its request."""

from __future__ import annotations

import pytest

from contract.engines import PROMPTS
from stage_a_naive import SamplingParams
from stage_a_naive.outputs import Metrics


def test_an_output_has_every_field_and_its_metrics_agree(llm) -> None:
    few = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    for prompt, n, output in zip(PROMPTS[:3], (1, 2, 3), llm.generate(PROMPTS[:3], few, False), strict=True):
        assert set(output) == {"text", "token_ids", "prompt_token_ids", "finish_reason", "metrics"}
        assert output["prompt_token_ids"] == prompt and output["finish_reason"] == "length"
        metrics = output["metrics"]
        assert set(metrics) == set(Metrics.__annotations__)
        assert metrics["num_generated_tokens"] == len(output["token_ids"]) == n
        assert metrics["num_prompt_tokens"] == len(prompt) > metrics["num_cached_tokens"]
        assert 0 < metrics["prefill_time"] <= metrics["ttft"] and (metrics["tpot"] > 0) == (n > 1)
        assert metrics["tpot"] == (pytest.approx(metrics["decode_time"] / (n - 1)) if n > 1 else 0)
        total = metrics["prefill_time"] + metrics["decode_time"]
        assert metrics["tokens_per_sec"] == pytest.approx(n / total)
