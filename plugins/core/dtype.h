// Element types. The values are those of onnx.TensorProto.DataType, which ONNX Runtime uses as they are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ortplugins {

enum class DType : uint8_t {
  kNone = 0,
  kFloat32 = 1,
  kUInt8 = 2,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 9,
  kFloat16 = 10,
  kBFloat16 = 16,
};

constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kInt64:
      return 8;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kBool:
    case DType::kUInt8:
      return 1;
    case DType::kNone:
      break;
  }
  return 0;
}

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kUInt8:
      return "uint8";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kBool:
      return "bool";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kNone:
      break;
  }
  return "none";
}

}  // namespace ortplugins
