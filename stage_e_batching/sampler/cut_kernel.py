"""A Triton kernel that finds each row's cut-off for top-k, top-p and min-p, without sorting.

Sorting 150 thousand scores to keep twenty of them is most of the work of a sampler. But nobody needs the order: what is
wanted is one number, the largest distance (stage A's `filters.py`) that is kept. It has 30 bits. The kernel finds it as
one finds a word in a dictionary, digit by digit, three digits of ten bits:

    first digit    count the tokens by the first digit of their distance: a histogram of 1,024 bins
                   add up from the nearest bin: the k-th token lies in the bin where the sum reaches k
    second digit   the same for the tokens of that bin, by their second digit; then the third

For top-p the bins add up weights instead of tokens, and the wanted sum is p times the weight that top-k has left. A
pass reads the row's scores from the L2 cache and writes nothing but sums of integers, which come out the same in any
order.

Few rows are divided among many programs, or most of the GPU would watch. The programs of a row then wait for one
another after each pass, so all of them must run at the same time: there are never more than fit onto the GPU at once,
and the launch is cooperative, which makes the GPU start all of them or none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stage_a_naive import filters
from stage_e_batching.sampler import rules

DIGITS, BITS = 3, 10
BINS = 2**BITS
BLOCK = 2048  # scores that a program looks at together

WORDS = tl.constexpr(rules.WORDS)
FLAGS, TOP_K, TOP_P, FARTHEST = (tl.constexpr(word) for word in (rules.FLAGS, rules.TOP_K, rules.TOP_P, rules.FARTHEST))
REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(word) for word in (rules.REPETITION, rules.PRESENCE, rules.FREQUENCY))
TABLE_ROW = tl.constexpr(rules.TABLE_ROW)
FILTERED, PENALISED = tl.constexpr(rules.FILTERED), tl.constexpr(rules.PENALISED)
_DIGITS, _BITS, _BINS = tl.constexpr(DIGITS), tl.constexpr(BITS), tl.constexpr(BINS)
BEYOND, STEPS, ALL = tl.constexpr(filters.BEYOND), tl.constexpr(filters.STEPS), tl.constexpr(filters.FARTHEST)
LOG2E_STEP = tl.constexpr(filters.HALVINGS)
C0, C1, C2, C3, C4, C5, C6 = (tl.constexpr(c) for c in filters.EXP2)


@triton.jit
def load_float(words, word):
    """Load one of a row's rules that is a float32."""
    return tl.load(words + word).to(tl.float32, bitcast=True)


@triton.jit
def load_scores(logits, token, inside, words, counts, vocab):
    """Load logits of one row as float32, with the row's penalties; -inf where not `inside`."""
    score = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    if (tl.load(words + FLAGS) & PENALISED) != 0:
        table_row = tl.load(words + TABLE_ROW).to(tl.int64)
        entry = tl.load(counts + table_row * vocab + token, mask=inside, other=0).to(tl.int32)
        repetition = load_float(words, REPETITION)
        repeated = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
        score = tl.where(entry > 0, repeated, score)
        times = entry >> 1
        lower = load_float(words, PRESENCE) + load_float(words, FREQUENCY) * times.to(tl.float32)
        score = tl.where(times > 0, score - lower, score)
    return score


@triton.jit
def distances(score, highest, temperature):
    """Stage A's `distances` of scores, given the row's highest: int32."""
    scaled = (score - highest) * tl.div_rn(1.0, temperature)
    return (tl.minimum(-scaled, BEYOND) * STEPS).to(tl.int32)


@triton.jit
def weights(distance):
    """Stage A's `weights`, operation for operation: int64."""
    halvings = distance.to(tl.float32) * LOG2E_STEP
    whole = halvings.to(tl.int32)
    x = halvings - whole.to(tl.float32)
    power = ((((C6 * x + C5) * x + C4) * x + C3) * x + C2) * x + C1
    power = power * x + C0
    return (power * 16777216.0).to(tl.int64) << 16 >> whole.to(tl.int64)


@triton.jit
def meet(arrived, times, PARTS: tl.constexpr):
    """Wait until all programs of a row have come here for the `times`-th time; what they wrote can be read then."""
    tl.debug_barrier()
    if PARTS > 1:
        tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
        while tl.atomic_add(arrived, 0, sem="acquire", scope="gpu") < times * PARTS:
            pass
        tl.debug_barrier()


@triton.jit
def find_cut_kernel(
    cuts,  # int32 [rows], written where a row has a filter
    highest,  # float32 [rows], written there too
    logits,  # [rows, vocab]
    temperatures,  # float32 [rows]
    rules,  # int32 [rows, WORDS]
    counts,  # [table rows, vocab]
    best_of_part,  # float32 [rows, PARTS]
    tokens_by_digit,  # int32 [rows, DIGITS, BINS]
    mass_by_digit,  # int64 [rows, DIGITS, BINS]
    arrived,  # int32 [rows], zero before; `best_of_row_kernel` makes it zero again
    vocab,
    row_stride,
    PARTS: tl.constexpr,  # programs per row
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    words = rules + row * WORDS
    if (tl.load(words + FLAGS) & FILTERED) == 0:
        return
    logits += row * row_stride
    best_of_part += row * PARTS
    tokens_by_digit += row * _DIGITS * _BINS
    mass_by_digit += row * _DIGITS * _BINS
    arrived += row
    temperature = tl.load(temperatures + row)
    bins = tl.arange(0, _BINS)
    each = tl.cdiv(tl.cdiv(vocab, PARTS), BLOCK) * BLOCK
    first = part * each
    last = tl.minimum(first + each, vocab)

    if part == 0:
        for digit in tl.static_range(_DIGITS):
            tl.store(tokens_by_digit + digit * _BINS + bins, tl.zeros([_BINS], tl.int32))
            tl.store(mass_by_digit + digit * _BINS + bins, tl.zeros([_BINS], tl.int64))
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, load_scores(logits, token, token < last, words, counts, vocab))
    tl.store(best_of_part + part, tl.max(best, 0))
    met = 1
    meet(arrived, met, PARTS)
    top = tl.max(tl.load(best_of_part + tl.arange(0, PARTS), volatile=True), 0)

    # top-k: the distance of the k-th nearest token.
    kept = tl.full([], ALL, tl.int32)
    top_k = tl.load(words + TOP_K)
    prefix, nearer, digit = 0, 0, 0
    if top_k > 0:
        while digit < _DIGITS:
            shift = (_DIGITS - 1 - digit) * _BITS
            tokens = tl.zeros([_BINS], tl.int32)
            for start in range(first, last, BLOCK):
                token = start + tl.arange(0, BLOCK)
                inside = token < last
                distance = distances(load_scores(logits, token, inside, words, counts, vocab), top, temperature)
                inside = inside & ((distance >> shift >> _BITS) == prefix)
                tokens += tl.histogram((distance >> shift) & (_BINS - 1), _BINS, mask=inside)
            place = tokens_by_digit + digit * _BINS + bins
            tl.atomic_add(place, tokens, mask=tokens > 0, sem="relaxed", scope="gpu")
            digit += 1
            met += 1
            meet(arrived, met, PARTS)
            tokens = tl.load(place, volatile=True)
            below = tl.sum((tl.cumsum(tokens, 0) + nearer < top_k).to(tl.int32), 0)
            nearer += tl.sum(tl.where(bins < below, tokens, 0), 0)
            prefix = prefix * _BINS + below
            kept = (prefix + 1 << shift) - 1
            if nearer + tl.sum(tl.where(bins == below, tokens, 0), 0) == top_k:
                digit = _DIGITS  # the bin ends with the k-th token: its other digits need not be known

    # top-p: the distance at which the weight of the nearest reaches p times that of all that are left.
    top_p = load_float(words, TOP_P)
    if top_p < 1.0:
        mass_below, wanted = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
        prefix, digit = 0, 0
        while digit < _DIGITS:
            shift = (_DIGITS - 1 - digit) * _BITS
            place = mass_by_digit + digit * _BINS
            for start in range(first, last, BLOCK):
                token = start + tl.arange(0, BLOCK)
                inside = token < last
                distance = distances(load_scores(logits, token, inside, words, counts, vocab), top, temperature)
                weight = weights(distance)
                inside = inside & (distance <= kept) & ((distance >> shift >> _BITS) == prefix) & (weight > 0)
                tl.atomic_add(
                    place + ((distance >> shift) & (_BINS - 1)), weight, mask=inside, sem="relaxed", scope="gpu"
                )
            digit += 1
            met += 1
            meet(arrived, met, PARTS)
            mass = tl.load(place + bins, volatile=True)
            if digit == 1:
                wanted = (tl.sum(mass, 0).to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
                wanted = tl.maximum(wanted, 1)
            below = tl.sum((tl.cumsum(mass, 0) + mass_below < wanted).to(tl.int32), 0)
            mass_below += tl.sum(tl.where(bins < below, mass, 0), 0)
            prefix = prefix * _BINS + below
        kept = tl.minimum(kept, prefix)
    if part == 0:
        tl.store(cuts + row, tl.minimum(kept, tl.load(words + FARTHEST)))
        tl.store(highest + row, top)
