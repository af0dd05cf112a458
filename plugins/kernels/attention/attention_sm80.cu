// FusedAttention for 16-bit types on mma.sync: one block computes kBlockM query rows of one head, four warps with
// 16 * kMmaM rows each, against tiles of kBlockN keys.
//
// In shared memory lie the tile of q and one tile of k and of v, all swizzled (tile_offset). While a tile of k is
// multiplied, that of v is on its way; while the softmax and the second product run, the next k is. A warp keeps its
// scores, weights and rows of y in registers; rows never leave their warp, so the only barriers are those of the tiles.
#include "kernels/attention/attention_mma.h"
#include "kernels/attention/variants.h"

namespace ortplugins {
namespace {

constexpr int kThreads = 128;

template <class T, int kDim, int kMmaM, int kBlockN>
__global__ void __launch_bounds__(kThreads) attention_mma_kernel(const __grid_constant__ AttentionLaunch a) {
  constexpr int kWarpM = 16 * kMmaM;
  constexpr int kBlockM = kWarpM * kThreads / 32;
  extern __shared__ __align__(kTileAlign) char smem[];
  char* const sQ = smem;                        // kBlockM x kDim
  char* const sK = sQ + kBlockM * kDim * 2;     // kBlockN x kDim
  char* const sV = sK + kBlockN * kDim * 2;     // kBlockN x kDim

  const AttentionParams& p = a.p;
  AttentionTile tile;
  KeyBand band;
  if (!attention_tile(a, work_item(), kBlockM, kBlockN, &tile, &band)) return;
  const int64_t h = tile.head0;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp_idx = thread / 32, lane_idx = thread % 32, g = lane_idx / 4;
  const int head_dim = static_cast<int>(p.head_dim), v_head_dim = static_cast<int>(p.v_head_dim);
  const KeyRows<T> k = k_rows<T>(p, tile.b, h / a.group), v = v_rows<T>(p, tile.b, h / a.group);

  const auto load_k = [&](int j0) {
    load_tile<T, kDim, kBlockN, kThreads>(sK, thread, head_dim, (a.packs & kPacksK) != 0, p.k,
                                          [&](int r) { return j0 + r < tile.last ? k.row(j0 + r) : nullptr; });
    cp_async_commit();
  };
  const auto load_v = [&](int j0) {
    load_tile<T, kDim, kBlockN, kThreads>(sV, thread, v_head_dim, (a.packs & kPacksV) != 0, p.v,
                                          [&](int r) { return j0 + r < tile.last ? v.row(j0 + r) : nullptr; });
    cp_async_commit();
  };

  // Prologue.
  if (tile.first < tile.last) {
    const T* const q = static_cast<const T*>(p.q) + tile.b * p.q_strides.batch + h * p.q_strides.head;
    load_tile<T, kDim, kBlockM, kThreads>(sQ, thread, head_dim, (a.packs & kPacksQ) != 0, p.q, [&](int r) {
      return tile.row0 + r < tile.rows ? q + (tile.row0 + r) * p.q_strides.seq : nullptr;
    });
    load_k(tile.first);
  }
  float acc[kMmaM][kDim / 8][4] = {};
  float row_max[kMmaM][2], row_sum[kMmaM][2];
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) {
    row_max[m][0] = row_max[m][1] = -INFINITY;
    row_sum[m][0] = row_sum[m][1] = 0.0F;
  }
  // Tiles within [all_first, all_last) are seen whole by every row: only the others need a check for each score.
  const int all_first = band.first(min(tile.row0 + kBlockM, tile.rows) - 1);
  const int all_last = band.last(tile.row0);
  const int warp_row = tile.row0 + warp_idx * kWarpM;  // first row of this warp

  // Mainloop.
  for (int j0 = tile.first; j0 < tile.last; j0 += kBlockN) {
    cp_async_wait<0>();
    __syncthreads();  // k is there (and q); v is free
    load_v(j0);
    float s[kMmaM][kBlockN / 8][4] = {};
    mma_qk<T, kDim, kMmaM>(s, smem_address(sQ + warp_idx * kWarpM * kDim * 2), smem_address(sK), head_dim);
    cp_async_wait<0>();
    __syncthreads();  // v is there; k is free
    if (j0 + kBlockN < tile.last) load_k(j0 + kBlockN);

    float correction[kMmaM][2];
    online_softmax<T, false>(a, s, row_max, row_sum, correction, j0, j0 < all_first || j0 + kBlockN > all_last,
                             [&](int m, int half) {
                               const int i = min(warp_row + m * 16 + half * 8 + g, tile.rows - 1);
                               return RowLimits{band.first(i), band.last(i), mask_row_offset(p, tile.b, h, i)};
                             });
    rescale(acc, correction);
    mma_pv<T, kDim, kMmaM>(acc, s, smem_address(sV), v_head_dim);
  }

  // What follows needs the tile's place again. It is computed anew: kept through the mainloop it would be spilled.
  attention_tile(a, computed_in_place(work_item()), kBlockM, kBlockN, &tile, &band);
  const int first_row = tile.row0 + warp_idx * kWarpM;

  // Epilogue: y goes through this warp's own rows of the q tile, so that it is stored in 16-byte chunks of whole rows.
  unsigned spoilt[kMmaM][2];
  char* const sY = sQ + warp_idx * kWarpM * kDim * 2;
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = warp_sum<4>(row_sum[m][half]);
      const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
      spoilt[m][half] = __ballot_sync(kFullWarp, is_spoilt(acc[m], half, sum));
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const float lo = sum == 0.0F ? 0.0F : acc[m][n][2 * half] * inverse;
        const float hi = sum == 0.0F ? 0.0F : acc[m][n][2 * half + 1] * inverse;
        *reinterpret_cast<uint32_t*>(sY + tile_offset<kDim>(m * 16 + half * 8 + g, n) + lane_idx % 4 * 4) = pack_half2<T>(lo, hi);
      }
    }
  }
  __syncwarp();
  T* const y = static_cast<T*>(p.y) + tile.b * p.y_strides.batch + tile.head0 * p.y_strides.head;
  for (int idx = lane_idx; idx < kWarpM * kDim / 8; idx += 32) {
    const int r = idx / (kDim / 8), chunk = idx % (kDim / 8);
    const int valid = v_head_dim - chunk * 8;
    if (first_row + r >= tile.rows || valid <= 0) continue;
    const Pack<T> pack = load_pack(reinterpret_cast<const T*>(sY + tile_offset<kDim>(r, chunk)));
    T* const to = y + (first_row + r) * p.y_strides.seq + chunk * 8;
    if ((a.packs & kPacksY) != 0) {
      store_pack(to, pack);
    } else {
      store_pack_guarded(to, pack, 0, valid);
    }
  }
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (spoilt[m][half] == 0) continue;
      for (int row = 0; row < 8; ++row) {
        const int i = first_row + m * 16 + half * 8 + row;
        if ((spoilt[m][half] >> (4 * row) & 0xf) != 0 && i < tile.rows) attend_row_exactly<T>(a, tile.b, tile.head0, i, 0, v_head_dim);
      }
    }
  }
}

template <int kDim, int kMmaM, int kBlockN>
Status launch_mma(const AttentionParams& params, const ExecContext& context) {
  constexpr int kBlockM = 16 * kMmaM * kThreads / 32;
  constexpr int kSmemBytes = (kBlockM + 2 * kBlockN) * kDim * 2;
  bool done = false;
  ORTPLUGINS_RETURN_IF_ERROR(attention_prologue(params, context, &done));
  if (done) return {};
  AttentionLaunch a = make_attention_launch(params);
  a.tiles = ceil_div(params.q_len, kBlockM);
  return dispatch_half(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    static SmemLimit limit;
    const auto kernel = attention_mma_kernel<T, kDim, kMmaM, kBlockN>;
    ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, kSmemBytes));
    return launch("attention_mma_kernel", kernel, work_grid(a.tiles * params.heads * params.batch), kThreads, kSmemBytes, context, a);
  });
}

}  // namespace

// Rows of 32 per warp use each fragment of k and v twice, which halves the reads of shared memory that limit this kernel;
// at a head of 256 the accumulator leaves room for 16 only.
Status launch_attention_mma_64(const AttentionParams& params, const ExecContext& context) { return launch_mma<64, 2, 64>(params, context); }
Status launch_attention_mma_128(const AttentionParams& params, const ExecContext& context) { return launch_mma<128, 2, 32>(params, context); }
Status launch_attention_mma_256(const AttentionParams& params, const ExecContext& context) { return launch_mma<256, 1, 32>(params, context); }

}  // namespace ortplugins
