// Descriptors of tensors for TMA, made on the host for each call: no allocation, and no link to the driver library.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/status.h"
#include "device/dispatch.h"

namespace ortplugins {

template <class T>
constexpr CUtensorMapDataType tensor_map_type() {
  return std::is_same_v<T, float>     ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : std::is_same_v<T, __half>  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
         : std::is_same_v<T, uint8_t> ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                      : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// The driver's encoder, looked up once. Null where the driver does not have it.
inline auto tensor_map_encoder() {
  using Encoder = decltype(&cuTensorMapEncodeTiled);
  static const Encoder encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
      (void)cudaGetLastError();
      entry = nullptr;
    }
    return reinterpret_cast<Encoder>(entry);
  }();
  return encoder;
}

// What TMA asks of a matrix: 16-byte aligned base and rows. Sizes must fit 32 bits, which coordinates have.
inline bool tensor_map_allows(const void* base, int64_t row_bytes, int64_t rows, int64_t cols) {
  return (reinterpret_cast<uintptr_t>(base) | static_cast<uint64_t>(row_bytes)) % 16 == 0 && row_bytes < (int64_t{1} << 40) &&
         rows <= 0x7fffffff && cols <= 0x7fffffff;
}

// `rank` (up to 5) dimensions, innermost first; strides in elements of dimensions 1 and up. The box is what one copy
// brings; its rows are up to 128 bytes, swizzled, and lie 128 bytes apart: what is left of shorter ones is not written.
// `promotion`: what L2 reads of memory at least. 256 bytes help where blocks share what they read; what is read once streams
// faster with 128 (H200: 4.4 instead of 4.0 TB/s).
template <class T>
Status encode_tensor_map(CUtensorMap* map, const T* base, int rank, const int64_t* dims, const int64_t* strides, const int* box,
                         CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  const auto encoder = tensor_map_encoder();
  if (encoder == nullptr) return Status::unsupported("driver", "has no cuTensorMapEncodeTiled");
  cuuint64_t global_dims[5], global_strides[5];
  cuuint32_t box_dims[5], element_strides[5];
  for (int i = 0; i < rank; ++i) {
    global_dims[i] = static_cast<cuuint64_t>(dims[i]);
    if (i > 0) global_strides[i - 1] = static_cast<cuuint64_t>(strides[i] * static_cast<int64_t>(sizeof(T)));
    box_dims[i] = static_cast<cuuint32_t>(box[i]);
    element_strides[i] = 1;
  }
  const auto encode = [&] {
    return encoder(map, tensor_map_type<T>(), static_cast<cuuint32_t>(rank), const_cast<T*>(base), global_dims, global_strides, box_dims,
                   element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_NOT_INITIALIZED) {
    // The first call on this thread: only the runtime's own calls make a device's context current there.
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaSetDevice(device);
    if (error != cudaSuccess) return status_of(error, "cudaSetDevice");
    result = encode();
  }
  return result == CUDA_SUCCESS ? Status{} : Status::cuda("cuTensorMapEncodeTiled", static_cast<int>(result));
}

}  // namespace ortplugins
