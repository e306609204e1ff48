// The producer: one warp of a block copies the block's slices of all matrices, in the order in which they will be used,
// into a ring of shared-memory slots. It knows no activations and so never waits for another block, only for a free
// slot.
#pragma once

#include "stage_f/worker.cuh"

namespace six_engines {

// gate_up: a gate tile and its up tile alternate. Returns early if the step was given up: a slot that was not released
// may still be read, and its last copy may still be under way.
__device__ __forceinline__ void stream_matrix(Worker& w, int kind, const void* weights, uint64_t policy) {
  const MatrixPlan m = w.plan.matrix[kind];
  const Slice slice = w.shared<Slice>(w.plan.slices_at)[kind];
  const int halves = kind == kGateUp ? 2 : 1;
  const long long row_bytes = m.steps * 64LL;
  const auto* base = static_cast<const unsigned char*>(weights) + (slice.first + w.lane) * row_bytes;
  for (int row = 0; row < slice.count; row += m.tile_rows) {
    const int rows = min(m.tile_rows, slice.count - row);
    for (int half = 0; half < halves; ++half) {
      const auto* source = base + (row + half * m.rows) * row_bytes;
      for (int chunk = 0; chunk < m.chunks; ++chunk) {
        const int bytes = min(m.chunk_steps, m.steps - chunk * m.chunk_steps) * 64;
        const uint32_t full = w.full + w.at.slot * 8;
        wait_barrier(w, w.empty + w.at.slot * 8, w.at.parity ^ 1);
        if (__any_sync(kAllLanes, !w.streams)) {
          w.streams = false;
          return;
        }
        if (w.lane == 0) barrier_expect(full, rows * bytes);
        __syncwarp();
        if (w.lane < rows)
          bulk_copy(w.ring + w.at.slot * w.plan.slot_bytes + w.lane * m.stride, source + chunk * m.chunk_steps * 64,
                    bytes, full, policy);
        w.at.advance(1, w.plan.slots);
      }
    }
  }
}

__device__ __forceinline__ void stream_step(Worker& w, const LayerWeights* table) {
  const uint64_t policy = evict_first_policy();
#pragma unroll 1
  for (int layer = 0; layer <= w.step.layers && w.streams; ++layer) {
    w.place = layer * 16 + 15;
    const int last = layer < w.step.layers ? kDown : kHead;
#pragma unroll 1
    for (int kind = layer < w.step.layers ? kQkv : kHead; kind <= last && w.streams; ++kind) {
      const LayerWeights& weights = table[layer];
      const void* matrix = kind == kQkv      ? weights.qkv
                           : kind == kOut    ? weights.o
                           : kind == kGateUp ? weights.gate_up
                           : kind == kDown   ? weights.down
                                             : w.step.lm_head;
      stream_matrix(w, kind, matrix, policy);
    }
  }
}

// Returns when every copy that was asked for has arrived: one still under way when its block ends would be written into
// the shared memory of the block that comes next. A slot's last copy belongs to this turn of the ring or to the one
// before; a slot that was never used passes at once.
__device__ __forceinline__ void drain_copies(const Worker& w) {
  for (int slot = w.lane; slot < w.plan.slots; slot += 32) {
    const uint32_t parity = slot < w.at.slot ? w.at.parity : w.at.parity ^ 1;
    while (!barrier_passed(w.full + slot * 8, parity)) {
    }
  }
}

}  // namespace six_engines
