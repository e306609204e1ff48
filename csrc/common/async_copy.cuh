// Hopper's bulk copy: one thread requests a contiguous range of bytes, the copy engine copies it to shared memory, and
// an mbarrier counts the bytes that arrived. The data pass through no registers, so a block can have its whole shared
// memory in flight. Barriers and destinations are 32-bit addresses of shared memory. PTX ISA, sections "cp.async.bulk"
// and "mbarrier"; compute capability 9.0 and newer.
#pragma once

#include <cstdint>

namespace six_engines {

// The block's dynamic shared memory, of the size given at the launch.
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char smem[];
  return smem;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A phase of the barrier ends when this many threads have arrived and all bytes that they announced have arrived too.
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the inits and before the first copy: makes them visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t arrivals = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Arrives, and announces the bytes of the following copies.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase with this parity has ended: 0 for the first use of the barrier, 1 for the second, 0 again ...
// (Parity 1 of a barrier that was never used passes.)
__device__ __forceinline__ bool barrier_passed(uint32_t barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}

// (Not a loop around barrier_passed: with that, stage C's fused kernel runs out of registers.)
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni finished;\nbra.uni again;\nfinished:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// bytes, source and destination are multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   destination),
               "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
               : "memory");
}

// The same, with an L2 cache `policy`.
__device__ __forceinline__ void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;" ::"r"(destination),
               "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier), "l"(policy)
               : "memory");
}

#endif

}  // namespace six_engines
