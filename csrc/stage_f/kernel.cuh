// A persistent megakernel, one launch per decode step: embedding, every layer, LM head, tokens.
//
// Why: at one row a step is 988 MB of weights (Qwen2.5-0.5B) and next to no arithmetic, 0.23 ms at the memory's speed.
// As ordinary kernels, even in a CUDA graph, every layer is a handful of launches that each start with an empty pipe
// and end with a drained one. Here one block a multiprocessor stays for the whole step and does two things that
// separate kernels cannot:
//   * weights never stop flowing: they do not depend on activations, so one warp streams them through a ring of
//     about 200 KB a multiprocessor (26 MB together, almost a layer) however long the others wait (stream.cuh);
//   * no barrier over the grid: every value that crosses multiprocessors is handed off through L2 in an 8-byte word
//     beside a flag (step and layer), and its reader polls the word until the flag is right (primitives.cuh).
//
// One layer is six hand-offs: hidden -> QKV -> attention splits -> merged heads -> hidden -> MLP activation -> hidden.
//
// What it costs is neither arithmetic nor, so far, bandwidth (without streaming at all it is a sixth faster), but the
// length of one warp's path through a layer: instructions that wait for each other, spilled registers that come back
// from L2, and six hand-offs, each a store to L2 and a load from there. Hence products of few instructions
// (gemv.cuh), few warps with many registers (plan.cuh), and one loop over the matrices.
//
// Why a reader never finds a word that is already overwritten: handed-off vectors alternate between two copies, by
// layer parity, and before a block writes layer l + 2 into a copy it has read the MLP activation of layer l + 1, of
// which every block owns a part and publishes it only after it has read everything of layer l. (The splits have one
// copy: the next layer's queries exist only after every merge of this layer.)
//
// Launch: cooperative, because blocks wait for each other and must all be resident. One block fills a multiprocessor's
// shared memory, the grid is at most the number of multiprocessors, and a cooperative launch can be captured in a
// graph.
#pragma once

#include "stage_f/attention.cuh"
#include "stage_f/product.cuh"
#include "stage_f/stream.cuh"

namespace six_engines {

template <typename T, int D>
__device__ __forceinline__ void consume(Worker& w, const LayerWeights* table, unsigned step_number) {
  const DecodeStep& s = w.step;
  const DecodePlan& plan = w.plan;
  const Slice* slices = w.shared<Slice>(plan.slices_at);
  const AttentionItem item = attention_item<D>(w, blockIdx.x + gridDim.x * w.warp);
  prefetch_item<T, D>(w, item, 0);
  if (w.lane == 0) w.shared<AttentionItem>(plan.items_at)[w.warp] = item;
  __syncwarp();

  const int marks = kLayerMarks * s.layers + kEndMarks;
  long long* trace = s.trace == nullptr || w.thread != 0 ? nullptr : s.trace + blockIdx.x * marks;
  const auto mark = [&] {
    if (trace != nullptr) *trace++ = clock64();
  };
#pragma unroll 1
  for (int layer = 0; layer <= s.layers; ++layer) {
    const bool head = layer == s.layers;
    const LayerWeights& weights = table[layer];
#pragma unroll 1
    for (int kind = head ? kHead : kQkv; kind <= (head ? kHead : kDown); ++kind) {
      w.place = layer * 16 + kind;
      mark();
      if (kind == kOut) {
        attention_phase<T, D>(w, layer, weights);
        mark();
      }
      if (kind == kOut || kind == kDown) {
        const bool attended = kind == kOut;
        // (A block without rows of `down` must not wait here: nothing would keep the others from overtaking it.)
        if (attended || slices[kDown].count > 0)
          receive_pairs(w, attended ? plan.attention_at : plan.vector_at[kGateUp],
                       attended ? plan.attention_length : plan.vector_length[kGateUp],
                       attended ? plan.attention_rows : plan.act_rows);
      } else {
        float bias = 0.0f;
        if (kind == kQkv && weights.qkv_bias != nullptr && w.thread < slices[kQkv].count)
          bias = to_float(static_cast<const T*>(weights.qkv_bias)[slices[kQkv].first + w.thread]);
        const bool second = kind == kGateUp;  // of the layer's two; the first follows the last layer's kDown
        receive_hidden<T>(w, layer == 0 && !second, second ? kOut : kDown, step_number * s.layers + layer + second,
                         (layer & 1) ^ (second ? 0 : 1),
                         second ? weights.post_norm : head ? s.final_norm : weights.input_norm);
        if (kind == kQkv && w.thread < slices[kQkv].count) w.shared<float>(plan.bias_at)[w.thread] = bias;
        w.flag = step_number * s.layers + layer + 1;
        w.parity = layer & 1;
      }
      mark();
      if (head) {
        workers_sync();  // the sums of squares, see receive_hidden
        head_product<T>(w);
      } else {
        product<T>(w, kind);
      }
    }
  }
  mark();
}

// The block's slice of a matrix.
__device__ __forceinline__ void own_slice(const Worker& w, int kind) {
  const MatrixPlan& m = w.plan.matrix[kind];
  const long long dealt = m.rows / m.granule;
  Slice slice;
  slice.first = static_cast<int>(dealt * blockIdx.x / gridDim.x) * m.granule;
  slice.count = static_cast<int>(dealt * (blockIdx.x + 1) / gridDim.x) * m.granule - slice.first;
  slice.slots = ceil_div(slice.count, m.tile_rows) * m.chunks * (kind == kGateUp ? 2 : 1);
  slice.units = slice.slots * m.parts;
  w.shared<Slice>(w.plan.slices_at)[kind] = slice;
}

// The block's units of the layer matrices, so that no warp has to divide in the middle of a layer.
__device__ __forceinline__ void list_units(const Worker& w) {
#pragma unroll 1
  for (int kind = kQkv; kind < kHead; ++kind) {
    const MatrixPlan& m = w.plan.matrix[kind];
    const Slice slice = w.shared<Slice>(w.plan.slices_at)[kind];
#pragma unroll 1
    for (int i = w.thread; i < slice.units; i += kThreads) {
      const int part = i % m.parts, slot = i / m.parts, chunk = slot % m.chunks;
      const int tile = slot / m.chunks / (kind == kGateUp ? 2 : 1);
      const int columns = min(m.chunk_steps, m.steps - chunk * m.chunk_steps);
      Unit unit{};
      unit.slot = slot;
      unit.rows = min(m.tile_rows, slice.count - tile * m.tile_rows);
      unit.first = min(part * m.part_steps, columns);  // the last chunk may be too short for every part
      unit.steps = min(m.part_steps, columns - unit.first);
      unit.act_step = chunk * m.chunk_steps + unit.first;
      unit.arrivals = kSlotArrivals / m.parts + (part == 0 ? kSlotArrivals % m.parts : 0);
      w.shared<Unit>(w.plan.units_at)[m.units_at + i] = unit;
    }
  }
}

// What every thread of the block needs before the first layer.
template <typename T, int D>
__device__ __forceinline__ void prepare(Worker& w) {
  const DecodeStep& s = w.step;
  const DecodePlan& plan = w.plan;
  int* rows = w.shared<int>(plan.rows_at);
  if (w.thread == 0) {
    for (int slot = 0; slot < plan.slots; ++slot) {
      barrier_init(w.full + slot * 8, 1);
      barrier_init(w.empty + slot * 8, kSlotArrivals);
    }
    barrier_init_fence();
  }
  if (w.thread < kKinds) own_slice(w, w.thread);
  auto* table = w.shared<unsigned long long>(plan.table_at);
  for (int i = w.thread; i < s.layers * kLayerPointers; i += kThreads)
    table[i] = reinterpret_cast<const unsigned long long*>(s.layer_table)[i];
  if (w.thread < s.rows) {
    const int context = s.slot_mapping[w.thread] < 0 ? 0 : s.context_lens[w.thread];
    const int chunks = cached_chunks(context), per_split = max(1, ceil_div(chunks, kMaxDecodeSplits - 1));
    rows[w.thread] = context;
    rows[kMaxDecodeRows + w.thread] = per_split;
    rows[2 * kMaxDecodeRows + w.thread] = context == 0 ? 0 : ceil_div(chunks, per_split) + 1;
    token_table(w)[w.thread] = static_cast<int>(s.last_tokens[s.batch_slots[w.thread]]);
  }
  float* rope = w.shared<float>(plan.rope_at);
  for (int i = w.thread; i < s.rows * (D / 2); i += kThreads) {
    const int row = i / (D / 2), column = i % (D / 2);
    const long long at = s.positions[row] * (D / 2) + column;
    rope[row * D + column] = s.cos[at];
    rope[row * D + D / 2 + column] = s.sin[at];
  }
  __syncthreads();
  if (w.thread == 0) {
    int most = 0;
    for (int row = 0; row < s.rows; ++row) most = max(most, rows[2 * kMaxDecodeRows + row]);
    rows[3 * kMaxDecodeRows] = most * s.rows * s.kv_heads;  // attention items
  }
  float* own = w.shared<float>(plan.own_at);
  list_units(w);
  const Slice hidden = w.shared<Slice>(plan.slices_at)[kOut];  // kDown is divided in the same way
  for (int i = w.thread; i < s.rows * hidden.count; i += kThreads) {
    const long long token = token_table(w)[i % s.rows];
    own[i / s.rows * kMaxDecodeRows + i % s.rows] =
        to_float(static_cast<const T*>(s.embedding)[token * s.hidden + hidden.first + i / s.rows]);
  }
}

template <typename T, int D>
__global__ void __launch_bounds__(kThreads, 1)
    decode_step_kernel(const __grid_constant__ DecodeStep step, const __grid_constant__ DecodePlan plan) {
  extern __shared__ __align__(128) unsigned char smem[];
  Worker w{step, plan, smem, reinterpret_cast<Word*>(step.workspace)};
  w.thread = threadIdx.x;
  w.warp = threadIdx.x / 32;
  w.lane = threadIdx.x % 32;
  w.waits = (step.flags & kSkipWaiting) == 0;
  w.streams = (step.flags & kSkipStreaming) == 0;
  w.ring = shared_address(smem);
  w.full = w.ring + plan.barriers_at;
  w.empty = w.full + 64 * 8;
  const unsigned step_number = *reinterpret_cast<volatile unsigned*>(step.workspace);
  prepare<T, D>(w);
  __syncthreads();
  const LayerWeights* table = w.shared<LayerWeights>(plan.table_at);
  if (w.warp == kWarps) {
    if (w.streams) stream_step(w, table);
    drain_copies(w);
  } else {
    consume<T, D>(w, table, step_number);
  }
  if (__syncthreads_and(w.waits) && w.warp < kWarps) choose_tokens(w);
  if (blockIdx.x != 0) return;
  __syncthreads();
  if (w.thread == 0) close_step(w, step_number);
}

// The instantiation for a head size.
template <typename T>
const void* decode_kernel(int head_dim) {
  return head_dim == 64 ? reinterpret_cast<const void*>(decode_step_kernel<T, 64>)
                        : reinterpret_cast<const void*>(decode_step_kernel<T, 128>);
}

}  // namespace six_engines
