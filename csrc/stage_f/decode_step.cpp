// The operator torch.ops.six_engines.decode_step: it checks its tensors and calls the kernel, which is in a separate
// library (launch.cu); `launch` is the address of the function there. CUDA only: a CPU runs stage D's layers.
#include <torch/library.h>
#include <ATen/core/Tensor.h>  // not ATen.h, which takes as long to compile as the rest

#include "common/check_text.h"
#include "stage_f/decode_step.h"

#ifdef SIX_ENGINES_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <optional>
#endif

namespace six_engines {
namespace {

using at::Tensor;

#ifdef SIX_ENGINES_CUDA

void check(const char* name, const Tensor& tensor, const Tensor& like, at::ScalarType dtype, at::IntArrayRef shape) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " is ", tensor.scalar_type(), ", expected ", dtype);
  TORCH_CHECK_VALUE(tensor.sizes() == shape, name, " has shape ", to_string(tensor.sizes()), ", expected ",
                    to_string(shape));
  TORCH_CHECK_VALUE(tensor.device() == like.device(), name, " is on ", tensor.device().str(), ", the KV cache on ",
                    like.device().str());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " is not contiguous (strides ", to_string(tensor.strides()), ")");
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0, name,
                    " does not start at a multiple of 16 bytes");
}

void decode_step(const Tensor& layer_table, const Tensor& embedding, const Tensor& final_norm, const Tensor& lm_head,
                 const Tensor& cos, const Tensor& sin, const Tensor& kv_cache, const Tensor& last_tokens,
                 const Tensor& batch_slots, const Tensor& positions, const Tensor& slot_mapping,
                 const Tensor& block_tables, const Tensor& context_lens, const Tensor& temperatures,
                 const Tensor& noise_keys, const Tensor& logits, const Tensor& result, const Tensor& workspace,
                 const std::optional<Tensor>& trace, int64_t heads, int64_t intermediate, double eps,
                 int64_t flags, int64_t timeout_ms, int64_t launch) {
  const auto dtype = kv_cache.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kBFloat16, "the KV cache is ", dtype,
                   "; float16 and bfloat16 are supported");
  TORCH_CHECK_VALUE(kv_cache.dim() == 6 && kv_cache.size(0) == 2, "the KV cache has shape ",
                    to_string(kv_cache.sizes()),
                    ", expected [2, layers, blocks, block_size, kv_heads, head_dim]");
  TORCH_CHECK_VALUE(block_tables.dim() == 2, "block_tables has shape ", to_string(block_tables.sizes()),
                    ", expected [rows, max_blocks]");
  TORCH_CHECK_VALUE(embedding.dim() == 2, "embedding has shape ", to_string(embedding.sizes()),
                    ", expected [vocab, hidden]");
  TORCH_CHECK_VALUE(cos.dim() == 2, "cos has shape ", to_string(cos.sizes()), ", expected [positions, head_dim / 2]");
  const int64_t rows = block_tables.size(0), layers = kv_cache.size(1), head_dim = kv_cache.size(5);
  const int64_t vocab = embedding.size(0), hidden = embedding.size(1);
  check("the KV cache", kv_cache, kv_cache, dtype, kv_cache.sizes());
  check("layer_table", layer_table, kv_cache, at::kLong, {layers, kLayerPointers});
  check("embedding", embedding, kv_cache, dtype, {vocab, hidden});
  check("final_norm", final_norm, kv_cache, dtype, {hidden});
  check("lm_head", lm_head, kv_cache, dtype, {vocab, hidden});
  check("cos", cos, kv_cache, at::kFloat, {cos.size(0), head_dim / 2});
  check("sin", sin, kv_cache, at::kFloat, {cos.size(0), head_dim / 2});
  check("last_tokens", last_tokens, kv_cache, at::kLong, last_tokens.sizes());
  check("batch_slots", batch_slots, kv_cache, at::kLong, {rows});
  check("positions", positions, kv_cache, at::kLong, {rows});
  check("slot_mapping", slot_mapping, kv_cache, at::kLong, {rows});
  check("block_tables", block_tables, kv_cache, at::kInt, block_tables.sizes());
  check("context_lens", context_lens, kv_cache, at::kInt, {rows});
  check("temperatures", temperatures, kv_cache, at::kFloat, {rows});
  check("noise_keys", noise_keys, kv_cache, at::kInt, {rows});
  check("logits", logits, kv_cache, at::kFloat, {rows, vocab});
  // The host's page-locked memory has the same address on the device.
  check("result", result, result.is_pinned() ? result : kv_cache, at::kLong, {rows + 1});
  check("workspace", workspace, kv_cache, at::kByte, workspace.sizes());

  DecodeStep s{};
  s.rows = rows;
  s.layers = layers;
  s.hidden = hidden;
  s.intermediate = intermediate;
  s.heads = heads;
  s.kv_heads = kv_cache.size(4);
  s.head_dim = head_dim;
  s.vocab = vocab;
  s.eps = eps;
  s.half = dtype == at::kHalf;
  s.layer_table = reinterpret_cast<const LayerWeights*>(layer_table.const_data_ptr());
  s.embedding = embedding.const_data_ptr();
  s.final_norm = final_norm.const_data_ptr();
  s.lm_head = lm_head.const_data_ptr();
  s.cos = cos.const_data_ptr<float>();
  s.sin = sin.const_data_ptr<float>();
  s.kv_cache = kv_cache.data_ptr();
  s.blocks = kv_cache.size(2);
  s.block_size = kv_cache.size(3);
  while (1 << s.block_shift < s.block_size) ++s.block_shift;
  s.max_blocks = block_tables.size(1);
  s.block_tables = block_tables.const_data_ptr<int32_t>();
  s.context_lens = context_lens.const_data_ptr<int32_t>();
  s.slot_mapping = slot_mapping.const_data_ptr<int64_t>();
  s.batch_slots = batch_slots.const_data_ptr<int64_t>();
  s.last_tokens = last_tokens.data_ptr<int64_t>();
  s.positions = positions.const_data_ptr<int64_t>();
  s.temperatures = temperatures.const_data_ptr<float>();
  s.noise_keys = noise_keys.const_data_ptr<int32_t>();
  s.logits = logits.data_ptr<float>();
  s.result = result.data_ptr<int64_t>();
  s.workspace = workspace.data_ptr<uint8_t>();
  if (trace.has_value()) {
    int multiprocessors = 0;
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, kv_cache.get_device());
    check("trace", *trace, kv_cache, at::kLong, {multiprocessors, kLayerMarks * layers + kEndMarks});
    s.trace = reinterpret_cast<long long*>(trace->data_ptr<int64_t>());
  }
  s.flags = flags;
  s.timeout_ns = timeout_ms * 1000000;
  s.workspace_bytes = workspace.numel();

  const c10::cuda::CUDAGuard guard(kv_cache.device());
  const auto launch_step = reinterpret_cast<LaunchDecodeStep*>(launch);
  const char* problem = launch_step(s, c10::cuda::getCurrentCUDAStream().stream());
  TORCH_CHECK_VALUE(problem == nullptr, "the decode step was not launched: ", problem);
}

#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(six_engines, library) {
  library.def(
      "decode_step(Tensor layer_table, Tensor embedding, Tensor final_norm, Tensor lm_head, Tensor cos, Tensor sin, "
      "Tensor(a!) kv_cache, Tensor(b!) last_tokens, Tensor batch_slots, Tensor positions, Tensor slot_mapping, "
      "Tensor block_tables, Tensor context_lens, Tensor temperatures, Tensor noise_keys, Tensor(c!) logits, "
      "Tensor(d!) result, Tensor(e!) workspace, Tensor(f!)? trace, int heads, int intermediate, float eps, int flags, "
      "int timeout_ms, int launch) -> ()");
}

#ifdef SIX_ENGINES_CUDA
TORCH_LIBRARY_IMPL(six_engines, CUDA, library) { library.impl("decode_step", &decode_step); }
#endif

}  // namespace six_engines
