"""What each idea of stage F is worth to one request: added in one order, and each by itself.

Graphs and the megakernel both remove launches, and each hides what the other is worth. So what an idea is worth depends
on what else is on, and there is no one list of shares. Two are measured: from stage E to stage F, one idea after the
other; and each idea switched off while all others are on, and on while all others are off.
"""

from __future__ import annotations

import statistics

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
    """Seconds per token with each set of ideas; a set is measured once."""
    known: dict[tuple[str, ...], dict] = {}

    def with_ideas(on: list[str], engine: str = "F") -> dict:
        off = tuple(name for idea, names in IDEAS.items() if idea not in on for name in names)
        text = f"{engine}[without={','.join(off)},max_num_seqs=8]" if off else f"{engine}[max_num_seqs=8]"
        if (engine, *off) not in known:
            [built] = select([text if engine == "F" else f"{engine}[max_num_seqs=8]"])
            found = with_engine(lambda llm: measure_one(llm, repeats), built.build, model, "cuda", "bfloat16", 2048)
            known[(engine, *off)] = found
            print(text, f"{1e3 * statistics.median(found['samples']):.3f} ms", flush=True)
        return known[(engine, *off)]

    order = list(IDEAS)
    rows = [{"line": "stage E"} | with_ideas([], "E"), {"line": "stage F, all of them off"} | with_ideas([])]
    rows += [{"line": f"+ {idea}"} | with_ideas(order[: i + 1]) for i, idea in enumerate(order)]
    for idea in order:
        others = [other for other in order if other != idea]
        rows.append({"idea": idea, "state": "off, all others on"} | with_ideas(others))
        rows.append({"idea": idea, "state": "on, all others off"} | with_ideas([idea]))
    rows.append({"idea": "none of them", "state": "off, all others on"} | with_ideas(order))
    rows.append({"idea": "none of them", "state": "on, all others off"} | with_ideas([]))
    return {"model": model, "rows": [{"line": "", "idea": ""} | row for row in rows]}


def measure_one(llm: object, repeats: int) -> dict:
    """Seconds per token after the first, and launches."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    def seconds(first: int) -> float:
        [output] = llm.generate([list(range(first, first + PROMPT))], params, use_tqdm=False)
        return output["metrics"]["tpot"]

    seconds(1)  # warm-up
    return {"samples": [seconds(200 * i) for i in range(1, 1 + repeats)]} | launches_per_step(llm)
