// What every thread of the megakernel needs: where it is, its ring position, and how it waits.
#pragma once

#include "stage_f/plan.cuh"

namespace six_engines {

// A ring slot and the parity of its barriers, advanced in step by the producer and by every consumer.
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int by, int slots) {
    for (slot += by; slot >= slots; slot -= slots) parity ^= 1;
  }
};

// What a thread needs everywhere. `waits` and `streams` are cleared once a wait has outlasted the limit, in this thread
// or in any other of the grid: the thread then waits for nothing any more, so that a broken step ends with an error in
// the workspace instead of a hung GPU. The error stays there, and ends the steps behind it early too, until the host
// has seen it and made the workspace as new.
struct Worker {
  const DecodeStep& step;
  const DecodePlan& plan;
  unsigned char* smem;
  Word* words;
  uint32_t ring, full, empty;  // shared addresses: slots, and their two barriers each
  RingPosition at;
  uint32_t flag;               // of the step and layer, in every word that is handed off
  int parity;                  // of the layer
  int warp, lane, thread;
  int place;                   // where we are, for the error report: layer * 16 + phase
  bool waits, streams;         // false: do not wait for words, for weights

  template <typename U>
  __device__ __forceinline__ U* shared(int offset) const { return reinterpret_cast<U*>(smem + offset); }
};

__device__ __forceinline__ unsigned* control(const Worker& w) {  // steps done, first error
  return reinterpret_cast<unsigned*>(w.words);
}

// The rows' tokens in shared memory, behind the row table of attention_parts.cuh.
__device__ __forceinline__ int* token_table(const Worker& w) {
  return w.shared<int>(w.plan.rows_at) + 3 * kMaxDecodeRows + 1;
}

// One request of a vector [2 parities][rows][length] that is handed off through L2 and begins at word `at`.
__device__ __forceinline__ Word* handed_off(const Worker& w, unsigned at, unsigned length, int parity, int row) {
  return w.words + (at + (parity * kMaxDecodeRows + row) * length);
}

// Returns when this wait began, or 0 once it or another one has lasted too long. (Values, no references: a `Worker`
// whose address is taken would live in memory instead of registers.)
static __device__ __noinline__ unsigned long long check_patience(unsigned long long since, long long limit,
                                                                 unsigned* error, unsigned place) {
  const unsigned long long now = nanoseconds();
  if (*static_cast<volatile unsigned*>(error) != 0) return 0;
  if (since == 0) return now;
  if (now - since < static_cast<unsigned long long>(limit)) return since;
  atomicCAS(error, 0u, place + 1);
  return 0;
}

// Counts failed attempts of one wait; from time to time looks at the clock.
struct Patience {
  unsigned attempts = 0;
  unsigned long long since = 0;
  __device__ __forceinline__ void attempt(Worker& w) {
    if ((++attempts & 255u) != 0) return;
    since = check_patience(since, w.step.timeout_ns, control(w) + 1, w.place);
    if (since == 0) w.waits = w.streams = false;
  }
};

__device__ __forceinline__ void wait_barrier(Worker& w, uint32_t barrier, uint32_t parity) {
  Patience patience;
  while (w.streams && !barrier_passed(barrier, parity)) patience.attempt(w);
}

// A warp waits for words: `look` reads those of its lane and says whether all are there.
template <typename Look>
__device__ __forceinline__ void wait_words(Worker& w, Look look) {
  Patience patience;
  while (!__all_sync(kAllLanes, look() || !w.waits)) patience.attempt(w);
}

__device__ __forceinline__ void workers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kWorkers) : "memory"); }

}  // namespace six_engines
