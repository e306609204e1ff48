// An emulator of a GPU on one CPU thread. It is slow: it shows whether a kernel is correct, not how fast it is.
//
// Every thread of a block is a fiber with its own stack, switched by hand. The scheduler picks a warp at random and
// runs each of its threads until the thread must wait: in an instruction of the whole warp, at a barrier, or for
// memory. The blocks of an ordinary launch run one after another; the blocks of a cooperative launch run concurrently
// and may wait for each other. Memory is as unordered as a GPU's may be: stores for other blocks (`publish`) and copies
// to shared memory are delivered late and in any order. So a kernel with wrong waits stops with a reason, or gives a
// wrong result, for some seed.
//
// The CUDA toolkit's headers are in this folder, and common/ and stage_f/ replace the headers of csrc/ that are written
// in PTX: `c++ -x c++ -U_FORTIFY_SOURCE -Icsrc/emulator -Icsrc kernel.cu`. (With _FORTIFY_SOURCE the C library takes
// the switch to another stack for an error.) What is missing: ordinary stores and loads of global memory are immediate,
// a `__shared__` array (except by `shared_memory()`) is one for all blocks, so only ordinary launches can have any, and
// a C++ compiler cannot read `<<<...>>>`.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace gpu {

constexpr int kLanes = 32, kMostThreads = 1024, kMultiprocessors = 3;
constexpr std::size_t kStack = 256 * 1024, kShared = 227 * 1024;
constexpr unsigned long long kHangs = 1'000'000;  // turns of the scheduler: many times more than a kernel takes

struct Block;

struct Rendezvous {  // of the threads of a warp or a block
  int members = 0, arrived = 0;
  unsigned turn = 0;
};

struct Fiber {
  Block* block;
  int thread;
  ucontext_t start;  // enters the fiber for the first time; from then on jumps do, which are ten times as fast
  jmp_buf place;     // where it waits
  bool started, done;
  const Rendezvous* at = nullptr;  // where it waits for the others,
  unsigned turn;                   // and in which turn
  std::unique_ptr<char[]> stack{new char[kStack]};
};

struct Warp : Rendezvous {
  int instruction = 0;  // that its lanes are at
  std::uint32_t given[2][kLanes][8];
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
  int index, running;
  bool votes[2];  // of __syncthreads_and
  alignas(128) unsigned char shared[kShared];
  std::vector<Warp> warps;
  Rendezvous all, some;  // bar.sync 0 and 1
  std::map<std::uint32_t, Barrier> barriers;
  std::vector<Copy> copies;
  std::vector<Fiber> fibers;
};

struct Store {
  const Block* from;
  char* target;
  std::size_t bytes;
  std::uint64_t value[2];
};

// For the next launches: the seed of everything whose order is random; a block that starts after all others have ended
// and whose copies are slow, or -1.
inline std::uint64_t seed = 1;
inline int held = -1;

struct Counts {  // of what the last launch has done
  long long stores = 0, fences = 0, atomics = 0, copies = 0;
};
inline Counts counts;

inline Fiber* current = nullptr;
inline jmp_buf scheduler;
inline std::function<void()> kernel;
inline std::vector<Store> stores;  // on their way to the memory that all blocks share
inline std::mt19937_64 dice;
inline unsigned long long turns = 0;
inline int grid = 0, block_size = 0;
inline std::string broken;  // why the launch cannot go on

inline Block& block() { return *current->block; }
inline int lane() { return current->thread % kLanes; }

inline void wait_a_turn() {
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}

inline void release_if_all_arrived(Rendezvous& place) {
  if (place.arrived < place.members) return;
  place.arrived = 0;
  ++place.turn;
}

inline void meet(Rendezvous& place) {
  Fiber& self = *current;
  self.at = &place;
  self.turn = place.turn;
  ++place.arrived;
  release_if_all_arrived(place);
  while (place.turn == self.turn) wait_a_turn();
  self.at = nullptr;
}

// An instruction of a whole warp: what every lane has given. (Two copies: a lane may read while others give again.)
template <int kInstruction, int kWords>
const auto& exchange(const std::uint32_t (&mine)[kWords]) {
  Warp& warp = block().warps[current->thread / kLanes];
  if (warp.arrived == 0) warp.instruction = kInstruction;
  if (warp.instruction != kInstruction) throw std::runtime_error("the lanes of a warp are at different instructions");
  auto& given = warp.given[warp.turn % 2];
  std::memcpy(given[lane()], mine, sizeof(mine));
  meet(warp);
  return given;
}

inline void store_late(void* target, const void* value, std::size_t bytes) {
  Store store{&block(), static_cast<char*>(target), bytes, {}};
  std::memcpy(store.value, value, bytes);
  stores.push_back(store);
  ++counts.stores;
}

inline void deliver(std::size_t index) {
  std::memcpy(stores[index].target, stores[index].value, stores[index].bytes);
  stores.erase(stores.begin() + index);
}

inline void deliver_a_store() {
  std::size_t chosen = dice() % stores.size();
  for (std::size_t i = 0; i < chosen; ++i) {
    if (stores[i].target == stores[chosen].target) chosen = i;  // those to one address keep their order
  }
  deliver(chosen);
}

inline void fence() {  // earlier stores of the block become visible before its later stores
  ++counts.fences;
  for (std::size_t i = 0; i < stores.size();) stores[i].from == &block() ? deliver(i) : void(++i);
}

inline void arrive(Barrier& barrier, int arrivals, long long bytes) {
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  if (barrier.pending < 0) broken = "more threads have arrived at an mbarrier than its phase has";
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
}

inline void deliver_a_copy(Block& block) {
  const std::size_t chosen = dice() % block.copies.size();
  const Copy copy = block.copies[chosen];
  block.copies.erase(block.copies.begin() + chosen);
  std::memcpy(block.shared + copy.target, copy.source, copy.bytes);
  arrive(block.barriers.at(copy.barrier), 0, -static_cast<long long>(copy.bytes));
}

inline void enter_fiber() {
  try {
    kernel();
  } catch (const std::exception& error) {
    if (broken.empty()) broken = error.what();
  }
  Block& own = block();
  current->done = true;
  --own.all.members;  // a barrier of the block does not wait for threads that have ended
  release_if_all_arrived(own.all);
  if (--own.running == 0 && !own.copies.empty()) broken = "a block ended before its copies had arrived";
  wait_a_turn();
}

// Run a fiber until it waits. This is a separate function, so that no variable of the caller lives across the jumps.
__attribute__((noinline)) inline void resume(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline bool can_run(const Fiber& fiber) { return !fiber.done && (fiber.at == nullptr || fiber.at->turn != fiber.turn); }

inline void start(Block& block, int index) {
  block.index = index;
  block.running = block_size;
  block.votes[0] = block.votes[1] = true;
  std::memset(block.shared, 0xff, kShared);  // what another kernel has left: NaN
  block.warps.assign((block_size + kLanes - 1) / kLanes, {});
  for (int i = 0; i < block_size; ++i) ++block.warps[i / kLanes].members;
  block.all = block.some = {block_size};
  block.barriers.clear();
  block.copies.clear();
  block.fibers.resize(block_size);
  for (int i = 0; i < block_size; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.block = &block;
    fiber.thread = i;
    fiber.started = fiber.done = false;
    fiber.at = nullptr;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStack;
    makecontext(&fiber.start, enter_fiber, 0);
  }
}

using Blocks = std::vector<std::unique_ptr<Block>>;

inline bool is_stuck(const Blocks& blocks) {
  return stores.empty() && std::all_of(blocks.begin(), blocks.end(), [](const auto& block) {
    return block->copies.empty() && std::none_of(block->fibers.begin(), block->fibers.end(), can_run);
  });
}

// Run blocks concurrently until they have ended.
inline void schedule(const Blocks& blocks) {
  std::vector<unsigned> speed(blocks.size(), 8);
  unsigned stores_per_turn = 16;
  std::size_t ended = 0;
  const unsigned long long begin = turns;
  while (broken.empty() && (ended < blocks.size() || !stores.empty())) {
    if (++turns - begin > kHangs) broken = "the blocks wait for each other for ever";
    for (unsigned i = dice() % stores_per_turn; i > 0 && !stores.empty(); --i) deliver_a_store();
    const std::size_t index = dice() % blocks.size();
    Block& block = *blocks[index];
    const bool slow = block.index == held;
    const unsigned copies = slow ? dice() % 1024 == 0 : dice() % 6;
    for (unsigned i = 0; i < copies && !block.copies.empty(); ++i) deliver_a_copy(block);
    if (turns % 1024 == 0) {
      speed[index] = 1 + dice() % 8;  // blocks do not run in step
      stores_per_turn = 1 << dice() % 5;  // with 1, none is delivered for a while
      if (ended < blocks.size() && is_stuck(blocks))
        broken =
            "the threads of a block wait for one another at different barriers for ever: a __syncthreads or a shuffle "
            "is at a place that only some of them reach";
    }
    if (block.running == 0 || dice() % 8 >= speed[index] || (slow && ended < blocks.size() - 1)) continue;
    const std::size_t first = dice() % block.warps.size() * kLanes;
    const std::size_t lanes = std::min<std::size_t>(kLanes, block.fibers.size() - first);
    for (std::size_t i = 0; i < 4 * lanes && broken.empty(); ++i) {
      Fiber& fiber = block.fibers[first + i % lanes];
      if (can_run(fiber)) resume(fiber);
    }
    ended += block.running == 0;
  }
}

// Run `body` as a kernel, this many blocks at a time. Throws std::runtime_error with what went wrong.
inline void run(const std::function<void()>& body, int blocks, int threads, std::size_t shared, int together) {
  if (threads < 1 || threads > kMostThreads) throw std::runtime_error("a block has 1 to 1024 threads");
  if (shared > kShared) throw std::runtime_error("more than 227 KiB of shared memory a block");
  kernel = body;
  grid = blocks;
  block_size = threads;
  broken.clear();
  stores.clear();
  counts = {};
  dice.seed(seed);
  Blocks resident;
  for (int first = 0; first < blocks; first += together) {
    resident.resize(std::min(together, blocks - first));
    for (std::size_t i = 0; i < resident.size(); ++i) {
      if (resident[i] == nullptr) resident[i] = std::make_unique<Block>();
      start(*resident[i], first + static_cast<int>(i));
    }
    schedule(resident);
    if (!broken.empty()) throw std::runtime_error(broken);
  }
}

}  // namespace gpu
