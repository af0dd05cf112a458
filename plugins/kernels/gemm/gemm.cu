// Gemm in plain float32 arithmetic (FFMA).
//
// simt_128x64x16_s3, simt_64x64x16_s4: float32; a thread computes 8 x 8 or 4 x 8 in quads of 4 x 4. Both operands lie in shared
// memory as (k, m) and (k, n), so that a thread's fragments are float4; an operand that is stored along k is transposed on the
// way by 4-byte cp.async, one that is stored along m or n comes in 16-byte pieces. Behind the stages lies the tile of y. Where
// the tiles would not fill the GPU, or its last round, the blocks of a cluster share one and split k (sm_90).
#include "device/cluster.h"
#include "kernels/gemm/gemm_simt.h"

namespace ortplugins {
namespace {

// The blocks of a cluster, `splits` of them, share a tile of y and split k.
template <class C, bool kTransA, bool kTransB>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) gemm_simt_kernel(const __grid_constant__ GemmParams p, const int splits) {
  extern __shared__ __align__(128) char smem_generic[];
  const uint32_t smem = smem_address(smem_generic);
  char* const tile_c = smem_generic + C::kStages * C::kStageBytes;
  const int64_t tiles_m = (p.m + C::kBlockM - 1) / C::kBlockM, tiles_n = (p.n + C::kBlockN - 1) / C::kBlockN;
  const int rank = static_cast<int>(blockIdx.x) % splits;
  const int64_t all_k_tiles = (p.k + C::kBlockK - 1) / C::kBlockK, k_begin = all_k_tiles * rank / splits;
  const int k_tiles = static_cast<int>(all_k_tiles * (rank + 1) / splits - k_begin);  // a row of 2^35 floats fits no memory

  const int64_t batch_idx = gemm_batch_index();
  if (batch_idx >= p.batch) return;
  const GemmOperands<float> operands(p, batch_idx);
  const TileIndex tile = grouped_tile(blockIdx.x / splits, static_cast<unsigned>(tiles_m), static_cast<unsigned>(tiles_n));
  const int64_t first_m = tile.m * C::kBlockM, first_n = tile.n * C::kBlockN;

  // Prologue: fill all stages but one. Empty groups keep the count where there is no tile to copy.
  const int64_t first_k = k_begin * C::kBlockK;
  const int whole_k_tiles = static_cast<int>((p.k - first_k) / C::kBlockK), k_tail = static_cast<int>(p.k % C::kBlockK);
  SimtCopy<C::kBlockM, C::kBlockK, !kTransA, C::kThreads> copy_a(operands.a + (kTransA ? first_k * p.lda + first_m : first_m * p.lda + first_k), p.lda, p.m - first_m);
  SimtCopy<C::kBlockN, C::kBlockK, kTransB, C::kThreads> copy_b(operands.b + (kTransB ? first_n * p.ldb + first_k : first_k * p.ldb + first_n), p.ldb, p.n - first_n);
  const auto begin_copy = [&](int k_tile, uint32_t target) {
    const int k_left = k_tile >= k_tiles ? 0 : k_tile < whole_k_tiles ? C::kBlockK : k_tail;
    copy_a.begin(target, k_left);
    copy_b.begin(target + C::kBytesA, k_left);
  };
  const auto copy_step = [&](uint32_t target, int step) {
    copy_a.copy_step(target, step);
    copy_b.copy_step(target + C::kBytesA, step);
  };
  const auto end_copy = [&] {
    copy_a.advance();
    copy_b.advance();
    cp_async_commit();
  };
#pragma unroll 1
  for (int stage = 0; stage < C::kStages - 1; ++stage) {
    const uint32_t target = smem + stage * C::kStageBytes;
    begin_copy(stage, target);
#pragma unroll
    for (int step = 0; step < C::kBlockK; ++step) copy_step(target, step);
    end_copy();
  }

  // Mainloop.
  const auto tile_arrived = [] {
    cp_async_wait<C::kStages - 2>();
    __syncthreads();  // for all threads, and all are done with the stage before it
  };
  tile_arrived();
  SimtProducts<C> products;
  products.load(smem_generic, 0);  // without a meaning where k is 0
  int stage = 0, free_stage = C::kStages - 1, until_sum = C::kSumTiles;
  bool begun = false;
#pragma unroll 1
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    const uint32_t target = smem + free_stage * C::kStageBytes;
    begin_copy(k_tile + C::kStages - 1, target);
    const char* const this_stage = smem_generic + stage * C::kStageBytes;
    free_stage = stage;
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
#pragma unroll
    for (int k = 0; k < C::kBlockK; ++k) {
      // The copies are spread over the steps: all at once they would fill the queue to shared memory, and reads wait behind.
      copy_step(target, k);
      if (k + 1 < C::kBlockK) {
        products.load(this_stage, k + 1);
      } else {
        end_copy();
        tile_arrived();
        products.load(smem_generic + stage * C::kStageBytes, 0);
      }
      products.multiply(k);
    }
    if (--until_sum == 0) {
      products.put(tile_c, begun);
      products.clear();
      begun = true;
      until_sum = C::kSumTiles;
    }
  }
  cp_async_wait<0>();
  products.put(tile_c, begun);

  // Epilogue. Each block of a cluster finishes a part of the rows, adding up the tiles of all in the order of k.
  const auto read = [&](int row, int col) {
    float4 v;
    if (splits == 1) {
      v = C::TileC::get(tile_c, row, col);
    } else {
      v = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      const uint32_t at = smem_address(tile_c) + C::TileC::Layout::offset(row, col / 4);
#pragma unroll 4
      for (int other = 0; other < splits; ++other) {
        const float4 sum = load_cluster(cluster_address(at, other));
        v = make_float4(v.x + sum.x, v.y + sum.y, v.z + sum.z, v.w + sum.w);
      }
    }
    return products.ordered(v);
  };
  if (splits == 1) {
    __syncthreads();
  } else {
    cluster_arrive();
    cluster_wait();
  }
  const int rows = C::kBlockM / splits;
  C::TileC::store_rows(tile_c, read, operands.epilogue, first_m, first_n, rank * rows, (rank + 1) * rows, static_cast<int>(threadIdx.x));
  if (splits > 1) {  // the other blocks may still read this one's tile
    cluster_arrive();
    cluster_wait();
  }
}

// Blocks that share a tile, each with 64 of k or more, so that C::kBlocks run on each multiprocessor. Up to four also where
// the last round of tiles would leave much of the GPU idle. H200, us, 128 x 64 by 1, 2 and 4 blocks: 1024 x 2304 x 768 118.9,
// 104.3 and 111.9; 1024 x 3264 x 768 165.2, 147.6 and 155.2; 1024 x 3072 x 768 119.9, 125.4 and 143.0.
template <class C>
int simt_splits(const GemmParams& p, const DeviceInfo& device) {
  if (device.sm < 90) return 1;  // there are no clusters
  const int64_t tiles = ceil_div(p.m, C::kBlockM) * ceil_div(p.n, C::kBlockN) * p.batch;
  const auto suits = [&](int splits) {
    const auto rounds = [&](int blocks) { return ceil_div(tiles * blocks, device.sm_count); };
    return splits * tiles <= C::kBlocks * device.sm_count || (splits <= 4 && 50 * rounds(splits) <= 88 * rounds(splits / 2));
  };
  int splits = 1;
  while (splits < 8 && 2 * splits * 64 <= p.k && suits(2 * splits)) splits *= 2;
  return splits;
}

template <class C>
Status launch_simt(const char* what, const GemmParams& p, const ExecContext& context, int splits = 1) {
  if (is_empty(p)) return {};
  return dispatch_layout(p, [&](auto trans_a, auto trans_b) {
    static SmemLimit limit;
    const auto kernel = gemm_simt_kernel<C, decltype(trans_a)::value, decltype(trans_b)::value>;
    ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, C::kSmemBytes));
    dim3 grid = gemm_grid(p, C::kBlockM, C::kBlockN);
    grid.x *= splits;
    return launch_cluster(what, kernel, grid, C::kThreads, C::kSmemBytes, splits, context, p, splits);
  });
}

}  // namespace

Status launch_gemm_simt_128x64(const GemmParams& p, const ExecContext& context) {
  using C = SimtConfig<128, 64, 16, 3, 3>;
  return launch_simt<C>("gemm_simt_128x64", p, context, simt_splits<C>(p, *context.device));
}
Status launch_gemm_simt_64x64(const GemmParams& p, const ExecContext& context) {
  using C = SimtConfig<64, 64, 16, 4, 4>;
  return launch_simt<C>("gemm_simt_64x64", p, context, simt_splits<C>(p, *context.device));
}

}  // namespace ortplugins
