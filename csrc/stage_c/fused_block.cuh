// The work of one block of the fused MLP kernel.
//
// A block owns a range of intermediate neurons and a range of outputs. It processes its weights as one list of steps,
// first its rows of w_in, then its rows of w_out, slab by slab. One warp only requests them from the copy engine, a few
// slabs at a time, as far ahead as the ring of slots in shared memory allows. Eight warps multiply the slabs that have
// arrived, independently, without waiting for one another. The weights do not depend on x, so the ring continues into
// w_out while the norm is computed and while the grid waits for the last neuron: memory does not idle.
//
//   copy engine    | w_in slabs ............ | w_out slabs .......... |
//   eight warps     norm | multiply w_in ......| grid barrier | multiply w_out | + residual
#pragma once

#include "common/async_copy.cuh"
#include "stage_c/fused_plan.h"
#include "stage_c/mlp.h"
#include "stage_c/ring.cuh"
#include "stage_c/rms_norm.cuh"
#include "stage_c/tile_dot.cuh"

namespace six_engines {
namespace {

template <typename T, int kRows>
class Block {
 public:
  using Dot = TileDot<T, kRows>;
  static constexpr int kAhead = kRows > 8 ? 1 : 3;  // as many as fit into the registers

  __device__ __forceinline__ Block(const MlpProblem& problem, const Plan& layout, char* memory)
      : p(problem), plan(layout), shared(memory), warp(threadIdx.x / kWarpSize), lane(threadIdx.x % kWarpSize) {
    const int block = blockIdx.x;
    neuron_begin = block * plan.neurons.each + min(block, plan.neurons.extra);
    neuron_end = neuron_begin + plan.neurons.each + (block < plan.neurons.extra ? 1 : 0);
    output_begin = block * plan.outputs.each + min(block, plan.outputs.extra);
    output_end = output_begin + plan.outputs.each + (block < plan.outputs.extra ? 1 : 0);
    full = shared_address(shared + plan.barrier_offset);
    empty = full + kMaxSlots * 8;
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x < plan.slots) {
      barrier_init(full + threadIdx.x * 8, 1);
      barrier_init(empty + threadIdx.x * 8, kFusedWarps * kArrivingLanes);
      barrier_init_fence();
    }
    __syncthreads();
    if (warp == kFusedWarps) {
      ask_for_weights();
      return;
    }
    normalise();
    sync_consumers();
    Cursor cursor;
    up(cursor);
    grid_barrier();
    down(cursor);
  }

 private:
  // One warp requests all weights of the block, in the order in which they are used.
  __device__ __forceinline__ void ask_for_weights() {
    Asking asking;
    for (int first = neuron_begin; first < neuron_end; first += kTileRows) {
      const int count = min(kTileRows, neuron_end - first);
      const size_t up = size_t(first) + p.inter;
      ask_for_tile(asking, static_cast<const T*>(p.w_in), plan.in, p.hidden, first, count, up, count);
    }
    for (int first = output_begin; first < output_end; first += kTileRows) {
      const int count = min(kTileRows, output_end - first);
      ask_for_tile(asking, static_cast<const T*>(p.w_out), plan.out, p.inter, first, count, 0, 0);
    }
  }

  // The slabs of one slot's rows: up to 8 from row `first`, and up to 8 from row `second`. Whole rows lie one after
  // the other in memory and are one copy; parts of rows are a copy each, issued by a lane each.
  __device__ __forceinline__ void ask_for_tile(Asking& asking, const T* weights, const Slabs& slabs, int columns,
                                               size_t first, int count, size_t second, int second_count) {
    const bool whole = slabs.count == 1;
    const int half = whole ? lane : lane / kTileRows, row = whole ? 0 : lane % kTileRows;
    const int rows = half == 0 ? count : second_count;
    const bool mine = half < 2 && row < rows;
    const T* source = weights + ((half == 0 ? first : second) + row) * columns;
    const int target = (half * kTileRows + row) * slabs.pitch;
    Cursor& cursor = asking.next;
    for (int start = 0; start < columns; start += slabs.width, cursor.advance(plan.slots)) {
      const uint32_t bytes = min(slabs.width, columns - start) * sizeof(T);
      if (asking.underway == plan.in_flight) {
        barrier_wait(full + asking.oldest.slot * 8, asking.oldest.parity);
        asking.oldest.advance(plan.slots);
      } else {
        ++asking.underway;
      }
      if (!cursor.first_round) barrier_wait(empty + cursor.slot * 8, cursor.parity ^ 1);
      if (lane == 0) barrier_expect(full + cursor.slot * 8, bytes * (count + second_count));
      __syncwarp();
      if (mine) {
        const uint32_t slot = shared_address(shared + cursor.slot * plan.slot_bytes);
        bulk_copy(slot + target, source + start, whole ? bytes * rows : bytes, full + cursor.slot * 8);
      }
    }
  }

  // This warp has read the slot.
  __device__ __forceinline__ void release(Cursor& cursor) {
    __syncwarp();
    if (lane < kArrivingLanes) barrier_arrive(empty + cursor.slot * 8);
    cursor.advance(plan.slots);
  }

  // Writes the normalised x of all rows to shared memory. Every block repeats this: x is a few KB in the L2 cache.
  __device__ __forceinline__ void normalise() {
    for (int r = warp; r < p.rows; r += kFusedWarps) {
      const T* row = static_cast<const T*>(p.x) + size_t(r) * p.hidden;
      T* target = reinterpret_cast<T*>(shared + plan.x_offset + r * plan.x_pitch);
      normalise_row(row, static_cast<const T*>(p.norm_weight), target, p.hidden, p.eps);
    }
  }

  // [batch, warps, rows, 8] partial sums.
  __device__ __forceinline__ float* partial(int tile, int of_warp) {
    float* all = reinterpret_cast<float*>(shared + plan.partial_offset);
    return all + tile * plan.tile_floats + of_warp * p.rows * kTileRows;
  }

  template <int kCount>
  __device__ __forceinline__ float sum_partials(int tile, int first_warp, int r, int column) {
    const float* values = partial(tile, first_warp) + r * kTileRows + column;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kCount; ++w) sum += values[w * p.rows * kTileRows];
    return sum;
  }

  // Writes this block's neurons = silu(x @ gate.T) * (x @ up.T) to scratch.
  __device__ __forceinline__ void up(Cursor& cursor) {
    const int half = warp / kInSlices, slice = warp % kInSlices;
    const T* x = reinterpret_cast<const T*>(shared + plan.x_offset);
    T* neurons = static_cast<T*>(p.scratch);
    const int tiles = (neuron_end - neuron_begin + kTileRows - 1) / kTileRows;
    Dot dot;
    typename Dot::Input input;
    for (int begin = 0; begin < tiles; begin += plan.batch) {
      const int count = min(plan.batch, tiles - begin);
      for (int tile = 0; tile < count; ++tile) {
        dot.clear();
        for (int start = 0; start < p.hidden; start += plan.in.width) {
          const int width = min(plan.in.width, p.hidden - start);
          if (plan.in.count > 1 || begin + tile == 0) {  // one slab: the input stays in registers
            Dot::template load<kInSlices, false>(input, x + start, plan.x_pitch / int(sizeof(T)), p.rows, width, slice);
          }
          barrier_wait(full + cursor.slot * 8, cursor.parity);
          const char* weights = shared + cursor.slot * plan.slot_bytes + half * kTileRows * plan.in.pitch;
          dot.template multiply<kInSlices>(input, weights, plan.in.pitch, width, p.rows, slice);
          release(cursor);
        }
        dot.store(partial(tile, warp), p.rows);
      }
      sync_consumers();
      const int first = neuron_begin + begin * kTileRows, found = min(count * kTileRows, neuron_end - first);
      for (int i = threadIdx.x; i < found * p.rows; i += kConsumers) {
        const int r = p.rows == 1 ? 0 : i / found, n = i - r * found;
        const int tile = n / kTileRows, column = n % kTileRows;
        const float gate = sum_partials<kInSlices>(tile, 0, r, column);
        const float up = sum_partials<kInSlices>(tile, kInSlices, r, column);
        neurons[size_t(r) * p.inter + first + n] = from_float<T>(silu(gate) * up);
      }
      if (begin + count < tiles) sync_consumers();
    }
  }

  // out = neurons @ w_out.T + residual, for this block's outputs.
  __device__ __forceinline__ void down(Cursor& cursor) {
    const T *neurons = static_cast<const T*>(p.scratch), *residual = static_cast<const T*>(p.residual);
    T* out = static_cast<T*>(p.out);
    Dot dot;
    // The neurons of several slabs are loaded at the same time: they come from other multiprocessors, half a
    // microsecond away. Slab s is in inputs[s % kAhead]; where all slabs of a row fit, they stay for all tiles.
    typename Dot::Input inputs[kAhead];
    auto load = [&](typename Dot::Input& input, int slab) {
      const int start = slab * plan.out.width, width = min(plan.out.width, p.inter - start);
      Dot::template load<kOutSlices, true>(input, neurons + start, p.inter, p.rows, width, warp);
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < plan.out.count) load(inputs[i], i);
    }
    const int tiles = (output_end - output_begin + kTileRows - 1) / kTileRows;
    for (int begin = 0; begin < tiles; begin += plan.batch) {
      const int count = min(plan.batch, tiles - begin);
      for (int tile = 0; tile < count; ++tile) {
        dot.clear();
        for (int group = 0; group < plan.out.count; group += kAhead) {
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            const int slab = group + i;
            if (slab >= plan.out.count) break;
            const int width = min(plan.out.width, p.inter - slab * plan.out.width);
            barrier_wait(full + cursor.slot * 8, cursor.parity);
            const char* weights = shared + cursor.slot * plan.slot_bytes;
            dot.template multiply<kOutSlices>(inputs[i], weights, plan.out.pitch, width, p.rows, warp);
            if (plan.out.count > kAhead) load(inputs[i], slab + kAhead < plan.out.count ? slab + kAhead : i);
            release(cursor);
          }
        }
        dot.store(partial(tile, warp), p.rows);
      }
      sync_consumers();
      const int first = output_begin + begin * kTileRows, found = min(count * kTileRows, output_end - first);
      for (int i = threadIdx.x; i < found * p.rows; i += kConsumers) {
        const int r = p.rows == 1 ? 0 : i / found, n = i - r * found;
        const size_t index = size_t(r) * p.hidden + first + n;
        const float sum = sum_partials<kOutSlices>(n / kTileRows, 0, r, n % kTileRows);
        out[index] = from_float<T>(to_float(residual[index]) + sum);
      }
      if (begin + count < tiles) sync_consumers();
    }
  }

  const MlpProblem& p;
  const Plan& plan;
  char* shared;
  uint32_t full, empty;  // addresses of each slot's barriers: its data are there; all warps have read them
  int warp, lane;
  int neuron_begin, neuron_end, output_begin, output_end;
};

}  // namespace
}  // namespace six_engines
