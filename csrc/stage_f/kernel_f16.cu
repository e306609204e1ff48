// The decode kernel in float16.
#include "stage_f/kernels.h"
#include "stage_f/kernel.cuh"

namespace six_engines {

const void* decode_kernel_f16(int head_dim) {
  return decode_kernel<__half>(head_dim);
}

}  // namespace six_engines
