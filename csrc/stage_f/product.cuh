// A block's share of each product, and the use of the results.
#pragma once

#include "stage_f/choose.cuh"
#include "stage_f/gemv.cuh"

namespace six_engines {

constexpr int kResidualTiles = ceil_div(kMatrix<kOut>.tiles, kWarps);  // of a warp
template <int kSets>
using Residual = float[kResidualTiles][kSets];

template <Kind kKind, typename W>
__device__ __forceinline__ float* partial_sums(const W& w) {
  return w.template shared<float>(W::At::kPartialAt + (kKind == kOut || kKind == kDown ? W::At::kPartial : 0));
}
template <Kind kKind, typename W>
__device__ __forceinline__ float* square_sums(const W& w) {
  return w.template shared<float>(W::At::kSumsAt) + (kKind == kGateUp ? W::kRequests * 8 : 0);
}

// The use of each output: QKV (plus bias) and the MLP's activation are published as pairs of 16-bit values; the output
// is added to the hidden state, whose owner keeps the float32 values and publishes them as float32. A warp sums and
// emits whole tiles, lane (g, q) row g of request q.
template <Kind kKind, typename W, int kSets>
__device__ __forceinline__ void emit(W& w, const Slice& slice, const void* bias, Residual<kSets>& residual) {
  constexpr MatrixPlan m = kMatrix<kKind>;
  constexpr int kRounds = ceil_div(m.tiles, kWarps);
  const float* partial = partial_sums<kKind>(w);
  const int g = w.lane >> 2, q = w.lane & 3;
  float offset[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int row = (round * kWarps + w.warp) * m.tile_rows + g;
    offset[round] = 0.0f;
    if (kKind == kQkv && bias != nullptr && row < slice.count)
      offset[round] = to_float(static_cast<const T*>(bias)[slice.first + row]);
  }
  workers_sync();
  w.mark();
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int tile = round * kWarps + w.warp, row = tile * m.tile_rows + g;
    if (tile >= slice.tiles) break;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const int request = set * 4 + q;
      const bool valid = g < m.tile_rows && row < slice.count && request < w.step.rows;
      const float scale = kKind == kQkv || kKind == kGateUp ? norm_scale(w, square_sums<kKind>(w), request) : 1.0f;
      float value = sum_warps<kSets>(partial, tile * m.halves, set, w.lane) * scale;
      if (kKind == kGateUp) value = silu(value) * (sum_warps<kSets>(partial, tile * 2 + 1, set, w.lane) * scale);
      if (kKind == kQkv) value += offset[round];
      if (kKind == kOut && W::kAlone) {  // of the parts of its attention
        value += __shfl_xor_sync(kAllLanes, value, 1);
        value += __shfl_xor_sync(kAllLanes, value, 2);
      }
      Word* target = w.template handed_off<kKind>(w.parity, request);
      if (kKind == kOut || kKind == kDown) {
        value = residual[round][set] += value;
        if (valid) publish(target + slice.first + row, flagged(__float_as_uint(value), w.flag));
      } else {
        const uint32_t pair = pack_pair<T>(value, __shfl_down_sync(kAllLanes, value, 4));  // with the next row
        if (valid && (g & 1) == 0) publish(target + (slice.first + row) / 2, flagged(pair, w.flag));
      }
    }
  }
}

// This block's rows of QKV, or of gate and up, times the hidden state, normed.
template <Kind kKind, int kFrom, typename W, int kSets>
__device__ __forceinline__ void hidden_product(W& w, uint32_t flag, int parity, const void* gain, const void* bias,
                                               Residual<kSets>& residual) {
  const Slice slice = w.slice(kKind);
  EarlyWeights<kKind, kSets> early;
  load_early(w, slice, early);
  Activations<kKind> act[kSets];
  receive_hidden<kKind, kFrom>(w, flag, parity, gain, square_sums<kKind>(w), act);
  w.mark();
  multiply_hidden<kKind>(w, slice, early, act, partial_sums<kKind>(w));
  w.mark();
  emit<kKind>(w, slice, bias, residual);
  w.mark();
}

// This block's rows of the output projection, or of down, times a vector that others published.
template <Kind kKind, typename W, int kSets>
__device__ __forceinline__ void long_product(W& w, Residual<kSets>& residual) {
  const Slice slice = w.slice(kKind);
  EarlyWeights<kKind, kSets> early;
  load_early(w, slice, early);
  TileSums<kKind, kSets> c[kMatrix<kKind>.tiles] = {};
  // (A block without rows of `down` must not wait here: nothing would keep the others from overtaking it.)
  if (kKind == kOut || slice.count > 0)
    multiply_long<kKind, 0>(w, slice, early, c);
  else
    w.mark();
  leave_sums<kKind>(w, 0, slice.tiles, c, partial_sums<kKind>(w));
  w.mark();
  emit<kKind>(w, slice, nullptr, residual);
  w.mark();
}

// The LM head's input goes to shared memory: there a warp takes whole tiles, and all columns.
template <typename W, int kSets>
__device__ __forceinline__ void receive_head(W& w, uint32_t flag, int parity) {
  constexpr MatrixPlan m = kMatrix<kHead>;
  Activations<kHead> act[kSets];
  receive_hidden<kHead, kDown>(w, flag, parity, w.step.final_norm, square_sums<kHead>(w), act);
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    const int request = set * 4 + (w.lane >> 3);
    each_step<kHead, m.chunks>(0, [&](int, int chunk, int step) {
      if (!step_counts<kHead>(w, chunk, step) || request >= w.step.rows) return;
      *w.template shared<uint2>(W::At::kActAt + request * W::At::kActStride + column_of<kHead>(w, chunk, step) * 2) =
          act[set].of[chunk][step];
    });
  }
  workers_sync();
}

// The LM head: enough tiles for a warp to take whole ones. Logits go to memory, and the warp keeps each row's best.
template <typename W, int kSets>
__device__ __forceinline__ void head_product(W& w) {
  constexpr MatrixPlan m = kMatrix<kHead>;
  constexpr int kWindow = smaller(kWarps, W::At::kSlots / m.chunks);  // tiles at a time
  const DecodeStep& s = w.step;
  const Slice slice = w.slice(kHead);
  const int g = w.lane >> 2, q = w.lane & 3;
  float scale[kSets];
  Choice choice[kSets];
  Candidate best[kSets];
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    const int request = min(set * 4 + q, s.rows - 1);
    scale[set] = norm_scale(w, square_sums<kHead>(w), request);
    choice[set] = choice_of(s, request);
    best[set] = {-INFINITY, 0.0f, slice.first};
  }
#pragma unroll 1
  for (int base = 0; base < slice.count; base += kWindow * m.tile_rows, w.at.advance(kWindow * m.chunks)) {
    if (base > 0) workers_sync();
    const int row = base + w.warp * m.tile_rows, rows = min(m.tile_rows, slice.count - row);
    if (w.warp >= kWindow || rows <= 0) continue;
    float out[kSets] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < m.chunks; ++chunk) multiply_slot(w, w.warp * m.chunks + chunk, chunk, out);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const int request = set * 4 + q, id = slice.first + row + g;
      if (g >= rows || request >= s.rows) continue;
      const Candidate found = candidate_of(choice[set], out[set] * scale[set], id);
      s.logits[static_cast<long long>(request) * kVocab + id] = found.logit;
      if (better(found, best[set], choice[set].inverse)) best[set] = found;
    }
  }
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    best[set] = best_of_lanes(best[set], choice[set], 4, 16);
    if (g == 0 && set * 4 + q < s.rows) best_of_warps(w, set * 4 + q)[w.warp] = best[set];
  }
}

}  // namespace six_engines
