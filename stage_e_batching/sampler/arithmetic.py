"""Stage A's arithmetic of sampling as Triton functions: penalties, distances, weights, noise; and a barrier.

Every operation that decides which tokens are kept rounds as PyTorch does. A compiler that fuses a product with a sum
rounds once where PyTorch rounds twice, so a product before a sum uses `multiply`. The noise is less exact: it uses the
GPU's logarithm instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

import stage_d_paged.sampler.rules as rules
from stage_a_naive.contract import filters

WORDS = tl.constexpr(rules.WORDS)
FLAGS, TOP_K, TOP_P, FARTHEST = (tl.constexpr(word) for word in (rules.FLAGS, rules.TOP_K, rules.TOP_P, rules.FARTHEST))
REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(word) for word in (rules.REPETITION, rules.PRESENCE, rules.FREQUENCY))
TABLE_ROW = tl.constexpr(rules.TABLE_ROW)
FILTERED, PENALISED = tl.constexpr(rules.FILTERED), tl.constexpr(rules.PENALISED)
HOTTEST = tl.constexpr(filters.HOTTEST)
BEYOND, STEPS, ALL = tl.constexpr(filters.BEYOND), tl.constexpr(filters.STEPS), tl.constexpr(filters.FARTHEST)
LOG2E_STEP = tl.constexpr(filters.HALVINGS)
C0, C1, C2, C3, C4, C5, C6 = (tl.constexpr(c) for c in filters.EXP2)


@triton.jit
def load_float(words, word):
    """Load one of a row's rules that is a float32."""
    return tl.load(words + word).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(logits, token, inside):
    """Load logits of one row as float32; -inf where not `inside`, and +inf for NaN, which no maximum overlooks."""
    logit = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(logit != logit, float("inf"), logit)


@triton.jit
def is_infinite(highest):
    """Tell whether a row's highest score is infinite; NaN counts as +inf."""
    return (highest == float("inf")) | (highest == float("-inf"))


@triton.jit
def multiply(a, b, NATIVE: tl.constexpr):
    """Compute a product that the compiler does not fuse with an addition, so that it rounds as PyTorch's does."""
    if NATIVE:
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)
    return a * b


@triton.jit
def load_penalties(words):
    """Load a row's penalties: whether it has any, its row of counts, and the three strengths."""
    penalised = (tl.load(words + FLAGS) & PENALISED) != 0
    table_row = tl.where(penalised, tl.load(words + TABLE_ROW), 0).to(tl.int64)
    repetition = tl.where(penalised, load_float(words, REPETITION), 1.0)
    return penalised, table_row, repetition, load_float(words, PRESENCE), load_float(words, FREQUENCY)


@triton.jit
def load_scores(logits, token, inside, counts, penalised, repetition, presence, frequency, NATIVE: tl.constexpr):
    """Load logits of one row as `load_logits`, with the row's penalties.

    `counts` is the row's, and not read unless it is `penalised`.
    """
    score = load_logits(logits, token, inside)
    if penalised:
        entry = tl.load(counts + token, mask=inside, other=0).to(tl.int32)
        repeated = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
        score = tl.where(entry > 0, repeated, score)
        times = entry >> 1
        lower = presence + multiply(tl.zeros_like(score) + frequency, times.to(tl.float32), NATIVE)
        score = tl.where(times > 0, score - lower, score)
        score = tl.where(score != score, float("inf"), score)
    return score


@triton.jit
def scale(score, highest, inverse):
    """Stage A's scaled score: its distance from the highest, times 1 / temperature."""
    return (score - highest) * inverse


@triton.jit
def distances(scaled):
    """Stage A's `distances`: int32."""
    return (tl.minimum(-scaled, BEYOND) * STEPS).to(tl.int32)


@triton.jit
def _times_plus(a, x, b, NATIVE: tl.constexpr):
    return multiply(a, x, NATIVE) + b


@triton.jit
def weights(distance, NATIVE: tl.constexpr):
    """Stage A's `weights`, operation for operation: int64."""
    halvings = multiply(distance.to(tl.float32), tl.full([], LOG2E_STEP, tl.float32), NATIVE)
    whole = halvings.to(tl.int32)
    x = halvings - whole.to(tl.float32)
    power = tl.zeros_like(x) + C6
    power = _times_plus(power, x, C5, NATIVE)
    power = _times_plus(power, x, C4, NATIVE)
    power = _times_plus(power, x, C3, NATIVE)
    power = _times_plus(power, x, C2, NATIVE)
    power = _times_plus(power, x, C1, NATIVE)
    power = _times_plus(power, x, C0, NATIVE)
    return (power * 16777216.0).to(tl.int64) << 16 >> whole.to(tl.int64)


@triton.jit
def _mix32(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log2(x, NATIVE: tl.constexpr):
    if NATIVE:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def gumbel(token, key, NATIVE: tl.constexpr):
    """Compute `-log(-log(u))` with the GPU's base-2 logarithm instruction.

    Between 1/2 and 2 that instruction has an absolute error of up to 2**-22. That is too much for -log(u) with u close
    to 1, where the winners are. There the series of -log(1 - x) is used.
    """
    bits = _mix32(_mix32(token.to(tl.uint32)) ^ key)
    uniform = ((bits >> 9).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    x = 1.0 - uniform  # exact
    series = x * (1.0 + x * (0.5 + x * (0.33333334 + x * 0.25)))
    exponential = tl.where(x < 0.015625, series, _log2(uniform, NATIVE) * -0.6931472)
    return _log2(exponential, NATIVE) * -0.6931472


@triton.jit
def share_of(mass, top_p):
    """Return the weight, at least 1, that a nucleus must reach."""
    return tl.maximum((mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def meet(arrived, times, parts):
    """Wait until all programs of a row have reached their `times`-th barrier; then their writes are visible."""
    tl.debug_barrier()
    if parts > 1:
        tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
        while tl.atomic_add(arrived, 0, sem="acquire", scope="gpu") < times * parts:
            pass
        tl.debug_barrier()


@triton.jit
def load_temperature(temperatures, row):
    return tl.minimum(tl.load(temperatures + row), HOTTEST)


@triton.jit
def best_of_stretch(logit, highest, token, temperature, key, NATIVE: tl.constexpr):
    """Find the winner's index in a stretch of a row: logits, their maximum, their tokens."""
    if temperature == 0.0:
        best = tl.argmax(logit, 0, tie_break_left=True)
    else:
        # A stretch may be filtered out entirely: -inf minus -inf would be NaN.
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        best = tl.argmax((logit - shift) * (1.0 / temperature) + gumbel(token, key, NATIVE), 0, tie_break_left=True)
    return best
