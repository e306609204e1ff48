"""The options of every engine: the same names, meanings and defaults; an option that an engine lacks is an error."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields

import pytest

from contract.engines import MODEL, PACKAGES, PAGED, options_class
from stage_a_naive import SamplingParams

OF_ANOTHER = {  # an option that the engine does not have
    "stage_a_naive": "compile",
    "stage_b_decode_step": "mlp_kernel",
    "stage_c_fused_mlp": "max_num_seqs",
    "stage_d_paged": "enable_chunked_prefill",
    "stage_e_batching": "overlap",
    "stage_f_graph_tp": "quantization",
    "beyond": "draft_tokens",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_options_are_by_name_and_an_unknown_one_is_a_type_error(package: str) -> None:
    llm_class = importlib.import_module(package).LLM
    signature = inspect.signature(llm_class)
    defaults = {name: signature.parameters[name].default for name in ("device", "dtype", "seed")}
    assert defaults == {"device": "auto", "dtype": "auto", "seed": 0}
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in list(signature.parameters.values())[1:])
    for option in ("max_num_seq", OF_ANOTHER[package]):
        with pytest.raises(TypeError, match=f"'{option}'"):
            llm_class(MODEL, device="cpu", **{option: True})
    for seed in (-1, "0", 1.5, None):
        with pytest.raises(ValueError, match="seed must be an integer, 0 or more, got "):
            llm_class(MODEL, device="cpu", seed=seed)


@pytest.mark.parametrize("package", PAGED)
def test_another_name_for_graphs_is_refused_with_ours(package: str) -> None:
    with pytest.raises(TypeError, match="unknown option 'use_cuda_graph': .*enforce_eager=True switches them off"):
        importlib.import_module(package).LLM(MODEL, device="cpu", use_cuda_graph=True)


def test_sampling_parameters_have_vllms_names_and_these_defaults() -> None:
    assert {f.name: f.default for f in fields(SamplingParams)} == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": (),
        "bad_words": (),
        "allowed_token_ids": None,
        "min_tokens": 0,
        "max_tokens": 64,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "n": 1,
        "seed": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "structured_outputs": None,
    }


@pytest.mark.parametrize("package", PAGED)
def test_nano_vllms_options_have_its_defaults(package: str) -> None:
    options = options_class(package)()
    wanted = {
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 512,
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.9,
        "tensor_parallel_size": 1,
        "enforce_eager": False,
        "kvcache_block_size": None,
        "num_kvcache_blocks": -1,
        "enable_prefix_caching": True,
        "attention_backend": "auto",
    }
    if package != "stage_d_paged":
        wanted["enable_chunked_prefill"] = True
    assert {f.name: getattr(options, f.name) for f in fields(options) if f.name in wanted} == wanted
