// FusedAttention for few queries on a long cache, 16-bit types on mma.sync. What counts is the speed at which the cache
// streams in, so the query heads that read the same key head share a tile of 16 rows, every key is read once, and the keys
// are split over blocks and, within a block, over warps.
//
// A warp runs alone until the end: it takes every kWarps-th tile of 16 keys, has kStages - 1 of them on their way in its
// own part of shared memory, and keeps its own maxima, sums and part of y. Then the block merges its warps in order and
// leaves the result in the workspace (or in y, if there is one split only); attention_merge_kernel does the rest.
#include "kernels/attention/attention_mma.h"
#include "kernels/attention/variants.h"

namespace ortplugins {
namespace {

constexpr int kBlockM = 16;
constexpr int kWarpN = 16;

template <int kDim, int kWarps, int kStages>
constexpr int kSplitSmemBytes = kBlockM * kDim * 2 + kWarps * kStages * 2 * kWarpN * kDim * 2;

template <class T, int kDim, int kWarps, int kStages>
__global__ void __launch_bounds__(kWarps * 32, 2) attention_split_kernel(const __grid_constant__ AttentionLaunch a) {
  constexpr int kTileBytes = kWarpN * kDim * 2;
  constexpr int kThreads = kWarps * 32;
  static_assert(kStages * 2 * kTileBytes >= kBlockM * kDim * 4, "a warp's part of y takes the place of its tiles");
  extern __shared__ __align__(kTileAlign) char smem[];
  __shared__ float2 s_max_sum[kWarps][kBlockM];
  __shared__ int s_redo[kBlockM];
  const int thread = static_cast<int>(threadIdx.x);
  const int warp_idx = thread / 32, lane_idx = thread % 32, g = lane_idx / 4, t = lane_idx % 4;
  char* const sQ = smem;                                                                    // 16 x kDim
  char* const sKV = sQ + kBlockM * kDim * 2 + warp_idx * kStages * 2 * kTileBytes;          // (stage, k or v, key, d)

  const AttentionParams& p = a.p;
  AttentionTile tile;
  KeyBand band;
  if (!attention_tile(a, work_item(), kBlockM, kWarps * kWarpN, &tile, &band)) return;
  const int head_dim = static_cast<int>(p.head_dim), v_head_dim = static_cast<int>(p.v_head_dim);
  const KeyRows<T> k = k_rows<T>(p, tile.b, tile.head0 / a.group), v = v_rows<T>(p, tile.b, tile.head0 / a.group);

  const int first = tile.first + warp_idx * kWarpN;  // of this warp; the next tile is kWarps * kWarpN keys on
  const auto load = [&](int j0, int stage) {
    if (j0 < tile.last) {
      char* const to = sKV + stage * 2 * kTileBytes;
      load_tile<T, kDim, kWarpN, 32>(to, lane_idx, head_dim, (a.packs & kPacksK) != 0, p.k,
                                     [&](int r) { return j0 + r < tile.last ? k.row(j0 + r) : nullptr; });
      load_tile<T, kDim, kWarpN, 32>(to + kTileBytes, lane_idx, v_head_dim, (a.packs & kPacksV) != 0, p.v,
                                     [&](int r) { return j0 + r < tile.last ? v.row(j0 + r) : nullptr; });
    }
    cp_async_commit();  // also when empty: the wait counts groups
  };

  // Prologue.
  const T* const q = static_cast<const T*>(p.q) + tile.b * p.q_strides.batch;
  load_tile<T, kDim, kBlockM, kThreads>(sQ, thread, head_dim, (a.packs & kPacksQ) != 0, p.q, [&](int r) {
    r += tile.row0;
    return r < tile.rows ? q + tile.head(p, r) * p.q_strides.head + tile.query(p, r) * p.q_strides.seq : nullptr;
  });
  cp_async_commit();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) load(first + stage * kWarps * kWarpN, stage);
  RowLimits limits[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = min(tile.row0 + half * 8 + g, tile.rows - 1);
    const int i = tile.query(p, r);
    limits[half] = {max(band.first(i), tile.first), min(band.last(i), tile.last), mask_row_offset(p, tile.b, tile.head(p, r), i)};
  }
  const int all_first = p.q_len > 1 ? band.first(static_cast<int>(p.q_len) - 1) : tile.first;
  const int all_last = p.q_len > 1 ? min(band.last(0), tile.last) : tile.last;
  float acc[1][kDim / 8][4] = {};
  float row_max[1][2] = {{-INFINITY, -INFINITY}}, row_sum[1][2] = {};
  cp_async_wait<kStages - 1>();
  __syncthreads();  // q is there

  // Mainloop.
  int stage = 0;
  for (int j0 = first; j0 < tile.last; j0 += kWarps * kWarpN) {
    cp_async_wait<kStages - 2>();
    __syncwarp();  // this tile is there, and every lane has left the one before, whose place the next load takes
    load(j0 + (kStages - 1) * kWarps * kWarpN, stage == 0 ? kStages - 1 : stage - 1);
    const uint32_t k_tile = smem_address(sKV + stage * 2 * kTileBytes);
    float s[1][kWarpN / 8][4] = {};
    mma_qk<T, kDim>(s, smem_address(sQ), k_tile, head_dim);
    float correction[1][2];
    online_softmax<T, false>(a, s, row_max, row_sum, correction, j0, j0 < all_first || j0 + kWarpN > all_last,
                             [&](int, int half) { return limits[half]; });
    rescale(acc, correction);
    mma_pv<T, kDim>(acc, s, k_tile + kTileBytes, v_head_dim);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  // Epilogue: the parts of the warps meet in shared memory.
  cp_async_wait<0>();
  __syncwarp();
  float* const sY = reinterpret_cast<float*>(sKV);  // 16 x kDim
  const float unit = a.folds_scale ? a.score_scale : 1.0F;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = warp_sum<4>(row_sum[0][half]);
    if (t == 0) s_max_sum[warp_idx][half * 8 + g] = make_float2(row_max[0][half] * unit, sum);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<float2*>(sY + (half * 8 + g) * kDim + n * 8 + 2 * t) = make_float2(acc[0][n][2 * half], acc[0][n][2 * half + 1]);
    }
  }
  if (thread < kBlockM) s_redo[thread] = 0;
  __syncthreads();
  const float* const parts = reinterpret_cast<const float*>(smem + kBlockM * kDim * 2);
  bool redo_any = false;
  for (int idx = thread; idx < kBlockM * kDim; idx += kThreads) {
    const int row = idx / kDim, d = idx % kDim, r = tile.row0 + row;
    if (r >= tile.rows || d >= v_head_dim) continue;
    float max = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) max = fmaxf(max, s_max_sum[w][row].x);
    const float reference = softmax_reference(max);
    float sum = 0.0F, y = 0.0F;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float factor = exp2_approx(s_max_sum[w][row].x - reference);
      sum += s_max_sum[w][row].y * factor;
      y += parts[w * (kStages * 2 * kTileBytes / 4) + row * kDim + d] * factor;
    }
    const int64_t h = tile.head(p, r), i = tile.query(p, r);
    if (a.splits > 1) {
      const int64_t slot = ((tile.b * p.heads + h) * p.q_len + i) * a.splits + tile.split;
      a.partial_y[slot * p.v_head_dim + d] = y;
      if (d == 0) a.partial_ms[slot] = make_float2(max, sum);
    } else {
      if (isnan(y) && sum > 0.0F) {
        s_redo[row] = 1;
        redo_any = true;
      }
      static_cast<T*>(p.y)[tile.b * p.y_strides.batch + h * p.y_strides.head + i * p.y_strides.seq + d] =
          from_float<T>(sum == 0.0F ? 0.0F : y / sum);
    }
  }
  if (__syncthreads_or(redo_any)) {
    for (int row = warp_idx; row < kBlockM; row += kWarps) {
      const int r = tile.row0 + row;
      if (s_redo[row] != 0) attend_row_exactly<T>(a, tile.b, tile.head(p, r), tile.query(p, r), 0, v_head_dim);
    }
  }
}

int64_t split_tiles(const AttentionParams& p) { return ceil_div(p.q_len * (p.heads / p.kv_heads), kBlockM); }

// Two blocks fit on a multiprocessor; twice that many even out the ends. A split of fewer than 256 keys would spend its
// time on the prologue and the merge.
int mma_splits(const AttentionParams& p, const DeviceInfo& device) {
  if (p.kv_heads == 0) return 1;
  return choose_splits(p, device, split_tiles(p) * p.kv_heads * p.batch, 4, 256);
}

template <int kDim, int kWarps, int kStages>
Status launch_split(const AttentionParams& params, const ExecContext& context) {
  constexpr int kSmemBytes = kSplitSmemBytes<kDim, kWarps, kStages>;
  bool done = false;
  ORTPLUGINS_RETURN_IF_ERROR(attention_prologue(params, context, &done));
  if (done) return {};
  AttentionLaunch a = make_attention_launch(params);
  a.tile_heads = a.group;
  a.tiles = split_tiles(params);
  ORTPLUGINS_RETURN_IF_ERROR(split_launch(mma_splits(params, *context.device), context, &a));
  ORTPLUGINS_RETURN_IF_ERROR(dispatch_half(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    static SmemLimit limit;
    const auto kernel = attention_split_kernel<T, kDim, kWarps, kStages>;
    ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, kSmemBytes));
    const dim3 grid = work_grid(a.tiles * params.kv_heads * params.batch * a.splits);
    return launch("attention_split_kernel", kernel, grid, kWarps * 32, kSmemBytes, context, a);
  }));
  return a.splits > 1 ? launch_attention_merge(a, context) : Status{};
}

}  // namespace

int64_t attention_mma_split_workspace(const AttentionParams& params, const DeviceInfo& device) {
  return SplitWorkspace(params, mma_splits(params, device)).bytes;
}

// Stages such that a block stays below the 99 KB of sm_86 and two of them keep some 150 KB on their way on sm_80 and up.
Status launch_attention_mma_split_64(const AttentionParams& params, const ExecContext& context) { return launch_split<64, 4, 4>(params, context); }
Status launch_attention_mma_split_128(const AttentionParams& params, const ExecContext& context) { return launch_split<128, 4, 2>(params, context); }
Status launch_attention_mma_split_256(const AttentionParams& params, const ExecContext& context) { return launch_split<256, 2, 2>(params, context); }

}  // namespace ortplugins
