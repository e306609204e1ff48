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
// mean(x^2) - mean(x)^2 loses every digit when the mean is large beside the spread. The mean itself is summed up as a
// difference from the row's first number, for the same reason. The second pass reads a cache.
template <typename T, bool kLayerNorm>
__device__ RowStats row_stats(const T* row, int columns, float eps) {
  const int lane = threadIdx.x % kWarpSize;
  constexpr int kCount = Vec16<T>::kCount;
  float mean = 0.0f;
  if (kLayerNorm) {
    const float first = to_float(row[0]);
    float sum = 0.0f;
    for (int column = lane * kCount; column < columns; column += kWarpSize * kCount) {
      const Vec16<T> vector = load16(row + column);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum += to_float(vector.values[i]) - first;
    }
    mean = first + warp_sum(sum) / columns;
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

// Sixteen bytes of the normalised row: (x - mean) * inverse * scale + shift, rounded once to T.
template <typename T, bool kLayerNorm>
__device__ __forceinline__ Vec16<T> normalise16(const Vec16<T>& x, RowStats stats, const Vec16<T>& scale,
                                                const Vec16<T>& shift) {
  Vec16<T> result;
#pragma unroll
  for (int i = 0; i < Vec16<T>::kCount; ++i) {
    float value = (to_float(x.values[i]) - stats.mean) * stats.inverse * to_float(scale.values[i]);
    if (kLayerNorm) value += to_float(shift.values[i]);
    result.values[i] = from_float<T>(value);
  }
  return result;
}

// A whole normalised row, by one warp. A row that fits into the warp's registers is read once, and everything that is
// needed is asked for before the first sum: three times in a row the latency of memory would cost more than the work.
template <typename T, bool kLayerNorm>
__device__ void normalise_row(const T* row, const T* weight, const T* bias, T* target, int columns, float eps) {
  constexpr int kCount = Vec16<T>::kCount, kHeld = 4, kStride = kWarpSize * kCount;
  const int begin = int(threadIdx.x) % kWarpSize * kCount;
  if (columns > kHeld * kStride) {
    const RowStats stats = row_stats<T, kLayerNorm>(row, columns, eps);
#pragma unroll 4
    for (int k = begin; k < columns; k += kStride) {
      store16(target + k, normalise16<T, kLayerNorm>(load16(row + k), stats, load16(weight + k),
                                                     kLayerNorm ? load16(bias + k) : Vec16<T>()));
    }
    return;
  }
  Vec16<T> x[kHeld], scale[kHeld], shift[kLayerNorm ? kHeld : 1];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int k = begin + i * kStride;
    if (k >= columns) continue;
    x[i] = load16(row + k);
    scale[i] = load16(weight + k);
    if (kLayerNorm) shift[i] = load16(bias + k);
  }
  RowStats stats{kLayerNorm ? to_float(row[0]) : 0.0f, 0.0f};  // the mean starts as the row's first number
#pragma unroll
  for (int pass = kLayerNorm ? 0 : 1; pass < 2; ++pass) {  // the mean, then the squares of x - mean
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * kStride >= columns) continue;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float centred = to_float(x[i].values[j]) - stats.mean;
        sum += pass == 0 ? centred : centred * centred;
      }
    }
    const float average = warp_sum(sum) / columns;
    if (pass == 0) stats.mean += average;
    else stats.inverse = rsqrtf(average + eps);
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int k = begin + i * kStride;
    if (k < columns) store16(target + k, normalise16<T, kLayerNorm>(x[i], stats, scale[i], shift[kLayerNorm ? i : 0]));
  }
}

}  // namespace six_engines
