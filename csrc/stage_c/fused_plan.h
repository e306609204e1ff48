// How the fused kernel divides a problem and lays out shared memory; computed on the host, read by the kernel.
#pragma once

#include "stage_c/mlp.h"

#include <algorithm>
#include <cstdint>

namespace six_engines {

constexpr int kFusedWarps = 8;  // that multiply; one more asks for the data
constexpr int kMaxSlots = 16;
constexpr int kMinSlots = 3;  // fewer could not keep the memory busy
// About the most bytes that a block has requested but not yet received: 132 such blocks keep the memory busy for two
// microseconds. More at once gains nothing and delays other reads, because memory requests queue up: the last rows of
// w_in would wait for w_out, and every small read, of x or of the neurons, would wait for both.
constexpr int kBytesInFlight = 64 * 1024;

// How the rows of one matrix are cut into slabs of columns.
struct Slabs {
  int width;  // columns of a slab; the last one may be narrower
  int count;  // slabs a row
  int pitch;  // bytes from one row of a slab to the next
};

// The run of `total` things that block b of `blocks` owns begins at b * each + min(b, extra).
struct Share {
  int each, extra;
};

inline Share share(int total, int blocks) { return {total / blocks, total % blocks}; }

struct Plan {
  Share neurons, outputs;  // of each block
  Slabs in, out;
  int x_pitch;            // bytes between the normalised rows of x
  int slots, slot_bytes;  // of the ring
  int in_flight;          // slots asked for at a time, at most
  int batch, tile_floats; // tiles whose partial sums wait to be added up, and the floats of each
  int x_offset, partial_offset, barrier_offset, shared_bytes;  // bytes; the ring is at 0
};

// Two rows of x that are read at the same time are 64 bytes apart modulo the 128 bytes of all banks, so they share no
// bank.
constexpr int padded(int bytes) { return (bytes - 64 + 127) / 128 * 128 + 64; }

inline Slabs cut(int columns, int max_width, int element_bytes) {
  Slabs slabs;
  slabs.count = (columns + max_width - 1) / max_width;
  slabs.width = std::min(columns, ((columns + slabs.count - 1) / slabs.count + 63) / 64 * 64);
  slabs.count = (columns + slabs.width - 1) / slabs.width;
  slabs.pitch = slabs.width * element_bytes;
  return slabs;
}

// Returns the layout for this many rows and blocks; slots is 0 if it does not fit. bytes_per_slice: what a warp reads
// of a row's slab.
inline Plan make_plan(const MlpProblem& p, int rows, int blocks, int bytes_per_slice, int tile_rows, int shared_limit) {
  constexpr int kPartialBytes = 32 * 1024, kBarrierBytes = 2 * kMaxSlots * int(sizeof(uint64_t));
  const int element = p.dtype == DType::kFloat32 ? 4 : 2;
  const int max_width = kFusedWarps * bytes_per_slice / element;
  Plan plan;
  plan.neurons = share(p.inter, blocks);
  plan.outputs = share(p.hidden, blocks);
  plan.in = cut(p.hidden, max_width / 2, element);  // half of the warps take the other tile of the slot
  plan.slot_bytes = std::max(2 * tile_rows * plan.in.pitch, 16 * 1024);
  plan.out = cut(p.inter, std::min(max_width, plan.slot_bytes / tile_rows / element / 64 * 64), element);
  plan.tile_floats = (kFusedWarps * rows + 1) * tile_rows;  // + 1: neighbouring tiles in different banks
  const int most_rows = std::max(plan.neurons.each, plan.outputs.each) + 1;
  plan.batch = std::min((most_rows + tile_rows - 1) / tile_rows, kPartialBytes / int(sizeof(float)) / plan.tile_floats);
  plan.x_pitch = padded(p.hidden * element);
  const int64_t x_bytes = (int64_t(rows) * plan.x_pitch + 127) / 128 * 128;
  const int partial_bytes = (plan.batch * plan.tile_floats * int(sizeof(float)) + 127) / 128 * 128;
  const int64_t ring_bytes = shared_limit - x_bytes - partial_bytes - kBarrierBytes;
  plan.slots = int(std::min<int64_t>(kMaxSlots, std::max<int64_t>(0, ring_bytes / plan.slot_bytes)));
  if (plan.slots < kMinSlots) plan.slots = 0;
  plan.in_flight = std::min(plan.slots, std::max(2, kBytesInFlight / plan.slot_bytes));
  plan.x_offset = plan.slots * plan.slot_bytes;
  plan.partial_offset = plan.x_offset + int(x_bytes);
  plan.barrier_offset = plan.partial_offset + partial_bytes;
  // Use more than half of a multiprocessor even if less is enough, so that two grids of this kernel never share the
  // GPU.
  plan.shared_bytes = std::max(plan.barrier_offset + kBarrierBytes, shared_limit / 2 + 1024);
  return plan;
}

}  // namespace six_engines
