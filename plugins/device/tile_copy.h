// Copies of a tile of a row-major matrix from global to shared memory by cp.async, with guarded edges.
#pragma once

#include <cstdint>

#include "device/cp_async.h"
#include "device/pack.h"
#include "device/shared_memory.h"

namespace ortplugins {

// Bytes to which every row of a matrix is aligned, as far as copies care: 16, 4, or that of one element.
template <class T>
__device__ __forceinline__ int row_alignment(const T* base, int64_t ld) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(base) | static_cast<uint64_t>(ld) * sizeof(T);
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : static_cast<int>(sizeof(T));
}

// One 16-byte chunk of which the first `bytes` (0 to 16) exist, the rest becomes zeros. An alignment of 16 or 4 copies
// asynchronously; 16-bit elements at odd places take the way through registers.
template <class T>
__device__ __forceinline__ void copy_chunk(uint32_t smem, const T* gmem, int bytes, int alignment) {
  if (alignment == 16) {
    cp_async_16(smem, gmem, bytes);
  } else if (alignment == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int rest = bytes - 4 * i;
      cp_async_4(smem + 4 * i, reinterpret_cast<const char*>(gmem) + 4 * i, rest <= 0 ? 0 : rest < 4 ? rest : 4);
    }
  } else {
    const Pack<T> pack = load_pack_guarded(gmem, 0, bytes / static_cast<int>(sizeof(T)), from_float<T>(0.0F));
    store_shared(smem, *reinterpret_cast<const uint4*>(&pack));
  }
}

// Walks tiles of kRows x kCols, kThreads threads together. Thread i owns chunk i % kRowChunks of rows i / kRowChunks,
// i / kRowChunks + kRowStep, ... The walk goes along the columns (kAlongRow) or down the rows.
template <class T, class Layout, int kRows, int kCols, int kThreads, bool kAlongRow>
class TileCopy {
 public:
  static constexpr int kRowChunks = kCols / kPackSize<T>;
  static constexpr int kRowStep = kThreads / kRowChunks;
  static constexpr int kPerThread = kRows / kRowStep;
  static_assert(kThreads % kRowChunks == 0 && kRows % kRowStep == 0, "the threads cover whole rows");
  static_assert(kRowStep % 8 == 0, "so that a thread's rows share one swizzle");

  // `base` is the tile's first element, `rows` and `cols` what the matrix still has from there (any number, also above
  // the tile's own and, in the direction of the walk, counted to its end).
  __device__ __forceinline__ TileCopy(const T* base, int64_t ld, int64_t rows, int64_t cols, int alignment)
      : alignment_(alignment) {
    const int thread_idx = static_cast<int>(threadIdx.x);
    row_ = thread_idx / kRowChunks;
    const int chunk = thread_idx % kRowChunks;
    col_ = chunk * kPackSize<T>;
    target_ = Layout::offset(row_, chunk);
    source_ = base + row_ * ld + col_;
    row_step_ = kRowStep * ld;
    if (kAlongRow) {
      fixed_ = static_cast<int>(rows < kRows ? rows : kRows);
      left_ = cols;
      advance_ = kCols;
    } else {
      const int64_t bytes = (cols - col_) * static_cast<int64_t>(sizeof(T));
      fixed_ = bytes <= 0 ? 0 : bytes < kPackBytes ? static_cast<int>(bytes) : kPackBytes;
      left_ = rows;
      advance_ = kRows * ld;
    }
  }

  // Issues the copies of the tile at hand to `smem` and steps to the next. Past the end of the matrix zeros are written.
  __device__ __forceinline__ void copy_and_advance(uint32_t smem) {
    const int left = static_cast<int>(left_ <= 0 ? 0 : left_ < (kAlongRow ? kCols : kRows) ? left_ : (kAlongRow ? kCols : kRows));
    int bytes = fixed_;
    if (kAlongRow) {
      const int here = (left - col_) * static_cast<int>(sizeof(T));
      bytes = here <= 0 ? 0 : here < kPackBytes ? here : kPackBytes;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const bool row_exists = row_ + i * kRowStep < (kAlongRow ? fixed_ : left);
      copy_chunk(smem + target_ + i * kRowStep * kCols * static_cast<int>(sizeof(T)), source_ + i * row_step_, row_exists ? bytes : 0, alignment_);
    }
    source_ += advance_;
    left_ -= kAlongRow ? kCols : kRows;
  }

 private:
  const T* source_;
  int64_t row_step_, advance_, left_;
  int row_, col_, target_, fixed_, alignment_;
};

}  // namespace ortplugins
