"""A Triton kernel that samples from rows with top-k, top-p or min-p, without sorting: with top-k through a short list.

Sorting 150 thousand scores to keep twenty of them is most of a sampler's work, and the order is not needed. A row
is divided among programs, and each lane of a program keeps the best score of its piece of the row. The best scores of
the pieces bound the cut-off: if 20 pieces have a token of at least this score, so has the 20th best token. A second
pass over the row collects the tokens that reach the bound, some dozens of 150 thousand. If the list holds every token
that the filters can keep, the row's token is chosen from the list and the row is not read again. If not, because top-k
keeps more tokens than the list has, `digit_kernel.py` finds the cut-off. Rows without top-k need no list
(`candidate.py`).

Each row is divided among many programs when there are few rows, to keep the whole GPU busy. The programs of a row wait
for one another after each pass, so all of them must run at the same time. There are never more programs than fit onto
the GPU at once, and the launch is cooperative: the GPU starts all of them or none.
"""

# A launch passes plain numbers for `tl.constexpr`, and options of Triton's that no kernel declares, such as num_warps.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from stage_e_batching.sampler.arithmetic import (
    ALL,
    FARTHEST,
    FILTERED,
    FLAGS,
    TOP_K,
    TOP_P,
    WORDS,
    distances,
    gumbel,
    is_infinite,
    load_float,
    load_penalties,
    load_scores,
    meet,
    scale,
    share_of,
    weights,
)
from stage_e_batching.sampler.candidate import choose_candidate

BLOCK = 1024  # scores that a program looks at together
MOST_PARTS = 64  # programs that a row is divided among
LIST = 1024  # capacity of the list, in tokens
USUAL = 256  # size that the bound aims at if top-k is larger


@triton.jit
def _ordered(score):
    """Map float32 numbers to integers in the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _rth_largest(values, r):
    """Find the largest integer that at least `r` of the int32 `values` reach, bit by bit."""
    found = tl.full([], -2147483648, tl.int32)
    if tl.sum((values >= 0).to(tl.int32), 0) >= r:
        found = tl.zeros([], tl.int32)
    for i in range(31):
        higher = found + (1 << (30 - i))
        found = tl.where(tl.sum((values >= higher).to(tl.int32), 0) >= r, higher, found)
    return found


@triton.jit
def _nearest_with(values, amounts, wanted):
    """Find the smallest int32, below 2**30, up to which the `amounts` of these `values` add up to `wanted`."""
    found = tl.zeros([], tl.int32)  # the largest value such that the sum below it is too small
    for i in range(30):
        higher = found + (1 << (29 - i))
        found = tl.where(tl.sum(tl.where(values < higher, amounts, 0), 0) < wanted, higher, found)
    return found


@triton.jit
def choose_from_list(
    scaled,  # float32 [LIST]
    token,  # int32 [LIST]
    on_list,  # bool [LIST]: False for empty entries
    whole,  # whether all tokens up to the distance `reach` are on the list
    reach,
    top_k,
    top_p,
    farthest,
    key,
    NATIVE: tl.constexpr,
):
    """Tell whether the list has every token that the filters keep, and choose one of them if so."""
    distance = tl.where(on_list, distances(scaled), ALL)
    number = tl.sum(on_list.to(tl.int32), 0)
    kept = _nearest_with(distance, on_list.to(tl.int32), top_k)
    if top_p < 1.0:
        weight = tl.where(on_list & (distance <= kept), weights(distance, NATIVE), 0)
        wanted = share_of(tl.sum(weight, 0), top_p)
        kept = tl.minimum(kept, _nearest_with(distance, weight, wanted))
    kept = tl.minimum(kept, farthest)
    whole = whole & (top_k <= number) & (kept <= reach)
    score = tl.where(on_list & (distance <= kept), scaled + gumbel(token, key, NATIVE), float("-inf"))
    best = on_list & (score == tl.max(score, 0))
    return whole, tl.min(tl.where(best, token, 2147483647), 0)  # of equals the lowest id


@triton.jit(do_not_specialize=["parts"])  # each specialisation would be a compilation
def short_list_kernel(
    tokens,  # int64 [rows], written: the token of a row that is chosen here, or -1
    tops,  # float32 [rows], written where a row has a filter: the highest score
    logits,  # [rows, vocab]
    temperatures,  # float32 [rows]
    noise_keys,  # int32 [rows]
    rules,  # int32 [rows, WORDS]
    counts,  # [table rows, vocab]
    best_of_part,  # float32 [rows, MOST_PARTS]
    bounds,  # int32 [rows, MOST_PARTS]: each part's bound, as an ordered integer
    listed,  # int32 [rows]: tokens on the short list
    list_scaled,  # float32 [rows, LIST]
    list_tokens,  # int32 [rows, LIST]
    found_mass,  # int64 [rows, 2, MOST_PARTS], for rows without top-k: see `choose_candidate`
    found_scores,  # float32 [rows, 2, MOST_PARTS]
    found_tokens,  # int32 [rows, 2, MOST_PARTS]
    found_distances,  # int32 [rows, 2, MOST_PARTS]
    arrived,  # int32 [rows, 2], zero before; the last kernel makes it zero again
    parts,  # programs per row
    vocab,
    row_stride,
    BLOCK: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    LIST: tl.constexpr,
    USUAL: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    words = rules + row * WORDS
    if part == 0:
        tl.store(tokens + row, -1)
    if (tl.load(words + FLAGS) & FILTERED) == 0:
        return
    penalised, table_row, repetition, presence, frequency = load_penalties(words)
    counts += table_row * vocab
    logits += row * row_stride
    best_of_part += row * MOST_PARTS
    bounds += row * MOST_PARTS
    list_scaled += row * LIST
    list_tokens += row * LIST
    arrived += 2 * row
    temperature = tl.load(temperatures + row)
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), temperature)
    top_k = tl.load(words + TOP_K)
    top_p = load_float(words, TOP_P)
    farthest = tl.load(words + FARTHEST)
    others = tl.arange(0, MOST_PARTS)
    each = tl.cdiv(tl.cdiv(vocab, parts), BLOCK) * BLOCK
    first = part * each
    last = tl.minimum(first + each, vocab)
    half = tl.maximum(parts // 2, 1)

    key = tl.load(noise_keys + row).to(tl.uint32, bitcast=True)

    # The best score, and with top-k a bound that enough tokens reach: half of the parts have enough pieces above it.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = load_scores(logits, token, token < last, counts, penalised, repetition, presence, frequency, NATIVE)
        best = tl.maximum(best, score)
    tl.store(best_of_part + part, tl.max(best, 0))
    if top_k > 0:
        tl.store(bounds + part, _rth_largest(_ordered(best), tl.cdiv(tl.minimum(top_k, USUAL), half)))
        if part == 0:
            tl.store(listed + row, 0)
    meet(arrived, 1, parts)
    top = tl.max(tl.load(best_of_part + others, mask=others < parts, other=float("-inf"), volatile=True), 0)
    chosen = tl.full([], -1, tl.int32)
    if is_infinite(top):
        chosen = tl.zeros([], tl.int32)  # not searched further
    elif top_k == 0:
        at = row * 2 * MOST_PARTS
        chosen = choose_candidate(
            found_mass + at,
            found_scores + at,
            found_tokens + at,
            found_distances + at,
            arrived,
            part,
            parts,
            logits,
            first,
            last,
            counts,
            penalised,
            repetition,
            presence,
            frequency,
            top,
            inverse,
            key,
            top_p,
            farthest,
            BLOCK,
            MOST_PARTS,
            NATIVE,
        )
    else:
        bound = tl.load(bounds + others, mask=others < parts, other=-2147483648, volatile=True)
        bound = _rth_largest(bound, half)
        bound = tl.where(bound < 0, bound ^ 0x7FFFFFFF, bound).to(tl.float32, bitcast=True)
        reach = distances(scale(bound, top, inverse))  # the list has all tokens up to this distance

        # The short list.
        for start in range(first, last, BLOCK):
            token = start + tl.arange(0, BLOCK)
            inside = token < last
            score = load_scores(logits, token, inside, counts, penalised, repetition, presence, frequency, NATIVE)
            scaled = scale(score, top, inverse)
            distance = distances(scaled)
            near = inside & (distance <= reach)
            number = tl.sum(near.to(tl.int32), 0)
            if number > 0:
                place = (
                    tl.atomic_add(listed + row, number, sem="relaxed", scope="gpu")
                    + tl.cumsum(near.to(tl.int32), 0)
                    - 1
                )
                near = near & (place < LIST)
                tl.store(list_scaled + place, scaled, mask=near)
                tl.store(list_tokens + place, token, mask=near)
        meet(arrived, 2, parts)
        if part == 0:
            number = tl.load(listed + row, volatile=True)
            slot = tl.arange(0, LIST)
            on_list = slot < tl.minimum(number, LIST)
            scaled = tl.load(list_scaled + slot, mask=on_list, other=float("-inf"), volatile=True)
            token = tl.load(list_tokens + slot, mask=on_list, other=0, volatile=True)
            complete, found = choose_from_list(
                scaled, token, on_list, number <= LIST, reach, top_k, top_p, farthest, key, NATIVE
            )
            chosen = tl.where(complete, found, -1)
    if part == 0:
        tl.store(tokens + row, chosen.to(tl.int64))
        tl.store(tops + row, top)
