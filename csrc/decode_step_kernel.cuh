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
__device__ __forceinline__ void gather_pairs(Worker& w, long long at, int columns) {
  constexpr int kBatch = 1024 / kWorkers;
  const int row_units = columns / 4, units = row_units * w.step->rows, replica = blockIdx.x % w.plan->replicas;
  const Word* words = vector_copy(w, at, columns / 2, w.parity, replica, 0);
  unsigned char* act = w.smem + w.plan->act_at;
  const int stride = slot_stride(columns / kStepColumns);
  for (int base = w.thread - w.lane; base < units; base += kBatch * kWorkers) {
    Word raw[kBatch][2] = {};
    Patience patience;
    for (;;) {
      bool ready = true;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = base + i * kWorkers + w.lane;
        if (unit >= units) continue;
        peek2(words + unit * 2, raw[i]);
        ready = ready && has_tag(raw[i][0], w.tag) && has_tag(raw[i][1], w.tag);
      }
      if (__all_sync(kAllLanes, ready || w.skips(kSkipExchange))) break;
      if (__any_sync(kAllLanes, patience.exhausted(w))) break;
      if (w.step->backoff_ns > 0) __nanosleep(w.step->backoff_ns);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int unit = base + i * kWorkers + w.lane;
      if (unit < units)
        *reinterpret_cast<uint2*>(act + unit / row_units * stride + unit % row_units * 8) =
          make_uint2(payload(raw[i][0]), payload(raw[i][1]));
    }
  }
  workers_sync();
}

// The hidden state in float32, one value a word (or, for the first layer, embedding rows), through RMSNorm.
// Warps are divided among the rows; kLaneUnits is the most pairs of values a lane can hold.
template <typename T, int kLaneUnits>
__device__ __forceinline__ void gather_normed(Worker& w, bool embedded, long long at, uint32_t tag, int parity, const void* norm) {
  const DecodeStep& s = *w.step;
  const int row_warps = kWarps / w.plan->padded_rows, row = w.warp / row_warps, part = w.warp % row_warps;
  const int pairs = row < s.rows ? s.hidden / 2 : 0;
  const auto pair_of = [&](int i) { return (i * row_warps + part) * 32 + w.lane; };
  uint32_t weight[kLaneUnits];
  float2 x[kLaneUnits] = {};
#pragma unroll
  for (int i = 0; i < kLaneUnits; ++i)
    if (pair_of(i) < pairs) weight[i] = __ldg(static_cast<const uint32_t*>(norm) + pair_of(i));
  if (embedded) {
    const auto* source = static_cast<const uint32_t*>(s.embedding) + (pairs > 0 ? s.token_ids[row] * (s.hidden / 2) : 0);
#pragma unroll
    for (int i = 0; i < kLaneUnits; ++i)
      if (pair_of(i) < pairs) x[i] = unpack_pair<T>(__ldg(source + pair_of(i)));
  } else {
    const Word* words = vector_copy(w, at, s.hidden, parity, blockIdx.x % w.plan->replicas, row);
    constexpr int kBatch = kLaneUnits < 8 ? kLaneUnits : 8;
#pragma unroll
    for (int from = 0; from < kLaneUnits; from += kBatch) {
      if (pair_of(from) - w.lane >= pairs) continue;
      Patience patience;
      for (;;) {
        bool ready = true;
#pragma unroll
        for (int i = from; i < from + kBatch; ++i) {
          if (pair_of(i) >= pairs) continue;
          Word raw[2];
          peek2(words + pair_of(i) * 2, raw);
          ready = ready && has_tag(raw[0], tag) && has_tag(raw[1], tag);
          x[i] = make_float2(__uint_as_float(payload(raw[0])), __uint_as_float(payload(raw[1])));
        }
        if (__all_sync(kAllLanes, ready || w.skips(kSkipExchange))) break;
        if (__any_sync(kAllLanes, patience.exhausted(w))) break;
        if (s.backoff_ns > 0) __nanosleep(s.backoff_ns);
      }
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneUnits; ++i) squares += x[i].x * x[i].x + x[i].y * x[i].y;
  float* sums = w.shared<float>(w.plan->sums_at);
  squares = warp_sum(squares);
  if (w.lane == 0) sums[w.warp] = squares;
  workers_sync();
  squares = 0.0f;
  for (int i = 0; i < row_warps; ++i) squares += sums[row * row_warps + i];
  const float scale = rsqrtf(squares / s.hidden + s.eps);
  unsigned char* act = w.smem + w.plan->act_at + row * slot_stride(s.hidden / kStepColumns);
#pragma unroll
  for (int i = 0; i < kLaneUnits; ++i) {
    if (pair_of(i) >= pairs) continue;
    const float2 scaled = unpack_pair<T>(pack_pair<T>(x[i].x * scale, x[i].y * scale));  // rounded as the layer-wise models do
    const float2 gain = unpack_pair<T>(weight[i]);
    *reinterpret_cast<uint32_t*>(act + pair_of(i) * 4) = pack_pair<T>(scaled.x * gain.x, scaled.y * gain.y);
  }
  workers_sync();
}

// ---- handing results on ------------------------------------------------------------------------------------------------

// Two neighbouring rows as one word of 16-bit values; called by whole warps (see gemv).
template <typename T>
__device__ __forceinline__ void emit_pair(Worker& w, long long at, int length, int replicas, int row, int request, bool valid,
                      float value, int share) {
  const float next = __shfl_down_sync(kAllLanes, value, 4);
  if (!valid || (w.lane & 4)) return;
  for (int replica = share; replica < replicas; replica += 4)
    publish(vector_copy(w, at, length, w.parity, replica, request) + row / 2, tagged(pack_pair<T>(value, next), w.tag));
}

// Adds to the hidden state, whose float32 values the owner keeps, and publishes the sum.
__device__ __forceinline__ void emit_residual(Worker& w, long long at, int first, int row, int request, bool valid, float value,
                        int share) {
  float* own = w.shared<float>(w.plan->own_at) + row * kMaxDecodeRows + request;
  if (valid) value += *own;
  __syncwarp();
  if (!valid) return;
  if (share == 0) *own = value;
  for (int replica = share; replica < w.plan->replicas; replica += 4)
    publish(vector_copy(w, at, w.step->hidden, w.parity, replica, request) + first + row, tagged(__float_as_uint(value), w.tag));
}

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

// The last block to arrive picks each row's argmax from the blocks' candidates and closes the step.
__device__ __forceinline__ void finish_step(Worker& w, unsigned step_number, unsigned long long best) {
  const DecodeStep& s = *w.step;
  unsigned long long* bests = w.shared<unsigned long long>(w.plan->best_at);
  volatile unsigned long long* candidates = w.words + w.plan->candidates;
  int* last = reinterpret_cast<int*>(bests + kWarps);
  best = warp_best(best);
  if (w.lane == 0) bests[w.warp] = best;
  workers_sync();
  if (w.thread < s.rows) {
    best = 0;
    for (int warp = w.thread; warp < kWarps; warp += w.plan->padded_rows) best = max(best, bests[warp]);  // see gemv
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

template <typename T, int D, int kLaneUnits>
__device__ __forceinline__ void consume(Worker& w, const LayerWeights* table, unsigned step_number) {
  const DecodeStep& s = *w.step;
  const DecodePlan& plan = *w.plan;
  int qkv_first, qkv_count, hidden_first, hidden_count, act_first, act_count, vocab_first, vocab_count;
  own_slice(plan.qkv, qkv_first, qkv_count);
  own_slice(plan.o, hidden_first, hidden_count);  // `down` is divided in the same way
  own_slice(plan.gate_up, act_first, act_count);
  own_slice(plan.lm_head, vocab_first, vocab_count);
  float* bias = w.shared<float>(plan.bias_at);
  const AttentionItem item = attention_item(w, blockIdx.x + gridDim.x * w.warp);
  prefetch_item<T, D>(w, item, 0);
  if (w.lane == 0) w.shared<AttentionItem>(plan.items_at)[w.warp] = item;

  long long* trace = s.trace == nullptr || w.thread != 0 ? nullptr : s.trace + blockIdx.x * s.trace_marks;
  const auto mark = [&] {
    if (trace != nullptr) *trace++ = clock64();
  };
  for (int layer = 0; layer < s.layers; ++layer) {
    const LayerWeights& weights = table[layer];
    w.tag = step_number * s.layers + layer + 1;
    w.parity = layer & 1;
    w.place = layer * 16;
    mark();
    float own_bias = 0.0f;
    if (weights.qkv_bias != nullptr && w.thread < qkv_count)
      own_bias = to_float(static_cast<const T*>(weights.qkv_bias)[qkv_first + w.thread]);
    gather_normed<T, kLaneUnits>(w, layer == 0, plan.down_words, w.tag - 1, w.parity ^ 1, weights.input_norm);
    if (w.thread < qkv_count) bias[w.thread] = own_bias;
    mark();
    gemv<T, false>(w, plan.qkv, qkv_count, [&](int row, int request, bool valid, float value, int share) {
      if (valid) value += bias[row];
      emit_pair<T>(w, plan.qkv_words, plan.qkv.rows / 2, 1, qkv_first + row, request, valid, value, share);
    });
    mark();
    w.place = layer * 16 + 1;
    w.gave_up |= attention_phase<T, D>(w, layer, weights);
    mark();
    w.place = layer * 16 + 2;
    gather_pairs(w, plan.attention_words, s.heads * D);
    mark();
    gemv<T, false>(w, plan.o, hidden_count, [&](int row, int request, bool valid, float value, int share) {
      emit_residual(w, plan.o_words, hidden_first, row, request, valid, value, share);
    });
    mark();
    w.place = layer * 16 + 3;
    gather_normed<T, kLaneUnits>(w, false, plan.o_words, w.tag, w.parity, weights.post_norm);
    mark();
    gemv<T, true>(w, plan.gate_up, act_count, [&](int row, int request, bool valid, float value, int share) {
      emit_pair<T>(w, plan.act_words, s.intermediate / 2, plan.replicas, act_first + row, request, valid, value, share);
    });
    mark();
    w.place = layer * 16 + 4;
    // A block without rows of `down` must not wait here: nothing would keep the others from overtaking it.
    if (hidden_count > 0) gather_pairs(w, plan.act_words, s.intermediate);
    mark();
    gemv<T, false>(w, plan.down, hidden_count, [&](int row, int request, bool valid, float value, int share) {
      emit_residual(w, plan.down_words, hidden_first, row, request, valid, value, share);
    });
  }
  mark();
  w.place = s.layers * 16;
  gather_normed<T, kLaneUnits>(w, false, plan.down_words, w.tag, w.parity, s.final_norm);
  mark();
  unsigned long long best = 0;
  gemv<T, false>(w, plan.lm_head, vocab_count, [&](int row, int request, bool valid, float value, int share) {
    if (!valid) return;
    const int id = vocab_first + row;
    if (share == 0) s.logits[static_cast<long long>(request) * s.vocab + id] = value;
    best = max(best, ranked(value, id));
  });
  finish_step(w, step_number, best);
  mark();
}

// What every thread of the block needs before the first layer.
template <typename T, int D>
__device__ __forceinline__ void prepare(Worker& w) {
  const DecodeStep& s = *w.step;
  const DecodePlan& plan = *w.plan;
  if (w.thread == 0) {
    for (int slot = 0; slot < plan.slots; ++slot) {
      barrier_init(w.full + slot * 8, 1);
      barrier_init(w.empty + slot * 8, kWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  auto* table = w.shared<unsigned long long>(plan.table_at);
  for (int i = w.thread; i < s.layers * kLayerPointers; i += kThreads)
    table[i] = reinterpret_cast<const unsigned long long*>(s.layer_table)[i];
  if (w.thread < s.rows) {
    int* rows = w.shared<int>(plan.sums_at) + kWarps;
    const int context = s.slot_mapping[w.thread] < 0 ? 0 : s.context_lens[w.thread];
    const int chunks = cached_chunks(context), per_split = max(1, ceil_div(chunks, plan.max_splits));
    rows[w.thread] = context;
    rows[kMaxDecodeRows + w.thread] = per_split;
    rows[2 * kMaxDecodeRows + w.thread] = ceil_div(chunks, per_split);
  }
  __syncthreads();
  if (w.thread == 0) {
    int* rows = w.shared<int>(plan.sums_at) + kWarps;
    int most = 0;
    for (int row = 0; row < s.rows; ++row) most = max(most, rows[2 * kMaxDecodeRows + row]);
    rows[3 * kMaxDecodeRows] = most * s.rows * s.kv_heads;  // attention items
  }
  float* rope = w.shared<float>(plan.rope_at);
  for (int i = w.thread; i < s.rows * (D / 2); i += kThreads) {
    const int row = i / (D / 2), column = i % (D / 2);
    const long long at = s.positions[row] * s.rope_stride + column;
    rope[row * D + column] = s.cos[at];
    rope[row * D + D / 2 + column] = s.sin[at];
  }
  int first, count;
  own_slice(plan.o, first, count);
  float* own = w.shared<float>(plan.own_at);
  for (int i = w.thread; i < s.rows * count; i += kThreads)
    own[i / s.rows * kMaxDecodeRows + i % s.rows] =
      to_float(static_cast<const T*>(s.embedding)[s.token_ids[i % s.rows] * s.hidden + first + i / s.rows]);
}

template <typename T, int D, int kLaneUnits>
__global__ void __launch_bounds__(kThreads, 1)
  decode_step_kernel(const __grid_constant__ DecodeStep step, const __grid_constant__ DecodePlan plan) {
  extern __shared__ __align__(128) unsigned char smem[];
  Worker w{};
  w.step = &step;
  w.plan = &plan;
  w.smem = smem;
  w.words = reinterpret_cast<Word*>(step.workspace);
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
    if (!w.skips(kSkipStreaming)) stream_step<T>(w, table);
  } else {
    consume<T, D, kLaneUnits>(w, table, step_number);
  }
}

// The instantiation for a head size; a launch of one row holds less of a row in each lane.
template <typename T>
const void* decode_kernel(int head_dim, bool one_row) {
  if (head_dim == 64)
    return one_row ? reinterpret_cast<const void*>(decode_step_kernel<T, 64, kUnitsOneRow>)
                   : reinterpret_cast<const void*>(decode_step_kernel<T, 64, kUnits>);
  return one_row ? reinterpret_cast<const void*>(decode_step_kernel<T, 128, kUnitsOneRow>)
                 : reinterpret_cast<const void*>(decode_step_kernel<T, 128, kUnits>);
}

}  // namespace six_engines
