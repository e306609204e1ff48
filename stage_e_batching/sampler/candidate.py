"""Sample from a row with top-p or min-p and without top-k: check the winner instead of finding the cut-off.

The sampled token is the one with the highest score plus noise of all tokens that the filters keep. So take the token
with the highest sum of the whole row, the *candidate*. If the filters keep it, it is the row's token. A token is in the
nucleus if the tokens that are nearer to the best score have less than the share p of the row's weight, so one sum over
the row tells. If the candidate is not in the nucleus, no token that is as far away is in it either, and the next
candidate is the best of the nearer ones. With top-p 0.9 nine of ten candidates are kept. One pass finds a candidate and
the weight that the check of the previous one needs, so a row is read about twice after its highest score is known,
whether its nucleus has three tokens or sixty thousand.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from stage_e_batching.sampler.arithmetic import ALL, distances, gumbel, load_scores, meet, scale, share_of, weights

NOBODY = tl.constexpr(2**31 - 1)


@triton.jit
def pass_over(
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
    heavy,
    limit,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Add up the weights of a part's tokens nearer than `heavy`, and find the best of those nearer than `limit`.

    Returns the weight, and the best token's score with noise, its id and its distance.
    """
    mass = tl.zeros([BLOCK], tl.int64)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.full([BLOCK], NOBODY, tl.int32)
    best_distance = tl.full([BLOCK], NOBODY, tl.int32)
    for start in range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < last
        score = load_scores(logits, token, inside, counts, penalised, repetition, presence, frequency, NATIVE)
        scaled = scale(score, top, inverse)
        distance = distances(scaled)
        mass += tl.where(inside & (distance < heavy), weights(distance, NATIVE), 0)
        score = tl.where(inside & (distance < limit), scaled + gumbel(token, key, NATIVE), float("-inf"))
        better = score > best  # of equals the lowest id stays
        best = tl.where(better, score, best)
        best_token = tl.where(better, token, best_token)
        best_distance = tl.where(better, distance, best_distance)
    highest = tl.max(best, 0)
    winner = tl.min(tl.where(best == highest, best_token, NOBODY), 0)
    return tl.sum(mass, 0), highest, winner, tl.min(tl.where(best_token == winner, best_distance, NOBODY), 0)


@triton.jit
def choose_candidate(
    found_mass,  # int64 [2, MOST_PARTS], what each part of the row has found; two, because a part may be a pass ahead
    found_scores,  # float32 [2, MOST_PARTS]
    found_tokens,  # int32 [2, MOST_PARTS]
    found_distances,  # int32 [2, MOST_PARTS]
    arrived,  # the row's programs have met once
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
    BLOCK: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Choose a row's token; all programs of the row return the same."""
    others = tl.arange(0, MOST_PARTS)
    met = 1
    chosen = tl.full([], -1, tl.int32)
    candidate = tl.full([], -1, tl.int32)
    wanted = tl.zeros([], tl.int64)
    heavy = tl.full([], ALL + 1, tl.int32)  # in the first pass, the weight of the whole row
    limit = farthest + 1
    while chosen < 0:
        mass, score, token, distance = pass_over(
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
            heavy,
            limit,
            BLOCK,
            NATIVE,
        )
        at = met % 2 * MOST_PARTS + part
        tl.store(found_mass + at, mass)
        tl.store(found_scores + at, score)
        tl.store(found_tokens + at, token)
        tl.store(found_distances + at, distance)
        place = met % 2 * MOST_PARTS + others
        met += 1
        meet(arrived, met, parts)
        there = others < parts
        mass = tl.sum(tl.load(found_mass + place, mask=there, other=0, volatile=True), 0)
        scores = tl.load(found_scores + place, mask=there, other=float("-inf"), volatile=True)
        tokens = tl.load(found_tokens + place, mask=there, other=NOBODY, volatile=True)
        far = tl.load(found_distances + place, mask=there, other=NOBODY, volatile=True)
        if candidate < 0:
            wanted = share_of(mass, top_p)
        elif mass < wanted:
            chosen = candidate
        candidate = tl.min(tl.where(scores == tl.max(scores, 0), tokens, NOBODY), 0)
        limit = tl.min(tl.where(tokens == candidate, far, NOBODY), 0)
        heavy = limit
        if (chosen < 0) & ((top_p >= 1.0) | (limit == 0)):  # without a check: the best score is always kept
            chosen = candidate
    return chosen
