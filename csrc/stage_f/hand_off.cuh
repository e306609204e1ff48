// The receiving end of a hand-off through L2: flag-in-data words into shared memory, in the order in which the product
// wants them.
#pragma once

#include "stage_f/gemv.cuh"

namespace six_engines {

// Pairs of 16-bit values, one pair a word.
__device__ __forceinline__ void receive_pairs(Worker& w, unsigned at, unsigned length, unsigned rows_of_units) {
  constexpr int kBatch = ceil_div(1280, kWorkers);  // all of a row of 5120 at once
  const int row_units = length / 2, units = row_units * w.step.rows;
  const Word* words = handed_off(w, at, length, w.parity, 0);
  const uint32_t act = shared_address(w.smem) + w.plan.act_at;
  const int stride = slot_stride(length * 2 / kStepColumns);
#pragma unroll 1
  for (int base = w.thread; base - w.lane < units; base += kBatch * kWorkers) {
    Word raw[kBatch][2] = {};
    wait_words(w, [&] {
      bool ready = true;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = base + i * kWorkers;
        if (unit >= units) continue;
        peek2(words + unit * 2, raw[i]);
        ready = ready && has_flag(raw[i][0], w.flag) && has_flag(raw[i][1], w.flag);
      }
      return ready;
    });
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int unit = base + i * kWorkers, row = __umulhi(unit, rows_of_units);
      if (unit >= units) continue;
      const uint32_t at = act + row * stride + act_offset((unit - row * row_units) * 2);
      store_shared(at, payload(raw[i][0]));
      store_shared(at + 8, payload(raw[i][1]));
    }
  }
  workers_sync();
}

// RMSNorm divides by a number that needs all of the row, but the product with the weights does not need it: what goes
// to shared memory is x * gain, the squares are added up while the product runs, and `norm_scale` is applied to its
// result. float16 could overflow without the division, so it goes in scaled down.
template <typename T>
constexpr float kPrescale = 1.0f;
template <>
constexpr float kPrescale<__half> = 1.0f / 64;

// The hidden state, one float32 a word (before the first layer: embedding rows). A unit is 64 values of a row, for one
// warp; `sums` receives the squares of each unit, and is complete after the next workers_sync.
template <typename T>
__device__ __forceinline__ void receive_hidden(Worker& w, bool embedded, Kind from, uint32_t flag, int parity,
                                               const void* gain) {
  constexpr int kBatch = 4;
  const DecodeStep& s = w.step;
  const int row_units = ceil_div(s.hidden, 64), units = row_units * s.rows, pairs = s.hidden / 2;
  const Word* words = handed_off(w, w.plan.vector_at[from], s.hidden, parity, 0);
  float* sums = w.shared<float>(w.plan.sums_at);
  const uint32_t act = shared_address(w.smem) + w.plan.act_at;
  const int stride = slot_stride(s.hidden / kStepColumns);
  float squares[kBatch];
  const auto add_up = [&](int base) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (base + i * kWarps >= units) break;
      const float sum = warp_sum(squares[i]);
      if (w.lane == 0) sums[base + i * kWarps] = sum;
    }
  };
  int base = w.warp;
#pragma unroll 1
  for (; base < units; base += kBatch * kWarps) {
    if (base != w.warp) add_up(base - kBatch * kWarps);
    float2 x[kBatch];
    uint32_t gains[kBatch];
    int rows[kBatch], columns[kBatch];  // columns in pairs
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int unit = base + i * kWarps;
      rows[i] = __umulhi(unit, w.plan.unit_rows);
      columns[i] = (unit - rows[i] * row_units) * 32 + w.lane;
      x[i] = make_float2(0.0f, 0.0f);
      if (unit >= units || columns[i] >= pairs) columns[i] = -1;
      if (columns[i] >= 0) gains[i] = __ldg(static_cast<const uint32_t*>(gain) + columns[i]);
      if (columns[i] >= 0 && embedded)
        x[i] = unpack_pair<T>(__ldg(static_cast<const uint32_t*>(s.embedding) +
                                    static_cast<long long>(token_table(w)[rows[i]]) * pairs + columns[i]));
    }
    if (!embedded) {
      wait_words(w, [&] {
        bool ready = true;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (columns[i] < 0) continue;
          Word raw[2];
          peek2(words + rows[i] * s.hidden + columns[i] * 2, raw);
          ready = ready && has_flag(raw[0], flag) && has_flag(raw[1], flag);
          x[i] = make_float2(__uint_as_float(payload(raw[0])), __uint_as_float(payload(raw[1])));
        }
        return ready;
      });
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      squares[i] = x[i].x * x[i].x + x[i].y * x[i].y;
      if (columns[i] < 0) continue;
      const float2 g = unpack_pair<T>(gains[i]);
      store_shared(act + rows[i] * stride + act_offset(columns[i]),
                   pack_pair<T>(x[i].x * g.x * kPrescale<T>, x[i].y * g.y * kPrescale<T>));
    }
  }
  workers_sync();
  if (base > w.warp) add_up(base - kBatch * kWarps);
}

template <typename T>
__device__ __forceinline__ float norm_scale(const Worker& w, int request) {
  const int row_units = ceil_div(w.step.hidden, 64);
  const float* sums = w.shared<float>(w.plan.sums_at) + min(request, w.step.rows - 1) * row_units;
  float squares = 0.0f;
#pragma unroll 8
  for (int i = 0; i < row_units; ++i) squares += sums[i];
  return rsqrtf(squares / w.step.hidden + w.step.eps) * (1.0f / kPrescale<T>);
}

}  // namespace six_engines
