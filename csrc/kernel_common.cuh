// What the kernels share: 16-byte vectors, conversions to float and back, sums over a warp, the statistics of a row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace six_engines {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) { return value; }
template <>
__device__ __forceinline__ __half from_float<__half>(float value) { return __float2half_rn(value); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }

// Sixteen bytes: the widest load a thread has, 8 half-precision numbers or 4 floats.
template <typename T>
struct alignas(16) Vec16 {
  static constexpr int kCount = 16 / sizeof(T);
  T values[kCount];
};

template <typename T>
__device__ __forceinline__ Vec16<T> load16(const T* pointer) {
  return *reinterpret_cast<const Vec16<T>*>(pointer);
}

template <typename T>
__device__ __forceinline__ void store16(T* pointer, const Vec16<T>& vector) {
  *reinterpret_cast<Vec16<T>*>(pointer) = vector;
}

// The sum over the 32 lanes, in every lane: five exchanges of registers, no shared memory.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

__device__ __forceinline__ float silu(float value) { return value / (1.0f + __expf(-value)); }

struct RowStats {
  float mean;     // 0 for RMSNorm
  float inverse;  // 1 / sqrt(mean square + eps), of x - mean for LayerNorm
};

// Statistics of one row, by one warp. LayerNorm takes two passes, the mean first and then the squares of x - mean:
// mean(x^2) - mean(x)^2 loses every digit when the mean is large beside the spread. The second pass reads a cache.
template <typename T, bool kLayerNorm>
__device__ RowStats row_stats(const T* row, int columns, float eps) {
  const int lane = threadIdx.x % kWarpSize;
  constexpr int kCount = Vec16<T>::kCount;
  float mean = 0.0f;
  if (kLayerNorm) {
    float sum = 0.0f;
    for (int column = lane * kCount; column < columns; column += kWarpSize * kCount) {
      const Vec16<T> vector = load16(row + column);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum += to_float(vector.values[i]);
    }
    mean = warp_sum(sum) / columns;
  }
  float squares = 0.0f;
#pragma unroll 4
  for (int column = lane * kCount; column < columns; column += kWarpSize * kCount) {
    const Vec16<T> vector = load16(row + column);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float centred = to_float(vector.values[i]) - mean;
      squares += centred * centred;
    }
  }
  return {mean, rsqrtf(warp_sum(squares) / columns + eps)};
}

// Sixteen bytes of the normalised row: (x - mean) * inverse * weight + bias, rounded once to T.
template <typename T, bool kLayerNorm>
__device__ __forceinline__ Vec16<T> normalise16(const Vec16<T>& x, RowStats stats, const T* weight, const T* bias) {
  const Vec16<T> scale = load16(weight);
  Vec16<T> shift;
  if (kLayerNorm) shift = load16(bias);
  Vec16<T> result;
#pragma unroll
  for (int i = 0; i < Vec16<T>::kCount; ++i) {
    float value = (to_float(x.values[i]) - stats.mean) * stats.inverse * to_float(scale.values[i]);
    if (kLayerNorm) value += to_float(shift.values[i]);
    result.values[i] = from_float<T>(value);
  }
  return result;
}

}  // namespace six_engines
