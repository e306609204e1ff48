// The decode kernel in bfloat16.
#include "stage_f/kernels.h"
#include "stage_f/kernel.cuh"

namespace six_engines {

const void* decode_kernel_bf16(int head_dim) {
  return decode_kernel<__nv_bfloat16>(head_dim);
}

}  // namespace six_engines
