// CUDA on a CPU, slowly: enough of the language to run a kernel of this course without a GPU and see whether it is
// right.
//
// Every thread of a block is a fiber (a stack of its own, switched by hand), and blocks run one after another. A thread
// runs until it meets a barrier; when all threads that the barrier is for have arrived, they go on. So the arithmetic
// and the synchronisation are those of a GPU; its speed, its memory and its races are missing.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static

struct uint4 { unsigned x, y, z, w; } __attribute__((aligned(16)));
struct float4 { float x, y, z, w; } __attribute__((aligned(16)));

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 801 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 2, cudaSuccess; }

namespace cuda_on_cpu {

constexpr unsigned kWarp = 32;
constexpr std::size_t kStack = 64 * 1024;
enum class Wait { kNothing, kWarpBarrier, kBlockBarrier, kDone };

struct Fiber {
  ucontext_t start;  // enters a fiber for the first time; from then on jumps do, which are ten times as fast
  jmp_buf place;     // where it waits
  bool started = false;
  std::vector<char> stack = std::vector<char>(kStack);
  Wait wait = Wait::kNothing;
};

struct Block {
  jmp_buf scheduler;
  std::vector<Fiber> fibers;
  std::vector<std::uint64_t> exchange;  // one word a thread, for shuffles
  std::function<void()> body;
  std::string error;
  dim3 thread, block, block_dim, grid_dim;
  unsigned running = 0;
};

inline Block* current = nullptr;

inline void wait_at(Wait barrier) {
  Fiber& self = current->fibers[current->running];
  self.wait = barrier;
  if (_setjmp(self.place) == 0) _longjmp(current->scheduler, 1);
}

// Run a fiber until it waits. A function of its own, so that no variable of the caller lives across the jumps.
__attribute__((noinline)) inline void resume(Fiber& fiber) {
  if (_setjmp(current->scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline void enter_fiber() {
  try {
    current->body();
  } catch (const std::exception& error) {
    if (current->error.empty()) current->error = error.what();
  }
  wait_at(Wait::kDone);
}

// Let the fibers of one range go on if each of them is done or waits at `barrier`; says whether any goes on.
inline bool release(unsigned begin, unsigned end, Wait barrier) {
  bool any = false;
  for (unsigned i = begin; i < end; ++i) {
    const Wait wait = current->fibers[i].wait;
    if (wait != barrier && wait != Wait::kDone) return false;
    any |= wait == barrier;
  }
  for (unsigned i = begin; any && i < end; ++i) {
    if (current->fibers[i].wait == barrier) current->fibers[i].wait = Wait::kNothing;
  }
  return any;
}

inline void run_block(Block& block) {
  current = &block;
  const unsigned count = block.block_dim.x;
  for (unsigned i = 0; i < count; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.wait = Wait::kNothing;
    fiber.started = false;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.start, enter_fiber, 0);
  }
  while (true) {
    bool waiting = false;
    for (unsigned i = 0; i < count; ++i) {
      if (block.fibers[i].wait == Wait::kNothing) {
        block.running = i;
        block.thread.x = i;
        resume(block.fibers[i]);
      }
      waiting |= block.fibers[i].wait != Wait::kDone;
    }
    if (!block.error.empty()) throw std::runtime_error(block.error);
    if (!waiting) return;
    bool released = release(0, count, Wait::kBlockBarrier);
    for (unsigned warp = 0; warp < count; warp += kWarp) {
      released |= release(warp, warp + kWarp < count ? warp + kWarp : count, Wait::kWarpBarrier);
    }
    if (!released) {
      throw std::runtime_error(
          "the threads of a block wait for one another at different barriers for ever: a __syncthreads or a shuffle "
          "is at a place that only some of them reach");
    }
  }
}

inline void launch(const std::function<void()>& body, dim3 grid, dim3 block_dim, std::size_t shared = 0,
                   cudaStream_t = nullptr) {
  if (block_dim.x > 1024 || block_dim.y != 1 || block_dim.z != 1) throw std::runtime_error("up to 1024 threads in x");
  if (shared > 227 * 1024) throw std::runtime_error("more than 227 KiB of shared memory a block");
  Block block;
  block.fibers.resize(block_dim.x);
  block.exchange.resize(block_dim.x);
  block.body = body;
  block.grid_dim = grid;
  block.block_dim = block_dim;
  for (unsigned x = 0; x < grid.x; ++x) {
    block.block = dim3(x, 0, 0);
    run_block(block);
  }
}

template <typename T>
T exchange(unsigned mask, T value, unsigned from_lane) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  if (mask != 0xffffffffu) throw std::runtime_error("a shuffle needs the mask of all 32 lanes, 0xffffffff");
  const unsigned self = current->running;
  std::memcpy(&current->exchange[self], &value, sizeof(T));
  wait_at(Wait::kWarpBarrier);
  const unsigned from = self / kWarp * kWarp + from_lane % kWarp;
  T result;
  std::memcpy(&result, &current->exchange[from], sizeof(T));
  wait_at(Wait::kWarpBarrier);
  return result;
}

inline unsigned lane() { return current->running % kWarp; }

}  // namespace cuda_on_cpu

#define threadIdx (cuda_on_cpu::current->thread)
#define blockIdx (cuda_on_cpu::current->block)
#define blockDim (cuda_on_cpu::current->block_dim)
#define gridDim (cuda_on_cpu::current->grid_dim)

inline void __syncthreads() { cuda_on_cpu::wait_at(cuda_on_cpu::Wait::kBlockBarrier); }
inline void __syncwarp(unsigned = 0xffffffffu) { cuda_on_cpu::wait_at(cuda_on_cpu::Wait::kWarpBarrier); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int offset, int = 32) {
  return cuda_on_cpu::exchange(mask, value, cuda_on_cpu::lane() ^ unsigned(offset));
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int = 32) {
  return cuda_on_cpu::exchange(mask, value, unsigned(lane));
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int offset, int = 32) {  // lanes past the end keep their own value
  const unsigned from = cuda_on_cpu::lane() + unsigned(offset);
  return cuda_on_cpu::exchange(mask, value, from < 32 ? from : cuda_on_cpu::lane());
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int offset, int = 32) {
  const unsigned lane = cuda_on_cpu::lane();
  return cuda_on_cpu::exchange(mask, value, lane >= unsigned(offset) ? lane - unsigned(offset) : lane);
}

inline float atomicAdd(float* target, float value) {
  const float before = *target;
  *target += value;
  return before;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float __expf(float value) { return std::exp(value); }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline float __fdividef(float a, float b) { return a / b; }

struct __half {
  _Float16 value;
};
inline float __half2float(__half half) { return float(half.value); }
inline __half __float2half_rn(float value) { return {_Float16(value)}; }

struct __nv_bfloat16 {
  std::uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 half) {
  const std::uint32_t word = std::uint32_t(half.bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  std::uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  return {std::uint16_t((word + 0x7fffu + ((word >> 16) & 1)) >> 16)};  // to nearest, ties to even
}
