// Small kernels, right and wrong, for test_emulator.py. The case is the program's argument.
#include <cuda_runtime.h>

#include <cstdio>
#include <string>
#include <vector>

#include "common/async_copy.cuh"

using namespace six_engines;
using Words = unsigned*;

__global__ void reverse(Words words) {  // through shared memory; without the barrier a thread reads too early
  auto* shared = reinterpret_cast<Words>(shared_memory());
  shared[threadIdx.x] = threadIdx.x;
  __syncthreads();
  words[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

__global__ void reverse_too_early(Words words) {
  auto* shared = reinterpret_cast<Words>(shared_memory());
  shared[threadIdx.x] = threadIdx.x;
  words[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

__global__ void some_return_before_a_barrier(Words words) {  // which is allowed: it waits for those that are left
  if (threadIdx.x < 10) return;
  __syncthreads();
  words[threadIdx.x] = blockDim.x - 1 - threadIdx.x;
}

__global__ void half_of_the_block_waits(Words) {
  if (threadIdx.x < 32) __syncthreads();
  if (threadIdx.x >= 32) __syncwarp();
  if (threadIdx.x == 32) __syncthreads();
  if (threadIdx.x > 32) __syncwarp();
}

__global__ void half_of_a_warp_shuffles(Words) {
  if (threadIdx.x % 32 < 16)
    __shfl_xor_sync(0xffffffffu, 1, 1);
  else
    __syncwarp();
}

__global__ void blocks_wait_for_each_other(Words words) {
  atomicAdd(words, 1u);
  while (atomicAdd(words, 0u) < gridDim.x) {
  }
}

__global__ void a_block_ends_before_its_copy(Words words) {
  if (threadIdx.x != 0) return;
  const uint32_t barrier = shared_address(shared_memory() + 1024);
  barrier_init(barrier, 1);
  barrier_expect(barrier, 64);
  bulk_copy(shared_address(shared_memory()), words, 64, barrier);
}

int main(int, char** arguments) {
  const std::string name = arguments[1];
  Words words;
  cudaMalloc(&words, 64 * sizeof(unsigned));
  cudaMemset(words, 0, 64 * sizeof(unsigned));
  void* pointers[] = {&words};
  try {
    const auto launch = [&](void (*kernel)(Words)) { cudaLaunchKernel(kernel, 1, 64, pointers, 256); };
    if (name == "reverse") launch(reverse);
    if (name == "reverse too early") launch(reverse_too_early);
    if (name == "some return") launch(some_return_before_a_barrier);
    if (name == "half of the block") launch(half_of_the_block_waits);
    if (name == "half of a warp") launch(half_of_a_warp_shuffles);
    if (name == "side by side") cudaLaunchCooperativeKernel(blocks_wait_for_each_other, 3, 1, pointers);
    if (name == "one after another") cudaLaunchKernel(blocks_wait_for_each_other, 3, 1, pointers);
    if (name == "a copy") cudaLaunchKernel(a_block_ends_before_its_copy, 1, 32, pointers);
    if (name == "too many") std::printf("%d ", cudaLaunchCooperativeKernel(reverse, 1000, 64, pointers));
  } catch (const std::exception& error) {
    std::printf("%s", error.what());
    return 0;
  }
  bool reversed = true;
  for (unsigned i = 10; i < 64; ++i) reversed = reversed && words[i] == 63 - i;
  std::printf(reversed ? "reversed" : "ended");
}
