// Chooses the token of each row where the logits are computed: a partial argmax by each lane that holds logits.
//
// At temperature 0 a token is the argmax of the logits, otherwise of logit / temperature + noise (Gumbel-max). The
// noise is stage A's: a hash of the row's key and the token's id, so every lane makes its own. A lane keeps the best of
// its logits, a warp of its lanes, a block of its warps; the blocks' go to block 0 in flag-in-data words, as
// activations travel between blocks, and the row's token comes out. Of equal scores the smallest id wins.
#pragma once

#include "stage_f/worker.cuh"

namespace six_engines {

constexpr int kNoToken = -2;  // `NO_TOKEN` of stage A

struct Candidate {
  float logit, noise;
  int id;
};

// The values with which a row's candidates are compared.
struct Choice {
  float inverse;  // 1 / temperature, 1 for greedy rows
  unsigned key;   // of the noise
  bool greedy;
};

__device__ __forceinline__ Choice choice_of(const DecodeStep& s, int row) {
  const float temperature = fminf(s.temperatures[row], 1e30f);  // above it only the noise decides, as here
  return {temperature == 0.0f ? 1.0f : 1.0f / temperature, static_cast<unsigned>(s.noise_keys[row]),
          temperature == 0.0f};
}

// Whether `a` is the better token. Differences are compared, because at a temperature near 0 the scores themselves may
// be larger than a float.
__device__ __forceinline__ bool better(const Candidate& a, const Candidate& b, float inverse) {
  const float lead = (a.logit - b.logit) * inverse + (a.noise - b.noise);
  return lead > 0.0f || (lead == 0.0f && a.id < b.id);
}

__device__ __forceinline__ unsigned mix32(unsigned x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// -log(-log(u)), as stage E's sampler kernel computes it; there it says why -log(u) close to u = 1 is a series.
__device__ __forceinline__ float gumbel(int id, unsigned key) {
  const unsigned bits = mix32(mix32(id) ^ key);
  const float uniform = (static_cast<float>(bits >> 9) + 0.5f) * (1.0f / 8388608.0f), x = 1.0f - uniform;
  const float series = x * (1.0f + x * (0.5f + x * (0.33333334f + x * 0.25f)));
  return log2_approx(x < 0.015625f ? series : log2_approx(uniform) * -0.6931472f) * -0.6931472f;
}

// NaN counts as +inf, which is better than any number, so a row's best value reveals that it has either.
__device__ __forceinline__ Candidate candidate_of(const Choice& choice, float logit, int id) {
  return {logit == logit ? logit : INFINITY, choice.greedy ? 0.0f : gumbel(id, choice.key), id};
}

// The best of lanes whose numbers differ in the bits `from` … `to`.
__device__ __forceinline__ Candidate best_of_lanes(Candidate best, const Choice& choice, int from, int to) {
  for (int offset = from; offset <= to; offset *= 2) {
    const Candidate other{__shfl_xor_sync(kAllLanes, best.logit, offset),
                          __shfl_xor_sync(kAllLanes, best.noise, offset), __shfl_xor_sync(kAllLanes, best.id, offset)};
    if (better(other, best, choice.inverse)) best = other;
  }
  return best;
}

// The best logit of each row in the tiles of one warp; what the LM head's warps leave to `choose_tokens`.
template <typename W>
__device__ __forceinline__ Candidate* best_of_warps(const W& w, int row) {  // [kWarps], where partial sums were
  return w.template shared<Candidate>(W::At::kPartialAt) + row * kWarps;
}

// In block 0: the best of all blocks. A lane looks at every 32nd block; false if the step has timed out.
template <typename W>
__device__ __forceinline__ bool best_of_blocks(W& w, const Choice& choice, const Word* words, Candidate& best) {
  constexpr int kEach = kMaxBlocks / 32;
  Word raw[kEach][2] = {};
  wait_words(w, [&] {
    bool ready = true;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int block = i * 32 + w.lane;
      if (block >= gridDim.x) continue;
      peek2(words + block * 2, raw[i]);
      ready = ready && has_flag(raw[i][0], w.flag) && has_flag(raw[i][1], w.flag);
    }
    return ready;
  });
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i * 32 + w.lane >= gridDim.x) continue;
    const Candidate other = candidate_of(choice, __uint_as_float(payload(raw[i][0])), payload(raw[i][1]));
    if (better(other, best, choice.inverse)) best = other;
  }
  best = best_of_lanes(best, choice, 1, 16);
  return __all_sync(kAllLanes, w.waits);
}

// One warp per row. A block in which a wait timed out does not come here, so block 0 times out as well: no token of
// such a step is kept.
template <typename W>
__device__ __forceinline__ void choose_tokens(W& w) {
  const DecodeStep& s = w.step;
#pragma unroll 1
  for (int row = w.warp; row < s.rows; row += kWarps) {
    const Choice choice = choice_of(s, row);
    Candidate best = best_of_lanes(best_of_warps(w, row)[min(w.lane, kWarps - 1)], choice, 1, 16);
    Word* words = w.words + kCandidatesAt + row * kMaxBlocks * 2;
    if (w.lane == 0)
      publish2(words + blockIdx.x * 2, flagged(__float_as_uint(best.logit), w.flag), flagged(best.id, w.flag));
    if (blockIdx.x != 0 || !best_of_blocks(w, choice, words, best) || w.lane != 0) continue;
    s.last_tokens[s.batch_slots[row]] = best.id;
    s.result[row] = fabsf(best.logit) < INFINITY ? best.id : kNoToken;  // the next step may run on it all the same
  }
}

// Closes the step, in block 0. It has received words of all blocks (or given up): they have read the step's number.
template <typename W>
__device__ __forceinline__ void close_step(const W& w, unsigned step_number) {
  volatile unsigned* words = w.control();
  words[0] = step_number + 1;
  w.step.result[w.step.rows] = words[1];
}

}  // namespace six_engines
