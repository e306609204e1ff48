"""The floor of a whole answer: the least time in which its decode steps can read all weights and a growing cache.

`stage_a_naive/floor.py` counts what one step reads. `python -m labs.variants.floors` adds up an answer's steps, for the
shape of Qwen2.5-0.5B in bfloat16 and the memory of an H200: a long answer takes longer than its share of tokens.
"""

WEIGHT_BYTES, KV_BYTES, BANDWIDTH = 988_000_000, 12_288, 4.2e12  # about: all weights, a token's KV, bytes per second


def answer_floor(weight_bytes: int, kv_bytes: int, num_prompt: int, num_generated: int, bandwidth: float) -> float:
    """Return the least seconds of an answer's decode steps; the prefill makes the first token.

    A step reads all weights once, and the keys and values of every token up to and including the one that it runs.

    Args:
        weight_bytes: of all weights.
        kv_bytes: of the keys and values of one token, in all layers.
        num_prompt, num_generated: tokens of the prompt and of the answer, at least one of each.
        bandwidth: bytes per second.
    """
    steps = num_generated - 1
    tokens_read = steps * num_prompt + steps * (steps + 1) // 2
    return (steps * weight_bytes + tokens_read * kv_bytes) / bandwidth


def main() -> None:
    for num_generated in (100, 1000, 10_000):
        seconds = answer_floor(WEIGHT_BYTES, KV_BYTES, 1000, num_generated, BANDWIDTH)
        print(f"{num_generated:6,} tokens: {seconds:7.3f} s, {1000 * seconds / num_generated:.3f} ms per token")


if __name__ == "__main__":
    main()
