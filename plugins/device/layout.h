// Where elements of a tile lie in shared memory: swizzles that keep a warp's accesses in different banks without padding.
//
// A tile is rows of 16-byte chunks. Shared memory has 32 banks of 4 bytes, so eight chunks span them all; a layout
// exchanges chunks within a row by an exclusive or with bits of the row index.
#pragma once

#include <cstdint>

#include "device/pack.h"

namespace ortplugins {

// For ldmatrix, which reads one chunk of each of eight neighbouring rows at a time: the eight fall in different banks.
template <int kRowBytes>
struct LdmatrixLayout {
  static constexpr int kChunks = kRowBytes / kPackBytes;
  static_assert(kChunks == 4 || kChunks % 8 == 0, "rows of 64 bytes or of a multiple of 128");

  // Byte offset of a chunk. Rows that differ by a multiple of 8 differ by row * kRowBytes alone.
  __device__ __forceinline__ static int offset(int row, int chunk) {
    // Two rows of 64 bytes lie side by side in the banks: row / 2 tells which of the four pairs.
    const int swizzle = kChunks == 4 ? (row >> 1) & 3 : row & 7;
    return row * kRowBytes + (chunk ^ swizzle) * kPackBytes;
  }
};

// For 32-bit accesses by a lane t = lane % 4 to row t and column g = lane / 4 of an 8-column, 4-row patch (tf32 fragments
// of tiles whose rows run along m or n), and for 64-bit accesses by accumulator fragments (row g, columns 2t and 2t + 1):
// four neighbouring rows put the same two chunks in four different pairs.
template <int kRowBytes>
struct PairLayout {
  static constexpr int kChunks = kRowBytes / kPackBytes;
  static_assert(kChunks % 8 == 0, "rows of a multiple of 128 bytes");

  __device__ __forceinline__ static int offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ ((row & 3) << 1)) * kPackBytes;
  }
};

}  // namespace ortplugins
