// How one decode step is divided: rows of every matrix over multiprocessors, rows and columns over slots of the ring,
// columns over warps, bytes of shared memory and of the workspace. All of it is known when the kernel is compiled.
//
// A matrix is divided by output rows, evenly, so each block owns a contiguous slice of it in every layer and the bytes
// that stream into one multiprocessor are the same as into any other, to within a row. A slice is cut into tiles of at
// most 8 rows, a tile into chunks of columns where its rows are too long for a slot. A chunk's columns are divided
// among the warps, so that a warp needs the same few activations for all tiles, and takes them from the hand-off
// straight into registers.
#pragma once

#include "stage_f/primitives.cuh"
#include "stage_f/shape.cuh"

namespace six_engines {

// Warps that compute; one more streams. Few, because registers are dealt out to 8 warps as 255 each, to 9 as 168, and
// with 168 much would be spilled; a spilled value is read back from L2 (shared memory has taken all of L1).
constexpr int kWarps = 7;
constexpr int kWorkers = kWarps * 32;
constexpr int kThreads = kWorkers + 32;
constexpr int kStepColumns = 32;              // columns a warp takes in one step: one matrix instruction
constexpr int kTileRows = 8;                  // and 4 requests: one output per lane
constexpr int kAttentionChunk = 16;           // tokens a warp attends to at once
constexpr int kSharedBytes = 232448;          // of a block, compute capability 9.0
constexpr int kGroupTiles = 10;               // tiles that a warp multiplies before it adds up
constexpr int kEarlySteps = 16;               // of weights that are in registers before the activations arrive
constexpr int kBatchSteps = 24;               // of a long vector that are received at once

// The matrices of a layer in the order of their use, and the LM head.
enum Kind { kQkv, kOut, kGateUp, kDown, kHead, kKinds };

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int slot_stride(int steps) { return steps * 64 + (steps % 2 == 0 ? 64 : 0); }

struct MatrixPlan {
  int rows;         // output rows of the matrix (gate_up: output columns of the MLP, each a gate row and an up row)
  int granule;      // rows are dealt out in multiples of this (2 where two outputs travel in one word)
  int halves;       // 2: a gate tile and its up tile alternate
  int steps;        // input columns / 32
  int chunk_steps, chunks;
  int tile_rows, tiles;   // tiles: of the block that has most
  int least_tiles;        // of the block that has fewest
  int stride;       // bytes between rows in a slot: an odd multiple of 64, so that 8 lanes never share a bank
  int batch_chunks; // chunks whose activations a warp receives at once

  __host__ __device__ constexpr int steps_of(int chunk) const {
    return smaller(chunk_steps, steps - chunk * chunk_steps);
  }
  __host__ __device__ constexpr int warp_steps_of(int chunk) const { return ceil_div(steps_of(chunk), kWarps); }
};

constexpr MatrixPlan plan_matrix(int rows, int granule, int columns, int halves, bool keeps) {
  // A slot takes 8 rows of the hidden size, but no more than 18,560 bytes.
  const int target = smaller(18560, kTileRows * slot_stride(kHidden / kStepColumns));
  MatrixPlan m{};
  m.rows = rows;
  m.granule = granule;
  m.halves = halves;
  m.steps = columns / kStepColumns;
  const int most = ceil_div(rows / granule, kGrid) * granule, least = rows / granule / kGrid * granule;
  m.tiles = ceil_div(most, kTileRows);
  m.tile_rows = ceil_div(ceil_div(most, m.tiles), granule) * granule;
  m.least_tiles = ceil_div(least, m.tile_rows);
  const int fits = smaller(m.steps, larger(kWarps, (target / m.tile_rows - 64) / 64));
  m.chunks = ceil_div(m.steps, fits);
  m.chunk_steps = m.chunks == 1 ? m.steps : smaller(fits, ceil_div(ceil_div(m.steps, m.chunks), kWarps) * kWarps);
  m.chunks = ceil_div(m.steps, m.chunk_steps);
  m.stride = slot_stride(m.chunk_steps);
  int steps = 0;
  for (int chunk = 0; chunk < m.chunks; ++chunk) steps += m.warp_steps_of(chunk);
  m.batch_chunks = keeps || steps <= kBatchSteps ? m.chunks : larger(1, kBatchSteps / m.warp_steps_of(0));
  return m;
}

constexpr int kAttentionColumns = kHeads * kHeadDim, kQkvRows = kAttentionColumns + 2 * kKvHeads * kHeadDim;

struct Matrices {
  MatrixPlan of[kKinds];
};
constexpr Matrices kMatrices = {{
    plan_matrix(kQkvRows, 2, kHidden, 1, true),
    plan_matrix(kHidden, 1, kAttentionColumns, 1, false),
    plan_matrix(kIntermediate, 2, kHidden, 2, true),
    plan_matrix(kHidden, 1, kIntermediate, 1, false),
    plan_matrix(kVocab, 1, kHidden, 1, true),
}};
template <Kind kKind>
constexpr MatrixPlan kMatrix = kMatrices.of[kKind];

// What a block owns of a matrix.
struct alignas(16) Slice {
  int first, count, tiles, slots;
};

// Words are laid out for kMaxDecodeRows, so that launches of any number of rows share one workspace. A vector is
// [2: even and odd layers][rows][length] and named after the product that publishes it: kQkv's goes to attention,
// kGateUp's (the MLP activation) to kDown; kOut's and kDown's are the hidden state.
constexpr unsigned vector_length(int kind) {
  return kind == kQkv ? kQkvRows / 2 : kind == kGateUp ? kIntermediate / 2 : kHidden;
}
constexpr unsigned words_before(int kind) {
  unsigned at = 64;  // the control words
  for (int k = 0; k < kind; ++k) at += (2u * kMaxDecodeRows * vector_length(k) + 15) / 16 * 16;
  return at;
}
template <int kKind>
constexpr unsigned kVectorAt = words_before(kKind);
template <int kKind>
constexpr unsigned kVectorLength = vector_length(kKind);
constexpr int kMaxParts = 4;  // of a row's attention to one KV head; [row][part][column / 4] quads of two words
static_assert(kMaxParts <= 4, "with one request, 8 lanes of a warp take a part: see receive_attended_alone");
constexpr unsigned kPartsAt = words_before(kHead);
constexpr unsigned kPiecesAt = kPartsAt + kMaxDecodeRows * kMaxParts * kAttentionColumns / 2;  // [block][as a part]
constexpr unsigned kCandidatesAt = kPiecesAt + kGrid * kGroup * kHeadDim / 2;
constexpr unsigned kTotalWords = kCandidatesAt + kMaxDecodeRows * kMaxBlocks * 2;

// At most as many as there are blocks, if the launch is compiled for more than 4 rows.
template <int kSets>
constexpr int kMostParts = kSets == 1 ? kMaxParts : larger(1, smaller(kMaxParts, kGrid / (kSets * 4 * kKvHeads)));

// A part of a long context is cut into pieces for more blocks: the hand-off between them costs about as much as attending
// to this many chunks, one after the other.
constexpr int kHandOffChunks = 2;
constexpr int kMaxPieces = 16;  // a thread holds all that it merges in registers
constexpr int least_rows(int sets, bool alone) { return alone ? 1 : sets == 1 ? 2 : 5; }
// One where that leaves too few registers: with it, two short contexts of Qwen3-0.6B took a tenth longer.
template <int kSets, bool kAlone>
constexpr int kMostPieces =
    kHeadDim > 64 && !kAlone
        ? 1
        : larger(1, smaller(kMaxPieces, kGrid / (kMostParts<kSets> * kKvHeads * least_rows(kSets, kAlone))));

// Shared memory of a launch of up to 4 kSets requests. The ring comes last, and takes what is left.
constexpr int most_partials() {
  int most = 0;
  for (int k = 0; k < kHead; ++k) most = larger(most, kMatrices.of[k].tiles * kMatrices.of[k].halves);
  return most * kWarps * 32 * 4;
}
constexpr int slot_bytes() {
  int most = 0;
  for (const MatrixPlan& m : kMatrices.of) most = larger(most, m.tile_rows * m.stride);
  return (most + 127) / 128 * 128;
}
constexpr int aligned(int bytes) { return (bytes + 127) / 128 * 128; }

template <int kSets>
struct Layout {
  static constexpr int kPartial = aligned(most_partials() * kSets);  // one of two
  static constexpr int kActAt = 0;  // of the LM head; in the layers, what an attention's warps leave
  static constexpr int kActStride = slot_stride(kHidden / kStepColumns);
  static constexpr int kAttended = kWarps * kGroup * (kHeadDim + 4) * 4;  // see merge_place
  static constexpr int kPartialAt = kActAt + aligned(larger(kSets * 4 * kActStride, kAttended));
  static constexpr int kSumsAt = kPartialAt + 2 * kPartial;
  static constexpr int kRopeAt = kSumsAt + aligned(2 * kSets * 4 * 8 * 4);
  static constexpr int kRowsAt = kRopeAt + aligned(kSets * 4 * kHeadDim * 4);
  static constexpr int kItemsAt = kRowsAt + aligned((5 * kMaxDecodeRows + 2) * 4);
  static constexpr int kSlicesAt = kItemsAt + aligned(kWarps * 64);
  static constexpr int kBarriersAt = kSlicesAt + aligned(kKinds * 16);
  static constexpr int kTableAt = kBarriersAt + 64 * 16;
  static constexpr int kRingAt = kTableAt + aligned(kLayers * static_cast<int>(sizeof(LayerWeights)));
  static constexpr int kSlotBytes = slot_bytes();
  static constexpr int kSlots = smaller(64, (kSharedBytes - kRingAt) / kSlotBytes);
};

// The most slots that a block has requested and not received, except for the LM head. Weights that arrive long
// before they are needed only delay the words that are handed off. Large layers need more: nothing else fills their
// time. (On an H200, 4 make a step shorter with hidden sizes of 896 and 1,024, and longer with one of 2,048.)
constexpr int kInFlight = kHidden <= 1024 ? 4 : 64;

// Tiles (of a batch of chunks) whose slots are waited for together: at most half of the ring, so that the other half is
// on its way meanwhile; but all of gate and up if they fit.
template <int kSets>
constexpr int group_tiles(const MatrixPlan& m) {
  const int tiles = m.tiles * m.halves, slots = Layout<kSets>::kSlots;
  const int most = m.halves == 1 ? slots / 2 : slots - 1;
  if (tiles * m.batch_chunks <= most && tiles <= kGroupTiles / kSets) return tiles;
  return larger(1, smaller(smaller(tiles, kGroupTiles / kSets), slots / 2 / m.batch_chunks));
}
template <Kind kKind, int kSets>
constexpr int kTogether = group_tiles<kSets>(kMatrices.of[kKind]);

// Tiles whose weights a warp loads before its activations arrive.
template <int kSets>
constexpr int early_tiles(const MatrixPlan& m) {
  if (group_tiles<kSets>(m) != m.tiles * m.halves) return 0;
  return smaller(m.least_tiles * m.halves, kEarlySteps / (m.batch_chunks * m.warp_steps_of(0)));
}
template <Kind kKind, int kSets>
constexpr int kEarly = early_tiles<kSets>(kMatrices.of[kKind]);

}  // namespace six_engines
