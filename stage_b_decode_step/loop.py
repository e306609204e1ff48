"""A decode step that can be compiled: every step has the same shapes and works on the same memory.

Stage A's cache grows by one token per step, so every step has other shapes at other addresses: it is another program,
for which Python calls PyTorch hundreds of times. Here the cache has 256 positions from the start. A step writes one of
them, reads them all, and transformers masks those that are still empty:

    stage A    step 1: [k k k k k]          step 2: [k k k k k k]          a new tensor each time
    stage B    step 1: [k k k k k · · ·]    step 2: [k k k k k k · · ·]    the same tensor

The token is a tensor too, which the step overwrites, and the cache counts its positions in one. So nothing in a step
depends on which step it is, and `torch.compile` does it once for all: matrix products and attention stay PyTorch's, the
rest becomes fewer, larger kernels. `python -m stage_b_decode_step.loop` counts calls and kernels. (It compiles first.)
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StaticCache

from stage_a_naive import loop as growing
from stage_a_naive.checkpoints.tutor import TUTOR_PATH

POSITIONS = 256  # of the cache: enough for a prompt and its answer


@torch.inference_mode()
def prefill(model: PreTrainedModel, prompt_ids: list[int]) -> tuple[Tensor, StaticCache]:
    """Run the prompt; returns the first token, `[1, 1]`, and the cache, the two tensors that every step works on."""
    cache = StaticCache(model.config, max_cache_len=POSITIONS)
    logits = model(torch.tensor([prompt_ids]), past_key_values=cache).logits  # [1, prompt, vocab]
    return logits[:, -1].argmax(-1, keepdim=True), cache


def decode_step(model: PreTrainedModel, token: Tensor, cache: StaticCache) -> None:
    """Run the token, and overwrite it with the next one."""
    logits = model(token, past_key_values=cache).logits  # [1, 1, vocab]
    token.copy_(logits[:, -1].argmax(-1, keepdim=True))


compiled_step = torch.compile(decode_step, fullgraph=True, dynamic=False)  # one program for these shapes, when called


@torch.inference_mode()
def generate(step: Callable, model: PreTrainedModel, prompt_ids: list[int], eos_id: int, max_tokens: int) -> list[int]:
    """Generate with either of the two steps."""
    token, cache = prefill(model, prompt_ids)
    ids = [int(token)]
    while len(ids) < max_tokens and ids[-1] != eos_id:
        step(model, token, cache)
        ids.append(int(token))
    return ids


class Calls(TorchDispatchMode):
    """Calls `note(name, result)` for every call that reaches PyTorch inside `with Calls(note):`."""

    ignore_compile_internals = classmethod(lambda cls: True)  # of a compiled program, note what runs, not what compiles

    def __init__(self, note: Callable[[str, object], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.note(operator.overloadpacket.__name__, result)
        return result


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)
    prompt_ids, eos_id = growing.encode(tokenizer, growing.QUESTION), tokenizer.eos_token_id
    expected, calls = growing.generate(model, prompt_ids, eos_id, max_tokens=200), []
    for name, step in (("eager", decode_step), ("compiled", compiled_step)):
        assert generate(step, model, prompt_ids, eos_id, max_tokens=200) == expected
        token, cache = prefill(model, prompt_ids)
        calls.append(Counter())
        with torch.inference_mode(), Calls(lambda operator, result: calls[-1].update([operator])):
            step(model, token, cache)
        print(f"{name}:", ", ".join(f"{count} {operator}" for operator, count in calls[-1].most_common(8)))
    print(f"and kernels that the compiler has generated for the rest: {metrics.generated_kernel_count}")
    print(f"calls of PyTorch per step: {calls[0].total()} → {calls[1].total()} [H200: 1,042 → 12 launches per step]")


if __name__ == "__main__":
    main()
