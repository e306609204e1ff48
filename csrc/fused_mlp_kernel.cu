// The first two generations of the MLP kernel, and the choice of types. The third is in fused_mlp_persistent.cu.
//
// naive: one block a row, one thread a neuron, as the formula reads. Neighbouring threads read addresses a whole
//        weight row apart and one row of x keeps one multiprocessor busy: right, and hundreds of times too slow.
// warp:  one warp a weight row, so that 32 lanes read 512 neighbouring bytes at a time, on all multiprocessors.
//        It needs two launches, because the second half needs all of the first.

#include "fused_mlp.h"
#include "kernel_common.cuh"

#include <algorithm>

namespace six_engines {
namespace {

constexpr int kNaiveThreads = 256;
constexpr int kNaiveTile = 4096;  // intermediate neurons that live in shared memory at a time: 16 KB

template <typename T, bool kGated>
__global__ void __launch_bounds__(kNaiveThreads) naive_kernel(MlpProblem p) {
  __shared__ float total;
  __shared__ float neurons[kNaiveTile];
  const T* x = static_cast<const T*>(p.x) + size_t(blockIdx.x) * p.hidden;
  const T* norm_weight = static_cast<const T*>(p.norm_weight);
  const T* norm_bias = static_cast<const T*>(p.norm_bias);
  const T* w_in = static_cast<const T*>(p.w_in);
  const T* w_out = static_cast<const T*>(p.w_out);
  float* partial_out = static_cast<float*>(p.scratch) + size_t(blockIdx.x) * p.hidden;

  // The sum over the block: every thread adds to one word of shared memory.
  auto block_sum = [&](float value) {
    __syncthreads();
    if (threadIdx.x == 0) total = 0.0f;
    __syncthreads();
    atomicAdd(&total, value);
    __syncthreads();
    return total;
  };
  float mean = 0.0f;
  if (!kGated) {
    const float first = to_float(x[0]);
    float sum = 0.0f;
    for (int k = threadIdx.x; k < p.hidden; k += kNaiveThreads) sum += to_float(x[k]) - first;
    mean = first + block_sum(sum) / p.hidden;
  }
  float squares = 0.0f;
  for (int k = threadIdx.x; k < p.hidden; k += kNaiveThreads) {
    const float centred = to_float(x[k]) - mean;
    squares += centred * centred;
  }
  const float inverse = rsqrtf(block_sum(squares) / p.hidden + p.eps);

  for (int start = 0; start < p.inter; start += kNaiveTile) {
    const int tile = min(kNaiveTile, p.inter - start);
    __syncthreads();
    for (int j = threadIdx.x; j < tile; j += kNaiveThreads) {
      const T* first_row = w_in + size_t(start + j) * p.hidden;
      const T* second_row = first_row + size_t(p.inter) * p.hidden;
      float first = 0.0f, second = 0.0f;
      for (int k = 0; k < p.hidden; ++k) {
        float value = (to_float(x[k]) - mean) * inverse * to_float(norm_weight[k]);
        if (!kGated) value += to_float(norm_bias[k]);
        first += value * to_float(first_row[k]);
        if (kGated) second += value * to_float(second_row[k]);
      }
      neurons[j] = kGated ? silu(first) * second : silu(first);
    }
    __syncthreads();
    for (int o = threadIdx.x; o < p.hidden; o += kNaiveThreads) {
      float sum = start == 0 ? 0.0f : partial_out[o];
      for (int j = 0; j < tile; ++j) sum += neurons[j] * to_float(w_out[size_t(o) * p.inter + start + j]);
      if (start + tile < p.inter) {
        partial_out[o] = sum;
        continue;
      }
      const size_t index = size_t(blockIdx.x) * p.hidden + o;
      if (kGated) sum += to_float(static_cast<const T*>(p.residual)[index]);
      static_cast<T*>(p.out)[index] = from_float<T>(sum);
    }
  }
}

constexpr int kWarpThreads = 256;
constexpr int kWarps = kWarpThreads / kWarpSize;
constexpr int kStagedBytes = 32 * 1024;  // of the input, in shared memory; a longer input goes slab by slab

enum class Part { kUp, kGateUp, kDown };

// out[r, n] = f(sum over k of input[r, k] * weights[n, k]) for up to kRows rows; each warp takes one n at a time.
template <typename T, Part kPart, int kRows>
__global__ void __launch_bounds__(kWarpThreads) warp_kernel(MlpProblem p, int slab) {
  constexpr int kCount = Vec16<T>::kCount;
  constexpr bool kDown = kPart == Part::kDown;
  extern __shared__ uint4 storage[];
  __shared__ RowStats stats[kRows];
  T* staged = reinterpret_cast<T*>(storage);  // [rows, slab]
  const int columns = kDown ? p.inter : p.hidden;
  const int outputs = kDown ? p.hidden : p.inter;
  const T* input = static_cast<const T*>(kDown ? p.scratch : p.x);
  const T* weights = static_cast<const T*>(kDown ? p.w_out : p.w_in);
  T* out = static_cast<T*>(kDown ? p.out : p.scratch);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;

  if (!kDown) {  // every block works the statistics out again: cheaper than one more launch
    for (int r = warp; r < p.rows; r += kWarps) {
      const RowStats found = row_stats<T, kPart == Part::kUp>(input + size_t(r) * columns, columns, p.eps);
      if (lane == 0) stats[r] = found;
    }
  }
  for (int base = blockIdx.x * kWarps; base < outputs; base += gridDim.x * kWarps) {
    const int n = base + warp;
    float first[kRows] = {}, second[kRows] = {};
    for (int start = 0; start < columns; start += slab) {
      const int width = min(slab, columns - start);
      if (columns > slab || base == blockIdx.x * kWarps) {  // a whole input is staged once
        __syncthreads();
        for (int i = threadIdx.x * kCount; i < p.rows * width; i += kWarpThreads * kCount) {
          const int r = i / width, k = i % width;
          Vec16<T> vector = load16(input + size_t(r) * columns + start + k);
          if (!kDown) {
            const Vec16<T> scale = load16(static_cast<const T*>(p.norm_weight) + start + k);
            Vec16<T> shift;
            if (kPart == Part::kUp) shift = load16(static_cast<const T*>(p.norm_bias) + start + k);
            vector = normalise16<T, kPart == Part::kUp>(vector, stats[r], scale, shift);
          }
          store16(staged + r * slab + k, vector);
        }
        __syncthreads();
      }
      if (n >= outputs) continue;
      const T* first_row = weights + size_t(n) * columns + start;
      const T* second_row = first_row + size_t(p.inter) * columns;
#pragma unroll 4
      for (int k = lane * kCount; k < width; k += kWarpSize * kCount) {
        const Vec16<T> a = load16(first_row + k);
        Vec16<T> b;
        if (kPart == Part::kGateUp) b = load16(second_row + k);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (r >= p.rows) break;
          const Vec16<T> v = load16(staged + r * slab + k);
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            first[r] += to_float(v.values[i]) * to_float(a.values[i]);
            if (kPart == Part::kGateUp) second[r] += to_float(v.values[i]) * to_float(b.values[i]);
          }
        }
      }
    }
    if (n >= outputs) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= p.rows) break;
      float value = warp_sum(first[r]);
      if (kPart == Part::kUp) value = silu(value);
      if (kPart == Part::kGateUp) value = silu(value) * warp_sum(second[r]);
      const size_t index = size_t(r) * outputs + n;
      if (kDown && p.gated) value += to_float(static_cast<const T*>(p.residual)[index]);
      if (lane == 0) out[index] = from_float<T>(value);
    }
  }
}

template <typename T, Part kPart, int kRows>
cudaError_t launch_part(const MlpProblem& p, int multiprocessors, cudaStream_t stream) {
  const int columns = kPart == Part::kDown ? p.inter : p.hidden;
  const int outputs = kPart == Part::kDown ? p.hidden : p.inter;
  const int slab = std::min(columns, kStagedBytes / int(sizeof(T)) / p.rows / 8 * 8);
  const int blocks = std::min((outputs + kWarps - 1) / kWarps, multiprocessors * (2048 / kWarpThreads));
  warp_kernel<T, kPart, kRows><<<blocks, kWarpThreads, size_t(p.rows) * slab * sizeof(T), stream>>>(p, slab);
  return cudaGetLastError();
}

template <typename T, int kRows>
cudaError_t launch_both_parts(const MlpProblem& p, int multiprocessors, cudaStream_t stream) {
  const cudaError_t error = p.gated ? launch_part<T, Part::kGateUp, kRows>(p, multiprocessors, stream)
                                    : launch_part<T, Part::kUp, kRows>(p, multiprocessors, stream);
  return error != cudaSuccess ? error : launch_part<T, Part::kDown, kRows>(p, multiprocessors, stream);
}

template <typename T>
cudaError_t launch_warp_rows(const MlpProblem& p, int multiprocessors, cudaStream_t stream) {
  if (p.rows == 1) return launch_both_parts<T, 1>(p, multiprocessors, stream);
  if (p.rows <= 4) return launch_both_parts<T, 4>(p, multiprocessors, stream);
  return launch_both_parts<T, kRowsPerLaunch>(p, multiprocessors, stream);
}

template <typename T>
cudaError_t launch_naive_type(const MlpProblem& p, cudaStream_t stream) {
  if (p.gated) naive_kernel<T, true><<<p.rows, kNaiveThreads, 0, stream>>>(p);
  else naive_kernel<T, false><<<p.rows, kNaiveThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

std::size_t scratch_bytes(const MlpProblem& p) {
  // naive: sums of the output in float32; the others: the intermediate of one launch's rows in the dtype of x.
  const std::size_t sums = std::size_t(p.rows) * p.hidden * sizeof(float);
  const std::size_t neurons = std::size_t(std::min(p.rows, kRowsPerLaunch)) * p.inter * sizeof(float);
  return std::max(sums, neurons);
}

cudaError_t launch_mlp_naive(const MlpProblem& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32: return launch_naive_type<float>(p, stream);
    case DType::kFloat16: return launch_naive_type<__half>(p, stream);
    case DType::kBFloat16: return launch_naive_type<__nv_bfloat16>(p, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_mlp_warp(const MlpProblem& p, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  const cudaError_t found = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (found != cudaSuccess) return found;
  for (int begin = 0; begin < p.rows; begin += kRowsPerLaunch) {
    const MlpProblem part = rows_of(p, begin, std::min(kRowsPerLaunch, p.rows - begin));
    cudaError_t error = cudaErrorInvalidValue;
    switch (p.dtype) {
      case DType::kFloat32: error = launch_warp_rows<float>(part, multiprocessors, stream); break;
      case DType::kFloat16: error = launch_warp_rows<__half>(part, multiprocessors, stream); break;
      case DType::kBFloat16: error = launch_warp_rows<__nv_bfloat16>(part, multiprocessors, stream); break;
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace six_engines
