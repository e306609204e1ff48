// Three kernels for one product, y = W x: a thread per row, a block per row, a warp per row.
//
// `python -m stage_c_fused_mlp.first_kernel` runs them without a GPU. With one, in the repository's folder:
//     nvcc -o first_kernel csrc/stage_c/first_kernel.cu && ./first_kernel
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

constexpr int kRows = 10, kColumns = 1000;  // of W; no multiples of 32, as it often is
constexpr int kThreads = 64;                // of a block

__global__ void thread_per_row(const float* w, const float* x, float* y) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= kRows) return;  // there are more threads than rows
  float sum = 0.0f;
  for (int k = 0; k < kColumns; ++k) sum += w[row * kColumns + k] * x[k];
  y[row] = sum;
}

__global__ void block_per_row(const float* w, const float* x, float* y) {
  __shared__ float sums[kThreads];  // one array for all threads of the block
  float sum = 0.0f;
  for (int k = threadIdx.x; k < kColumns; k += kThreads) sum += w[blockIdx.x * kColumns + k] * x[k];
  sums[threadIdx.x] = sum;
  __syncthreads();  // all threads have stored their sums
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (int thread = 0; thread < kThreads; ++thread) total += sums[thread];
    y[blockIdx.x] = total;
  }
}

__global__ void warp_per_row(const float* w, const float* x, float* y) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= kRows) return;  // a warp returns as a whole, so no shuffle misses a lane
  float sum = 0.0f;
  for (int k = lane; k < kColumns; k += 32) sum += w[row * kColumns + k] * x[k];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (lane == 0) y[row] = sum;
}

// Copy y from the GPU and compare it with a plain loop. Small whole numbers: each sum is exact in any order.
static bool is_right(const char* kernel, const float* w, const float* x, float* y_gpu) {
  float y[kRows];
  cudaMemcpy(y, y_gpu, sizeof(y), cudaMemcpyDeviceToHost);
  cudaMemset(y_gpu, 0xff, sizeof(y));  // NaN: the next kernel must not find these results
  int wrong = 0;
  for (int row = 0; row < kRows; ++row) {
    float sum = 0.0f;
    for (int k = 0; k < kColumns; ++k) sum += w[row * kColumns + k] * x[k];
    wrong += !(y[row] == sum);
  }
  std::printf("%s: %d of %d rows are right\n", kernel, kRows - wrong, kRows);
  return wrong == 0;
}

int main() {
  static float w[kRows * kColumns], x[kColumns];
  for (int i = 0; i < kRows * kColumns; ++i) w[i] = float(i % 7 - 3);
  for (int k = 0; k < kColumns; ++k) x[k] = float(k % 5 - 2);
  float *w_gpu, *x_gpu, *y_gpu;  // addresses in the GPU's memory
  cudaMalloc(&w_gpu, sizeof(w));
  cudaMalloc(&x_gpu, sizeof(x));
  cudaMalloc(&y_gpu, kRows * sizeof(float));
  cudaMemcpy(w_gpu, w, sizeof(w), cudaMemcpyHostToDevice);
  cudaMemcpy(x_gpu, x, sizeof(x), cudaMemcpyHostToDevice);

  bool right = true;
  thread_per_row<<<(kRows + kThreads - 1) / kThreads, kThreads>>>(w_gpu, x_gpu, y_gpu);
  right &= is_right("a thread per row", w, x, y_gpu);
  block_per_row<<<kRows, kThreads>>>(w_gpu, x_gpu, y_gpu);
  right &= is_right("a block per row", w, x, y_gpu);
  warp_per_row<<<(kRows * 32 + kThreads - 1) / kThreads, kThreads>>>(w_gpu, x_gpu, y_gpu);
  right &= is_right("a warp per row", w, x, y_gpu);
  return !right;
}
