// Numbers in error messages. They become text here and not in a stream: where the toolchain links a C++ library of its
// own into an extension, a stream's number formatting would meet torch's library's locale and crash before the error is
// reported.
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace six_engines {

using std::to_string;

inline std::string to_string(at::IntArrayRef numbers) {
  std::string text = "[";
  for (const int64_t number : numbers) text += (text.size() > 1 ? ", " : "") + to_string(number);
  return text + "]";
}

}  // namespace six_engines
