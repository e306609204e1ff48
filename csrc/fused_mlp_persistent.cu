// The third generation of the MLP kernel: one launch, one block on each multiprocessor, weights always in flight.
//
// A block owns a run of intermediate neurons and a run of outputs. It walks through its weights as one list of steps,
// first its rows of w_in, then its rows of w_out, slab by slab. The copy engine fills a ring of slots in shared memory
// as far ahead as the ring is long; the warps multiply what has arrived. The weights do not depend on x, so the ring
// runs on into w_out while the norm is worked out and while the grid waits for the last neuron: memory never idles.
//
//   copy engine   | w_in slabs ............ | w_out slabs .......... |
//   warps          norm | multiply w_in ......| grid barrier | multiply w_out | + residual
#include "async_copy.cuh"
#include "fused_mlp.h"
#include "kernel_common.cuh"
#include "tile_dot.cuh"

#include <cooperative_groups.h>

#include <algorithm>

namespace six_engines {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kMaxSlots = 16;
constexpr int kMinSlots = 3;  // fewer could not keep the memory busy

// How the rows of one matrix are cut into slabs of columns.
struct Slabs {
  int width;  // columns of a slab; the last one may be narrower
  int count;  // slabs a row
  int pitch;  // bytes from one row of a slab to the next
};

struct Plan {
  Slabs in, out;
  int x_pitch;  // bytes between the normalised rows of x
  int slots, slot_bytes;
  int x_offset, partial_offset, barrier_offset, shared_bytes;  // bytes, after the ring
};

// Rows 64 bytes apart, modulo the 128 bytes of all banks: two rows read side by side share no bank.
constexpr int padded(int bytes) { return (bytes - 64 + 127) / 128 * 128 + 64; }

template <typename T, bool kGated, int kRows>
class Block {
 public:
  using Dot = TileDot<T, kRows, kWarps>;

  __device__ Block(const MlpProblem& problem, const Plan& layout, char* shared) : p(problem), plan(layout), ring(shared) {
    neuron_begin = int(int64_t(p.inter) * blockIdx.x / gridDim.x);
    neuron_end = int(int64_t(p.inter) * (blockIdx.x + 1) / gridDim.x);
    output_begin = int(int64_t(p.hidden) * blockIdx.x / gridDim.x);
    output_end = int(int64_t(p.hidden) * (blockIdx.x + 1) / gridDim.x);
    in_steps = tiles(neuron_begin, neuron_end) * plan.in.count;
    steps = in_steps + tiles(output_begin, output_end) * plan.out.count;
    barriers = reinterpret_cast<uint64_t*>(shared + plan.barrier_offset);
  }

  __device__ void run() {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < plan.slots; ++slot) barrier_init(&barriers[slot]);
      barrier_init_fence();
    }
    __syncthreads();
    if (warp() < min(plan.slots, steps)) request(warp());
    normalise();
    __syncthreads();
    up();
    cooperative_groups::this_grid().sync();
    down();
#endif
  }

 private:
  static __device__ int warp() { return threadIdx.x / kWarpSize; }
  static __device__ int lane() { return threadIdx.x % kWarpSize; }
  static __device__ int tiles(int begin, int end) { return (end - begin + kTileRows - 1) / kTileRows; }

  // One warp asks for the weights of a step: a copy a row, each issued by its own lane.
  __device__ void request(int step) {
#if __CUDA_ARCH__ >= 900
    const bool in = step < in_steps;
    const Slabs& slabs = in ? plan.in : plan.out;
    const int columns = in ? p.hidden : p.inter;
    const int index = in ? step : step - in_steps;
    const int first = (in ? neuron_begin : output_begin) + index / slabs.count * kTileRows;
    const int rows = min(kTileRows, (in ? neuron_end : output_end) - first);
    const int start = index % slabs.count * slabs.width;
    const uint32_t bytes = min(slabs.width, columns - start) * sizeof(T);
    const int tile = lane() / kTileRows, row = lane() % kTileRows;  // tile 1: the up rows
    const int tile_count = in && kGated ? 2 : 1;
    uint64_t* barrier = &barriers[step % plan.slots];
    if (lane() == 0) barrier_expect(barrier, bytes * rows * tile_count);
    __syncwarp();
    if (tile < tile_count && row < rows) {
      const T* weights = static_cast<const T*>(in ? p.w_in : p.w_out);
      const size_t source = size_t(first + row + tile * p.inter) * columns + start;
      copy_bulk(slot(step) + lane() * slabs.pitch, weights + source, bytes, barrier);
    }
#endif
  }

  __device__ char* slot(int step) { return ring + size_t(step % plan.slots) * plan.slot_bytes; }

  // The normalised x of all rows, into shared memory. Every block does it again: x is a few KB in the L2 cache.
  __device__ void normalise() {
    constexpr int kCount = Vec16<T>::kCount;
    for (int r = warp(); r < p.rows; r += kWarps) {
      const T* row = static_cast<const T*>(p.x) + size_t(r) * p.hidden;
      const RowStats stats = row_stats<T, !kGated>(row, p.hidden, p.eps);
      for (int k = lane() * kCount; k < p.hidden; k += kWarpSize * kCount) {
        store16(x_row(r) + k, normalise16<T, !kGated>(load16(row + k), stats, static_cast<const T*>(p.norm_weight) + k,
                                                      static_cast<const T*>(p.norm_bias) + k));
      }
    }
  }

  __device__ T* x_row(int r) { return reinterpret_cast<T*>(ring + plan.x_offset + r * plan.x_pitch); }

  // [kWarps, rows, 16] partial sums; two of them in turns, so that one tile is added up while the next is multiplied.
  __device__ float* partials(int tile) {
    return reinterpret_cast<float*>(ring + plan.partial_offset) + tile % 2 * kWarps * p.rows * 2 * kTileRows;
  }

  // Ends a step: the slot may be filled again, and the partial sums are visible.
  __device__ void finish(int step) {
    __syncthreads();
    if (step + plan.slots < steps && warp() == step % kWarps) request(step + plan.slots);
  }

  __device__ void arrived(int step) {
#if __CUDA_ARCH__ >= 900
    barrier_wait(&barriers[step % plan.slots], step / plan.slots % 2);
#endif
  }

  __device__ float sum_of_warps(const float* partial, int r, int column) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[(w * p.rows + r) * 2 * kTileRows + column];
    return sum;
  }

  __device__ void up() {
    constexpr int kTiles = kGated ? 2 : 1;
    Dot dot;
    for (int step = 0; step < in_steps; ++step) {
      const int tile = step / plan.in.count, slab = step % plan.in.count;
      const int start = slab * plan.in.width, width = min(plan.in.width, p.hidden - start);
      if (slab == 0) dot.clear();
      typename Dot::Input input;
      Dot::template load<false>(input, x_row(0) + start, plan.x_pitch / sizeof(T), p.rows, width);
      arrived(step);
      dot.template multiply<kTiles>(input, slot(step), plan.in.pitch, width, p.rows);
      const bool last = slab == plan.in.count - 1;
      if (last) dot.template store<kTiles>(partials(tile) + warp() * p.rows * 2 * kTileRows, p.rows);
      finish(step);
      const int r = threadIdx.x / kTileRows, j = threadIdx.x % kTileRows;
      const int neuron = neuron_begin + tile * kTileRows + j;
      if (last && r < p.rows && neuron < neuron_end) {
        float value = silu(sum_of_warps(partials(tile), r, j));
        if (kGated) value *= sum_of_warps(partials(tile), r, kTileRows + j);
        static_cast<T*>(p.scratch)[size_t(r) * p.inter + neuron] = from_float<T>(value);
      }
    }
  }

  __device__ void down() {
    const T* neurons = static_cast<const T*>(p.scratch);
    auto load = [&](typename Dot::Input& input, int step) {
      const int start = (step - in_steps) % plan.out.count * plan.out.width;
      Dot::template load<true>(input, neurons + start, p.inter, p.rows, min(plan.out.width, p.inter - start));
    };
    Dot dot;
    typename Dot::Input input, next;
    load(next, in_steps);
    for (int step = in_steps; step < steps; ++step) {
      const int tile = (step - in_steps) / plan.out.count, slab = (step - in_steps) % plan.out.count;
      const int width = min(plan.out.width, p.inter - slab * plan.out.width);
      const int r = threadIdx.x / kTileRows;
      const int output = output_begin + tile * kTileRows + int(threadIdx.x) % kTileRows;
      const bool writes = slab == plan.out.count - 1 && r < p.rows && output < output_end;
      const size_t index = size_t(r) * p.hidden + output;
      if (slab == 0) dot.clear();
      input = next;
      if (step + 1 < steps) load(next, step + 1);  // in flight during this step
      float value = kGated && writes ? to_float(static_cast<const T*>(p.residual)[index]) : 0.0f;
      arrived(step);
      dot.template multiply<1>(input, slot(step), plan.out.pitch, width, p.rows);
      if (slab == plan.out.count - 1) {
        dot.template store<1>(partials(tile) + warp() * p.rows * 2 * kTileRows, p.rows);
      }
      finish(step);
      if (writes) {
        value += sum_of_warps(partials(tile), r, threadIdx.x % kTileRows);
        static_cast<T*>(p.out)[index] = from_float<T>(value);
      }
    }
  }

  const MlpProblem& p;
  const Plan& plan;
  char* ring;
  uint64_t* barriers;
  int neuron_begin, neuron_end, output_begin, output_end, in_steps, steps;
};

template <typename T, bool kGated, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    fused_kernel(const __grid_constant__ MlpProblem problem, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) char shared[];
  Block<T, kGated, kRows>(problem, plan, shared).run();
}

Slabs cut(int columns, int max_width, int element_bytes) {
  Slabs slabs;
  slabs.count = (columns + max_width - 1) / max_width;
  slabs.width = std::min(columns, ((columns + slabs.count - 1) / slabs.count + 31) / 32 * 32);
  slabs.count = (columns + slabs.width - 1) / slabs.width;
  slabs.pitch = padded(slabs.width * element_bytes);
  return slabs;
}

// The layout of shared memory for rows rows; slots is 0 where it does not fit.
Plan make_plan(const MlpProblem& p, int rows, int shared_limit) {
  const int element = p.dtype == DType::kFloat32 ? 4 : 2;
  const int max_width = kStepsPerSlab * kWarps * 64 / element;  // what TileDot takes: 64 bytes a warp and step
  Plan plan;
  const int tiles_in = p.gated ? 2 : 1;
  plan.in = cut(p.hidden, max_width / tiles_in, element);
  plan.slot_bytes = std::max(tiles_in * kTileRows * plan.in.pitch, 16 * 1024);
  plan.out = cut(p.inter, std::min(max_width, (plan.slot_bytes / kTileRows - 128) / element / 32 * 32), element);
  plan.x_pitch = padded(p.hidden * element);
  const int64_t x_bytes = int64_t(rows) * plan.x_pitch;
  const int partial_bytes = 2 * kWarps * rows * 2 * kTileRows * int(sizeof(float));
  const int64_t ring_bytes = shared_limit - x_bytes - partial_bytes - kMaxSlots * int(sizeof(uint64_t)) - 256;
  plan.slots = int(std::min<int64_t>(kMaxSlots, std::max<int64_t>(0, ring_bytes / plan.slot_bytes)));
  if (plan.slots < kMinSlots) plan.slots = 0;
  plan.x_offset = plan.slots * plan.slot_bytes;
  plan.partial_offset = plan.x_offset + int((x_bytes + 127) / 128 * 128);
  plan.barrier_offset = plan.partial_offset + partial_bytes;
  plan.shared_bytes = plan.barrier_offset + kMaxSlots * int(sizeof(uint64_t));
  return plan;
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

template <typename T, bool kGated, int kRows>
cudaError_t launch(const MlpProblem& p, const Device& device, cudaStream_t stream) {
  Plan plan = make_plan(p, p.rows, device.shared_limit);
  MlpProblem problem = p;
  auto kernel = fused_kernel<T, kGated, kRows>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
  if (error != cudaSuccess) return error;
  void* arguments[] = {&problem, &plan};
  // Cooperative: the driver starts all blocks at once or none, so two such kernels cannot wait for each other's place.
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(device.multiprocessors), dim3(kThreads),
                                     arguments, plan.shared_bytes, stream);
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
  while (rows > 0 && make_plan(p, rows, device.shared_limit).slots == 0) rows /= 2;
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
