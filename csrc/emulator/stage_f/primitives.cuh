// Stands in for csrc/stage_f/primitives.cuh, which is written in PTX: the same functions on gpu.h.
#pragma once

#include "common/async_copy.cuh"
#include "common/vectors.cuh"
#include "stage_f/decode_step.h"

namespace six_engines {

template <typename T>
uint32_t pack_pair(float low, float high);
template <>
inline uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  return bits_as<uint32_t>(__floats2bfloat162_rn(low, high));
}
template <>
inline uint32_t pack_pair<__half>(float low, float high) { return bits_as<uint32_t>(__floats2half2_rn(low, high)); }
template <typename T>
float2 unpack_pair(uint32_t pair);
template <>
inline float2 unpack_pair<__nv_bfloat16>(uint32_t pair) {
  const auto both = bits_as<__nv_bfloat162>(pair);
  return {__bfloat162float(both.x), __bfloat162float(both.y)};
}
template <>
inline float2 unpack_pair<__half>(uint32_t pair) { return __half22float2(bits_as<__half2>(pair)); }

// mma.m16n8k16: which lane holds which element is said in the original.
template <typename T>
void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  const auto& given = gpu::exchange<3>(mine);
  const int g = gpu::lane() / 4, q = gpu::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int lower = i / 2, column = 2 * q + i % 2;  // rows g + 8; a column's elements are with the quad of its number
    float sum = 0.0f;
    for (int k = 0; k < 4; ++k) {
      for (int half = 0; half < 2; ++half) {
        const float2 a = unpack_pair<T>(given[4 * g + k][2 * half + lower]);
        const float2 b = unpack_pair<T>(given[4 * column + k][4 + half]);
        sum += a.x * b.x + a.y * b.y;
      }
    }
    c[i] += sum;
  }
}

inline float exp2_approx(float v) { return std::exp2(v); }
inline float log2_approx(float v) { return std::log2(v); }

template <typename T>
T read_shared(uint32_t address) {
  T value;
  std::memcpy(&value, gpu::block().shared + address, sizeof(T));
  return value;
}
inline uint4 load_shared(uint32_t address) { return read_shared<uint4>(address); }
inline uint2 load_shared2(uint32_t address) { return read_shared<uint2>(address); }
template <int kThreads>
void sync_some_threads() {
  gpu::block().some.members = kThreads;
  gpu::meet(gpu::block().some);
}
inline uint64_t evict_first_policy() { return 0; }
inline void prefetch_l2(const void* global) { static_cast<void>(*static_cast<const volatile char*>(global)); }
inline unsigned long long nanoseconds() { return gpu::turns; }

using Word = unsigned long long;
inline Word flagged(uint32_t payload, uint32_t flag) { return static_cast<Word>(flag) << 32 | payload; }
inline bool has_flag(Word word, uint32_t flag) { return static_cast<uint32_t>(word >> 32) == flag; }
inline uint32_t payload(Word word) { return static_cast<uint32_t>(word); }
inline void publish(Word* address, Word word) { gpu::store_late(address, &word, 8); }
inline void publish2(Word* address, Word first, Word second) {  // two stores: 16 bytes may be torn between words
  publish(address, first);
  publish(address + 1, second);
}
inline void peek2(const Word* address, Word (&words)[2]) { std::memcpy(words, address, 16); }

struct alignas(16) Quad {
  uint32_t low, high, extra, flag;
};
inline void publish_quad(Quad* address, const Quad& quad) { gpu::store_late(address, &quad, 16); }
inline Quad peek_quad(const Quad* address) { return *address; }

}  // namespace six_engines
