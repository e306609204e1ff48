"""Rows whose tokens a replaced `sampling_fn` chooses.

A request keeps the function that was set when the request was added, so one batch may mix several functions and the
built-in sampler. Each function is called once for all of its rows; if that fails, it is called again for each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import replaced_ids


def choose_replaced(scores: Tensor, requests: Sequence[Request], ids: Tensor) -> dict[int, Exception]:
    """Write the tokens of the rows whose request has a `sampling_fn` into `ids`.

    Args:
        scores: `[rows, vocab]`, after penalties.
        requests: one per row.
        ids: int64 `[rows]`; a row that fails gets 0.

    Returns:
        the errors of the rows that failed, by row.
    """
    groups: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        if request.sampling_fn is not None:
            groups.setdefault(id(request.sampling_fn), []).append(row)
    errors: dict[int, Exception] = {}
    for rows in groups.values():
        at = torch.tensor(rows, device=scores.device)
        sampling_fn = requests[rows[0]].sampling_fn
        assert sampling_fn is not None  # only such rows are grouped
        logits = scores.index_select(0, at).float()
        chosen, failed = replaced_ids(sampling_fn, logits, [requests[row].params for row in rows])
        ids.index_copy_(0, at, chosen)
        errors |= {rows[i]: error for i, error in failed.items()}
    return errors
