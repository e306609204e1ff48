"""The input of a layer's norm: the size of the residual stream, measured in the tutor."""

from __future__ import annotations

import torch

from benchmarks.pictures.picture import BLUE, ORANGE, Picture, new_panels
from stage_d_paged import LLM
from stage_d_paged.layers import RMSNorm


def draw_norm() -> Picture:
    """Draw the RMS of a token's vector at the input of every layer of the tutor, before and after its norm."""
    llm, before, after = LLM("tutor", device="cpu"), [], []

    def note(_: RMSNorm, arguments: tuple, output: torch.Tensor) -> None:
        before.append(arguments[0].float().square().mean(-1).sqrt().mean().item())
        after.append(output.float().square().mean(-1).sqrt().mean().item())

    for layer in llm.runtime.model.layers:
        layer.input_layernorm.register_forward_hook(note)
    llm.generate([llm.tokenizer.encode("What is a KV cache?")], use_tqdm=False)
    count = len(llm.runtime.model.layers)
    title = "The residual stream grows from layer to layer; its norm does not"
    figure, [axes] = new_panels(8, 3, {"xlabel": "layer of the tutor", "ylabel": "root mean square", "title": title})
    axes.plot(before[:count], "o-", color=ORANGE, label="x, before the norm")
    axes.plot(after[:count], "s-", color=BLUE, label="RMSNorm(x)")
    axes.set(xticks=range(count), ylim=0)
    axes.legend(frameon=False)
    return Picture(figure, "root mean square of the residual stream before and after the norm of every layer")
