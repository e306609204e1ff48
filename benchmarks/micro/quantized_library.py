"""Our 8-bit weights beside those of two libraries, torchao and bitsandbytes: integers, quality, bytes.

Every linear layer of the tutor is quantised by us and by the library. Compared are the stored values, which may differ
where a number is halfway between two, and what `quantized_quality` compares, in our engine and in the transformers
model with the library's layers. bitsandbytes is LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339).
"""

from __future__ import annotations

import json
import logging
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from benchmarks.micro import caption
from benchmarks.micro.quantized_quality import Text, compare, load, logits_of, matrix_bytes, read_texts, score
from benchmarks.text import markdown
from beyond.quantization.formats import FORMATS, Quantized, quantize_matrix
from stage_a_naive.tutor import TUTOR_PATH

if TYPE_CHECKING:
    from transformers import PreTrainedModel

README, MARKERS = "beyond/quantization", ("quantized-library",)
FORMAT_OF = {"int8": ("int8", None), "int8 / 128": ("int8", 128), "fp8": ("fp8", None)}  # name, group size
LIBRARIES = {"torchao": tuple(FORMAT_OF), "bitsandbytes": ("int8",)}


def measure() -> dict:
    """The tutor's weights in each format, by us and by each library that has it.

    Raises:
        ValueError: a library is not installed.
    """
    try:
        versions = {name: version(name) for name in LIBRARIES}
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}; pip install -c constraints.txt -e .[compare]") from error
    texts, rows = read_texts(), []
    reference = [logits_of(load("tutor", "cpu", "auto", {}), text) for text in texts]

    def add(by: str, num_bytes: int, logits: list[Tensor], values: dict[str, int]) -> None:
        rows.append({"format": name, "by": by, "matrix_bytes": num_bytes, **values})
        rows[-1] |= compare(reference, logits) | score(texts, logits)
        print(json.dumps(rows[-1]), flush=True)

    for name, (form, group) in FORMAT_OF.items():
        runtime = load("tutor", "cpu", "auto", {"quantization": form, "quantization_group_size": group})
        add("ours", matrix_bytes(runtime), [logits_of(runtime, text) for text in texts], {})
        for library in (library for library, formats in LIBRARIES.items() if name in formats):
            model = library_model(library, form, group)
            theirs = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
            num_bytes, values = sum(map(stored_bytes, theirs.values())), compare_values(theirs, form, group)
            # Only now the logits: they make bitsandbytes move its scales elsewhere.
            add(library, num_bytes, [transformers_logits(model, text) for text in texts], values)
    return {"rows": rows, "libraries": versions}


def library_model(library: str, form: str, group: int | None) -> PreTrainedModel:
    """The tutor as a transformers model, in float32, whose layers the library has quantised."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32)
    if library == "torchao":
        import torchao.quantization as ao

        int8 = ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(group) if group else ao.PerRow())
        ao.quantize_(model.model, int8 if form == "int8" else ao.Float8WeightOnlyConfig())
        return model.eval()
    import bitsandbytes

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns once per product
    for parent in list(model.model.modules()):
        for name, linear in list(parent.named_children()):
            if isinstance(linear, nn.Linear):
                made = bitsandbytes.nn.Linear8bitLt(
                    linear.in_features, linear.out_features, bias=linear.bias is not None, has_fp16_weights=False
                )
                made.load_state_dict(linear.state_dict())
                setattr(parent, name, made.to("cpu"))  # moving it quantises the weights
    return model.eval()  # in training bitsandbytes multiplies dequantised weights


@torch.inference_mode()
def transformers_logits(model: PreTrainedModel, text: Text) -> Tensor:
    """The logits before each token of the answer, float32 `[answer tokens, vocab]`."""
    return model(torch.tensor([text.ids[:-1]])).logits[0, text.first - 1 :].float()


def stored(weight: Tensor) -> Quantized | None:
    """A library's 8-bit matrix as ours; None if it is not in 8 bits."""
    if hasattr(weight, "qdata"):  # torchao
        return Quantized(weight.qdata, weight.scale)
    if getattr(weight, "SCB", None) is not None:  # bitsandbytes: the largest number of each row
        return Quantized(weight.data, weight.SCB[:, None] / 127)
    return None


def stored_bytes(weight: Tensor) -> int:
    return sum(part.nbytes for part in stored(weight) or [weight])


def compare_values(theirs: dict[str, Tensor], form: str, group: int | None) -> dict[str, int]:
    """How many stored values are not ours, before and after ours are made with the library's scales."""
    from safetensors.torch import load_file

    found = dict.fromkeys(("values", "differ", "differ_at_their_scale"), 0)
    for name, weight in load_file(TUTOR_PATH / "model.safetensors").items():
        library = stored(theirs[name]) if name in theirs else None
        if library is None:
            continue
        scaled = weight.float() / library.scales.repeat_interleave(weight.shape[1] // library.scales.shape[1], 1)
        again = scaled.round().clamp(-128, 127) if form == "int8" else scaled.to(FORMATS[form])
        ours = quantize_matrix(weight.float(), FORMATS[form], group).values
        found["values"] += weight.numel()
        found["differ"] += (ours.float() != library.values.float()).sum().item()
        found["differ_at_their_scale"] += (again.float() != library.values.float()).sum().item()
    return found


def table(results: list[dict]) -> dict[str, list[str]]:
    """One line per format and library."""
    body = []
    for row in results[0]["rows"]:
        shares = [row[key] / row["values"] for key in ("differ", "differ_at_their_scale") if key in row]
        unlike = "{:.2%} ({:.2%})".format(*shares) if shares else "–"
        body.append([f"{row['format']}, {row['by']}", f"{row['matrix_bytes'] / 1e6:.1f} MB", unlike, f"{row['kl']:.1e}",
                     f"{row['exact']:.1%}, {row['unseen']:.1%}"])  # fmt: skip
    heads = ["weights", "matrices", "values unlike ours", "KL, nats", "answers exact, unseen wordings"]
    versions = ", ".join(f"{name} {number}" for name, number in results[0]["libraries"].items())
    note = f"{versions}; in brackets: unlike ours made with the library's scales"
    return {"quantized-library": [*markdown(heads, body), "", caption(results[0], note)]}
