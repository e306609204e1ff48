// A GPU on one CPU thread: enough of one to run the megakernel, whose blocks wait for each other.
//
// Every thread of every block is a fiber (a stack of its own, switched by hand). The scheduler picks a warp at random
// and runs each of its threads until it has to wait: in an instruction of the whole warp, at a barrier, or for a copy.
// Memory is as unkind as a GPU's may be: what a block stores for others, and what it copies to its shared memory, is
// delivered late and in any order. So a kernel whose hand-offs are wrong hangs, or computes something else, for some
// seed. (The kernels of labs/cpp/include/cuda_on_cpu.h do not wait for each other: there, block runs after block.)
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

namespace gpu {

constexpr int kLanes = 32, kWarpsPerBlock = 8, kThreadsPerBlock = kLanes * kWarpsPerBlock;
constexpr std::size_t kStack = 256 * 1024, kShared = 232448;
constexpr unsigned long long kHangs = 1'000'000;  // turns of the scheduler: many times as many as a step takes

struct Block;

struct Fiber {
  Block* block;
  int thread;
  ucontext_t start;  // enters the fiber for the first time; from then on jumps do, which are faster
  jmp_buf place;     // where it waits
  bool started = false, done = false;
  std::unique_ptr<char[]> stack;
};

struct Rendezvous {  // of the threads of a warp or a block
  int arrived = 0;
  unsigned turn = 0;
};

struct Warp : Rendezvous {
  int instruction = 0;  // that its lanes are at
  std::uint32_t given[kLanes][8], taken[kLanes][8];
};

struct Barrier {  // an mbarrier
  int arrivals, pending;
  long long bytes = 0;
  unsigned phase = 0;
};

struct Copy {
  std::uint32_t target, bytes, barrier;
  const void* source;
};

struct Block {
  int index, running = kThreadsPerBlock;
  bool votes = true, voted = true;  // of __syncthreads_and
  alignas(128) unsigned char shared[kShared];
  Warp warps[kWarpsPerBlock];
  Rendezvous all, workers;
  std::map<std::uint32_t, Barrier> barriers;
  std::vector<Copy> copies;
  Fiber fibers[kThreadsPerBlock];
};

struct Store {
  char* target;
  std::size_t bytes;
  std::uint64_t value[2];
};

inline Fiber* current = nullptr;
inline jmp_buf scheduler;
inline std::function<void()> kernel;
inline std::vector<Store> stores;  // on their way to the memory that all blocks share
inline std::mt19937_64 dice;
inline unsigned long long turns = 0;
inline int grid = 0;
inline const char* broken = nullptr;

inline Block& block() { return *current->block; }
inline int lane() { return current->thread % kLanes; }

inline void wait_a_turn() {
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}

// Ends the run: an exception cannot leave a fiber.
inline void fail(const char* why) {
  if (broken == nullptr) broken = why;
  wait_a_turn();
}

// True for the last of `count` threads to arrive; the others wait for it.
template <typename Last>
void meet(Rendezvous& place, int count, Last last) {
  const unsigned turn = place.turn;
  if (++place.arrived == count) {
    last();
    place.arrived = 0;
    ++place.turn;
  }
  while (place.turn == turn) wait_a_turn();
}

// An instruction of a whole warp: what every lane has given.
template <int kInstruction, int kWords>
const std::uint32_t (&exchange(const std::uint32_t (&mine)[kWords]))[kLanes][8] {
  Warp& warp = block().warps[current->thread / kLanes];
  if (warp.arrived == 0) warp.instruction = kInstruction;
  if (warp.instruction != kInstruction) fail("the lanes of a warp are at different instructions");
  std::memcpy(warp.given[lane()], mine, sizeof(mine));
  meet(warp, kLanes, [&] { std::memcpy(warp.taken, warp.given, sizeof(warp.given)); });
  return warp.taken;
}

inline void store_late(void* target, const void* value, std::size_t bytes) {
  Store store{static_cast<char*>(target), bytes, {}};
  std::memcpy(store.value, value, bytes);
  stores.push_back(store);
}

inline void arrive(Barrier& barrier, int arrivals, long long bytes) {
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  if (barrier.pending < 0) broken = "more threads have arrived at an mbarrier than its phase has";
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
}

inline void deliver_a_store() {
  std::size_t chosen = dice() % stores.size();
  for (std::size_t i = 0; i < chosen; ++i) {
    if (stores[i].target == stores[chosen].target) chosen = i;  // those to one address keep their order
  }
  std::memcpy(stores[chosen].target, stores[chosen].value, stores[chosen].bytes);
  stores.erase(stores.begin() + chosen);
}

inline void deliver_a_copy(Block& block) {
  const std::size_t chosen = dice() % block.copies.size();
  const Copy copy = block.copies[chosen];
  block.copies.erase(block.copies.begin() + chosen);
  std::memcpy(block.shared + copy.target, copy.source, copy.bytes);
  arrive(block.barriers.at(copy.barrier), 0, -static_cast<long long>(copy.bytes));
}

inline void enter_fiber() {
  kernel();
  current->done = true;
  if (--block().running == 0 && !block().copies.empty()) broken = "a block ended before its copies had arrived";
  wait_a_turn();
}

// Run a fiber until it waits. A function of its own, so that no variable of the caller lives across the jumps.
__attribute__((noinline)) inline void resume(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline std::unique_ptr<Block> make_block(int index) {
  auto block = std::make_unique<Block>();
  block->index = index;
  std::memset(block->shared, 0xff, kShared);  // what another kernel has left: NaN
  for (int i = 0; i < kThreadsPerBlock; ++i) {
    Fiber& fiber = block->fibers[i];
    fiber.block = block.get();
    fiber.thread = i;
    fiber.stack = std::unique_ptr<char[]>(new char[kStack]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStack;
    makecontext(&fiber.start, enter_fiber, 0);
  }
  return block;
}

// Run `body` as a kernel of this many blocks. `held`: a block that starts when all others have ended, and whose copies
// are slow, or -1. Returns null, or what went wrong.
inline const char* launch(const std::function<void()>& body, int blocks, std::uint64_t seed, int held) {
  kernel = body;
  grid = blocks;
  broken = nullptr;
  dice.seed(seed);
  std::vector<std::unique_ptr<Block>> resident;
  for (int i = 0; i < blocks; ++i) resident.push_back(make_block(i));
  std::vector<unsigned> speed(blocks, 8);
  int ended = 0;
  const unsigned long long begin = turns;
  while (broken == nullptr && (ended < blocks || !stores.empty())) {
    if (++turns - begin > kHangs) return "the blocks wait for each other for ever";
    for (unsigned i = dice() % 16; i > 0 && !stores.empty(); --i) deliver_a_store();
    const int index = static_cast<int>(dice() % blocks);
    Block& block = *resident[index];
    const unsigned copies = index == held ? dice() % 64 == 0 : dice() % 6;
    for (unsigned i = 0; i < copies && !block.copies.empty(); ++i) deliver_a_copy(block);
    if (turns % 1024 == 0) speed[index] = 1 + dice() % 8;  // blocks do not keep step
    if (block.running == 0 || dice() % 8 >= speed[index] || (index == held && ended < blocks - 1)) continue;
    const int warp = static_cast<int>(dice() % kWarpsPerBlock);
    for (int i = 0; i < 4 * kLanes && broken == nullptr; ++i) {
      Fiber& fiber = block.fibers[warp * kLanes + i % kLanes];
      if (!fiber.done) resume(fiber);
    }
    ended += block.running == 0;
  }
  return broken;
}

}  // namespace gpu
