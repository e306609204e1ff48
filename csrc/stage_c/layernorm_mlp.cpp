// The operator torch.ops.six_engines.fused_ln_mlp, the classical block: it checks its arguments and calls
// layernorm_mlp.cu, or on the CPU computes the formula with PyTorch's operators.
#include "common/check_text.h"

#include <torch/library.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>

#ifdef SIX_ENGINES_CUDA
#include "stage_c/layernorm_mlp.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace six_engines {
namespace {

using at::Tensor;

void check(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& w1, const Tensor& w2, double eps) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, "x is ", dtype,
                   "; float32, float16 and bfloat16 are supported");
  TORCH_CHECK_VALUE(x.dim() == 2 && w1.dim() == 2, "x has ", to_string(x.dim()), " dimensions and w1 ",
                    to_string(w1.dim()), ", expected 2: [rows, hidden] and [inter, hidden]");
  TORCH_CHECK_VALUE(eps >= 0, "eps is ", to_string(eps), ", expected 0 or more");
  const int64_t hidden = x.size(1), inter = w1.size(0);
  auto like = [&](const char* name, const Tensor& tensor, at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(tensor.sizes() == shape, name, " has shape ", to_string(tensor.sizes()), ", expected ",
                      to_string(shape));
    TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " is ", tensor.scalar_type(), " but x is ", dtype,
                     "; give all tensors one dtype");
    TORCH_CHECK_VALUE(tensor.device() == x.device(), name, " is on ", tensor.device().str(), " but x is on ",
                      x.device().str());
    TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " is not contiguous (strides ", to_string(tensor.strides()),
                      "); call .contiguous() on it");
  };
  like("x", x, x.sizes());
  like("gamma", gamma, {hidden});
  like("beta", beta, {hidden});
  like("w1", w1, {inter, hidden});
  like("w2", w2, {hidden, inter});
}

Tensor ln_mlp_cpu(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& w1, const Tensor& w2,
                  double eps) {
  check(x, gamma, beta, w1, w2, eps);
  const Tensor normalised = at::layer_norm(x, {x.size(1)}, gamma, beta, eps);
  return at::linear(at::silu(at::linear(normalised, w1)), w2);
}

#ifdef SIX_ENGINES_CUDA
Tensor ln_mlp_cuda(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& w1, const Tensor& w2,
                   double eps) {
  check(x, gamma, beta, w1, w2, eps);
  const int64_t rows = x.size(0), hidden = x.size(1), inter = w1.size(0);
  TORCH_CHECK_VALUE(rows <= INT32_MAX && hidden <= INT32_MAX && inter <= INT32_MAX / 4, "x ", to_string(x.sizes()),
                    " with ", to_string(inter), " neurons is too large; ln_mlp_reference takes any size");
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor y = at::empty_like(x);
  if (rows == 0) return y;
  const DType dtype = x.scalar_type() == at::kFloat  ? DType::kFloat32
                      : x.scalar_type() == at::kHalf ? DType::kFloat16
                                                     : DType::kBFloat16;
  const cudaError_t error = launch_layernorm_mlp(
      x.const_data_ptr(), gamma.const_data_ptr(), beta.const_data_ptr(), w1.const_data_ptr(), w2.const_data_ptr(),
      y.mutable_data_ptr(), int(rows), int(hidden), int(inter), float(eps), dtype,
      c10::cuda::getCurrentCUDAStream().stream());
  TORCH_CHECK_VALUE(error != cudaErrorNotSupported, to_string(inter), " neurons of a row do not fit into this GPU's "
                    "shared memory; use ln_mlp_reference here");
  TORCH_CHECK(error == cudaSuccess, "the LayerNorm MLP kernel was not launched: ", cudaGetErrorString(error));
  return y;
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(six_engines, library) {
  library.def("fused_ln_mlp(Tensor x, Tensor gamma, Tensor beta, Tensor w1, Tensor w2, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(six_engines, CPU, library) { library.impl("fused_ln_mlp", &ln_mlp_cpu); }

#ifdef SIX_ENGINES_CUDA
TORCH_LIBRARY_IMPL(six_engines, CUDA, library) { library.impl("fused_ln_mlp", &ln_mlp_cuda); }
#endif

}  // namespace six_engines
