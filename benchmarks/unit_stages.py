"""Pipeline stages that take one unit of time per step: the real scheduler and engine, counted instead of timed."""

from __future__ import annotations

from typing import Any

from beyond.scale_out.micro_batches import MicroBatches
from beyond.scale_out.pipeline_scheduler import PipelineScheduler
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.calls import Calls
from stage_e_batching.engine import Engine
from stage_e_batching.parts import Sampled
from stage_e_batching.step import ScheduledStep


class UnitStages:
    """Stages that take one unit of simulated time per step. The tokens are made up."""

    def __init__(self, num_stages: int) -> None:
        self.now = 0.0
        self.free = [0.0] * num_stages  # when each stage has finished its work
        self.spans: list[list[dict[str, Any]]] = [[] for _ in range(num_stages)]

    def launch(self, step: ScheduledStep) -> UnitStep:
        arrived = self.now
        for stage, spans in enumerate(self.spans):
            start = max(arrived, self.free[stage])
            arrived = self.free[stage] = start + 1
            spans.append({"step": len(spans), "work": "layers", "start": start, "end": arrived})
        return UnitStep(self, arrived, Sampled([1] * sum(step.samples)))

    def forget(self) -> None:
        """Forget when each stage is busy."""
        self.free = [self.now] * len(self.free)


class UnitStep:
    """A step on its way through `UnitStages`."""

    def __init__(self, stages: UnitStages, arrives: float, sampled: Sampled) -> None:
        self.stages, self.arrives, self.sampled = stages, arrives, sampled

    def sample(self) -> UnitStep:
        if self.sampled.token_ids:
            self.stages.now = max(self.stages.now, self.arrives)
        return self

    def wait(self) -> Sampled:
        return self.sampled


def counted_spans(work: str, batches: int, stages: int) -> list[list[dict[str, Any]]]:
    """Count when each of `UnitStages` is busy: many requests that decode, or one prompt in `batches` chunks."""
    decode = work == "decode"
    requests, prompt, answer = (8, 1, 64) if decode else (1, 8 * batches, 1)
    scheduler = PipelineScheduler(
        num_micro_batches=batches, num_blocks=400, block_size=8, max_num_seqs=8, max_num_batched_tokens=8
    )
    runner, tokenizer = UnitStages(stages), load_tokenizer(resolve("tutor"))
    engine = Engine(scheduler, runner, depth=MicroBatches(scheduler).next_depth)
    calls = Calls(engine, tokenizer=tokenizer, eos_token_ids=frozenset(), max_model_len=4096)
    for i in range(requests):
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        calls.add_request(Request(i, [(i + j) % 4000 + 1 for j in range(prompt)], params, seed=i), streams=False)
    while calls.has_unfinished():
        calls.step()
    return [[span | {"batch": span["step"] % batches} for span in spans] for spans in runner.spans]
