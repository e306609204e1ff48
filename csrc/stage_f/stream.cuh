// The producer: one warp of a block copies the block's slices of all matrices, in the order in which they will be used,
// into a ring of shared-memory slots. It needs no activations, and so never waits for another block, only for a free
// slot.
#pragma once

#include "stage_f/worker.cuh"

namespace six_engines {

// gate_up: a gate tile and its up tile alternate. Returns early if the step has timed out: a slot that was not released
// may still be read, and its last copy may still be in flight.
template <Kind kKind, typename W>
__device__ __forceinline__ void stream_matrix(W& w, const void* weights, uint64_t policy) {
  constexpr MatrixPlan m = kMatrix<kKind>;
  const Slice slice = w.slice(kKind);
  constexpr long long row_bytes = m.steps * 64LL;
  const auto* base = static_cast<const unsigned char*>(weights) + (slice.first + w.lane) * row_bytes;
#pragma unroll 1
  for (int batch = 0; batch < m.chunks; batch += m.batch_chunks) {
#pragma unroll 1
    for (int row = 0; row < slice.count; row += m.tile_rows) {
      const int rows = min(m.tile_rows, slice.count - row);
#pragma unroll 1
      for (int half = 0; half < m.halves; ++half) {
        const auto* source = base + (row + half * m.rows) * row_bytes;
#pragma unroll 1
        for (int chunk = batch; chunk < min(batch + m.batch_chunks, m.chunks); ++chunk) {
          const int bytes = min(m.chunk_steps, m.steps - chunk * m.chunk_steps) * 64;
          if (kKind != kHead && kInFlight < W::At::kSlots) {
            const auto before = w.at.behind(kInFlight);  // a slot that was never used passes at once
            wait_barrier(w, w.full + before.slot * 8, before.parity);
          }
          const uint32_t full = w.full + w.at.slot * 8;
          wait_barrier(w, w.empty + w.at.slot * 8, w.at.parity ^ 1);
          if (__any_sync(kAllLanes, !w.streams)) {
            w.streams = false;
            return;
          }
          if (w.lane == 0) barrier_expect(full, rows * bytes);
          __syncwarp();
          if (w.lane < rows)
            bulk_copy(w.slot_address(w.at.slot) + w.lane * m.stride, source + chunk * m.chunk_steps * 64, bytes, full,
                      policy);
          w.at = w.at.ahead(1);
        }
      }
    }
  }
}

template <typename W>
__device__ __forceinline__ void stream_step(W& w, const LayerWeights* table) {
  const uint64_t policy = evict_first_policy();
#pragma unroll 1
  for (int layer = 0; layer < kLayers && w.streams; ++layer) {
    w.place = layer * 16 + 15;
    const LayerWeights& weights = table[layer];
    stream_matrix<kQkv>(w, weights.qkv, policy);
    if (w.streams) stream_matrix<kOut>(w, weights.o, policy);
    if (w.streams) stream_matrix<kGateUp>(w, weights.gate_up, policy);
    if (w.streams) stream_matrix<kDown>(w, weights.down, policy);
  }
  if (w.streams) stream_matrix<kHead>(w, w.step.lm_head, policy);
}

// Returns when every requested copy has arrived: a copy in flight when its block ends would be written into the shared
// memory of the next block. A slot's last copy belongs to this turn of the ring or to the one before; a slot that was
// never used passes at once.
template <typename W>
__device__ __forceinline__ void drain_copies(const W& w) {
  for (int slot = w.lane; slot < W::At::kSlots; slot += 32) {
    const uint32_t parity = slot < w.at.slot ? w.at.parity : w.at.parity ^ 1;
    while (!barrier_passed(w.full + slot * 8, parity)) {
    }
  }
}

}  // namespace six_engines
