// The operator torch.ops.six_engines.fused_swiglu_mlp: checks, registration, and calls of the kernels. The kernels
// (*.cu) do not use torch.
#include "common/check_text.h"
#include "stage_c/mlp_cpu.h"

#include <torch/library.h>
#include <ATen/ops/empty.h>  // the operators used here alone: ATen/ATen.h has all, and takes 5 s longer to compile
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>

#include <string>

#ifdef SIX_ENGINES_CUDA
#include "stage_c/mlp.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace six_engines {
namespace {

using at::Tensor;

// For more rows than this, "auto" uses the library's matrix products. The tables in stage_c_fused_mlp/README.md show
// the measurements; the same numbers are in stage_c_fused_mlp/fused_mlp.py.
constexpr int64_t kMostRowsCuda = 16, kMostRowsCpu = 2;

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

void check(const MlpTensors& m) {
  const auto dtype = m.x.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, "x is ", dtype,
                   "; float32, float16 and bfloat16 are supported");
  TORCH_CHECK_VALUE(m.x.dim() == 2, "x has ", to_string(m.x.dim()), " dimensions, expected 2: [rows, hidden]");
  TORCH_CHECK_VALUE(m.w_out.dim() == 2, "w_down has ", to_string(m.w_out.dim()),
                    " dimensions, expected 2: [hidden, inter]");
  const int64_t rows = m.x.size(0), hidden = m.x.size(1), inter = m.w_out.size(1);
  TORCH_CHECK_VALUE(hidden > 0 && hidden % 8 == 0, "the hidden size is ", to_string(hidden),
                    ", expected a multiple of 8; PyTorch's own operators take any size");
  TORCH_CHECK_VALUE(inter > 0 && inter % 8 == 0, "the intermediate size is ", to_string(inter),
                    ", expected a multiple of 8; PyTorch's own operators take any size");
  TORCH_CHECK_VALUE(m.eps >= 0, "eps is ", to_string(m.eps), ", expected 0 or more");
  check_like("x", m.x, m.x, {rows, hidden});
  check_like("rms_weight", m.norm_weight, m.x, {hidden});
  check_like("w_gate_up", m.w_in, m.x, {2 * inter, hidden});
  check_like("w_down", m.w_out, m.x, {hidden, inter});
  check_like("residual", m.residual, m.x, {rows, hidden});
}

// The block made of library operators, for many rows, where each weight is used often enough for a matrix product.
Tensor library_mlp(const MlpTensors& m) {
  const Tensor normalised = at::rms_norm(m.x, {m.x.size(1)}, m.norm_weight, m.eps);
  const auto halves = at::linear(normalised, m.w_in).chunk(2, 1);
  return at::linear(at::silu(halves[0]).mul(halves[1]), m.w_out).add(m.residual);
}

Tensor swiglu_mlp_cpu(const Tensor& x, const Tensor& rms_weight, const Tensor& w_gate_up, const Tensor& w_down,
                      const Tensor& residual, double eps, std::string kernel) {
  const MlpTensors m{x, rms_weight, w_gate_up, w_down, residual, eps};
  check(m);
  const bool automatic = kernel == "auto";
  TORCH_CHECK_VALUE(automatic || kernel == "fused" || kernel == "library", "kernel '", kernel, "' is not for the CPU, "
                              "where the tensors are; the CPU has auto, fused and library");
  if (kernel == "library" || (automatic && x.size(0) > kMostRowsCpu)) return library_mlp(m);
  return mlp_cpu(m);
}

#ifdef SIX_ENGINES_CUDA
Tensor swiglu_mlp_cuda(const Tensor& x, const Tensor& rms_weight, const Tensor& w_gate_up, const Tensor& w_down,
                       const Tensor& residual, double eps, std::string kernel) {
  const MlpTensors m{x, rms_weight, w_gate_up, w_down, residual, eps};
  check(m);
  const bool automatic = kernel == "auto";
  TORCH_CHECK_VALUE(automatic || kernel == "naive" || kernel == "warp" || kernel == "fused" || kernel == "library",
                    "unknown kernel '", kernel, "', expected auto, naive, warp, fused or library");
  const int64_t rows = x.size(0), hidden = x.size(1), inter = w_down.size(1);
  if (kernel == "library" || (automatic && rows > kMostRowsCuda)) return library_mlp(m);
  TORCH_CHECK_VALUE(rows <= INT32_MAX && hidden <= INT32_MAX / 64 && inter <= INT32_MAX / 64, "x ",
                    to_string({rows, hidden}), " with ", to_string(inter), " neurons is too large; use 'library'");
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor out = at::empty_like(x);
  if (rows == 0) return out;

  MlpProblem problem{};
  problem.x = x.const_data_ptr();
  problem.norm_weight = rms_weight.const_data_ptr();
  problem.w_in = w_gate_up.const_data_ptr();
  problem.w_out = w_down.const_data_ptr();
  problem.residual = residual.const_data_ptr();
  problem.out = out.mutable_data_ptr();
  problem.rows = static_cast<int>(rows);
  problem.hidden = static_cast<int>(hidden);
  problem.inter = static_cast<int>(inter);
  problem.eps = static_cast<float>(eps);
  problem.dtype = x.scalar_type() == at::kFloat  ? DType::kFloat32
                  : x.scalar_type() == at::kHalf ? DType::kFloat16
                                                 : DType::kBFloat16;
  // From torch's allocator, which respects the stream and which a CUDA graph keeps.
  const Tensor scratch = at::empty({static_cast<int64_t>(scratch_bytes(problem))}, x.options().dtype(at::kByte));
  problem.scratch = scratch.mutable_data_ptr();

  const int per_launch = fused_rows_per_launch(problem);
  TORCH_CHECK_VALUE(kernel != "fused" || per_launch > 0, "the fused kernel needs compute capability 9.0 and one row ",
                    "of ", to_string(hidden), " numbers in shared memory; use 'warp' here");
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  const bool fused = kernel == "fused" || (automatic && per_launch >= rows);
  const cudaError_t error = kernel == "naive" ? launch_mlp_naive(problem, stream)
                            : fused           ? launch_mlp_fused(problem, stream)
                                              : launch_mlp_warp(problem, stream);
  TORCH_CHECK(error == cudaSuccess, "the ", kernel, " MLP kernel was not launched: ", cudaGetErrorString(error));
  return out;
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(six_engines, library) {
  library.def(
      "fused_swiglu_mlp(Tensor x, Tensor rms_weight, Tensor w_gate_up, Tensor w_down, Tensor residual, float eps, "
      "str variant='auto') -> Tensor");  // not "kernel": PyTorch's compiler has an argument of that name
}

TORCH_LIBRARY_IMPL(six_engines, CPU, library) { library.impl("fused_swiglu_mlp", &swiglu_mlp_cpu); }

#ifdef SIX_ENGINES_CUDA
TORCH_LIBRARY_IMPL(six_engines, CUDA, library) { library.impl("fused_swiglu_mlp", &swiglu_mlp_cuda); }
#endif

}  // namespace six_engines
