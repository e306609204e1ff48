// Streaming and multiplying. One warp of a block (`stream_step`) copies the block's slices of all matrices, in the order
// in which they will be used, into a ring of shared-memory slots; it knows no activations and so never waits for
// another block, only for a free slot. The other warps multiply what has arrived (`multiply_tiles`).
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
  const DecodeStep& step;
  const DecodePlan& plan;
  unsigned char* smem;
  Word* words;
  uint32_t ring, full, empty;  // shared addresses: slots, and their two barriers each
  RingPosition at;
  uint32_t tag;                // of the layer, in every word that is exchanged
  int parity;                  // of the layer
  int warp, lane, thread;
  int place;                   // where we are, for the error report: layer * 16 + phase
  bool gave_up;

  template <typename U>
  __device__ __forceinline__ U* shared(int offset) const { return reinterpret_cast<U*>(smem + offset); }
  __device__ __forceinline__ bool skips(int flag) const { return (step.flags & flag) != 0; }
};

__device__ __forceinline__ unsigned* control(const Worker& w) {  // steps done, blocks finished, place of the first error
  return reinterpret_cast<unsigned*>(w.words);
}

// One request of an exchanged vector [replicas][2 parities][rows][length] that begins at word `at`.
__device__ __forceinline__ Word* exchanged(const Worker& w, unsigned at, unsigned length, int parity, int replica, int row) {
  return w.words + (at + ((replica * 2 + parity) * kMaxDecodeRows + row) * length);
}

// Returns when this wait began, or 0 once it has lasted too long. (Values, no references: a `Worker` whose address is
// taken would live in memory instead of registers.)
static __device__ __noinline__ unsigned long long check_patience(unsigned long long since, long long limit, unsigned* error,
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
    if ((++attempts & 63u) == 0) {
      since = check_patience(since, w.step.timeout_ns, control(w) + 2, w.place);
      w.gave_up = w.gave_up || since == 0;
    }
    return w.gave_up;
  }
};

__device__ __forceinline__ void wait_barrier(Worker& w, uint32_t barrier, uint32_t parity) {
  Patience patience;
  while (!barrier_passed(barrier, parity)) {
    if (patience.exhausted(w)) return;
  }
}

// A warp waits for words: `look` reads those of its lane and says whether all are there.
template <typename Look>
__device__ __forceinline__ void wait_words(Worker& w, Look look) {
  Patience patience;
  while (!__all_sync(kAllLanes, look() || w.skips(kSkipExchange))) {
    if (__any_sync(kAllLanes, patience.exhausted(w))) return;
    if (w.step.backoff_ns > 0) __nanosleep(w.step.backoff_ns);
  }
}

__device__ __forceinline__ void workers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kWorkers) : "memory"); }

// ---- the producer warp ---------------------------------------------------------------------------------------------

// gate_up: a gate tile and its up tile alternate.
__device__ __forceinline__ void stream_matrix(Worker& w, int kind, const void* weights, uint64_t policy) {
  const MatrixPlan m = w.plan.matrix[kind];
  const int first = w.shared<int>(w.plan.slices_at)[2 * kind], count = w.shared<int>(w.plan.slices_at)[2 * kind + 1];
  const int halves = kind == kGateUp ? 2 : 1;
  const long long row_bytes = m.steps * 64LL;
  const auto* base = static_cast<const unsigned char*>(weights) + (first + w.lane) * row_bytes;
  for (int row = 0; row < count; row += m.tile_rows) {
    const int rows = min(m.tile_rows, count - row);
    for (int half = 0; half < halves; ++half) {
      const auto* source = base + (row + half * m.rows) * row_bytes;
      for (int chunk = 0; chunk < m.chunks; ++chunk) {
        const int bytes = min(m.chunk_steps, m.steps - chunk * m.chunk_steps) * 64;
        const uint32_t full = w.full + w.at.slot * 8;
        wait_barrier(w, w.empty + w.at.slot * 8, w.at.parity ^ 1);
        if (w.lane == 0) barrier_expect(full, rows * bytes);
        __syncwarp();
        if (w.lane < rows)
          bulk_copy(w.ring + w.at.slot * w.plan.slot_bytes + w.lane * m.stride, source + chunk * m.chunk_steps * 64, bytes,
                    full, policy);
        w.at.advance(w.plan.slots);
      }
    }
  }
}

__device__ __forceinline__ void stream_step(Worker& w, const LayerWeights* table) {
  const uint64_t policy = evict_first_policy();
#pragma unroll 1
  for (int layer = 0; layer <= w.step.layers; ++layer) {
    w.place = layer * 16 + 15;
#pragma unroll 1
    for (int kind = layer < w.step.layers ? kQkv : kHead; kind <= (layer < w.step.layers ? kDown : kHead); ++kind) {
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

// ---- the consumer warps --------------------------------------------------------------------------------------------

struct Accumulator {  // of one slot: two independent chains of matrix instructions
  float c[4] = {}, d[4] = {};
};

// This warp's columns of one slot; `act` is the lane's shared address of the activations of the slot's first column.
template <typename T>
__device__ __forceinline__ void multiply_slot(const Worker& w, const MatrixPlan& m, int slot, int rows, int steps, uint32_t act,
                                              Accumulator& sum) {
  const int g = w.lane >> 2, q = w.lane & 3;
  const bool high_row = g + 8 < rows, request = g < w.step.rows;  // a row beyond `rows` is computed from stale weights, not read
  const uint32_t low = w.ring + slot * w.plan.slot_bytes + g * m.stride + q * 16;
#pragma unroll 2
  for (int step = w.warp; step < steps; step += kWarps) {
    uint4 a = load_shared(low + step * 64), b = {}, x = {};
    if (high_row) b = load_shared(low + 8 * m.stride + step * 64);
    if (request) x = load_shared(act + step * 64);
    mma<T>(sum.c, a.x, b.x, a.y, b.y, x.x, x.y);
    mma<T>(sum.d, a.z, b.z, a.w, b.w, x.z, x.w);
  }
}

// This warp's share of a tile's sums, into `partial` [padded rows][warps][16].
__device__ __forceinline__ void store_partial(const Worker& w, float* partial, const Accumulator& sum) {
  const int g = w.lane >> 2, q = w.lane & 3;
  float* mine = partial + (2 * q * kWarps + w.warp) * 16 + g;  // requests 2q and 2q + 1
  if (2 * q < w.plan.padded_rows) {
    mine[0] = sum.c[0] + sum.d[0];
    mine[8] = sum.c[2] + sum.d[2];
  }
  if (2 * q + 1 < w.plan.padded_rows) {
    mine[kWarps * 16] = sum.c[1] + sum.d[1];
    mine[kWarps * 16 + 8] = sum.c[3] + sum.d[3];
  }
}

// Tiles [begin, end) of the block's slice against all requests, slots in pairs: while the second slot's loads are on
// their way the first is multiplied. A pair is two tiles, or two chunks of one tile.
template <typename T>
__device__ __forceinline__ void multiply_tiles(Worker& w, const MatrixPlan& m, int begin, int end, int count, int halves) {
  const DecodePlan& plan = w.plan;
  float* partial = w.shared<float>(plan.partial_at);
  const int tile_floats = plan.padded_rows * kWarps * 16;
  const uint32_t act = shared_address(w.smem) + plan.act_at + (w.lane >> 2) * slot_stride(m.steps) + (w.lane & 3) * 16;
  const bool whole = m.chunks == 1;
  const auto rows_of = [&](int tile) { return min(m.tile_rows, count - (halves == 2 ? tile >> 1 : tile) * m.tile_rows); };
  for (int tile = begin; tile < end; tile += whole ? 2 : 1) {
    Accumulator first, second;
    for (int chunk = 0; chunk < m.chunks; chunk += 2) {
      const bool pair = whole ? tile + 1 < end : chunk + 1 < m.chunks;
      const int column = chunk * m.chunk_steps, next = whole ? column : column + m.chunk_steps;
      const RingPosition a = w.at;
      w.at.advance(plan.slots);
      const RingPosition b = w.at;
      if (pair) w.at.advance(plan.slots);
      if (!w.skips(kSkipStreaming)) {
        wait_barrier(w, w.full + a.slot * 8, a.parity);
        if (pair) wait_barrier(w, w.full + b.slot * 8, b.parity);
      }
      multiply_slot<T>(w, m, a.slot, rows_of(tile), min(m.chunk_steps, m.steps - column), act + column * 64, first);
      if (pair)
        multiply_slot<T>(w, m, b.slot, rows_of(whole ? tile + 1 : tile), min(m.chunk_steps, m.steps - next), act + next * 64,
                         second);
      __syncwarp();
      if (w.lane == 0) {
        barrier_arrive(w.empty + a.slot * 8);
        if (pair) barrier_arrive(w.empty + b.slot * 8);
      }
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) first.c[i] += second.c[i], first.d[i] += second.d[i];
    }
    store_partial(w, partial + (tile - begin) * tile_floats, first);
    if (whole && tile + 1 < end) store_partial(w, partial + (tile + 1 - begin) * tile_floats, second);
  }
}

// Sum over warps of one output: 4 lanes (share 0 to 3) divide the warps, and all 4 get the result.
__device__ __forceinline__ float reduce_partial(const float* partial, int share) {
  float v = 0.0f;
#pragma unroll
  for (int k = 0; k < ceil_div(kWarps, 4); ++k)
    if (share + 4 * k < kWarps) v += partial[(share + 4 * k) * 16];
  v += __shfl_xor_sync(kAllLanes, v, 1);
  return v + __shfl_xor_sync(kAllLanes, v, 2);
}

}  // namespace six_engines
