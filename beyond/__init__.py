"""What production engines add on top of the six stages; each folder is a lesson, and `LLM` has all of it."""

from pkgutil import extend_path

from stage_a_naive.entrypoints.lazy import import_when_used

__path__ = extend_path(__path__, __name__)  # a learner's copy holds one folder, the rest is here

DEFINED_IN = {
    "LLM": "beyond.engine",
    "GenerationOutput": "stage_a_naive.contract.outputs",
    "SamplingParams": "stage_a_naive.contract.params",
}
__getattr__ = import_when_used(__name__, DEFINED_IN)
