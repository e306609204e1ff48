"""Find the first place where this stage's model differs from stage A's: `python -m stage_d_paged.compare`.

Each half of a layer adds to the residual stream. Both models record the inputs of their norms, which show what each
half added.
"""

from contextlib import suppress

from torch import Tensor, nn

from stage_a_naive.contract.params import SamplingParams
from stage_a_naive.llm import LLM as Reference
from stage_d_paged.llm import LLM

PROMPT = "What is a KV cache? " * 8  # more tokens than a block has
ROUNDING = 1e-4  # of the largest state; float32 rounds to a millionth of it, and a mistake changes far more


def residual_streams(llm: Reference | LLM, model: nn.Module) -> list[Tensor]:
    """Generate two tokens and return the inputs `[tokens, hidden]` of all norms, for the prefill and the decode."""
    kept: list[Tensor] = []  # copies, because stage D writes over the residual stream
    for name, module in model.named_modules():
        if name == "norm" or name.endswith(("input_layernorm", "post_attention_layernorm")):
            module.register_forward_pre_hook(lambda _, given: kept.append(given[0].flatten(0, -2).clone()))
    with suppress(FloatingPointError):  # no token can be chosen: the states recorded before show why
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    return kept


def first_difference(reference: Reference, engine: LLM) -> str:
    """Return the phase and the part of the model whose result differs first, or say that none does."""
    expected = residual_streams(reference, reference.model.model)
    found = residual_streams(engine, engine.runtime.model)
    for i, (right, ours) in enumerate(zip(expected, found, strict=True)):
        (phase, part), off, largest = divmod(i, len(expected) // 2), (right - ours).abs().max(), right.abs().max()
        if not off <= ROUNDING * largest:  # true for NaN, too
            name = f"{'attention' if part % 2 else 'MLP'} of layer {(part - 1) // 2}" if part else "embedding"
            return f"{('prefill', 'decode')[phase]}, {name}: off by {off:.1e}, the largest state is {largest:.1e}"
    return "no difference in the prefill and in a decode step"


if __name__ == "__main__":
    engine = LLM("tutor", device="cpu", dtype="float32")
    print(first_difference(Reference("tutor", device="cpu", dtype="float32"), engine))
