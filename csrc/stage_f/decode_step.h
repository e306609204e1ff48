// The interface of the host to the persistent megakernel, which runs one decode step of a Llama-family decoder.
//
// Plain C++ (no torch, no CUDA types), because there are two libraries: the operator, which knows torch
// (decode_step.cpp), and the kernel, which is compiled for the shape of one model (shape.cuh, launch.cu). Every pointer
// is a device pointer (`result` may be page-locked memory of the host, which has the same address on the device). Every
// value that changes from step to step (tokens, positions, block tables, context lengths) is read from device memory by
// the kernel, so one captured CUDA graph serves all steps.
#pragma once

#include <cstdint>

namespace six_engines {

constexpr int kMaxDecodeRows = 8;         // requests per launch: 2 sets of 4, a matrix instruction for each (gemv.cuh)
constexpr int kMaxBlocks = 160;           // of the grid; more multiprocessors than that would have nothing to do
constexpr int kLayerPointers = 9;         // columns of the layer table, in the order of `LayerWeights`

// Bits of `flags`. The first two leave something out for a measurement: the result is then wrong, only the time has a
// meaning. The third is for the test of a wait that times out: a launch that does not guarantee that all blocks run at
// once.
constexpr int kSkipStreaming = 1;         // weights are not fetched, products read what the ring has: hand-offs remain
constexpr int kSkipWaiting = 2;           // no block waits for another: what remains is streaming and arithmetic
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
  const float *cos, *sin;               // [positions, head_dim / 2]
  void* kv_cache;                       // [2, layers, blocks, block_size, kv_heads, head_dim]
  int blocks, block_size, block_shift, max_blocks;
  const std::int32_t* block_tables;     // [rows, max_blocks]
  const std::int32_t* context_lens;     // [rows], this step's token included
  const std::int64_t *slot_mapping, *positions;  // [rows]; slot -1: a padding row, which touches no KV
  const std::int64_t* batch_slots;      // [rows]: where in last_tokens the row's token is
  std::int64_t* last_tokens;            // [batch slots]: the tokens of this step, and then those that it has chosen
  const float* temperatures;            // [rows], 0: greedy
  const std::int32_t* noise_keys;       // [rows], the bits of an unsigned number
  float* logits;                        // [rows, vocab]
  std::int64_t* result;                 // [rows + 1]: the chosen tokens, and 0 or where a wait was given up
  unsigned char* workspace;             // decode_workspace_bytes(), zeroed once
  long long workspace_bytes;
  long long* trace;                     // null, or with SIX_TRACE: [blocks, kLayerMarks * layers + kEndMarks]
  int flags;
  long long timeout_ns;                 // a wait longer than this gives up and writes its place into the workspace
};

// For each block: nanoseconds; the clock at the start, after the prologue, and at the ends of the phases of each layer,
// of the LM head's input, its product and the choice; and nanoseconds again.
constexpr int kLayerMarks = 17, kEndMarks = 7;

// What the kernel's library exports: it enqueues the step and returns null, or a static text that says what is wrong.
using LaunchDecodeStep = const char*(const DecodeStep& step, void* stream);

}  // namespace six_engines
