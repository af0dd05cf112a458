// Pieces of the attention kernels on mma.sync (sm_80): tiles of 16-bit rows in shared memory, the two products, the online
// softmax on accumulator fragments, and the way out.
//
// The accumulator of a 16 x 8 tile (device/mma.h) gives lane 4g + t rows g and g + 8, columns 2t and 2t + 1. So the four
// lanes of a group hold a row of scores; and two neighbouring score tiles, rounded to 16 bits, are as they stand the A
// fragment of a 16 x 16 tile of weights: the weights never leave the registers.
#pragma once

#include "device/cp_async.h"
#include "device/mma.h"
#include "kernels/attention/attention_device.h"

namespace ortplugins {

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of kDim 16-bit elements per row. Chunks are permuted by the
// row, so that the eight rows that ldmatrix reads at one chunk lie in different banks.
template <int kDim>
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
  return static_cast<uint32_t>(row * kDim * 2 + ((chunk ^ (row & 7)) << 4));
}

// A tile's place in shared memory is a multiple of its row's bytes. So the address of chunk c + 2i of a row is that of its
// chunk c (0 or 1) with i << 5 exclusive-or'ed in: one instruction at the place of use (ahead of the mainloop they would take
// up to 50 registers).
constexpr int kTileAlign = 1024;

// Loads kRows rows of `dim` elements; row_of(r) gives row r, or null for a row of zeros. Columns from `dim` to the next
// multiple of 16 become zeros, those beyond are neither written nor read. Aligned rows travel by cp.async; others pass
// through registers.
template <class T, int kDim, int kRows, int kThreads, class RowOf>
__device__ __forceinline__ void load_tile(char* tile, int thread, int dim, bool packs, const void* anywhere, RowOf row_of) {
  constexpr int kChunks = kDim / 8;
  static_assert(kThreads % kChunks == 0 && kRows % (kThreads / kChunks) == 0);
  const int chunk = thread % kChunks;
  if (chunk * 8 >= (dim + 15) / 16 * 16) return;
#pragma unroll 2
  for (int n = 0; n < kRows / (kThreads / kChunks); ++n) {
    const int r = thread / kChunks + n * (kThreads / kChunks);
    const T* const row = row_of(r);
    char* const to = tile + tile_offset<kDim>(r, chunk);
    const int valid = row == nullptr ? 0 : dim - chunk * 8;
    if (packs) {
      cp_async_16(smem_address(to), valid > 0 ? static_cast<const void*>(row + chunk * 8) : anywhere, valid > 0 ? 16 : 0);
    } else {
      store_pack(reinterpret_cast<T*>(to), load_pack_guarded<T>(row + chunk * 8, 0, valid, from_float<T>(0.0F)));
    }
  }
}

// s += q k^T for 16 * kMmaM rows of q from `q_tile` on, and 8 * kTiles keys from `k_tile` on.
template <class T, int kDim, int kMmaM, int kTiles>
__device__ __forceinline__ void mma_qk(float (&s)[kMmaM][kTiles][4], uint32_t q_tile, uint32_t k_tile, int head_dim) {
  const int lane_idx = static_cast<int>(threadIdx.x) % 32;
  const int q_row = lane_idx % 16, q_chunk = lane_idx / 16;
  const int k_row = lane_idx % 8 + lane_idx / 16 * 8, k_chunk = lane_idx / 8 % 2;
  const uint32_t q_address = computed_in_place(q_tile + tile_offset<kDim>(q_row, q_chunk));
  const uint32_t k_address = computed_in_place(k_tile + tile_offset<kDim>(k_row, k_chunk));
#pragma unroll
  for (int kk = 0; kk < kDim / 16; ++kk) {
    if (kk * 16 < head_dim) {
      uint32_t rQ[kMmaM][4];
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) ldmatrix_x4(rQ[m], (q_address ^ kk << 5) + m * 16 * kDim * 2);
#pragma unroll
      for (int n = 0; n < kTiles / 2; ++n) {
        uint32_t rK[4];  // keys 16n..16n+7: d 0-7, d 8-15; keys 16n+8..: d 0-7, d 8-15
        ldmatrix_x4(rK, (k_address ^ kk << 5) + n * 16 * kDim * 2);
#pragma unroll
        for (int m = 0; m < kMmaM; ++m) {
          mma_m16n8k16<T>(s[m][2 * n], rQ[m], rK[0], rK[1]);
          mma_m16n8k16<T>(s[m][2 * n + 1], rQ[m], rK[2], rK[3]);
        }
      }
    }
  }
}

// acc += weights v; weights are the score fragments after the softmax.
template <class T, int kDim, int kMmaM, int kTiles>
__device__ __forceinline__ void mma_pv(float (&acc)[kMmaM][kDim / 8][4], const float (&s)[kMmaM][kTiles][4], uint32_t v_tile,
                                       int v_head_dim) {
  const int lane_idx = static_cast<int>(threadIdx.x) % 32;
  const int v_row = lane_idx % 16, v_chunk = lane_idx / 16;
  const uint32_t v_address = computed_in_place(v_tile + tile_offset<kDim>(v_row, v_chunk));
#pragma unroll
  for (int kk = 0; kk < kTiles / 2; ++kk) {
    uint32_t rP[kMmaM][4];
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
      rP[m][0] = pack_half2<T>(s[m][2 * kk][0], s[m][2 * kk][1]);
      rP[m][1] = pack_half2<T>(s[m][2 * kk][2], s[m][2 * kk][3]);
      rP[m][2] = pack_half2<T>(s[m][2 * kk + 1][0], s[m][2 * kk + 1][1]);
      rP[m][3] = pack_half2<T>(s[m][2 * kk + 1][2], s[m][2 * kk + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      if (n * 16 < v_head_dim) {
        uint32_t rV[4];  // columns 16n..16n+7: keys 0-7, keys 8-15; columns 16n+8..: keys 0-7, keys 8-15
        ldmatrix_x4_trans(rV, (v_address ^ n << 5) + kk * 16 * kDim * 2);
#pragma unroll
        for (int m = 0; m < kMmaM; ++m) {
          mma_m16n8k16<T>(acc[m][2 * n], rP[m], rV[0], rV[1]);
          mma_m16n8k16<T>(acc[m][2 * n + 1], rP[m], rV[2], rV[3]);
        }
      }
    }
  }
}

// Where a row's keys begin and end, and where its mask lies.
struct RowLimits {
  int first, last;
  int64_t mask_row;
};

// Turns products into weights relative to the new maximum of their row, and updates maximum, sum (of this lane's columns
// alone) and the factor for what has been summed with the old maximum. `checks` says that some key of the tile is out of
// some row's limits; limits_of(m, half) gives those of row 16m + 8 half + g. Maxima are in units of `unit` log2.
template <class T, bool kExact, int kMmaM, int kTiles, class LimitsOf>
__device__ __forceinline__ void online_softmax(const AttentionLaunch& a, float (&s)[kMmaM][kTiles][4], float (&row_max)[kMmaM][2],
                                               float (&row_sum)[kMmaM][2], float (&correction)[kMmaM][2], int j0, bool checks,
                                               LimitsOf limits_of) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  const bool has_mask = a.p.mask_dtype != DType::kNone;
  float unit = a.score_scale;
  if (!a.folds_scale) {
    unit = 1.0F;
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] = to_score<kExact>(a, s[m][n][e]);
      }
    }
  }
  if (checks || has_mask) {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const RowLimits limits = limits_of(m, half);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int j = j0 + n * 8 + 2 * t + e;
            float& x = s[m][n][2 * half + e];
            if (j < limits.first || j >= limits.last) {
              x = -INFINITY;
            } else if (has_mask) {
              x = add_mask(x, mask_value<T>(a.p, limits.mask_row + j * a.p.mask_stride_key));
            }
          }
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float new_max = row_max[m][half];
      float tile_max = -INFINITY;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) tile_max = fmaxf(tile_max, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      new_max = fmaxf(new_max, warp_max<4>(tile_max));
      // The difference first, then the unit: with one fmaf the rounded product of a maximum above 2^31 is off by more than
      // the exponent range.
      const float reference = softmax_reference(new_max);
      correction[m][half] = exp2_approx((row_max[m][half] - reference) * unit);
      row_max[m][half] = new_max;
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          s[m][n][e] = exp2_approx((s[m][n][e] - reference) * unit);
          sum += s[m][n][e];
        }
      }
      row_sum[m][half] = row_sum[m][half] * correction[m][half] + sum;
    }
  }
}

template <int kMmaM, int kTiles>
__device__ __forceinline__ void rescale(float (&acc)[kMmaM][kTiles][4], const float (&correction)[kMmaM][2]) {
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] *= correction[m][e / 2];
    }
  }
}

// True if a row of this lane has become NaN although its sum of weights is a number: a masked NaN of v leaked, see
// attend_row_exactly. `sum` is the whole row's.
template <int kTiles>
__device__ __forceinline__ bool is_spoilt(const float (&acc)[kTiles][4], int half, float sum) {
  bool nan = false;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) nan |= isnan(acc[n][2 * half]) || isnan(acc[n][2 * half + 1]);
  return nan && sum > 0.0F;
}

}  // namespace ortplugins
