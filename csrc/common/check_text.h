// Numbers in error messages are converted to text here and not by a stream. If the toolchain links another C++ library
// into an extension, a stream's number formatting would clash with the locale of torch's C++ library and crash before
// the error is reported.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace six_engines {

using std::to_string;

inline std::string to_string(at::IntArrayRef numbers) {
  std::string text = "[";
  for (const int64_t number : numbers) text += (text.size() > 1 ? ", " : "") + to_string(number);
  return text + "]";
}

}  // namespace six_engines
