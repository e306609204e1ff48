// The host side of the decode kernel: what is supported, which instantiation, the launch.
#include <cuda_runtime.h>

#include "stage_f/kernels.h"
#include "stage_f/plan.cuh"

namespace six_engines {

namespace {

const char* unsupported(const DecodeStep& s) {
  if (s.rows < 1 || s.rows > kMaxDecodeRows) return "rows must be 1 to 8";
  if (s.head_dim != 64 && s.head_dim != 128) return "head_dim must be 64 or 128";
  if (s.heads % s.kv_heads != 0 || s.heads / s.kv_heads > 8)
    return "heads must be a multiple of kv_heads, at most 8 to one";
  if (s.hidden % kStepColumns != 0 || s.intermediate % kStepColumns != 0 || s.heads * s.head_dim % kStepColumns != 0)
    return "hidden and intermediate must be multiples of 32";
  if (s.block_size < kAttentionChunk || (s.block_size & (s.block_size - 1)) != 0)
    return "block_size must be a power of two, at least 16";
  return nullptr;
}

}  // namespace

std::int64_t decode_workspace_bytes(const DecodeStep& step) {
  DecodePlan plan{};
  plan_workspace(step, plan);
  return plan.total_words * static_cast<std::int64_t>(sizeof(Word));
}

const char* launch_decode_step(const DecodeStep& step, void* stream) {
  if (const char* problem = unsupported(step)) return problem;
  int device = 0, multiprocessors = 0, smem_limit = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&smem_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  DecodePlan plan;
  if (const char* problem = plan_step(step, multiprocessors, smem_limit, plan)) return problem;
  const void* kernel = step.half ? decode_kernel_f16(step.head_dim)
                                 : decode_kernel_bf16(step.head_dim);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.smem_bytes);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  DecodeStep arguments = step;
  void* parameters[] = {&arguments, &plan};
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  error = step.flags & kPlainLaunch
        ? cudaLaunchKernel(kernel, plan.grid, kThreads, parameters, plan.smem_bytes, cuda_stream)
        : cudaLaunchCooperativeKernel(kernel, plan.grid, kThreads, parameters, plan.smem_bytes, cuda_stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace six_engines
