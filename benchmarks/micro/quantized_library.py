"""Our 8-bit weights beside torchao's: integers, quality, bytes.

Every linear layer of the tutor is quantised by the library too. Compared are the stored values, which may differ where
a number is halfway between two, and what `quantized_quality` compares, in the transformers model with torchao's layers.
"""

from __future__ import annotations

import json
from importlib.metadata import version

import torch
from torch import Tensor

from benchmarks.micro import caption
from benchmarks.micro.quantized_quality import compare, load, logits_of, read_texts
from benchmarks.text import markdown
from beyond.quantization.formats import FORMATS, quantize_matrix
from stage_a_naive.checkpoints.tutor import TUTOR_PATH

FORMAT_OF = {"int8": ("int8", None), "int8 / 128": ("int8", 128), "fp8": ("fp8", None)}  # name, group size


@torch.inference_mode()
def measure() -> dict:
    """The tutor's weights in each format, by torchao.

    Raises:
        ValueError: torchao is not installed.
    """
    try:
        import torchao.quantization as ao
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}; pip install -c constraints.txt -e .[compare]") from error
    from transformers import AutoModelForCausalLM

    texts, rows = read_texts(), []
    runtime = load("tutor", "cpu", "auto", {})
    reference = [logits_of(runtime, text) for text in texts]
    for name, (form, group) in FORMAT_OF.items():
        model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval()
        int8 = ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(group) if group else ao.PerRow())
        ao.quantize_(model.model, int8 if form == "int8" else ao.Float8WeightOnlyConfig())
        matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
        num_bytes = sum(t.nbytes for w in matrices.values() for t in ((w.qdata, w.scale) if is_8_bits(w) else (w,)))
        logits = [model(torch.tensor([text.ids[:-1]])).logits[0, text.first - 1 :].float() for text in texts]
        row = {"format": name, "by": "torchao", "matrix_bytes": num_bytes, **compare_values(matrices, form, group)}
        rows.append(row | compare(reference, logits))
        print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows, "libraries": {"torchao": version("torchao")}}


def is_8_bits(weight: Tensor) -> bool:
    """Whether torchao has quantised it."""
    return hasattr(weight, "qdata")


def compare_values(theirs: dict[str, Tensor], form: str, group: int | None) -> dict[str, int]:
    """How many stored values are not ours, before and after ours are made with the library's scales."""
    from safetensors.torch import load_file

    found = dict.fromkeys(("values", "differ", "differ_at_their_scale"), 0)
    for name, weight in load_file(TUTOR_PATH / "model.safetensors").items():
        if name not in theirs or not is_8_bits(theirs[name]):
            continue
        values, scales = theirs[name].qdata.float(), theirs[name].scale
        scaled = weight.float() / scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
        again = scaled.round().clamp(-128, 127) if form == "int8" else scaled.to(FORMATS[form])
        ours = quantize_matrix(weight.float(), FORMATS[form], group).values
        found["values"] += weight.numel()
        found["differ"] += (ours.float() != values).sum().item()
        found["differ_at_their_scale"] += (again.float() != values).sum().item()
    return found


def table(results: list[dict]) -> dict[str, list[str]]:
    """One line per format."""
    body = [
        [
            row["format"],
            f"{row['matrix_bytes'] / 1e6:.1f} MB",
            f"{row['differ'] / row['values']:.2%}",
            f"{row['differ_at_their_scale'] / row['values']:.2%}",
            f"{row['kl']:.1e}",
        ]
        for row in results[0]["rows"]
    ]
    heads = ["torchao's weights", "matrices", "values unlike ours", "unlike ours at its scales", "KL, nats"]
    note = f"torchao {results[0]['libraries']['torchao']}"
    return {"quantized-library": [*markdown(heads, body), "", caption(results[0], note)]}
