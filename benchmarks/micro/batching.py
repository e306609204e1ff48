"""The gain of continuous batching alone: the same requests, fewer batch slots than requests, one change per row.

*D* is stage D: a static batch, padding rows for requests that have ended, tokens sampled row by row. *E, static
admission* is stage E, admitting requests only when all of the last batch have ended: no padding, and the whole batch is
sampled at once. *E* differs from it in the rule of admission alone. Each row runs greedily and at a temperature. On a
CPU the seconds are the process's CPU time, on one thread.
"""

from __future__ import annotations

import time
from itertools import product

from benchmarks.micro import one_thread, take_turns
from benchmarks.workloads import Call, make_workload
from stage_a_naive.contract.params import SamplingParams
from stage_d_paged import LLM as StageD
from stage_e_batching import LLM as StageE
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import ScheduledStep

TEMPERATURES, HOW = (0.0, 0.6), {0.0: "greedy", 0.6: "temperature 0.6"}
ABOVE = {"E, static admission": "D", "E": "E, static admission"}


class StaticAdmission(Scheduler):
    """Admits as many requests as there are batch slots, and the next ones only when all of these have ended."""

    num_admitted = 0

    def _admit(self, step: ScheduledStep, budget: int) -> None:
        if not self.num_running:
            self.num_admitted = 0
        if self.num_admitted < self.max_num_seqs:
            super()._admit(step, budget)
            self.num_admitted += len(step.admitted)


class StaticStageE(StageE):
    """Stage E with one rule changed."""

    def _scheduler(self) -> Scheduler:
        return super()._scheduler(StaticAdmission)


ENGINES = {"D": StageD, "E, static admission": StaticStageE, "E": StageE}


@one_thread()
def measure(model: str = "tutor", device: str = "cpu", size: str = "cpu", slots: int = 16, repeats: int = 5) -> dict:
    """Measure seconds, steps and rows of every engine at every temperature; the engines take turns."""
    workload = make_workload("mixed", size)
    [call] = workload.rounds[0]
    blocks = slots * -(-workload.longest // 16)  # only as many as needed: three engines share the memory
    options = {"max_num_seqs": slots, "enable_prefix_caching": False, "num_kvcache_blocks": blocks}
    llms = {name: engine(model, device=device, **options) for name, engine in ENGINES.items()}
    found = take_turns(lambda way: run(llms[way[0]], call, way[1]), product(ENGINES, TEMPERATURES), repeats)
    rows = []
    for (name, temperature), runs in found.items():
        samples = {"samples": [one.pop("seconds") for one in runs]}
        rows.append({"engine": name, "temperature": temperature} | runs[-1] | samples)
    work = {"workload": workload.description, "tokens": call.output_tokens, "slots": slots}
    return {"model": model, **work, "rows": rows}


def run(llm: StageD | StageE, call: Call, temperature: float) -> dict[str, float]:
    """Return the seconds of a call of `generate`, its model steps, and the rows that these computed."""
    steps: list[int] = []
    params = [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in call.max_tokens]
    clock = time.process_time if llm.device.type == "cpu" else time.perf_counter
    with llm.runtime.model.register_forward_hook(lambda _, arguments, __: steps.append(len(arguments[0]))):
        start = clock()
        llm.generate([list(prompt) for prompt in call.prompts], params, use_tqdm=False)
        seconds = clock() - start  # the tokens are on the host: the device has finished
    return {"seconds": seconds, "steps": len(steps), "computed_rows": sum(steps)}
