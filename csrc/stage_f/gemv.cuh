// Streaming and multiplying. One warp of a block (`stream_step`) copies the block's slices of all matrices, in the
// order in which they will be used, into a ring of shared-memory slots; it knows no activations and so never waits for
// another block, only for a free slot. The other warps multiply what has arrived (`multiply_units`, `multiply_tile`).
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

#include "stage_f/plan.cuh"

namespace six_engines {

// A ring slot and the parity of its barriers, advanced in step by the producer and by every consumer.
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int by, int slots) {
    for (slot += by; slot >= slots; slot -= slots) parity ^= 1;
  }
};

// What a thread needs everywhere. `waits` and `streams` are cleared once a wait has outlasted the limit, in this thread
// or in any other of the grid: the thread then waits for nothing any more, so that a broken step ends with an error in
// the workspace instead of a hung GPU. The error stays there, and ends the steps behind it early too, until the host
// has seen it and made the workspace as new.
struct Worker {
  const DecodeStep& step;
  const DecodePlan& plan;
  unsigned char* smem;
  Word* words;
  uint32_t ring, full, empty;  // shared addresses: slots, and their two barriers each
  RingPosition at;
  uint32_t flag;               // of the step and layer, in every word that is handed off
  int parity;                  // of the layer
  int warp, lane, thread;
  int place;                   // where we are, for the error report: layer * 16 + phase
  bool waits, streams;         // false: do not wait for words, for weights

  template <typename U>
  __device__ __forceinline__ U* shared(int offset) const { return reinterpret_cast<U*>(smem + offset); }
};

__device__ __forceinline__ unsigned* control(const Worker& w) {  // steps done, blocks finished, first error
  return reinterpret_cast<unsigned*>(w.words);
}

// One request of a vector [2 parities][rows][length] that is handed off through L2 and begins at word `at`.
__device__ __forceinline__ Word* handed_off(const Worker& w, unsigned at, unsigned length, int parity, int row) {
  return w.words + (at + (parity * kMaxDecodeRows + row) * length);
}

// Returns when this wait began, or 0 once it or another one has lasted too long. (Values, no references: a `Worker` whose address is
// taken would live in memory instead of registers.)
static __device__ __noinline__ unsigned long long check_patience(unsigned long long since, long long limit,
                                                                 unsigned* error, unsigned place) {
  const unsigned long long now = nanoseconds();
  if (*static_cast<volatile unsigned*>(error) != 0) return 0;
  if (since == 0) return now;
  if (now - since < static_cast<unsigned long long>(limit)) return since;
  atomicCAS(error, 0u, place + 1);
  return 0;
}

// Counts failed attempts of one wait; from time to time looks at the clock.
struct Patience {
  unsigned attempts = 0;
  unsigned long long since = 0;
  __device__ __forceinline__ void attempt(Worker& w) {
    if ((++attempts & 255u) != 0) return;
    since = check_patience(since, w.step.timeout_ns, control(w) + 2, w.place);
    if (since == 0) w.waits = w.streams = false;
  }
};

__device__ __forceinline__ void wait_barrier(Worker& w, uint32_t barrier, uint32_t parity) {
  Patience patience;
  while (w.streams && !barrier_passed(barrier, parity)) patience.attempt(w);
}

// A warp waits for words: `look` reads those of its lane and says whether all are there.
template <typename Look>
__device__ __forceinline__ void wait_words(Worker& w, Look look) {
  Patience patience;
  while (!__all_sync(kAllLanes, look() || !w.waits)) patience.attempt(w);
}

__device__ __forceinline__ void workers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kWorkers) : "memory"); }

// ---- the producer warp ---------------------------------------------------------------------------------------------

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

// ---- the consumer warps --------------------------------------------------------------------------------------------

// Activations lie in shared memory in the order in which a lane wants them: of every 8 columns first 0, 1, 4, 5 and
// then 2, 3, 6, 7. The byte offset of column pair `pair` (columns 2 pair and 2 pair + 1):
__device__ __forceinline__ int act_offset(int pair) { return (pair >> 2) * 16 + (pair & 1) * 8 + (pair & 2) * 2; }

// Lane (g, q): the sum of weight row g times request q, over `steps` steps. `a`: shared address of the lane's part of
// the weights, `x`: of the activations. Four sums at a time, because one instruction's result comes some 30 cycles
// later.
__device__ __forceinline__ uint2 load_shared2(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

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
