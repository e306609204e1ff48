"""The floor of a decode step: the bytes that it must read, divided by this machine's memory bandwidth.

A decode step multiplies every weight with one vector. The arithmetic is little; reading the weights is the work. So an
engine is as good as the share of the memory bandwidth that it reaches. The yardstick is

    (bytes of all weights + bytes of the sequence's KV cache) / copy bandwidth

A copy also writes, so a kernel that only reads can be a little faster than this. The command line of every stage prints
how far the stage is from this floor.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from stage_a_naive.checkpoints.experts import experts_of_layers
from stage_a_naive.checkpoints.model_config import layer_kinds
from stage_a_naive.contract.outputs import Metrics, synchronized_time
from stage_a_naive.entrypoints.language import tr

COPIED = 2**27  # bytes of the tensor that is copied: more than a processor's caches hold
BANDWIDTH_DAYS = 7  # an older bandwidth is measured again: machines and their load change


@dataclass(frozen=True)
class ModelBytes:
    """Bytes that a decoder-only model of the Llama and Qwen families reads, computed from its configuration.

    Args:
        config: the Hugging Face configuration.
        bytes_per_number: bytes per number in weights and KV cache, e.g. 2 for bfloat16.
    """

    config: PretrainedConfig
    bytes_per_number: int

    @property
    def head_dim(self) -> int:
        return getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads

    @property
    def matmul_parameters(self) -> tuple[int, int]:
        """Number of weights in all layers' matrices and in the LM head, which a step reads once, tied or not.

        Of a layer's experts, one token uses a few.
        """
        c = self.config
        queries, keys = c.num_attention_heads * self.head_dim, c.num_key_value_heads * self.head_dim
        mlps = sum(
            3 * c.intermediate_size if e is None else e.router_rows + 3 * (e.per_token * e.size + e.shared_size)
            for e in experts_of_layers(c)
        )
        attention = c.num_hidden_layers * (2 * queries + 2 * keys)
        return c.hidden_size * (attention + mlps), c.vocab_size * c.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: matrices, norms and biases, but only one row of the embedding."""
        c = self.config
        small = (4 if c.model_type == "gemma3_text" else 2) * c.hidden_size
        if c.model_type in ("qwen2", "qwen2_moe"):  # a bias on Q, K and V
            small += (c.num_attention_heads + 2 * c.num_key_value_heads) * self.head_dim
        if c.model_type in ("qwen3", "qwen3_moe", "gemma3_text"):  # a norm over each head's query and key
            small += 2 * self.head_dim
        return self.bytes_per_number * (sum(self.matmul_parameters) + c.num_hidden_layers * small + c.hidden_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        c = self.config
        return 2 * c.num_hidden_layers * c.num_key_value_heads * self.head_dim * self.bytes_per_number

    def step_bytes(self, context: float) -> float:
        """Return the bytes that a decode step reads for one sequence with `context` tokens in its KV cache."""
        return self.weight_bytes + self.tokens_read(context) * self.kv_bytes_per_token

    @property
    def window(self) -> tuple[float, int]:
        """The share of the layers that see only the last tokens, and how many these see."""
        kinds = layer_kinds(self.config)
        return kinds.count("sliding_attention") / len(kinds), getattr(self.config, "sliding_window", None) or 0

    def tokens_read(self, context: float) -> float:
        """Return how many of `context` tokens a step reads, on average over the layers."""
        share, window = self.window
        return context - share * max(0, context - window)


def against_floor(model: ModelBytes, device: torch.device, metrics: Metrics) -> str:
    """Format one line: bytes read per token, GB/s achieved, and the time per token as a multiple of the floor.

    The line is empty if there was no decode step. It leaves out the floor if a CPU's caches may hold everything that is
    read: caches are faster than memory, so a copy larger than the caches is no yardstick.
    """
    if not metrics["tpot"]:
        return ""
    context = metrics["num_prompt_tokens"] + metrics["num_generated_tokens"] / 2  # on average
    num_bytes = model.step_bytes(context)
    achieved = num_bytes / metrics["tpot"]
    if device.type == "cpu" and num_bytes < COPIED:
        return tr("{read:9.1f} MB read per token, {reached:.1f} GB/s").format(
            read=num_bytes / 1e6, reached=achieved / 1e9
        )
    bandwidth = copy_bandwidth(device)
    floor = num_bytes / bandwidth
    line = tr(
        "{read:9.1f} MB read per token, {reached:.1f} of {most:.1f} GB/s: "
        "{ratio:.1f} × the floor of {floor:.3f} ms (the time of reading them)"
    )
    rates = {"reached": achieved / 1e9, "most": bandwidth / 1e9, "ratio": bandwidth / achieved}
    return line.format(read=num_bytes / 1e6, floor=1e3 * floor, **rates)


def measure_copy_bandwidth(device: torch.device, num_bytes: int = COPIED, repeats: int = 10) -> float:
    """Measure the bytes read and written per second by the best of several copies.

    Args:
        num_bytes: size of the copied tensor; more than the caches hold.
    """
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(3 + repeats):
        start = synchronized_time(device)
        target.copy_(source)
        seconds.append(synchronized_time(device) - start)
    return 2 * num_bytes / min(seconds[3:])


def copy_bandwidth(device: torch.device) -> float:
    """Return the copy bandwidth of this machine's device; `cache_file()` keeps it for `BANDWIDTH_DAYS` if possible."""
    file = cache_file()
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.node()}, {torch.get_num_threads()} threads"
    kept = known.get(name)
    if not isinstance(kept, dict) or not 0 <= time.time() - kept["measured"] < BANDWIDTH_DAYS * 86400:
        known[name] = {"bytes_per_s": measure_copy_bandwidth(device), "measured": time.time()}
        with suppress(OSError):  # if nothing can be written, it is measured every time
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_name(f"{file.name}.{os.getpid()}")
            unfinished.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
            unfinished.replace(file)  # at once: another process may be reading it
    return known[name]["bytes_per_s"]


def cache_file() -> Path:
    """Return the file that keeps measured bandwidths; delete it to measure again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "six_engines" / "copy_bandwidth.json"
