// The arithmetic of the fused kernel: one warp multiplies a tile of 8 weight rows, in shared memory, with up to 16 rows
// of input.
//
// Both classes below divide the tile in the same way: the 32 lanes of a warp form 8 rows of 4, lane (g, t) reads 16
// bytes of weight row g, and the four lanes t together read 64 neighbouring bytes of it. Several warps share out the
// columns ("slices"), 64 bytes at a time in turn, so each holds a partial sum, and the caller adds those up.
#pragma once

#include "common/vectors.cuh"

namespace six_engines {

constexpr int kTileRows = 8;       // weight rows in a tile: the n of the tensor core's m16n8k16
constexpr int kStepsPerSlab = 8;   // how often a warp reads 64 bytes of each row at most, before the next slab; even
constexpr int kBytesPerStep = 64;

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

// The column that this lane reads in a step, of a slab that kSlices warps share 128 bytes (two steps) at a time.
template <typename T, int kSlices>
__device__ __forceinline__ int lane_column(int step, int slice) {
  const int byte = (step / 2 * kSlices + slice) * 2 * kBytesPerStep + step % 2 * kBytesPerStep;
  return (byte + int(threadIdx.x) % 4 * 16) / int(sizeof(T));
}

// Shared memory serves eight lanes (two rows) at a time. If rows are a multiple of 128 bytes apart, both would need the
// same banks, so the odd rows take the two steps of a pair in the other order.
__device__ __forceinline__ int flip_of_lane(int pitch) {
  return pitch % (2 * kBytesPerStep) == 0 ? int(threadIdx.x) / 4 % 2 : 0;
}

// float16 and bfloat16: tensor cores, float32 sums. The input rows are the m (16, rows that do not exist are zero), the
// weight rows the n. The instruction sums over k in any order as long as both sides agree, so each lane's 16 bytes,
// 8 neighbouring columns, serve as its share of two k16 steps: no shuffle, no ldmatrix.
template <typename T, int kRows>
struct TileDot {
  struct Input {
    uint4 low[kStepsPerSlab];                   // row g of the input
    uint4 high[kRows > 8 ? kStepsPerSlab : 1];  // row g + 8
  };
  float even[4], odd[4];  // two sums, so that two multiplications are on their way at a time

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 4; ++i) even[i] = odd[i] = 0.0f;
  }

  // input: [rows, stride], already at the slab's first column; global: written by other multiprocessors, so past L1.
  template <int kSlices, bool kGlobal>
  static __device__ __forceinline__ void load(Input& in, const T* input, int stride, int rows, int width, int slice) {
    const int g = int(threadIdx.x) % kWarpSize / 4;
#pragma unroll
    for (int step = 0; step < kStepsPerSlab; ++step) {
      const int column = lane_column<T, kSlices>(step, slice);
      const uint4* low = reinterpret_cast<const uint4*>(input + size_t(g) * stride + column);
      const uint4* high = reinterpret_cast<const uint4*>(input + size_t(g + 8) * stride + column);
      in.low[step] = column < width && g < rows ? (kGlobal ? __ldcg(low) : *low) : make_uint4(0, 0, 0, 0);
      if (kRows > 8) {
        in.high[step] = column < width && g + 8 < rows ? (kGlobal ? __ldcg(high) : *high) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  // tile: 8 rows of weights, pitch bytes apart. A row that was not copied spoils its own output only.
  template <int kSlices>
  __device__ __forceinline__ void multiply(const Input& in, const char* tile, int pitch, int width, int, int slice) {
    const int g = int(threadIdx.x) % kWarpSize / 4;
    const int flip = flip_of_lane(pitch);
    uint4 weight[kStepsPerSlab];
#pragma unroll
    for (int step = 0; step < kStepsPerSlab; ++step) {
      const int other = (step % 2 == 0 ? flip : -flip) * (kBytesPerStep / int(sizeof(T)));
      const int column = lane_column<T, kSlices>(step, slice) + other;
      const uint4* address = reinterpret_cast<const uint4*>(tile + g * pitch + column * int(sizeof(T)));
      weight[step] = column < width ? *address : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int step = 0; step < kStepsPerSlab; step += 2) {
      const uint4 first = weight[step], second = weight[step + 1];
      weight[step] = flip ? second : first;
      weight[step + 1] = flip ? first : second;
    }
#pragma unroll
    for (int step = 0; step < kStepsPerSlab; ++step) {
      const uint4 low = in.low[step], high = kRows > 8 ? in.high[step] : make_uint4(0, 0, 0, 0);
      tensor_core(even, make_uint4(low.x, high.x, low.y, high.y), make_uint2(weight[step].x, weight[step].y), T());
      tensor_core(odd, make_uint4(low.z, high.z, low.w, high.w), make_uint2(weight[step].z, weight[step].w), T());
    }
  }

  // partial: this warp's [rows, 8] floats.
  __device__ __forceinline__ void store(float* partial, int rows) {
    const int lane = int(threadIdx.x) % kWarpSize, g = lane / 4, t = lane % 4;
    float2* corner = reinterpret_cast<float2*>(partial + g * kTileRows + 2 * t);
    if (g < rows) corner[0] = make_float2(even[0] + odd[0], even[1] + odd[1]);
    if (kRows > 8 && g + 8 < rows) corner[8 * kTileRows / 2] = make_float2(even[2] + odd[2], even[3] + odd[3]);
  }
};

// float32: tensor cores would round the operands to tf32 (error 3e-4), so plain multiply-adds.
template <int kRows>
struct TileDot<float, kRows> {
  struct Input {
    const float* rows;  // read as it is used: sixteen rows of it would not fit into registers
    int stride;
  };
  float sums[kRows];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = 0.0f;
  }

  template <int kSlices, bool kGlobal>
  static __device__ __forceinline__ void load(Input& in, const float* input, int stride, int, int, int) {
    in = {input, stride};
  }

  template <int kSlices>
  __device__ __forceinline__ void multiply(const Input& in, const char* tile, int pitch, int width, int rows,
                                           int slice) {
    const int g = int(threadIdx.x) % kWarpSize / 4;
    const int flip = flip_of_lane(pitch);
#pragma unroll 2
    for (int step = 0; step < kStepsPerSlab; ++step) {
      const int column = lane_column<float, kSlices>(step ^ flip, slice);
      if (column >= width) continue;
      const float4 weight = *reinterpret_cast<const float4*>(tile + g * pitch + column * int(sizeof(float)));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= rows) break;
        const float4 v = *reinterpret_cast<const float4*>(in.rows + size_t(r) * in.stride + column);
        sums[r] += v.x * weight.x + v.y * weight.y + v.z * weight.z + v.w * weight.w;
      }
    }
  }

  __device__ __forceinline__ void store(float* partial, int rows) {
    const int lane = int(threadIdx.x) % kWarpSize, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
      float sum = sums[r];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (t == 0) partial[r * kTileRows + g] = sum;
    }
  }
};

}  // namespace six_engines
