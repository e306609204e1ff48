// The megakernel of one shape (SIX_… macros) in the emulator, for emulated_megakernel.py.
#include "stage_f/kernel.cuh"

using namespace six_engines;

extern "C" long long decode_workspace_bytes() { return kTotalWords * static_cast<long long>(sizeof(Word)); }

// Not the arguments of launch.cu. `pointers`: the operator's tensors, in its order. Null, or what went wrong.
extern "C" const char* launch_decode_step(const void* const* pointers, int rows, int blocks, int block_size,
                                          int max_blocks, float eps, int flags, long long timeout,
                                          unsigned long long seed, int held) {
  DecodeStep s{rows, kLayers, kHidden, kIntermediate, kHeads, kKvHeads, kHeadDim, kVocab, eps, kHalf};
  const void* const* next = pointers;
  const auto take = [&](auto& pointer) {
    pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(const_cast<void*>(*next++));
  };
  take(s.layer_table), take(s.embedding), take(s.final_norm), take(s.lm_head), take(s.cos), take(s.sin);
  take(s.kv_cache), take(s.last_tokens), take(s.batch_slots), take(s.positions), take(s.slot_mapping);
  take(s.block_tables), take(s.context_lens), take(s.temperatures), take(s.noise_keys), take(s.logits), take(s.result);
  take(s.workspace);
  s.blocks = blocks;
  s.block_size = block_size;
  while (1 << s.block_shift < block_size) ++s.block_shift;
  s.max_blocks = max_blocks;
  s.flags = flags;
  s.timeout_ns = timeout;
  const auto kernel = rows == 1   ? decode_step_kernel<1, true>
                      : rows <= 4 ? decode_step_kernel<1>
                                  : decode_step_kernel<2>;
  gpu::seed = seed;
  gpu::held = held;
  static std::string wrong;
  try {
    gpu::run([&] { kernel(s); }, kGrid, kThreads, kSharedBytes, kGrid);
  } catch (const std::exception& error) {
    wrong = error.what();
    return wrong.c_str();
  }
  return nullptr;
}
