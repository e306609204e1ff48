"""Stage A: a Hugging Face model behind a hand-written prefill and decode loop.

Everything that all stages share is here: sampling parameters, outputs, model loading, the chat prompt, the front end
and the command line.
"""

from stage_a_naive.entrypoints.interrupts import end_at_once_if_a_command

end_at_once_if_a_command()  # before all other imports

from stage_a_naive.entrypoints.lazy import import_when_used  # noqa: E402

DEFINED_IN = {
    "LLM": "stage_a_naive.llm",
    "GenerationOutput": "stage_a_naive.contract.outputs",
    "SamplingParams": "stage_a_naive.contract.params",
}
__all__ = list(DEFINED_IN)
__getattr__ = import_when_used(__name__, DEFINED_IN)
