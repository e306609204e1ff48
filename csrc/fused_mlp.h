// The plain interface between the operators (fused_mlp.cpp) and the kernels (*.cu): pointers, sizes, a stream.
// No torch type crosses it, so nvcc alone can compile the kernels, on a machine without a GPU and without torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace six_engines {

enum class DType { kFloat32, kFloat16, kBFloat16 };

// One call of an MLP block. gated: RMSNorm -> silu(gate) * up -> down + residual (Qwen, Llama);
// not gated: LayerNorm -> silu(up) -> down (the classical two-matrix block).
struct MlpProblem {
  const void* x;            // [rows, hidden]
  const void* norm_weight;  // [hidden]
  const void* norm_bias;    // [hidden]; LayerNorm only, else null
  const void* w_in;         // gated: [2 * inter, hidden], gate rows first; else [inter, hidden]
  const void* w_out;        // [hidden, inter]
  const void* residual;     // [rows, hidden]; gated only, else null
  void* out;                // [rows, hidden]
  void* scratch;            // scratch_bytes(problem) bytes that no one else uses during the call
  int rows;
  int hidden;
  int inter;
  float eps;
  DType dtype;
  bool gated;
};

// Rows that one launch of the warp and fused generations takes; more rows are more launches.
constexpr int kRowsPerLaunch = 16;

// The same problem for a run of its rows.
inline MlpProblem rows_of(const MlpProblem& problem, int begin, int count) {
  const std::size_t offset = std::size_t(begin) * problem.hidden * (problem.dtype == DType::kFloat32 ? 4 : 2);
  MlpProblem part = problem;
  part.x = static_cast<const char*>(problem.x) + offset;
  part.out = static_cast<char*>(problem.out) + offset;
  if (problem.residual != nullptr) part.residual = static_cast<const char*>(problem.residual) + offset;
  part.rows = count;
  return part;
}

// Bytes of scratch memory that any of the three generations needs for this problem.
std::size_t scratch_bytes(const MlpProblem& problem);

// Each puts its work on the stream and returns at once; none waits, allocates or reads device memory on the host,
// so all of them can be captured into a CUDA graph.
cudaError_t launch_mlp_naive(const MlpProblem& problem, cudaStream_t stream);
cudaError_t launch_mlp_warp(const MlpProblem& problem, cudaStream_t stream);
cudaError_t launch_mlp_fused(const MlpProblem& problem, cudaStream_t stream);

// How many rows one fused launch takes for this problem on the current device: 0 where the device is older than
// compute capability 9.0 or one normalised row of x does not fit into shared memory.
int fused_rows_per_launch(const MlpProblem& problem);

}  // namespace six_engines
