// The operators torch.ops.six_engines.fused_ln_mlp and fused_swiglu_mlp: checks, registration, and the way to the
// kernels. The kernels themselves (*.cu) know nothing of torch.
#include "check_text.h"
#include "fused_mlp_cpu.h"

#include <torch/library.h>
#include <ATen/ATen.h>

#include <string>

#ifdef SIX_ENGINES_CUDA
#include "fused_mlp.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace six_engines {
namespace {

using at::Tensor;

// Beyond this many rows "auto" leaves the block to matrix multiplications of the library. Measured: the table in
// stage_c_fused_mlp/README.md, made by benchmarks/mlp_kernels.py.
constexpr int64_t kMostRowsFused = 16;

struct Arguments {
  const Tensor &x, &norm_weight, &norm_bias, &w_in, &w_out, &residual;  // norm_bias or residual is undefined
  double eps;
  bool gated;
};

void check_like(const char* name, const Tensor& tensor, const Tensor& x, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape, name, " has shape ", to_string(tensor.sizes()), ", expected ",
                    to_string(shape));
  TORCH_CHECK_TYPE(tensor.scalar_type() == x.scalar_type(), name, " is ", tensor.scalar_type(), " but x is ",
                   x.scalar_type(), "; give all tensors one dtype");
  TORCH_CHECK_VALUE(tensor.device() == x.device(), name, " is on ", tensor.device().str(), " but x is on ",
                    x.device().str());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " is not contiguous (strides ", to_string(tensor.strides()),
                    "); call .contiguous() on it");
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0, name,
                    " does not start at a multiple of 16 bytes; clone it");
}

void check(const Arguments& a) {
  const auto dtype = a.x.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, "x is ", dtype,
                   "; float32, float16 and bfloat16 are supported");
  TORCH_CHECK_VALUE(a.x.dim() == 2, "x has ", to_string(a.x.dim()), " dimensions, expected 2: [rows, hidden]");
  TORCH_CHECK_VALUE(a.w_out.dim() == 2, "the down weight has ", to_string(a.w_out.dim()),
                    " dimensions, expected 2: [hidden, inter]");
  const int64_t rows = a.x.size(0), hidden = a.x.size(1), inter = a.w_out.size(1);
  TORCH_CHECK_VALUE(hidden > 0 && hidden % 8 == 0, "the hidden size is ", to_string(hidden),
                    ", expected a multiple of 8");
  TORCH_CHECK_VALUE(inter > 0 && inter % 8 == 0, "the intermediate size is ", to_string(inter),
                    ", expected a multiple of 8");
  TORCH_CHECK_VALUE(a.eps >= 0, "eps is ", to_string(a.eps), ", expected 0 or more");
  check_like("x", a.x, a.x, {rows, hidden});
  check_like(a.gated ? "w_down" : "w2", a.w_out, a.x, {hidden, inter});
  if (a.gated) {
    check_like("rms_weight", a.norm_weight, a.x, {hidden});
    check_like("w_gate_up", a.w_in, a.x, {2 * inter, hidden});
    check_like("residual", a.residual, a.x, {rows, hidden});
  } else {
    check_like("gamma", a.norm_weight, a.x, {hidden});
    check_like("beta", a.norm_bias, a.x, {hidden});
    check_like("w1", a.w_in, a.x, {inter, hidden});
  }
}

// The block out of library operators: what many rows need, where each weight is used often enough for a matrix product.
Tensor library_mlp(const Arguments& a) {
  if (!a.gated) {
    const Tensor normalised = at::layer_norm(a.x, {a.x.size(1)}, a.norm_weight, a.norm_bias, a.eps);
    return at::linear(at::silu(at::linear(normalised, a.w_in)), a.w_out);
  }
  const Tensor normalised = at::rms_norm(a.x, {a.x.size(1)}, a.norm_weight, a.eps);
  const auto halves = at::linear(normalised, a.w_in).chunk(2, 1);
  return at::linear(at::silu(halves[0]) * halves[1], a.w_out) + a.residual;
}

Tensor run_cpu(const Arguments& a, const std::string& generation) {
  check(a);
  TORCH_CHECK_VALUE(generation == "auto" || generation == "library", "generation '", generation,
                    "' is a CUDA kernel and the tensors are on the CPU; the CPU has 'auto' and 'library'");
  if (generation == "library" || a.x.size(0) > kMostRowsFused) return library_mlp(a);
  return mlp_cpu(a.x, a.norm_weight, a.norm_bias, a.w_in, a.w_out, a.residual, a.eps);
}

#ifdef SIX_ENGINES_CUDA
Tensor run_cuda(const Arguments& a, const std::string& generation) {
  check(a);
  const bool automatic = generation == "auto";
  TORCH_CHECK_VALUE(automatic || generation == "naive" || generation == "warp" || generation == "fused" ||
                        generation == "library",
                    "unknown generation '", generation, "', expected auto, naive, warp, fused or library");
  const int64_t rows = a.x.size(0), hidden = a.x.size(1), inter = a.w_out.size(1);
  if (generation == "library" || (automatic && rows > kMostRowsFused)) return library_mlp(a);
  TORCH_CHECK_VALUE(rows <= INT32_MAX && hidden <= INT32_MAX / 64 && inter <= INT32_MAX / 64, "x ",
                    to_string({rows, hidden}), " with ", to_string(inter), " neurons is too large for this kernel");
  const c10::cuda::CUDAGuard guard(a.x.device());
  Tensor out = at::empty_like(a.x);
  if (rows == 0) return out;

  auto pointer = [](const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; };
  MlpProblem problem{};
  problem.x = pointer(a.x);
  problem.norm_weight = pointer(a.norm_weight);
  problem.norm_bias = pointer(a.norm_bias);
  problem.w_in = pointer(a.w_in);
  problem.w_out = pointer(a.w_out);
  problem.residual = pointer(a.residual);
  problem.out = out.mutable_data_ptr();
  problem.rows = static_cast<int>(rows);
  problem.hidden = static_cast<int>(hidden);
  problem.inter = static_cast<int>(inter);
  problem.eps = static_cast<float>(a.eps);
  problem.gated = a.gated;
  problem.dtype = a.x.scalar_type() == at::kFloat  ? DType::kFloat32
                  : a.x.scalar_type() == at::kHalf ? DType::kFloat16
                                                   : DType::kBFloat16;
  // From torch's allocator: it knows the stream, and a CUDA graph keeps it.
  const Tensor scratch = at::empty({static_cast<int64_t>(scratch_bytes(problem))}, a.x.options().dtype(at::kByte));
  problem.scratch = scratch.mutable_data_ptr();

  const int per_launch = fused_rows_per_launch(problem);
  TORCH_CHECK_VALUE(generation != "fused" || per_launch > 0, "the fused kernel needs compute capability 9.0 and "
                              "one row of ", to_string(hidden), " numbers in shared memory; use 'warp' here");
  const auto stream = at::cuda::getCurrentCUDAStream();
  const bool fused = generation == "fused" || (automatic && per_launch >= rows);
  const cudaError_t error = generation == "naive" ? launch_mlp_naive(problem, stream)
                            : fused               ? launch_mlp_fused(problem, stream)
                                                  : launch_mlp_warp(problem, stream);
  TORCH_CHECK(error == cudaSuccess, "the ", generation, " MLP kernel was not launched: ", cudaGetErrorString(error));
  return out;
}
#endif

#define SIX_ENGINES_OPERATORS(DEVICE)                                                                                  \
  Tensor ln_mlp_##DEVICE(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& w1, const Tensor& w2, \
                         double eps, std::string generation) {                                                         \
    const Tensor none;                                                                                                 \
    return run_##DEVICE({x, gamma, beta, w1, w2, none, eps, false}, generation);                                       \
  }                                                                                                                    \
  Tensor swiglu_mlp_##DEVICE(const Tensor& x, const Tensor& rms_weight, const Tensor& w_gate_up, const Tensor& w_down, \
                             const Tensor& residual, double eps, std::string generation) {                             \
    const Tensor none;                                                                                                 \
    return run_##DEVICE({x, rms_weight, none, w_gate_up, w_down, residual, eps, true}, generation);                    \
  }

SIX_ENGINES_OPERATORS(cpu)
#ifdef SIX_ENGINES_CUDA
SIX_ENGINES_OPERATORS(cuda)
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(six_engines, library) {
  library.def(
      "fused_ln_mlp(Tensor x, Tensor gamma, Tensor beta, Tensor w1, Tensor w2, float eps, "
      "str generation='auto') -> Tensor");
  library.def(
      "fused_swiglu_mlp(Tensor x, Tensor rms_weight, Tensor w_gate_up, Tensor w_down, Tensor residual, float eps, "
      "str generation='auto') -> Tensor");
}

TORCH_LIBRARY_IMPL(six_engines, CPU, library) {
  library.impl("fused_ln_mlp", &ln_mlp_cpu);
  library.impl("fused_swiglu_mlp", &swiglu_mlp_cpu);
}

#ifdef SIX_ENGINES_CUDA
TORCH_LIBRARY_IMPL(six_engines, CUDA, library) {
  library.impl("fused_ln_mlp", &ln_mlp_cuda);
  library.impl("fused_swiglu_mlp", &swiglu_mlp_cuda);
}
#endif

}  // namespace six_engines
