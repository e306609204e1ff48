"""What n answers to one prompt cost without sharing and with the prefix cache: tokens computed and blocks; counted.

Nothing is timed. Stage E's engine gets the same prompt n times at once, as the server does for `"n": 4`, and runs until
every answer has two tokens: the second one is computed from the first, so each answer has written into a block of its
own. Then the blocks in use and the prompt tokens that the model ran are counted.
"""

from __future__ import annotations

from benchmarks.text import markdown
from stage_a_naive.params import SamplingParams
from stage_e_batching import LLM

README, MARKERS = "beyond/serving", ("several-answers",)
BLOCK_SIZE = 16


def measure(
    prompt_lens: tuple[int, ...] = (40, 1000), answers: tuple[int, ...] = (1, 4, 8), model: str = "tutor"
) -> dict:
    """Count for each length of prompt and each number of answers, without the prefix cache and with it."""
    rows = []
    for enabled in (False, True):
        llm = LLM(
            model, device="cpu", enable_prefix_caching=enabled, max_num_seqs=max(answers), max_model_len=2048,
            kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=max(answers) * 128,
        )  # fmt: skip
        for number, (length, n) in enumerate((length, n) for length in prompt_lens for n in answers):
            prompt = [10 + number] + [10 + i % 1000 for i in range(length - 1)]  # no case finds another's blocks
            case = {"prompt_tokens": length, "answers": n, "prefix_cache": enabled}
            rows.append(case | count(llm, prompt, n))
        llm.close()
    return {"block_size": BLOCK_SIZE, "rows": rows}


def count(llm: LLM, prompt: list[int], n: int) -> dict[str, int]:
    """Prompt tokens that the model runs for n answers, and blocks in use when each of them has two tokens."""
    before = llm.engine.stats()["num_prefill_tokens"]
    for _ in range(n):
        llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    llm.step()  # all prompts, and a token each
    llm.step()
    stats = llm.engine.stats()
    llm.step()
    return {"tokens": stats["num_prefill_tokens"] - before, "blocks": stats["num_used_blocks"]}


def table(results: list[dict]) -> dict[str, list[str]]:
    result = results[0]
    cases: dict[tuple[int, int], dict[bool, dict]] = {}
    for row in result["rows"]:
        cases.setdefault((row["prompt_tokens"], row["answers"]), {})[row["prefix_cache"]] = row
    body = [
        [f"{length:,} tokens", n, *(f"{found[on]['tokens']:,} / {found[on]['blocks']}" for on in (False, True))]
        for (length, n), found in cases.items()
    ]
    columns = ["prompt", "answers", "no sharing: tokens computed / blocks", "prefix cache: tokens computed / blocks"]
    size = result["block_size"]
    below = f"Prompt tokens that the model ran, and blocks of {size} in use when every answer has two tokens"
    command = "counted by `python -m benchmarks.micro several_answers`."
    commit = result["environment"]["commit"][:10]
    return {"several-answers": [*markdown(columns, body), "", f"{below}; commit {commit}; {command}"]}
