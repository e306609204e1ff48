"""The floor: how fast the work could be if the hardware did nothing but what cannot be avoided.

Two numbers bound every step (the roofline model of Williams, Waterman and Patterson, 2009):

    time >= bytes that must move / measured copy bandwidth
    time >= operations / measured matmul rate

A decode step reads all the weights once, however many sequences share it, and each sequence's KV cache once; for a few
sequences that is nearly all bytes. Prefill works on many tokens a weight, and is bound by operations. An engine at 50 %
of its floor could be made at most twice as fast on that hardware without changing the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from benchmarks.workloads import Call, Workload


@dataclass(frozen=True)
class Ceilings:
    """What a device was measured to do at best."""

    copy_bytes_per_s: float  # read and written together
    matmul_operations_per_s: float  # a multiply-add counts as two


@dataclass(frozen=True)
class Work:
    """Bytes that must move and operations that must be done."""

    num_bytes: float
    operations: float

    def seconds(self, ceilings: Ceilings) -> float:
        bytes_time = self.num_bytes / ceilings.copy_bytes_per_s
        return max(bytes_time, self.operations / ceilings.matmul_operations_per_s)


@dataclass(frozen=True)
class ModelCost:
    """What a decoder-only model of the Llama and Qwen families costs, counted from its configuration.

    Args:
        config: the Hugging Face configuration.
        bytes_per_number: of weights and KV cache, e.g. 2 for bfloat16.
    """

    config: PretrainedConfig
    bytes_per_number: int

    @property
    def head_dim(self) -> int:
        return getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads

    @property
    def layer_matmul_parameters(self) -> int:
        """Weights of all layers' matrices: Q, K, V, output, gate, up, down."""
        c = self.config
        queries, keys = c.num_attention_heads * self.head_dim, c.num_key_value_heads * self.head_dim
        attention = c.hidden_size * (queries + 2 * keys) + queries * c.hidden_size
        return c.num_hidden_layers * (attention + 3 * c.hidden_size * c.intermediate_size)

    @property
    def head_parameters(self) -> int:
        """The LM head: a step reads it once, tied to the embedding or not. Of an embedding it reads single rows."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def small_parameters(self) -> int:
        """Norm weights and biases: read with the rest, though no matrix is multiplied."""
        c = self.config
        per_layer = 2 * c.hidden_size
        if c.model_type == "qwen2":  # a bias on Q, K and V
            per_layer += (c.num_attention_heads + 2 * c.num_key_value_heads) * self.head_dim
        if c.model_type == "qwen3":  # a norm over each head's query and key
            per_layer += 2 * self.head_dim
        return c.num_hidden_layers * per_layer + c.hidden_size

    @property
    def weight_bytes(self) -> int:
        """What one decode step reads of the weights."""
        parameters = self.layer_matmul_parameters + self.head_parameters + self.small_parameters
        return parameters * self.bytes_per_number

    @property
    def kv_bytes_per_token(self) -> int:
        c = self.config
        return 2 * c.num_hidden_layers * c.num_key_value_heads * self.head_dim * self.bytes_per_number

    @property
    def attention_operations_per_pair(self) -> int:
        """One query against one key: a product with the key, and one with the value, in every head and layer."""
        return 4 * self.config.num_attention_heads * self.head_dim * self.config.num_hidden_layers

    def decode(self, steps: int, tokens: int, context_tokens_read: int) -> Work:
        """`steps` decode steps that make `tokens` tokens and look back at `context_tokens_read` in all."""
        num_bytes = steps * self.weight_bytes + context_tokens_read * self.kv_bytes_per_token
        per_token = 2 * (self.layer_matmul_parameters + self.head_parameters)
        return Work(num_bytes, tokens * per_token + context_tokens_read * self.attention_operations_per_pair)

    def decode_call(self, call: Call) -> Work:
        """All of a call's decode steps, if all its requests run together from the first step on."""
        return self.decode(max(call.max_tokens), call.output_tokens, call.context_tokens_read)

    def prefill(self, num_prompts: int, tokens: int, pairs: int) -> Work:
        """Prefill in one pass.

        Args:
            num_prompts: each needs the LM head once, for its last token.
            tokens: that are computed (cached ones are not).
            pairs: of a query and a key that it sees; n (n + 1) / 2 for a prompt of n tokens.
        """
        operations = 2 * self.layer_matmul_parameters * tokens + 2 * self.head_parameters * num_prompts
        return Work(self.weight_bytes, operations + pairs * self.attention_operations_per_pair)

    def prefill_call(self, call: Call) -> Work:
        """Prefill of a call's prompts, where a beginning that they all share is computed once."""
        shared = _common_prefix(call.prompts) if len(call.prompts) > 1 else 0
        tokens = shared + sum(len(p) - shared for p in call.prompts)
        pairs = _pairs(shared) + sum(_pairs(len(p)) - _pairs(shared) for p in call.prompts)
        return self.prefill(len(call.prompts), tokens, pairs)


def floors(workload: Workload, cost: ModelCost, ceilings: Ceilings) -> dict[str, float]:
    """The best possible value of those of a workload's figures that have a floor, by the figure's name."""
    calls = {call.tag: call for call in workload.rounds[0]}
    if workload.name == "ttft":
        return {f"ttft_{tag}_ms": 1e3 * cost.prefill_call(call).seconds(ceilings) for tag, call in calls.items()}
    call = calls["all"]
    prefill, decode = (work.seconds(ceilings) for work in (cost.prefill_call(call), cost.decode_call(call)))
    if workload.name == "single":
        return {
            "prefill_ms": 1e3 * prefill,
            "tpot_ms": 1e3 * decode / call.output_tokens,
            "output_tokens_per_s": call.output_tokens / (prefill + decode),
        }
    found = {"seconds": prefill + decode, "output_tokens_per_s": call.output_tokens / (prefill + decode)}
    if workload.name == "decode32":
        found["step_ms"] = 1e3 * decode / max(call.max_tokens)
    return found


def _pairs(length: int) -> int:
    return length * (length + 1) // 2


def _common_prefix(prompts: tuple[tuple[int, ...], ...]) -> int:
    first, last = min(prompts), max(prompts)  # whatever the smallest and the largest share, all share
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
