// The data that every thread of the megakernel needs: its place, its ring position, and how it waits.
#pragma once

#include "stage_f/plan.cuh"

namespace six_engines {

// A ring slot and the parity of its barriers, advanced in step by the producer and by every consumer.
template <int kSlots>
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int by) {
    slot += by;
#pragma unroll 1
    while (slot >= kSlots) {
      slot -= kSlots;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ RingPosition ahead(int by) const {  // by < kSlots
    RingPosition next = *this;
    next.slot += by;
    if (next.slot >= kSlots) {
      next.slot -= kSlots;
      next.parity ^= 1;
    }
    return next;
  }
  __device__ __forceinline__ RingPosition behind(int by) const {  // by < kSlots
    RingPosition last = *this;
    last.slot -= by;
    if (last.slot < 0) {
      last.slot += kSlots;
      last.parity ^= 1;
    }
    return last;
  }
};

// What a thread needs everywhere. `waits` and `streams` are cleared once a wait has outlasted the limit, in this thread
// or in any other of the grid. From then on the thread waits for nothing (the producer: for nothing but its own copies,
// see drain_copies), so that a broken step ends with an error in the workspace instead of a hung GPU. The error stays
// there, and ends the following steps early too, until the host has seen it and reset the workspace.
template <int kSets, bool kOneRow = false>
struct Worker {
  using At = Layout<kSets>;
  static constexpr bool kAlone = kOneRow;
  static constexpr int kParts = kMostParts<kSets>, kPieces = kMostPieces<kSets, kOneRow>;
  static constexpr int kRequests = kSets * 4;
  const DecodeStep& step;
  unsigned char* smem;
  Word* words;
  uint32_t base, full, empty;  // shared addresses: of everything, of the slots' two barriers each
  RingPosition<At::kSlots> at;
  uint32_t flag;               // of the step and layer, in every word that is handed off
  int parity;                  // of the layer
  int warp, lane, thread;
  int place;                   // for error reports: layer * 16 + phase: a Kind (kOut: attention too), or 15: producer
  bool waits, streams;         // false: do not wait for words, for weights
  long long* trace;

  template <typename U>
  __device__ __forceinline__ U* shared(int offset) const { return reinterpret_cast<U*>(smem + offset); }
  __device__ __forceinline__ const Slice& slice(int kind) const { return shared<Slice>(At::kSlicesAt)[kind]; }
  __device__ __forceinline__ uint32_t slot_address(int slot) const {
    return base + At::kRingAt + slot * At::kSlotBytes;
  }

  __device__ __forceinline__ void mark() {
    if constexpr (kTrace) {
      if (trace != nullptr) *trace++ = clock64();
    }
  }

  __device__ __forceinline__ unsigned* control() const {  // steps done, first error
    return reinterpret_cast<unsigned*>(words);
  }
  // The rows' tokens in shared memory, behind the row table of attention_parts.cuh.
  __device__ __forceinline__ int* token_table() const { return shared<int>(At::kRowsAt) + 4 * kMaxDecodeRows + 2; }

  // One request of a vector [2 parities][rows][length] that is handed off through L2.
  template <int kKind>
  __device__ __forceinline__ Word* handed_off(int parity, int row) const {
    return words + (kVectorAt<kKind> + (parity * kMaxDecodeRows + row) * kVectorLength<kKind>);
  }
};

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
  template <typename W>
  __device__ __forceinline__ void attempt(W& w) {
    if ((++attempts & 255u) != 0) return;
    since = check_patience(since, w.step.timeout_ns, w.control() + 1, w.place);
    if (since == 0) w.waits = w.streams = false;
  }
};

template <typename W>
__device__ __forceinline__ void wait_barrier(W& w, uint32_t barrier, uint32_t parity) {
  Patience patience;
  while (w.streams && !barrier_passed(barrier, parity)) patience.attempt(w);
}

// Waits for `count` slots from the ring position on, a lane for each.
template <typename W>
__device__ __forceinline__ void wait_slots(W& w, int count) {
  const auto at = w.at.ahead(w.lane);
  const bool mine = w.lane < count;
  Patience patience;
  while (!__all_sync(kAllLanes, !mine || !w.streams || barrier_passed(w.full + at.slot * 8, at.parity)))
    patience.attempt(w);
}

// A warp waits for words: `look` reads those of its lane and says whether all are there.
template <typename W, typename Look>
__device__ __forceinline__ void wait_words(W& w, Look look) {
  Patience patience;
  while (!__all_sync(kAllLanes, look() || !w.waits)) patience.attempt(w);
}

__device__ __forceinline__ void workers_sync() { sync_some_threads<kWorkers>(); }

}  // namespace six_engines
