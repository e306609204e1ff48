// A block's share of each product, and what becomes of the results.
#pragma once

#include "stage_f/choose.cuh"
#include "stage_f/hand_off.cuh"

namespace six_engines {

// This block's slice of one layer matrix times the activations in shared memory, and what becomes of each output: QKV
// (plus bias) and the MLP's activation leave as pairs of 16-bit values; the hidden state, of which the owner keeps the
// float32 values, grows and leaves as float32. A warp sums and emits whole tiles, lane (g, q) row g of request q.
template <typename T>
__device__ __forceinline__ void product(Worker& w, int kind) {
  const DecodeStep& s = w.step;
  const DecodePlan& plan = w.plan;
  const MatrixPlan m = plan.matrix[kind];
  const Slice slice = w.shared<Slice>(plan.slices_at)[kind];
  const int g = w.lane >> 2, q = w.lane & 3, halves = kind == kGateUp ? 2 : 1;
  multiply_units<T>(w, m, slice);
  workers_sync();
#pragma unroll 1
  for (int tile = w.warp; tile * m.tile_rows < slice.count; tile += kWarps) {
#pragma unroll 1
    for (int set = 0; set < plan.sets; ++set) {
      const int request = set * 4 + q, row = tile * m.tile_rows + g;
      const bool valid = g < m.tile_rows && row < slice.count && request < s.rows;
      const float scale = kind == kQkv || kind == kGateUp ? norm_scale<T>(w, request) : 1.0f;
      float value = sum_units(w, m, tile * halves, set) * scale;
      if (kind == kGateUp) value = silu(value) * (sum_units(w, m, tile * halves + 1, set) * scale);
      if (kind == kQkv && valid) value += w.shared<float>(plan.bias_at)[row];
      uint32_t bits = __float_as_uint(value);
      bool sends = valid;
      int index = slice.first + row;
      if (kind == kOut || kind == kDown) {
        float* own = w.shared<float>(plan.own_at) + row * kMaxDecodeRows + request;
        if (valid) *own = value = value + *own;
        bits = __float_as_uint(value);
      } else {
        bits = pack_pair<T>(value, __shfl_down_sync(kAllLanes, value, 4));  // with the next row
        index /= 2;
        sends = valid && (g & 1) == 0;
      }
      Word* target = handed_off(w, plan.vector_at[kind], plan.vector_length[kind], w.parity, request) + index;
      if (sends) publish(target, flagged(bits, w.flag));
    }
  }
}

// The LM head: enough tiles for a warp to take whole ones. Logits go to memory, and the warp keeps each row's best.
template <typename T>
__device__ __forceinline__ void head_product(Worker& w) {
  const DecodeStep& s = w.step;
  const MatrixPlan m = w.plan.matrix[kHead];
  const Slice slice = w.shared<Slice>(w.plan.slices_at)[kHead];
  const int g = w.lane >> 2, q = w.lane & 3, slots = w.plan.slots;
  const float scale[2] = {norm_scale<T>(w, q), norm_scale<T>(w, q + 4)};
  const int window = min(kWarps, slots / m.chunks);  // tiles at a time, see multiply_units
  const Choice choice[2] = {choice_of(s, min(q, s.rows - 1)), choice_of(s, min(q + 4, s.rows - 1))};
  const Candidate none{-INFINITY, 0.0f, slice.first};
  Candidate best[2] = {none, none};
#pragma unroll 1
  for (int base = 0; base < slice.count; base += window * m.tile_rows, w.at.advance(window * m.chunks, slots)) {
    if (base > 0) workers_sync();
    const int row = base + w.warp * m.tile_rows, rows = min(m.tile_rows, slice.count - row);
    if (w.warp >= window || rows <= 0) continue;
    float out[2] = {};
    RingPosition at = w.at;
    at.advance(w.warp * m.chunks, slots);
#pragma unroll 1
    for (int chunk = 0; chunk < m.chunks; ++chunk, at.advance(1, slots))
      multiply_slot<T>(w, m, at, rows, 0, min(m.chunk_steps, m.steps - chunk * m.chunk_steps), chunk * m.chunk_steps,
                       kSlotArrivals, out);
#pragma unroll
    for (int set = 0; set < 2; ++set) {
      const int request = set * 4 + q, id = slice.first + row + g;
      if (g >= rows || request >= s.rows) continue;
      const Candidate found = candidate_of(choice[set], out[set] * scale[set], id);
      s.logits[static_cast<long long>(request) * s.vocab + id] = found.logit;
      if (better(found, best[set], choice[set].inverse)) best[set] = found;
    }
  }
#pragma unroll
  for (int set = 0; set < 2; ++set) {
    best[set] = best_of_lanes(best[set], choice[set], 4, 16);
    if (g == 0 && set * 4 + q < s.rows) best_of_warps(w, set * 4 + q)[w.warp] = best[set];
  }
}

}  // namespace six_engines
