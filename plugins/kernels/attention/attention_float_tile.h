// Tiles of float rows in shared memory.
#pragma once

#include "device/cp_async.h"
#include "kernels/attention/attention_device.h"

namespace ortplugins {

// Loads kRows rows of `dim` floats, which lie kStride floats apart in `tile`; row_of(r) gives row r, or null for a row
// of zeros. Columns from `dim` to the next multiple of 32 become zeros, those beyond are not written.
template <int kDim, int kStride, int kRows, int kThreads, class RowOf>
__device__ __forceinline__ void load_float_tile(float* tile, int thread, int dim, bool packs, const void* anywhere,
                                                RowOf row_of) {
  constexpr int kChunks = kDim / 4;
  constexpr int kRowsPerPass = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kRowsPerPass == 0);
  const int col = thread % kChunks * 4;
  if (col >= (dim + 31) / 32 * 32) return;
#pragma unroll 4
  for (int n = 0; n < kRows / kRowsPerPass; ++n) {
    const int r = thread / kChunks + n * kRowsPerPass;
    const float* const row = row_of(r);
    const uint32_t to = smem_address(tile + r * kStride + col);
    const int valid = row == nullptr ? 0 : dim - col;
    if (packs) {
      cp_async_16(to, valid > 0 ? static_cast<const void*>(row + col) : anywhere, valid > 0 ? 16 : 0);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        cp_async_4(to + 4 * e, e < valid ? static_cast<const void*>(row + col + e) : anywhere, e < valid ? 4 : 0);
      }
    }
  }
}

// The same for rows [j0, j0 + kRows) of k or v; those from `last` on become zeros. Aligned rows without a cache in
// front of them take four instructions for each copy.
template <int kDim, int kStride, int kRows, int kThreads>
__device__ __forceinline__ void load_key_tile(float* tile, int thread, const KeyRows<float>& keys, int j0, int last,
                                              int dim, bool packs) {
  if (!packs || keys.past_len > 0) {
    load_float_tile<kDim, kStride, kRows, kThreads>(tile, thread, dim, packs, keys.current,
                                                    [&](int r) { return j0 + r < last ? keys.row(j0 + r) : nullptr; });
    return;
  }
  constexpr int kChunks = kDim / 4;
  constexpr int kRowsPerPass = kThreads / kChunks;
  const int col = thread % kChunks * 4, first = j0 + thread / kChunks;
  if (col >= (dim + 31) / 32 * 32) return;
  const int left = col < dim ? last - first : 0;
  const float* from = keys.current + first * keys.stride + col;
  const uint32_t to = smem_address(tile + thread / kChunks * kStride + col);
#pragma unroll
  for (int n = 0; n < kRows / kRowsPerPass; ++n) {
    cp_async_16(to + n * kRowsPerPass * kStride * 4, from, n * kRowsPerPass < left ? 16 : 0);
    from += kRowsPerPass * keys.stride;
  }
}

}  // namespace ortplugins
