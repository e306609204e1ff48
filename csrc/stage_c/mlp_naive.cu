// The naive kernel: the literal formula. One block per row of x, one thread per neuron and then one per output. It is
// correct, and hundreds of times too slow: one row keeps one multiprocessor busy, and neighbouring threads read
// addresses a whole weight row apart, so each read fetches 32 bytes to use two.
#include "common/vectors.cuh"
#include "stage_c/mlp.h"

namespace six_engines {
namespace {

template <typename T>
__global__ void naive_kernel(MlpProblem p) {
  const size_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.hidden;
  const T* norm_weight = static_cast<const T*>(p.norm_weight);
  float* neurons = static_cast<float*>(p.scratch) + row * p.inter;

  double squares = 0.0;  // every thread adds up the same long sum
  for (int k = 0; k < p.hidden; ++k) squares += to_float(x[k]) * to_float(x[k]);
  const float inverse = rsqrtf(float(squares / p.hidden) + p.eps);

  for (int j = threadIdx.x; j < p.inter; j += blockDim.x) {
    const T* gate_row = static_cast<const T*>(p.w_in) + size_t(j) * p.hidden;
    const T* up_row = gate_row + size_t(p.inter) * p.hidden;
    float gate = 0.0f, up = 0.0f;
    for (int k = 0; k < p.hidden; ++k) {
      const float normalised = to_float(x[k]) * inverse * to_float(norm_weight[k]);
      gate += normalised * to_float(gate_row[k]);
      up += normalised * to_float(up_row[k]);
    }
    neurons[j] = silu(gate) * up;
  }
  __syncthreads();  // an output needs every neuron
  for (int o = threadIdx.x; o < p.hidden; o += blockDim.x) {
    const T* down_row = static_cast<const T*>(p.w_out) + size_t(o) * p.inter;
    float sum = to_float(static_cast<const T*>(p.residual)[row * p.hidden + o]);
    for (int j = 0; j < p.inter; ++j) sum += neurons[j] * to_float(down_row[j]);
    static_cast<T*>(p.out)[row * p.hidden + o] = from_float<T>(sum);
  }
}

}  // namespace

cudaError_t launch_mlp_naive(const MlpProblem& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32: naive_kernel<float><<<p.rows, 256, 0, stream>>>(p); break;
    case DType::kFloat16: naive_kernel<__half><<<p.rows, 256, 0, stream>>>(p); break;
    case DType::kBFloat16: naive_kernel<__nv_bfloat16><<<p.rows, 256, 0, stream>>>(p); break;
  }
  return cudaGetLastError();
}

}  // namespace six_engines
