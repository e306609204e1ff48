// The shape that this library is compiled for: every size of the model is a constant, given to the compiler with -D.
#pragma once

#include "common/vectors.cuh"
#include "stage_f/decode_step.h"

namespace six_engines {

constexpr int kLayers = SIX_LAYERS, kHidden = SIX_HIDDEN, kIntermediate = SIX_INTERMEDIATE, kVocab = SIX_VOCAB;
constexpr int kHeads = SIX_HEADS, kKvHeads = SIX_KV_HEADS, kHeadDim = SIX_HEAD_DIM;
constexpr int kGrid = SIX_GRID;  // blocks: one per multiprocessor
constexpr int kGroup = kHeads / kKvHeads;

static_assert(kHeadDim == 64 || kHeadDim == 128, "head_dim must be 64 or 128");
static_assert(kHeads % kKvHeads == 0 && kGroup <= 8, "heads must be a multiple of kv_heads, at most 8 to one");
static_assert(kHidden % 32 == 0 && kIntermediate % 32 == 0, "hidden and intermediate must be multiples of 32");
static_assert(kGrid <= kMaxBlocks && kGrid <= kIntermediate / 2, "every block owns a part of the MLP: see kernel.cuh");

#ifdef SIX_HALF
using T = __half;
constexpr bool kHalf = true;
#else
using T = __nv_bfloat16;
constexpr bool kHalf = false;
#endif

#ifdef SIX_TRACE
constexpr bool kTrace = true;
#else
constexpr bool kTrace = false;
#endif

}  // namespace six_engines
