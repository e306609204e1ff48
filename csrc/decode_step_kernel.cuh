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

// Pairs of 16-bit values, one pair a word. A thread asks for kBatch units at a time: what it has not, it need not test.
template <int kBatch>
__device__ __forceinline__ void gather_pairs(Worker& w, unsigned at, unsigned length, unsigned rows_of_units) {
  const int row_units = length / 2, units = row_units * w.step.rows;
  const Word* words = exchanged(w, at, length, w.parity, blockIdx.x % w.step.replicas, 0);
  const uint32_t act = shared_address(w.smem) + w.plan.act_at;
  const int stride = slot_stride(length * 2 / kStepColumns);
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
      const int unit = base + i * kWorkers, row = __umulhi(unit, rows_of_units);
      if (unit >= units) continue;
      const uint32_t at = act + row * stride + act_offset((unit - row * row_units) * 2);
      store_shared(at, payload(raw[i][0]));
      store_shared(at + 8, payload(raw[i][1]));
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
  constexpr int kBatch = 3;
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
      rows[i] = __umulhi(unit, w.plan.unit_rows);
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
      store_shared(act + rows[i] * stride + act_offset(columns[i]), pack_pair<T>(x[i].x * g.x * kPrescale<T>, x[i].y * g.y * kPrescale<T>));
    }
  }
  workers_sync();
  if (base > w.warp) add_up(base - kBatch * kWarps);
}

template <typename T>
__device__ __forceinline__ float norm_scale(const Worker& w, int request) {
  const int row_units = ceil_div(w.step.hidden, 64);
  const float* sums = w.shared<float>(w.plan.sums_at) + min(request, w.step.rows - 1) * row_units;
  float squares = 0.0f;
#pragma unroll 8
  for (int i = 0; i < row_units; ++i) squares += sums[i];
  return rsqrtf(squares / w.step.hidden + w.step.eps) * (1.0f / kPrescale<T>);
}

// ---- products, and handing the results on ------------------------------------------------------------------------------

// Larger logits first, then lower ids, as one integer.
__device__ __forceinline__ unsigned long long ranked(float logit, int id) {
  const unsigned bits = __float_as_uint(logit);
  const unsigned ordered = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return static_cast<unsigned long long>(ordered) << 32 | (0xffffffffu - static_cast<unsigned>(id));
}
__device__ __forceinline__ unsigned long long best_of(unsigned long long best, int apart) {  // over lanes `apart` apart
#pragma unroll 1
  for (int offset = 16; offset >= apart; offset >>= 1) best = max(best, __shfl_xor_sync(kAllLanes, best, offset));
  return best;
}

// This block's slice of one layer matrix times the activations in shared memory, and what becomes of each output: QKV
// (plus bias) and the MLP's activation leave as pairs of 16-bit values; the hidden state, of which the owner keeps the
// float32 values, grows and leaves as float32. A warp sums and emits whole tiles, lane (g, q) row g of request q.
template <typename T>
__device__ __forceinline__ void product(Worker& w, int kind) {
  const DecodeStep& s = w.step;
  const DecodePlan& plan = w.plan;
  const MatrixPlan m = plan.matrix[kind];
  const Slice slice = w.shared<Slice>(plan.slices_at)[kind];
  const int g = w.lane >> 2, q = w.lane & 3, halves = kind == kGateUp ? 2 : 1;
  multiply_units<T>(w, m, slice);
  workers_sync();
#pragma unroll 1
  for (int tile = w.warp; tile * m.tile_rows < slice.count; tile += kWarps) {
#pragma unroll 1
    for (int set = 0; set < plan.sets; ++set) {
      const int request = set * 4 + q, row = tile * m.tile_rows + g;
      const bool valid = g < m.tile_rows && row < slice.count && request < s.rows;
      const float scale = kind == kQkv || kind == kGateUp ? norm_scale<T>(w, request) : 1.0f;
      float value = sum_units(w, m, tile * halves, set) * scale;
      if (kind == kGateUp) value = silu(value) * (sum_units(w, m, tile * halves + 1, set) * scale);
      if (kind == kQkv && valid) value += w.shared<float>(plan.bias_at)[row];
      uint32_t bits = __float_as_uint(value);
      bool sends = valid;
      int index = slice.first + row;
      if (kind == kOut || kind == kDown) {
        float* own = w.shared<float>(plan.own_at) + row * kMaxDecodeRows + request;
        if (valid) *own = value = value + *own;
        bits = __float_as_uint(value);
      } else {
        bits = pack_pair<T>(value, __shfl_down_sync(kAllLanes, value, 4));  // with the next row
        index /= 2;
        sends = valid && (g & 1) == 0;
      }
      Word* target = exchanged(w, plan.vector_at[kind], plan.vector_length[kind], w.parity, 0, request) + index;
      const int copies = kind == kQkv ? 1 : s.replicas;
      for (int copy = 0; copy < copies; ++copy, target += 2 * kMaxDecodeRows * plan.vector_length[kind])
        if (sends) publish(target, tagged(bits, w.tag));
    }
  }
}

// The LM head: so many tiles that a warp takes whole ones. Logits go to memory; `best` keeps the lane's largest.
template <typename T>
__device__ __forceinline__ void head_product(Worker& w, unsigned long long (&best)[2]) {
  const DecodeStep& s = w.step;
  const MatrixPlan m = w.plan.matrix[kHead];
  const Slice slice = w.shared<Slice>(w.plan.slices_at)[kHead];
  const int g = w.lane >> 2, q = w.lane & 3, slots = w.plan.slots;
  const float scale[2] = {norm_scale<T>(w, q), norm_scale<T>(w, q + 4)};
  const int window = min(kWarps, slots / m.chunks);  // tiles at a time, see multiply_units
#pragma unroll 1
  for (int base = 0; base < slice.count; base += window * m.tile_rows, w.at.advance(window * m.chunks, slots)) {
    if (base > 0) workers_sync();
    const int row = base + w.warp * m.tile_rows, rows = min(m.tile_rows, slice.count - row);
    if (w.warp >= window || rows <= 0) continue;
    float out[2] = {};
    RingPosition at = w.at;
    at.advance(w.warp * m.chunks, slots);
#pragma unroll 1
    for (int chunk = 0; chunk < m.chunks; ++chunk, at.advance(1, slots))
      multiply_slot<T>(w, m, at, rows, 0, min(m.chunk_steps, m.steps - chunk * m.chunk_steps), chunk * m.chunk_steps,
                       kSlotArrivals, out);
#pragma unroll
    for (int set = 0; set < 2; ++set) {
      const int request = set * 4 + q, id = slice.first + row + g;
      if (g >= rows || request >= s.rows) continue;
      const float logit = out[set] * scale[set];
      s.logits[static_cast<long long>(request) * s.vocab + id] = logit;
      best[set] = max(best[set], ranked(logit, id));
    }
  }
}

// The last block to arrive picks each row's argmax from the blocks' candidates and closes the step.
__device__ __forceinline__ void finish_step(Worker& w, unsigned step_number, const unsigned long long (&bests)[2]) {
  const DecodeStep& s = w.step;
  unsigned long long* shared = w.shared<unsigned long long>(w.plan.best_at);  // [warps][rows]
  volatile unsigned long long* candidates = w.words + w.plan.candidates_at;
  int* last = reinterpret_cast<int*>(shared + kWarps * kMaxDecodeRows);
#pragma unroll 1
  for (int set = 0; set < 2; ++set) {
    const unsigned long long best = best_of(bests[set], 4);  // lanes of one request are 4 apart
    if (w.lane < 4) shared[w.warp * kMaxDecodeRows + set * 4 + w.lane] = best;
  }
  workers_sync();
  if (w.thread < s.rows) {
    unsigned long long best = 0;
    for (int warp = 0; warp < kWarps; ++warp) best = max(best, shared[warp * kMaxDecodeRows + w.thread]);
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
  for (int row = w.warp; row < s.rows; row += kWarps) {
    unsigned long long best = 0;
    for (int block = w.lane; block < gridDim.x; block += 32) best = max(best, candidates[block * kMaxDecodeRows + row]);
    best = best_of(best, 1);
    if (w.lane == 0) s.greedy[row] = 0xffffffffu - static_cast<unsigned>(best);
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
  const Slice* slices = w.shared<Slice>(plan.slices_at);
  const AttentionItem item = attention_item<D>(w, blockIdx.x + gridDim.x * w.warp);
  prefetch_item<T, D>(w, item, 0);
  if (w.lane == 0) w.shared<AttentionItem>(plan.items_at)[w.warp] = item;
  __syncwarp();

  unsigned long long best[2] = {};
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
      if (kind == kOut) {
        attention_phase<T, D>(w, layer, weights);
        mark();
      }
      if (kind == kOut || kind == kDown) {
        const bool attended = kind == kOut;
        // (A block without rows of `down` must not wait here: nothing would keep the others from overtaking it.)
        if (attended)
          gather_pairs<2>(w, plan.attention_at, plan.attention_length, plan.attention_rows);
        else if (slices[kDown].count > 0)
          gather_pairs<ceil_div(1280, kWorkers)>(w, plan.vector_at[kGateUp], plan.vector_length[kGateUp], plan.act_rows);
      } else {
        float bias = 0.0f;
        if (kind == kQkv && weights.qkv_bias != nullptr && w.thread < slices[kQkv].count)
          bias = to_float(static_cast<const T*>(weights.qkv_bias)[slices[kQkv].first + w.thread]);
        const bool second = kind == kGateUp;  // of the layer's two; the first follows the last layer's kDown
        gather_hidden<T>(w, layer == 0 && !second, second ? kOut : kDown, step_number * s.layers + layer + second,
                         (layer & 1) ^ (second ? 0 : 1), second ? weights.post_norm : head ? s.final_norm : weights.input_norm);
        if (kind == kQkv && w.thread < slices[kQkv].count) w.shared<float>(plan.bias_at)[w.thread] = bias;
        w.tag = step_number * s.layers + layer + 1;
        w.parity = layer & 1;
      }
      mark();
      if (head) {
        workers_sync();  // the sums of squares, see gather_hidden
        head_product<T>(w, best);
      } else {
        product<T>(w, kind);
      }
    }
  }
  finish_step(w, step_number, best);
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
      const int tile = slot / m.chunks / (kind == kGateUp ? 2 : 1), columns = min(m.chunk_steps, m.steps - chunk * m.chunk_steps);
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
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  if (w.thread < kKinds) own_slice(w, w.thread);
  auto* table = w.shared<unsigned long long>(plan.table_at);
  for (int i = w.thread; i < s.layers * kLayerPointers; i += kThreads)
    table[i] = reinterpret_cast<const unsigned long long*>(s.layer_table)[i];
  if (w.thread < s.rows) {
    const int context = s.slot_mapping[w.thread] < 0 ? 0 : s.context_lens[w.thread];
    const int chunks = cached_chunks(context), per_split = max(1, ceil_div(chunks, s.max_splits - 1));
    rows[w.thread] = context;
    rows[kMaxDecodeRows + w.thread] = per_split;
    rows[2 * kMaxDecodeRows + w.thread] = context == 0 ? 0 : ceil_div(chunks, per_split) + 1;
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
  list_units(w);
  const Slice hidden = w.shared<Slice>(plan.slices_at)[kOut];  // kDown is divided in the same way
  for (int i = w.thread; i < s.rows * hidden.count; i += kThreads)
    own[i / s.rows * kMaxDecodeRows + i % s.rows] =
        to_float(static_cast<const T*>(s.embedding)[s.token_ids[i % s.rows] * s.hidden + hidden.first + i / s.rows]);
}

template <typename T, int D>
__global__ void __launch_bounds__(kThreads, 1)
    decode_step_kernel(const __grid_constant__ DecodeStep step, const __grid_constant__ DecodePlan plan) {
  extern __shared__ __align__(128) unsigned char smem[];
  Worker w{step, plan, smem, reinterpret_cast<Word*>(step.workspace)};
  w.thread = threadIdx.x;
  w.warp = threadIdx.x / 32;
  w.lane = threadIdx.x % 32;
  w.waits = (step.flags & kSkipExchange) == 0;
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
