// The decode kernel in float16.
#include "decode_step_instances.h"
#include "decode_step_kernel.cuh"

namespace six_engines {

const void* decode_kernel_f16(int head_dim, bool one_row) {
  return decode_kernel<__half>(head_dim, one_row);
}

}  // namespace six_engines
