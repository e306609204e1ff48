"""Our 8-bit weights beside those of two libraries, torchao and bitsandbytes: integers, quality, bytes.

Every linear layer of the tutor is quantised by us and by the library. Compared are the stored values, which may differ
where a number is halfway between two, and what the quality study compares: each answer of the FAQ run in one forward
pass, in our engine and, for a library, in the transformers model with the library's layers.

    torchao        weights alone in 8 bits, as here. Its int8 scale is max |w| / 127.5 and its values begin at -128
    bitsandbytes   LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339). Its scale is ours, max |w| / 127. It multiplies
                   integers, so the inputs of every layer are quantised too
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
    texts = read_texts()
    reference = [logits_of(load("tutor", "cpu", "auto", {}), text) for text in texts]
    rows = []
    for name, (form, group) in FORMAT_OF.items():
        runtime = load("tutor", "cpu", "auto", {"quantization": form, "quantization_group_size": group})
        rows.append({"format": name, "by": "ours", "matrix_bytes": matrix_bytes(runtime)})
        rows[-1] |= judge(texts, reference, [logits_of(runtime, text) for text in texts])
        for library in (library for library, formats in LIBRARIES.items() if name in formats):
            model = library_model(library, form, group)
            bytes_stored = sum(map(stored_bytes, matrices(model).values()))
            rows.append({"format": name, "by": library, "matrix_bytes": bytes_stored})
            rows[-1] |= compare_values(matrices(model), form, group)  # before bitsandbytes moves its scales elsewhere
            rows[-1] |= judge(texts, reference, [transformers_logits(model, text) for text in texts])
        print(*(json.dumps(row) for row in rows if row["format"] == name), sep="\n", flush=True)
    return {"rows": rows, "libraries": versions}


def judge(texts: list[Text], reference: list[Tensor], logits: list[Tensor]) -> dict[str, float]:
    return compare(reference, logits) | score(texts, logits)


def library_model(library: str, form: str, group: int | None) -> PreTrainedModel:
    """The tutor as a transformers model, in float32, whose layers the library has quantised."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32)
    if library == "torchao":
        import torchao.quantization as library_of

        int8 = library_of.Int8WeightOnlyConfig(
            granularity=library_of.PerGroup(group) if group else library_of.PerRow()
        )
        library_of.quantize_(model.model, int8 if form == "int8" else library_of.Float8WeightOnlyConfig())
    else:
        import bitsandbytes as library_of

        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns once per product
        for parent in list(model.model.modules()):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(parent, name, eight_bit_linear(library_of, linear))
    return model.eval()  # in training bitsandbytes multiplies dequantised weights


def eight_bit_linear(bitsandbytes: object, linear: nn.Linear) -> nn.Module:
    """bitsandbytes' `Linear8bitLt` with the layer's weights; they are quantised when it is moved to a device."""
    made = bitsandbytes.nn.Linear8bitLt(
        linear.in_features, linear.out_features, bias=linear.bias is not None, has_fp16_weights=False
    )
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")


@torch.inference_mode()
def transformers_logits(model: PreTrainedModel, text: Text) -> Tensor:
    """The logits before each token of the answer, float32 `[answer tokens, vocab]`."""
    return model(torch.tensor([text.ids[:-1]])).logits[0, text.first - 1 :].float()


def matrices(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every matrix of the model by its name in the checkpoint; a tied one once."""
    return {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}


def stored(weight: Tensor) -> Quantized | None:
    """A library's 8-bit matrix as ours; None if it is not in 8 bits."""
    if hasattr(weight, "qdata"):  # torchao
        return Quantized(weight.qdata, weight.scale)
    if getattr(weight, "SCB", None) is not None:  # bitsandbytes: the largest number of each row
        return Quantized(weight.data, weight.SCB[:, None] / 127)
    return None


def stored_bytes(weight: Tensor) -> int:
    return sum(part.nbytes for part in stored(weight) or [weight])


def compare_values(theirs: dict[str, Tensor], form: str, group: int | None) -> dict[str, float]:
    """How many stored values are not ours, before and after ours are made with the library's scales."""
    from safetensors.torch import load_file

    count = differ = at_their_scale = 0
    largest, ratio = 0.0, 1.0
    for name, weight in load_file(TUTOR_PATH / "model.safetensors").items():
        library = stored(theirs[name]) if name in theirs else None
        if library is None:
            continue
        ours = quantize_matrix(weight.float(), FORMATS[form], group)
        scales = library.scales.repeat_interleave(weight.shape[1] // library.scales.shape[1], 1)
        scaled = weight.float() / scales
        again = scaled.round().clamp(-128, 127) if form == "int8" else scaled.to(FORMATS[form])
        count += weight.numel()
        differ += (ours.values.float() != library.values.float()).sum().item()
        at_their_scale += (again.float() != library.values.float()).sum().item()
        largest = max(largest, (ours.values.float() - library.values.float()).abs().max().item())
        ratio = (library.scales / ours.scales).mean().item()
    return {"values": count, "differ": differ, "differ_at_their_scale": at_their_scale, "largest_difference": largest,
            "scale_ratio": ratio}  # fmt: skip


def table(results: list[dict]) -> dict[str, list[str]]:
    """One line per format and library."""
    result = results[0]
    head = ["weights", "matrices", "values unlike ours", "KL, nats", "answers exact, unseen wordings"]
    body = [
        [f"{row['format']}, {row['by']}", f"{row['matrix_bytes'] / 1e6:.1f} MB", unlike(row), f"{row['kl']:.1e}",
         f"{row['exact']:.1%}, {row['unseen']:.1%}"]
        for row in result["rows"]
    ]  # fmt: skip
    versions = ", ".join(f"{name} {number}" for name, number in result["libraries"].items())
    note = f"{versions}; in brackets: unlike ours made with the library's scales"
    return {"quantized-library": [*markdown(head, body), "", caption(result, note)]}


def unlike(row: dict) -> str:
    if "values" not in row:
        return "–"
    return f"{row['differ'] / row['values']:.2%} ({row['differ_at_their_scale'] / row['values']:.2%})"
