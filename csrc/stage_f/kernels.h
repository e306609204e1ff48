// The instantiations of the decode kernel, one source file a dtype, so that they compile side by side.
#pragma once

namespace six_engines {

// The kernel for this head_dim (64 or 128).
const void* decode_kernel_bf16(int head_dim);
const void* decode_kernel_f16(int head_dim);

}  // namespace six_engines
