// The learner's CUDA kernels, compiled for a CPU, behind plain C functions. See cuda_on_cpu.h.
#include "fused_mlp_kernel.cu"

namespace six_engines {
namespace {
alignas(128) uint4 storage[227 * 1024 / sizeof(uint4)];  // the dynamic shared memory of the block that runs
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
    cuda_on_cpu::launch([&] { out[threadIdx.x] = six_engines::warp_sum(in[threadIdx.x]); }, 1, threads);
  });
}

// One call of the warp generation of the MLP block; dtype: 0 float32, 1 float16, 2 bfloat16.
extern "C" const char* lab_mlp_warp(int dtype, int gated, int rows, int hidden, int inter, float eps, const void* x,
                                    const void* norm_weight, const void* norm_bias, const void* w_in, const void* w_out,
                                    const void* residual, void* out) {
  return guarded([&] {
    six_engines::MlpProblem problem{};
    problem.x = x;
    problem.norm_weight = norm_weight;
    problem.norm_bias = norm_bias;
    problem.w_in = w_in;
    problem.w_out = w_out;
    problem.residual = residual;
    problem.out = out;
    problem.rows = rows;
    problem.hidden = hidden;
    problem.inter = inter;
    problem.eps = eps;
    problem.gated = gated != 0;
    problem.dtype = static_cast<six_engines::DType>(dtype);
    std::vector<uint4> scratch(six_engines::scratch_bytes(problem) / sizeof(uint4) + 1);
    problem.scratch = scratch.data();
    if (six_engines::launch_mlp_warp(problem, nullptr) != cudaSuccess) throw std::runtime_error("the launch failed");
  });
}
