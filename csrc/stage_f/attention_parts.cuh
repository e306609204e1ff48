// The parts of attention: the division of the tokens among warps, and the layout of the heads after the projection.
#pragma once

#include "stage_f/worker.cuh"

namespace six_engines {

// What one block attends to: chunks [begin, end) of 16 cached tokens, its warps one each in turn. This step's own token
// belongs to the last item, and there to the last warp, which has no chunks.
struct AttentionItem {
  int exists, row, kv_head, part, begin, end, context;
  int piece, pieces;            // of the part: the block of the first merges them
  int last, stride;             // whether this is the row's last item; warps that have chunks
  long long cell, second_cell;  // of the warp's first two chunks, see chunk_cell; the second: of the new token's key
};
static_assert(sizeof(AttentionItem) <= 64, "kItemsAt has 64 bytes for each");

// Per row in shared memory: context length (0 for a padding row), chunks per item, parts, pieces of each; and then items
// of the step, and most parts of a row.
constexpr int kItems = 4 * kMaxDecodeRows, kPartsOfRows = kItems + 1;
template <typename W>
__device__ __forceinline__ const int* row_table(const W& w) { return w.template shared<int>(W::At::kRowsAt); }

// The words in which a part of a row's attention is handed off.
template <typename W>
__device__ __forceinline__ Quad* part_place(const W& w, int row, int part) {
  return reinterpret_cast<Quad*>(w.words + kPartsAt) + (row * kMaxParts + part) * (kAttentionColumns / 4);
}

// The words in which a block publishes a piece that is not the first of its part.
template <typename W>
__device__ __forceinline__ Quad* piece_place(const W& w, int block) {
  return reinterpret_cast<Quad*>(w.words + kPiecesAt) + block * (kGroup * kHeadDim / 4);
}

// Elements from the beginning of a layer's keys to this KV head's key of the chunk's first token. (A chunk never
// crosses blocks of the KV cache: a block is a power of two of at least 16 tokens.)
template <typename W>
__device__ __forceinline__ long long chunk_cell(const W& w, int row, int kv_head, int chunk) {
  const DecodeStep& s = w.step;
  const int token = chunk * kAttentionChunk;
  const long long block = s.block_tables[row * s.max_blocks + (token >> w.step.block_shift)];
  return (((block << w.step.block_shift) + (token & (s.block_size - 1))) * kKvHeads + kv_head) * kHeadDim;
}

__device__ __forceinline__ int cached_chunks(int context) { return ceil_div(max(context - 1, 0), kAttentionChunk); }

template <typename W>
__device__ __forceinline__ AttentionItem attention_item(const W& w, int index) {
  const int* rows = row_table(w);
  AttentionItem item{};
  item.kv_head = index % kKvHeads;
  item.row = index / kKvHeads % w.step.rows;
  item.part = index / kKvHeads / w.step.rows % rows[kPartsOfRows];
  item.piece = index / kKvHeads / w.step.rows / rows[kPartsOfRows];
  item.context = rows[item.row];
  const int chunks = cached_chunks(item.context), per_item = rows[kMaxDecodeRows + item.row];
  const int most_pieces = rows[3 * kMaxDecodeRows + item.row], items = item.context == 0 ? 0 : chunks / per_item + 1;
  item.pieces = min(most_pieces, items - item.part * most_pieces);
  item.exists = item.piece < item.pieces;
  if (!item.exists) return item;
  item.begin = (item.part * most_pieces + item.piece) * per_item;
  item.last = item.begin + per_item > chunks;
  item.stride = item.last ? kWarps - 1 : kWarps;
  item.end = min(item.begin + per_item, chunks);
  const int first = item.begin + w.warp, second = first + item.stride;
  if (item.last && w.warp == kWarps - 1) {
    item.second_cell = (w.step.slot_mapping[item.row] * kKvHeads + item.kv_head) * kHeadDim;
  } else {
    if (first < item.end) item.cell = chunk_cell(w, item.row, item.kv_head, first);
    if (second < item.end) item.second_cell = chunk_cell(w, item.row, item.kv_head, second);
  }
  return item;
}

__device__ __forceinline__ long long layer_elements(const DecodeStep& s) {
  return static_cast<long long>(s.blocks) * s.block_size * kKvHeads * kHeadDim;
}

// A later layer's keys and values do not depend on this step: fetch them to L2 while there is time.
template <typename W>
__device__ __forceinline__ void prefetch_item(const W& w, const AttentionItem& item, int layer) {
  const DecodeStep& s = w.step;
  if (!item.exists || layer >= kLayers) return;
  const T* cache = static_cast<const T*>(s.kv_cache) + layer_elements(s) * (layer + (w.lane >= 16 ? kLayers : 0));
  const int first = item.begin + w.warp;
  if (w.warp >= item.stride) return;
#pragma unroll 1
  for (int chunk = first; chunk < item.end; chunk += item.stride) {
    const long long cell = chunk == first ? item.cell : chunk_cell(w, item.row, item.kv_head, chunk);
    const T* token = cache + cell + (w.lane & 15) * kKvHeads * kHeadDim;
    if (chunk * kAttentionChunk + (w.lane & 15) < item.context - 1) {
      prefetch_l2(token);
      if (kHeadDim > 64) prefetch_l2(token + 64);
    }
  }
}

// A head as the projection published it: 16-bit pairs in words; a lane has columns 32 s + 8 q .. + 7 for each s.
struct RawHead {
  Word words[kHeadDim / 32][2][2] = {};

  template <typename W>
  __device__ __forceinline__ bool look(const W& w, const Word* head) {
    bool ready = true;
#pragma unroll
    for (int s = 0; s < kHeadDim / 32; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        peek2(head + s * 16 + (w.lane & 3) * 4 + half * 2, words[s][half]);
        ready = ready && has_flag(words[s][half][0], w.flag) && has_flag(words[s][half][1], w.flag);
      }
    }
    return ready;
  }
};

// This lane's weights of a head's norm.
struct HeadNorm {
  uint4 of[kHeadDim / 32] = {};
  template <typename W>
  __device__ __forceinline__ HeadNorm(const W& w, const void* norm) {
    if (norm == nullptr) return;
#pragma unroll
    for (int s = 0; s < kHeadDim / 32; ++s) of[s] = __ldg(static_cast<const uint4*>(norm) + s * 4 + (w.lane & 3));
  }
};

// The optional norm over the head, then the rotary embedding.
template <typename W>
__device__ __forceinline__ void rotate_head(const W& w, const RawHead& raw, const void* norm, const HeadNorm& weights,
                                            int row, uint4 (&out)[kHeadDim / 32]) {
  constexpr int kSteps = kHeadDim / 32;
  const int q = w.lane & 3;
  const uint4(&weight)[kSteps] = weights.of;
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
    const float scale = rsqrtf(squares / kHeadDim + w.step.eps);
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
  const float4* cosine = w.template shared<float4>(W::At::kRopeAt) + row * (kHeadDim / 4);
#pragma unroll
  for (int s = 0; s < kSteps / 2; ++s) {
#pragma unroll
    for (int quarter = 0; quarter < 2; ++quarter) {
      const float4 cos = cosine[s * 8 + q * 2 + quarter], sin = cosine[kHeadDim / 8 + s * 8 + q * 2 + quarter];
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
struct RawValue {
  Word words[kHeadDim / 64][4][2] = {};

  template <typename W>
  __device__ __forceinline__ bool look(const W& w, const Word* head) {
    bool ready = true;
#pragma unroll
    for (int set = 0; set < kHeadDim / 64; ++set) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        peek2(head + set * 32 + (w.lane & 3) * 8 + i * 2, words[set][i]);
        ready = ready && has_flag(words[set][i][0], w.flag) && has_flag(words[set][i][1], w.flag);
      }
    }
    return ready;
  }
};

// Four columns of a head's attention, merged from its parts; zero without parts. `logarithm`: of the sum of their
// weights.
template <int kParts>
__device__ __forceinline__ uint2 merge_parts(const Quad (&quads)[kParts], int parts, float* logarithm = nullptr) {
  float largest = -INFINITY, sum = 0.0f, x[4] = {};
#pragma unroll
  for (int part = 0; part < kParts; ++part) largest = fmaxf(largest, __uint_as_float(quads[part].extra));
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float weight = part < parts ? exp2_approx(__uint_as_float(quads[part].extra) - largest) : 0.0f;
    const float2 low = unpack_pair<T>(quads[part].low), high = unpack_pair<T>(quads[part].high);
    sum += weight;
    x[0] += weight * low.x;
    x[1] += weight * low.y;
    x[2] += weight * high.x;
    x[3] += weight * high.y;
  }
  if (logarithm != nullptr) *logarithm = largest + log2_approx(sum);
  const float inverse = parts > 0 ? __fdividef(1.0f, sum) : 0.0f;
  return make_uint2(pack_pair<T>(x[0] * inverse, x[1] * inverse), pack_pair<T>(x[2] * inverse, x[3] * inverse));
}

}  // namespace six_engines
