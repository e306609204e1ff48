// The receiving end of a hand-off through L2: flag-in-data words straight into the registers of the lanes that multiply
// with them.
#pragma once

#include "stage_f/attention_parts.cuh"

namespace six_engines {

// A warp's steps of a chunk begin at `first`. If the steps cannot be divided evenly, the last warps begin earlier than
// they should, so that every address is a plain sum, and their first `surplus` steps are not counted.
struct Part {
  int first, surplus;
};
template <Kind kKind, typename W>
__device__ __forceinline__ Part part_of(const W& w, int chunk) {
  constexpr MatrixPlan m = kMatrix<kKind>;
  const int mine = m.warp_steps_of(chunk), due = w.warp * mine, first = min(due, m.steps_of(chunk) - mine);
  return {first, due - first};
}

// The first column that this lane multiplies in a step of a chunk. A lane (g, q) needs 4 of a step's 32 columns, of
// request g / 2: see gemv.cuh.
template <Kind kKind, typename W>
__device__ __forceinline__ int column_of(const W& w, int chunk, int step) {
  return (chunk * kMatrix<kKind>.chunk_steps + part_of<kKind>(w, chunk).first + step) * 32 + (w.lane & 3) * 8 +
         (w.lane >> 2 & 1) * 4;
}
template <Kind kKind, typename W>
__device__ __forceinline__ bool step_counts(const W& w, int chunk, int step) {
  constexpr MatrixPlan m = kMatrix<kKind>;
  return m.steps_of(chunk) == m.warp_steps_of(chunk) * kWarps || step >= part_of<kKind>(w, chunk).surplus;
}

// A lane's part of a request's vector for a batch of chunks: two pairs of 16-bit values for each of its steps.
template <Kind kKind>
constexpr int kSteps = kMatrix<kKind>.warp_steps_of(0);  // of a warp in a chunk
template <Kind kKind>
struct Activations {
  uint2 of[kMatrix<kKind>.batch_chunks][kSteps<kKind>];
};

// Calls body(i, chunk, step) for this warp's steps of the chunks from `first` on, `kChunks` at most; i = chunk - first.
// (All bounds are constants, so that nothing is left of the loops and what they index stays in registers.)
template <Kind kKind, int kChunks, typename Body>
__device__ __forceinline__ void each_step(int first, Body body) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (int step = 0; step < kSteps<kKind>; ++step) {
      constexpr MatrixPlan m = kMatrix<kKind>;
      if (first + i < m.chunks && step < m.warp_steps_of(first + i)) body(i, first + i, step);
    }
  }
}

// RMSNorm divides by a number that needs all of the row, but the product with the weights does not need it: the product
// multiplies x * gain, the squares are added up at the same time, and `norm_scale` is applied to the product's result.
// float16 could overflow without the division, so it goes in scaled down.
template <typename U>
constexpr float kPrescale = 1.0f;
template <>
constexpr float kPrescale<__half> = 1.0f / 64;

// Whether a word must still be polled.
__device__ __forceinline__ bool lacks(const Word (&words)[2], uint32_t flag) {
  return !has_flag(words[0], flag) || !has_flag(words[1], flag);
}

// This lane's part of the hidden state, one float32 per word, times the norm's weight. sums: [request][8 warps].
template <Kind kKind, int kFrom, typename W, int kSets>
__device__ __forceinline__ void receive_hidden(W& w, uint32_t flag, int parity, const void* gain, float* sums,
                                               Activations<kKind> (&act)[kSets]) {
  constexpr MatrixPlan m = kMatrix<kKind>;
  constexpr int kChunks = larger(1, smaller(m.chunks, 10 / kSteps<kKind>));  // polled together
  uint2 gains[m.chunks][kSteps<kKind>];
  each_step<kKind, m.chunks>(0, [&](int, int chunk, int step) {
    gains[chunk][step] =
        __ldg(reinterpret_cast<const uint2*>(static_cast<const T*>(gain) + column_of<kKind>(w, chunk, step)));
  });
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    const int request = set * 4 + (w.lane >> 3);
    const Word* words = w.template handed_off<kFrom>(parity, min(request, w.step.rows - 1));
    float squares = 0.0f;
#pragma unroll
    for (int first = 0; first < m.chunks; first += kChunks) {
      Word raw[kChunks][kSteps<kKind>][2][2] = {};
      wait_words(w, [&] {
        bool ready = true;
        each_step<kKind, kChunks>(first, [&](int i, int chunk, int step) {
          const Word* at = words + column_of<kKind>(w, chunk, step);
          if (lacks(raw[i][step][0], flag)) peek2(at, raw[i][step][0]);
          if (lacks(raw[i][step][1], flag)) peek2(at + 2, raw[i][step][1]);
        });
        each_step<kKind, kChunks>(first, [&](int i, int, int step) {
          ready = ready && !lacks(raw[i][step][0], flag) && !lacks(raw[i][step][1], flag);
        });
        return ready;
      });
      each_step<kKind, kChunks>(first, [&](int i, int chunk, int step) {
        const bool counts = step_counts<kKind>(w, chunk, step);
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[j] = counts ? __uint_as_float(payload(raw[i][step][j / 2][j % 2])) : 0.0f;
          squares += x[j] * x[j];
        }
        const float2 low = unpack_pair<T>(gains[chunk][step].x), high = unpack_pair<T>(gains[chunk][step].y);
        act[set].of[chunk][step] = make_uint2(pack_pair<T>(x[0] * low.x * kPrescale<T>, x[1] * low.y * kPrescale<T>),
                                              pack_pair<T>(x[2] * high.x * kPrescale<T>, x[3] * high.y * kPrescale<T>));
      });
    }
#pragma unroll
    for (int offset = 1; offset <= 4; offset *= 2) squares += __shfl_xor_sync(kAllLanes, squares, offset);
    if ((w.lane & 7) == 0) sums[request * 8 + w.warp] = squares;
  }
}

// This lane's part of a vector of 16-bit values, two per word: a batch of chunks.
template <Kind kKind, int kFrom, int kBatch, typename W, int kSets>
__device__ __forceinline__ void receive_pairs(W& w, Activations<kKind> (&act)[kSets]) {
  constexpr MatrixPlan m = kMatrix<kKind>;
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    const Word* words = w.template handed_off<kFrom>(w.parity, min(set * 4 + (w.lane >> 3), w.step.rows - 1));
    Word raw[m.batch_chunks][kSteps<kKind>][2] = {};
    wait_words(w, [&] {
      bool ready = true;
      each_step<kKind, m.batch_chunks>(kBatch, [&](int i, int chunk, int step) {
        if (lacks(raw[i][step], w.flag)) peek2(words + column_of<kKind>(w, chunk, step) / 2, raw[i][step]);
      });
      each_step<kKind, m.batch_chunks>(kBatch, [&](int i, int, int step) {
        ready = ready && !lacks(raw[i][step], w.flag);
      });
      return ready;
    });
    each_step<kKind, m.batch_chunks>(kBatch, [&](int i, int chunk, int step) {
      const bool counts = step_counts<kKind>(w, chunk, step);
      act[set].of[i][step] =
          make_uint2(counts ? payload(raw[i][step][0]) : 0u, counts ? payload(raw[i][step][1]) : 0u);
    });
  }
}

// This lane's part of the attention, merged from the parts that blocks have published: a batch of chunks.
template <Kind kKind, int kBatch, typename W, int kSets>
__device__ __forceinline__ void receive_attended(W& w, Activations<kKind> (&act)[kSets]) {
  constexpr MatrixPlan m = kMatrix<kKind>;
  // Steps polled together: a chunk's, or of several chunks if they are few.
  constexpr int kChunks = larger(1, smaller(m.batch_chunks, 20 / W::kParts / kSteps<kKind>));
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    const int request = min(set * 4 + (w.lane >> 3), w.step.rows - 1);
    const int parts = row_table(w)[2 * kMaxDecodeRows + request];
    const Quad* quads[W::kParts];  // where there are fewer, the last again
#pragma unroll
    for (int part = 0; part < W::kParts; ++part) quads[part] = part_place(w, request, max(0, min(part, parts - 1)));
#pragma unroll
    for (int first = 0; first < m.batch_chunks; first += kChunks) {
      Quad raw[kChunks][kSteps<kKind>][W::kParts] = {};
      wait_words(w, [&] {
        bool ready = true;
        each_step<kKind, kChunks>(kBatch + first, [&](int i, int chunk, int step) {
          const int at = column_of<kKind>(w, chunk, step) / 4;
#pragma unroll
          for (int part = 0; part < W::kParts; ++part)
            if (raw[i][step][part].flag != w.flag) raw[i][step][part] = peek_quad(quads[part] + at);
        });
        each_step<kKind, kChunks>(kBatch + first, [&](int i, int, int step) {
#pragma unroll
          for (int part = 0; part < W::kParts; ++part) ready = ready && raw[i][step][part].flag == w.flag;
        });
        return ready || parts == 0;
      });
      each_step<kKind, kChunks>(kBatch + first, [&](int i, int chunk, int step) {
        act[set].of[first + i][step] = merge_parts(raw[i][step], step_counts<kKind>(w, chunk, step) ? parts : 0);
      });
    }
  }
}

// The same with one request alone. Lanes 8 p … 8 p + 7, which would have request p, have its part p: one word for a
// step instead of four. The parts are weighted here; the product's results, a column of the instruction for each part,
// are added up in `emit`.
template <Kind kKind, int kBatch, typename W>
__device__ __forceinline__ void receive_attended_alone(W& w, Activations<kKind>& act) {
  constexpr MatrixPlan m = kMatrix<kKind>;
  const int parts = row_table(w)[2 * kMaxDecodeRows], part = w.lane >> 3;
  const Quad* quads = part_place(w, 0, max(0, min(part, parts - 1)));  // where there are fewer, the last again
  Quad raw[m.batch_chunks][kSteps<kKind>] = {};
  wait_words(w, [&] {
    bool ready = true;
    each_step<kKind, m.batch_chunks>(kBatch, [&](int i, int chunk, int step) {
      if (raw[i][step].flag != w.flag) raw[i][step] = peek_quad(quads + column_of<kKind>(w, chunk, step) / 4);
    });
    each_step<kKind, m.batch_chunks>(kBatch, [&](int i, int, int step) {
      ready = ready && raw[i][step].flag == w.flag;
    });
    return ready || parts == 0;
  });
  each_step<kKind, m.batch_chunks>(kBatch, [&](int i, int chunk, int step) {
    const float logarithm = part < parts ? __uint_as_float(raw[i][step].extra) : -INFINITY;
    float largest = fmaxf(logarithm, __shfl_xor_sync(kAllLanes, logarithm, 8));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 16));
    const float weight = part < parts ? exp2_approx(logarithm - largest) : 0.0f;
    float sum = weight + __shfl_xor_sync(kAllLanes, weight, 8);
    sum += __shfl_xor_sync(kAllLanes, sum, 16);
    const float share = parts > 0 && step_counts<kKind>(w, chunk, step) ? __fdividef(weight, sum) : 0.0f;
    const float2 low = unpack_pair<T>(raw[i][step].low), high = unpack_pair<T>(raw[i][step].high);
    act.of[i][step] =
        make_uint2(pack_pair<T>(low.x * share, low.y * share), pack_pair<T>(high.x * share, high.y * share));
  });
}

template <typename W>
__device__ __forceinline__ float norm_scale(const W& w, const float* sums, int request) {
  const float4* at = reinterpret_cast<const float4*>(sums + request * 8);
  const float4 a = at[0], b = at[1];
  const float squares = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + b.z);
  return rsqrtf(squares * (1.0f / kHidden) + w.step.eps) * (1.0f / kPrescale<T>);
}

}  // namespace six_engines
