"""Scripts written for nano-vllm run from stage D on after changing their import line, and on nothing else changed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from contract.engines import PAGED
from stage_a_naive.checkpoints.loading import TUTOR_PATH

OPTIONS = "enforce_eager=True, tensor_parallel_size=1, max_model_len=512, max_num_seqs=4, gpu_memory_utilization=0.8"

OFFLINE = f"""
from nanovllm import LLM, SamplingParams
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(path)
llm = LLM(path, {OPTIONS})
sampling_params = SamplingParams(temperature=0.6, max_tokens=12)
prompts = ["introduce yourself", "list all prime numbers within 100"]
prompts = [
    tokenizer.apply_chat_template([{{"role": "user", "content": p}}], tokenize=False, add_generation_prompt=True)
    for p in prompts
]
outputs = llm.generate(prompts, sampling_params)
texts = [output["text"] for output in outputs]
lengths = [len(output["token_ids"]) for output in outputs]
"""

THROUGHPUT = f"""
import time
from random import randint, seed
from nanovllm import LLM, SamplingParams

seed(0)
llm = LLM(path, {OPTIONS})
prompt_token_ids = [[randint(0, 1000) for _ in range(randint(10, 40))] for _ in range(6)]
sampling_params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=randint(1, 9)) for _ in range(6)]
llm.generate(["Benchmark: "], SamplingParams())
start = time.time()
outputs = llm.generate(prompt_token_ids, sampling_params, use_tqdm=False)
throughput = sum(params.max_tokens for params in sampling_params) / (time.time() - start)
lengths = [len(output["token_ids"]) for output in outputs]
"""

STEPS = f"""
from nanovllm import LLM, SamplingParams

llm = LLM(path, {OPTIONS})
for prompt in ("What is a KV cache?", llm.tokenizer.encode("What is prefill?"), [5, 6, 7]):
    llm.add_request(prompt, SamplingParams(temperature=0.1, max_tokens=6, ignore_eos=True))
answers, prefilled, decoded = {{}}, 0, 0
while not llm.is_finished():
    finished, num_tokens = llm.step()
    if num_tokens > 0:
        prefilled += num_tokens
    else:
        decoded -= num_tokens
    for request_id, token_ids in finished:
        answers[request_id] = token_ids
texts = [llm.tokenizer.decode(answers[request_id]) for request_id in sorted(answers)]
llm.exit()
"""


@pytest.fixture(params=PAGED)
def run(request: pytest.FixtureRequest) -> Callable[[str], SimpleNamespace]:
    def run_script(script: str) -> SimpleNamespace:
        names: dict = {"path": str(TUTOR_PATH)}
        exec(script.replace("from nanovllm import", f"from {request.param} import"), names)
        return SimpleNamespace(**names)

    return run_script


def test_a_script_that_generates(run):
    found = run(OFFLINE)
    assert len(found.texts) == 2 and all(isinstance(text, str) for text in found.texts)
    assert all(1 <= length <= 12 for length in found.lengths)


def test_a_script_that_measures_throughput(run):
    found = run(THROUGHPUT)
    assert found.lengths == [params.max_tokens for params in found.sampling_params]


def test_a_script_that_drives_the_steps(run):
    found = run(STEPS)
    assert [len(token_ids) for _, token_ids in sorted(found.answers.items())] == [6, 6, 6]
    tokenizer = found.llm.tokenizer
    assert found.prefilled == 3 + sum(len(tokenizer.encode(p)) for p in ("What is a KV cache?", "What is prefill?"))
    assert found.decoded == 3 * 5
