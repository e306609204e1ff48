"""Rows whose tokens a replaced `sampling_fn` chooses.

A request keeps the function that was set when it was added, so one batch may have rows of several functions beside rows
of the built-in sampler. Each function is called once for all of its rows. If that fails, it is called again for each
row alone: a row that fails alone ends its own request; the others keep their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import checked_ids


def choose_replaced(scores: Tensor, requests: Sequence[Request], ids: Tensor) -> dict[int, Exception]:
    """Write the tokens of the rows whose request has a `sampling_fn` into `ids`.

    Args:
        scores: `[rows, vocab]`, after penalties.
        requests: one per row.
        ids: int64 `[rows]`; a row that fails gets 0.

    Returns:
        the errors of the rows that failed, by row.

    Raises:
        Exception: a function failed for its rows together, and for none of them alone.
    """
    groups: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        if request.sampling_fn is not None:
            groups.setdefault(id(request.sampling_fn), []).append(row)
    errors: dict[int, Exception] = {}
    for rows in groups.values():
        try:
            _choose(scores, requests, rows, ids)
        except Exception:
            failed = _choose_one_by_one(scores, requests, rows, ids)
            if not failed:
                raise
            errors |= failed
    return errors


def _choose(scores: Tensor, requests: Sequence[Request], rows: list[int], ids: Tensor) -> None:
    at = torch.tensor(rows, device=scores.device)
    logits = scores.index_select(0, at).float()
    sampling_fn = requests[rows[0]].sampling_fn
    assert sampling_fn is not None  # else the rows were not here
    chosen = sampling_fn(logits, [requests[row].params for row in rows])
    ids.index_copy_(0, at, checked_ids(chosen, logits))


def _choose_one_by_one(
    scores: Tensor, requests: Sequence[Request], rows: list[int], ids: Tensor
) -> dict[int, Exception]:
    errors: dict[int, Exception] = {}
    for row in rows:
        try:
            _choose(scores, requests, [row], ids)
        except Exception as error:
            errors[row] = error
            ids[row] = 0
    return errors
