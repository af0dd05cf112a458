// From a dtype that is known when a kernel runs to a C++ type that is known when it is compiled.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/status.h"

namespace ortplugins {

template <class T>
struct TypeTag {
  using type = T;
};

// Calls body(TypeTag<Element>{}) with the type that stands for the dtype on this side: the CPU kernels and the CUDA kernels
// have their own for the 16-bit ones.
template <class Float32, class Float16, class BFloat16, class Body>
Status dispatch_as(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(TypeTag<Float32>{});
    case DType::kFloat16:
      return body(TypeTag<Float16>{});
    case DType::kBFloat16:
      return body(TypeTag<BFloat16>{});
    default:
      return Status::unsupported("dtype", "has the ONNX type code {}, not a floating-point type that the kernels know",
                                 {static_cast<int64_t>(dtype)});
  }
}

}  // namespace ortplugins
