// The smallest persistent kernel: the MLPs of all layers of a model, for one row, in one launch.
//
//     x += down(silu(gate(norm(x))) * up(norm(x)))           24 times with Qwen2.5-0.5B
//
// One row needs next to no arithmetic, but a layer's 26 MB of weights have to come out of memory: 6.1 us at the 4.28
// TB/s that an H200 copies with. Kernel by kernel it takes longer: nothing is loaded while one ends and the next one
// starts. Here each multiprocessor has one block, which stays for all layers and owns the same few rows of every
// matrix: of 132 blocks each has 36 or 38 of the 4,864 neurons (a gate row and an up row) and 6 or 7 of the 896 rows of
// down. But a product needs the results of all blocks. How do they get from one multiprocessor to all others?
//
// VERSION 1: a barrier. A block stores its results, makes them visible, counts itself in, waits until all blocks have
//   been counted, and only then loads what the others have stored. These are four trips to L2, one after the other,
//   two times per layer. No weights are on their way meanwhile.
// VERSION 2: no barrier. Each result travels in one word of 8 bytes with a flag, the number of its launch and layer. A
//   reader loads the word until it has the right flag, and then has the result as well: one store, one load.
// VERSION 3: weights do not depend on results. So one more warp, the producer, copies them into a ring of slots in
//   shared memory, layer after layer. It waits for free slots only, so weights come while the others wait.
//
// `python -m stage_f_graph_tp.megakernel.mini` runs all three; by hand, in the repository's folder:
//     nvcc -O3 -arch=sm_90 -DVERSION=3 -Icsrc -o mini csrc/stage_f/mini.cu && ./mini
// Without a GPU it is a small model on the emulator (csrc/emulator/gpu.h), in which a wait that is missing shows.
#include "stage_f/primitives.cuh"  // Word: 8 bytes, a value (payload) and its flag; publish stores one, peek2 loads two

using namespace six_engines;
using T = __nv_bfloat16;

#ifdef CUDA_EMULATOR
constexpr int kLayers = 3, kHidden = 104, kIntermediate = 2080;
#else
constexpr int kLayers = 24, kHidden = 896, kIntermediate = 4864;  // Qwen2.5-0.5B
#endif
constexpr float kEps = 1e-6f;
constexpr int kWarps = 16, kWorkers = kWarps * 32, kThreads = kWorkers + (VERSION == 3 ? 32 : 0);

// Work is dealt to warps in units: a neuron (its gate row and its up row), or a quarter of a row of down. In memory the
// units of a block follow each other.
constexpr int kQuarter = kIntermediate / 4;
constexpr int kMostUnits = 1024;  // of a block
constexpr int kSlotUnits = 8, kSlotElements = kSlotUnits * (2 * kHidden > kQuarter ? 2 * kHidden : kQuarter);
constexpr int kSlots = VERSION == 3 ? 7 : 1;  // 7 slots of 28 KB on the GPU: a layer's share of one block
static_assert(kHidden % 8 == 0 && kQuarter % 8 == 0, "a lane multiplies 8 columns at a time");
static_assert(kHidden <= 2 * kWorkers && kWarps % 4 == 0, "a thread has two of x, a warp always the same quarter");

struct Mlps {         // what the host passes; all pointers are to the GPU's memory
  const T* norm;      // [layers, hidden]
  const T* gate_up;   // [layers, 2 * intermediate, hidden], gate rows first
  const T* down;      // [layers, hidden, intermediate]
  const float* x;     // [hidden]
  float* y;           // [hidden]: x after all layers
  Word* hidden;       // [hidden]: x as it is handed over, a float in each word
  Word* activation;   // [intermediate / 2]: silu(gate) * up, two bfloat16 in each word
  unsigned* arrived;  // blocks that have come to a barrier, since the host set words and counter to zero
  unsigned launch;    // number of launches before this one
};

struct Shared {  // a block's shared memory
  alignas(128) T ring[kSlots][kSlotElements];
  alignas(128) T input[kIntermediate];  // of the product: x times the norm's weights, or the activation
  float squares[kWarps];                // of x, added up by each warp
  float sums[2][kMostUnits];            // each unit's result; [1]: of up rows
  uint64_t full[kSlots], empty[kSlots];
};
static_assert(sizeof(Shared) <= 227 * 1024, "a block has 227 KB");

// The rows that this block owns, a multiple of `granule`; others have as many, or one granule more or less.
struct Slice { int first, count; };
__device__ __forceinline__ Slice own_slice(int rows, int granule) {
  const int first = rows / granule * blockIdx.x / gridDim.x, end = rows / granule * (blockIdx.x + 1) / gridDim.x;
  return {first * granule, (end - first) * granule};
}

// ---- hand-offs -----------------------------------------------------------------------------------------------------

// No block leaves before all have come for the `number`th time. The counter only counts up, so nothing is ever reset.
__device__ __forceinline__ void grid_barrier(unsigned* arrived, unsigned number) {
  sync_some_threads<kWorkers>();  // all threads of this block have stored their results
  if (threadIdx.x == 0) {
    __threadfence();  // the results are visible before the block is counted
    atomicAdd(arrived, 1u);
    while (atomicAdd(arrived, 0u) < number * gridDim.x) {
    }
    __threadfence();  // and nothing is loaded before all are
  }
  sync_some_threads<kWorkers>();  // the other threads wait here
}

// The words that all blocks have published, two at a time: use(index, pair). A thread's loads are all under way before
// it looks at the first; what has not arrived, it loads again. A word of another launch or layer has another flag.
template <int kWords, typename Use>
__device__ __forceinline__ void receive(const Word* words, uint32_t flag, Use use) {
  constexpr int kPairs = (kWords / 2 + kWorkers - 1) / kWorkers;  // of a thread
  Word pair[kPairs][2] = {};
  const auto has_arrived = [&](int i) { return has_flag(pair[i][0], flag) && has_flag(pair[i][1], flag); };
  const auto index = [](int i) { return 2 * int(i * kWorkers + threadIdx.x); };
  bool all;
  do {
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      if (index(i) < kWords && !has_arrived(i)) peek2(words + index(i), pair[i]);
    all = true;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) all = all && (index(i) >= kWords || has_arrived(i));
  } while (VERSION >= 2 && !__all_sync(kAllLanes, all));  // (after a barrier all is there, and flags say nothing)
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    if (index(i) < kWords) use(index(i), pair[i]);
}

// ---- the stream of weights, version 3 ------------------------------------------------------------------------------
// A slot takes 8 units. `full`: its weights have arrived. `empty`: each of the units was multiplied. `next` counts
// slots from the kernel's start, in the producer as in the workers; its parity keeps the signal of one round of the
// ring from being taken for that of the next.
__device__ __forceinline__ uint32_t parity(unsigned next) { return next / kSlots & 1; }

// The producer's part of a product: copies units of kHalves rows each (the second `stride` behind the first).
template <int kHalves, int kColumns>
__device__ __forceinline__ void stream(Shared& s, const T* weights, size_t stride, int units, unsigned& next) {
  for (int unit = 0; unit < units; unit += kSlotUnits, ++next) {
    const int slot = next % kSlots, count = min(kSlotUnits, units - unit);
    const uint32_t full = shared_address(&s.full[slot]), empty = shared_address(&s.empty[slot]);
    const uint32_t bytes = count * kColumns * sizeof(T);
    barrier_wait(empty, parity(next) ^ 1);  // (in the first round all slots are empty, and this passes)
    if (count < kSlotUnits) barrier_arrive(empty, kSlotUnits - count);  // for units that there are not
    barrier_expect(full, kHalves * bytes);
    for (int half = 0; half < kHalves; ++half)
      bulk_copy(shared_address(s.ring[slot] + half * kSlotUnits * kColumns),
                weights + half * stride + unit * kColumns, bytes, full);
  }
}

// ---- products ------------------------------------------------------------------------------------------------------

// The workers' part: warp w takes units w, w + 16, ..., whose sums go to s.sums. Its lanes multiply the same columns of
// all units, so each keeps its share of the input, from column `from` on, in registers.
template <int kHalves, int kColumns>
__device__ __forceinline__ void multiply(Shared& s, const T* weights, size_t stride, int units, int from,
                                         unsigned& next) {
  constexpr int kVectors = (kColumns + 255) / 256;  // of 8 columns; a warp loads 32 of them, 512 bytes in a row
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float x[kVectors][8] = {};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = (i * 32 + lane) * 8;
    if (column >= kColumns) continue;
    const Vec16<T> vector = load16(s.input + from + column);
    for (int j = 0; j < 8; ++j) x[i][j] = to_float(vector.values[j]);
  }
  for (int unit = warp; unit < units; unit += kWarps) {
    const unsigned number = next + unit / kSlotUnits;
    const int slot = number % kSlots;
    if (VERSION == 3) barrier_wait(shared_address(&s.full[slot]), parity(number));
    const T* row = VERSION == 3 ? s.ring[slot] + unit % kSlotUnits * kColumns : weights + unit * kColumns;
    const size_t to_half = VERSION == 3 ? kSlotUnits * kColumns : stride;
    float sum[kHalves] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = (i * 32 + lane) * 8;
      if (column >= kColumns) continue;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const Vec16<T> vector = load16(row + half * to_half + column);
        for (int j = 0; j < 8; ++j) sum[half] += to_float(vector.values[j]) * x[i][j];
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const float total = warp_sum(sum[half]);
      if (lane == 0) s.sums[half][unit] = total;
    }
    if (VERSION == 3 && lane == 0) barrier_arrive(shared_address(&s.empty[slot]));  // all lanes' loads are in its sum
  }
  next += (units + kSlotUnits - 1) / kSlotUnits;
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1) mlps_kernel(const Mlps m) {
  Shared& s = *reinterpret_cast<Shared*>(shared_memory());
  const Slice neurons = own_slice(kIntermediate, 2), rows = own_slice(kHidden, 1);
  const int thread = threadIdx.x, warp = thread / 32;
  const size_t up = size_t(kIntermediate) * kHidden;  // from a gate row to its up row
  const T* gate_up = m.gate_up + size_t(neurons.first) * kHidden;
  const T* down = m.down + size_t(rows.first) * kIntermediate;
  unsigned next = 0;
  if (VERSION == 3) {
    if (thread < kSlots) {
      barrier_init(shared_address(&s.full[thread]), 1);
      barrier_init(shared_address(&s.empty[thread]), kSlotUnits);
      barrier_init_fence();
    }
    __syncthreads();
    if (warp == kWarps) {  // the producer: one thread asks, the copy engine does the work
      for (int layer = 0; layer < kLayers && thread == kWorkers; ++layer) {
        stream<2, kHidden>(s, gate_up + layer * 2 * up, up, neurons.count, next);
        stream<1, kQuarter>(s, down + layer * up, 0, rows.count * 4, next);
      }
      return;
    }
  }

  // Why one copy of each vector is enough: a block publishes its part of an activation when it has received all of x,
  // and its part of x when it has received all of the activation. So who has received one of them knows that everyone
  // has read the other, and may overwrite it. (A block without a neuron or a row would break this.)
  uint32_t flag = m.launch * (kLayers + 1) + 1;  // never 0: that is what an unused word has
  unsigned barriers = m.launch * kLayers * 2;
  float residual = 0.0f;  // thread t keeps x of row t of the block
  if (thread < rows.count) {
    residual = m.x[rows.first + thread];
    publish(m.hidden + rows.first + thread, flagged(__float_as_uint(residual), flag));
  }
  for (int layer = 0; layer < kLayers; ++layer) {
    // The norm divides x by its root mean square, which needs all of x. The products do not wait for it: they take x
    // times the norm's weights, and their results are divided.
    const int own = min(2 * thread, kHidden - 2);  // each thread receives two of x, whose weights it has by then
    const float2 norm = unpack_pair<T>(*reinterpret_cast<const uint32_t*>(m.norm + layer * kHidden + own));
    float squares = 0.0f;
    if (VERSION == 1) grid_barrier(m.arrived, ++barriers);
    receive<kHidden>(m.hidden, flag, [&](int i, const Word (&pair)[2]) {
      const float a = __uint_as_float(payload(pair[0])), b = __uint_as_float(payload(pair[1]));
      squares += a * a + b * b;
      reinterpret_cast<uint32_t*>(s.input)[i / 2] = pack_pair<T>(a * norm.x, b * norm.y);
    });
    squares = warp_sum(squares);
    if (thread % 32 == 0) s.squares[warp] = squares;
    sync_some_threads<kWorkers>();
    multiply<2, kHidden>(s, gate_up + layer * 2 * up, up, neurons.count, 0, next);
    sync_some_threads<kWorkers>();
    if (thread < neurons.count / 2) {
      float mean = 0.0f;
      for (float sum : s.squares) mean += sum / kHidden;
      const auto neuron = [&](int i, float scale) { return silu(s.sums[0][i] * scale) * s.sums[1][i] * scale; };
      const float first = neuron(2 * thread, rsqrtf(mean + kEps)), second = neuron(2 * thread + 1, rsqrtf(mean + kEps));
      publish(m.activation + neurons.first / 2 + thread, flagged(pack_pair<T>(first, second), flag));
    }
    if (VERSION == 1) grid_barrier(m.arrived, ++barriers);  // the second of the layer
    receive<kIntermediate / 2>(m.activation, flag, [&](int i, const Word (&pair)[2]) {
      *reinterpret_cast<uint2*>(s.input + 2 * i) = make_uint2(payload(pair[0]), payload(pair[1]));
    });
    sync_some_threads<kWorkers>();
    multiply<1, kQuarter>(s, down + layer * up, 0, rows.count * 4, warp % 4 * kQuarter, next);
    sync_some_threads<kWorkers>();
    ++flag;
    if (thread < rows.count) {
      for (int quarter = 0; quarter < 4; ++quarter) residual += s.sums[0][4 * thread + quarter];
      publish(m.hidden + rows.first + thread, flagged(__float_as_uint(residual), flag));
    }
  }
  if (thread < rows.count) m.y[rows.first + thread] = residual;
}

// ---- the host: random weights, the same in plain C++, time or counts -----------------------------------------------

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

static void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s (a GPU of compute capability 9.0 is needed)\n", cudaGetErrorString(error));
  std::exit(1);
}

template <typename U>
static U* to_gpu(const std::vector<U>& values) {
  U* pointer = nullptr;
  check(cudaMalloc(&pointer, values.size() * sizeof(U)));
  check(cudaMemcpy(pointer, values.data(), values.size() * sizeof(U), cudaMemcpyHostToDevice));
  return pointer;
}

static float random_number() {  // -1 ... 1
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return int32_t(state) * (1.0f / 2147483648.0f);
}

static std::vector<T> random_weights(size_t count, float middle, float spread) {
  std::vector<T> weights(count);
  for (T& weight : weights) weight = __float2bfloat16_rn(middle + spread * random_number());
  return weights;
}

static double dot(const T* row, const std::vector<double>& x) {
  double sum = 0.0;
  for (size_t i = 0; i < x.size(); ++i) sum += double(__bfloat162float(row[i])) * x[i];
  return sum;
}

// What the kernel computes, without a rounding.
static std::vector<double> reference(const std::vector<T>& norm, const std::vector<T>& gate_up,
                                     const std::vector<T>& down, const std::vector<float>& input) {
  std::vector<double> x(input.begin(), input.end()), normed(kHidden), activation(kIntermediate);
  for (size_t layer = 0; layer < kLayers; ++layer) {
    double squares = 0.0;
    for (double value : x) squares += value * value;
    for (int i = 0; i < kHidden; ++i)
      normed[i] = x[i] / std::sqrt(squares / kHidden + kEps) * __bfloat162float(norm[layer * kHidden + i]);
    for (size_t i = 0; i < kIntermediate; ++i) {
      const T* row = gate_up.data() + (layer * 2 * kIntermediate + i) * kHidden;
      const double gate = dot(row, normed), up = dot(row + size_t(kIntermediate) * kHidden, normed);
      activation[i] = gate / (1.0 + std::exp(-gate)) * up;
    }
    for (size_t i = 0; i < kHidden; ++i)
      x[i] += dot(down.data() + (layer * kHidden + i) * kIntermediate, activation);
  }
  return x;
}

int main() {
  int blocks = 0;
  check(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0));
  blocks = std::min(blocks, std::min(kHidden, kIntermediate / 2));
  const size_t matrix = size_t(kIntermediate) * kHidden;
  const std::vector<T> norm = random_weights(kLayers * kHidden, 1.0f, 0.5f);
  const std::vector<T> gate_up = random_weights(kLayers * 2 * matrix, 0.0f, std::sqrt(3.0f / kHidden));
  const std::vector<T> down = random_weights(kLayers * matrix, 0.0f, std::sqrt(3.0f / kIntermediate));
  std::vector<float> x(kHidden), y(kHidden);
  Mlps m{to_gpu(norm), to_gpu(gate_up), to_gpu(down)};
  m.y = to_gpu(y);
  m.hidden = to_gpu(std::vector<Word>(kHidden));
  m.activation = to_gpu(std::vector<Word>(kIntermediate / 2));
  m.arrived = to_gpu(std::vector<unsigned>(1));
  check(cudaFuncSetAttribute(mlps_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared))));
  const auto launch = [&] {  // cooperative: all blocks are on the GPU at once, or else they would wait for ever
    void* arguments[] = {&m};
    check(cudaLaunchCooperativeKernel(mlps_kernel, dim3(blocks), dim3(kThreads), arguments, sizeof(Shared)));
    ++m.launch;
  };

  double difference = 0.0, largest = 0.0;
  for (int round = 0; round < 2; ++round) {  // another x: what the first launch has left must not do for the second
    for (float& value : x) value = random_number();
    m.x = to_gpu(x);
    launch();
    check(cudaMemcpy(y.data(), m.y, kHidden * sizeof(float), cudaMemcpyDeviceToHost));
    const std::vector<double> expected = reference(norm, gate_up, down, x);
    for (int i = 0; i < kHidden; ++i) {
      difference = std::max(difference, std::isfinite(y[i]) ? std::abs(y[i] - expected[i]) : INFINITY);
      largest = std::max(largest, std::abs(expected[i]));
    }
  }
  std::printf("version %d: largest difference from the reference %.4f, of values up to %.1f; ", VERSION, difference,
              largest);
  if (difference > 0.02 * largest) {  // activations are rounded to 8 bits in each layer
    std::printf("more than 2 %%: WRONG\n");
    return 1;
  }
#ifdef CUDA_EMULATOR
  const gpu::Counts& n = gpu::counts;
  std::printf("per layer %lld barriers of the grid, %lld words handed over, %lld bulk copies\n",
              n.fences / 2 / blocks / kLayers, n.stores / kLayers, n.copies / kLayers);
#else
  constexpr int kSamples = 15, kLaunches = 20;  // each launch reads more than L2 holds
  std::vector<float> times(kSamples);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  for (float& time : times) {
    check(cudaEventRecord(begin));
    for (int i = 0; i < kLaunches; ++i) launch();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    check(cudaEventElapsedTime(&time, begin, end));
  }
  std::sort(times.begin(), times.end());
  const double layer = times[kSamples / 2] * 1e3 / kLaunches / kLayers, floor = 3 * matrix * sizeof(T) / 4.28e6;
  std::printf("%.2f us per layer, %.2f x the floor (%.2f us)\n", layer, layer / floor, floor);
#endif
  return 0;
}
