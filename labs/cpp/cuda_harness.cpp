// CUDA kernels, the learner's among them, compiled for a CPU, behind plain C functions. See csrc/emulator/gpu.h.
#include "crash_line.h"
#include "stage_c/layernorm_mlp.cu"
#include "stage_c/mlp_naive.cu"
#include "stage_c/mlp_warp.cu"

namespace six_engines {
namespace {
// The dynamic shared memory of the block that runs, by the names that the kernels have for it.
alignas(128) uint4 storage[227 * 1024 / sizeof(uint4)];
float neurons[227 * 1024 / sizeof(float)];
}
}  // namespace six_engines

namespace {

std::string failure;

template <typename Function>
const char* guarded(Function function) {
  try {
    function();
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
  return nullptr;
}

}  // namespace

// out[i] = what thread i got from warp_sum(in[i]); `threads` is a multiple of 32.
extern "C" const char* lab_warp_sum(const float* in, float* out, int threads) {
  return guarded([&] {
    gpu::launch([&] { out[threadIdx.x] = six_engines::warp_sum(in[threadIdx.x]); }, 1, threads);
  });
}

// One call of the MLP block by the naive or the warp kernel; dtype: 0 float32, 1 float16, 2 bfloat16.
extern "C" const char* lab_mlp(int warp, int dtype, int rows, int hidden, int inter, float eps, const void* x,
                               const void* norm_weight, const void* w_in, const void* w_out, const void* residual,
                               void* out) {
  return guarded([&] {
    six_engines::MlpProblem problem{};
    problem.x = x;
    problem.norm_weight = norm_weight;
    problem.w_in = w_in;
    problem.w_out = w_out;
    problem.residual = residual;
    problem.out = out;
    problem.rows = rows;
    problem.hidden = hidden;
    problem.inter = inter;
    problem.eps = eps;
    problem.dtype = static_cast<six_engines::DType>(dtype);
    std::vector<uint4> scratch(six_engines::scratch_bytes(problem) / sizeof(uint4) + 1);
    problem.scratch = scratch.data();
    const auto launch = warp ? six_engines::launch_mlp_warp : six_engines::launch_mlp_naive;
    if (launch(problem, nullptr) != cudaSuccess) throw std::runtime_error("the launch failed");
  });
}

// One call of the classical block with LayerNorm.
extern "C" const char* lab_layernorm_mlp(int dtype, int rows, int hidden, int inter, float eps, const void* x,
                                         const void* gamma, const void* beta, const void* w1, const void* w2, void* y) {
  return guarded([&] {
    const auto type = static_cast<six_engines::DType>(dtype);
    if (six_engines::launch_layernorm_mlp(x, gamma, beta, w1, w2, y, rows, hidden, inter, eps, type, nullptr) !=
        cudaSuccess)
      throw std::runtime_error("the launch failed");
  });
}
