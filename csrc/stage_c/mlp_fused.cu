// The fused kernel: one launch, one block on each multiprocessor, weights always in flight.
// fused_block.cuh has the work of a block, fused_plan.h the division of the work; here are the kernel's frame and the
// launch.
#include "stage_c/fused_block.cuh"

namespace six_engines {
namespace {

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    fused_kernel(const __grid_constant__ MlpProblem problem, const __grid_constant__ Plan plan) {
#if __CUDA_ARCH__ >= 900
  // The next kernel of the stream may be made ready while this one runs, and this one was while the last one ran; here
  // it waits until that one has finished and all that it wrote can be seen.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  extern __shared__ __align__(128) char shared[];
  Block<T, kRows>(problem, plan, shared).run();
#endif
}

struct Device {
  int multiprocessors = 0, major = 0, shared_limit = 0;
};

cudaError_t describe(Device& device) {
  int id = 0;
  if (cudaError_t error = cudaGetDevice(&id)) return error;
  cudaError_t error = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, id);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&device.shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
}

Plan plan_for(const MlpProblem& p, int rows, const Device& device) {
  return make_plan(p, rows, device.multiprocessors, kStepsPerSlab * kBytesPerStep, kTileRows, device.shared_limit);
}

template <typename T, int kRows>
cudaError_t launch(MlpProblem p, const Device& device, cudaStream_t stream) {
  Plan plan = plan_for(p, p.rows, device);
  const auto kernel = fused_kernel<T, kRows>;
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, attribute, plan.shared_bytes)) return error;
  cudaLaunchAttribute attributes[2] = {};
  // Cooperative launch: the driver starts all blocks at once or none, so two such grids cannot each hold half of the
  // GPU.
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  // The launch overlaps the end of the previous kernel; see the first lines of fused_kernel.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(device.multiprocessors);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, p, plan);
}

template <typename T>
cudaError_t launch_type(const MlpProblem& p, const Device& device, cudaStream_t stream) {
  return p.rows > 8 ? launch<T, 16>(p, device, stream) : launch<T, 8>(p, device, stream);
}

}  // namespace

int fused_rows_per_launch(const MlpProblem& p) {
  Device device;
  if (describe(device) != cudaSuccess || device.major < 9) return 0;
  int rows = kRowsPerLaunch;
  while (rows > 0 && plan_for(p, rows, device).slots == 0) rows /= 2;
  return rows;
}

cudaError_t launch_mlp_fused(const MlpProblem& p, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = describe(device)) return error;
  const int limit = fused_rows_per_launch(p);
  if (limit == 0) return cudaErrorNotSupported;
  for (int begin = 0; begin < p.rows; begin += limit) {
    const MlpProblem part = rows_of(p, begin, std::min(limit, p.rows - begin));
    cudaError_t error = cudaErrorInvalidValue;
    switch (p.dtype) {
      case DType::kFloat32: error = launch_type<float>(part, device, stream); break;
      case DType::kFloat16: error = launch_type<__half>(part, device, stream); break;
      case DType::kBFloat16: error = launch_type<__nv_bfloat16>(part, device, stream); break;
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace six_engines
