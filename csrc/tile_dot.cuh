// The arithmetic of the fused kernel: a tile of 8 weight rows in shared memory times up to 16 rows of input.
//
// Both classes below see the tile in the same way: the 32 lanes of a warp form 8 rows of 4, lane (g, t) reads 16 bytes
// of weight row g, and the warp's four lanes t together read 64 neighbouring bytes of it. The warps of the block share
// out the columns, so that each holds a partial sum, and the caller adds those up.
#pragma once

#include "kernel_common.cuh"

namespace six_engines {

constexpr int kTileRows = 8;     // weight rows in a tile: the n of the tensor core's m16n8k16
constexpr int kStepsPerSlab = 4; // how often each warp reads 64 bytes of a row at most, before the next slab

__device__ __forceinline__ void tensor_core(float (&d)[4], uint4 a, uint2 b, __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

__device__ __forceinline__ void tensor_core(float (&d)[4], uint4 a, uint2 b, __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// float16 and bfloat16: tensor cores, float32 sums. The input rows are the m (16, rows that do not exist are zero), the
// weight rows the n. The instruction sums over k in any order as long as both sides agree, so each lane's 16 bytes,
// 8 neighbouring columns, serve as its share of two k16 steps: no shuffle, no ldmatrix.
template <typename T, int kRows, int kWarps>
struct TileDot {
  static constexpr int kColumnsPerStep = 32;
  static constexpr int kMaxSlab = kStepsPerSlab * kWarps * kColumnsPerStep;
  struct Input {
    uint4 low[kStepsPerSlab];                     // rows g of the input
    uint4 high[kRows > 8 ? kStepsPerSlab : 1];    // rows g + 8
  };
  float sums[2][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = 0.0f;
  }

  static __device__ __forceinline__ int column(int step) {
    return (step * kWarps + int(threadIdx.x) / kWarpSize) * kColumnsPerStep + int(threadIdx.x) % 4 * 8;
  }

  // input: [rows, stride], already at the slab's first column; global: written by other multiprocessors, so past L1.
  template <bool kGlobal>
  static __device__ __forceinline__ void load(Input& in, const T* input, int stride, int rows, int width) {
    const int g = int(threadIdx.x) % kWarpSize / 4;
#pragma unroll
    for (int step = 0; step < kStepsPerSlab; ++step) {
      const bool inside = column(step) < width;
      const uint4* low = reinterpret_cast<const uint4*>(input + size_t(g) * stride + column(step));
      const uint4* high = reinterpret_cast<const uint4*>(input + size_t(g + 8) * stride + column(step));
      in.low[step] = inside && g < rows ? (kGlobal ? __ldcg(low) : *low) : make_uint4(0, 0, 0, 0);
      if (kRows > 8) in.high[step] = inside && g + 8 < rows ? (kGlobal ? __ldcg(high) : *high) : make_uint4(0, 0, 0, 0);
    }
  }

  // slab: kTiles * 8 rows of weights, pitch bytes apart. A row that was not copied spoils its own column only.
  template <int kTiles>
  __device__ __forceinline__ void multiply(const Input& in, const char* slab, int pitch, int width, int) {
    const int g = int(threadIdx.x) % kWarpSize / 4;
#pragma unroll
    for (int step = 0; step < kStepsPerSlab; ++step) {
      if (column(step) - column(0) % kColumnsPerStep >= width) break;  // the same for the whole warp
      const bool inside = column(step) < width;
      const uint4 low = in.low[step];
      const uint4 high = kRows > 8 ? in.high[step] : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const char* address = slab + (tile * kTileRows + g) * pitch + column(step) * sizeof(T);
        const uint4 weight = inside ? *reinterpret_cast<const uint4*>(address) : make_uint4(0, 0, 0, 0);
        tensor_core(sums[tile], make_uint4(low.x, high.x, low.y, high.y), make_uint2(weight.x, weight.y), T());
        tensor_core(sums[tile], make_uint4(low.z, high.z, low.w, high.w), make_uint2(weight.z, weight.w), T());
      }
    }
  }

  // partial: this warp's [rows, 16] floats, tile 0 in columns 0-7 and tile 1 in columns 8-15.
  template <int kTiles>
  __device__ __forceinline__ void store(float* partial, int rows) {
    const int lane = int(threadIdx.x) % kWarpSize, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float* corner = partial + g * 2 * kTileRows + tile * kTileRows + 2 * t;
      if (g < rows) *reinterpret_cast<float2*>(corner) = make_float2(sums[tile][0], sums[tile][1]);
      if (kRows > 8 && g + 8 < rows) {
        *reinterpret_cast<float2*>(corner + 8 * 2 * kTileRows) = make_float2(sums[tile][2], sums[tile][3]);
      }
    }
  }
};

// float32: tensor cores would round the operands to tf32 (3e-4), so plain multiply-adds.
template <int kRows, int kWarps>
struct TileDot<float, kRows, kWarps> {
  static constexpr int kColumnsPerStep = 16;
  static constexpr int kMaxSlab = kStepsPerSlab * kWarps * kColumnsPerStep;
  struct Input {
    const float* rows;  // read as it is used: sixteen rows of it would not fit into registers
    int stride;
  };
  float sums[2][kRows];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) sums[i / kRows][i % kRows] = 0.0f;
  }

  static __device__ __forceinline__ int column(int step) {
    return (step * kWarps + int(threadIdx.x) / kWarpSize) * kColumnsPerStep + int(threadIdx.x) % 4 * 4;
  }

  template <bool kGlobal>
  static __device__ __forceinline__ void load(Input& in, const float* input, int stride, int, int) {
    in = {input, stride};
  }

  template <int kTiles>
  __device__ __forceinline__ void multiply(const Input& in, const char* slab, int pitch, int width, int rows) {
    const int g = int(threadIdx.x) % kWarpSize / 4;
    for (int step = 0; step < kStepsPerSlab && column(step) < width; ++step) {
      float4 weight[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const char* address = slab + (tile * kTileRows + g) * pitch + column(step) * sizeof(float);
        weight[tile] = *reinterpret_cast<const float4*>(address);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= rows) break;
        const float4 v = *reinterpret_cast<const float4*>(in.rows + size_t(r) * in.stride + column(step));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          sums[tile][r] += v.x * weight[tile].x + v.y * weight[tile].y + v.z * weight[tile].z + v.w * weight[tile].w;
        }
      }
    }
  }

  template <int kTiles>
  __device__ __forceinline__ void store(float* partial, int rows) {
    const int lane = int(threadIdx.x) % kWarpSize, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float sum = sums[tile][r];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if (t == 0) partial[r * 2 * kTileRows + tile * kTileRows + g] = sum;
      }
    }
  }
};

}  // namespace six_engines
