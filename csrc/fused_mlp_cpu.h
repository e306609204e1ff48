// The MLP blocks on the CPU; see fused_mlp_cpu.cpp.
#pragma once

#include <ATen/core/Tensor.h>

namespace six_engines {

// gated: w_in is [2 * inter, hidden] and norm_bias is undefined; else w_in is [inter, hidden] and residual undefined.
at::Tensor mlp_cpu(const at::Tensor& x, const at::Tensor& norm_weight, const at::Tensor& norm_bias,
                   const at::Tensor& w_in, const at::Tensor& w_out, const at::Tensor& residual, double eps);

}  // namespace six_engines
