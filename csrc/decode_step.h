// One whole decode step of a Llama-family decoder in one kernel launch: what the host hands over.
//
// Plain C++ (no torch, no CUDA types), so that both the checks (decode_step.cpp) and the kernel (decode_step_kernel.cu)
// can include it. Every pointer is a device pointer; every value that changes from step to step (token ids, positions,
// block tables, context lengths) is read from device memory by the kernel, so one captured CUDA graph serves all steps.
#pragma once

#include <cstdint>

namespace six_engines {

constexpr int kMaxDecodeRows = 8;         // requests a launch can serve: the n of the m16n8k16 matrix instruction
constexpr int kMaxDecodeSplits = 64;      // pieces one (row, KV head) attention may be cut into
constexpr int kMaxDecodeReplicas = 4;     // copies of an exchanged vector, so that not all SMs read the same L2 lines
constexpr int kLayerPointers = 9;         // columns of the layer table, in the order of `LayerWeights`

// What a measurement may leave out (the result is then wrong; only the time means something).
constexpr int kSkipStreaming = 1;         // weights are not fetched: what is left is the chain of exchanges
constexpr int kSkipExchange = 2;          // nobody waits for anybody: what is left is streaming and arithmetic
constexpr int kPlainLaunch = 4;           // ordinary instead of cooperative launch

struct LayerWeights {                     // one row of the layer table; null where the family has no such weight
  const void* input_norm;               // [hidden]
  const void* qkv;                      // [(heads + 2 * kv_heads) * head_dim, hidden]
  const void* qkv_bias;                 // [(heads + 2 * kv_heads) * head_dim] or null
  const void* q_norm;                   // [head_dim] or null
  const void* k_norm;                   // [head_dim] or null
  const void* o;                        // [hidden, heads * head_dim]
  const void* post_norm;                // [hidden]
  const void* gate_up;                  // [2 * intermediate, hidden], gate rows first
  const void* down;                     // [hidden, intermediate]
};

struct DecodeStep {
  int rows, layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
  float eps;
  bool half;                            // float16 weights and KV; otherwise bfloat16
  const LayerWeights* layer_table;      // [layers]
  const void *embedding, *final_norm, *lm_head;
  const float *cos, *sin;               // [positions, rope_stride]; the first head_dim / 2 columns are read
  int rope_stride;
  void* kv_cache;                       // [2, layers, blocks, block_size, kv_heads, head_dim]
  int blocks, block_size, max_blocks;
  const std::int32_t* block_tables;     // [rows, max_blocks]
  const std::int32_t* context_lens;     // [rows], this step's token included
  const std::int64_t *slot_mapping, *token_ids, *positions;  // [rows]; slot -1: a padding row, which touches no KV
  float* logits;                        // [rows, vocab]
  unsigned char* workspace;             // decode_workspace_bytes(), zeroed once
  long long* trace;                     // null, or clocks of every phase: [blocks, trace_marks]
  int trace_marks;                      // 9 a layer, then 3
  int max_splits, replicas, slot_bytes, flags;
  long long timeout_ns;                 // a wait longer than this gives up and leaves its place in the workspace
};

// Bytes of workspace for this shape (independent of `rows`, so that launches of any row count share one).
std::int64_t decode_workspace_bytes(const DecodeStep& step);

// Enqueues the step. Returns null, or a static text that says what is wrong.
const char* launch_decode_step(const DecodeStep& step, void* stream);

}  // namespace six_engines
