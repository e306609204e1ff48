// Streaming and multiplying. One warp of a block (`stream_step`) copies the block's slices of all matrices, in the order
// in which they will be used, into a ring of shared-memory slots; it knows no activations and so never waits for
// another block, only for a free slot. The other 16 warps (`gemv`) multiply what has arrived.
//
// Within a tile the warps divide the columns: a warp's step is 32 columns of 16 weight rows against up to 8 requests,
// two m16n8k16 instructions. A lane takes its 8 columns of a row with one 16-byte load, although the instruction's own
// order would give it 2 + 2 columns of one 16-column block and 2 + 2 of the next: the sum does not care in which order
// columns are visited, as long as weights and activations agree, and both are loaded the same way.
#pragma once

#include "decode_plan.cuh"

namespace six_engines {

// A ring slot and the parity of its barriers, advanced in step by the producer and by every consumer.
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// What a thread needs everywhere. `gave_up` is set once a wait has outlasted the limit: the thread then waits for
// nothing any more, so that a broken step ends with an error in the workspace instead of a hung GPU.
struct Worker {
  const DecodeStep* step;
  const DecodePlan* plan;
  unsigned char* smem;
  Word* words;
  uint32_t ring, full, empty;  // shared addresses: slots, and their two barriers each
  RingPosition at;
  uint32_t tag;
  int parity;                  // of the layer
  int warp, lane, thread;
  int place;                   // where we are, for the error report: layer * 16 + phase
  bool gave_up;

  template <typename U>
  __device__ __forceinline__ U* shared(int offset) const { return reinterpret_cast<U*>(smem + offset); }
  __device__ __forceinline__ bool skips(int flag) const { return (step->flags & flag) != 0; }
};

__device__ __forceinline__ unsigned* control(const Worker& w) {  // steps done, blocks finished, place of the first error
  return reinterpret_cast<unsigned*>(w.words);
}

// The copy of an exchanged vector, [2 parities][replicas][rows][length], that begins at word `at`.
__device__ __forceinline__ Word* vector_copy(const Worker& w, long long at, int length, int parity, int replica, int row) {
  return w.words + at + (static_cast<long long>(parity * kMaxDecodeReplicas + replica) * kMaxDecodeRows + row) * length;
}

// Returns when this wait began, or 0 once it has lasted too long. (Values, no references: a `Worker` whose address is
// taken would live in memory instead of registers.)
__device__ __noinline__ unsigned long long check_patience(unsigned long long since, long long limit, unsigned* error,
                              unsigned place) {
  const unsigned long long now = nanoseconds();
  if (since == 0) return now;
  if (now - since < static_cast<unsigned long long>(limit)) return since;
  atomicCAS(error, 0u, place + 1);
  return 0;
}

// Counts failed attempts of one wait and calls it off when the time limit has passed.
struct Patience {
  unsigned attempts = 0;
  unsigned long long since = 0;
  __device__ __forceinline__ bool exhausted(Worker& w) {
    if (w.gave_up) return true;
    if ((++attempts & 63u) != 0) return false;
    since = check_patience(since, w.step->timeout_ns, control(w) + 2, w.place);
    w.gave_up = since == 0;
    return w.gave_up;
  }
};

__device__ __forceinline__ void wait_barrier(Worker& w, uint32_t barrier, uint32_t parity) {
  Patience patience;
  while (!barrier_passed(barrier, parity)) {
    if (patience.exhausted(w)) return;
  }
}

__device__ __forceinline__ void workers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kWorkers) : "memory"); }

// ---- the producer warp ---------------------------------------------------------------------------------------------

// `pair_rows`: 0, or (gate_up) the distance from a gate row to its up row; gate tile and up tile then alternate.
template <typename T>
__device__ __forceinline__ void stream_matrix(Worker& w, const MatrixPlan& m, const void* weights, int pair_rows,
                        uint64_t policy) {
  int first, count;
  own_slice(m, first, count);
  const long long row_bytes = static_cast<long long>(m.steps) * 64;
  const auto* base = static_cast<const unsigned char*>(weights) + (first + w.lane) * row_bytes;
  for (int row = 0; row < count; row += m.tile_rows) {
    const int rows = min(m.tile_rows, count - row);
    for (int half = 0; half < (pair_rows > 0 ? 2 : 1); ++half) {
      const auto* source = base + (row + static_cast<long long>(half) * pair_rows) * row_bytes;
      for (int chunk = 0; chunk < m.chunks; ++chunk) {
        const int bytes = min(m.chunk_steps, m.steps - chunk * m.chunk_steps) * 64;
        const uint32_t full = w.full + w.at.slot * 8;
        wait_barrier(w, w.empty + w.at.slot * 8, w.at.parity ^ 1);
        if (w.lane == 0) barrier_expect(full, rows * bytes);
        __syncwarp();
        if (w.lane < rows)
          bulk_copy(w.ring + w.at.slot * w.plan->slot_bytes + w.lane * m.stride,
                source + static_cast<long long>(chunk) * m.chunk_steps * 64, bytes, full, policy);
        w.at.advance(w.plan->slots);
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ void stream_step(Worker& w, const LayerWeights* table) {
  const DecodePlan& plan = *w.plan;
  const uint64_t policy = evict_first_policy();
  for (int layer = 0; layer < w.step->layers; ++layer) {
    w.place = layer * 16 + 15;
    stream_matrix<T>(w, plan.qkv, table[layer].qkv, 0, policy);
    stream_matrix<T>(w, plan.o, table[layer].o, 0, policy);
    stream_matrix<T>(w, plan.gate_up, table[layer].gate_up, w.step->intermediate, policy);
    stream_matrix<T>(w, plan.down, table[layer].down, 0, policy);
  }
  stream_matrix<T>(w, plan.lm_head, w.step->lm_head, 0, policy);
}

// ---- the consumer warps --------------------------------------------------------------------------------------------

// One tile against all requests; leaves this warp's share of the sums in `partial` [padded rows][warps][16].
template <typename T>
__device__ __forceinline__ void multiply_tile(Worker& w, const MatrixPlan& m, int tile_rows, float* partial) {
  const DecodePlan& plan = *w.plan;
  const int g = w.lane >> 2, q = w.lane & 3;
  const bool low_row = g < tile_rows, high_row = g + 8 < tile_rows, request = g < w.step->rows;
  const uint32_t act = shared_address(w.smem) + plan.act_at + g * slot_stride(m.steps) + q * 16;
  float c[4] = {}, d[4] = {};
  for (int chunk = 0; chunk < m.chunks; ++chunk) {
    const int begin = chunk * m.chunk_steps, steps = min(m.chunk_steps, m.steps - begin);
    if (!w.skips(kSkipStreaming)) wait_barrier(w, w.full + w.at.slot * 8, w.at.parity);
    const uint32_t low = w.ring + w.at.slot * plan.slot_bytes + g * m.stride + q * 16;
#pragma unroll 2
    for (int step = w.warp; step < steps; step += kWarps) {
      uint4 a = {}, b = {}, x = {};
      if (low_row) a = load_shared(low + step * 64);
      if (high_row) b = load_shared(low + 8 * m.stride + step * 64);
      if (request) x = load_shared(act + (begin + step) * 64);
      mma<T>(c, a.x, b.x, a.y, b.y, x.x, x.y);
      mma<T>(d, a.z, b.z, a.w, b.w, x.z, x.w);
    }
    __syncwarp();
    if (w.lane == 0) barrier_arrive(w.empty + w.at.slot * 8);
    w.at.advance(plan.slots);
  }
  float* mine = partial + 2 * q * kWarps * 16 + w.warp * 16 + g;  // requests 2q and 2q + 1
  if (2 * q < plan.padded_rows) {
    mine[0] = c[0] + d[0];
    mine[8] = c[2] + d[2];
  }
  if (2 * q + 1 < plan.padded_rows) {
    mine[kWarps * 16] = c[1] + d[1];
    mine[kWarps * 16 + 8] = c[3] + d[3];
  }
}

// Sum over warps of one output: 4 lanes share it, and all 4 get the result.
__device__ __forceinline__ float reduce_partial(const float* partial, int share) {
  float v = 0.0f;
#pragma unroll
  for (int k = 0; k < kWarps / 4; ++k) v += partial[(share + 4 * k) * 16];
  v += __shfl_xor_sync(kAllLanes, v, 1);
  return v + __shfl_xor_sync(kAllLanes, v, 2);
}

// The block's slice of `m` times the activations in shared memory. `emit(row, request, valid, value, share)` is called
// by whole warps: 4 lanes (share 0 to 3) for each output, the next row's 4 lanes beside them; a warp serves one request,
// its own number modulo the padded rows. With kPair a row is a gate
// row and an up row, and the value is silu(gate) * up.
template <typename T, bool kPair, typename Emit>
__device__ __forceinline__ void gemv(Worker& w, const MatrixPlan& m, int count, Emit emit) {
  constexpr int kParts = kPair ? 2 : 1;
  const DecodePlan& plan = *w.plan;
  float* partial = w.shared<float>(plan.partial_at);
  const int tile_floats = plan.padded_rows * kWarps * 16;
  const int tiles = ceil_div(count, m.tile_rows), group = plan.partial_tiles / kParts;
  for (int base = 0; base < tiles; base += group) {
    const int in_group = min(group, tiles - base);
    for (int i = 0; i < in_group * kParts; ++i)
      multiply_tile<T>(w, m, min(m.tile_rows, count - (base + i / kParts) * m.tile_rows), partial + i * tile_floats);
    workers_sync();
    for (int i = w.thread; i < in_group * plan.padded_rows * 64; i += kWorkers) {
      const int share = i & 3, request = i >> 5 & (plan.padded_rows - 1), eighth = i >> 5 >> plan.row_bits;
      const int tile = eighth >> 1, row = (eighth & 1) * 8 + (i >> 2 & 7);
      const float* sums = partial + tile * kParts * tile_floats + request * kWarps * 16 + row;
      float value = reduce_partial(sums, share);
      if (kPair) value = silu(value) * reduce_partial(sums + tile_floats, share);
      const int slice_row = (base + tile) * m.tile_rows + row;
      emit(slice_row, request, row < m.tile_rows && slice_row < count && request < w.step->rows, value, share);
    }
    if (base + group < tiles) workers_sync();
  }
}

}  // namespace six_engines
