"""The gain of each idea of stage F for one request: added in one order, and each alone.

Graphs and the megakernel both remove launches, and each hides the other's gain. So the gain of an idea depends on which
others are on, and there is no single list of shares. Two are measured: from stage E to stage F, one idea after the
other; and each idea switched off while all others are on, and on while all others are off.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.engines import select
from benchmarks.micro import with_engine
from benchmarks.timing import launches_per_step
from stage_a_naive.sampling import SamplingParams

NEEDS_GPU = True
IDEAS = {  # in the order in which they are added: what `without` calls them
    "overlap": ("overlap",),
    "graphs": ("graphs", "prefill_graphs"),
    "fused layers": ("fused_layers",),
    "skinny GEMM": ("skinny_gemm",),
    "dependent launches": ("pdl",),
    "megakernel": ("megakernel",),
}
PROMPT, TOKENS = 128, 256


def measure(model: str = "random:qwen2.5-0.5b", repeats: int = 5) -> dict:
    """Measure seconds per token, and to the first token, with each set of ideas; a set is timed once.

    Launches are counted after everything has been timed, because a profiler slows down every later launch of the
    process.
    """
    order, nothing = list(IDEAS), ()
    lines = {"stage E": ("E", nothing), "stage F, all of them off": ("F", nothing)}
    lines |= {f"+ {idea}": ("F", tuple(order[: i + 1])) for i, idea in enumerate(order)}
    alone = {}
    for idea in order:
        alone[idea, "off, all others on"] = ("F", tuple(other for other in order if other != idea))
        alone[idea, "on, all others off"] = ("F", (idea,))
    alone["none of them", "off, all others on"] = ("F", tuple(order))
    alone["none of them", "on, all others off"] = ("F", nothing)

    def run(way: tuple[str, tuple[str, ...]], work: Callable[[object], dict]) -> dict:
        engine, on = way
        off = ",".join(name for idea, names in IDEAS.items() if idea not in on for name in names)
        text = "E[max_num_seqs=8]" if engine == "E" else f"F[without={off},max_num_seqs=8]"
        [built] = select([text.replace("without=,", "")])
        found = with_engine(work, built.build, model, "cuda", "bfloat16", 2048)
        print(text, found, flush=True)
        return found

    timed = {
        way: run(way, lambda llm: time_one(llm, repeats)) for way in dict.fromkeys([*lines.values(), *alone.values()])
    }
    counted = {way: run(way, launches_per_step) for way in lines.values()}
    rows = [{"line": line, "idea": ""} | timed[way] | counted[way] for line, way in lines.items()]
    rows += [{"line": "", "idea": idea, "state": state} | timed[way] for (idea, state), way in alone.items()]
    return {"model": model, "rows": rows}


def time_one(llm: object, repeats: int) -> dict[str, list[float]]:
    """Return seconds per token after the first, and to the first, for one request at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    def metrics(first: int) -> dict:
        [output] = llm.generate([list(range(first, first + PROMPT))], params, use_tqdm=False)
        return output["metrics"]

    metrics(1)  # warm-up
    found = [metrics(200 * i) for i in range(1, 1 + repeats)]
    return {"samples": [one["tpot"] for one in found], "first": [one["ttft"] for one in found]}
