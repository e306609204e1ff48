"""The floor: the least time that the hardware needs for the unavoidable work.

Two numbers bound every step (the roofline model of Williams, Waterman and Patterson, 2009):

    time >= bytes that must move / measured copy bandwidth
    time >= operations / measured matmul rate

A decode step reads all the weights once, whatever the number of sequences, and each sequence's KV cache once; for a few
sequences that is nearly all bytes. Prefill works on many tokens per weight, and is bound by operations. An engine at
2 × its floor could be made at most twice as fast on that hardware without changing the model.
"""

from __future__ import annotations

from functools import cached_property
from os.path import commonprefix  # of any sequences
from typing import NamedTuple, TypedDict

from benchmarks.workloads import Call, Workload
from beyond.experts.floor import expected_touched, weight_bytes
from stage_a_naive.checkpoints.experts import Experts, experts_of_layers
from stage_a_naive.floor import ModelBytes


class Ceilings(TypedDict):
    """A device's measured ceilings, as in every results file of a GPU."""

    copy_bytes_per_s: float  # read and written together
    matmul_operations_per_s: float  # a multiply-add counts as two


class Work(NamedTuple):
    """Bytes that must move and operations that must be done."""

    num_bytes: float
    operations: float

    def seconds(self, ceilings: Ceilings) -> float:
        moving = self.num_bytes / ceilings["copy_bytes_per_s"]
        return max(moving, self.operations / ceilings["matmul_operations_per_s"])


class ModelCost(ModelBytes):
    """What a model costs: the bytes of a decode step, and the operations of decode and prefill."""

    @cached_property
    def experts(self) -> Experts | None:
        """The experts of a layer, the same in all layers that have some; None for a dense model."""
        return next((experts for experts in experts_of_layers(self.config) if experts is not None), None)

    @property
    def attention_operations_per_pair(self) -> int:
        """Count the operations of one query and one key: the products with key and value, in every head and layer."""
        return 4 * self.config.num_attention_heads * self.head_dim * self.config.num_hidden_layers

    def decode(self, call: Call) -> Work:
        """Return the work of a call's decode steps, if all its requests run together from the first step on."""
        share, window = self.window
        read = call.context_tokens_read()
        if share:
            read = (1 - share) * read + share * call.context_tokens_read(window)
        running = [sum(n > step for n in call.max_tokens) for step in range(max(call.max_tokens))]
        num_bytes = sum(map(self.weight_bytes_of_step, running)) + read * self.kv_bytes_per_token
        attention = read * self.attention_operations_per_pair
        return Work(num_bytes, 2 * sum(self.matmul_parameters) * call.output_tokens + attention)

    def prefill(self, call: Call) -> Work:
        """Return the work of a prefill in one pass: a common prefix counts once, the LM head once per prompt."""
        layers, head = self.matmul_parameters
        lengths = [len(prompt) for prompt in call.prompts]
        shared = len(commonprefix(call.prompts)) if len(lengths) > 1 else 0
        tokens = shared + sum(length - shared for length in lengths)
        pairs = _pairs(shared) + sum(_pairs(length) - _pairs(shared) for length in lengths)
        operations = 2 * layers * tokens + 2 * head * len(call.prompts) + pairs * self.attention_operations_per_pair
        return Work(self.weight_bytes_of_step(tokens), operations)

    def weight_bytes_of_step(self, tokens: int) -> float:
        """Return the bytes of weights that a step of this many tokens reads."""
        if self.experts is None:
            return self.weight_bytes
        return weight_bytes(self, expected_touched(self.experts.count, self.experts.per_token, tokens))


def floors(workload: Workload, cost: ModelCost, ceilings: Ceilings) -> dict[str, float]:
    """Return the floors of a workload's figures, by name."""
    calls = {call.tag: call for call in workload.rounds[0]}
    if workload.name == "ttft":
        return {f"ttft_{tag}_ms": 1e3 * cost.prefill(call).seconds(ceilings) for tag, call in calls.items()}
    call = calls["all"]
    prefill, decode = cost.prefill(call).seconds(ceilings), cost.decode(call).seconds(ceilings)
    rate = {"output_tokens_per_s": call.output_tokens / (prefill + decode)}
    if workload.name == "single":
        return {"prefill_ms": 1e3 * prefill, "tpot_ms": 1e3 * decode / call.output_tokens, **rate}
    step = {"step_ms": 1e3 * decode / max(call.max_tokens)} if workload.name in ("decode32", "chat32") else {}
    return {"seconds": prefill + decode, **rate, **step}


def _pairs(length: int) -> int:
    """Count the pairs of a query and a key that it sees."""
    return length * (length + 1) // 2
