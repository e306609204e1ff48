// The learner's CPU operator behind plain C functions.
#include "fused_mlp_cpu.cpp"

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

extern "C" const char* lab_normalise(const float* x, const float* weight, const float* bias, float* target, int count,
                                     double eps) {
  return guarded([&] { six_engines::normalise(x, weight, bias, target, count, eps); });
}

// dtype: 0 float32, 1 float16, 2 bfloat16; norm_bias is null for the gated block, residual for the other.
extern "C" const char* lab_mlp_cpu(int dtype, int gated, int rows, int hidden, int inter, double eps, void* x,
                                   void* norm_weight, void* norm_bias, void* w_in, void* w_out, void* residual,
                                   void* out) {
  return guarded([&] {
    const at::ScalarType types[] = {at::kFloat, at::kHalf, at::kBFloat16};
    auto tensor = [&](void* data, at::IntArrayRef sizes) {
      return data == nullptr ? at::Tensor() : at::from_blob(data, sizes, at::TensorOptions().dtype(types[dtype]));
    };
    const at::Tensor result =
        six_engines::mlp_cpu(tensor(x, {rows, hidden}), tensor(norm_weight, {hidden}), tensor(norm_bias, {hidden}),
                             tensor(w_in, {gated ? 2 * inter : inter, hidden}), tensor(w_out, {hidden, inter}),
                             tensor(residual, {rows, hidden}), eps);
    tensor(out, {rows, hidden}).copy_(result);
  });
}
