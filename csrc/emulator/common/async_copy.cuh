// Stands in for csrc/common/async_copy.cuh: addresses of shared memory are offsets into the block's array.
#pragma once

#include "cuda_runtime.h"

namespace six_engines {

inline unsigned char* shared_memory() { return gpu::block().shared; }
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - gpu::block().shared);
}

inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  gpu::block().barriers[barrier] = {static_cast<int>(arrivals), static_cast<int>(arrivals)};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier, uint32_t arrivals = 1) {
  gpu::arrive(gpu::block().barriers.at(barrier), static_cast<int>(arrivals), 0);
}
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  gpu::arrive(gpu::block().barriers.at(barrier), 1, bytes);
}
inline bool barrier_passed(uint32_t barrier, uint32_t parity) {
  const bool passed = (gpu::block().barriers.at(barrier).phase & 1) != parity;
  if (!passed) gpu::wait_a_turn();
  return passed;
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!barrier_passed(barrier, parity)) {
  }
}

inline void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, uint64_t = 0) {
  if (destination % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0 || bytes % 16 != 0)
    throw std::runtime_error("a bulk copy is not aligned to 16 bytes");
  if (destination + bytes > gpu::kShared) throw std::runtime_error("a bulk copy goes past the end of shared memory");
  gpu::block().copies.push_back({destination, bytes, barrier, source});
  ++gpu::counts.copies;
}

}  // namespace six_engines
