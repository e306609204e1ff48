"""How much KV memory stays empty, by block size, and how many tokens the prefix cache saves; counted.

Nothing is timed and no model runs. *Empty memory*: the requests of `mixed` are admitted together, each grows by one
token per step and gives its memory back when it is done; at every step the slots of their blocks are counted. A
contiguous reservation is a block of `max_model_len`. *Prefix cache*: stage D's block manager admits the prompts of the
`prefix` workload together, with and without it.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.text import markdown
from benchmarks.workloads import make_workload
from stage_a_naive import SamplingParams
from stage_a_naive.outputs import Completion, Request
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.sequence import Sequence

README, MARKERS = "stage_d_paged", ("page-waste", "prefix-tokens")
PREFIX_BLOCK = 64
BLOCK_SIZES = [16, 64, 256]
MAX_MODEL_LEN = 4096  # the engine's default


def computed(manager: BlockManager, token_ids: Iterable[int]) -> Sequence:
    """A sequence with blocks for these tokens, as if a step had computed all of them."""
    request = Request(0, list(token_ids), SamplingParams(), seed=0)
    sequence = Sequence(Completion(request, None, frozenset(), 4096, text_at_end=True))
    if not manager.allocate(sequence, len(sequence)):
        raise ValueError(f"{len(sequence)} tokens do not fit: {manager.num_free} blocks are free")
    sequence.num_computed_tokens = len(sequence)
    manager.index_computed(sequence)
    return sequence


def slots_held(lengths: Iterable[int], block_size: int) -> int:
    """Count the slots in the blocks that sequences of these lengths hold."""
    return sum(-(-length // block_size) * block_size for length in lengths)


def measure(size: str = "gpu") -> dict:
    """Slots held and tokens in them, summed over all steps, for every block size."""
    workload = make_workload("mixed", size)
    [call] = workload.rounds[0]
    held = dict.fromkeys([*BLOCK_SIZES, MAX_MODEL_LEN], 0)
    tokens = 0
    for step in range(max(call.max_tokens)):
        requests = zip(call.prompts, call.max_tokens, strict=True)
        lengths = [len(prompt) + step for prompt, most in requests if step < most]
        tokens += sum(lengths)
        for block_size in held:
            held[block_size] += slots_held(lengths, block_size)
    rows = [{"block_size": block_size, "slots": slots, "tokens": tokens} for block_size, slots in held.items()]
    return {"workload": workload.description, "hash": workload.hash, "rows": rows, "prefix": prefix_tokens(size)}


def prefix_tokens(size: str) -> dict[str, int]:
    """Prompt tokens of the `prefix` workload that the model runs, without the prefix cache and with it."""
    [call] = make_workload("prefix", size).rounds[0]
    found = {"requests": len(call.prompts), "blocks of": PREFIX_BLOCK}
    for name, enabled in (("without", False), ("with", True)):
        manager = BlockManager(call.prompt_tokens // PREFIX_BLOCK + len(call.prompts), PREFIX_BLOCK, enabled)
        found[name] = call.prompt_tokens - sum(computed(manager, prompt).num_cached_tokens for prompt in call.prompts)
    return found


def named_waste(result: dict) -> dict[str, float]:
    """Share of the held slots that is empty, by the block size in words."""
    names = {MAX_MODEL_LEN: f"{MAX_MODEL_LEN} (contiguous)"}
    return {names.get(r["block_size"], str(r["block_size"])): 1 - r["tokens"] / r["slots"] for r in result["rows"]}


def table(results: list[dict]) -> dict[str, list[str]]:
    result = results[0]
    prefix, command = result["prefix"], "counted by `python -m benchmarks.micro block_waste`."
    shares = ", ".join(f"{name}: {share:.1%}" for name, share in named_waste(result).items())
    saved = markdown(
        [f"{prefix['requests']} prompts", "without prefix cache", "with it"],
        [["tokens that the model runs", f"{prefix['without']:,}", f"{prefix['with']:,}"]],
    )
    work = f"Empty with blocks of {shares}. {result['workload']}, all admitted together; {command}"
    return {
        "prefix-tokens": [*saved, "", f"Admitted together, blocks of {prefix['blocks of']} tokens; {command}"],
        "page-waste": [work],
    }
