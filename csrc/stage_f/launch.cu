// The kernel's library checks that a step has the compiled shape, and launches it. It exports two plain C functions, so
// that Python can find them by name (stage_f_graph_tp/megakernel/kernel.py).
#include "stage_f/kernel.cuh"

namespace six_engines {

namespace {

const char* unsupported(const DecodeStep& s) {
  if (s.layers != kLayers || s.hidden != kHidden || s.intermediate != kIntermediate || s.heads != kHeads ||
      s.kv_heads != kKvHeads || s.head_dim != kHeadDim || s.vocab != kVocab || s.half != kHalf)
    return "the kernel was compiled for another shape or dtype";
  if (s.rows < 1 || s.rows > kMaxDecodeRows) return "rows must be 1 to 8";
  if (s.block_size < kAttentionChunk || (s.block_size & (s.block_size - 1)) != 0)
    return "block_size must be a power of two, at least 16";
  if (s.workspace_bytes < kTotalWords * static_cast<long long>(sizeof(Word))) return "the workspace is too small";
  if (s.trace != nullptr && !kTrace) return "the kernel was compiled without a trace";
  return nullptr;
}

// The ring holds the slots that are waited for together.
template <int kSets>
constexpr bool fits() {
  int needed = 4;
  for (const MatrixPlan& m : kMatrices.of) needed = larger(needed, group_tiles<kSets>(m) * m.batch_chunks);
  return Layout<kSets>::kSlots >= needed;
}
static_assert(fits<1>(), "shared memory does not hold enough weights of this shape");

template <int kSets, bool kAlone = false>
const char* launch(const DecodeStep& step, cudaStream_t stream) {
  const void* kernel = reinterpret_cast<const void*>(decode_step_kernel<kSets, kAlone>);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  DecodeStep arguments = step;
  void* parameters[] = {&arguments};
  error = step.flags & kPlainLaunch
        ? cudaLaunchKernel(kernel, kGrid, kThreads, parameters, kSharedBytes, stream)
        : cudaLaunchCooperativeKernel(kernel, kGrid, kThreads, parameters, kSharedBytes, stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

extern "C" std::int64_t decode_workspace_bytes() { return kTotalWords * static_cast<std::int64_t>(sizeof(Word)); }

extern "C" const char* launch_decode_step(const DecodeStep& step, void* stream) {
  if (const char* problem = unsupported(step)) return problem;
  if (step.rows == 1) return launch<1, true>(step, static_cast<cudaStream_t>(stream));
  if (step.rows <= 4) return launch<1>(step, static_cast<cudaStream_t>(stream));
  if constexpr (fits<2>()) return launch<2>(step, static_cast<cudaStream_t>(stream));
  return "shared memory does not hold enough weights beside more than 4 rows of this shape";
}

}  // namespace six_engines
