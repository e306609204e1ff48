// Replaces the CUDA toolkit's headers: the keywords, types and functions that this course's kernels use, on top of
// gpu.h.
#pragma once

#include <cmath>
#include <cstdlib>
#include <tuple>

#include "gpu.h"

#define CUDA_EMULATOR
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
#define threadIdx (dim3(gpu::current->thread, 0, 0))
#define blockIdx (dim3(gpu::block().index, 0, 0))
#define blockDim (dim3(gpu::block_size))
#define gridDim (dim3(gpu::grid))

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
inline long long clock64() { return static_cast<long long>(gpu::turns); }

// ---- memory that blocks share --------------------------------------------------------------------------------------

template <typename T, typename Change>
T change_at_once(T* target, Change change) {
  ++gpu::counts.atomics;
  gpu::wait_a_turn();  // others may come first
  const T before = *target;
  *target = change(before);
  return before;
}
template <typename T>
T atomicAdd(T* target, T value) { return change_at_once(target, [&](T before) { return before + value; }); }
inline unsigned atomicCAS(unsigned* target, unsigned expected, unsigned value) {
  return change_at_once(target, [&](unsigned before) { return before == expected ? value : before; });
}
inline void __threadfence() { gpu::fence(); }

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

constexpr unsigned kEveryLane = 0xffffffffu;

template <typename T>
T shuffle(unsigned mask, T value, int from) {
  if (mask != kEveryLane) throw std::runtime_error("a shuffle needs the mask of all 32 lanes, 0xffffffff");
  const std::uint32_t mine[1] = {bits_as<std::uint32_t>(value)};
  return bits_as<T>(gpu::exchange<1>(mine)[from][0]);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int = 32) { return shuffle(mask, value, lane & 31); }
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int offset, int = 32) {
  return shuffle(mask, value, (gpu::lane() ^ offset) & 31);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int offset, int = 32) {  // lanes past the end keep their own value
  return shuffle(mask, value, gpu::lane() + offset < gpu::kLanes ? gpu::lane() + offset : gpu::lane());
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int offset, int = 32) {
  return shuffle(mask, value, gpu::lane() >= offset ? gpu::lane() - offset : gpu::lane());
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
inline void __syncwarp(unsigned = kEveryLane) { count_lanes(false); }
inline bool __syncthreads_and(bool value) {
  gpu::Block& block = gpu::block();
  bool& vote = block.votes[block.all.turn % 2];
  vote = value && (vote || block.all.arrived == 0);
  gpu::meet(block.all);
  return vote;
}
inline void __syncthreads() { __syncthreads_and(true); }

// ---- the host's side -----------------------------------------------------------------------------------------------

using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorCooperativeLaunchTooLarge = 720,
  cudaErrorNotSupported = 801
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "the emulator cannot do this"; }
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = gpu::kMultiprocessors, cudaSuccess;
}
template <typename T>
cudaError_t cudaMalloc(T** pointer, std::size_t bytes) {
  *pointer = static_cast<T*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* target, int value, std::size_t bytes) {
  return std::memset(target, value, bytes), cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* target, const void* source, std::size_t bytes, cudaMemcpyKind) {
  return std::memcpy(target, source, bytes), cudaSuccess;
}

// Runs the blocks one after another.
template <typename... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                             std::size_t shared = 0, cudaStream_t = nullptr, int together = 1) {
  [[maybe_unused]] int next = 0;
  const std::tuple<Parameters...> given{*static_cast<Parameters*>(arguments[next++])...};
  gpu::run([&] { std::apply(kernel, given); }, grid.x, block.x, shared, together);
  return cudaSuccess;
}
// Runs the blocks concurrently.
template <typename... Parameters>
cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                                        std::size_t shared = 0, cudaStream_t stream = nullptr) {
  if (grid.x > gpu::kMultiprocessors) return cudaErrorCooperativeLaunchTooLarge;
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream, grid.x);
}

namespace gpu {

// The C++ form of `kernel<<<grid, block, shared, stream>>>(...)`.
inline void launch(const std::function<void()>& body, dim3 grid, dim3 block, std::size_t shared = 0,
                   cudaStream_t = nullptr) {
  if (grid.y * grid.z * block.y * block.z != 1) throw std::runtime_error("grids and blocks have threads in x only");
  run(body, grid.x, block.x, shared, 1);
}

}  // namespace gpu
