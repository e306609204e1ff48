"""Default sampling parameters: those that the model's authors recommend, as in vLLM.

A model's directory may hold a `generation_config.json`. Qwen2.5's, for example, recommends temperature 0.7, top_p 0.8,
top_k 20 and repetition_penalty 1.05. The server applies them to every field that a request leaves out, and vLLM does so
too (`--generation-config auto`): a client that sends no temperature gets the same distribution from both. The field
`do_sample` is ignored, as in vLLM: only temperature 0 is greedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stage_a_naive.checkpoints.model_config import read_json_object
from stage_a_naive.contract.errors import ModelError
from stage_a_naive.contract.params import SamplingParams

if TYPE_CHECKING:
    from stage_a_naive.checkpoints.loading import ModelSource

FILE = "generation_config.json"
FIELDS = {  # of the file -> of `SamplingParams`
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(source: ModelSource, generation_config: str) -> dict[str, float]:
    """Read the sampling parameters that a model's `generation_config.json` recommends.

    Args:
        source: the model.
        generation_config: `auto` reads the file, `vllm` does not.

    Returns:
        Values by their names in `SamplingParams`; empty without a file, and for random weights.

    Raises:
        ModelError: the file is not JSON, or a value is out of range; the message names the file and the field.
    """
    if generation_config == "vllm" or source.path is None:
        return {}
    file = source.path / FILE
    recommended = read_json_object(file) if file.is_file() else {}
    defaults: dict[str, float] = {}
    for name, field in FIELDS.items():
        value = recommended.get(name)
        if value is None:
            continue
        try:
            defaults[field] = getattr(SamplingParams(**{field: keep_all_if_negative(field, value)}), field)
        except ValueError as error:
            _, _, rest = str(error).partition(" ")  # its first word is the field
            raise ModelError(f"{file}: {name} {rest}; correct it, or start with --generation-config vllm") from None
    return defaults


def keep_all_if_negative(field: str, value: Any) -> Any:
    """Return a parameter's value, with vLLM's other way to turn top-k off, -1, replaced by ours, 0."""
    return 0 if field == "top_k" and value == -1 else value


def in_words(defaults: Mapping[str, float]) -> str:
    """Format the defaults in one line."""
    if not defaults:
        return "temperature 1, no filter, no penalty"
    values = ", ".join(f"{name} {value}" for name, value in defaults.items())
    return f"{values} (the model's {FILE})"
