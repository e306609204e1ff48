// Attention of one decode step, without shared memory and without a barrier: the unit of work is a warp.
//
// First kernel half: a warp takes (row, KV head, split): up to 8 query heads that share the KV head, against 16 cached
// tokens at a time (flash attention's running maximum and sum, Dao et al. 2022), and publishes its unnormalised part.
// Second half: a warp takes (row, head, 8 dimensions) and merges the splits (flash-decoding).
//
// Layouts follow the matrix instruction. With g = lane / 4, q = lane % 4: queries and keys are loaded as 16 bytes,
// columns 32 s + 8 q, of head or token g (the same reordering of columns as in gemv.cuh). Rotary pairs (d, d +
// D/2) then lie in one lane, and a head's norm is a sum over the 4 lanes of a quad. The probabilities come out of the
// first product in the layout in which the second wants them.
#pragma once

#include "stage_f/attention_parts.cuh"

namespace six_engines {

// This step's own token: a split of its own, whose softmax is 1; it also goes into the cache.
template <typename T, int D>
__device__ __forceinline__ void attend_fresh(Worker& w, const AttentionItem& item, int layer,
                                             const LayerWeights& weights, const Word* projected, float scale,
                                             float& largest, float& sum,
                                             float (&acc)[D / 64][8][2]) {
  const DecodeStep& s = w.step;
  const int g = w.lane >> 2, q = w.lane & 3, group = s.heads / s.kv_heads;
  T* keys = static_cast<T*>(s.kv_cache) + layer_elements(s, D) * layer +
            (s.slot_mapping[item.row] * s.kv_heads + item.kv_head) * D;
  uint4 query[D / 32], key[D / 32];
  {
    RawHead<D> raw_query, raw_key;
    wait_words(w, [&] {
      const bool ready = raw_query.look(w, projected + (item.kv_head * group + min(g, group - 1)) * (D / 2));
      return raw_key.look(w, projected + (s.heads + item.kv_head) * (D / 2)) && ready;
    });
    rotate_head<T, D>(w, raw_query, weights.q_norm, item.row, query);
    rotate_head<T, D>(w, raw_key, weights.k_norm, item.row, key);
  }
  float score = 0.0f;
#pragma unroll
  for (int step = 0; step < D / 32; ++step) {
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
  largest = score * scale;
  sum = q == 0 ? 1.0f : 0.0f;  // summed over the quad at the end
  uint32_t value[D / 64][8];
  fresh_value<D>(w, projected + (s.heads + s.kv_heads + item.kv_head) * (D / 2), value);
#pragma unroll
  for (int set = 0; set < D / 64; ++set) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = unpack_pair<T>(value[set][i]);
      acc[set][i % 4 * 2][i / 4] = pair.x;
      acc[set][i % 4 * 2 + 1][i / 4] = pair.y;
    }
    auto* cell = reinterpret_cast<uint4*>(keys + layer_elements(s, D) * s.layers + set * 64 + q * 16);
    if (g == 0) {
      cell[0] = make_uint4(value[set][0], value[set][1], value[set][2], value[set][3]);
      cell[1] = make_uint4(value[set][4], value[set][5], value[set][6], value[set][7]);
    }
  }
}

template <typename T, int D>
__device__ __forceinline__ void attend(Worker& w, const AttentionItem& item, int layer, const LayerWeights& weights) {
  constexpr int kSteps = D / 32, kSets = D / 64;
  const DecodeStep& s = w.step;
  const int g = w.lane >> 2, q = w.lane & 3, group = s.heads / s.kv_heads;
  const int token_stride = s.kv_heads * D;
  const T* keys = static_cast<const T*>(s.kv_cache) + layer_elements(s, D) * layer;
  const T* values = keys + layer_elements(s, D) * s.layers;
  const Word* projected = handed_off(w, w.plan.vector_at[kQkv], w.plan.vector_length[kQkv], w.parity, item.row);

  uint4 k[2][kSteps], v[kSets][4], query[kSteps];
  const auto load_keys = [&](int chunk, const T* base) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool cached = chunk * kAttentionChunk + i * 8 + g < item.context - 1;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        k[i][step] = make_uint4(0, 0, 0, 0);
        if (cached) k[i][step] = *reinterpret_cast<const uint4*>(base + (i * 8 + g) * token_stride + step * 32 + q * 8);
      }
    }
  };
  const float scale = rsqrtf(static_cast<float>(D)) * 1.4426950408889634f;  // exponentials are taken to base 2
  float largest = -INFINITY, sum = 0.0f, acc[kSets][8][2] = {};
  if (item.fresh) {
    attend_fresh<T, D>(w, item, layer, weights, projected, scale, largest, sum, acc);
  } else {
    load_keys(item.begin, keys + item.cell);
    RawHead<D> raw;  // instruction rows without a head repeat the last one
    wait_words(w, [&] { return raw.look(w, projected + (item.kv_head * group + min(g, group - 1)) * (D / 2)); });
    rotate_head<T, D>(w, raw, weights.q_norm, item.row, query);
  }
#pragma unroll 1
  for (int chunk = item.begin; chunk < item.end; ++chunk) {
    const long long cell = chunk == item.begin ? item.cell : chunk_cell<D>(w, item.row, item.kv_head, chunk);
    if (chunk > item.begin) load_keys(chunk, keys + cell);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 2 * q + (i & 1) + (i & 2) * 4;
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        v[set][i] = make_uint4(0, 0, 0, 0);
        if (chunk * kAttentionChunk + token < item.context - 1)
          v[set][i] = *reinterpret_cast<const uint4*>(values + cell + token * token_stride + set * 64 + g * 8);
      }
    }
    float p[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        mma<T>(p[i], query[step].x, 0u, query[step].y, 0u, k[i][step].x, k[i][step].y);
        mma<T>(p[i], query[step].z, 0u, query[step].w, 0u, k[i][step].z, k[i][step].w);
      }
    }
    float top = largest;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = p[i / 2][i % 2];
      const int token = chunk * kAttentionChunk + i / 2 * 8 + 2 * q + i % 2;
      score = token < item.context - 1 ? score * scale : -INFINITY;
      top = fmaxf(top, score);
    }
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
    const float shrink = exp2_approx(largest - top);
    largest = top;
    sum *= shrink;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = p[i / 2][i % 2];
      score = exp2_approx(score - top);
      sum += score;
    }
    const uint32_t p_low = pack_pair<T>(p[0][0], p[0][1]), p_high = pack_pair<T>(p[1][0], p[1][1]);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // column n of tile j is dimension 8 n + j of the set
        const auto pick = [&](const uint4& x) { return j / 2 == 0 ? x.x : j / 2 == 1 ? x.y : j / 2 == 2 ? x.z : x.w; };
        constexpr uint32_t kEven = 0x5410, kOdd = 0x7632;
        const uint32_t b0 = __byte_perm(pick(v[set][0]), pick(v[set][1]), j % 2 ? kOdd : kEven);
        const uint32_t b1 = __byte_perm(pick(v[set][2]), pick(v[set][3]), j % 2 ? kOdd : kEven);
        float c[4] = {acc[set][j][0] * shrink, acc[set][j][1] * shrink, 0.0f, 0.0f};
        mma<T>(c, p_low, 0u, p_high, 0u, b0, b1);
        acc[set][j][0] = c[0];
        acc[set][j][1] = c[1];
      }
    }
  }
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);
  if (g >= group) return;
  Word* part = w.words + w.plan.splits_at +
               ((item.row * s.heads + item.kv_head * group + g) * kMaxDecodeSplits + item.split) * (D + 2);
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        publish2(part + set * 64 + (2 * q + n) * 8 + j, flagged(__float_as_uint(acc[set][j][n]), w.flag),
             flagged(__float_as_uint(acc[set][j + 1][n]), w.flag));
    }
  }
  if (q == 0) publish2(part + D, flagged(__float_as_uint(largest), w.flag), flagged(__float_as_uint(sum), w.flag));
}

// Merges the splits of 8 dimensions of one head: 8 lanes groups take every eighth split, 4 lanes two dimensions each.
template <typename T, int D>
__device__ __forceinline__ void merge_splits(Worker& w, int unit) {
  const DecodeStep& s = w.step;
  const int slice = unit % (D / 8), head = unit / (D / 8) % s.heads, row = unit / (D / 8) / s.heads;
  const int g = w.lane >> 2, q = w.lane & 3, splits = row_table(w)[2 * kMaxDecodeRows + row];
  const Word* parts = w.words + w.plan.splits_at + (row * s.heads + head) * kMaxDecodeSplits * (D + 2);
  constexpr int kMost = kMaxDecodeSplits / 8;  // splits of a lane
  Word value[kMost][2] = {}, state[kMost][2] = {};
  wait_words(w, [&] {
    bool ready = true;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i * 8 >= splits) break;
      const int split = min(i * 8 + g, splits - 1);  // lanes without a split repeat the last, and weigh it 0
      peek2(parts + split * (D + 2) + slice * 8 + q * 2, value[i]);
      peek2(parts + split * (D + 2) + D, state[i]);
      ready = ready && has_flag(value[i][0], w.flag) && has_flag(value[i][1], w.flag) &&
              has_flag(state[i][0], w.flag) && has_flag(state[i][1], w.flag);
    }
    return ready;
  });
  float largest = -INFINITY, sum = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
  for (int i = 0; i < kMost; ++i)
    if (i * 8 < splits) largest = fmaxf(largest, __uint_as_float(payload(state[i][0])));
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, offset));
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i * 8 >= splits) break;
    const float weight = i * 8 + g < splits ? exp2_approx(__uint_as_float(payload(state[i][0])) - largest) : 0.0f;
    sum += weight * __uint_as_float(payload(state[i][1]));
    x += weight * __uint_as_float(payload(value[i][0]));
    y += weight * __uint_as_float(payload(value[i][1]));
  }
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
    x += __shfl_xor_sync(kAllLanes, x, offset);
    y += __shfl_xor_sync(kAllLanes, y, offset);
  }
  const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;  // a padding row has no split: it gets zeros
  if (g == 0)
    publish(handed_off(w, w.plan.attention_at, w.plan.attention_length, w.parity, row) + head * (D / 2) + slice * 4 + q,
            flagged(pack_pair<T>(x * inverse, y * inverse), w.flag));
}

// Both halves, for the units that fall to this warp. Splits are dealt from warp 0 up, merges from the last warp down.
template <typename T, int D>
__device__ __forceinline__ void attention_phase(Worker& w, int layer, const LayerWeights& weights) {
  const int grid = gridDim.x, items = row_table(w)[3 * kMaxDecodeRows];
#pragma unroll 1
  for (int index = blockIdx.x + grid * w.warp; index < items; index += grid * kWarps) {
    const bool first = index < grid * kWarps;  // the warp's first item is the same in every layer: prepared once
    const AttentionItem item = first ? w.shared<AttentionItem>(w.plan.items_at)[w.warp] : attention_item<D>(w, index);
    if (!item.exists) continue;
    attend<T, D>(w, item, layer, weights);
    if (first) prefetch_item<T, D>(w, item, layer + 1);
  }
  const int merges = w.step.rows * w.step.heads * (D / 8);
#pragma unroll 1
  for (int unit = blockIdx.x + grid * (kWarps - 1 - w.warp); unit < merges; unit += grid * kWarps)
    merge_splits<T, D>(w, unit);
}

}  // namespace six_engines
