"""How long a measurement will take: counted from its work and the pace that the parity gate saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engines import Engine
from benchmarks.workloads import Workload

SHORT_TOKENS = 5  # of the short run that tells a workload's pace
SHORT_REQUESTS = 2  # of the short run of an engine that serves one request after another


@dataclass(frozen=True)
class Pace:
    """Seconds that an engine takes to be built, per prompt token, and per decode step."""

    build: float
    prompt_token: float
    step: float

    @staticmethod
    def of(build: float, seconds: float, outputs: Sequence[dict]) -> Pace:
        """From a call of `generate` that took `seconds`; exact where the engine tells its times."""
        metrics = [output["metrics"] for output in outputs if "metrics" in output]
        if not metrics:
            return Pace(build, 0.0, seconds / max(len(output["token_ids"]) for output in outputs))
        prompt_token = min(m["prefill_time"] / m["num_prompt_tokens"] for m in metrics)
        return Pace(build, prompt_token, min(m["tpot"] for m in metrics))

    def seconds(self, engine: Engine, workload: Workload, round_seconds: float, max_seconds: float) -> float:
        """Of a workload in one process: the short runs, the warm-up and the timed rounds of `measure.run_workload`."""
        calls = workload.rounds[0]
        once = sum(c.prompt_tokens * self.prompt_token + c.steps(engine.one_at_a_time) * self.step for c in calls)
        short = 2 * sum(
            (min(len(c.prompts), SHORT_REQUESTS) / len(c.prompts) if engine.one_at_a_time else 1)
            * c.prompt_tokens * self.prompt_token + SHORT_TOKENS * self.step
            for c in calls
        )  # fmt: skip
        if once > max_seconds:
            return short
        warm_up = once if workload.name == "single" or once <= round_seconds else 0.0
        return short + warm_up + once * min(len(workload.rounds), 1 + int(round_seconds / once))
