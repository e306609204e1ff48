"""The operations of `TokenTable` on a GPU, with one launch each.

In PyTorch they are some seventy small kernels. Even in a CUDA graph each takes about a microsecond, and a step takes
about a millisecond. `token_table.py` defines the results. The kernels divide the work as follows:

    guess       a program per sequence goes through its tokens from the end, a stretch at a time, until the n-gram
                that it looks for has come up
    complete    a program completes 128 rows
    keep        a program per sequence holds all of its rows, and finds the first wrong one
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from beyond.speculation.ngram import SIZE
from beyond.speculation.sequence import WRONG
from stage_f_graph_tp.step_input import StepInput

STRETCH = 2048  # positions that a program looks at together
ROWS = 128  # that a program completes


@triton.jit
def _begins_here(slots, row):
    """Whether a row is the first of its sequence: the rows of a sequence are adjacent."""
    return tl.load(slots + row) != tl.load(slots + row - 1, mask=row > 0, other=-1)


@triton.jit
def _guess_kernel(
    tokens,  # int32 [batch slots, width]
    last,  # int64 [batch slots]
    slots,  # int64 [rows]
    width,
    DRAFT: tl.constexpr,  # guesses per sequence
    DRAFT_PAD: tl.constexpr,
    SIZE: tl.constexpr,  # of the n-gram
    STRETCH: tl.constexpr,
):
    row = tl.program_id(0)
    if _begins_here(slots, row):
        slot = tl.load(slots + row)
        text = tokens + slot * width
        end = tl.load(last + slot)
        sought = end - SIZE + 1  # where the last n-gram begins; the others begin before
        unseen = sought
        found = tl.full((), -1, tl.int64)
        while (found < 0) & (unseen > 0):
            start = unseen - 1 - tl.arange(0, STRETCH)
            equal = start >= 0
            for i in tl.static_range(SIZE):
                equal &= tl.load(text + start + i, mask=start >= 0, other=0) == tl.load(text + sought + i)
            found = tl.max(tl.where(equal, start, -1), 0)
            unseen -= STRETCH
        after = tl.where(found >= 0, found + SIZE, end)
        ahead = tl.arange(0, DRAFT_PAD)
        inside = ahead < DRAFT
        guesses = tl.load(text + after + ahead % (end + 1 - after), mask=inside, other=0)
        tl.store(text + end + 1 + ahead, guesses, mask=inside)


@triton.jit(do_not_specialize=["rows"])  # or each kind of number would be compiled separately
def _complete_kernel(
    tokens,  # int32 [batch slots, width]
    noise,  # int32 [batch slots, width]
    last,  # int64 [batch slots]
    limits,  # int64 [batch slots]
    slots,  # int64 [rows]
    positions,  # int64 [rows]: counted from the last known token; then those in the sequence
    input_ids,  # int64 [rows]
    noise_keys,  # int32 [rows]
    context_lens,  # int32 [rows]
    slot_mapping,  # int64 [rows]
    block_tables,  # int32 [rows, blocks]
    rows,
    width,
    table_stride,
    block_size,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=0)
    ahead = tl.load(positions + row, mask=inside, other=0)
    position = tl.minimum(tl.load(last + slot) + ahead, tl.load(limits + slot))
    tl.store(context_lens + row, (position + 1).to(tl.int32), mask=inside)
    position = tl.maximum(position, 0)
    tl.store(positions + row, position, mask=inside)
    at = slot * width + position
    tl.store(input_ids + row, tl.load(tokens + at).to(tl.int64), mask=inside)
    tl.store(noise_keys + row, tl.load(noise + at), mask=inside)
    entry = block_tables + row * table_stride + position // block_size
    block = tl.load(entry, mask=inside, other=-1).to(tl.int64)  # -1 for padding
    tl.store(slot_mapping + row, block * block_size + position % block_size, mask=inside)


@triton.jit(do_not_specialize=["samples"])
def _keep_kernel(
    tokens,  # int32 [batch slots, width]
    last,  # int64 [batch slots]
    last_tokens,  # int64 [batch slots]
    ids,  # int64 [samples]
    slots,  # int64 [samples]
    rows,  # int64 [samples]: of the step's input
    positions,  # int64 [tokens]
    input_ids,  # int64 [tokens]
    samples,
    width,
    WRONG: tl.constexpr,
    MOST: tl.constexpr,  # rows of a sequence, at most; the padding rows are one longer sequence, kept in part
):
    first = tl.program_id(0)
    if _begins_here(slots, first):
        slot = tl.load(slots + first)
        number = tl.arange(0, MOST)
        sample = first + number
        inside = (sample < samples) & (tl.load(slots + sample, mask=sample < samples, other=-1) == slot)
        row = tl.load(rows + sample, mask=inside, other=0)
        sampled = tl.load(ids + sample, mask=inside, other=0)
        follows = inside & (number > 0)
        sampled_before = tl.load(ids + sample - 1, mask=follows, other=0)
        wrong = follows & (tl.load(input_ids + row, mask=inside, other=0) != sampled_before)
        certain = inside & (number < tl.min(tl.where(wrong, number, MOST), 0))
        sampled_at = tl.load(positions + row, mask=inside, other=0) + 1
        tl.store(tokens + slot * width + sampled_at, sampled.to(tl.int32), mask=certain)
        end = tl.max(tl.where(certain, sampled_at, 0), 0)
        newest = tl.sum(certain.to(tl.int32), 0) - 1
        tl.store(last + slot, end)
        tl.store(last_tokens + slot, tl.sum(tl.where(number == newest, sampled, 0), 0))
        tl.store(ids + sample, WRONG, mask=inside & (sampled_at > end))


def guess(tokens: Tensor, last: Tensor, slots: Tensor, draft_tokens: int) -> None:
    """See `TokenTable.guess`."""
    _guess_kernel[(len(slots),)](
        tokens,
        last,
        slots,
        tokens.shape[1],
        DRAFT=draft_tokens,
        DRAFT_PAD=triton.next_power_of_2(draft_tokens),
        SIZE=SIZE,
        STRETCH=STRETCH,
        num_warps=4,
    )


def complete(
    tokens: Tensor, noise: Tensor, last: Tensor, limits: Tensor, inputs: StepInput, num_rows: int, block_size: int
) -> None:
    """See `TokenTable.complete`."""
    _complete_kernel[(triton.cdiv(num_rows, ROWS),)](
        tokens,
        noise,
        last,
        limits,
        inputs.batch_slots,
        inputs.positions,
        inputs.input_ids,
        inputs.sampling.noise_keys,
        inputs.context_lens,
        inputs.slot_mapping,
        inputs.block_tables,
        num_rows,
        tokens.shape[1],
        inputs.block_tables.stride(0),
        block_size,
        ROWS=ROWS,
        num_warps=4,
    )


def keep(tokens: Tensor, last: Tensor, ids: Tensor, inputs: StepInput, last_tokens: Tensor, draft_tokens: int) -> None:
    """See `TokenTable.keep`."""
    _keep_kernel[(len(ids),)](
        tokens,
        last,
        last_tokens,
        ids,
        inputs.sample_slots,
        inputs.sample_tokens,
        inputs.positions,
        inputs.input_ids,
        len(ids),
        tokens.shape[1],
        WRONG=WRONG,
        MOST=triton.next_power_of_2(draft_tokens + 1),
        num_warps=1,
    )
