"""A cache that takes several tokens at a time: a part of a prompt, or the next message of a chat.

`stage_a_naive/cache.py` adds one token per call. Here several arrive at once, after the tokens that are stored already.
`python -m labs.variants.append` runs eight tokens in three parts and compares them with one after another.
"""

import torch
from torch import Tensor

from stage_a_naive import cache


def append_and_attend(x: Tensor, keys: Tensor, values: Tensor, count: int) -> Tensor:
    """Store the keys and values of the tokens `x [tokens, head_dim]`, and attend with each; `[tokens, head_dim]`.

    `keys` and `values`, `[positions, head_dim]`, are the cache; `count` of their rows are filled, by earlier tokens. A
    token attends to all earlier ones and to itself. Each key and value is computed once.
    """
    end = count + len(x)
    keys[count:end], values[count:end] = cache.keys_and_values(x)
    return torch.cat(
        [cache.attend(x[i : i + 1], keys[: count + i + 1], values[: count + i + 1]) for i in range(len(x))]
    )


def main() -> None:
    x = torch.randn(8, cache.HEAD_DIM)
    keys, values = torch.empty(2, 10, cache.HEAD_DIM)
    cache.rows.clear()
    outputs = [append_and_attend(x[i:j], keys, values, i) for i, j in ((0, 5), (5, 6), (6, 8))]
    print(f"rows of keys and values computed for 8 tokens in three parts: {sum(cache.rows)}")
    torch.testing.assert_close(torch.cat(outputs), cache.attend_cached(x))


if __name__ == "__main__":
    main()
