// Gemm in plain float32 arithmetic (FFMA) on Hopper: the large tile, with warps of its own for the copies.
//
// Two warpgroups compute 256 x 128 of y as in gemm.cu. A third brings the operands (producer), so that copies, their
// addresses and the barriers of a stage do not stand between the products; it hands over registers for the sums. Behind the
// stages lies the tile of y: sums of 1024 of k are added up there.
#include "device/dependent_launch.h"
#include "device/sm90.h"
#include "kernels/gemm/gemm_simt.h"

namespace ortplugins {
namespace {

// Warps of 64 x 64 read less shared memory than those of 128 x 32: 4096 x 4096 x 4096 in 2783 and 2854 us on an H200.
using Config = SimtConfig<256, 128, 16, 4, 1, 4, 64>;
constexpr int kProducers = 128;
constexpr int kThreads = Config::kThreads + kProducers;
constexpr int kBarriers = Config::kSmemBytes, kSmemBytes = kBarriers + 16 * Config::kStages;  // `full` of each stage, then `empty`

template <bool kTransA, bool kTransB>
__global__ void __launch_bounds__(kThreads, 1) gemm_simt_sm90a_kernel(const __grid_constant__ GemmParams p) {
  using C = Config;
  extern __shared__ __align__(128) char smem_generic[];
  char* const tile_c = smem_generic + C::kStages * C::kStageBytes;
  const uint32_t smem = smem_address(smem_generic), full = smem + kBarriers, empty = full + 8 * C::kStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < C::kStages; ++stage) {
      mbarrier_init(full + 8 * stage, kProducers);
      mbarrier_init(empty + 8 * stage, C::kThreads);
    }
    fence_barrier_init();
  }
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernel();

  const int64_t tiles_m = (p.m + C::kBlockM - 1) / C::kBlockM, tiles_n = (p.n + C::kBlockN - 1) / C::kBlockN;
  const int k_tiles = static_cast<int>((p.k + C::kBlockK - 1) / C::kBlockK);  // a row of 2^35 floats fits no memory
  const int64_t batch_idx = gemm_batch_index();
  if (batch_idx >= p.batch) return;
  const GemmOperands<float> operands(p, batch_idx);
  const TileIndex tile = grouped_tile(blockIdx.x, static_cast<unsigned>(tiles_m), static_cast<unsigned>(tiles_n));
  const int64_t first_m = tile.m * C::kBlockM, first_n = tile.n * C::kBlockN;
  PipelineState<C::kStages> state;

  if (threadIdx.x >= C::kThreads) {
    registers_decrease<56>();
    SimtCopy<C::kBlockM, C::kBlockK, !kTransA, kProducers, C::kThreads> copy_a(operands.a + (kTransA ? first_m : first_m * p.lda), p.lda, p.m - first_m);
    SimtCopy<C::kBlockN, C::kBlockK, kTransB, kProducers, C::kThreads> copy_b(operands.b + (kTransB ? first_n * p.ldb : first_n), p.ldb, p.n - first_n);
    const int whole_k_tiles = static_cast<int>(p.k / C::kBlockK), k_tail = static_cast<int>(p.k % C::kBlockK);
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      mbarrier_wait(empty + 8 * state.stage, state.parity ^ 1);
      const uint32_t target = smem + state.stage * C::kStageBytes;
      const int k_left = k_tile < whole_k_tiles ? C::kBlockK : k_tail;
      copy_a.copy_and_advance(target, k_left);
      copy_b.copy_and_advance(target + C::kBytesA, k_left);
      mbarrier_arrive_after_copies(full + 8 * state.stage);
      state.advance();
    }
    cp_async_wait<0>();
    return;
  }

  registers_increase<224>();
  SimtProducts<C> products;
  int until_sum = C::kSumTiles;
  bool begun = false;
  if (k_tiles > 0) {
    mbarrier_wait(full, 0);
    products.load(smem_generic, 0);
  }
#pragma unroll 1
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    const char* const this_stage = smem_generic + state.stage * C::kStageBytes;
#pragma unroll
    for (int k = 0; k < C::kBlockK; ++k) {
      if (k + 1 < C::kBlockK) {
        products.load(this_stage, k + 1);
      } else {
        mbarrier_arrive(empty + 8 * state.stage);  // every lane for its own reads
        state.advance();
        if (k_tile + 1 < k_tiles) mbarrier_wait(full + 8 * state.stage, state.parity);
        products.load(smem_generic + state.stage * C::kStageBytes, 0);
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
  products.put(tile_c, begun);
  named_barrier_sync(1, C::kThreads);
  const auto read = [tile_c](int row, int col) { return SimtProducts<C>::ordered(C::TileC::get(tile_c, row, col)); };
  C::TileC::store_rows(tile_c, read, operands.epilogue, first_m, first_n, 0, C::kBlockM, static_cast<int>(threadIdx.x));
}

}  // namespace

Status launch_gemm_sm90a_simt(const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return dispatch_layout(p, [&](auto trans_a, auto trans_b) {
    static SmemLimit limit;
    const auto kernel = gemm_simt_sm90a_kernel<decltype(trans_a)::value, decltype(trans_b)::value>;
    ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, kSmemBytes));
    return launch_with({1, true}, "gemm_sm90a_simt", kernel, gemm_grid(p, Config::kBlockM, Config::kBlockN), kThreads, kSmemBytes, context,
                       p);
  });
}

}  // namespace ortplugins
