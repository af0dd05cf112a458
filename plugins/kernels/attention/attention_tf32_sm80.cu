// FusedAttention for float32 on the TF32 tensor cores (mma.sync m16n8k8): one block computes 64 query rows of one head, four
// warps with 16 rows each, against tiles of kBlockN keys.
//
// tf32x3 writes each operand as hi + lo, both TF32, and sums lo * hi, hi * lo and hi * hi; what is left out, lo * lo, is
// below 2^-22 of the product. The tensor core truncates as it accumulates, always downwards, so no sum stays in it: the
// three products of a step start from zero, small terms first, and an ordinary rounded addition adds them to the accumulator.
//
// Shared memory holds q, k and v as floats in rows of kDim + 4. With that padding all fragment reads are free of bank
// conflicts: q and k are read at 4g + t, and v at 8t + g. The latter because the weights do not change lanes between the
// products: accumulator columns 2t and 2t + 1 serve as columns t and t + 4 of the A fragment, which only means that the
// keys of a step are summed in another order, and so v's rows 2t and 2t + 1 go into the B fragment.
#include "kernels/attention/attention_float_tile.h"
#include "kernels/attention/attention_mma.h"
#include "kernels/attention/attention_scaled.h"
#include "kernels/attention/variants.h"

namespace ortplugins {
namespace {

constexpr int kThreads = 128;
constexpr int kBlockM = 64;
constexpr int kStepK = 8;

// A float as one or two tensor-core operands. Veltkamp's splitting: hi is x rounded to the 11 bits of TF32, and x - hi is
// exact. It takes three instructions of the float pipe, keeps NaN, and makes NaN of an infinity or of a number above
// 2^114, which sends the row to attend_row_exactly. The tensor core ignores the 13 lowest bits, so adding half of what
// they stand for rounds lo.
template <bool kSplit>
struct Tf32Operand {
  uint32_t hi, lo;

  __device__ __forceinline__ explicit Tf32Operand(float x) {
    const float scaled = __fmul_rn(x, 8193.0F);  // intrinsics: a fused multiply-add here would undo the splitting
    const float rounded = __fsub_rn(scaled, __fsub_rn(scaled, x));
    hi = __float_as_uint(rounded);
    if constexpr (kSplit) lo = __float_as_uint(__fsub_rn(x, rounded)) + 0x1000U;
  }
  __device__ __forceinline__ Tf32Operand() {}
};

template <bool kSplit>
struct FragmentA {
  uint32_t hi[4], lo[4];

  __device__ __forceinline__ void set(int i, float x) {
    const Tf32Operand<kSplit> operand(x);
    hi[i] = operand.hi;
    if constexpr (kSplit) lo[i] = operand.lo;
  }
};

// c[n] += a b[n], small terms first. Term by term over all n, so that neighbouring instructions do not wait for each other.
template <bool kSplit, int kN>
__device__ __forceinline__ void mma_step(float (&c)[kN][4], const FragmentA<kSplit>& a, const Tf32Operand<kSplit> (&b)[kN][2]) {
  if constexpr (kSplit) {
#pragma unroll
    for (int n = 0; n < kN; ++n) mma_m16n8k8_tf32(c[n], a.lo, b[n][0].hi, b[n][1].hi);
#pragma unroll
    for (int n = 0; n < kN; ++n) mma_m16n8k8_tf32(c[n], a.hi, b[n][0].lo, b[n][1].lo);
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) mma_m16n8k8_tf32(c[n], a.hi, b[n][0].hi, b[n][1].hi);
}

template <int kDim, int kBlockN, bool kSplit>
__global__ void __launch_bounds__(kThreads) attention_tf32_kernel(const __grid_constant__ AttentionLaunch a, const uint32_t* redo) {
  constexpr int kStride = kDim + 4;
  constexpr int kTiles = kBlockN / 8;
  extern __shared__ __align__(128) float smem_floats[];
  float* const sQ = smem_floats;              // kBlockM x kStride
  float* const sK = sQ + kBlockM * kStride;   // kBlockN x kStride
  float* const sV = sK + kBlockN * kStride;   // kBlockN x kStride

  const AttentionParams& p = a.p;
  AttentionTile tile;
  KeyBand band;
  if (!attention_tile(a, work_item(), kBlockM, kBlockN, &tile, &band)) return;
  const int64_t h = tile.head0;
  if (redo != nullptr && redo[(tile.b * p.heads + h) * a.tiles + tile.row0 / kBlockM] == 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp_idx = thread / 32, lane_idx = thread % 32, g = lane_idx / 4, t = lane_idx % 4;
  const int head_dim = static_cast<int>(p.head_dim), v_head_dim = static_cast<int>(p.v_head_dim);
  const KeyRows<float> k = k_rows<float>(p, tile.b, h / a.group), v = v_rows<float>(p, tile.b, h / a.group);

  const auto load_k = [&](int j0) {
    load_float_tile<kDim, kStride, kBlockN, kThreads>(sK, thread, head_dim, (a.packs & kPacksK) != 0, p.k,
                                   [&](int r) { return j0 + r < tile.last ? k.row(j0 + r) : nullptr; });
    cp_async_commit();
  };
  const auto load_v = [&](int j0) {
    load_float_tile<kDim, kStride, kBlockN, kThreads>(sV, thread, v_head_dim, (a.packs & kPacksV) != 0, p.v,
                                   [&](int r) { return j0 + r < tile.last ? v.row(j0 + r) : nullptr; });
    cp_async_commit();
  };

  // Prologue.
  if (tile.first < tile.last) {
    const float* const q = static_cast<const float*>(p.q) + tile.b * p.q_strides.batch + h * p.q_strides.head;
    load_float_tile<kDim, kStride, kBlockM, kThreads>(sQ, thread, head_dim, (a.packs & kPacksQ) != 0, p.q, [&](int r) {
      return tile.row0 + r < tile.rows ? q + (tile.row0 + r) * p.q_strides.seq : nullptr;
    });
    load_k(tile.first);
  }
  float acc[kDim / 8][4] = {};
  float row_max[1][2] = {{-INFINITY, -INFINITY}}, row_sum[1][2] = {};
  const int all_first = band.first(min(tile.row0 + kBlockM, tile.rows) - 1);
  const int all_last = band.last(tile.row0);
  const int warp_row = tile.row0 + warp_idx * 16;
  const float* const rows_q = sQ + (warp_idx * 16 + g) * kStride + t;

  // Mainloop.
  for (int j0 = tile.first; j0 < tile.last; j0 += kBlockN) {
    cp_async_wait<0>();
    __syncthreads();  // k is there (and q); v is free
    load_v(j0);
    float s[1][kTiles][4] = {};
    for (int d0 = 0; d0 < head_dim; d0 += 32) {
#pragma unroll
      for (int d = 0; d < 32; d += kStepK) {
        const float* const q = rows_q + d0 + d;
        FragmentA<kSplit> rQ;
        rQ.set(0, q[0]);
        rQ.set(1, q[8 * kStride]);
        rQ.set(2, q[4]);
        rQ.set(3, q[8 * kStride + 4]);
        Tf32Operand<kSplit> rK[kTiles][2];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const float* const key = sK + (n * 8 + g) * kStride + d0 + d + t;
          rK[n][0] = Tf32Operand<kSplit>(key[0]);
          rK[n][1] = Tf32Operand<kSplit>(key[4]);
        }
        if constexpr (kSplit) {
          float part[kTiles][4] = {};
          mma_step<kSplit>(part, rQ, rK);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[0][n][e] += part[n][e];
          }
        } else {
          mma_step<kSplit>(s[0], rQ, rK);
        }
      }
    }
    cp_async_wait<0>();
    __syncthreads();  // v is there; k is free
    if (j0 + kBlockN < tile.last) load_k(j0 + kBlockN);

    float correction[1][2];
    online_softmax<float, true>(a, s, row_max, row_sum, correction, j0, j0 < all_first || j0 + kBlockN > all_last,
                                [&](int, int half) {
                                  const int i = min(warp_row + half * 8 + g, tile.rows - 1);
                                  return RowLimits{band.first(i), band.last(i), mask_row_offset(p, tile.b, h, i)};
                                });
    FragmentA<kSplit> rP[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      rP[n].set(0, s[0][n][0]);
      rP[n].set(1, s[0][n][2]);
      rP[n].set(2, s[0][n][1]);
      rP[n].set(3, s[0][n][3]);
    }
    constexpr int kGroup = 4;  // 8-column tiles of y in flight together
#pragma unroll
    for (int c = 0; c < kDim / 8; c += kGroup) {
      if (c * 8 < v_head_dim) {
#pragma unroll
        for (int u = 0; u < kGroup; ++u) {
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[c + u][e] *= correction[0][e / 2];
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          Tf32Operand<kSplit> rV[kGroup][2];
#pragma unroll
          for (int u = 0; u < kGroup; ++u) {
            const float* const value = sV + (n * 8 + 2 * t) * kStride + (c + u) * 8 + g;
            rV[u][0] = Tf32Operand<kSplit>(value[0]);
            rV[u][1] = Tf32Operand<kSplit>(value[kStride]);
          }
          float (&group)[kGroup][4] = *reinterpret_cast<float (*)[kGroup][4]>(&acc[c]);
          if constexpr (kSplit) {
            float part[kGroup][4] = {};
            mma_step<kSplit>(part, rP[n], rV);
#pragma unroll
            for (int u = 0; u < kGroup; ++u) {
#pragma unroll
              for (int e = 0; e < 4; ++e) group[u][e] += part[u][e];
            }
          } else {
            mma_step<kSplit>(group, rP[n], rV);
          }
        }
      }
    }
  }

  // Epilogue.
  unsigned spoilt[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = warp_sum<4>(row_sum[0][half]);
    const int i = warp_row + half * 8 + g;
    bool nan = isnan(sum);
    float* const y = static_cast<float*>(p.y) + tile.b * p.y_strides.batch + h * p.y_strides.head + i * p.y_strides.seq;
#pragma unroll
    for (int c = 0; c < kDim / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float value = acc[c][2 * half + e];
        const int d = c * 8 + 2 * t + e;
        nan |= isnan(value);
        if (i < tile.rows && d < v_head_dim) y[d] = sum == 0.0F ? 0.0F : value / sum;
      }
    }
    spoilt[half] = __ballot_sync(kFullWarp, nan && sum != 0.0F);
  }
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (spoilt[half] == 0) continue;
    for (int row = 0; row < 8; ++row) {
      const int i = warp_row + half * 8 + row;
      if ((spoilt[half] >> (4 * row) & 0xf) != 0 && i < tile.rows) attend_row_exactly<float>(a, tile.b, h, i, 0, v_head_dim);
    }
  }
}

// `redo`: which tiles to do, one word for each; null: all.
template <int kDim, int kBlockN, bool kSplit>
Status launch_tf32_tiles(AttentionLaunch a, const uint32_t* redo, const ExecContext& context) {
  constexpr int kSmemBytes = (kBlockM + 2 * kBlockN) * (kDim + 4) * 4;
  a.tiles = ceil_div(a.p.q_len, kBlockM);
  static SmemLimit limit;
  const auto kernel = attention_tf32_kernel<kDim, kBlockN, kSplit>;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, kSmemBytes));
  return launch("attention_tf32_kernel", kernel, work_grid(a.tiles * a.p.heads * a.p.batch), kThreads, kSmemBytes, context, a, redo);
}

template <int kDim, int kBlockN, bool kSplit>
Status launch_tf32(const AttentionParams& params, const ExecContext& context) {
  bool done = false;
  ORTPLUGINS_RETURN_IF_ERROR(attention_prologue(params, context, &done));
  return done ? Status{} : launch_tf32_tiles<kDim, kBlockN, kSplit>(make_attention_launch(params), nullptr, context);
}

}  // namespace

// 16 keys at a head of 256: with 32 a block would need more than the 99 KB that sm_86 has.
Status launch_attention_tf32x3_64(const AttentionParams& params, const ExecContext& context) { return launch_tf32<64, 32, true>(params, context); }
Status launch_attention_tf32x3_128(const AttentionParams& params, const ExecContext& context) { return launch_tf32<128, 32, true>(params, context); }
Status launch_attention_tf32x3_256(const AttentionParams& params, const ExecContext& context) { return launch_tf32<256, 16, true>(params, context); }
Status launch_attention_tf32_64(const AttentionParams& params, const ExecContext& context) { return launch_tf32<64, 32, false>(params, context); }
Status launch_attention_tf32_128(const AttentionParams& params, const ExecContext& context) { return launch_tf32<128, 32, false>(params, context); }
Status launch_attention_tf32_256(const AttentionParams& params, const ExecContext& context) { return launch_tf32<256, 16, false>(params, context); }

Status launch_attention_redo(AttentionLaunch a, const uint8_t* redo, int padded_dim, const ExecContext& context) {
  static_assert(kRedoRows == kBlockM);
  const auto* const words = reinterpret_cast<const uint32_t*>(redo);
  return padded_dim == 64 ? launch_tf32_tiles<64, 32, true>(a, words, context) : launch_tf32_tiles<128, 32, true>(a, words, context);
}

}  // namespace ortplugins
