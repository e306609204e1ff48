"""A Triton kernel for rows that have only penalties, and for filtered rows whose short list was not enough.

It finds the cut-off of a filtered row digit by digit, and then the best token of each stretch of the row.

The cut-off, the largest distance (stage A's `filters.py`) that the filters keep, is an integer of 30 bits. The kernel
finds it as one finds a word in a dictionary, in three digits of ten bits:

    first digit    count the tokens by the first digit of their distance: a histogram of 1,024 bins
                   add up from the nearest bin: the k-th token is in the bin where the sum reaches k
    second digit   the same for the tokens of that bin, by their second digit; then the third

For top-p the bins add up weights instead of tokens, and the wanted sum is p times the total weight after top-k. All
sums are of integers, so their order does not matter. As in `short_list_kernel.py`, several programs share a row.
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
    PENALISED,
    TOP_K,
    TOP_P,
    WORDS,
    best_of_stretch,
    distances,
    gumbel,
    load_float,
    load_penalties,
    load_scores,
    load_temperature,
    meet,
    scale,
    share_of,
    weights,
)

DIGITS, BITS = 3, 10
BINS = 2**BITS
_DIGITS, _BITS, _BINS = tl.constexpr(DIGITS), tl.constexpr(BITS), tl.constexpr(BINS)


@triton.jit(do_not_specialize=["parts"])  # each specialisation would be a compilation
def digit_kernel(
    winners,  # float32 [3, rows, most]: of each stretch the winner's score, its noise, and the highest score
    winner_ids,  # int64 [rows, most]
    tops,  # float32 [rows]: the highest score of a filtered row
    tokens,  # int64 [rows]: the token of a row that has one, or -1
    logits,  # [rows, vocab]
    temperatures,  # float32 [rows]
    noise_keys,  # int32 [rows]
    rules,  # int32 [rows, WORDS]
    counts,  # [table rows, vocab]
    tokens_by_digit,  # int32 [rows, DIGITS, BINS], zero before and after
    mass_by_digit,  # int64 [rows, DIGITS, BINS], zero before and after
    arrived,  # int32 [rows, 2], zero before; the last kernel makes it zero again
    most,  # stretches of a row
    parts,  # programs per row
    vocab,
    row_stride,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    words = rules + row * WORDS
    flags = tl.load(words + FLAGS)
    if ((flags & (FILTERED | PENALISED)) == 0) | (tl.load(tokens + row) >= 0):
        return
    filtered = (flags & FILTERED) != 0
    penalised, table_row, repetition, presence, frequency = load_penalties(words)
    counts += table_row * vocab
    logits += row * row_stride
    tokens_by_digit += row * _DIGITS * _BINS
    mass_by_digit += row * _DIGITS * _BINS
    arrived += 2 * row + 1
    temperature = load_temperature(temperatures, row)
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), tl.where(filtered, temperature, 1.0))
    top = tl.load(tops + row)
    top_k = tl.where(filtered, tl.load(words + TOP_K), 0)
    top_p = tl.where(filtered, load_float(words, TOP_P), 1.0)
    bins = tl.arange(0, _BINS)
    each = tl.cdiv(tl.cdiv(vocab, parts), BLOCK) * BLOCK
    first = part * each
    last = tl.minimum(first + each, vocab)
    met = 0

    # top-k: the distance of the k-th nearest token.
    kept = tl.full([], ALL, tl.int32)
    prefix, nearer, digit = 0, 0, 0
    if top_k > 0:
        while digit < _DIGITS:
            shift = (_DIGITS - 1 - digit) * _BITS
            amount = tl.zeros([_BINS], tl.int32)
            for start in range(first, last, BLOCK):
                token = start + tl.arange(0, BLOCK)
                inside = token < last
                score = load_scores(logits, token, inside, counts, penalised, repetition, presence, frequency, NATIVE)
                distance = distances(scale(score, top, inverse))
                inside = inside & ((distance >> shift >> _BITS) == prefix)
                amount += tl.histogram((distance >> shift) & (_BINS - 1), _BINS, mask=inside)
            place = tokens_by_digit + digit * _BINS + bins
            tl.atomic_add(place, amount, mask=amount > 0, sem="relaxed", scope="gpu")
            digit += 1
            met += 1
            meet(arrived, met, parts)
            amount = tl.load(place, volatile=True)
            below = tl.sum((tl.cumsum(amount, 0) + nearer < top_k).to(tl.int32), 0)
            nearer += tl.sum(tl.where(bins < below, amount, 0), 0)
            prefix = prefix * _BINS + below
            kept = (prefix + 1 << shift) - 1
            if nearer + tl.sum(tl.where(bins == below, amount, 0), 0) == top_k:
                digit = _DIGITS  # the bin ends with the k-th token: its other digits need not be known

    # top-p: the distance up to which the nearest tokens have the share p of the remaining weight.
    if top_p < 1.0:
        lighter, wanted = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
        prefix, digit = 0, 0
        while digit < _DIGITS:
            shift = (_DIGITS - 1 - digit) * _BITS
            place = mass_by_digit + digit * _BINS
            for start in range(first, last, BLOCK):
                token = start + tl.arange(0, BLOCK)
                inside = token < last
                score = load_scores(logits, token, inside, counts, penalised, repetition, presence, frequency, NATIVE)
                distance = distances(scale(score, top, inverse))
                weight = weights(distance, NATIVE)
                inside = inside & (distance <= kept) & ((distance >> shift >> _BITS) == prefix) & (weight > 0)
                bin = (distance >> shift) & (_BINS - 1)
                tl.atomic_add(place + bin, weight, mask=inside, sem="relaxed", scope="gpu")
            digit += 1
            met += 1
            meet(arrived, met, parts)
            amount = tl.load(place + bins, volatile=True)
            if digit == 1:
                wanted = share_of(tl.sum(amount, 0), top_p)
            below = tl.sum((tl.cumsum(amount, 0) + lighter < wanted).to(tl.int32), 0)
            lighter += tl.sum(tl.where(bins < below, amount, 0), 0)
            prefix = prefix * _BINS + below
        kept = tl.minimum(kept, prefix)
    kept = tl.minimum(kept, tl.load(words + FARTHEST))

    # The best token of each stretch; where a stretch is filtered out entirely, its winner is none.
    key = tl.load(noise_keys + row).to(tl.uint32, bitcast=True)
    rows = tl.num_programs(0) // parts
    plane = rows.to(tl.int64) * most
    for start in range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = load_scores(logits, token, token < last, counts, penalised, repetition, presence, frequency, NATIVE)
        if filtered:
            score = tl.where(distances(scale(score, top, inverse)) <= kept, score, float("-inf"))
        highest = tl.max(score, 0)
        best = start + best_of_stretch(score, highest, token, temperature, key, NATIVE)
        winner = tl.max(tl.where(token == best, score, float("-inf")), 0)
        at = row * most + start // BLOCK
        tl.store(winners + at, winner)
        tl.store(winners + plane + at, gumbel(best, key, NATIVE))
        tl.store(winners + 2 * plane + at, highest)
        tl.store(winner_ids + at, best.to(tl.int64))

    met += 1
    meet(arrived, met, parts)  # no program reads the sums any more
    if part == 0:
        for again in tl.static_range(_DIGITS):
            tl.store(tokens_by_digit + again * _BINS + bins, tl.zeros([_BINS], tl.int32))
            tl.store(mass_by_digit + again * _BINS + bins, tl.zeros([_BINS], tl.int64))
