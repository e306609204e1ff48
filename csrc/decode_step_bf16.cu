// The decode kernel in bfloat16.
#include "decode_step_instances.h"
#include "decode_step_kernel.cuh"

namespace six_engines {

const void* decode_kernel_bf16(int head_dim, bool one_row) {
  return decode_kernel<__nv_bfloat16>(head_dim, one_row);
}

}  // namespace six_engines
