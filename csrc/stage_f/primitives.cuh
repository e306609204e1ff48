// The instructions that the megakernel is written in: 16-bit pairs, the matrix instruction, L2's hints, and the
// flag-in-data word through which multiprocessors hand each other activations.
#pragma once

#include <cstdint>

#include "common/async_copy.cuh"
#include "common/vectors.cuh"
#include "stage_f/decode_step.h"

namespace six_engines {

// ---- 16-bit pairs and matrix instructions --------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack_pair<__nv_bfloat16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack_pair<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// c[16 x 8] += a[16 x 16] b[16 x 8], float32 accumulators. With g = lane / 4 and q = lane % 4 a lane holds a: (row g,
// k 2q..), (row g + 8, k 2q..), (row g, k 2q + 8..), (row g + 8, k 2q + 8..);  b: (k 2q.., col g), (k 2q + 8.., col
// g); c: (row g, cols 2q, 2q + 1), (row g + 8, the same columns).
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                  uint32_t b1);
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                           uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
         : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<__half>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                      uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
         : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_approx(float v) {  // one instruction; -infinity gives 0
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

__device__ __forceinline__ float log2_approx(float v) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// ---- shared memory -------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ uint2 load_shared2(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

// This many of the block's threads wait for each other, while the others continue.
template <int kThreads>
__device__ __forceinline__ void sync_some_threads() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// ---- L2 ------------------------------------------------------------------------------------------------------------

// Weights are read once per step, so they should be the first to leave L2 (the handed-off words and the KV stay).
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// ---- flag-in-data words: a value, and the flag of the step and layer that it belongs to, in one 8-byte store --------
// (NCCL's LL protocol.) A barrier would cost a fence, an atomic, a poll, and then the read of the data; such a word
// costs the store and the poll, which is already the read. No fence is needed, because nothing else is published by it,
// and 8-byte stores are never torn. Flags count steps and layers (kernel.cuh).

using Word = unsigned long long;

__device__ __forceinline__ Word flagged(uint32_t payload, uint32_t flag) {
  return static_cast<Word>(flag) << 32 | payload;
}
__device__ __forceinline__ bool has_flag(Word word, uint32_t flag) { return static_cast<uint32_t>(word >> 32) == flag; }
__device__ __forceinline__ uint32_t payload(Word word) { return static_cast<uint32_t>(word); }

__device__ __forceinline__ void publish(Word* address, Word word) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}
__device__ __forceinline__ void publish2(Word* address, Word first, Word second) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1,%2};" ::"l"(address), "l"(first), "l"(second) : "memory");
}
__device__ __forceinline__ void peek2(const Word* address, Word (&words)[2]) {
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];"
               : "=l"(words[0]), "=l"(words[1])
               : "l"(address)
               : "memory");
}

// The same with 12 bytes and the flag: 16 bytes in one access are never torn either.
struct alignas(16) Quad {
  uint32_t low, high, extra, flag;
};
__device__ __forceinline__ void publish_quad(Quad* address, const Quad& quad) {
  asm volatile("{\n.reg .b128 v;\n.reg .b64 a, b;\nmov.b64 a, {%1,%2};\nmov.b64 b, {%3,%4};\nmov.b128 v, {a,b};\n"
               "st.relaxed.gpu.global.b128 [%0], v;\n}" ::"l"(address), "r"(quad.low), "r"(quad.high), "r"(quad.extra),
               "r"(quad.flag)
               : "memory");
}
__device__ __forceinline__ Quad peek_quad(const Quad* address) {
  Quad quad;
  asm volatile("{\n.reg .b128 v;\n.reg .b64 a, b;\nld.relaxed.gpu.global.b128 v, [%4];\nmov.b128 {a,b}, v;\n"
               "mov.b64 {%0,%1}, a;\nmov.b64 {%2,%3}, b;\n}"
               : "=r"(quad.low), "=r"(quad.high), "=r"(quad.extra), "=r"(quad.flag)
               : "l"(address)
               : "memory");
  return quad;
}

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace six_engines
