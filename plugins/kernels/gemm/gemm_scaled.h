// float32 operands as scaled float16, for products on the tensor cores at float16's rate.
//
// A row of op(a), or a column of op(b), is scaled by the power of two that brings its largest magnitude to [2^14, 2^15),
// and x 2^s = hi + lo with hi and lo in float16: 22 bits, down to a floor of 2^-25. Elements far below the largest of
// their row meet that floor, which is harmless unless what they are multiplied with is far above the rest of its column.
// The guard rules that out. Let at least c_a of the K elements of row i have |x 2^s| >= 2^8, and at least c_b of column j.
// Then c_a + c_b - K products are at least 2^16, and sum |a||b| >= (c_a + c_b - K) 2^16, while the floor adds at most
// 2 K 2^-25 2^15 = K 2^-9: with c_a + c_b >= 9/8 K a relative 2^-22 if all roundings conspired, and 1 / sqrt(K) of it as
// they fall. Strips of 128 rows or columns for which that does not hold, or which contain an infinity, a NaN or only
// numbers below 2^-112, are left to a kernel that needs no scaling.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "core/device.h"
#include "core/status.h"

namespace ortplugins {

constexpr int kGuardStrip = 128;    // rows or columns judged together: a tile of the kernels on both sides of the guard
constexpr float kGuardLarge = 256;  // 2^8

// What is known of the rows of op(a) or the columns of op(b).
struct ScaleStats {
  const uint32_t* max = nullptr;  // the bits of the largest magnitude
  const int* large = nullptr;     // how many elements reach kGuardLarge once scaled
  int64_t batch_stride = 0;       // 0: one for all products
};

// One operand on its way to float16: `matrices` of rows x cols, as they are stored.
struct ScaleJob {
  const float* x = nullptr;
  int64_t rows = 0, cols = 0, ld = 0, matrices = 1, matrix_stride = 0;
  bool along_row = true;   // k runs along the rows of the stored matrix
  __half* out = nullptr;   // (matrix, part, rows, out_ld), out_ld a multiple of 8
  int64_t out_ld = 0;
  uint32_t* max = nullptr;  // zeros
  int* large = nullptr;     // zeros
};

// Fills out, max and large of both operands, with `parts` (1: hi, 2: hi and lo).
Status scale_operands(const ScaleJob& a, const ScaleJob& b, int parts, const ExecContext& context);

#if defined(__CUDACC__)

// s, for the bits of the largest magnitude.
__device__ __forceinline__ int scale_exponent(uint32_t max_bits) {
  const int s = 141 - static_cast<int>(max_bits >> 23);
  return s < 126 ? s : 126;
}
// 2^e, e from -126 to 127.
__device__ __forceinline__ float exp2_int(int e) { return __int_as_float((e + 127) << 23); }

// Undoes the scaling of row and column: 2^-(s_row + s_col) in two factors, each of which float can hold.
struct Unscale {
  float first, second;
  __device__ __forceinline__ explicit Unscale(uint32_t max_bits) {
    const int s = scale_exponent(max_bits);
    first = exp2_int(-(s >> 1));
    second = exp2_int(-(s - (s >> 1)));
  }
  __device__ __forceinline__ float apply(float v, const Unscale& other) const { return v * (first * other.first) * (second * other.second); }
};

// For a tile of kGuardStrip x kGuardStrip: whether the scaled product holds. All threads of a block of at least 256.
__device__ __forceinline__ bool scaled_product_holds(const ScaleStats& a, const ScaleStats& b, int64_t batch_idx, int64_t first_m,
                                                     int64_t first_n, int64_t m, int64_t n, int64_t k) {
  constexpr int kNever = -(1 << 30);
  __shared__ int smallest[8];
  const int thread_idx = static_cast<int>(threadIdx.x);
  if (thread_idx < 2 * kGuardStrip) {
    const bool of_a = thread_idx < kGuardStrip;
    const ScaleStats& stats = of_a ? a : b;
    const int64_t at = of_a ? first_m + thread_idx : first_n + thread_idx - kGuardStrip;
    const int whole = static_cast<int>(k);
    int count = whole;
    if (at < (of_a ? m : n)) {
      const uint32_t max_bits = stats.max[batch_idx * stats.batch_stride + at];
      const bool in_range = max_bits < 0x7f800000U && (max_bits >> 23) >= 15;
      count = max_bits == 0 ? whole : in_range ? stats.large[batch_idx * stats.batch_stride + at] : kNever;
    }
    count = __reduce_min_sync(0xffffffffU, count);
    if (thread_idx % 32 == 0) smallest[thread_idx / 32] = count;
  }
  __syncthreads();
  int of_a = smallest[0], of_b = smallest[4];
  for (int i = 1; i < 4; ++i) {
    of_a = of_a < smallest[i] ? of_a : smallest[i];
    of_b = of_b < smallest[4 + i] ? of_b : smallest[4 + i];
  }
  return static_cast<int64_t>(of_a) + of_b - k >= k / 8 + 1;
}

#endif

}  // namespace ortplugins
