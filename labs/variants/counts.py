"""Counts of the unnecessary work in the slow copy of lab P: each function computes the count from the work's size.

Measure the slow copy at two or three sizes before you write down a formula. `python -m labs.variants.counts` prints the
counts of one size.
"""

from stage_f_graph_tp.cuda_graph import capture_sizes


def waits(tokens: int) -> int:
    """Return how often the slow `TokenLog.write` reads a number on the host while this many tokens are written."""
    return tokens


def replays(largest: int) -> int:
    """Return how many of the batches of 1, 2, …, `largest` decodes the slow engine replays.

    Its graphs have the sizes `capture_sizes(largest)`.
    """
    return len(capture_sizes(largest))


def blocks(tokens: int) -> int:
    """Return the blocks that a sequence of this many tokens holds in the slow engine on a CPU, with no option given."""
    return tokens


def hashes(full_blocks: int, looks: int) -> int:
    """Return how often the slow block manager calls `block_key` for a prompt that waits.

    The cache has nothing of it. `count_cached_tokens` looks at it `looks` times. It is a token longer than its
    `full_blocks` blocks, at least one.
    """
    return full_blocks * looks


def more_operators(rows: int) -> int:
    """Return how many more operators the slow `penalised` calls for this many rows than for two, all with penalties."""
    return 2 * (rows - 2)


def main() -> None:
    for name, count in {
        "waits, 64 tokens": waits(64),
        "replays of 40 batches": replays(40),
        "blocks of 100 tokens": blocks(100),
        "hashes, 64 blocks, 100 looks": hashes(64, 100),
        "more operators, 256 rows": more_operators(256),
    }.items():
        print(f"{name:30} {count}")


if __name__ == "__main__":
    main()
