"""Constrained answers for an engine that was made without them: the part is handed to its sampler."""

from __future__ import annotations

from beyond.speculation.drafts import draft_of
from beyond.structured.constraints import Constraints
from beyond.structured.grammars import Grammars, WhenCompiled
from stage_e_batching.llm import LLM
from stage_e_batching.queues import FirstCome


def constrain(llm: LLM) -> None:
    """Let the requests of an engine of stage E or F have a form; an engine that can do that is left as it is.

    Who checks the requests is not changed: give this engine those that `check_structured_outputs` has let through.
    """
    sampler, scheduler = llm.runner.sampler, llm.engine.scheduler
    if sampler.constraints is not None:
        return
    grammars = Grammars(llm.source, llm.vocab_size)
    sampler.constraints = Constraints(grammars, llm.options.max_num_seqs, llm.device, draft_of)
    llm.engine.check = grammars.error_of
    if isinstance(scheduler.order, FirstCome):  # in another order, a form that is not compiled yet is waited for
        scheduler.order = WhenCompiled(grammars)
