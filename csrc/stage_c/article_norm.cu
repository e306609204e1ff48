// An exercise: LayerNorm of rows as in the article that this course grew from, with its two bugs. Find them.
//
// `python -m stage_c_fused_mlp.first_kernel article_norm` runs it without a GPU, and says which rows are wrong.
// layernorm_mlp.cu has a correct version: look at it last.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>

constexpr int kRows = 3, kHidden = 256, kThreads = 64;

__global__ void article_norm(const float* x, float* y) {
  const float* x_row = x + blockIdx.x * kHidden;
  float mean = 0.0f, var = 0.0f;
  for (int i = threadIdx.x; i < kHidden; i += kThreads) {
    const float v = x_row[i];
    mean += v;
    var += v * v;
  }

  __shared__ float mean_buf;
  __shared__ float var_buf;
  atomicAdd(&mean_buf, mean);
  atomicAdd(&var_buf, var);
  __syncthreads();

  if (threadIdx.x == 0) {
    mean_buf /= kHidden;
    var_buf = rsqrtf(var_buf / kHidden - mean_buf * mean_buf + 1e-5f);
  }
  __syncthreads();

  for (int i = threadIdx.x; i < kHidden; i += kThreads) y[blockIdx.x * kHidden + i] = (x_row[i] - mean_buf) * var_buf;
}

int main() {
  // Rows 0 and 1 have the same numbers, -0.3 to 0.3. Row 2 has these numbers plus 1,000.
  static float x[kRows * kHidden], y[kRows * kHidden];
  for (int i = 0; i < kRows * kHidden; ++i) x[i] = float(i % kHidden % 7 - 3) / 10 + (i < 2 * kHidden ? 0.0f : 1000.0f);
  float *x_gpu, *y_gpu;
  cudaMalloc(&x_gpu, sizeof(x));
  cudaMalloc(&y_gpu, sizeof(y));
  cudaMemcpy(x_gpu, x, sizeof(x), cudaMemcpyHostToDevice);
  article_norm<<<kRows, kThreads>>>(x_gpu, y_gpu);
  cudaMemcpy(y, y_gpu, sizeof(y), cudaMemcpyDeviceToHost);

  bool right = true;
  for (int row = 0; row < kRows; ++row) {
    const float* numbers = x + row * kHidden;
    double mean = 0.0, variance = 0.0, off = 0.0;
    for (int i = 0; i < kHidden; ++i) mean += numbers[i] / double(kHidden);
    for (int i = 0; i < kHidden; ++i) variance += (numbers[i] - mean) * (numbers[i] - mean) / kHidden;
    for (int i = 0; i < kHidden; ++i) {
      const double expected = (numbers[i] - mean) / std::sqrt(variance + 1e-5);
      const double difference = std::abs(y[row * kHidden + i] - expected);
      off = difference <= off ? off : difference;  // NaN is not, so it stays
    }
    const bool ok = off < 0.01;
    std::printf("row %d: %s, off by up to %.3g\n", row, ok ? "right" : "WRONG", off);
    right &= ok;
  }
  return !right;
}
