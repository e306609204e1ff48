// A block's share of each product, what becomes of the results, and the end of the step.
#pragma once

#include "decode_gather.cuh"

namespace six_engines {

// Larger logits first, then lower ids, as one integer.
__device__ __forceinline__ unsigned long long ranked(float logit, int id) {
  const unsigned bits = __float_as_uint(logit);
  const unsigned ordered = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return static_cast<unsigned long long>(ordered) << 32 | (0xffffffffu - static_cast<unsigned>(id));
}
__device__ __forceinline__ unsigned long long best_of(unsigned long long best, int apart) {  // over lanes `apart` apart
#pragma unroll 1
  for (int offset = 16; offset >= apart; offset >>= 1) best = max(best, __shfl_xor_sync(kAllLanes, best, offset));
  return best;
}

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
      Word* target = exchanged(w, plan.vector_at[kind], plan.vector_length[kind], w.parity, 0, request) + index;
      const int copies = kind == kQkv ? 1 : s.replicas;
      for (int copy = 0; copy < copies; ++copy, target += 2 * kMaxDecodeRows * plan.vector_length[kind])
        if (sends) publish(target, tagged(bits, w.tag));
    }
  }
}

// The LM head: so many tiles that a warp takes whole ones. Logits go to memory; `best` keeps the lane's largest.
template <typename T>
__device__ __forceinline__ void head_product(Worker& w, unsigned long long (&best)[2]) {
  const DecodeStep& s = w.step;
  const MatrixPlan m = w.plan.matrix[kHead];
  const Slice slice = w.shared<Slice>(w.plan.slices_at)[kHead];
  const int g = w.lane >> 2, q = w.lane & 3, slots = w.plan.slots;
  const float scale[2] = {norm_scale<T>(w, q), norm_scale<T>(w, q + 4)};
  const int window = min(kWarps, slots / m.chunks);  // tiles at a time, see multiply_units
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
      const float logit = out[set] * scale[set];
      s.logits[static_cast<long long>(request) * s.vocab + id] = logit;
      best[set] = max(best[set], ranked(logit, id));
    }
  }
}

// The last block to arrive picks each row's argmax from the blocks' candidates and closes the step.
__device__ __forceinline__ void finish_step(Worker& w, unsigned step_number, const unsigned long long (&bests)[2]) {
  const DecodeStep& s = w.step;
  unsigned long long* shared = w.shared<unsigned long long>(w.plan.best_at);  // [warps][rows]
  volatile unsigned long long* candidates = w.words + w.plan.candidates_at;
  int* last = reinterpret_cast<int*>(shared + kWarps * kMaxDecodeRows);
#pragma unroll 1
  for (int set = 0; set < 2; ++set) {
    const unsigned long long best = best_of(bests[set], 4);  // lanes of one request are 4 apart
    if (w.lane < 4) shared[w.warp * kMaxDecodeRows + set * 4 + w.lane] = best;
  }
  workers_sync();
  if (w.thread < s.rows) {
    unsigned long long best = 0;
    for (int warp = 0; warp < kWarps; ++warp) best = max(best, shared[warp * kMaxDecodeRows + w.thread]);
    candidates[blockIdx.x * kMaxDecodeRows + w.thread] = best;
    __threadfence();
  }
  workers_sync();
  if (w.thread == 0) {
    *last = atomicAdd(control(w) + 1, 1u) == gridDim.x - 1;
    __threadfence();
  }
  workers_sync();
  if (!*last) return;
  for (int row = w.warp; row < s.rows; row += kWarps) {
    unsigned long long best = 0;
    for (int block = w.lane; block < gridDim.x; block += 32) best = max(best, candidates[block * kMaxDecodeRows + row]);
    best = best_of(best, 1);
    if (w.lane == 0) s.greedy[row] = 0xffffffffu - static_cast<unsigned>(best);
  }
  if (w.thread == 0) {
    control(w)[1] = 0;
    control(w)[0] = step_number + 1;
  }
}

}  // namespace six_engines
