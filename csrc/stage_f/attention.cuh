// Attention of one decode step: a block takes (row, KV head, part of the cached tokens), its warps a chunk of 16 tokens
// each in turn, up to 8 query heads at once (flash attention's running maximum and sum, Dao et al. 2022).
//
// The warps' results are merged in shared memory. What a block publishes is normalised, with the logarithm of the sum
// that it was divided by, and the readers, which multiply with it, merge the few parts themselves (flash-decoding): one
// hand-off instead of two.
//
// Layouts follow the matrix instruction. With g = lane / 4, q = lane % 4: queries and keys are loaded as 16 bytes,
// columns 32 s + 8 q, of head or token g (the same reordering of columns as in gemv.cuh). Rotary pairs (d, d +
// D/2) then lie in one lane, and a head's norm is a sum over the 4 lanes of a quad. The probabilities come out of the
// first product in the layout in which the second wants them.
#pragma once

#include "stage_f/attention_parts.cuh"

namespace six_engines {

constexpr int kHeadSteps = kHeadDim / 32, kHeadSets = kHeadDim / 64;

// A warp's running result: of head g, dimensions 64 set + 8 (2 q + n) + j.
struct Attended {
  float largest = -INFINITY, sum = 0.0f, acc[kHeadSets][8][2] = {};  // the sum is this lane's share
};

// This step's own token: its key and value come straight from the projection, and go into the cache as well.
template <typename W>
__device__ __forceinline__ void attend_fresh(const W& w, const AttentionItem& item, int layer,
                                             const uint4 (&query)[kHeadSteps], const uint4 (&key)[kHeadSteps],
                                             const RawValue& raw, float scale, Attended& out) {
  const DecodeStep& s = w.step;
  const int g = w.lane >> 2, q = w.lane & 3;
  T* keys = static_cast<T*>(s.kv_cache) + layer_elements(s) * layer +
            (s.slot_mapping[item.row] * kKvHeads + item.kv_head) * kHeadDim;
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
  score *= scale;
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
constexpr bool kValuesEarly = kHeadDim == 64;  // before the query is there; with 128 registers do not suffice

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

template <typename W>
__device__ __forceinline__ void attend_chunk(const W& w, const Chunk& tokens, int cached,
                                             const uint4 (&query)[kHeadSteps], float scale, Attended& out) {
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
  float top = out.largest;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& score = p[i / 2][i % 2];
    score = i / 2 * 8 + 2 * q + i % 2 < cached ? score * scale : -INFINITY;
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

// One warp's share of an item: every seventh chunk of it. False if there is none.
template <typename W>
__device__ __forceinline__ bool attend(W& w, const AttentionItem& item, int layer, const LayerWeights& weights,
                                       Attended& out) {
  const DecodeStep& s = w.step;
  const int first = item.begin + w.warp;
  if (first >= item.end) return false;
  const int last = first + (item.end - 1 - first) / kWarps * kWarps;
  const bool fresh = last == item.chunks;
  const int group_head = item.kv_head * kGroup + min(w.lane >> 2, kGroup - 1);  // rows without a head repeat the last
  const T* keys = static_cast<const T*>(s.kv_cache) + layer_elements(s) * layer;
  const Word* projected = w.template handed_off<kQkv>(w.parity, item.row);
  const float scale = rsqrtf(static_cast<float>(kHeadDim)) * 1.4426950408889634f;  // exponentials are taken to base 2
  const long long values = layer_elements(s) * kLayers;  // behind the keys
  Chunk tokens;
  if (first < item.chunks) {
    const int cached = item.context - 1 - first * kAttentionChunk;
    tokens.load_keys(w, cached, keys + item.cell);
    if (kValuesEarly) tokens.load_values(w, cached, keys + item.cell + values);
  }
  uint4 query[kHeadSteps], key[kHeadSteps];
  RawHead raw_query, raw_key;
  RawValue raw_value;
  wait_words(w, [&] {
    bool ready = raw_query.look(w, projected + group_head * (kHeadDim / 2));
    if (fresh) {
      ready = raw_key.look(w, projected + (kHeads + item.kv_head) * (kHeadDim / 2)) && ready;
      ready = raw_value.look(w, projected + (kHeads + kKvHeads + item.kv_head) * (kHeadDim / 2)) && ready;
    }
    return ready;
  });
  rotate_head(w, raw_query, weights.q_norm, item.row, query);
  if (fresh) {
    rotate_head(w, raw_key, weights.k_norm, item.row, key);
    attend_fresh(w, item, layer, query, key, raw_value, scale, out);
  }
#pragma unroll 1
  for (int chunk = first; chunk < min(item.end, item.chunks); chunk += kWarps) {
    const T* cell = keys + (chunk == first ? item.cell : chunk_cell(w, item.row, item.kv_head, chunk));
    const int cached = item.context - 1 - chunk * kAttentionChunk;
    if (chunk > first) tokens.load_keys(w, cached, cell);
    if (chunk > first || !kValuesEarly) tokens.load_values(w, cached, cell + values);
    attend_chunk(w, tokens, cached, query, scale, out);
  }
  out.sum += __shfl_xor_sync(kAllLanes, out.sum, 1);
  out.sum += __shfl_xor_sync(kAllLanes, out.sum, 2);
  return true;
}

// Where a warp leaves head g: in shared memory, for `merge_warps`.
constexpr int kMergeStride = kHeadDim + 4;
template <typename W>
__device__ __forceinline__ float* merge_place(const W& w, int warp, int g) {
  return w.template shared<float>(W::At::kActAt) + (warp * kGroup + g) * kMergeStride;
}

template <typename W>
__device__ __forceinline__ void leave(const W& w, const Attended& out) {
  const int g = w.lane >> 2, q = w.lane & 3;
  if (g >= kGroup) return;
  float* at = merge_place(w, w.warp, g);
#pragma unroll
  for (int set = 0; set < kHeadSets; ++set) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 0; j < 8; j += 4)
        *reinterpret_cast<float4*>(at + set * 64 + (2 * q + n) * 8 + j) = make_float4(
            out.acc[set][j][n], out.acc[set][j + 1][n], out.acc[set][j + 2][n], out.acc[set][j + 3][n]);
    }
  }
  if (q == 0) *reinterpret_cast<float2*>(at + kHeadDim) = make_float2(out.largest, out.sum);
}

// Adds up the block's warps: a thread 4 dimensions of one head, which it publishes with the logarithm of their sum.
template <typename W>
__device__ __forceinline__ void merge_warps(W& w, const AttentionItem& item) {
  const int warps = min(kWarps, item.end - item.begin);
#pragma unroll 1
  for (int unit = w.thread; unit < kGroup * kHeadDim / 4; unit += kWorkers) {
    const int g = unit / (kHeadDim / 4), column = unit % (kHeadDim / 4) * 4;
    float2 state[kWarps];
    float4 value[kWarps];
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      state[i] = make_float2(-INFINITY, 0.0f);
      value[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (i >= warps) continue;
      const float* at = merge_place(w, i, g);
      state[i] = *reinterpret_cast<const float2*>(at + kHeadDim);
      value[i] = *reinterpret_cast<const float4*>(at + column);
    }
#pragma unroll
    for (int i = 0; i < kWarps; ++i) largest = fmaxf(largest, state[i].x);
    float sum = 0.0f, x[4] = {};
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const float weight = exp2_approx(state[i].x - largest);
      sum += weight * state[i].y;
      x[0] += weight * value[i].x;
      x[1] += weight * value[i].y;
      x[2] += weight * value[i].z;
      x[3] += weight * value[i].w;
    }
    const float inverse = __fdividef(1.0f, sum);
    publish_quad(part_place(w, item.row, item.part) + (item.kv_head * kGroup + g) * (kHeadDim / 4) + column / 4,
                 {pack_pair<T>(x[0] * inverse, x[1] * inverse), pack_pair<T>(x[2] * inverse, x[3] * inverse),
                  __float_as_uint(largest + log2_approx(sum)), w.flag});
  }
}

// The items that fall to this block.
template <typename W>
__device__ __forceinline__ void attention_phase(W& w, int layer, const LayerWeights& weights) {
  const int items = row_table(w)[3 * kMaxDecodeRows];
#pragma unroll 1
  for (int index = blockIdx.x; index < items; index += kGrid) {
    const bool first = index < kGrid;  // the warp's first item is the same in every layer: prepared once
    const AttentionItem* own = w.template shared<AttentionItem>(W::At::kItemsAt) + w.warp;
    const AttentionItem item = first ? *own : attention_item(w, index);
    if (!item.exists) continue;
    if (!first) workers_sync();
    Attended out;
    if (attend(w, item, layer, weights, out)) leave(w, out);
    workers_sync();
    merge_warps(w, item);
    if (first) prefetch_item(w, item, layer + 1);
  }
  w.mark();
}

}  // namespace six_engines
