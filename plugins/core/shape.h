// Shapes and tensor references. Sizes and offsets are 64-bit everywhere.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace ortplugins {

constexpr int kMaxRank = 8;

struct Shape {
  int rank = 0;
  int64_t dims[kMaxRank] = {};

  // Dimension `i`; negative counts from the end.
  constexpr int64_t operator[](int i) const { return dims[i < 0 ? rank + i : i]; }
  constexpr int64_t& operator[](int i) { return dims[i < 0 ? rank + i : i]; }

  // Product of dims [first, last).
  constexpr int64_t product(int first, int last) const {
    int64_t n = 1;
    for (int i = first; i < last; ++i) n *= dims[i];
    return n;
  }
  constexpr int64_t size() const { return product(0, rank); }

  constexpr bool operator==(const Shape& other) const {
    if (rank != other.rank) return false;
    for (int i = 0; i < rank; ++i) {
      if (dims[i] != other.dims[i]) return false;
    }
    return true;
  }
};

// A contiguous row-major tensor that somebody else owns. An absent optional tensor has dtype kNone.
struct TensorRef {
  void* data = nullptr;
  DType dtype = DType::kNone;
  Shape shape;

  constexpr bool present() const { return dtype != DType::kNone; }
  constexpr int64_t bytes() const { return shape.size() * static_cast<int64_t>(size_of(dtype)); }
};

// Strides, in elements, with which a tensor of `shape` is read as if it had the shape of `target` (NumPy broadcasting).
// `strides[i]` belongs to target dimension i and is 0 where the tensor is repeated. False if it does not broadcast.
constexpr bool broadcast_strides(const Shape& shape, const Shape& target, int64_t* strides) {
  if (shape.rank > target.rank) return false;
  int64_t stride = 1;
  for (int i = target.rank - 1; i >= 0; --i) {
    const int j = i - (target.rank - shape.rank);
    const int64_t dim = j < 0 ? 1 : shape.dims[j];
    if (dim != 1 && dim != target.dims[i]) return false;
    strides[i] = dim == 1 ? 0 : stride;
    if (j >= 0) stride *= dim;
  }
  return true;
}

}  // namespace ortplugins
