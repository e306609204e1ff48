"""The gain of the watermark, counted in steps and tokens, and timed.

    python -m benchmarks.micro scheduling                 # counted: the same on every machine, without a model
    python -m benchmarks.micro scheduling part=time       # seconds of an engine; `stage=f device=cuda model=…`

Counted: stage E's scheduler and engine serve 16 requests of 8 in / 60 out in a tight pool, 40 blocks of 4, with the
watermark and its doubling and without them. The model takes no time and makes up its tokens. The pictures are timelines
of the tight pool, and of a few requests on few batch slots: in static batches, in chunks and whole. *time*: the engines
take turns; on a CPU the seconds are the process's CPU time, on one thread.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.micro import chosen, one_thread, take_turns, unlike_prompt
from benchmarks.micro.batching import StaticAdmission
from benchmarks.micro.step_cost import null_calls
from benchmarks.pictures import timeline
from benchmarks.pictures.picture import Picture
from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching import LLM as StageE
from stage_e_batching import scheduler as rules
from stage_e_batching.step import BatchSequence
from stage_e_batching.trace import Trace
from stage_f_graph_tp import LLM as StageF


class NoWatermark(rules.Scheduler):
    """Admits every request that fits."""

    def watermark(self, sequence: BatchSequence) -> int:
        return 0


class NoDoubling(rules.Scheduler):
    """Uses the same watermark for returning and new sequences."""

    def watermark(self, sequence: BatchSequence) -> int:
        return self.block_manager.blocks_for(rules.WATERMARK * (self.num_running + 1)) if self.num_running else 0


BLOCK_SIZE, COUNTED = 16, ("steps", "preemptions", "recomputed_tokens")  # of the part `time`
POOLS = {"no watermark": NoWatermark, "watermark": NoDoubling, "watermark that doubles": rules.Scheduler}


def traced(
    lengths: Sequence[tuple[int, int]],
    scheduler_class: type[rules.Scheduler],
    later: int | None = None,
    **options: object,
) -> list[dict]:
    """Serve requests of these (prompt, answer) lengths; returns the record of every step.

    Args:
        later: requests from this one on arrive one by one, every third step.
        options: of the scheduler.
    """
    requests = []
    for i, (prompt, answer) in enumerate(lengths):
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        requests.append(Request(i, unlike_prompt(i, prompt), params, seed=i))
    rest = [] if later is None else requests[later:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        calls = null_calls(scheduler_class(**options), trace=Trace(path))
        for request in requests[:later]:
            calls.add_request(request, streams=False)
        while rest or calls.has_unfinished():
            if rest and calls.engine.counters.num_steps % 3 == 2:
                calls.add_request(rest.pop(0), streams=False)
            calls.step()
        return timeline.read_trace(path)


def tight_pool(scheduler_class: type[rules.Scheduler]) -> list[dict]:
    """Return the steps of 16 requests of 8 in / 60 out in 40 blocks of 4."""
    pool = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return traced([(8, 60)] * 16, scheduler_class, **pool, enable_prefix_caching=False)


def counts(records: list[dict]) -> dict[str, int]:
    """Count preemptions, and tokens that were computed again."""
    return {
        "preemptions": sum(len(record["preempted"]) for record in records),
        "recomputed": sum(record["num_recomputed"] for record in records),
    }


def measure(
    part: str = "counts",
    stage: str = "e",
    model: str = "tutor",
    device: str = "cpu",
    requests: int = 16,
    input_len: int = 64,
    output_len: int = 192,
    fit: int = 5,
    repeats: int = 5,
) -> dict:
    """One part: counts without a model, of which all samples are equal; or seconds of stage E or F.

    Args:
        fit: the pool holds this many whole requests.

    Raises:
        ValueError: there is no such part or stage.
    """
    work = {"model": model, "requests": requests, "fit": fit, "input_len": input_len, "output_len": output_len}
    return chosen({"counts": count_rules, "time": partial(time_rules, stage, device, work, repeats)}, part)()


def count_rules() -> dict:
    steps = {name: tight_pool(rule) for name, rule in POOLS.items()}
    return {
        "rows": [
            {"rule": name, **counts(records), "useful": 16 * (8 + 59), "steps": len(records)}
            for name, records in steps.items()
        ]
    }


@one_thread()
def time_rules(stage: str, device: str, work: dict, repeats: int) -> dict:
    """Measure seconds, and count steps, preemptions and tokens computed again, of every rule in turn.

    Args:
        work: the model, the requests and the pool, as `measure` takes them.
    """
    engine = chosen({"e": StageE, "f": StageF}, stage)
    requests, longest = work["requests"], work["input_len"] + work["output_len"]
    options = {"num_kvcache_blocks": work["fit"] * -(-longest // BLOCK_SIZE), "kvcache_block_size": BLOCK_SIZE}
    options |= {"max_num_seqs": requests, "max_model_len": longest, "enable_prefix_caching": False, "device": device}
    llms = {name: engine(work["model"], **options) for name in POOLS}
    for name, llm in llms.items():
        llm.engine.scheduler = llm._scheduler(POOLS[name])
    prompts = [unlike_prompt(i, work["input_len"]) for i in range(requests)]
    params = SamplingParams(temperature=0.0, max_tokens=work["output_len"], ignore_eos=True)

    def run(name: str) -> dict[str, float]:
        llm = llms[name]
        clock = time.process_time if llm.device.type == "cpu" else time.perf_counter
        before, start = llm.calls.stats(), clock()
        llm.generate(prompts, params, use_tqdm=False)
        seconds, after = clock() - start, llm.calls.stats()
        return {"seconds": seconds} | {key: after[f"num_{key}"] - before[f"num_{key}"] for key in COUNTED}

    found = take_turns(run, llms, repeats)
    rows = [
        {"rule": name, **{key: runs[-1][key] for key in COUNTED}, "samples": [one["seconds"] for one in runs]}
        for name, runs in found.items()
    ]
    return {"part": "time", "stage": stage.upper(), **work, "rows": rows}


def draw(results: list[dict]) -> dict[str, Picture]:
    """Draw the timelines; they are counted again, because they need every step."""
    found = {"timeline": draw_chunks(True), "timeline_whole": draw_chunks(False), "static": draw_static()}
    return {f"stage_e_batching/{name}.svg": own for name, own in (found | {"watermark": draw_watermark()}).items()}


def draw_chunks(chunked: bool) -> Picture:
    """Draw a long prompt that arrives while others decode: in chunks, or whole in a separate step."""
    lengths = [(12, 40), (30, 9), (8, 25), (20, 12), (10, 33), (16, 6), (90, 14), (9, 18), (24, 10), (70, 8), (12, 20)]
    title, tokens = "Whole prompts in steps of their own: every decode waits for them", 96
    if chunked:
        title, tokens = "Prompts in chunks of at most 24 tokens per step: decodes go on beside them", 24
    pool = {"num_blocks": 44, "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": tokens}
    records = traced(lengths, rules.Scheduler, later=5, **pool, enable_chunked_prefill=chunked)
    return timeline.draw(records, title)


def draw_static() -> Picture:
    """Sixteen requests on four batch slots, in static batches and continuously."""
    lengths = [(8, answer) for answer in (12, 40, 8, 20, 30, 6, 16, 10, 36, 14, 8, 22, 18, 9, 28, 11)]
    pool = {"num_blocks": 100, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    static, continuous = (traced(lengths, rule, **pool) for rule in (StaticAdmission, rules.Scheduler))
    steps = f"{len(continuous)} steps instead of {len(static)}"
    title = f"Continuous batching finishes the same {len(lengths)} requests in {steps}"
    runs = {"static batches": timeline.with_padding(static), "continuous batching": continuous}
    return timeline.draw_panels(runs, title)


def draw_watermark() -> Picture:
    """The tight pool without a watermark and with the scheduler's own."""
    runs = {}
    for name in ("no watermark", "watermark that doubles"):
        records = tight_pool(POOLS[name])
        heading = "{preemptions} preemptions, {recomputed:,} tokens recomputed".format(**counts(records))
        runs[f"{name}: {heading}"] = records
    title = "The watermark holds requests back (grey) instead of admitting and preempting them"
    return timeline.draw_panels(runs, title)
