// The MLP block on the CPU; see mlp_cpu.cpp.
#pragma once

#include <ATen/core/Tensor.h>

namespace six_engines {

// One call of the block: RMSNorm -> silu(gate) * up -> down + residual.
struct MlpTensors {
  const at::Tensor &x, &norm_weight;  // [rows, hidden], [hidden]
  const at::Tensor& w_in;             // [2 * inter, hidden], gate rows first
  const at::Tensor &w_out, &residual; // [hidden, inter], [rows, hidden]
  double eps;
};

at::Tensor mlp_cpu(const MlpTensors& m);

}  // namespace six_engines
