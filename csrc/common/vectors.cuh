// What all kernels share: conversions to float and back, 16-byte vectors, the sum over a warp.
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

// Sixteen bytes, the widest load of a thread: 8 half-precision numbers or 4 floats.
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

// The sum over the 32 lanes, in every lane: five register shuffles, no shared memory.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

__device__ __forceinline__ float silu(float value) { return value / (1.0f + __expf(-value)); }

}  // namespace six_engines
