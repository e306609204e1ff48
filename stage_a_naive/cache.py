"""Attention with a KV cache, by hand: the key and value of a token are computed once and kept.

Four tokens arrive one after another. Each attends with its query to the keys and values of all tokens so far. If they
are recomputed for every token, that makes 1 + 2 + 3 + 4 rows of keys, and the same number of values. A row depends only
on its token (in deeper layers also on earlier ones, never on later ones). So it is kept, and a token adds one row each.
"""

import torch

HEAD_DIM = 8  # one head, as wide as the model
TO_QUERY, TO_KEY, TO_VALUE = torch.randn(3, HEAD_DIM, HEAD_DIM)  # its weights
rows: list[int] = []  # rows of keys and values that each call computed


def keys_and_values(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the keys and the values of tokens `x [tokens, head_dim]`: a row of each per token."""
    rows.append(2 * len(x))
    return x @ TO_KEY, x @ TO_VALUE


def attend(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Average all values, weighted by how well their keys match the query of the token `x [1, head_dim]`."""
    return torch.softmax(x @ TO_QUERY @ keys.T / HEAD_DIM**0.5, dim=-1) @ values


def attend_uncached(x: torch.Tensor) -> torch.Tensor:
    """Attend with one token after another, recomputing the keys and values of all tokens so far."""
    return torch.cat([attend(x[i : i + 1], *keys_and_values(x[: i + 1])) for i in range(len(x))])


def attend_cached(x: torch.Tensor) -> torch.Tensor:
    """Attend with one token after another, computing only the new key and value; the cache has the others."""
    keys, values = torch.empty(2, len(x), HEAD_DIM)  # the cache
    outputs = torch.empty_like(x)
    for i in range(len(x)):
        keys[i : i + 1], values[i : i + 1] = keys_and_values(x[i : i + 1])
        outputs[i] = attend(x[i : i + 1], keys[: i + 1], values[: i + 1])
    return outputs


def main() -> None:
    rows.clear()
    x = torch.randn(4, HEAD_DIM)
    torch.testing.assert_close(attend_uncached(x), attend_cached(x))  # four calls each
    print(f"rows of keys and values, token by token: {rows[:4]} without a cache, {rows[4:]} with one")
    print(f"rows of four tokens' keys and values: {sum(rows[:4])} → {sum(rows[4:])} [H200: the same, it is a count]")


if __name__ == "__main__":
    main()
