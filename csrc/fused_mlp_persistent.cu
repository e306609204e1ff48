// The third generation of the MLP kernel: one launch, one block on each multiprocessor, weights always in flight.
//
// A block owns a run of intermediate neurons and a run of outputs. It walks through its weights as one list of steps,
// first its rows of w_in, then its rows of w_out, slab by slab. The copy engine fills a ring of slots in shared memory
// as far ahead as the ring is long, and the warps multiply what has arrived, each for itself, without waiting for one
// another. The weights do not depend on x, so the ring runs on into w_out while the norm is worked out and while the
// grid waits for the last neuron: memory does not idle.
//
//   copy engine   | w_in slabs ............ | w_out slabs .......... |
//   warps          norm | multiply w_in ......| grid barrier | multiply w_out | + residual
#include "async_copy.cuh"
#include "fused_mlp.h"
#include "fused_plan.h"
#include "kernel_common.cuh"
#include "tile_dot.cuh"

namespace six_engines {
namespace {

constexpr int kThreads = kFusedWarps * kWarpSize;
constexpr bool kOverlapLaunch = true;
constexpr int kInSlices = kFusedWarps / 2;  // half of the warps take the first tile of a slot, half the second
constexpr int kOutSlices = kFusedWarps;

// One counter a device is enough: the grid fills the GPU, so only one grid of this kind runs at a time.
__device__ unsigned grid_counter;

// All blocks of the grid arrive before any leaves. The first block adds 2^31 less the others' ones, so each round flips
// the top bit and leaves the rest at zero: nothing to reset, and a replayed graph needs no fresh counter.
__device__ __forceinline__ void grid_barrier() {
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
    unsigned before, now;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(&grid_counter), "r"(add) : "memory");
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(&grid_counter) : "memory");
    } while (((before ^ now) & 0x80000000u) == 0);
  }
  __syncthreads();
}

// Where a step's data are: the slot, and how often that slot has been used before (modulo 2).
struct Cursor {
  int step, slot, parity;
  __device__ __forceinline__ void advance(int slots) {
    ++step;
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

template <typename T, bool kGated, int kRows>
class Block {
 public:
  using Dot = TileDot<T, kRows>;
  static constexpr int kAhead = kRows > 8 ? 1 : 3;  // as many as there are registers for
  static constexpr int kNeurons = kGated ? kTileRows : 2 * kTileRows;  // a slot: gate and up rows, or two tiles of up

  __device__ __forceinline__ Block(const MlpProblem& problem, const Plan& layout, char* memory)
      : p(problem), plan(layout), shared(memory), warp(threadIdx.x / kWarpSize), lane(threadIdx.x % kWarpSize) {
    neuron_begin = int(int64_t(p.inter) * blockIdx.x / gridDim.x);
    neuron_end = int(int64_t(p.inter) * (blockIdx.x + 1) / gridDim.x);
    output_begin = int(int64_t(p.hidden) * blockIdx.x / gridDim.x);
    output_end = int(int64_t(p.hidden) * (blockIdx.x + 1) / gridDim.x);
    in_tiles = (neuron_end - neuron_begin + kNeurons - 1) / kNeurons;
    out_tiles = (output_end - output_begin + kTileRows - 1) / kTileRows;
    in_steps = in_tiles * plan.in.count;
    steps = in_steps + out_tiles * plan.out.count;
    full = reinterpret_cast<uint64_t*>(shared + plan.barrier_offset);
    readers = reinterpret_cast<int*>(full + kMaxSlots);
  }

  __device__ __forceinline__ void run() {
    if (warp == 0) {  // one warp, so that the data are asked for, and arrive, in the order in which they are used
      if (lane < plan.slots) {
        barrier_init(&full[lane]);
        readers[lane] = 0;
      }
      barrier_init_fence();
      __syncwarp();
      for (int step = 0; step < min(plan.slots, steps); ++step) request(step, step);
    }
    normalise();
    __syncthreads();
    Cursor cursor{0, 0, 0};
    up(cursor);
    grid_barrier();
    down(cursor);
  }

 private:
  // One warp asks for the weights of a step: a copy a row, each issued by its own lane.
  __device__ __forceinline__ void request(int step, int slot) {
    const bool in = step < in_steps;
    const Slabs& slabs = in ? plan.in : plan.out;
    const int columns = in ? p.hidden : p.inter, index = in ? step : step - in_steps;
    const int tile = index / slabs.count, start = (index - tile * slabs.count) * slabs.width;
    const int half = lane / kTileRows;  // 1: up rows, or the second tile of neurons
    const bool up_row = in && kGated && half == 1;
    const int first = in ? neuron_begin + tile * kNeurons : output_begin + tile * kTileRows;
    const int row = first + lane % kTileRows + (in && !kGated ? half * kTileRows : 0);
    const bool mine = half < (in ? 2 : 1) && row < (in ? neuron_end : output_end);
    const uint32_t bytes = min(slabs.width, columns - start) * sizeof(T);
    const int copies = __popc(__ballot_sync(kAllLanes, mine));
    if (lane == 0) barrier_expect(&full[slot], bytes * copies);
    __syncwarp();
    if (mine) {
      const T* weights = static_cast<const T*>(in ? p.w_in : p.w_out);
      const size_t source = (size_t(row) + (up_row ? p.inter : 0)) * columns + start;
      copy_bulk(shared + slot * plan.slot_bytes + lane * slabs.pitch, weights + source, bytes, &full[slot]);
    }
  }

  // This warp has read the slot. The last of the 16 to say so asks for the slot's next data.
  __device__ __forceinline__ void release(const Cursor& cursor) {
    if (cursor.step + plan.slots >= steps) return;
    int before = 0;
    __syncwarp();
    if (lane == 0) {
      __threadfence_block();
      before = atomicAdd(&readers[cursor.slot], 1);
      if (before == kFusedWarps - 1) {
        readers[cursor.slot] = 0;
        __threadfence_block();
      }
    }
    if (__shfl_sync(kAllLanes, before, 0) == kFusedWarps - 1) request(cursor.step + plan.slots, cursor.slot);
  }

  // The normalised x of all rows, into shared memory. Every block does it again: x is a few KB in the L2 cache.
  __device__ __forceinline__ void normalise() {
    constexpr int kCount = Vec16<T>::kCount;
    const T *weight = static_cast<const T*>(p.norm_weight), *bias = static_cast<const T*>(p.norm_bias);
    for (int r = kFusedWarps - 1 - warp; r < p.rows; r += kFusedWarps) {  // warp 0, which has other work, last
      const T* row = static_cast<const T*>(p.x) + size_t(r) * p.hidden;
      const RowStats stats = row_stats<T, !kGated>(row, p.hidden, p.eps);
      T* target = reinterpret_cast<T*>(shared + plan.x_offset + r * plan.x_pitch);
#pragma unroll 4
      for (int k = lane * kCount; k < p.hidden; k += kWarpSize * kCount) {
        store16(target + k, normalise16<T, !kGated>(load16(row + k), stats, weight + k, bias + k));
      }
    }
  }

  // [batch, warps, rows, 8] partial sums.
  __device__ __forceinline__ float* partial(int tile, int of_warp) {
    float* all = reinterpret_cast<float*>(shared + plan.partial_offset);
    return all + tile * plan.tile_floats + of_warp * p.rows * kTileRows;
  }

  template <int kCount>
  __device__ __forceinline__ float sum_partials(int tile, int first_warp, int r, int column) {
    const float* values = partial(tile, first_warp) + r * kTileRows + column;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kCount; ++w) sum += values[w * p.rows * kTileRows];
    return sum;
  }

  // neurons = act(x @ w_in.T) of this block, into scratch.
  __device__ __forceinline__ void up(Cursor& cursor) {
    const int half = warp / kInSlices, slice = warp % kInSlices;
    const T* x = reinterpret_cast<const T*>(shared + plan.x_offset);
    T* neurons = static_cast<T*>(p.scratch);
    Dot dot;
    typename Dot::Input input;
    for (int begin = 0; begin < in_tiles; begin += plan.batch) {
      const int count = min(plan.batch, in_tiles - begin);
      for (int tile = 0; tile < count; ++tile) {
        dot.clear();
        for (int slab = 0; slab < plan.in.count; ++slab, cursor.advance(plan.slots)) {
          const int start = slab * plan.in.width, width = min(plan.in.width, p.hidden - start);
          if (plan.in.count > 1 || cursor.step == 0) {  // one slab: the input stays in registers
            Dot::template load<kInSlices, false>(input, x + start, plan.x_pitch / int(sizeof(T)), p.rows, width, slice);
          }
          barrier_wait(&full[cursor.slot], cursor.parity);
          const char* weights = shared + cursor.slot * plan.slot_bytes + half * kTileRows * plan.in.pitch;
          dot.template multiply<kInSlices>(input, weights, plan.in.pitch, width, p.rows, slice);
          release(cursor);
        }
        dot.store(partial(tile, warp), p.rows);
      }
      __syncthreads();
      const int first = neuron_begin + begin * kNeurons, found = min(count * kNeurons, neuron_end - first);
      for (int i = threadIdx.x; i < found * p.rows; i += kThreads) {
        const int r = p.rows == 1 ? 0 : i / found, n = i - r * found;
        const int tile = n / kNeurons, column = n % kTileRows;
        const int source = kGated || n % kNeurons < kTileRows ? 0 : kInSlices;
        float value = silu(sum_partials<kInSlices>(tile, source, r, column));
        if (kGated) value *= sum_partials<kInSlices>(tile, kInSlices, r, column);
        neurons[size_t(r) * p.inter + first + n] = from_float<T>(value);
      }
      if (begin + count < in_tiles) __syncthreads();
    }
  }

  // out = neurons @ w_out.T + residual, for this block's outputs.
  __device__ __forceinline__ void down(Cursor& cursor) {
    const T *neurons = static_cast<const T*>(p.scratch), *residual = static_cast<const T*>(p.residual);
    T* out = static_cast<T*>(p.out);
    Dot dot;
    // The neurons of several slabs are on their way at a time: they come from other multiprocessors, half a microsecond
    // away. Slab s is in inputs[s % kAhead]; where all slabs of a row fit, they stay for all tiles.
    typename Dot::Input inputs[kAhead];
    auto load = [&](typename Dot::Input& input, int slab) {
      const int start = slab * plan.out.width, width = min(plan.out.width, p.inter - start);
      Dot::template load<kOutSlices, true>(input, neurons + start, p.inter, p.rows, width, warp);
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < plan.out.count) load(inputs[i], i);
    }
    for (int begin = 0; begin < out_tiles; begin += plan.batch) {
      const int count = min(plan.batch, out_tiles - begin);
      for (int tile = 0; tile < count; ++tile) {
        dot.clear();
        for (int group = 0; group < plan.out.count; group += kAhead) {
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            const int slab = group + i;
            if (slab >= plan.out.count) break;
            const int width = min(plan.out.width, p.inter - slab * plan.out.width);
            barrier_wait(&full[cursor.slot], cursor.parity);
            const char* weights = shared + cursor.slot * plan.slot_bytes;
            dot.template multiply<kOutSlices>(inputs[i], weights, plan.out.pitch, width, p.rows, warp);
            if (plan.out.count > kAhead) load(inputs[i], slab + kAhead < plan.out.count ? slab + kAhead : i);
            release(cursor);
            cursor.advance(plan.slots);
          }
        }
        dot.store(partial(tile, warp), p.rows);
      }
      __syncthreads();
      const int first = output_begin + begin * kTileRows, found = min(count * kTileRows, output_end - first);
      for (int i = threadIdx.x; i < found * p.rows; i += kThreads) {
        const int r = p.rows == 1 ? 0 : i / found, n = i - r * found;
        const size_t index = size_t(r) * p.hidden + first + n;
        const float skip = kGated ? to_float(residual[index]) : 0.0f;
        out[index] = from_float<T>(skip + sum_partials<kOutSlices>(n / kTileRows, 0, r, n % kTileRows));
      }
      if (begin + count < out_tiles) __syncthreads();
    }
  }

  const MlpProblem& p;
  const Plan& plan;
  char* shared;
  uint64_t* full;  // a barrier a slot: its data are there
  int* readers;    // how many warps have read the slot
  int warp, lane;
  int neuron_begin, neuron_end, output_begin, output_end, in_tiles, out_tiles, in_steps, steps;
};

template <typename T, bool kGated, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    fused_kernel(const __grid_constant__ MlpProblem problem, const __grid_constant__ Plan plan) {
#if __CUDA_ARCH__ >= 900
  // The next kernel of the stream may be made ready while this one runs, and this one was while the last one ran; here
  // it waits until that one has finished and all that it wrote can be seen.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  extern __shared__ __align__(128) char shared[];
  Block<T, kGated, kRows>(problem, plan, shared).run();
#endif
}

struct Device {
  int multiprocessors = 0, major = 0, shared_limit = 0;
};

cudaError_t describe(Device& device) {
  int id = 0;
  if (cudaError_t error = cudaGetDevice(&id)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, id)) return error;
  return cudaDeviceGetAttribute(&device.shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
}

Plan plan_for(const MlpProblem& p, int rows, const Device& device) {
  return make_plan(p, rows, device.multiprocessors, kStepsPerSlab * kBytesPerStep, kTileRows, device.shared_limit);
}

template <typename T, bool kGated, int kRows>
cudaError_t launch(MlpProblem p, const Device& device, cudaStream_t stream) {
  Plan plan = plan_for(p, p.rows, device);
  const auto kernel = fused_kernel<T, kGated, kRows>;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes)) {
    return error;
  }
  cudaLaunchAttribute attributes[2] = {};
  // Cooperative: the driver starts all blocks at once or none, so two such grids cannot each hold half of the GPU.
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  // The launch itself overlaps the end of the kernel before; see the first lines of fused_kernel.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(device.multiprocessors);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = kOverlapLaunch ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, p, plan);
}

template <typename T>
cudaError_t launch_type(const MlpProblem& p, const Device& device, cudaStream_t stream) {
  if (p.gated) return p.rows > 8 ? launch<T, true, 16>(p, device, stream) : launch<T, true, 8>(p, device, stream);
  return p.rows > 8 ? launch<T, false, 16>(p, device, stream) : launch<T, false, 8>(p, device, stream);
}

}  // namespace

int fused_rows_per_launch(const MlpProblem& p) {
  Device device;
  if (describe(device) != cudaSuccess || device.major < 9) return 0;
  int rows = kRowsPerLaunch;
  while (rows > 0 && plan_for(p, rows, device).slots == 0) rows /= 2;
  return rows;
}

cudaError_t launch_mlp_fused(const MlpProblem& p, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = describe(device)) return error;
  const int limit = fused_rows_per_launch(p);
  if (limit == 0) return cudaErrorNotSupported;
  for (int begin = 0; begin < p.rows; begin += limit) {
    const MlpProblem part = rows_of(p, begin, std::min(limit, p.rows - begin));
    cudaError_t error = cudaErrorInvalidValue;
    switch (p.dtype) {
      case DType::kFloat32: error = launch_type<float>(part, device, stream); break;
      case DType::kFloat16: error = launch_type<__half>(part, device, stream); break;
      case DType::kBFloat16: error = launch_type<__nv_bfloat16>(part, device, stream); break;
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace six_engines
