// How many 16-byte packs a row spans; for the host code that chooses and launches kernels.
#pragma once

#include <cstdint>

namespace ortplugins {

// Kernels walk a contiguous row in 16-byte packs from the boundary at or below its start (device/pack.h): the most
// packs that any row of `cols` elements of `element` bytes spans, where the rows lie one behind the other from `x` on.
inline int64_t row_packs(const void* x, int64_t cols, int64_t element) {
  const int64_t size = 16 / element;
  const bool aligned = cols % size == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  return (cols + (aligned ? 0 : size - 1) + size - 1) / size;
}

}  // namespace ortplugins
