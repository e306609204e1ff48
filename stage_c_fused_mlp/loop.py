"""One kernel for the MLP: from fourteen operations of PyTorch to one custom operation.

Between two attention layers, a token goes through x + down(silu(gate(norm(x))) * up(norm(x))). In PyTorch that is a
chain of operations: the norm alone is a square, a mean, an addition, a root and some products. Each is started from
Python, reads its input from memory and writes its result to memory, although only the next operation needs it. A custom
kernel computes the whole chain and keeps the intermediate numbers on the chip.

The kernel is C++ (`csrc/stage_c/mlp_cpu.cpp`) or CUDA (`mlp_fused.cu` and two simpler ones in the same folder). The
extension compiles what this machine can run, once, which takes up to a minute. `python -m stage_c_fused_mlp.loop` puts
the kernel into the model, and prints operations, bytes and time per MLP and token. The answer is the same as in stage
A's loop.
"""

from types import MethodType

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.loop import QUESTION, encode, generate
from stage_b_decode_step.loop import Calls
from stage_c_fused_mlp.extension import load_extension


def unfused_mlp(layer: nn.Module, x: Tensor) -> Tensor:
    """Run the second half of a decoder layer in PyTorch's operations: `[tokens, hidden]` -> the same shape."""
    return x + layer.mlp(layer.post_attention_layernorm(x))


def fused_mlp(layer: nn.Module, x: Tensor) -> Tensor:
    """Run the same computation as one operation."""
    norm, down = layer.post_attention_layernorm, layer.mlp.down_proj
    operator = torch.ops.six_engines.fused_swiglu_mlp
    return operator(x, norm.weight, layer.gate_up, down.weight, x, norm.variance_epsilon, "auto")  # + x, the residual


def forward(layer: nn.Module, x: Tensor, **others: object) -> Tensor:
    """Run a decoder layer, `[1, tokens, hidden]` -> the same shape: unchanged attention, then the kernel."""
    attended, _ = layer.self_attn(layer.input_layernorm(x), **others)
    return fused_mlp(layer, (x + attended)[0])[None]  # the kernel has no batch dimension


def replace_mlp(model: PreTrainedModel) -> None:
    """Give every layer the new `forward`. The kernel needs gate and up as one matrix."""
    for layer in model.model.layers:
        layer.gate_up = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
        layer.forward = MethodType(forward, layer)


@torch.inference_mode()
def main() -> None:
    device = torch.device("cuda" if load_extension("fused_mlp").cuda else "cpu")
    model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)
    prompt_ids = encode(tokenizer, QUESTION)
    with device:  # where new tensors are made
        expected = generate(model, prompt_ids, tokenizer.eos_token_id, max_tokens=200)
        replace_mlp(model)
        assert generate(model, prompt_ids, tokenizer.eos_token_id, max_tokens=200) == expected
        layer, x = model.model.layers[0], torch.randn(1, model.config.hidden_size)
        counts, calls = [], []  # calls: (name, result)
        for function in (unfused_mlp, fused_mlp):
            calls.clear()
            with Calls(lambda *call: calls.append(call)):
                function(layer, x)
            # Count each written memory once, because views share it. x existed before.
            written = {result.data_ptr(): result.nbytes for _, result in calls[:-1]} | {x.data_ptr(): 0}
            timer = Timer("function(layer, x)", globals={"function": function, "layer": layer, "x": x})
            print(f"{function.__name__:11}", " ".join(operator for operator, _ in calls))
            fastest, median, slowest = sorted(1e6 * timer.timeit(500).mean for _ in range(3))  # with one thread
            busy = f" (up to {slowest:.0f}: other programs run here)" if slowest > 2 * fastest else ""
            print(f"{'':11} {sum(written.values()):,} bytes between them, {median:.0f} µs{busy}")
            counts.append(len(calls))
    print(f"operations per MLP: {counts[0]} → {counts[1]} [H200: 20.5 → 11.0 µs per MLP of Qwen2.5-0.5B]")


if __name__ == "__main__":
    main()
