// A whole decode step in one launch: embedding, every layer, LM head, argmax.
//
// Why: at one row a step is 988 MB of weights (Qwen2.5-0.5B) and next to no arithmetic, 0.23 ms at the memory's speed.
// As ordinary kernels, even in a CUDA graph, every layer is a handful of launches that each start with an empty pipe
// and end with a drained one. Here one block a multiprocessor stays for the whole step and does two things that
// separate kernels cannot:
//   * weights never stop flowing: they do not depend on activations, so one warp streams them through a ring of
//     about 200 KB a multiprocessor (26 MB together, almost a layer) however long the others wait (decode_gemv.cuh);
//   * no barrier over the grid: every value that crosses multiprocessors travels in an 8-byte word beside a tag
//     (step and layer), and whoever needs it reads until the tag is right (decode_primitives.cuh).
//
// One layer is six exchanges: hidden -> QKV -> attention splits -> merged heads -> hidden -> MLP activation -> hidden.
//
// The phases share their code (one loop over the matrices, not five copies): a kernel that does not fit the instruction
// cache, 128 KB, reads its own instructions from L2 in every layer. The first version had 218 KB and took 703 us a token.
//
// Why a reader never finds a word that is already overwritten: exchanged vectors alternate between two copies, by layer
// parity, and before a block writes layer l + 2 into a copy it has read the MLP activation of layer l + 1, of which every
// block owns a part and publishes it only after it has read everything of layer l. (The splits have one copy: the next
// layer's queries exist only after every merge of this layer.)
//
// Launch: cooperative, because blocks wait for each other and must all be resident. One block fills a multiprocessor's
// shared memory, the grid is at most the number of multiprocessors, and a cooperative launch can be captured in a graph.
#pragma once

#include "decode_attention.cuh"

namespace six_engines {

// ---- collecting activations into shared memory -----------------------------------------------------------------------

// Pairs of 16-bit values, one pair a word.
__device__ __forceinline__ void gather_pairs(Worker& w, unsigned at, unsigned length) {
  constexpr int kBatch = 4;
  const int row_units = length / 2, units = row_units * w.step.rows;
  const Word* words = exchanged(w, at, length, w.parity, blockIdx.x % w.step.replicas, 0);
  unsigned char* act = w.smem + w.plan.act_at;
  const int padding = slot_stride(length / 16) - length * 4;
#pragma unroll 1
  for (int base = w.thread; base - w.lane < units; base += kBatch * kWorkers) {
    Word raw[kBatch][2] = {};
    wait_words(w, [&] {
      bool ready = true;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = base + i * kWorkers;
        if (unit >= units) continue;
        peek2(words + unit * 2, raw[i]);
        ready = ready && has_tag(raw[i][0], w.tag) && has_tag(raw[i][1], w.tag);
      }
      return ready;
    });
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int unit = base + i * kWorkers, row = w.step.rows == 1 ? 0 : unit / row_units;
      if (unit < units)
        *reinterpret_cast<uint2*>(act + unit * 8 + row * padding) = make_uint2(payload(raw[i][0]), payload(raw[i][1]));
    }
  }
  workers_sync();
}

// RMSNorm divides by a number that needs all of the row, but the product with the weights does not need it: what goes to
// shared memory is x * gain, the squares are added up while the product runs, and `norm_scale` is applied to its result.
// float16 could overflow without the division, so it goes in scaled down.
template <typename T>
constexpr float kPrescale = 1.0f;
template <>
constexpr float kPrescale<__half> = 1.0f / 64;

// The hidden state, one float32 a word (before the first layer: embedding rows). A unit is 64 values of a row, for one
// warp; `sums` receives the squares of each unit, and is complete after the next workers_sync.
template <typename T>
__device__ __forceinline__ void gather_hidden(Worker& w, bool embedded, Kind from, uint32_t tag, int parity, const void* gain) {
  constexpr int kBatch = 4;
  const DecodeStep& s = w.step;
  const int row_units = ceil_div(s.hidden, 64), units = row_units * s.rows, pairs = s.hidden / 2;
  const Word* words = exchanged(w, w.plan.vector_at[from], s.hidden, parity, blockIdx.x % s.replicas, 0);
  float* sums = w.shared<float>(w.plan.sums_at);
  const uint32_t act = shared_address(w.smem) + w.plan.act_at;
  const int stride = slot_stride(s.hidden / kStepColumns);
  float squares[kBatch];
  const auto add_up = [&](int base) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (base + i * kWarps >= units) break;
      const float sum = warp_sum(squares[i]);
      if (w.lane == 0) sums[base + i * kWarps] = sum;
    }
  };
  int base = w.warp;
#pragma unroll 1
  for (; base < units; base += kBatch * kWarps) {
    if (base != w.warp) add_up(base - kBatch * kWarps);
    float2 x[kBatch];
    uint32_t gains[kBatch];
    int rows[kBatch], columns[kBatch];  // columns in pairs
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int unit = base + i * kWarps;
      rows[i] = s.rows == 1 ? 0 : unit / row_units;
      columns[i] = (unit - rows[i] * row_units) * 32 + w.lane;
      x[i] = make_float2(0.0f, 0.0f);
      if (unit >= units || columns[i] >= pairs) columns[i] = -1;
      if (columns[i] >= 0) gains[i] = __ldg(static_cast<const uint32_t*>(gain) + columns[i]);
      if (columns[i] >= 0 && embedded)
        x[i] = unpack_pair<T>(__ldg(static_cast<const uint32_t*>(s.embedding) + s.token_ids[rows[i]] * pairs + columns[i]));
    }
    if (!embedded) {
      wait_words(w, [&] {
        bool ready = true;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (columns[i] < 0) continue;
          Word raw[2];
          peek2(words + rows[i] * s.hidden + columns[i] * 2, raw);
          ready = ready && has_tag(raw[0], tag) && has_tag(raw[1], tag);
          x[i] = make_float2(__uint_as_float(payload(raw[0])), __uint_as_float(payload(raw[1])));
        }
        return ready;
      });
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      squares[i] = x[i].x * x[i].x + x[i].y * x[i].y;
      if (columns[i] < 0) continue;
      const float2 g = unpack_pair<T>(gains[i]);
      store_shared(act + rows[i] * stride + columns[i] * 4, pack_pair<T>(x[i].x * g.x * kPrescale<T>, x[i].y * g.y * kPrescale<T>));
    }
  }
  workers_sync();
  if (base > w.warp) add_up(base - kBatch * kWarps);
}

template <typename T>
__device__ __forceinline__ float norm_scale(const Worker& w, int request, int share) {
  const int row_units = ceil_div(w.step.hidden, 64);
  const float* sums = w.shared<float>(w.plan.sums_at) + request * row_units;
  float squares = 0.0f;
  for (int i = share; i < row_units; i += 4) squares += sums[i];
  squares += __shfl_xor_sync(kAllLanes, squares, 1);
  squares += __shfl_xor_sync(kAllLanes, squares, 2);
  return rsqrtf(squares / w.step.hidden + w.step.eps) * (1.0f / kPrescale<T>);
}

// ---- products, and handing the results on ------------------------------------------------------------------------------

// Larger logits first, then lower ids, as one integer.
__device__ __forceinline__ unsigned long long ranked(float logit, int id) {
  const unsigned bits = __float_as_uint(logit);
  const unsigned ordered = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return static_cast<unsigned long long>(ordered) << 32 | (0xffffffffu - static_cast<unsigned>(id));
}
__device__ __forceinline__ unsigned long long warp_best(unsigned long long best) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) best = max(best, __shfl_xor_sync(kAllLanes, best, offset));
  return best;
}

// This block's slice of one matrix times the activations in shared memory, and what becomes of each output: QKV (plus
// bias) and the MLP's activation leave as pairs of 16-bit values, the hidden state, of which the owner keeps the float32
// values, grows and leaves as float32, logits go to memory. Four lanes (`share`) hold each output and store its copies.
template <typename T>
__device__ __forceinline__ void product(Worker& w, int kind, unsigned long long& best) {
  const DecodeStep& s = w.step;
  const DecodePlan& plan = w.plan;
  const MatrixPlan m = plan.matrix[kind];
  const int first = w.shared<int>(plan.slices_at)[2 * kind], count = w.shared<int>(plan.slices_at)[2 * kind + 1];
  const int halves = kind == kGateUp ? 2 : 1;
  const int tiles = ceil_div(count, m.tile_rows) * halves, tile_floats = plan.padded_rows * kWarps * 16;
  // A warp reduces and emits one request's outputs: number `turn` of those warps that serve `request`.
  const int request = w.warp & (plan.padded_rows - 1), turn = w.warp >> plan.row_bits, turns = kWarps >> plan.row_bits;
  const int share = w.lane & 3, low_row = w.lane >> 2;
  const bool serves = turn < turns && request < s.rows, normed = kind == kQkv || kind == kGateUp || kind == kHead;
  const bool publishes = kind != kHead && share < (kind == kQkv ? 1 : s.replicas);
  Word* target = nullptr;
  if (kind != kHead) target = exchanged(w, plan.vector_at[kind], plan.vector_length[kind], w.parity, share, request);
  float scale = 1.0f;
#pragma unroll 1
  for (int base = 0; base < tiles; base += plan.partial_tiles) {
    const int end = min(base + plan.partial_tiles, tiles);
    multiply_tiles<T>(w, m, base, end, count, halves);
    workers_sync();
    if (serves) {
      if (normed && base == 0) scale = norm_scale<T>(w, request, share);
#pragma unroll 1
      for (int eighth = turn; eighth < (end - base) / halves * 2; eighth += turns) {
        const int tile = eighth >> 1, tile_row = (eighth & 1) * 8 + low_row;
        const int row = (base / halves + tile) * m.tile_rows + tile_row;
        if ((eighth & 1) * 8 >= m.tile_rows) continue;
        const float* sums = w.shared<float>(plan.partial_at) + tile * halves * tile_floats + request * kWarps * 16 + tile_row;
        float value = reduce_partial(sums, share) * scale;
        if (kind == kGateUp) value = silu(value) * (reduce_partial(sums + tile_floats, share) * scale);
        const bool valid = tile_row < m.tile_rows && row < count;
        if (kind == kHead) {
          if (valid && share == 0) s.logits[static_cast<long long>(request) * s.vocab + first + row] = value;
          if (valid) best = max(best, ranked(value, first + row));
        } else if (kind == kOut || kind == kDown) {
          float* own = w.shared<float>(plan.own_at) + row * kMaxDecodeRows + request;
          if (valid) value += *own;
          __syncwarp();
          if (valid && share == 0) *own = value;
          if (valid && publishes) publish(target + first + row, tagged(__float_as_uint(value), w.tag));
        } else {
          if (kind == kQkv && valid) value += w.shared<float>(plan.bias_at)[row];
          const float next = __shfl_down_sync(kAllLanes, value, 4);  // the next row's
          if (valid && publishes && (w.lane & 4) == 0)
            publish(target + (first + row) / 2, tagged(pack_pair<T>(value, next), w.tag));
        }
      }
    }
    if (end < tiles) workers_sync();
  }
}

// The last block to arrive picks each row's argmax from the blocks' candidates and closes the step.
__device__ __forceinline__ void finish_step(Worker& w, unsigned step_number, unsigned long long best) {
  const DecodeStep& s = w.step;
  unsigned long long* bests = w.shared<unsigned long long>(w.plan.best_at);
  volatile unsigned long long* candidates = w.words + w.plan.candidates_at;
  int* last = reinterpret_cast<int*>(bests + kWarps);
  best = warp_best(best);
  if (w.lane == 0) bests[w.warp] = best;
  workers_sync();
  if (w.thread < s.rows) {
    best = 0;
    for (int warp = w.thread; warp < kWarps; warp += w.plan.padded_rows) best = max(best, bests[warp]);  // see product()
    candidates[blockIdx.x * kMaxDecodeRows + w.thread] = best;
    __threadfence();
  }
  workers_sync();
  if (w.thread == 0) {
    *last = atomicAdd(control(w) + 1, 1u) == gridDim.x - 1;
    __threadfence();
  }
  workers_sync();
  if (!*last) return;
  if (w.warp < s.rows) {
    best = 0;
    for (int block = w.lane; block < gridDim.x; block += 32) best = max(best, candidates[block * kMaxDecodeRows + w.warp]);
    best = warp_best(best);
    if (w.lane == 0) s.greedy[w.warp] = 0xffffffffu - static_cast<unsigned>(best);
  }
  if (w.thread == 0) {
    control(w)[1] = 0;
    control(w)[0] = step_number + 1;
  }
}

// ---- the computing warps -----------------------------------------------------------------------------------------------

template <typename T, int D>
__device__ __forceinline__ void consume(Worker& w, const LayerWeights* table, unsigned step_number) {
  const DecodeStep& s = w.step;
  const DecodePlan& plan = w.plan;
  const int* slices = w.shared<int>(plan.slices_at);
  const AttentionItem item = attention_item<D>(w, blockIdx.x + gridDim.x * w.warp);
  prefetch_item<T, D>(w, item, 0);
  if (w.lane == 0) w.shared<AttentionItem>(plan.items_at)[w.warp] = item;
  __syncwarp();

  unsigned long long best = 0;
  long long* trace = s.trace == nullptr || w.thread != 0 ? nullptr : s.trace + blockIdx.x * s.trace_marks;
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
      if (kind == kQkv || kind == kHead) {
        float bias = 0.0f;
        if (!head && weights.qkv_bias != nullptr && w.thread < slices[2 * kQkv + 1])
          bias = to_float(static_cast<const T*>(weights.qkv_bias)[slices[2 * kQkv] + w.thread]);
        gather_hidden<T>(w, layer == 0, kDown, step_number * s.layers + layer, (layer & 1) ^ 1, head ? s.final_norm : weights.input_norm);
        if (!head && w.thread < slices[2 * kQkv + 1]) w.shared<float>(plan.bias_at)[w.thread] = bias;
        w.tag = step_number * s.layers + layer + 1;
        w.parity = layer & 1;
      } else if (kind == kGateUp) {
        gather_hidden<T>(w, false, kOut, w.tag, w.parity, weights.post_norm);
      } else if (kind == kOut) {
        attention_phase<T, D>(w, layer, weights);
        mark();
        gather_pairs(w, plan.attention_at, plan.attention_length);
      } else if (slices[2 * kDown + 1] > 0) {
        // (A block without rows of `down` must not wait here: nothing would keep the others from overtaking it.)
        gather_pairs(w, plan.vector_at[kGateUp], plan.vector_length[kGateUp]);
      }
      mark();
      product<T>(w, kind, best);
    }
  }
  finish_step(w, step_number, best);
  mark();
}

// What every thread of the block needs before the first layer.
template <typename T, int D>
__device__ __forceinline__ void prepare(Worker& w) {
  const DecodeStep& s = w.step;
  const DecodePlan& plan = w.plan;
  int* rows = w.shared<int>(plan.rows_at);
  int* slices = w.shared<int>(plan.slices_at);
  if (w.thread == 0) {
    for (int slot = 0; slot < plan.slots; ++slot) {
      barrier_init(w.full + slot * 8, 1);
      barrier_init(w.empty + slot * 8, kWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  if (w.thread < kKinds) own_slice(plan.matrix[w.thread], slices[2 * w.thread], slices[2 * w.thread + 1]);
  auto* table = w.shared<unsigned long long>(plan.table_at);
  for (int i = w.thread; i < s.layers * kLayerPointers; i += kThreads)
    table[i] = reinterpret_cast<const unsigned long long*>(s.layer_table)[i];
  if (w.thread < s.rows) {
    const int context = s.slot_mapping[w.thread] < 0 ? 0 : s.context_lens[w.thread];
    const int chunks = cached_chunks(context), per_split = max(1, ceil_div(chunks, s.max_splits));
    rows[w.thread] = context;
    rows[kMaxDecodeRows + w.thread] = per_split;
    rows[2 * kMaxDecodeRows + w.thread] = ceil_div(chunks, per_split);
  }
  float* rope = w.shared<float>(plan.rope_at);
  for (int i = w.thread; i < s.rows * (D / 2); i += kThreads) {
    const int row = i / (D / 2), column = i % (D / 2);
    const long long at = s.positions[row] * s.rope_stride + column;
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
  const int first = slices[2 * kOut], count = slices[2 * kOut + 1];  // kDown is divided in the same way
  for (int i = w.thread; i < s.rows * count; i += kThreads)
    own[i / s.rows * kMaxDecodeRows + i % s.rows] =
        to_float(static_cast<const T*>(s.embedding)[s.token_ids[i % s.rows] * s.hidden + first + i / s.rows]);
}

template <typename T, int D>
__global__ void __launch_bounds__(kThreads, 1)
    decode_step_kernel(const __grid_constant__ DecodeStep step, const __grid_constant__ DecodePlan plan) {
  extern __shared__ __align__(128) unsigned char smem[];
  Worker w{step, plan, smem, reinterpret_cast<Word*>(step.workspace)};
  w.thread = threadIdx.x;
  w.warp = threadIdx.x / 32;
  w.lane = threadIdx.x % 32;
  w.ring = shared_address(smem);
  w.full = w.ring + plan.barriers_at;
  w.empty = w.full + 64 * 8;
  const unsigned step_number = *reinterpret_cast<volatile unsigned*>(step.workspace);
  prepare<T, D>(w);
  __syncthreads();
  const LayerWeights* table = w.shared<LayerWeights>(plan.table_at);
  if (w.warp == kWarps) {
    if (!w.skips(kSkipStreaming)) stream_step(w, table);
  } else {
    consume<T, D>(w, table, step_number);
  }
}

// The instantiation for a head size.
template <typename T>
const void* decode_kernel(int head_dim) {
  return head_dim == 64 ? reinterpret_cast<const void*>(decode_step_kernel<T, 64>)
                        : reinterpret_cast<const void*>(decode_step_kernel<T, 128>);
}

}  // namespace six_engines
