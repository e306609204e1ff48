"""Triton kernels that sample: temperature, noise and argmax in one pass over the logits.

PyTorch would write the scaled logits, the random bits, the noise and the sum to memory and read them back, a dozen
passes over `[rows, vocab]`. A kernel that reads a logit also knows its temperature, its row's key and its token id, so
one pass that keeps the best of each stretch is enough: 256 rows of 152 thousand bfloat16 logits are 78 MB, read once. A
second, tiny kernel compares the stretches' winners.

Two kernels that run first, `short_list_kernel.py` and `digit_kernel.py`, handle rows with penalties, top-k, top-p or
min-p; any other row only costs them the reading of a flag. All four kernels read the rows' parameters from device
memory, so one launch serves any mixture of requests and can be recorded in a CUDA graph.

The random bits are stage A's: the same hash in unsigned 32-bit arithmetic. The noise computed from them differs from
stage A's in the fifth digit, so a sampled token differs only if two tokens are that close: about one in a hundred
thousand.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage_a_naive.contract.outputs import NO_TOKEN
from stage_d_paged.sampler.rules import REPLACED, SamplerInput
from stage_e_batching.sampler.arithmetic import (
    FILTERED,
    FLAGS,
    PENALISED,
    TABLE_ROW,
    WORDS,
    best_of_stretch,
    gumbel,
    is_infinite,
    load_logits,
    load_temperature,
)
from stage_e_batching.sampler.digit_kernel import BINS, DIGITS, digit_kernel
from stage_e_batching.sampler.short_list_kernel import BLOCK, LIST, MOST_PARTS, USUAL, short_list_kernel

SPAN = 8192  # logits a program looks at, held in registers
PROGRAMS, WARPS = 4, 4  # programs of the search per multiprocessor, which all run at the same time; warps of each
_REPLACED, _NO_TOKEN = tl.constexpr(REPLACED), tl.constexpr(NO_TOKEN)


@triton.jit
def score_of_winner(logit, noise, highest, temperature):
    """Compute the score by which a stretch's winner competes with other stretches; `highest` is the row's."""
    greedy = temperature == 0.0
    return tl.where(greedy, logit, (logit - highest) * (1.0 / tl.where(greedy, 1.0, temperature)) + noise)


@triton.jit
def _best_of_stretch_kernel(
    logits,  # [rows, vocab]
    temperatures,  # float32 [rows]
    noise_keys,  # int32 [rows]
    rules,  # int32 [rows, WORDS]
    winners,  # float32 [3, rows, most]: the winner's logit, its noise, and the highest logit
    winner_ids,  # int64 [rows, most]
    most,
    vocab,
    row_stride,
    SPAN: tl.constexpr,
    NATIVE: tl.constexpr,  # the logarithm is the GPU's instruction; Triton's interpreter has none
):
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    if (tl.load(rules + row * WORDS + FLAGS) & (FILTERED | PENALISED)) != 0:
        return  # the kernels before this one have handled the row
    token = stretch * SPAN + tl.arange(0, SPAN)
    logits += row * row_stride
    logit = load_logits(logits, token, token < vocab)
    temperature = load_temperature(temperatures, row)
    key = tl.load(noise_keys + row).to(tl.uint32, bitcast=True)
    highest = tl.max(logit, 0)
    best = stretch * SPAN + best_of_stretch(logit, highest, token, temperature, key, NATIVE)
    place = row * most + stretch
    plane = tl.num_programs(0).to(tl.int64) * most
    tl.store(winners + place, tl.load(logits + best).to(tl.float32))
    tl.store(winners + plane + place, gumbel(best, key, NATIVE))
    tl.store(winners + 2 * plane + place, highest)
    tl.store(winner_ids + place, best.to(tl.int64))


@triton.jit
def _best_of_row_kernel(
    ids,  # int64 [2, rows]: the tokens, and the same with `NO_TOKEN`
    temperatures,  # float32 [rows]
    rules,  # int32 [rows, WORDS]
    counts,  # [table rows, vocab]; the token of a row with penalties is counted
    tokens,  # int64 [rows]: the token of a row that has one already, or -1
    tops,  # float32 [rows]: the highest score of a filtered row
    arrived,  # int32 [rows, 2], of the kernels before this one: set to zero again
    winners,  # float32 [3, rows, most]
    winner_ids,  # int64 [rows, most]
    most,
    stretches,  # winners of a row without filters and penalties; other rows have `most`
    vocab,
    MOST_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    words = rules + row * WORDS
    flags = tl.load(words + FLAGS)
    stretch = tl.arange(0, MOST_PAD)
    inside = stretch < tl.where((flags & (FILTERED | PENALISED)) != 0, most, stretches)
    place = row * most + stretch
    plane = tl.num_programs(0).to(tl.int64) * most
    logit = tl.load(winners + place, mask=inside, other=float("-inf"))
    noise = tl.load(winners + plane + place, mask=inside, other=0.0)
    highest = tl.max(tl.load(winners + 2 * plane + place, mask=inside, other=float("-inf")), 0)
    score = score_of_winner(logit, noise, highest, load_temperature(temperatures, row))
    best = tl.argmax(score, 0, tie_break_left=True)
    token = tl.load(winner_ids + place, mask=inside, other=0)
    chosen = tl.load(tokens + row)
    token = tl.where(chosen >= 0, chosen, tl.sum(tl.where(stretch == best, token, 0), 0))
    if (flags & FILTERED) != 0:
        highest = tl.load(tops + row)
    fails = is_infinite(highest)
    token = tl.where(fails, 0, token)  # the next step can run on it
    tl.store(ids + row, token)
    tl.store(ids + tl.num_programs(0) + row, tl.where(fails, _NO_TOKEN, token))
    if (flags & (PENALISED | _REPLACED)) == PENALISED:  # a replaced sampler's token is another
        entry = counts + tl.load(words + TABLE_ROW).to(tl.int64) * vocab + token
        tl.store(entry, tl.load(entry) + 2)
    tl.store(arrived + 2 * row + tl.arange(0, 2), tl.zeros([2], tl.int32))


def programs_per_row(rows: int, vocab: int, multiprocessors: int) -> int:
    """Choose the number of programs per row for the search, a power of two, so that all programs run at once."""
    most = min(MOST_PARTS, PROGRAMS * multiprocessors // rows, triton.cdiv(vocab, BLOCK))
    return 1 << max(0, most.bit_length() - 1)


class RowChooser:
    """Launches the kernels on the current stream; only one launch may be in flight.

    Args:
        most_rows: rows per call, at most.
        vocab: columns of the logits.
        counts: the table of counts, `[table rows, vocab]`, written; it may have no rows if no row has penalties.
    """

    def __init__(self, most_rows: int, vocab: int, counts: Tensor) -> None:
        self._counts = counts
        self._stretches, self._most = triton.cdiv(vocab, SPAN), triton.cdiv(vocab, BLOCK)
        self._on_gpu = isinstance(short_list_kernel, triton.JITFunction)  # and not in Triton's interpreter
        self._multiprocessors = 0  # one program per row, where programs run one after the other
        if self._on_gpu:
            self._multiprocessors = torch.cuda.get_device_properties(counts.device).multi_processor_count

        def room(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(most_rows, *sizes, dtype=dtype, device=counts.device)

        # Buffers that pass results from kernel to kernel.
        self._tokens = room(dtype=torch.int64)
        self._tops = room(dtype=torch.float32)
        self._arrived = room(2)  # zero between launches, as the sums are
        self._list = (
            room(MOST_PARTS, dtype=torch.float32),
            room(MOST_PARTS),
            room(),
            room(LIST, dtype=torch.float32),
            room(LIST),
        )
        self._found = (
            room(2, MOST_PARTS, dtype=torch.int64),
            room(2, MOST_PARTS, dtype=torch.float32),
            room(2, MOST_PARTS),
            room(2, MOST_PARTS),
        )
        self._sums = room(DIGITS, BINS), room(DIGITS, BINS, dtype=torch.int64)
        self._winners = room(3 * self._most, dtype=torch.float32)
        self._winner_ids = room(self._most, dtype=torch.int64)

    def __call__(self, logits: Tensor, rows: SamplerInput) -> tuple[Tensor, Tensor]:
        """Choose a token for every row of `logits [rows, vocab]`: see `reference.choose_tokens`.

        Raises:
            ValueError: the logits of a row are not adjacent.
        """
        count, vocab = logits.shape
        if logits.stride(1) != 1:
            raise ValueError(f"logits have strides {logits.stride()}; the logits of a row must be adjacent")
        parts = programs_per_row(count, vocab, self._multiprocessors)
        # All programs run at once: each gets as many registers as let `PROGRAMS` of them fit on a multiprocessor.
        together = {"launch_cooperative_grid": True, "maxnreg": 128} if self._on_gpu and parts > 1 else {}
        short_list_kernel[(count * parts,)](
            self._tokens,
            self._tops,
            logits,
            rows.temperatures,
            rows.noise_keys,
            rows.rules,
            self._counts,
            *self._list,
            *self._found,
            self._arrived,
            parts,
            vocab,
            logits.stride(0),
            BLOCK=BLOCK,
            MOST_PARTS=MOST_PARTS,
            LIST=LIST,
            USUAL=USUAL,
            NATIVE=self._on_gpu,
            num_warps=WARPS,
            **together,
        )
        digit_kernel[(count * parts,)](
            self._winners,
            self._winner_ids,
            self._tops,
            self._tokens,
            logits,
            rows.temperatures,
            rows.noise_keys,
            rows.rules,
            self._counts,
            *self._sums,
            self._arrived,
            self._most,
            parts,
            vocab,
            logits.stride(0),
            BLOCK=BLOCK,
            NATIVE=self._on_gpu,
            num_warps=WARPS,
            **together,
        )
        _best_of_stretch_kernel[(count, self._stretches)](
            logits,
            rows.temperatures,
            rows.noise_keys,
            rows.rules,
            self._winners,
            self._winner_ids,
            self._most,
            vocab,
            logits.stride(0),
            SPAN=SPAN,
            NATIVE=self._on_gpu,
            num_warps=8,
        )
        ids = torch.empty(2, count, dtype=torch.int64, device=logits.device)
        _best_of_row_kernel[(count,)](
            ids,
            rows.temperatures,
            rows.rules,
            self._counts,
            self._tokens,
            self._tops,
            self._arrived,
            self._winners,
            self._winner_ids,
            self._most,
            self._stretches,
            vocab,
            MOST_PAD=triton.next_power_of_2(self._most),
            num_warps=1,
        )
        return ids[0], ids[1]
