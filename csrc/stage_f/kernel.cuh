// A persistent megakernel, one launch per decode step: embedding, every layer, LM head, tokens.
//
// Why: at one row a step is 988 MB of weights (Qwen2.5-0.5B) and next to no arithmetic, 0.23 ms at the memory's speed.
// As ordinary kernels, even in a CUDA graph, every layer is a handful of launches. Each begins with no load under way,
// and ends with none. Here one block per multiprocessor stays for the whole step and does two things that separate
// kernels cannot:
//   * weights never stop flowing: they do not depend on activations, so one warp streams them through a ring of
//     about 200 KB per multiprocessor (26 MB together, almost a layer) however long the others wait (stream.cuh);
//   * no barrier over the grid: every value that crosses multiprocessors is handed off through L2 in a word beside a
//     flag (step and layer), and its reader polls the word until it has the flag that it expects (primitives.cuh).
//
// One layer is five hand-offs: hidden -> QKV -> parts of the attention -> hidden -> MLP activation -> hidden. A sixth,
// pieces of a part -> the part, pays with long contexts.
//
// With small models the time of a layer is neither arithmetic nor bandwidth. It is the length of one warp's path
// through it: instructions that wait for each other, and five hand-offs, each a store to L2 and a load from there.
// Hence every size is a constant (shape.cuh), products are straight lines of few instructions, with weights and
// activations in registers (gemv.cuh), and few warps have many registers each (plan.cuh).
//
// Why a reader never finds a word that is already overwritten: handed-off vectors alternate between two copies, for
// even and odd layers. Before a block writes layer l + 2 into a copy, it has read the hidden state that layer l + 1
// ends with. That is made of the whole MLP activation of layer l + 1. Every block owns a part of this activation, and
// publishes it only after it has read everything of layer l. So no block still reads layer l. For the parts of an
// attention, and their pieces, one copy is enough: a block writes those of layer l + 1 after it has read that layer's
// QKV, which is made of the whole MLP activation of layer l, and a block publishes its part of that after it has read
// layer l's parts, which are published after their pieces have been read.
// The next step is another launch, and begins when all blocks of this one have ended.
//
// Launch: cooperative, because blocks wait for each other and must all be resident. One block fills a multiprocessor's
// shared memory, the grid is at most the number of multiprocessors, and a cooperative launch can be captured in a
// graph.
#pragma once

#include "stage_f/attention.cuh"
#include "stage_f/product.cuh"
#include "stage_f/stream.cuh"

namespace six_engines {

template <typename W, int kSets>
__device__ __forceinline__ void consume(W& w, const LayerWeights* table, unsigned first_flag) {
  const DecodeStep& s = w.step;
  const AttentionItem item = attention_item(w, blockIdx.x);
  prefetch_item(w, item, 0);
  if (w.lane == 0) w.template shared<AttentionItem>(W::At::kItemsAt)[w.warp] = item;
  __syncwarp();
  Residual<kSets> residual = {};
  const Slice hidden = w.slice(kOut);  // kDown is divided in the same way
#pragma unroll
  for (int round = 0; round < kResidualTiles; ++round) {
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const int g = w.lane >> 2, request = set * 4 + (w.lane & 3);
      const int row = (round * kWarps + w.warp) * kMatrix<kOut>.tile_rows + g;
      if (g >= kMatrix<kOut>.tile_rows || row >= hidden.count || request >= s.rows) continue;
      const long long token = w.token_table()[request];
      const T* embedding = static_cast<const T*>(s.embedding) + token * kHidden;
      residual[round][set] = to_float(embedding[hidden.first + row]);
      publish(w.template handed_off<kDown>(1, request) + hidden.first + row,
              flagged(__float_as_uint(residual[round][set]), first_flag));
    }
  }
  w.mark();
#pragma unroll 1
  for (int layer = 0; layer < kLayers; ++layer) {
    asm volatile("" : "+r"(w.warp), "+r"(w.lane));  // compute addresses again: kept over a layer, they spill
    const LayerWeights& weights = table[layer];
    const uint32_t before = first_flag + layer;
    w.flag = before + 1;
    w.parity = layer & 1;
    w.place = layer * 16 + kQkv;
    hidden_product<kQkv, kDown>(w, before, w.parity ^ 1, weights.input_norm, weights.qkv_bias, residual);
    w.place = layer * 16 + kOut;
    attention_phase(w, layer, weights);
    long_product<kOut>(w, residual);
    w.place = layer * 16 + kGateUp;
    hidden_product<kGateUp, kOut>(w, w.flag, w.parity, weights.post_norm, nullptr, residual);
    w.place = layer * 16 + kDown;
    long_product<kDown>(w, residual);
  }
  w.place = kLayers * 16 + kHead;
  w.flag = first_flag + kLayers + 1;
  receive_head<W, kSets>(w, first_flag + kLayers, kLayers & 1 ^ 1);
  w.mark();
  head_product<W, kSets>(w);
  w.mark();
}

// The block's slice of a matrix.
template <typename W>
__device__ __forceinline__ void own_slice(const W& w, int kind) {
  const MatrixPlan m = kind == kQkv ? kMatrix<kQkv> : kind == kOut ? kMatrix<kOut> : kind == kGateUp ? kMatrix<kGateUp>
                     : kind == kDown ? kMatrix<kDown> : kMatrix<kHead>;
  const long long dealt = m.rows / m.granule;
  Slice slice;
  slice.first = static_cast<int>(dealt * blockIdx.x / kGrid) * m.granule;
  slice.count = static_cast<int>(dealt * (blockIdx.x + 1) / kGrid) * m.granule - slice.first;
  slice.tiles = ceil_div(slice.count, m.tile_rows);
  slice.slots = slice.tiles * m.chunks * m.halves;
  w.template shared<Slice>(W::At::kSlicesAt)[kind] = slice;
}

// Prepares what every thread of the block needs before the first layer.
template <typename W>
__device__ __forceinline__ void prepare(W& w) {
  const DecodeStep& s = w.step;
  int* rows = w.template shared<int>(W::At::kRowsAt);
  if (w.thread < W::At::kSlots) {
    barrier_init(w.full + w.thread * 8, 1);
    barrier_init(w.empty + w.thread * 8, kWarps);
    barrier_init_fence();
  }
  if (w.thread < kKinds) own_slice(w, w.thread);
  auto* table = w.template shared<unsigned long long>(W::At::kTableAt);
  for (int i = w.thread; i < kLayers * kLayerPointers; i += kThreads)
    table[i] = reinterpret_cast<const unsigned long long*>(s.layer_table)[i];
  if (w.thread < s.rows) {
    const int context = s.slot_mapping[w.thread] < 0 ? 0 : s.context_lens[w.thread];
    const int chunks = cached_chunks(context) + 1, parts = min(W::kParts, ceil_div(chunks, kWarps));
    const int most = min(W::kPieces, max(1, kGrid / (W::kParts * s.rows * kKvHeads)));  // blocks wait for other items
    const bool is_long = chunks > parts * kWarps * (kHandOffChunks + 1);
    const int pieces = is_long ? min(most, ceil_div(chunks, parts * kWarps)) : 1;
    const int per_item = ceil_div(chunks, parts * pieces), items = ceil_div(chunks, per_item);
    rows[w.thread] = context;
    rows[kMaxDecodeRows + w.thread] = per_item;
    rows[2 * kMaxDecodeRows + w.thread] = context == 0 ? 0 : ceil_div(items, pieces);
    rows[3 * kMaxDecodeRows + w.thread] = pieces;
    w.token_table()[w.thread] = static_cast<int>(s.last_tokens[s.batch_slots[w.thread]]);
  }
  float* rope = w.template shared<float>(W::At::kRopeAt);
  for (int i = w.thread; i < s.rows * (kHeadDim / 2); i += kThreads) {
    const int row = i / (kHeadDim / 2), column = i % (kHeadDim / 2);
    const long long at = s.positions[row] * (kHeadDim / 2) + column;
    rope[row * kHeadDim + column] = s.cos[at];
    rope[row * kHeadDim + kHeadDim / 2 + column] = s.sin[at];
  }
  __syncthreads();
  if (w.thread == 0) {
    int parts = 1, pieces = 1;
    for (int row = 0; row < s.rows; ++row) {
      parts = max(parts, rows[2 * kMaxDecodeRows + row]);
      pieces = max(pieces, rows[3 * kMaxDecodeRows + row]);
    }
    rows[kItems] = parts * pieces * s.rows * kKvHeads;
    rows[kPartsOfRows] = parts;
  }
}

// For up to 4 kSets rows; kAlone: for one.
template <int kSets, bool kAlone = false>
__global__ void __launch_bounds__(kThreads, 1) decode_step_kernel(const __grid_constant__ DecodeStep step) {
  unsigned char* smem = shared_memory();
  using W = Worker<kSets, kAlone>;
  W w{step, smem, reinterpret_cast<Word*>(step.workspace)};
  w.thread = threadIdx.x;
  w.warp = threadIdx.x / 32;
  w.lane = threadIdx.x % 32;
  w.waits = (step.flags & kSkipWaiting) == 0;
  w.streams = (step.flags & kSkipStreaming) == 0;
  w.base = shared_address(smem);
  w.full = w.base + W::At::kBarriersAt;
  w.empty = w.full + 64 * 8;
  constexpr int kMarks = kLayerMarks * kLayers + kEndMarks;
  if (kTrace && step.trace != nullptr && w.thread == 0) w.trace = step.trace + blockIdx.x * kMarks;
  if (kTrace && w.trace != nullptr) *w.trace++ = nanoseconds();
  w.mark();
  const unsigned step_number = *reinterpret_cast<volatile unsigned*>(step.workspace);
  prepare(w);
  __syncthreads();
  const LayerWeights* table = w.template shared<LayerWeights>(W::At::kTableAt);
  if (w.warp == kWarps) {
    if (w.streams) stream_step(w, table);
    drain_copies(w);
  } else {
    // A step has layers + 2 flags: of the embedding, of each layer, of the LM head. 0 is never a flag; the host resets
    // the workspace before the 32-bit count overflows.
    consume<W, kSets>(w, table, step_number * (kLayers + 2) + 1);
  }
  if (__syncthreads_and(w.waits) && w.warp < kWarps) choose_tokens(w);
  w.mark();
  if (kTrace && w.trace != nullptr) *w.trace++ = nanoseconds();
  if (blockIdx.x != 0) return;
  __syncthreads();
  if (w.thread == 0) close_step(w, step_number);
}

}  // namespace six_engines
