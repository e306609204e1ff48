// The plain interface to the kernel of layernorm_mlp.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "stage_c/mlp.h"

namespace six_engines {

// Computes y = silu(LayerNorm(x) w1^T) w2^T. Enqueues its work on the stream and returns at once. cudaErrorNotSupported
// means that the neurons of a row do not fit into shared memory.
cudaError_t launch_layernorm_mlp(const void* x, const void* gamma, const void* beta, const void* w1, const void* w2,
                                 void* y, int rows, int hidden, int inter, float eps, DType dtype, cudaStream_t stream);

}  // namespace six_engines
