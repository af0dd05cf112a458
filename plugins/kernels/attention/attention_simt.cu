// FusedAttention for float32 on CUDA cores, exact products: kBlockM query rows of one head against tiles of kBlockN
// keys.
//
// A warp owns 8 kTy rows, so that weights pass from one product to the other through shared memory of its own and a
// row's maximum stays within kTx neighbouring lanes. Lane kTx ty + tx holds rows 8 ty + i (i < 8) and
//   scores  keys tx + kTx n                               (n < kCols)
//   y       columns 4 kTx c + 4 tx to 4 kTx c + 4 tx + 3  (c < kVecs)
// Nine of ten instructions of either product are multiply-adds: at 64 keys and a head of 64, 12 loads of 16 bytes for
// 128. Larger squares of scores a thread (8 x 8, with half of the warps) run no faster. k arrives while y is summed, v
// while the scores are.
//
// Shared memory, free of bank conflicts: q and k in rows of kDim + 4 floats, the rows of q of a warp in the order 0, 8,
// ..., 1, 9,
// ...; v in rows of kDim; the weights of a warp as (key, row), 4 floats of padding a key.
#include "kernels/attention/attention_float_tile.h"
#include "kernels/attention/variants.h"

namespace ortplugins {
namespace {

constexpr int kRows = 8;  // of a thread

// kWarpsN warps share the keys of a tile: each has rows and sums of its own for its part, and they meet at the end.
template <int kBlockM_, int kBlockN_, int kDim_, int kTx_, int kBlocks_, int kWarpsN_ = 1>
struct SimtTile {
  static constexpr int kDim = kDim_, kBlockM = kBlockM_, kBlockN = kBlockN_, kTx = kTx_, kTy = 32 / kTx;
  static constexpr int kBlocks = kBlocks_;  // on a multiprocessor
  static constexpr int kWarpsN = kWarpsN_, kWarpKeys = kBlockN / kWarpsN;
  static constexpr int kWarpRows = kRows * kTy, kWarps = kBlockM / kWarpRows * kWarpsN, kThreads = 32 * kWarps;
  static constexpr int kCols = kWarpKeys / kTx, kVecs = kDim / (4 * kTx);
  static constexpr int kStride = kDim + 4, kStrideP = kWarpRows + 4;
  static constexpr int kSmemBytes = ((kBlockM + kBlockN) * kStride + kBlockN * kDim + kWarps * kWarpKeys * kStrideP) * 4;
  static_assert(kBlocks * (kSmemBytes + 2304) <= 228 * 1024);  // the rows' state and what a block costs besides
  static_assert(kWarpsN == 1 || kWarpsN * kBlockM * kDim <= kBlockN * (kStride + kDim));  // parts of y take the place of k and v
};

__device__ __forceinline__ float element(const float4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    attention_simt_tile_kernel(const __grid_constant__ AttentionLaunch a) {
  constexpr int kDim = Tile::kDim, kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kStride = Tile::kStride,
                kStrideP = Tile::kStrideP;
  constexpr int kTx = Tile::kTx, kTy = Tile::kTy, kWarpRows = Tile::kWarpRows, kThreads = Tile::kThreads;
  constexpr int kCols = Tile::kCols, kVecs = Tile::kVecs, kWarps = Tile::kWarps, kWarpsN = Tile::kWarpsN, kWarpKeys = Tile::kWarpKeys;
  extern __shared__ __align__(128) float smem_floats[];
  float* const sQ = smem_floats;             // kBlockM x kStride
  float* const sK = sQ + kBlockM * kStride;  // kBlockN x kStride
  float* const sV = sK + kBlockN * kStride;  // kBlockN x kDim
  float* const sP = sV + kBlockN * kDim;     // for each warp kWarpKeys x kStrideP

  const AttentionParams& p = a.p;
  const int thread = static_cast<int>(threadIdx.x);
  // In shared memory, like the rows' state below: registers are for the products.
  __shared__ AttentionTile tile;
  __shared__ KeyBand band;
  __shared__ float2 s_rows[kWarps * kWarpRows];  // maximum, in units of `unit` log2, and sum
  if (__syncthreads_or(thread == 0 && !attention_tile(a, work_item(), kBlockM, kBlockN, &tile, &band))) return;
  const auto kv_head = [&] { return tile.head0 / a.group; };
  const int warp_idx = thread / 32, warp_m = warp_idx / kWarpsN, warp_n = warp_idx % kWarpsN, ty = thread % 32 / kTx, tx = thread % kTx;
  const int head_dim = static_cast<int>(p.head_dim), v_head_dim = static_cast<int>(p.v_head_dim);
  const auto load_k = [&](int j0) {
    const KeyRows<float> k = k_rows<float>(p, tile.b, kv_head());
    load_key_tile<kDim, kStride, kBlockN, kThreads>(sK, thread, k, j0, tile.last, head_dim, (a.packs & kPacksK) != 0);
    cp_async_commit();
  };
  const auto load_v = [&](int j0) {
    const KeyRows<float> v = v_rows<float>(p, tile.b, kv_head());
    load_key_tile<kDim, kDim, kBlockN, kThreads>(sV, thread, v, j0, tile.last, v_head_dim, (a.packs & kPacksV) != 0);
    cp_async_commit();
  };

  // Prologue.
  if (tile.first < tile.last) {
    const float* const q = static_cast<const float*>(p.q) + tile.b * p.q_strides.batch + tile.head0 * p.q_strides.head;
    load_float_tile<kDim, kStride, kBlockM, kThreads>(
        sQ, thread, head_dim, (a.packs & kPacksQ) != 0, p.q, [&](int slot) {
          const int r = tile.row0 + slot / kWarpRows * kWarpRows + slot % kTy * kRows + slot % kWarpRows / kTy;
          return r < tile.rows ? q + r * p.q_strides.seq : nullptr;
        });
    load_k(tile.first);
  }
  float2* const rows_ms = s_rows + warp_idx * kWarpRows + ty * kRows;
  if (tx < kRows) rows_ms[tx] = make_float2(-INFINITY, 0.0F);
  __syncwarp();
  float acc[kRows][kVecs][4];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int c = 0; c < kVecs; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][c][e] = 0.0F;
    }
  }
  const auto row = [&](int i) { return tile.row0 + warp_m * kWarpRows + ty * kRows + i; };  // row i of this thread
  const auto query = [&](int i) { return min(row(i), tile.rows - 1); };
  const float* const rows_q = sQ + (warp_m * kWarpRows + ty) * kStride;
  const float* const rows_k = sK + (warp_n * kWarpKeys + tx) * kStride;
  float* const warp_p = sP + warp_idx * kWarpKeys * kStrideP + ty * kRows;
  const float* const rows_v = sV + warp_n * kWarpKeys * kDim + 4 * tx;

  // Mainloop.
  for (int j0 = tile.first; j0 < tile.last; j0 += kBlockN) {
    cp_async_wait<0>();
    __syncthreads();  // k is there (and q); v is free
    load_v(j0);
    const int key0 = j0 + warp_n * kWarpKeys;
    float s[kRows][kCols] = {};
    for (int d0 = 0; d0 < head_dim; d0 += 32) {
#pragma unroll
      for (int d = 0; d < 32; d += 4) {
        float4 rK[kCols];
#pragma unroll
        for (int n = 0; n < kCols; ++n) rK[n] = load4(rows_k + kTx * n * kStride + d0 + d);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float4 rQ = load4(rows_q + kTy * i * kStride + d0 + d);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int n = 0; n < kCols; ++n) s[i][n] = fmaf(element(rQ, e), element(rK[n], e), s[i][n]);
          }
        }
      }
    }

    float unit = a.score_scale;
    const auto for_scores = [&](const auto& body) {  // body(four scores of a key, their place for the weights)
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
#pragma unroll
        for (int i = 0; i < kRows; i += 4)
          body(s[i][n], s[i + 1][n], s[i + 2][n], s[i + 3][n], warp_p + (tx + kTx * n) * kStrideP + i);
      }
    };
    const auto store4 = [](float x, float y, float z, float w, float* to) {
      *reinterpret_cast<float4*>(to) = make_float4(x, y, z, w);
    };
    if (!a.folds_scale) {
      // In shared memory, where a loop can index them: registers would take the same code 32 times.
      unit = 1.0F;
      for_scores(store4);
#pragma unroll 2
      for (int i = 0; i < kRows; ++i) {
        const int64_t mask_row = mask_row_offset(p, tile.b, tile.head0, query(i));
        float m[kCols] = {};
        if (p.mask_dtype != DType::kNone) {
#pragma unroll
          for (int n = 0; n < kCols; ++n)
            m[n] = mask_value<float>(p, mask_row + min(key0 + tx + kTx * n, band.end - 1) * p.mask_stride_key);
        }
#pragma unroll
        for (int n = 0; n < kCols; ++n) {
          float* const score = warp_p + (tx + kTx * n) * kStrideP + i;
          *score = add_mask(to_score<true>(a, *score), m[n]);
        }
      }
      for_scores([](float& x, float& y, float& z, float& w, const float* from) {
        const float4 v = load4(from);
        x = v.x;
        y = v.y;
        z = v.z;
        w = v.w;
      });
    }
    const int block_row0 = tile.row0;
    if (j0 < band.first(min(block_row0 + kBlockM, tile.rows) - 1) || j0 + kBlockN > band.last(block_row0)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int query_idx = query(i), lo = band.first(query_idx) - key0 - tx, hi = band.last(query_idx) - key0 - tx;
#pragma unroll
        for (int n = 0; n < kCols; ++n) {
          if (kTx * n < lo || kTx * n >= hi) s[i][n] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float max = s[i][0];
#pragma unroll
      for (int n = 1; n < kCols; ++n) max = fmaxf(max, s[i][n]);
      // The difference first, then the unit: with one fmaf, the rounding of a maximum above 2^31 would exceed the
      // exponent range.
      const float2 ms = rows_ms[i];
      const float next = fmaxf(ms.x, warp_max<kTx>(max)), used = softmax_reference(next);
      const float correction = exp2_approx((ms.x - used) * unit);
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        s[i][n] = exp2_approx((s[i][n] - used) * unit);
        sum += s[i][n];
      }
      sum = fmaf(ms.y, correction, warp_sum<kTx>(sum));
      __syncwarp();  // all lanes have read it
      if (tx == 0) rows_ms[i] = make_float2(next, sum);
#pragma unroll
      for (int c = 0; c < kVecs; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][c][e] *= correction;
      }
    }
    for_scores(store4);
    cp_async_wait<0>();
    __syncthreads();  // v is there; k is free
    if (j0 + kBlockN < tile.last) load_k(j0 + kBlockN);

#pragma unroll 8
    for (int key = 0; key < kWarpKeys; ++key) {
      const float4 rP[2] = {load4(warp_p + key * kStrideP), load4(warp_p + key * kStrideP + 4)};
#pragma unroll
      for (int c = 0; c < kVecs; ++c) {
        const float4 rV = load4(rows_v + key * kDim + c * 4 * kTx);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float weight = element(rP[i / 4], i % 4);
          acc[i][c][0] = fmaf(weight, rV.x, acc[i][c][0]);
          acc[i][c][1] = fmaf(weight, rV.y, acc[i][c][1]);
          acc[i][c][2] = fmaf(weight, rV.z, acc[i][c][2]);
          acc[i][c][3] = fmaf(weight, rV.w, acc[i][c][3]);
        }
      }
    }
  }

  // Epilogue. A row that a masked NaN of v has spoilt is done again: see attend_row_exactly.
  if constexpr (kWarpsN > 1) {
    __syncthreads();  // all are done with k and v
        const float unit = a.folds_scale ? a.score_scale : 1.0F;
    float* const parts = sK;  // (warp_n, row, column)
    // State of row r of the block: its maximum over all warps and the sum to that.
    const auto merged = [&](int r) {
      const float2* const of_row = s_rows + r / kWarpRows * kWarpsN * kWarpRows + r % kWarpRows;
      float max = -INFINITY, sum = 0.0F;
#pragma unroll
      for (int n = 0; n < kWarpsN; ++n) max = fmaxf(max, of_row[n * kWarpRows].x);
#pragma unroll
      for (int n = 0; n < kWarpsN; ++n) sum += of_row[n * kWarpRows].y * exp2_approx((of_row[n * kWarpRows].x - softmax_reference(max)) * unit);
      return make_float2(max, sum);
    };
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int r = warp_m * kWarpRows + ty * kRows + i;
      const float factor = exp2_approx((rows_ms[i].x - softmax_reference(merged(r).x)) * unit);
#pragma unroll
      for (int c = 0; c < kVecs; ++c) {
        *reinterpret_cast<float4*>(parts + (warp_n * kBlockM + r) * kDim + 4 * (kTx * c + tx)) =
            make_float4(acc[i][c][0] * factor, acc[i][c][1] * factor, acc[i][c][2] * factor, acc[i][c][3] * factor);
      }
    }
    __syncthreads();
    for (int r = warp_idx; r < kBlockM && tile.row0 + r < tile.rows; r += kWarps) {
      const float sum = merged(r).y;
      const int64_t i = tile.row0 + r;
      float* const y = static_cast<float*>(p.y) + tile.b * p.y_strides.batch + tile.head0 * p.y_strides.head + i * p.y_strides.seq;
      bool spoilt = isnan(sum);
      for (int col = thread % 32; col < v_head_dim; col += 32) {
        float v = 0.0F;
#pragma unroll
        for (int n = 0; n < kWarpsN; ++n) v += parts[(n * kBlockM + r) * kDim + col];
        spoilt |= isnan(v);
        y[col] = sum == 0.0F ? 0.0F : v / sum;
      }
      if (__any_sync(kFullWarp, spoilt && sum != 0.0F)) attend_row_exactly<float>(a, tile.b, tile.head0, i, 0, v_head_dim);
    }
    return;
  }
  unsigned redo = 0;  // bit r: row r of the warp
#pragma unroll 1
  for (int step = 0; step < kRows; ++step) {
    // Registers have no run-time index: row 0 is written, and the others move up.
    const float sum = rows_ms[step].y;
    const int i = row(step);
    float* const y =
        static_cast<float*>(p.y) + tile.b * p.y_strides.batch + tile.head0 * p.y_strides.head + i * p.y_strides.seq;
    bool spoilt = isnan(sum);
#pragma unroll
    for (int c = 0; c < kVecs; ++c) {
      float4 out;
      float* const values = reinterpret_cast<float*>(&out);
      const int col = 4 * (kTx * c + tx);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        values[e] = sum == 0.0F ? 0.0F : acc[0][c][e] / sum;
        spoilt |= isnan(acc[0][c][e]) && col + e < v_head_dim;
      }
      if (i >= tile.rows) continue;
      if ((a.packs & kPacksY) != 0) {
        if (col < v_head_dim) *reinterpret_cast<float4*>(y + col) = out;
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (col + e < v_head_dim) y[col + e] = values[e];
        }
      }
    }
    const unsigned votes = __ballot_sync(kFullWarp, spoilt && sum != 0.0F && i < tile.rows);
#pragma unroll
    for (int group = 0; group < kTy; ++group) {
      if ((votes >> (kTx * group) & ((1U << kTx) - 1)) != 0) redo |= 1U << (group * kRows + step);
    }
#pragma unroll
    for (int row = 0; row + 1 < kRows; ++row) {
#pragma unroll
      for (int c = 0; c < kVecs; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[row][c][e] = acc[row + 1][c][e];
      }
    }
  }
  __syncwarp();
  for (; redo != 0; redo &= redo - 1)
    attend_row_exactly<float>(a, tile.b, tile.head0, tile.row0 + warp_idx * kWarpRows + __ffs(redo) - 1, 0, v_head_dim);
}

template <class Tile>
Status launch_simt_tile(const AttentionParams& params, const ExecContext& context) {
  bool done = false;
  ORTPLUGINS_RETURN_IF_ERROR(attention_prologue(params, context, &done));
  if (done) return {};
  AttentionLaunch a = make_attention_launch(params);
  a.tiles = ceil_div(params.q_len, Tile::kBlockM);
  static SmemLimit limit;
  const auto kernel = attention_simt_tile_kernel<Tile>;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, Tile::kSmemBytes));
  return launch("attention_simt_tile_kernel", kernel, work_grid(a.tiles * params.heads * params.batch), Tile::kThreads,
                Tile::kSmemBytes, context, a);
}

using SimtTile64 = SimtTile<128, 64, 64, 16, 2>;
using SimtTile128 = SimtTile<128, 64, 128, 16, 1>;
using SimtTileShort = SimtTile<64, 64, 64, 16, 3>;
using SimtTileFew16 = SimtTile<16, 128, 64, 16, 2, 4>;
using SimtTileFew32 = SimtTile<32, 128, 64, 16, 2, 4>;
using SimtTile256 = SimtTile<128, 32, 256, 16, 1>;

}  // namespace

bool attention_simt_supports(const AttentionParams& p, const DeviceInfo& device, int64_t dim) {
  const int smem_bytes = dim == 64    ? SimtTile64::kSmemBytes
                         : dim == 128 ? SimtTile128::kSmemBytes
                                      : SimtTile256::kSmemBytes;
  return p.dtype == DType::kFloat32 && p.head_dim <= dim && p.v_head_dim <= dim &&
         device.max_smem_per_block >= smem_bytes;
}
Status launch_attention_simt_64(const AttentionParams& params, const ExecContext& context) {
  return launch_simt_tile<SimtTile64>(params, context);
}
Status launch_attention_simt_128(const AttentionParams& params, const ExecContext& context) {
  return launch_simt_tile<SimtTile128>(params, context);
}
Status launch_attention_simt_256(const AttentionParams& params, const ExecContext& context) {
  return launch_simt_tile<SimtTile256>(params, context);
}
Status launch_attention_simt_few_16(const AttentionParams& params, const ExecContext& context) {
  return launch_simt_tile<SimtTileFew16>(params, context);
}
Status launch_attention_simt_few_32(const AttentionParams& params, const ExecContext& context) {
  return launch_simt_tile<SimtTileFew32>(params, context);
}
Status launch_attention_simt_short(const AttentionParams& params, const ExecContext& context) {
  return launch_simt_tile<SimtTileShort>(params, context);
}

}  // namespace ortplugins
