// The usual first fused kernel: LayerNorm, up, SiLU, down of the classical block, in one launch.
//
// One block per row of x; between the steps the row's neurons stay in shared memory and never go to global memory. This
// is what "fused" meant in the article that this course grew from. mlp_warp.cu and mlp_fused.cu show what it lacks to
// be fast.
#include "common/vectors.cuh"
#include "stage_c/layernorm_mlp.h"

namespace six_engines {
namespace {

constexpr int kThreads = 256;

// The sum over the block, in every thread.
__device__ float block_sum(float value) {
  __shared__ float sums[kThreads / kWarpSize];
  value = warp_sum(value);
  __syncthreads();  // the sums of the call before have been read
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  float total = 0.0f;
  for (float sum : sums) total += sum;
  return total;
}

template <typename T>
__global__ void layernorm_mlp_kernel(const T* x,      // [rows, hidden]
                                     const T* gamma,  // [hidden]
                                     const T* beta,   // [hidden]
                                     const T* w1,     // [inter, hidden]
                                     const T* w2,     // [hidden, inter]
                                     T* y,            // [rows, hidden]
                                     int hidden, int inter, float eps) {
  extern __shared__ float neurons[];  // [inter]
  const T* x_row = x + size_t(blockIdx.x) * hidden;
  T* y_row = y + size_t(blockIdx.x) * hidden;

  // Step 1: LayerNorm's mean and variance (Ba et al. 2016). Two passes, and the mean as a difference from the row's
  // first number: mean(x^2) - mean(x)^2 loses every digit when the mean is much larger than the spread.
  const float first = to_float(x_row[0]);
  float sum = 0.0f, squares = 0.0f;
  for (int k = threadIdx.x; k < hidden; k += kThreads) sum += to_float(x_row[k]) - first;
  const float mean = first + block_sum(sum) / hidden;
  for (int k = threadIdx.x; k < hidden; k += kThreads) {
    const float centred = to_float(x_row[k]) - mean;
    squares += centred * centred;
  }
  const float inverse = rsqrtf(block_sum(squares) / hidden + eps);

  // Step 2: up and SiLU.
  for (int j = threadIdx.x; j < inter; j += kThreads) {
    float value = 0.0f;
    for (int k = 0; k < hidden; ++k) {
      const float normalised = (to_float(x_row[k]) - mean) * inverse * to_float(gamma[k]) + to_float(beta[k]);
      value += normalised * to_float(w1[size_t(j) * hidden + k]);
    }
    neurons[j] = silu(value);
  }
  __syncthreads();

  // Step 3: down.
  for (int o = threadIdx.x; o < hidden; o += kThreads) {
    float value = 0.0f;
    for (int j = 0; j < inter; ++j) value += neurons[j] * to_float(w2[size_t(o) * inter + j]);
    y_row[o] = from_float<T>(value);
  }
}

template <typename T>
cudaError_t launch(const void* x, const void* gamma, const void* beta, const void* w1, const void* w2, void* y,
                   int rows, int hidden, int inter, float eps, cudaStream_t stream) {
  const int shared_bytes = inter * int(sizeof(float));
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (cudaFuncSetAttribute(layernorm_mlp_kernel<T>, attribute, shared_bytes) != cudaSuccess) {
    cudaGetLastError();  // the refusal is this call's, not the next one's
    return cudaErrorNotSupported;
  }
  layernorm_mlp_kernel<T><<<rows, kThreads, shared_bytes, stream>>>(
      static_cast<const T*>(x), static_cast<const T*>(gamma), static_cast<const T*>(beta), static_cast<const T*>(w1),
      static_cast<const T*>(w2), static_cast<T*>(y), hidden, inter, eps);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_layernorm_mlp(const void* x, const void* gamma, const void* beta, const void* w1, const void* w2,
                                 void* y, int rows, int hidden, int inter, float eps, DType dtype,
                                 cudaStream_t stream) {
  const auto launch_type = dtype == DType::kFloat32   ? launch<float>
                           : dtype == DType::kFloat16 ? launch<__half>
                                                      : launch<__nv_bfloat16>;
  return launch_type(x, gamma, beta, w1, w2, y, rows, hidden, inter, eps, stream);
}

}  // namespace six_engines
