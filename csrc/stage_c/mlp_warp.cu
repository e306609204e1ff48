// The warp kernel: one warp per weight row, so that 32 lanes read 512 neighbouring bytes at a time, on all
// multiprocessors. Two launches, because an output needs every neuron: gate and up first, then down.
#include "stage_c/mlp.h"
#include "stage_c/rms_norm.cuh"

#include <algorithm>

namespace six_engines {
namespace {

constexpr int kWarpThreads = 256;
constexpr int kWarps = kWarpThreads / kWarpSize;
static_assert(8 % kWarps == 0, "sizes are multiples of 8, so every warp of a round has an n to compute");
constexpr int kStagedBytes = 32 * 1024;  // of the input, in shared memory; a longer input goes slab by slab

enum class Part { kGateUp, kDown };

// out[r, n] = f(sum over k of input[r, k] * weights[n, k]) for up to kRows rows; each warp takes one n at a time.
template <typename T, Part kPart, int kRows>
__global__ void __launch_bounds__(kWarpThreads) warp_kernel(MlpProblem p, int slab) {
  constexpr int kCount = Vec16<T>::kCount;
  constexpr bool kDown = kPart == Part::kDown;
  extern __shared__ uint4 storage[];
  __shared__ float inverse[kRows];  // of each row's root mean square
  T* staged = reinterpret_cast<T*>(storage);  // [rows, slab]
  const int columns = kDown ? p.inter : p.hidden;
  const int outputs = kDown ? p.hidden : p.inter;
  const T* input = static_cast<const T*>(kDown ? p.scratch : p.x);
  const T* weights = static_cast<const T*>(kDown ? p.w_out : p.w_in);
  T* out = static_cast<T*>(kDown ? p.out : p.scratch);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;

  if (!kDown) {  // every block computes these again: cheaper than one more launch
    for (int r = warp; r < p.rows; r += kWarps) {
      const float found = inverse_rms(input + size_t(r) * columns, columns, p.eps);
      if (lane == 0) inverse[r] = found;
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
            vector = normalise16(vector, inverse[r], load16(static_cast<const T*>(p.norm_weight) + start + k));
          }
          store16(staged + r * slab + k, vector);
        }
        __syncthreads();
      }
      const T* first_row = weights + size_t(n) * columns + start;
      const T* second_row = first_row + size_t(p.inter) * columns;
#pragma unroll 4
      for (int k = lane * kCount; k < width; k += kWarpSize * kCount) {
        const Vec16<T> a = load16(first_row + k);
        Vec16<T> b;
        if (!kDown) b = load16(second_row + k);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (r >= p.rows) break;
          const Vec16<T> v = load16(staged + r * slab + k);
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            first[r] += to_float(v.values[i]) * to_float(a.values[i]);
            if (!kDown) second[r] += to_float(v.values[i]) * to_float(b.values[i]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= p.rows) break;
      float value = warp_sum(first[r]);
      if (!kDown) value = silu(value) * warp_sum(second[r]);
      const size_t index = size_t(r) * outputs + n;
      if (kDown) value += to_float(static_cast<const T*>(p.residual)[index]);
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
  const cudaError_t error = launch_part<T, Part::kGateUp, kRows>(p, multiprocessors, stream);
  return error != cudaSuccess ? error : launch_part<T, Part::kDown, kRows>(p, multiprocessors, stream);
}

template <typename T>
cudaError_t launch_warp_rows(const MlpProblem& p, int multiprocessors, cudaStream_t stream) {
  if (p.rows == 1) return launch_both_parts<T, 1>(p, multiprocessors, stream);
  if (p.rows <= 4) return launch_both_parts<T, 4>(p, multiprocessors, stream);
  return launch_both_parts<T, kRowsPerLaunch>(p, multiprocessors, stream);
}

}  // namespace

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
