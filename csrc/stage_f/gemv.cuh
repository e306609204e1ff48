// The consumers: the other warps multiply the weights that the stream (stream.cuh) has copied.
//
// The product must need few instructions, not few operations. A step (32 columns of 8 weight rows, times up to 4
// requests) is one load and one m16n8k16 instruction, which has twice the rows and columns that are needed. A lane's 16
// bytes of a weight row are its whole operand: row g of the instruction takes the first half of them, row g + 8 the
// second. Two columns of the instruction hold a request's activations, one for each half: its 8 columns are 4 requests
// (a *set*; with more requests each step has two instructions). Of the four products of halves two are meaningless; the
// other two are in the same lane, which adds them (c[0] + c[3]).
//
// A warp multiplies the same few columns of all rows of its block, with activations that it keeps in registers.
#pragma once

#include "stage_f/hand_off.cuh"

namespace six_engines {

// One step: 16 bytes of weight row g, times the lane's four activations.
__device__ __forceinline__ void multiply_step(float (&c)[4], const uint4& weights, const uint2& act) {
  mma<T>(c, weights.x, weights.z, weights.y, weights.w, act.x, act.y);
}

// One tile's weights that this warp multiplies in a batch of chunks: its columns of row g. `tile`: slots from the ring
// position on are counted in tiles.
template <Kind kKind>
using TileWeights = uint4[kMatrix<kKind>.batch_chunks][kSteps<kKind>];

template <Kind kKind, int kBatch, typename W>
__device__ __forceinline__ void load_weights(const W& w, int tile, TileWeights<kKind>& weights) {
  constexpr MatrixPlan m = kMatrix<kKind>;
  constexpr int kChunks = smaller(m.batch_chunks, m.chunks - kBatch);
  const uint32_t lane_at = min(w.lane >> 2, m.tile_rows - 1) * m.stride + (w.lane & 3) * 16;
  each_step<kKind, kChunks>(kBatch, [&](int i, int chunk, int step) {
    const uint32_t slot = w.slot_address(w.at.ahead(tile * kChunks + i).slot);
    weights[i][step] = load_shared(slot + lane_at + (part_of<kKind>(w, chunk).first + step) * 64);
  });
}

// The part that does not depend on activations: loads weights that have arrived from shared memory into registers.
template <Kind kKind, int kSets>
struct EarlyWeights {
  TileWeights<kKind> of[larger(1, kEarly<kKind, kSets>)];
};
template <Kind kKind, typename W, int kSets>
__device__ __forceinline__ void load_early(W& w, const Slice& slice, EarlyWeights<kKind, kSets>& early) {
  constexpr MatrixPlan m = kMatrix<kKind>;
  if constexpr (kTogether<kKind, kSets> == m.tiles * m.halves)
    wait_slots(w, slice.tiles * m.halves * m.batch_chunks);
#pragma unroll
  for (int tile = 0; tile < kEarly<kKind, kSets>; ++tile) load_weights<kKind, 0>(w, tile, early.of[tile]);
}

// A tile's running sums: several if there are few tiles, so that instructions need not wait for each other's results.
template <Kind kKind, int kSets>
constexpr int kSums = kTogether<kKind, kSets> >= 4 ? 1 : 4 / kTogether<kKind, kSets>;
template <Kind kKind, int kSets>
using TileSums = float[kSets][kSums<kKind, kSets>][4];

// Multiplies a batch of chunks of the tiles [first, first + c's) and releases their slots.
template <Kind kKind, int kBatch, bool kWaited, typename W, int kSets, int kTiles>
__device__ __forceinline__ void multiply_tiles(W& w, int tiles, const EarlyWeights<kKind, kSets>& early,
                                               const Activations<kKind> (&act)[kSets],
                                               TileSums<kKind, kSets> (&c)[kTiles]) {
  constexpr MatrixPlan m = kMatrix<kKind>;
  constexpr int kChunks = smaller(m.batch_chunks, m.chunks - kBatch);
  constexpr bool kAll = kTiles == m.tiles * m.halves;
  if (!kWaited) wait_slots(w, tiles * kChunks);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    if (!(kAll && tile < m.least_tiles * m.halves) && tile >= tiles) break;
    TileWeights<kKind> weights;
    const bool loaded = kWaited && tile < kEarly<kKind, kSets>;
    if (!loaded) load_weights<kKind, kBatch>(w, tile, weights);
    each_step<kKind, kChunks>(kBatch, [&](int i, int, int step) {
#pragma unroll
      for (int set = 0; set < kSets; ++set)
        multiply_step(c[tile][set][(i * kSteps<kKind> + step) % kSums<kKind, kSets>],
                      loaded ? early.of[loaded ? tile : 0][i][step] : weights[i][step], act[set].of[i][step]);
    });
  }
  __syncwarp();
  // Not after a timeout: the producer has stopped, and a barrier must not count more arrivals than its turn has.
  if (w.lane < tiles * kChunks && w.streams) barrier_arrive(w.empty + w.at.ahead(w.lane).slot * 8);
  w.at = w.at.ahead(tiles * kChunks);
}

// partial: [tile, half][set][warp][lane], lane (g, q) the sum of row g times request q.
template <Kind kKind, typename W, int kSets, int kTiles>
__device__ __forceinline__ void leave_sums(const W& w, int first, int tiles, const TileSums<kKind, kSets> (&c)[kTiles],
                                           float* partial) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    if (tile >= tiles) break;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      float sum = c[tile][set][0][0] + c[tile][set][0][3];
#pragma unroll
      for (int i = 1; i < kSums<kKind, kSets>; ++i) sum += c[tile][set][i][0] + c[tile][set][i][3];
      partial[(((first + tile) * kSets + set) * kWarps + w.warp) * 32 + w.lane] = sum;
    }
  }
}

// QKV, gate and up: many tiles, and all of this warp's activations have arrived.
template <Kind kKind, typename W, int kSets>
__device__ __forceinline__ void multiply_hidden(W& w, const Slice& slice, const EarlyWeights<kKind, kSets>& early,
                                                const Activations<kKind> (&act)[kSets], float* partial) {
  constexpr int kTiles = kMatrix<kKind>.tiles * kMatrix<kKind>.halves, kGroup = kTogether<kKind, kSets>;
#pragma unroll 1
  for (int first = 0; first < kTiles; first += kGroup) {
    const int tiles = min(kGroup, slice.tiles * kMatrix<kKind>.halves - first);
    if (tiles <= 0) break;
    TileSums<kKind, kSets> c[kGroup] = {};
    multiply_tiles<kKind, 0, kGroup == kTiles>(w, tiles, early, act, c);
    leave_sums<kKind>(w, first, tiles, c, partial);
  }
}

// Output and down: few tiles, whose sums stay in registers while the activations come in batches.
template <Kind kKind, int kBatch, typename W, int kSets, int kTiles>
__device__ __forceinline__ void multiply_long(W& w, const Slice& slice, const EarlyWeights<kKind, kSets>& early,
                                              TileSums<kKind, kSets> (&c)[kTiles]) {
  constexpr MatrixPlan m = kMatrix<kKind>;
  constexpr int kGroup = kTogether<kKind, kSets>;
  Activations<kKind> act[kSets];
  if constexpr (kKind == kOut && W::kAlone)
    receive_attended_alone<kKind, kBatch>(w, act[0]);
  else if constexpr (kKind == kOut)
    receive_attended<kKind, kBatch>(w, act);
  else
    receive_pairs<kKind, kGateUp, kBatch>(w, act);
  if (kBatch == 0) w.mark();
  if constexpr (kGroup == kTiles) {
    multiply_tiles<kKind, kBatch, kBatch == 0>(w, slice.tiles, early, act, c);
  } else {
#pragma unroll
    for (int first = 0; first < kTiles; ++first) {
      if (first >= slice.tiles) break;
      multiply_tiles<kKind, kBatch, false>(w, 1, early, act, reinterpret_cast<TileSums<kKind, kSets>(&)[1]>(c[first]));
    }
  }
  if constexpr (kBatch + m.batch_chunks < m.chunks) multiply_long<kKind, kBatch + m.batch_chunks>(w, slice, early, c);
}

// Adds up the warps' partial sums of a tile, for this lane's row and request.
template <int kSets>
__device__ __forceinline__ float sum_warps(const float* partial, int tile, int set, int lane) {
  const float* at = partial + (tile * kSets + set) * kWarps * 32 + lane;
  float part[kWarps];
#pragma unroll
  for (int i = 0; i < kWarps; ++i) part[i] = at[i * 32];
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + part[6]);
}

// The LM head: this warp multiplies a whole slot; the activations are in shared memory.
template <typename W, int kSets>
__device__ __forceinline__ void multiply_slot(W& w, int ahead, int chunk, float (&out)[kSets]) {
  constexpr MatrixPlan m = kMatrix<kHead>;
  const auto at = w.at.ahead(ahead);
  const int g = w.lane >> 2, q = w.lane & 3, last = w.step.rows - 1;
  const uint32_t a = w.slot_address(at.slot) + min(g, m.tile_rows - 1) * m.stride + q * 16;
  const uint32_t act = w.base + W::At::kActAt + (g & 1) * 8 + q * 16 + chunk * m.chunk_steps * 64;
  uint32_t x[kSets];  // instruction columns without a request repeat the last one
#pragma unroll
  for (int set = 0; set < kSets; ++set) x[set] = act + min(set * 4 + (g >> 1), last) * W::At::kActStride;
  const int steps = min(m.chunk_steps, m.steps - chunk * m.chunk_steps);
  wait_barrier(w, w.full + at.slot * 8, at.parity);
  float c[kSets][4][4] = {};
  const auto multiply_at = [&](int step, int i) {
    const uint4 weights = load_shared(a + step * 64);
#pragma unroll
    for (int set = 0; set < kSets; ++set) multiply_step(c[set][i], weights, load_shared2(x[set] + step * 64));
  };
  int step = 0;
#pragma unroll 1
  for (; step + 4 <= steps; step += 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_at(step + i, i);
  }
#pragma unroll 1
  for (; step < steps; ++step) multiply_at(step, 0);
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[set] += c[set][i][0] + c[set][i][3];
  }
  __syncwarp();
  if (w.lane == 0 && w.streams) barrier_arrive(w.empty + at.slot * 8, kWarps);
}

}  // namespace six_engines
