"""Engines of other projects behind the interface of the stages' `LLM.generate`, and one variant of stage A.

`generate` of `transformers`, which most users try first, runs a static batch: all requests are padded on the left to
the longest prompt and run until the longest answer is complete. These engines return token ids without times, so their
rows have no TTFT and TPOT percentiles.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig

from stage_a_naive.checkpoints.loading import (
    eos_token_ids,
    load_hf_model,
    load_tokenizer,
    pick_device,
    pick_dtype,
    resolve,
)
from stage_a_naive.llm import LLM
from stage_a_naive.sampling import SamplingParams

Prompts = Sequence[Sequence[int]]
Outputs = list[dict[str, object]]


def stage_a_without_cudnn(model: str, **options: object) -> LLM:
    """Stage A without cuDNN's attention, which builds a plan for every new length of the cache."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    return LLM(model, **options)


class TransformersEngine:
    """`transformers.generate` on a static, left-padded batch. One set of sampling parameters for the whole batch."""

    def __init__(self, model: str, *, device: str = "auto", dtype: str = "auto", seed: int = 0) -> None:
        source = resolve(model)
        self.device = pick_device(device)
        self.model = load_hf_model(source, self.device, pick_dtype(dtype, self.device), seed)
        tokenizer = load_tokenizer(source)
        self._pad_id, self._eos_ids = tokenizer.pad_token_id, eos_token_ids(source, tokenizer)
        self.model.generation_config = GenerationConfig()  # else its values fill what ours leaves open

    def generate(self, prompts: Prompts, params: Sequence[SamplingParams], use_tqdm: bool = False) -> Outputs:
        width, longest = max(map(len, prompts)), max(p.max_tokens for p in params)
        padding = [width - len(prompt) for prompt in prompts]
        padded = [[self._pad_id] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
        ids = torch.tensor(padded, device=self.device)  # [rows, width]
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding], device=self.device)
        made = self.model.generate(ids, attention_mask=mask, generation_config=self._config(params, longest))
        outputs: Outputs = []
        for wanted, row in zip(params, made[:, width:].tolist(), strict=True):
            row = row[: wanted.max_tokens]
            ends = [] if wanted.ignore_eos else [i for i, token in enumerate(row) if token in self._eos_ids]
            outputs.append({"token_ids": row[: ends[0] + 1] if ends else row})
        return outputs

    def _config(self, params: Sequence[SamplingParams], longest: int) -> GenerationConfig:
        first = params[0]
        names = ("temperature", "top_k", "top_p", "repetition_penalty", "ignore_eos")
        if any(getattr(p, name) != getattr(first, name) for p in params for name in names):
            raise ValueError(f"a static batch has one {', '.join(names)} for all its requests")
        sampling = (
            {name: getattr(first, name) for name in names[:-1]} | {"do_sample": True} if first.temperature else {}
        )
        eos = None if first.ignore_eos else sorted(self._eos_ids)
        return GenerationConfig(max_new_tokens=longest, pad_token_id=self._pad_id, eos_token_id=eos, **sampling)


class Peer:
    """An engine of another project: a function that answers lists of ids, and its class of sampling parameters."""

    def __init__(self, answer: Callable[..., list], params_class: type, least_temperature: float = 0.0) -> None:
        self._answer, self._params_class, self._least_temperature = answer, params_class, least_temperature

    def generate(self, prompts: Prompts, params: Sequence[SamplingParams], use_tqdm: bool = False) -> Outputs:
        """Answer with the other project's sampling parameters.

        Raises:
            TypeError: the project lacks a parameter that differs from our default.
        """
        asked = []
        for p in params:
            more = {name: getattr(p, name) for name in ("top_k", "top_p", "repetition_penalty")}
            more = {name: value for name, value in more.items() if value != getattr(SamplingParams, name)}
            temperature = max(p.temperature, self._least_temperature)
            same = {"temperature": temperature, "max_tokens": p.max_tokens, "ignore_eos": p.ignore_eos}
            asked.append(self._params_class(**same, **more))
        return [{"token_ids": list(ids)} for ids in self._answer(list(map(list, prompts)), asked)]


def vllm(model: str, *, device: str = "auto", dtype: str = "auto", **options: object) -> Peer:
    """Make vLLM's engine."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, so its memory is counted
    from vllm import LLM, SamplingParams

    dtype_name = str(pick_dtype(dtype, pick_device(device))).removeprefix("torch.")
    llm = LLM(model_directory(model), dtype=dtype_name, **options)

    def answer(prompts: list[list[int]], params: list) -> list:
        made = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in made]

    return Peer(answer, SamplingParams)


def nano_vllm(model: str, *, device: str = "auto", dtype: str = "auto", **options: object) -> Peer:
    """Make nano-vllm's engine. It refuses temperature 0, so 1e-5 replaces it, which is greedy in effect."""
    from nanovllm import LLM, SamplingParams

    llm = LLM(model_directory(model), **options)
    return Peer(lambda *asked: ids_of(llm.generate(*asked, use_tqdm=False)), SamplingParams, 1e-5)


def mini_sglang(
    model: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    max_model_len: int = 4096,
    gpu_memory_utilization: float = 0.9,
) -> Peer:
    """Make mini-sglang's engine."""
    from minisgl.core import SamplingParams
    from minisgl.llm import LLM

    class WithLastToken(LLM):
        """Keeps each answer's last token, which the engine itself drops."""

        def offline_send_result(self, reply: list) -> None:
            for message in reply:
                self.status_map[message.uid].output_ids.append(message.next_token)

    sizes = {"max_seq_len_override": max_model_len, "memory_ratio": gpu_memory_utilization, "cuda_graph_max_bs": 256}
    llm = WithLastToken(model_directory(model), pick_dtype(dtype, pick_device(device)), **sizes)
    return Peer(lambda *asked: ids_of(llm.generate(*asked)), SamplingParams)


def ids_of(outputs: Outputs) -> list:
    return [output["token_ids"] for output in outputs]


def model_directory(model: str) -> str:
    """Return a directory in the Hugging Face layout for any model name; random weights go to a temporary one."""
    source = resolve(model)
    if source.path is not None:
        return str(source.path)
    directory = Path(tempfile.mkdtemp(prefix="six-engines-model-"))
    load_hf_model(source, torch.device("cpu"), torch.bfloat16).save_pretrained(directory)
    load_tokenizer(source).save_pretrained(directory)
    return str(directory)
