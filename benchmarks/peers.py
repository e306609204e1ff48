"""Engines of other projects behind the interface of the stages' `LLM.generate`, and one variant of stage A.

`transformers`' own `generate` is what a user would reach for first: a static batch. All requests are padded on the left
to the longest prompt and run until the longest answer is done. All of them return token ids without times, so their
rows have no TTFT and TPOT percentiles.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
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


class VLLMEngine:
    """vLLM."""

    def __init__(self, model: str, *, device: str = "auto", dtype: str = "auto", **options: object) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, so its memory is counted
        import vllm

        self._params_class = vllm.SamplingParams
        dtype_name = str(pick_dtype(dtype, pick_device(device))).removeprefix("torch.")
        self._llm = vllm.LLM(model_directory(model), dtype=dtype_name, **options)

    def generate(self, prompts: Prompts, params: Sequence[SamplingParams], use_tqdm: bool = False) -> Outputs:
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        made = self._llm.generate(asked, _converted(params, self._params_class), use_tqdm=use_tqdm)
        return [{"token_ids": list(output.outputs[0].token_ids)} for output in made]


class NanoVLLMEngine:
    """nano-vllm. It refuses temperature 0; 1e-5 replaces it, which is greedy in effect."""

    def __init__(self, model: str, *, device: str = "auto", dtype: str = "auto", **options: object) -> None:
        import nanovllm

        self._params_class = nanovllm.SamplingParams
        self._llm = nanovllm.LLM(model_directory(model), **options)

    def generate(self, prompts: Prompts, params: Sequence[SamplingParams], use_tqdm: bool = False) -> Outputs:
        asked = _converted(params, self._params_class, least_temperature=1e-5)
        made = self._llm.generate([list(prompt) for prompt in prompts], asked, use_tqdm=use_tqdm)
        return [{"token_ids": list(output["token_ids"])} for output in made]


class MiniSGLEngine:
    """mini-sglang."""

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int = 4096,
        gpu_memory_utilization: float = 0.9,
    ) -> None:
        from minisgl.core import SamplingParams as Params
        from minisgl.llm import LLM as MiniSGL

        class WithLastToken(MiniSGL):
            """The engine drops each answer's last token from what it returns; here it is kept."""

            def offline_send_result(self, reply: list) -> None:
                for message in reply:
                    self.status_map[message.uid].output_ids.append(message.next_token)

        self._params_class = Params
        self._llm = WithLastToken(
            model_directory(model),
            pick_dtype(dtype, pick_device(device)),
            max_seq_len_override=max_model_len,
            memory_ratio=gpu_memory_utilization,
            cuda_graph_max_bs=256,
        )

    def generate(self, prompts: Prompts, params: Sequence[SamplingParams], use_tqdm: bool = False) -> Outputs:
        made = self._llm.generate([list(prompt) for prompt in prompts], _converted(params, self._params_class))
        return [{"token_ids": list(output["token_ids"])} for output in made]


def _converted(params: Sequence[SamplingParams], to: type, least_temperature: float = 0.0) -> list:
    """Our sampling parameters as those of another project.

    Raises:
        TypeError: it has no parameter of a name that is not at our default.
    """
    more = ("top_k", "top_p", "repetition_penalty")
    return [
        to(
            temperature=max(p.temperature, least_temperature),
            max_tokens=p.max_tokens,
            ignore_eos=p.ignore_eos,
            **{name: value for name in more if (value := getattr(p, name)) != getattr(SamplingParams, name)},
        )
        for p in params
    ]


def model_directory(model: str) -> str:
    """A directory in the Hugging Face layout for any model name; random weights are written to a temporary one."""
    source = resolve(model)
    if source.path is not None:
        return str(source.path)
    directory = Path(tempfile.mkdtemp(prefix="six-engines-model-"))
    load_hf_model(source, torch.device("cpu"), torch.bfloat16).save_pretrained(directory)
    load_tokenizer(source).save_pretrained(directory)
    return str(directory)
