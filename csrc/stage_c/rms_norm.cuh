// RMSNorm of a row by one warp (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * scale.
#pragma once

#include "common/vectors.cuh"

namespace six_engines {

// 1 / sqrt(mean(x^2) + eps) of one row, in every lane.
template <typename T>
__device__ float inverse_rms(const T* row, int columns, float eps) {
  constexpr int kCount = Vec16<T>::kCount;
  float squares = 0.0f;
#pragma unroll 4
  for (int k = int(threadIdx.x) % kWarpSize * kCount; k < columns; k += kWarpSize * kCount) {
    const Vec16<T> vector = load16(row + k);
#pragma unroll
    for (int i = 0; i < kCount; ++i) squares += to_float(vector.values[i]) * to_float(vector.values[i]);
  }
  return rsqrtf(warp_sum(squares) / columns + eps);
}

// Sixteen bytes of the normalised row, rounded once to T.
template <typename T>
__device__ __forceinline__ Vec16<T> normalise16(const Vec16<T>& x, float inverse, const Vec16<T>& scale) {
  Vec16<T> result;
#pragma unroll
  for (int i = 0; i < Vec16<T>::kCount; ++i)
    result.values[i] = from_float<T>(to_float(x.values[i]) * inverse * to_float(scale.values[i]));
  return result;
}

// A whole normalised row. A row that fits into the warp's registers is read once, and all loads are issued before the
// first sum, because waiting for memory twice would cost more than the arithmetic.
template <typename T>
__device__ void normalise_row(const T* row, const T* weight, T* target, int columns, float eps) {
  constexpr int kCount = Vec16<T>::kCount, kHeld = 4, kStride = kWarpSize * kCount;
  const int begin = int(threadIdx.x) % kWarpSize * kCount;
  if (columns > kHeld * kStride) {
    const float inverse = inverse_rms(row, columns, eps);
#pragma unroll 4
    for (int k = begin; k < columns; k += kStride)
      store16(target + k, normalise16(load16(row + k), inverse, load16(weight + k)));
    return;
  }
  Vec16<T> x[kHeld], scale[kHeld];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (begin + i * kStride >= columns) continue;
    x[i] = load16(row + begin + i * kStride);
    scale[i] = load16(weight + begin + i * kStride);
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (begin + i * kStride >= columns) continue;
#pragma unroll
    for (int j = 0; j < kCount; ++j) squares += to_float(x[i].values[j]) * to_float(x[i].values[j]);
  }
  const float inverse = rsqrtf(warp_sum(squares) / columns + eps);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (begin + i * kStride < columns) store16(target + begin + i * kStride, normalise16(x[i], inverse, scale[i]));
  }
}

}  // namespace six_engines
