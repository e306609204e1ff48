"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass

from stage_e_batching.step import ScheduledStep


@dataclass
class Counters:
    """Totals since the engine was made."""

    num_steps: int = 0
    # Prompt tokens computed (those out of the prefix cache are not), and one for each return from a preemption: the
    # token that was sampled last before it, which runs for the first time then.
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0  # of the requests that were admitted
    num_cached_tokens: int = 0  # of these, those that the prefix cache had
    num_recomputed_tokens: int = 0  # tokens computed again after a preemption
    num_preemptions: int = 0
    num_finished: int = 0
    num_aborted: int = 0  # those that failed are among them

    @property
    def num_run_prefill_tokens(self) -> int:
        """Those computed for the first time and those computed again."""
        return self.num_prefill_tokens + self.num_recomputed_tokens

    def count_step(self, step: ScheduledStep) -> None:
        """Count a step that has run."""
        self.num_steps += len(step) > 0
        self.num_prefill_tokens += step.total_tokens - step.num_decodes - step.num_recomputed
        self.num_recomputed_tokens += step.num_recomputed
        self.num_preemptions += len(step.preempted)

    def count_admitted(self, step: ScheduledStep) -> None:
        """Count the prompts that a step begins. Later they may have been preempted, and be longer."""
        for sequence in step.admitted:
            if sequence.is_new:
                self.num_prompt_tokens += sequence.num_prompt_tokens
                self.num_cached_tokens += sequence.num_cached_tokens
