// Attention of one decode step: a block takes (row, KV head, part of the cached tokens), its warps a chunk of 16 tokens
// each in turn, up to 8 query heads at once (flash attention's running maximum and sum, Dao et al. 2022).
//
// The warps' results are merged in shared memory. A block publishes its part normalised, with the logarithm of the sum
// that it was divided by. With a long context, several blocks compute pieces of a part, and the first of them merges
// these. Every warp of the output projection merges the up to four parts itself (merge_parts in attention_parts.cuh;
// flash-decoding): one hand-off instead of two.
#pragma once

#include "stage_f/attention_chunk.cuh"

namespace six_engines {

// The last warp of the last part processes the new token.
template <typename W>
__device__ __forceinline__ void attend_new_token(W& w, const AttentionItem& item, int layer,
                                                 const LayerWeights& weights, Attended& out) {
  const int group_head = item.kv_head * kGroup + min(w.lane >> 2, kGroup - 1);
  const Word* projected = w.template handed_off<kQkv>(w.parity, item.row);
  const HeadNorm q_norm(w, weights.q_norm), k_norm(w, weights.k_norm);
  T* cell = static_cast<T*>(w.step.kv_cache) + layer_elements(w.step) * layer + item.second_cell;
  RawHead raw_query, raw_key;
  RawValue raw_value;
  wait_words(w, [&] {
    bool ready = raw_query.look(w, projected + group_head * (kHeadDim / 2));
    ready = raw_key.look(w, projected + (kHeads + item.kv_head) * (kHeadDim / 2)) && ready;
    return raw_value.look(w, projected + (kHeads + kKvHeads + item.kv_head) * (kHeadDim / 2)) && ready;
  });
  uint4 query[kHeadSteps], key[kHeadSteps];
  rotate_head(w, raw_query, weights.q_norm, q_norm, item.row, query);
  rotate_head(w, raw_key, weights.k_norm, k_norm, item.row, key);
  attend_fresh(w, cell, query, key, raw_value, out);
}

// A warp's cached chunks. The first two (for large heads only the first) are loaded before the query arrives.
template <typename W>
__device__ __forceinline__ void attend_cached(W& w, const AttentionItem& item, int layer, const LayerWeights& weights,
                                              Attended& out) {
  const DecodeStep& s = w.step;
  const int first = item.begin + w.warp, stride = item.stride;
  const int group_head = item.kv_head * kGroup + min(w.lane >> 2, kGroup - 1);  // rows without a head repeat the last
  const T* keys = static_cast<const T*>(s.kv_cache) + layer_elements(s) * layer;
  const Word* projected = w.template handed_off<kQkv>(w.parity, item.row);
  const long long values = layer_elements(s) * kLayers;  // behind the keys
  const auto cached = [&](int chunk) { return item.context - 1 - chunk * kAttentionChunk; };
  long long later = 0;  // of the chunk that is loaded next
  const auto look_up = [&](int chunk) {
    if (chunk < item.end) later = chunk_cell(w, item.row, item.kv_head, chunk);
  };
  const HeadNorm q_norm(w, weights.q_norm);
  RawHead raw_query;
  uint4 query[kHeadSteps];
  const auto receive = [&] {
    wait_words(w, [&] { return raw_query.look(w, projected + group_head * (kHeadDim / 2)); });
    rotate_head(w, raw_query, weights.q_norm, q_norm, item.row, query);
  };
  Chunk even;
  even.load_keys(w, cached(first), keys + item.cell);
  even.load_values(w, cached(first), keys + item.cell + values);
  if constexpr (kHeadDim == 64) {  // two chunks in registers: one is loaded while the other is attended to
    Chunk odd;
    if (first + stride < item.end) {
      odd.load_keys(w, cached(first + stride), keys + item.second_cell);
      odd.load_values(w, cached(first + stride), keys + item.second_cell + values);
    }
    const auto load = [&](Chunk& tokens, int chunk) {
      if (chunk >= item.end) return;
      tokens.load_keys(w, cached(chunk), keys + later);
      tokens.load_values(w, cached(chunk), keys + later + values);
      look_up(chunk + stride);
    };
    look_up(first + 2 * stride);
    receive();
#pragma unroll 1
    for (int chunk = first; chunk < item.end; chunk += 2 * stride) {
      attend_chunk(w, even, cached(chunk), query, out, [] {});
      load(even, chunk + 2 * stride);
      if (chunk + stride < item.end) attend_chunk(w, odd, cached(chunk + stride), query, out, [] {});
      load(odd, chunk + 3 * stride);
    }
  } else {  // the next chunk's keys are loaded when this one's have been used, then its values
    later = item.second_cell;
    receive();
#pragma unroll 1
    for (int chunk = first; chunk < item.end; chunk += stride) {
      const bool more = chunk + stride < item.end;
      attend_chunk(w, even, cached(chunk), query, out, [&] {
        if (more) even.load_keys(w, cached(chunk + stride), keys + later);
      });
      if (more) even.load_values(w, cached(chunk + stride), keys + later + values);
      look_up(chunk + 2 * stride);
    }
  }
}

// Where a warp stores head g in shared memory, for `merge_warps`.
constexpr int kMergeStride = kHeadDim + 4;
template <typename W>
__device__ __forceinline__ float* merge_place(const W& w, int warp, int g) {
  return w.template shared<float>(W::At::kActAt) + (warp * kGroup + g) * kMergeStride;
}

template <typename W>
__device__ __forceinline__ void leave(const W& w, const Attended& out) {
  const int g = w.lane >> 2, q = w.lane & 3;
  float sum = out.sum + __shfl_xor_sync(kAllLanes, out.sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);
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
  if (q == 0) *reinterpret_cast<float2*>(at + kHeadDim) = make_float2(out.largest, sum);
}

// Merges the pieces of a part, for 4 dimensions of a head: this block's piece and the ones that other blocks published.
template <typename W>
__device__ __forceinline__ Quad merge_pieces(W& w, const AttentionItem& item, int unit, const Quad& own) {
  const int stride = row_table(w)[kPartsOfRows] * w.step.rows * kKvHeads;  // from one piece's block to the next one's
  Quad quads[W::kPieces] = {own};
#pragma unroll
  for (int piece = 1; piece < W::kPieces; ++piece) quads[piece].extra = __float_as_uint(-INFINITY);
  wait_words(w, [&] {
    bool ready = true;
#pragma unroll
    for (int piece = 1; piece < W::kPieces; ++piece)
      if (piece < item.pieces && quads[piece].flag != w.flag)
        quads[piece] = peek_quad(piece_place(w, blockIdx.x + piece * stride) + unit);
#pragma unroll
    for (int piece = 1; piece < W::kPieces; ++piece)
      ready = ready && (piece >= item.pieces || quads[piece].flag == w.flag);
    return ready;
  });
  float logarithm;
  const uint2 merged = merge_parts(quads, item.pieces, &logarithm);
  return {merged.x, merged.y, __float_as_uint(logarithm), w.flag};
}

// Adds up the block's warps: each thread adds 4 dimensions of a head, and publishes them with the logarithm of the sum.
template <typename W>
__device__ __forceinline__ void merge_warps(W& w, const AttentionItem& item) {
  constexpr int kUnits = kGroup * kHeadDim / 4;
  const int warps = min(item.stride, item.end - item.begin);
#pragma unroll 1
  for (int first = w.warp * 32; first < kUnits; first += kWorkers) {  // whole warps: they may wait for other blocks
    const int unit = min(first + w.lane, kUnits - 1);
    const int g = unit / (kHeadDim / 4), column = unit % (kHeadDim / 4) * 4;
    float2 state[kWarps];
    float4 value[kWarps];
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      state[i] = make_float2(-INFINITY, 0.0f);
      value[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (i >= warps && !(item.last && i == kWarps - 1)) continue;
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
    Quad quad = {pack_pair<T>(x[0] * inverse, x[1] * inverse), pack_pair<T>(x[2] * inverse, x[3] * inverse),
                 __float_as_uint(largest + log2_approx(sum)), w.flag};
    Quad* place = part_place(w, item.row, item.part) + item.kv_head * kUnits + unit;
    if constexpr (W::kPieces > 1) {
      if (item.piece > 0) place = piece_place(w, blockIdx.x) + unit;
      else if (item.pieces > 1) quad = merge_pieces(w, item, unit, quad);
    }
    publish_quad(place, quad);
  }
}

// The items of this block.
template <typename W>
__device__ __forceinline__ void attention_phase(W& w, int layer, const LayerWeights& weights) {
  const int items = row_table(w)[kItems];
#pragma unroll 1
  for (int index = blockIdx.x; index < items; index += kGrid) {
    const bool first = index < kGrid;  // the warp's first item is the same in every layer: prepared once
    const AttentionItem* own = w.template shared<AttentionItem>(W::At::kItemsAt) + w.warp;
    const AttentionItem item = first ? *own : attention_item(w, index);
    if (!item.exists) continue;
    if (!first) workers_sync();
    Attended out;
    if (item.last && w.warp == kWarps - 1) {
      attend_new_token(w, item, layer, weights, out);
      leave(w, out);
    } else if (item.begin + w.warp < item.end) {
      attend_cached(w, item, layer, weights, out);
      leave(w, out);
    }
    workers_sync();
    merge_warps(w, item);
    if (first) prefetch_item(w, item, layer + 1);
  }
  w.mark();
}

}  // namespace six_engines
