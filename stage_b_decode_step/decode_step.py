"""One decode step as a function: it takes a token and a cache and returns the logits of the next token.

Generating text runs this function again and again. As a module with fixed shapes it can be compiled, captured in a CUDA
graph, and measured alone. For that, nothing in it may depend on *which* step it is: no Python number that grows, no
tensor that changes its shape. The position is a tensor on the device, and the step itself advances it.

`torch.compile` does two things. It fuses the many small operations (norms, rotary embedding, activations, residuals)
into few kernels. And on a GPU it records all kernels of a step in a CUDA graph, so that the CPU launches one graph
instead of hundreds of kernels. With one row of tokens, launching most kernels takes longer than running them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from stage_b_decode_step.static_cache import StaticKVCache

Step = Callable[[Tensor, Cache], Tensor]


class DecodeStep(nn.Module):
    """Runs a model for one token and returns the scores of the next token.

    Args:
        model: a causal language model of transformers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, cache: Cache) -> Tensor:
        """Run one token; the cache is one position longer afterwards.

        Args:
            token: `[1, 1]` int64.
            cache: a `StaticKVCache`, or a cache of transformers that grows.

        Returns:
            logits `[1, vocab]`, float32.
        """
        if not isinstance(cache, StaticKVCache):
            logits = self.model(input_ids=token, past_key_values=cache, use_cache=True, return_dict=False)[0]
            return logits[:, -1, :].float()
        cache.begin_step()
        logits = self.model(
            input_ids=token,
            position_ids=cache.position[None],  # [1, 1]
            attention_mask=cache.mask,
            past_key_values=cache,
            use_cache=True,
            return_dict=False,
        )[0]  # [1, 1, vocab]
        cache.end_step()
        return logits[:, -1, :].float()


def compiled(step: DecodeStep, device: torch.device) -> Step:
    """Return the step wrapped in `torch.compile`; it compiles at the first call with each cache length.

    Raises:
        ValueError: a compiler is missing or does not start.
    """
    check_compiler(device)
    # fullgraph: code that cannot be compiled is an error, not a slow step. dynamic=False: one program per length.
    if device.type != "cuda":
        return torch.compile(step, fullgraph=True, dynamic=False)
    graphed = torch.compile(step, fullgraph=True, dynamic=False, mode="reduce-overhead")

    def replay(token: Tensor, cache: Cache) -> Tensor:
        # A graph writes its output to the same memory every time. This call says that the last output is no longer
        # needed.
        torch.compiler.cudagraph_mark_step_begin()
        return graphed(token, cache)

    return replay


def check_compiler(device: torch.device) -> None:
    """Raise a `ValueError` that names what `torch.compile` needs on this device if it is missing or does not start."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise ValueError("compile=True on a GPU needs Triton, which is not installed: `pip install triton`")
        candidates = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang", "cc"]
        kind = "C"
    else:
        candidates = [os.environ.get("CXX", "g++")]
        kind = "C++"
    found = next(filter(shutil.which, candidates), None)
    if found is None:
        names = ", ".join(candidates)
        raise ValueError(
            f"compile=True needs a {kind} compiler and finds none (looked for {names}); "
            "install one (`apt-get install build-essential`) or leave compile off"
        )
    try:
        subprocess.run([found, "--version"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"compile=True needs a {kind} compiler, and {found!r} does not start ({error}); set "
            f"{'CC' if kind == 'C' else 'CXX'} to one that does, or leave compile off"
        ) from error
