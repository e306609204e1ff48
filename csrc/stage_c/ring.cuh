// The threads of a block of the fused kernel, the grid barrier, and a warp's position in the ring of slots.
#pragma once

#include "common/vectors.cuh"
#include "stage_c/fused_plan.h"

namespace six_engines {
namespace {

constexpr int kConsumers = kFusedWarps * kWarpSize;
constexpr int kThreads = kConsumers + kWarpSize;  // and the warp that asks for the data
constexpr int kInSlices = kFusedWarps / 2;  // half of the warps take the gate tile of a slot, half the up tile
constexpr int kOutSlices = kFusedWarps;

// One lane of a warp signals that the warp has read a slot, after a __syncwarp. compute-sanitizer's racecheck assumes
// that an arrival only speaks for the arriving thread, so it needs a build in which every lane signals.
#ifdef SIX_ENGINES_EVERY_LANE_ARRIVES
constexpr int kArrivingLanes = kWarpSize;
#else
constexpr int kArrivingLanes = 1;
#endif

// One counter per device is enough: the grid fills the GPU, so only one grid of this kind runs at a time.
__device__ unsigned grid_counter;

// Synchronises the threads that multiply; the warp that requests data does not take part.
__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

// All blocks of the grid arrive before any leaves. The first block adds 2^31 less the others' ones, so each round flips
// the top bit and leaves the rest at zero: nothing to reset, and a replayed graph needs no fresh counter.
__device__ __forceinline__ void grid_barrier() {
  sync_consumers();
  if (threadIdx.x == 0) {
    const unsigned add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
    unsigned before, now;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(&grid_counter), "r"(add)
                 : "memory");
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(&grid_counter) : "memory");
    } while (((before ^ now) & 0x80000000u) == 0);
  }
  sync_consumers();
}

// A position in the ring: the slot, and the number of completed rounds (parity: modulo 2).
struct Cursor {
  int slot = 0, parity = 0;
  bool first_round = true;
  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
      first_round = false;
    }
  }
};

// The position of the warp that requests weights: the next slot, and the oldest slot that may still be in flight.
struct Asking {
  Cursor next, oldest;
  int underway = 0;
};

}  // namespace
}  // namespace six_engines
