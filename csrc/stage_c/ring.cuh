// The threads of a block of the fused kernel, how the grid waits for itself, and where a warp is in the ring of slots.
#pragma once

#include "common/vectors.cuh"
#include "stage_c/fused_plan.h"

namespace six_engines {
namespace {

constexpr int kConsumers = kFusedWarps * kWarpSize;
constexpr int kThreads = kConsumers + kWarpSize;  // and the warp that asks for the data
constexpr int kInSlices = kFusedWarps / 2;  // half of the warps take the gate tile of a slot, half the up tile
constexpr int kOutSlices = kFusedWarps;

// A warp has read a slot when one of its lanes says so, behind a __syncwarp. compute-sanitizer's racecheck takes an
// arrival to speak for the arriving thread only, and so needs a build in which every lane says it.
#ifdef SIX_ENGINES_EVERY_LANE_ARRIVES
constexpr int kArrivingLanes = kWarpSize;
#else
constexpr int kArrivingLanes = 1;
#endif

// One counter a device is enough: the grid fills the GPU, so only one grid of this kind runs at a time.
__device__ unsigned grid_counter;

// The threads that multiply; the warp that asks for data goes its own way.
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

// A place in the ring: the slot, and how often the ring has been gone through (parity: modulo 2).
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

// Where the warp that asks for weights is: the next slot, and the oldest of those that may still be on their way.
struct Asking {
  Cursor next, oldest;
  int underway = 0;
};

}  // namespace
}  // namespace six_engines
