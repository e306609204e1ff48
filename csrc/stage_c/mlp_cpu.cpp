// The MLP block on the CPU, as plain C++: the formula, with weight rows divided among the cores and float32 sums.
//
// A weight row is converted to floats once and then multiplied with every row of x, so each weight is converted once,
// not once per row. The inner loops are plain loops that the compiler turns into vector instructions.
#include "stage_c/mlp_cpu.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>

#include <cmath>
#include <cstring>
#include <vector>

// On x86-64 gcc compiles these functions three times and picks one when the library is loaded: one build fits all.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

namespace six_engines {
namespace {

constexpr int64_t kLanes = 16;       // partial sums of a dot product: one 512-bit vector of floats
constexpr int64_t kRowsPerTask = 8;  // weight rows that a thread takes at least: less is not worth waking it

FOR_EACH_CPU float dot(const float* a, const float* b, int64_t count) {
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  float total = 0.0f;
  for (; i < count; ++i) total += a[i] * b[i];
  for (float sum : sums) total += sum;
  return total;
}

FOR_EACH_CPU void widen(const at::BFloat16* source, float* target, int64_t count) {
  const auto* bits = reinterpret_cast<const uint16_t*>(source);
  auto* words = reinterpret_cast<uint32_t*>(target);
  for (int64_t i = 0; i < count; ++i) words[i] = uint32_t(bits[i]) << 16;  // bfloat16 is the upper half of a float
}

// float16: the exponent and mantissa move 13 bits up, and a multiplication by 2^112 mends the exponent's bias, for
// subnormal numbers too. The largest exponent means infinity or NaN and keeps that meaning.
FOR_EACH_CPU void widen(const at::Half* source, float* target, int64_t count) {
  const auto* bits = reinterpret_cast<const uint16_t*>(source);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t half = bits[i];
    const uint32_t magnitude = (half & 0x7fffu) << 13;
    float value;
    std::memcpy(&value, &magnitude, sizeof(value));
    value *= 0x1p112f;
    uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    word = (half & 0x7c00u) == 0x7c00u ? (magnitude | 0x7f800000u) : word;
    word |= (half & 0x8000u) << 16;
    std::memcpy(&target[i], &word, sizeof(word));
  }
}

void widen(const float* source, float* target, int64_t count) { std::memcpy(target, source, count * sizeof(float)); }

float silu(float value) { return value / (1.0f + std::exp(-value)); }

// target = x / sqrt(mean(x^2) + eps) * weight. x and target may be the same array.
void normalise(const float* x, const float* weight, float* target, int64_t count, double eps) {
  double squares = 0.0;
  for (int64_t k = 0; k < count; ++k) squares += double(x[k]) * x[k];
  const double inverse = 1.0 / std::sqrt(squares / double(count) + eps);
  for (int64_t k = 0; k < count; ++k) target[k] = static_cast<float>(x[k] * inverse) * weight[k];
}

template <typename T>
std::vector<float> to_floats(const at::Tensor& tensor) {
  std::vector<float> floats(tensor.numel());
  widen(tensor.const_data_ptr<T>(), floats.data(), tensor.numel());
  return floats;
}

template <typename T>
void run(const MlpTensors& m, at::Tensor& out) {
  const int64_t rows = m.x.size(0), hidden = m.x.size(1), inter = m.w_out.size(1);
  const std::vector<float> weight = to_floats<T>(m.norm_weight), skip = to_floats<T>(m.residual);
  std::vector<float> normalised = to_floats<T>(m.x);  // [rows, hidden]
  for (int64_t r = 0; r < rows; ++r) {
    float* row = normalised.data() + r * hidden;
    normalise(row, weight.data(), row, hidden, m.eps);
  }

  std::vector<float> neurons(rows * inter);  // [rows, inter]
  const T* in = m.w_in.const_data_ptr<T>();
  at::parallel_for(0, inter, kRowsPerTask, [&](int64_t begin, int64_t end) {
    std::vector<float> gate(hidden), up(hidden);
    for (int64_t j = begin; j < end; ++j) {
      widen(in + j * hidden, gate.data(), hidden);
      widen(in + (inter + j) * hidden, up.data(), hidden);
      for (int64_t r = 0; r < rows; ++r) {
        const float* row = normalised.data() + r * hidden;
        neurons[r * inter + j] = silu(dot(row, gate.data(), hidden)) * dot(row, up.data(), hidden);
      }
    }
  });

  const T* down = m.w_out.const_data_ptr<T>();
  T* result = out.mutable_data_ptr<T>();
  at::parallel_for(0, hidden, kRowsPerTask, [&](int64_t begin, int64_t end) {
    std::vector<float> row(inter);
    for (int64_t o = begin; o < end; ++o) {
      widen(down + o * inter, row.data(), inter);
      for (int64_t r = 0; r < rows; ++r) {
        const float value = dot(neurons.data() + r * inter, row.data(), inter);
        result[r * hidden + o] = static_cast<T>(value + skip[r * hidden + o]);
      }
    }
  });
}

}  // namespace

at::Tensor mlp_cpu(const MlpTensors& m) {
  at::Tensor out = at::empty_like(m.x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, m.x.scalar_type(), "mlp_cpu", [&] {
    if constexpr (!std::is_same_v<scalar_t, double>) run<scalar_t>(m, out);
  });
  return out;
}

}  // namespace six_engines
