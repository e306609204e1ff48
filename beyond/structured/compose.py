"""Add structured output to an engine of stage E or F."""

from __future__ import annotations

from beyond.speculation.drafts import draft_of
from beyond.structured.constraints import Constraints
from beyond.structured.grammars import Grammars, WhenCompiled
from stage_e_batching.llm import LLM
from stage_e_batching.queues import FirstCome


def constrain(llm: LLM) -> None:
    """Enable structured output in an engine of stage E or F; a no-op if it is enabled already.

    The engine does not validate requests itself: pass them through `check_structured_outputs` first.
    """
    sampler, scheduler = llm.runner.sampler, llm.engine.scheduler
    if sampler.constraints is not None:
        return
    grammars = Grammars(llm.source, llm.vocab_size)
    sampler.constraints = Constraints(grammars, llm.options.max_num_seqs, llm.device, draft_of)
    llm.engine.check = grammars.error_of
    if isinstance(scheduler.order, FirstCome):  # with any other, a step waits for the compilation
        scheduler.order = WhenCompiled(grammars)
