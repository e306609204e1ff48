// The learner's CPU operator behind plain C functions.
#include "crash_line.h"
#include "stage_c/mlp_cpu.cpp"

#include <ATen/ops/from_blob.h>

#include <string>

namespace {

std::string failure;

template <typename Function>
const char* guarded(Function function) {
  try {
    function();
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
    return failure.c_str();
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
  return nullptr;
}

}  // namespace

extern "C" const char* lab_normalise(const float* x, const float* weight, float* target, int count, double eps) {
  return guarded([&] { six_engines::normalise(x, weight, target, count, eps); });
}

// dtype: 0 float32, 1 float16, 2 bfloat16.
extern "C" const char* lab_mlp_cpu(int dtype, int rows, int hidden, int inter, double eps, void* x, void* norm_weight,
                                   void* w_in, void* w_out, void* residual, void* out) {
  return guarded([&] {
    const at::ScalarType types[] = {at::kFloat, at::kHalf, at::kBFloat16};
    auto tensor = [&](void* data, at::IntArrayRef sizes) {
      return at::from_blob(data, sizes, at::TensorOptions().dtype(types[dtype]));
    };
    const at::Tensor all[] = {tensor(x, {rows, hidden}), tensor(norm_weight, {hidden}),
                              tensor(w_in, {2 * inter, hidden}), tensor(w_out, {hidden, inter}),
                              tensor(residual, {rows, hidden})};
    tensor(out, {rows, hidden}).copy_(six_engines::mlp_cpu({all[0], all[1], all[2], all[3], all[4], eps}));
  });
}
