// The fused MLP kernel by itself, without torch, for compute-sanitizer's racecheck: see test_stage_c_cuda.py.
#include "stage_c/mlp_fused.cu"

#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace six_engines;

static void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <typename T>
T* random_numbers(size_t count, float scale) {
  std::vector<T> host(count);
  for (T& value : host) value = T((std::rand() / float(RAND_MAX) - 0.5f) * scale);
  T* device = nullptr;
  check(cudaMalloc(&device, count * sizeof(T)), "cudaMalloc");
  check(cudaMemcpy(device, host.data(), count * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return device;
}

template <typename T>
void run(DType dtype, int rows, int hidden, int inter) {
  MlpProblem p{};
  p.rows = rows, p.hidden = hidden, p.inter = inter, p.eps = 1e-5f, p.dtype = dtype;
  p.x = random_numbers<T>(size_t(rows) * hidden, 2.0f);
  p.norm_weight = random_numbers<T>(hidden, 2.0f);
  p.w_in = random_numbers<T>(size_t(2) * inter * hidden, 0.1f);
  p.w_out = random_numbers<T>(size_t(hidden) * inter, 0.1f);
  p.residual = random_numbers<T>(size_t(rows) * hidden, 1.0f);
  p.out = random_numbers<T>(size_t(rows) * hidden, 1.0f);
  check(cudaMalloc(&p.scratch, scratch_bytes(p)), "cudaMalloc");
  check(launch_mlp_fused(p, nullptr), "launch");
  check(cudaDeviceSynchronize(), "kernel");
  for (const void* pointer : {p.x, p.norm_weight, p.w_in, p.w_out, p.residual})
    check(cudaFree(const_cast<void*>(pointer)), "cudaFree");
  check(cudaFree(p.out), "cudaFree");
  check(cudaFree(p.scratch), "cudaFree");
}

int main() {
  run<__nv_bfloat16>(DType::kBFloat16, 3, 104, 328);
  run<__half>(DType::kFloat16, 16, 256, 136);
  run<__nv_bfloat16>(DType::kBFloat16, 1, 896, 4864);
  run<__nv_bfloat16>(DType::kBFloat16, 9, 896, 4864);
  run<float>(DType::kFloat32, 1, 896, 4864);
}
