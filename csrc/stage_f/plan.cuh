// How one decode step is divided: rows of every matrix over multiprocessors, rows and columns over slots of the ring,
// bytes of shared memory and of the workspace. Computed on the host, read by every block.
//
// A matrix is divided by output rows, evenly, so each block owns a contiguous slice of it in every layer and the bytes
// that stream into one multiprocessor are the same as into any other, to within a row. A slice is cut into tiles of at
// most 8 rows, a tile into chunks of columns where its rows are too long for a slot. A warp's work is a unit: a tile's
// chunk, or part of one.
#pragma once

#include <algorithm>

#include "stage_f/primitives.cuh"

namespace six_engines {

// Warps that compute; one more streams. Few, because registers are dealt out to 8 warps as 255 each, to 9 as 168, and
// with 168 the attention of 128-wide heads spills; a spilled value is read back from L2 (shared memory has taken all of
// L1). One row, context 640, us a step (benchmarks/results/decode_kernel_history_h200.json): Qwen2.5-0.5B 553 with 10
// warps, 540 with 7; Qwen3-0.6B 859 and 682.
constexpr int kWarps = 7;
constexpr int kWorkers = kWarps * 32;
constexpr int kThreads = kWorkers + 32;
constexpr int kStepColumns = 32;              // columns a warp takes in one step: two matrix instructions
constexpr int kTileRows = 8;                  // and 4 requests: one output a lane
constexpr int kSlotArrivals = 64;             // that release a slot, shared among the warps that read it
constexpr int kAttentionChunk = 16;           // tokens a warp attends to at once

// The matrices of a layer in the order of their use, and the LM head.
enum Kind { kQkv, kOut, kGateUp, kDown, kHead, kKinds };

struct MatrixPlan {
  int rows;         // output rows of the matrix (gate_up: output columns of the MLP, each a gate row and an up row)
  int granule;      // rows are dealt out in multiples of this (2 where two outputs travel in one word)
  int steps;        // input columns / 32
  int chunk_steps, chunks;
  int tile_rows;
  int stride;       // bytes between rows in a slot: an odd multiple of 64, so that 8 lanes never share a bank
  int parts, part_steps;  // a slot is multiplied by `parts` warps, each taking some of its steps
  int units_at;           // where this matrix's units begin in the block's table
};

// A warp's work on one slot.
struct alignas(16) Unit {
  unsigned short slot;           // counted from the first of this matrix
  unsigned short rows;           // of weights in the slot
  unsigned short first, steps;   // within the slot
  unsigned short act_step;       // the same first step, counted from column 0
  unsigned short arrivals;       // this warp's share of the slot's kSlotArrivals
  unsigned short unused[2];
};

// What a block owns of a matrix.
struct alignas(16) Slice {
  int first, count, units, slots;
};

struct DecodePlan {
  MatrixPlan matrix[kKinds];
  int grid, slots, slot_bytes;
  int sets, block_shift;  // sets: of 4 requests, 1 or 2
  int act_at, partial_at, own_at, bias_at, rope_at, sums_at, rows_at, items_at, slices_at, units_at, table_at;
  int barriers_at;
  int smem_bytes;
  // Vectors handed off through L2: first word, and words per request. What a kind publishes; kQkv's is for attention.
  unsigned vector_at[4], vector_length[4];
  unsigned unit_rows, attention_rows, act_rows;  // reciprocals: unit -> request, see row_of
  unsigned attention_at, attention_length, splits_at, candidates_at, total_words;
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int slot_stride(int steps) { return steps * 64 + (steps % 2 == 0 ? 64 : 0); }

// n / d for the small n that are meant here is the upper half of n * reciprocal(d).
inline unsigned reciprocal(unsigned d) { return d == 1 ? 0xffffffffu : 0xffffffffu / d + 1; }

inline int most_rows(const MatrixPlan& m, int grid) { return ceil_div(m.rows / m.granule, grid) * m.granule; }
inline int most_slots(const MatrixPlan& m, int grid, int halves) {
  return ceil_div(most_rows(m, grid), m.tile_rows) * halves * m.chunks;
}

inline MatrixPlan plan_matrix(int rows, int granule, int columns, int grid, int slot_target, int halves) {
  MatrixPlan m{};
  m.rows = rows;
  m.granule = granule;
  m.steps = columns / kStepColumns;
  const int most = most_rows(m, grid), tiles = ceil_div(most, kTileRows);
  m.tile_rows = ceil_div(ceil_div(most, tiles), granule) * granule;
  const int fits = std::max(4, (slot_target / m.tile_rows - 64) / 64 / 4 * 4);  // in fours, as the product's loop
  m.chunks = ceil_div(m.steps, std::min(fits, m.steps));
  m.chunk_steps = m.chunks == 1 ? m.steps : ceil_div(ceil_div(m.steps, m.chunks), 4) * 4;
  m.chunks = ceil_div(m.steps, m.chunk_steps);
  m.stride = slot_stride(m.chunk_steps);
  int best = 1 << 30;
  for (int parts = 1; parts <= 8; ++parts) {  // the fewest steps on the busiest warp; a unit itself costs about 8
    const int steps = ceil_div(ceil_div(m.chunk_steps, parts), 4) * 4;
    const int cost = ceil_div(most_slots(m, grid, halves) * parts, kWarps) * (steps + 8);
    if (cost >= best || steps * (parts - 1) >= m.chunk_steps) continue;
    best = cost;
    m.parts = parts;
    m.part_steps = steps;
  }
  return m;
}

// Words are laid out for kMaxDecodeRows whatever the launch's rows, so that every row count can share one workspace.
// A vector is [2: even and odd layers][rows][length].
inline void plan_workspace(const DecodeStep& s, DecodePlan& plan) {
  unsigned at = 64;  // the control words
  const auto take = [&at](long long words) { const unsigned here = at; at += (words + 15) / 16 * 16; return here; };
  const unsigned qkv = (s.heads + 2 * s.kv_heads) * s.head_dim, hidden = s.hidden;
  const unsigned lengths[4] = {qkv / 2, hidden, s.intermediate / 2u, hidden};
  for (int kind = 0; kind < 4; ++kind) {
    plan.vector_length[kind] = lengths[kind];
    plan.vector_at[kind] = take(2LL * kMaxDecodeRows * lengths[kind]);
  }
  plan.attention_length = s.heads * s.head_dim / 2;
  plan.attention_at = take(2LL * kMaxDecodeRows * plan.attention_length);
  plan.splits_at = take(1LL * kMaxDecodeRows * s.heads * kMaxDecodeSplits * (s.head_dim + 2));
  plan.candidates_at = take(1LL * kMaxDecodeRows * kMaxBlocks * 2);
  plan.total_words = at;
}

// Returns null or what does not fit.
inline const char* plan_step(const DecodeStep& s, int multiprocessors, int smem_limit, DecodePlan& plan) {
  plan = DecodePlan{};
  // Every block owns part of the MLP: see the head of kernel.cuh.
  plan.grid = std::min({multiprocessors, kMaxBlocks, s.intermediate / 2});
  const int attention = s.heads * s.head_dim, qkv = attention + 2 * s.kv_heads * s.head_dim;
  // A slot takes 8 rows of the hidden size, but no more than 18,560 bytes: benchmarks/results/
  // decode_kernel_history_h200.json has the times of 15,000 and 26,000.
  const int target = std::min(18560, kTileRows * slot_stride(s.hidden / kStepColumns));
  plan.matrix[kQkv] = plan_matrix(qkv, 2, s.hidden, plan.grid, target, 1);
  plan.matrix[kOut] = plan_matrix(s.hidden, 1, attention, plan.grid, target, 1);
  plan.matrix[kGateUp] = plan_matrix(s.intermediate, 2, s.hidden, plan.grid, target, 2);
  plan.matrix[kDown] = plan_matrix(s.hidden, 1, s.intermediate, plan.grid, target, 1);
  plan.matrix[kHead] = plan_matrix(s.vocab, 1, s.hidden, plan.grid, target, 1);
  int units = 0, most_units = 0;
  for (int kind = 0; kind < kKinds; ++kind) {
    MatrixPlan& m = plan.matrix[kind];
    plan.slot_bytes = std::max(plan.slot_bytes, (m.tile_rows * m.stride + 127) / 128 * 128);
    m.units_at = units;
    if (kind == kHead) continue;  // it has enough tiles for each warp to take whole ones
    const int own = most_slots(m, plan.grid, kind == kGateUp ? 2 : 1) * m.parts;
    units += own;
    most_units = std::max(most_units, own);
  }
  plan.sets = ceil_div(s.rows, 4);
  plan.unit_rows = reciprocal(ceil_div(s.hidden, 64));
  plan.attention_rows = reciprocal(attention / 4);
  plan.act_rows = reciprocal(s.intermediate / 4);
  while (1 << plan.block_shift < s.block_size) ++plan.block_shift;
  plan_workspace(s, plan);

  int at = 0;
  const auto take = [&at](int bytes) { const int here = at; at += (bytes + 127) / 128 * 128; return here; };
  plan.act_at = take(s.rows * slot_stride(std::max({s.hidden, attention, s.intermediate}) / kStepColumns));
  plan.partial_at = take(std::max(most_units * plan.sets * 32 * 4, s.rows * kWarps * 12));  // see best_of_warps
  plan.own_at = take(most_rows(plan.matrix[kOut], plan.grid) * kMaxDecodeRows * 4);
  plan.bias_at = take(most_rows(plan.matrix[kQkv], plan.grid) * 4);
  plan.rope_at = take(s.rows * s.head_dim * 4);
  plan.sums_at = take(s.rows * ceil_div(s.hidden, 64) * 4);
  plan.rows_at = take((4 * kMaxDecodeRows + 1) * 4);
  plan.items_at = take(kWarps * 64);
  plan.slices_at = take(kKinds * static_cast<int>(sizeof(Slice)));
  plan.units_at = take(units * static_cast<int>(sizeof(Unit)));
  plan.table_at = take(s.layers * static_cast<int>(sizeof(LayerWeights)));
  plan.barriers_at = take(64 * 16);
  plan.slots = std::min(64, (smem_limit - at) / plan.slot_bytes);
  if (plan.slots < 4) return "shared memory holds fewer than 4 slots of weights: use fewer rows";
  const int ring = plan.slots * plan.slot_bytes;  // the ring comes first; everything else moves behind it
  for (int* offset : {&plan.act_at, &plan.partial_at, &plan.own_at, &plan.bias_at, &plan.rope_at, &plan.sums_at,
                      &plan.rows_at, &plan.items_at, &plan.slices_at, &plan.units_at, &plan.table_at,
                      &plan.barriers_at})
    *offset += ring;
  plan.smem_bytes = ring + at;
  if (most_rows(plan.matrix[kQkv], plan.grid) > kWorkers) return "more rows of the QKV projection a block than threads";
  return nullptr;
}

}  // namespace six_engines
