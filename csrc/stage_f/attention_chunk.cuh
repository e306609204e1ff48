// The tokens that a warp attends to at once: 16 cached tokens, or this step's token.
//
// Layouts follow the matrix instruction. With g = lane / 4, q = lane % 4: queries and keys are loaded as 16 bytes,
// columns 32 s + 8 q, of head or token g (the same reordering of columns as in gemv.cuh). Rotary pairs (d, d +
// D/2) then lie in one lane, and a head's norm is a sum over the 4 lanes of a quad. The probabilities come out of the
// first product in the layout in which the second wants them.
#pragma once

#include "stage_f/attention_parts.cuh"

namespace six_engines {

constexpr int kHeadSteps = kHeadDim / 32, kHeadSets = kHeadDim / 64;
constexpr float kScale = (kHeadDim == 64 ? 0.125f : 0.08838834764831845f) * 1.4426950408889634f;  // to base 2

// A warp's running result: of head g, dimensions 64 set + 8 (2 q + n) + j.
struct Attended {
  float largest = -INFINITY, sum = 0.0f, acc[kHeadSets][8][2] = {};  // the sum is this lane's share
};

// This step's own token: its key and value come straight from the projection, and go into the cache as well.
template <typename W>
__device__ __forceinline__ void attend_fresh(const W& w, T* keys, const uint4 (&query)[kHeadSteps],
                                             const uint4 (&key)[kHeadSteps], const RawValue& raw, Attended& out) {
  const DecodeStep& s = w.step;
  const int g = w.lane >> 2, q = w.lane & 3;
  float score = 0.0f;
#pragma unroll
  for (int step = 0; step < kHeadSteps; ++step) {
    const uint32_t a[4] = {query[step].x, query[step].y, query[step].z, query[step].w};
    const uint32_t b[4] = {key[step].x, key[step].y, key[step].z, key[step].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack_pair<T>(a[i]), y = unpack_pair<T>(b[i]);
      score += x.x * y.x + x.y * y.y;
    }
    if (g == 0) *reinterpret_cast<uint4*>(keys + step * 32 + q * 8) = key[step];
  }
  score += __shfl_xor_sync(kAllLanes, score, 1);
  score += __shfl_xor_sync(kAllLanes, score, 2);
  score *= kScale;
  const float top = fmaxf(out.largest, score), shrink = exp2_approx(out.largest - top), p = exp2_approx(score - top);
  out.largest = top;
  out.sum = out.sum * shrink + (q == 0 ? p : 0.0f);
#pragma unroll
  for (int set = 0; set < kHeadSets; ++set) {
    uint32_t pairs[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      pairs[i] = payload(raw.words[set][i / 2][i % 2]);
      const float2 value = unpack_pair<T>(pairs[i]);
      float &x = out.acc[set][i % 4 * 2][i / 4], &y = out.acc[set][i % 4 * 2 + 1][i / 4];
      x = x * shrink + p * value.x;
      y = y * shrink + p * value.y;
    }
    auto* cell = reinterpret_cast<uint4*>(keys + layer_elements(s) * kLayers + set * 64 + q * 16);
    if (g == 0) {
      cell[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      cell[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    }
  }
}

constexpr int kTokenStride = kKvHeads * kHeadDim;

// 16 cached tokens, in registers: their keys and values.
struct Chunk {
  uint4 k[2][kHeadSteps], v[kHeadSets][4];

  template <typename W>
  __device__ __forceinline__ void load_keys(const W& w, int cached, const T* keys) {
    const int g = w.lane >> 2, q = w.lane & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 0; step < kHeadSteps; ++step) {
        k[i][step] = make_uint4(0, 0, 0, 0);
        if (i * 8 + g < cached)
          k[i][step] = *reinterpret_cast<const uint4*>(keys + (i * 8 + g) * kTokenStride + step * 32 + q * 8);
      }
    }
  }

  template <typename W>
  __device__ __forceinline__ void load_values(const W& w, int cached, const T* values) {
    const int g = w.lane >> 2, q = w.lane & 3;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 2 * q + (i & 1) + (i & 2) * 4;
#pragma unroll
      for (int set = 0; set < kHeadSets; ++set) {
        v[set][i] = make_uint4(0, 0, 0, 0);
        if (token < cached)
          v[set][i] = *reinterpret_cast<const uint4*>(values + token * kTokenStride + set * 64 + g * 8);
      }
    }
  }
};

template <typename W, typename Then>
__device__ __forceinline__ void attend_chunk(const W& w, const Chunk& tokens, int cached,
                                             const uint4 (&query)[kHeadSteps], Attended& out, Then keys_are_used) {
  const int q = w.lane & 3;
  float p[2][4] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int step = 0; step < kHeadSteps; ++step) {
      mma<T>(p[i], query[step].x, 0u, query[step].y, 0u, tokens.k[i][step].x, tokens.k[i][step].y);
      mma<T>(p[i], query[step].z, 0u, query[step].w, 0u, tokens.k[i][step].z, tokens.k[i][step].w);
    }
  }
  keys_are_used();
  float top = out.largest;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& score = p[i / 2][i % 2];
    score = i / 2 * 8 + 2 * q + i % 2 < cached ? score * kScale : -INFINITY;
    top = fmaxf(top, score);
  }
  top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
  top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
  const float shrink = exp2_approx(out.largest - top);
  out.largest = top;
  out.sum *= shrink;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& score = p[i / 2][i % 2];
    score = exp2_approx(score - top);
    out.sum += score;
  }
  const uint32_t p_low = pack_pair<T>(p[0][0], p[0][1]), p_high = pack_pair<T>(p[1][0], p[1][1]);
#pragma unroll
  for (int set = 0; set < kHeadSets; ++set) {
    const uint4(&v)[4] = tokens.v[set];
#pragma unroll
    for (int j = 0; j < 8; ++j) {  // column n of tile j is dimension 8 n + j of the set
      const auto pick = [&](const uint4& x) { return j / 2 == 0 ? x.x : j / 2 == 1 ? x.y : j / 2 == 2 ? x.z : x.w; };
      constexpr uint32_t kEven = 0x5410, kOdd = 0x7632;
      const uint32_t b0 = __byte_perm(pick(v[0]), pick(v[1]), j % 2 ? kOdd : kEven);
      const uint32_t b1 = __byte_perm(pick(v[2]), pick(v[3]), j % 2 ? kOdd : kEven);
      float c[4] = {out.acc[set][j][0] * shrink, out.acc[set][j][1] * shrink, 0.0f, 0.0f};
      mma<T>(c, p_low, 0u, p_high, 0u, b0, b1);
      out.acc[set][j][0] = c[0];
      out.acc[set][j][1] = c[1];
    }
  }
}

}  // namespace six_engines
