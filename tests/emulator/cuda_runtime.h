// Stands in for the CUDA toolkit's headers: the keywords, types and functions that the megakernel uses, on gpu.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "gpu.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes)

#define threadIdx (Index{gpu::current->thread})
#define blockIdx (Index{gpu::block().index})
#define gridDim (Index{gpu::grid})
struct Index {
  int x;
};

struct float2 { float x, y; };
struct float4 { float x, y, z, w; } __attribute__((aligned(16)));
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; } __attribute__((aligned(16)));
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using std::max;
using std::min;
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
template <typename To, typename From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}
template <typename T>
T __ldg(const T* pointer) { return *pointer; }
inline unsigned atomicCAS(unsigned* target, unsigned expected, unsigned value) {
  const unsigned before = *target;
  if (before == expected) *target = value;
  return before;
}
inline long long clock64() { return static_cast<long long>(gpu::turns); }

// ---- 16-bit floats -------------------------------------------------------------------------------------------------

struct __half { _Float16 value; };
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
struct __half2 { __half x, y; };
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }

struct __nv_bfloat16 { std::uint16_t bits; };
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {  // to nearest, ties to even
  const unsigned word = __float_as_uint(x);
  return {static_cast<std::uint16_t>((word + 0x7fffu + (word >> 16 & 1)) >> 16)};
}
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}

// ---- what threads do together --------------------------------------------------------------------------------------

template <typename T>
T shuffle(T value, int from) {
  const std::uint32_t mine[1] = {bits_as<std::uint32_t>(value)};
  return bits_as<T>(gpu::exchange<1>(mine)[from][0]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int offset) { return shuffle(value, gpu::lane() ^ offset); }
template <typename T>
T __shfl_down_sync(unsigned, T value, int offset) {  // lanes past the end keep their own value
  return shuffle(value, gpu::lane() + offset < gpu::kLanes ? gpu::lane() + offset : gpu::lane());
}
inline int count_lanes(bool value) {
  const std::uint32_t mine[1] = {value};
  const auto& given = gpu::exchange<2>(mine);
  int count = 0;
  for (int i = 0; i < gpu::kLanes; ++i) count += given[i][0];
  return count;
}
inline bool __all_sync(unsigned, bool value) { return count_lanes(value) == gpu::kLanes; }
inline bool __any_sync(unsigned, bool value) { return count_lanes(value) > 0; }
inline void __syncwarp() { count_lanes(false); }
inline bool __syncthreads_and(bool value) {
  gpu::Block& block = gpu::block();
  block.votes = block.votes && value;
  gpu::meet(block.all, gpu::kThreadsPerBlock, [&] {
    block.voted = block.votes;
    block.votes = true;
  });
  return block.voted;
}
inline void __syncthreads() { __syncthreads_and(true); }
