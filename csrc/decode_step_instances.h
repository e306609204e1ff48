// The instantiations of the decode kernel, one source file a dtype, so that they compile side by side.
#pragma once

namespace six_engines {

// The kernel for this head_dim (64 or 128), for one row or for up to 8.
const void* decode_kernel_bf16(int head_dim, bool one_row);
const void* decode_kernel_f16(int head_dim, bool one_row);

}  // namespace six_engines
