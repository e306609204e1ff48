// The plain interface between the operator (operators.cpp) and the kernels (*.cu): pointers, sizes, a stream.
// It uses no torch types, so nvcc alone can compile the kernels, on a machine without a GPU and without torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace six_engines {

enum class DType { kFloat32, kFloat16, kBFloat16 };

// One call of the MLP block of Qwen and Llama: RMSNorm -> silu(gate) * up -> down + residual.
struct MlpProblem {
  const void* x;            // [rows, hidden]
  const void* norm_weight;  // [hidden]
  const void* w_in;         // [2 * inter, hidden], gate rows first
  const void* w_out;        // [hidden, inter]
  const void* residual;     // [rows, hidden]
  void* out;                // [rows, hidden]
  void* scratch;            // scratch_bytes(problem) bytes that no one else uses during the call
  int rows;
  int hidden;
  int inter;
  float eps;
  DType dtype;
};

// Rows that one launch of the warp and fused kernels handles; more rows need more launches.
constexpr int kRowsPerLaunch = 16;

// The same problem for a range of its rows.
inline MlpProblem rows_of(const MlpProblem& problem, int begin, int count) {
  const std::size_t offset = std::size_t(begin) * problem.hidden * (problem.dtype == DType::kFloat32 ? 4 : 2);
  MlpProblem part = problem;
  part.x = static_cast<const char*>(problem.x) + offset;
  part.residual = static_cast<const char*>(problem.residual) + offset;
  part.out = static_cast<char*>(problem.out) + offset;
  part.rows = count;
  return part;
}

// Bytes of scratch memory, enough for any of the kernels: all neurons [rows, inter] in float32.
inline std::size_t scratch_bytes(const MlpProblem& problem) {
  return std::size_t(problem.rows) * problem.inter * sizeof(float);
}

// Each enqueues its work on the stream and returns at once; none waits, allocates or reads device memory on the host,
// so all of them can be captured into a CUDA graph.
cudaError_t launch_mlp_naive(const MlpProblem& problem, cudaStream_t stream);
cudaError_t launch_mlp_warp(const MlpProblem& problem, cudaStream_t stream);
cudaError_t launch_mlp_fused(const MlpProblem& problem, cudaStream_t stream);

// How many rows one launch of the fused kernel handles for this problem on the current device: 0 if the device is older
// than compute capability 9.0 or one normalised row of x does not fit into shared memory.
int fused_rows_per_launch(const MlpProblem& problem);

}  // namespace six_engines
