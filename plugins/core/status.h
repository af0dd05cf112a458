// The result of every kernel library function. It holds no string of its own: a literal format and up to four numbers, so
// that it costs nothing on the path where all is well. Adapters turn it into the runtime's error with `message`.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace ortplugins {

enum class StatusCode : uint8_t {
  kOk = 0,
  kInvalidArgument,  // the caller's fault: a shape, a type or an attribute value
  kUnsupported,      // a legal request that this build or device cannot serve
  kCudaError,        // args[0] is the cudaError_t
};

struct Status {
  StatusCode code = StatusCode::kOk;
  const char* tensor = "";  // input, output or attribute at fault; a literal or a name from the op specification
  const char* format = "";  // a literal; each {} stands for the next of args
  std::array<int64_t, 4> args{};

  constexpr bool ok() const { return code == StatusCode::kOk; }

  static constexpr Status invalid(const char* tensor, const char* format, std::array<int64_t, 4> args = {}) {
    return {StatusCode::kInvalidArgument, tensor, format, args};
  }
  static constexpr Status unsupported(const char* tensor, const char* format, std::array<int64_t, 4> args = {}) {
    return {StatusCode::kUnsupported, tensor, format, args};
  }
  static constexpr Status cuda(const char* what, int error) {
    return {StatusCode::kCudaError, what, "CUDA error {}", {error, 0, 0, 0}};
  }
};

// "tensor: format with its numbers", for an adapter to put the op and node name in front of.
std::string message(const Status& status);

}  // namespace ortplugins

#define ORTPLUGINS_RETURN_IF_ERROR(expression)          \
  do {                                                  \
    if (::ortplugins::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)
