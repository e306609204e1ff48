// What attention is made of: which warp attends to what, and the heads as the projection leaves them.
#pragma once

#include "stage_f/gemv.cuh"

namespace six_engines {

struct AttentionItem {
  int exists, fresh, row, kv_head, split, begin, end, context;  // chunks [begin, end) of 16 cached tokens
  long long cell;                                                 // of the first chunk, see chunk_cell
};

// Per row in shared memory: context length (0 for a padding row), chunks a split, splits. The last split is this step's
// own token, which comes straight from the projection.
__device__ __forceinline__ const int* row_table(const Worker& w) { return w.shared<int>(w.plan.rows_at); }

// Elements from the beginning of a layer's keys to this KV head's key of the chunk's first token. (A chunk never
// crosses blocks of the KV cache: a block is a power of two of at least 16 tokens.)
template <int D>
__device__ __forceinline__ long long chunk_cell(const Worker& w, int row, int kv_head, int chunk) {
  const DecodeStep& s = w.step;
  const int token = chunk * kAttentionChunk;
  const long long block = s.block_tables[row * s.max_blocks + (token >> w.plan.block_shift)];
  return (((block << w.plan.block_shift) + (token & (s.block_size - 1))) * s.kv_heads + kv_head) * D;
}

__device__ __forceinline__ int cached_chunks(int context) { return ceil_div(max(context - 1, 0), kAttentionChunk); }

template <int D>
__device__ __forceinline__ AttentionItem attention_item(const Worker& w, int index) {
  const int* rows = row_table(w);
  AttentionItem item{};
  item.kv_head = index % w.step.kv_heads;
  item.row = index / w.step.kv_heads % w.step.rows;
  item.split = index / w.step.kv_heads / w.step.rows;
  item.context = rows[item.row];
  const int per_split = rows[kMaxDecodeRows + item.row], splits = rows[2 * kMaxDecodeRows + item.row];
  item.exists = item.split < splits;
  item.fresh = item.split == splits - 1;
  item.begin = item.split * per_split;
  item.end = min(item.begin + per_split, cached_chunks(item.context));
  if (item.exists && !item.fresh) item.cell = chunk_cell<D>(w, item.row, item.kv_head, item.begin);
  return item;
}

__device__ __forceinline__ long long layer_elements(const DecodeStep& s, int head_dim) {
  return static_cast<long long>(s.blocks) * s.block_size * s.kv_heads * head_dim;
}

// A later layer's keys and values do not depend on this step: fetch them to L2 while there is time.
template <typename T, int D>
__device__ __forceinline__ void prefetch_item(const Worker& w, const AttentionItem& item, int layer) {
  const DecodeStep& s = w.step;
  if (!item.exists || item.fresh || layer >= s.layers) return;
  const T* cache = static_cast<const T*>(s.kv_cache) + layer_elements(s, D) * (layer + (w.lane >= 16 ? s.layers : 0));
  for (int chunk = item.begin; chunk < item.end; ++chunk) {
    const long long cell = chunk == item.begin ? item.cell : chunk_cell<D>(w, item.row, item.kv_head, chunk);
    const T* token = cache + cell + (w.lane & 15) * s.kv_heads * D;
    if (chunk * kAttentionChunk + (w.lane & 15) < item.context - 1) {
      prefetch_l2(token);
      if (D > 64) prefetch_l2(token + 64);
    }
  }
}

// A head as the projection left it: 16-bit pairs in words; the lane's are columns 32 s + 8 q .. + 7 for each s.
template <int D>
struct RawHead {
  Word words[D / 32][2][2] = {};

  __device__ __forceinline__ bool look(const Worker& w, const Word* head) {
    bool ready = true;
#pragma unroll
    for (int s = 0; s < D / 32; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        peek2(head + s * 16 + (w.lane & 3) * 4 + half * 2, words[s][half]);
        ready = ready && has_flag(words[s][half][0], w.flag) && has_flag(words[s][half][1], w.flag);
      }
    }
    return ready;
  }
};

// The optional norm over the head, then the rotary embedding.
template <typename T, int D>
__device__ __forceinline__ void rotate_head(const Worker& w, const RawHead<D>& raw, const void* norm, int row,
                                            uint4 (&out)[D / 32]) {
  constexpr int kSteps = D / 32;
  const int q = w.lane & 3;
  uint4 weight[kSteps] = {};
  if (norm != nullptr) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) weight[s] = __ldg(static_cast<const uint4*>(norm) + s * 4 + q);
  }
  float v[kSteps][8];
  float squares = 0.0f;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const float2 pair = unpack_pair<T>(payload(raw.words[s][e / 4][e / 2 % 2]));
      v[s][e] = pair.x;
      v[s][e + 1] = pair.y;
      squares += pair.x * pair.x + pair.y * pair.y;
    }
  }
  if (norm != nullptr) {
    squares += __shfl_xor_sync(kAllLanes, squares, 1);
    squares += __shfl_xor_sync(kAllLanes, squares, 2);
    const float scale = rsqrtf(squares / D + w.step.eps);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint32_t pairs[4] = {weight[s].x, weight[s].y, weight[s].z, weight[s].w};
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const float2 pair = unpack_pair<T>(pairs[e / 2]);
        v[s][e] *= scale * pair.x;
        v[s][e + 1] *= scale * pair.y;
      }
    }
  }
  const float4* cosine = w.shared<float4>(w.plan.rope_at) + row * (D / 4);
#pragma unroll
  for (int s = 0; s < kSteps / 2; ++s) {
#pragma unroll
    for (int quarter = 0; quarter < 2; ++quarter) {
      const float4 cos = cosine[s * 8 + q * 2 + quarter], sin = cosine[D / 8 + s * 8 + q * 2 + quarter];
      const float c[4] = {cos.x, cos.y, cos.z, cos.w}, n[4] = {sin.x, sin.y, sin.z, sin.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float low = v[s][quarter * 4 + e], high = v[s + kSteps / 2][quarter * 4 + e];
        v[s][quarter * 4 + e] = low * c[e] - high * n[e];
        v[s + kSteps / 2][quarter * 4 + e] = high * c[e] + low * n[e];
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    out[s] = make_uint4(pack_pair<T>(v[s][0], v[s][1]), pack_pair<T>(v[s][2], v[s][3]),
              pack_pair<T>(v[s][4], v[s][5]), pack_pair<T>(v[s][6], v[s][7]));
}

// The new token's V in the layout of the accumulators: dimensions 64 set + 16 q .. + 15, as pairs.
template <int D>
__device__ __forceinline__ void fresh_value(Worker& w, const Word* words, uint32_t (&out)[D / 64][8]) {
  const int q = w.lane & 3;
  Word raw[D / 64][4][2];
  wait_words(w, [&] {
    bool ready = true;
#pragma unroll
    for (int set = 0; set < D / 64; ++set) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        peek2(words + set * 32 + q * 8 + i * 2, raw[set][i]);
        ready = ready && has_flag(raw[set][i][0], w.flag) && has_flag(raw[set][i][1], w.flag);
      }
    }
    return ready;
  });
#pragma unroll
  for (int set = 0; set < D / 64; ++set) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[set][i] = payload(raw[set][i / 2][i % 2]);
  }
}

}  // namespace six_engines
