// The consumers: the other warps multiply what the stream (stream.cuh) has brought.
//
// The product has to be short in instructions, not in operations: first versions gave a warp two steps of every tile
// and spent 350 instructions around 8 of arithmetic. Now a step (32 columns of 8 weight rows, times up to 4 requests)
// is two loads and one m16n8k16 instruction, which has twice the rows and columns that are needed. A lane's 16 bytes
// of a weight row are its whole operand: four registers of two values, of which the instruction takes the first and
// third for row g and the second and fourth for row g + 8. So row g of the instruction is one half of the columns of
// weight row g, and row g + 8 the other half. Two columns of the instruction hold a request's activations, one for
// each half. Of the four products of halves two are meaningless; the other two land in the same lane, which adds them
// (c[0] + c[3]).
#pragma once

#include "stage_f/worker.cuh"

namespace six_engines {

// Activations are stored in shared memory in the order in which a lane wants them: of every 8 columns first 0, 1, 4, 5
// and then 2, 3, 6, 7. The byte offset of column pair `pair` (columns 2 pair and 2 pair + 1):
__device__ __forceinline__ int act_offset(int pair) { return (pair >> 2) * 16 + (pair & 1) * 8 + (pair & 2) * 2; }

__device__ __forceinline__ uint2 load_shared2(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

// Lane (g, q): the sum of weight row g times request q, over `steps` steps. `a`: shared address of the lane's part of
// the weights, `x`: of the activations. Four sums at a time, because one instruction's result comes some 30 cycles
// later.
template <typename T, int kSets>
__device__ __forceinline__ void multiply_steps(uint32_t a, const uint32_t (&x)[2], int steps, float (&out)[2]) {
  float c[kSets][4][4] = {};
  int at = 0;
#pragma unroll 1
  for (; at + 4 * 64 <= steps * 64; at += 4 * 64) {
    uint4 weights[4];
    uint2 act[kSets][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[i] = load_shared(a + at + i * 64);
#pragma unroll
      for (int set = 0; set < kSets; ++set) act[set][i] = load_shared2(x[set] + at + i * 64);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int set = 0; set < kSets; ++set)
        mma<T>(c[set][i], weights[i].x, weights[i].y, weights[i].z, weights[i].w, act[set][i].x, act[set][i].y);
    }
  }
#pragma unroll 1
  for (; at < steps * 64; at += 64) {
    const uint4 weights = load_shared(a + at);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const uint2 act = load_shared2(x[set] + at);
      mma<T>(c[set][0], weights.x, weights.y, weights.z, weights.w, act.x, act.y);
    }
  }
#pragma unroll
  for (int set = 0; set < kSets; ++set)
    out[set] += (c[set][0][0] + c[set][0][3]) + (c[set][1][0] + c[set][1][3]) +
                ((c[set][2][0] + c[set][2][3]) + (c[set][3][0] + c[set][3][3]));
}

// Waits for a slot and multiplies `steps` steps of it.
template <typename T>
__device__ __forceinline__ void multiply_slot(Worker& w, const MatrixPlan& m, RingPosition at, int rows, int first,
                                              int steps, int act_step, int arrivals, float (&out)[2]) {
  const int g = w.lane >> 2, q = w.lane & 3, stride = slot_stride(m.steps);
  const uint32_t a = w.ring + at.slot * w.plan.slot_bytes + min(g, rows - 1) * m.stride + q * 16 + first * 64;
  const uint32_t act = shared_address(w.smem) + w.plan.act_at + (g & 1) * 8 + q * 16 + act_step * 64;
  const int request = g >> 1, last = w.step.rows - 1;  // instruction columns without a request repeat the last one
  const uint32_t x[2] = {act + min(request, last) * stride, act + min(request + 4, last) * stride};
  wait_barrier(w, w.full + at.slot * 8, at.parity);
  if (w.plan.sets == 1)
    multiply_steps<T, 1>(a, x, steps, out);
  else
    multiply_steps<T, 2>(a, x, steps, out);
  __syncwarp();
  // Not after giving up: the producer has stopped, and a barrier must not count more arrivals than its turn has.
  if (w.lane == 0 && w.streams) barrier_arrive(w.empty + at.slot * 8, arrivals);
}

// This warp's units of one matrix; their sums go to `partial` [unit][set][lane], and the ring moves on. A barrier only
// knows the parity of its turn, so no warp may look for a slot's next turn while its last may still be under way: a
// matrix of more slots than the ring has is taken in windows.
template <typename T>
__device__ __forceinline__ void multiply_units(Worker& w, const MatrixPlan& m, const Slice& slice) {
  const Unit* units = w.shared<Unit>(w.plan.units_at) + m.units_at;
  float* partial = w.shared<float>(w.plan.partial_at) + w.lane;
  const int window = w.plan.slots * m.parts;
#pragma unroll 1
  for (int base = 0; base < slice.units; base += window) {
    if (base > 0) workers_sync();
#pragma unroll 1
    for (int index = base + w.warp; index < min(base + window, slice.units); index += kWarps) {
      const Unit unit = units[index];
      RingPosition at = w.at;
      at.advance(unit.slot, w.plan.slots);
      float out[2] = {};
      multiply_slot<T>(w, m, at, unit.rows, unit.first, unit.steps, unit.act_step, unit.arrivals, out);
      partial[index * w.plan.sets * 32] = out[0];
      if (w.plan.sets == 2) partial[index * 64 + 32] = out[1];
    }
  }
  w.at.advance(slice.slots, w.plan.slots);
}

// Adds up a tile's units: what this lane's row and request come to.
__device__ __forceinline__ float sum_units(const Worker& w, const MatrixPlan& m, int tile, int set) {
  const int units = m.chunks * m.parts;
  const float* partial = w.shared<float>(w.plan.partial_at) + (tile * units * w.plan.sets + set) * 32 + w.lane;
  float sum = 0.0f;
#pragma unroll 4
  for (int i = 0; i < units; ++i) sum += partial[i * w.plan.sets * 32];
  return sum;
}

}  // namespace six_engines
