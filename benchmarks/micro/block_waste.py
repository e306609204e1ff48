"""How much KV memory stays empty, by block size; counted.

Nothing is timed and no model runs. The requests of `mixed` are admitted together, each grows by one token per step and
frees its memory when it is done; at every step the slots of their blocks are counted. A contiguous reservation is
a block of the longest request, or of `max_model_len` if the lengths are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.workloads import make_workload

BLOCK_SIZES = [16, 64, 256]
RESERVATIONS = [2048, 4096]  # the workload's longest request, and the engines' default of `max_model_len`


def slots_held(lengths: Iterable[int], block_size: int) -> int:
    """Count the slots in the blocks that sequences of these lengths hold."""
    return sum(-(-length // block_size) * block_size for length in lengths)


def measure(size: str = "gpu") -> dict:
    """Count the slots held and the tokens in them, summed over all steps, for every block size."""
    workload = make_workload("mixed", size)
    [call] = workload.rounds[0]
    held = dict.fromkeys([*BLOCK_SIZES, *RESERVATIONS], 0)
    tokens = 0
    for step in range(max(call.max_tokens)):
        requests = zip(call.prompts, call.max_tokens, strict=True)
        lengths = [len(prompt) + step for prompt, most in requests if step < most]
        tokens += sum(lengths)
        for block_size in held:
            held[block_size] += slots_held(lengths, block_size)
    rows = [{"block_size": block_size, "slots": slots, "tokens": tokens} for block_size, slots in held.items()]
    return {"workload": workload.description, "hash": workload.hash, "rows": rows}
