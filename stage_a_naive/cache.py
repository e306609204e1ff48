"""Attention with a KV cache, by hand: the key and value of a token are computed once and kept.

Four tokens arrive one after another. Each attends with its query to the keys and values of all tokens so far. Computed
anew for every token, these are 1 + 2 + 3 + 4 rows of keys, and as many of values. A row depends on its own token alone
and never changes, so it can be kept: then every token adds one row of each. (Its query is used once and not kept.)
`python -m stage_a_naive.cache` attends both ways, with the same result, and prints how many rows each has computed.
"""

import torch
from torch import Tensor

HEAD_DIM = 8  # one head, as wide as the model
TO_QUERY, TO_KEY, TO_VALUE = torch.randn(3, HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(0))
rows_computed: list[int] = []


def keys_and_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the keys and the values of tokens `x [tokens, head_dim]`, a row of each per token."""
    rows_computed.append(2 * len(x))
    return x @ TO_KEY, x @ TO_VALUE


def attend(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Average all values, weighted by how well their keys match the query of the token `x [1, head_dim]`."""
    return torch.softmax(x @ TO_QUERY @ keys.T / HEAD_DIM**0.5, dim=-1) @ values


def attend_uncached(x: Tensor) -> Tensor:
    """Attend with one token after another, computing the keys and values of all tokens so far."""
    return torch.cat([attend(x[i : i + 1], *keys_and_values(x[: i + 1])) for i in range(len(x))])


def attend_cached(x: Tensor) -> Tensor:
    """Attend with one token after another, computing its own key and value and taking the others from the cache."""
    keys = values = torch.empty(0, HEAD_DIM)  # the cache
    outputs = []
    for new in x.split(1):
        key, value = keys_and_values(new)
        keys, values = torch.cat([keys, key]), torch.cat([values, value])
        outputs.append(attend(new, keys, values))
    return torch.cat(outputs)


def main() -> None:
    x, counts, outputs = torch.randn(4, HEAD_DIM), [], []
    for function in (attend_uncached, attend_cached):
        rows_computed.clear()
        outputs.append(function(x))
        counts.append(sum(rows_computed))
        print(f"{function.__name__:15} rows of keys and values, token by token: {rows_computed}")
    torch.testing.assert_close(*outputs)
    print(f"rows of keys and values for four tokens: {counts[0]} → {counts[1]} [H200: the same, it is a count]")


if __name__ == "__main__":
    main()
