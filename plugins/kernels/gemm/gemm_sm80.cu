// Gemm on the tensor cores by mma.sync, for float16, bfloat16 and, as tf32 or three tf32 products, float32.
//
// A block of 256 threads computes 128 x 128 of y; its eight warps stand 2 x 4 and hold 64 x 32 each in registers. Tiles of
// a and b, 64 bytes deep along k (32 or 16 elements), come through kStages stages of shared memory by cp.async, laid out
// as they are stored: rows along k, or along m or n. ldmatrix (with .trans for the latter) gives the fragments; for tf32,
// which .trans cannot transpose, the latter are read word by word.
#include "device/cp_async.h"
#include "device/layout.h"
#include "device/mma.h"
#include "device/shared_memory.h"
#include "device/tile_copy.h"
#include "kernels/gemm/gemm_cuda.h"

namespace ortplugins {
namespace {

enum class MmaMath { kHalf, kTf32, kTf32x3 };

struct MmaConfig {
  static constexpr int kBlockM = 128, kBlockN = 128;
  static constexpr int kBlockKBytes = 64;
  static constexpr int kWarpsM = 2, kWarpsN = 4;
  static constexpr int kStages = 4;  // 16 KB each
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kWarpM = kBlockM / kWarpsM, kWarpN = kBlockN / kWarpsN;
  static constexpr int kFragmentsM = kWarpM / 16, kFragmentsN = kWarpN / 8;
};

// A tile of an operand in shared memory: kMajor (128) rows of m or n by k, stored along k or across it.
template <class T, int kMajor, int kBlockK, bool kAlongK>
struct OperandTile {
  static constexpr bool kTrans = sizeof(T) == 2;  // ldmatrix.trans works on 16-bit elements only
  static constexpr int kRowBytes = (kAlongK ? kBlockK : kMajor) * static_cast<int>(sizeof(T));
  using Layout = std::conditional_t<kAlongK || kTrans, LdmatrixLayout<kRowBytes>, PairLayout<kRowBytes>>;
  using Copy = TileCopy<T, Layout, kAlongK ? kMajor : kBlockK, kAlongK ? kBlockK : kMajor, MmaConfig::kThreads, kAlongK>;
  static constexpr int kBytes = kMajor * kBlockK * static_cast<int>(sizeof(T));

  // Two 8 x 8 (tf32: 8 x 4) blocks of m or n by two of k, for step `k_step`. Registers: (block, k half) in the order
  // 00 10 01 11, which is a0 to a3 of an A fragment, or with kByMajor 00 01 10 11: b0 b1 of two B fragments.
  template <bool kByMajor>
  __device__ __forceinline__ static void load(uint32_t (&r)[4], uint32_t tile, int major, int k_step, int lane_idx) {
    if constexpr (kAlongK) {
      const int block = kByMajor ? lane_idx >> 4 : (lane_idx >> 3) & 1, half = kByMajor ? (lane_idx >> 3) & 1 : lane_idx >> 4;
      ldmatrix_x4(r, tile + Layout::offset(major + (lane_idx & 7) + block * 8, k_step * 2 + half));
    } else if constexpr (kTrans) {
      const int block = kByMajor ? lane_idx >> 4 : (lane_idx >> 3) & 1, half = kByMajor ? (lane_idx >> 3) & 1 : lane_idx >> 4;
      ldmatrix_x4_trans(r, tile + Layout::offset(k_step * 16 + (lane_idx & 7) + half * 8, major / 8 + block));
    } else {
      const int g = lane_idx / 4, t = lane_idx % 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int block = kByMajor ? i / 2 : i % 2, half = kByMajor ? i % 2 : i / 2;
        const int column = major + g + block * 8;
        r[i] = load_shared_u32(tile + Layout::offset(k_step * 8 + t + half * 4, column / 4) + column % 4 * 4);
      }
    }
  }
};

template <class T, MmaMath kMath, bool kTransA, bool kTransB>
struct MmaGemm : MmaConfig {
  static constexpr int kBlockK = kBlockKBytes / static_cast<int>(sizeof(T));
  static constexpr int kSteps = 2;  // of 32 bytes: k16 or k8
  // Tensor cores truncate when they add, always towards zero, so float32 sums leave them for registers after each tile: an
  // addition takes up to 2^-23 off the sum's magnitude.
  static constexpr bool kPromote = kMath == MmaMath::kTf32x3;

  using TileA = OperandTile<T, kBlockM, kBlockK, !kTransA>;
  using TileB = OperandTile<T, kBlockN, kBlockK, kTransB>;
  using TileC = EpilogueTile<kBlockM, kBlockN, kThreads>;
  static constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;
  static constexpr int kSmemBytes = kStages * kStageBytes > TileC::kBytes ? kStages * kStageBytes : TileC::kBytes;

  using Accumulators = float[kFragmentsM][kFragmentsN][4];

  __device__ __forceinline__ static void multiply_step(Accumulators& acc, uint32_t tile_a, uint32_t tile_b, int k_step, int warp_m,
                                                       int warp_n, int lane_idx) {
    uint32_t b[kFragmentsN / 2][4];
#pragma unroll
    for (int j = 0; j < kFragmentsN / 2; ++j) TileB::template load<true>(b[j], tile_b, warp_n + 16 * j, k_step, lane_idx);
    if constexpr (kMath == MmaMath::kTf32x3) {
      multiply_split(acc, tile_a, b, k_step, warp_m, lane_idx);
    } else {
      uint32_t a[kFragmentsM][4];
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) TileA::template load<false>(a[i], tile_a, warp_m + 16 * i, k_step, lane_idx);
      multiply_whole(acc, a, b);
    }
  }

  __device__ __forceinline__ static void multiply_whole(Accumulators& acc, uint32_t (&a)[kFragmentsM][4], uint32_t (&b)[kFragmentsN / 2][4]) {
    if constexpr (kMath == MmaMath::kHalf) {
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) mma_m16n8k16<T>(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kFragmentsN / 2; ++j) round_all(b[j]);
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        round_all(a[i]);
        multiply_row(acc[i], a[i], b);
      }
    }
  }

  // The small products first; lo * lo is below float32's own rounding.
  __device__ __forceinline__ static void multiply_split(Accumulators& acc, uint32_t tile_a, uint32_t (&b)[kFragmentsN / 2][4], int k_step,
                                                        int warp_m, int lane_idx) {
    uint32_t b_lo[kFragmentsN / 2][4];
#pragma unroll
    for (int j = 0; j < kFragmentsN / 2; ++j) split_all(b[j], b_lo[j]);
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
      uint32_t a[4], a_lo[4];
      TileA::template load<false>(a, tile_a, warp_m + 16 * i, k_step, lane_idx);
      split_all(a, a_lo);
      multiply_row(acc[i], a_lo, b);
      multiply_row(acc[i], a, b_lo);
      multiply_row(acc[i], a, b);
    }
  }

  __device__ __forceinline__ static void round_all(uint32_t (&r)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) r[e] = to_tf32(__uint_as_float(r[e]));
  }
  // The floats in r become hi.
  __device__ __forceinline__ static void split_all(uint32_t (&r)[4], uint32_t (&lo)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const SplitTf32 s = split_tf32(__uint_as_float(r[e]));
      r[e] = s.hi;
      lo[e] = s.lo;
    }
  }
  __device__ __forceinline__ static void multiply_row(float (&acc)[kFragmentsN][4], const uint32_t (&a)[4], const uint32_t (&b)[kFragmentsN / 2][4]) {
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) mma_m16n8k8_tf32(acc[j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
  }

  // acc moves to sum and starts again from zero.
  __device__ __forceinline__ static void promote(Accumulators& sum, Accumulators& acc) {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum[i][j][e] += acc[i][j][e];
          acc[i][j][e] = 0.0F;
        }
      }
    }
  }

  __device__ __forceinline__ static void run(const GemmParams& p, const ScaledGuard& guard, char* smem_generic) {
    const int lane_idx = static_cast<int>(threadIdx.x) % 32, warp_idx = static_cast<int>(threadIdx.x) / 32;
    const int warp_m = warp_idx / kWarpsN * kWarpM, warp_n = warp_idx % kWarpsN * kWarpN;
    const uint32_t smem = smem_address(smem_generic);
    const int64_t tiles_m = (p.m + kBlockM - 1) / kBlockM, tiles_n = (p.n + kBlockN - 1) / kBlockN;
    const int k_tiles = static_cast<int>((p.k + kBlockK - 1) / kBlockK);

    const int64_t batch_idx = gemm_batch_index();
    if (batch_idx >= p.batch) return;
    const GemmOperands<T> operands(p, batch_idx);
    const TileIndex tile = grouped_tile(blockIdx.x, static_cast<unsigned>(tiles_m), static_cast<unsigned>(tiles_n));
    const int64_t first_m = tile.m * kBlockM, first_n = tile.n * kBlockN;
    if constexpr (kMath != MmaMath::kHalf) {
      static_assert(kBlockM == kGuardStrip && kBlockN == kGuardStrip, "the guard judges whole tiles");
      if (guard.a.max != nullptr && scaled_product_holds(guard.a, guard.b, batch_idx, first_m, first_n, p.m, p.n, p.k)) return;
    }

    // Prologue: fill all stages but one.
    typename TileA::Copy copy_a(operands.a + (kTransA ? first_m : first_m * p.lda), p.lda, kTransA ? p.k : p.m - first_m,
                                kTransA ? p.m - first_m : p.k, row_alignment(operands.a, p.lda));
    typename TileB::Copy copy_b(operands.b + (kTransB ? first_n * p.ldb : first_n), p.ldb, kTransB ? p.n - first_n : p.k,
                                kTransB ? p.k : p.n - first_n, row_alignment(operands.b, p.ldb));
    for (int stage = 0; stage < kStages - 1; ++stage) {
      if (stage < k_tiles) {
        copy_a.copy_and_advance(smem + stage * kStageBytes);
        copy_b.copy_and_advance(smem + stage * kStageBytes + TileA::kBytes);
      }
      cp_async_commit();
    }

    // Mainloop. Group k_tile is the one that filled its stage; empty groups keep the count where there is none.
    Accumulators acc = {}, sum = {};
    int stage = 0, free_stage = kStages - 1;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      cp_async_wait<kStages - 2>();
      __syncthreads();  // the tile has arrived for all threads, and all are done with the stage that is filled next
      if (k_tile + kStages - 1 < k_tiles) {
        copy_a.copy_and_advance(smem + free_stage * kStageBytes);
        copy_b.copy_and_advance(smem + free_stage * kStageBytes + TileA::kBytes);
      }
      cp_async_commit();
      const uint32_t tile_a = smem + stage * kStageBytes, tile_b = tile_a + TileA::kBytes;
#pragma unroll
      for (int k_step = 0; k_step < kSteps; ++k_step) multiply_step(acc, tile_a, tile_b, k_step, warp_m, warp_n, lane_idx);
      if (kPromote) promote(sum, acc);
      free_stage = stage;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }

    // Epilogue: the stages become the tile of y.
    cp_async_wait<0>();
    __syncthreads();
    const Accumulators& result = kPromote ? sum : acc;
    const int g = lane_idx / 4, t = lane_idx % 4;
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        const int row = warp_m + 16 * i + g, col = warp_n + 8 * j + 2 * t;
        TileC::put(smem_generic, row, col, result[i][j][0], result[i][j][1]);
        TileC::put(smem_generic, row + 8, col, result[i][j][2], result[i][j][3]);
      }
    }
    __syncthreads();
    TileC::store(smem_generic, operands.epilogue, first_m, first_n);
  }
};

template <class T, MmaMath kMath, bool kTransA, bool kTransB>
__global__ void __launch_bounds__(MmaConfig::kThreads, kMath == MmaMath::kHalf ? 2 : 1)
gemm_mma_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ ScaledGuard guard) {
  extern __shared__ __align__(128) char smem[];
  MmaGemm<T, kMath, kTransA, kTransB>::run(p, guard, smem);
}

template <class T, MmaMath kMath, bool kTransA, bool kTransB>
Status launch_layout(const char* what, const GemmParams& p, const ExecContext& context, const ScaledGuard& guard) {
  using Gemm = MmaGemm<T, kMath, kTransA, kTransB>;
  static SmemLimit limit;
  const auto kernel = gemm_mma_kernel<T, kMath, kTransA, kTransB>;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, Gemm::kSmemBytes));
  return launch(what, kernel, gemm_grid(p, Gemm::kBlockM, Gemm::kBlockN), Gemm::kThreads, Gemm::kSmemBytes, context, p, guard);
}

template <class T, MmaMath kMath>
Status launch_mma(const char* what, const GemmParams& p, const ExecContext& context, const ScaledGuard& guard = {}) {
  if (is_empty(p)) return {};
  return dispatch_layout(p, [&](auto trans_a, auto trans_b) {
    return launch_layout<T, kMath, decltype(trans_a)::value, decltype(trans_b)::value>(what, p, context, guard);
  });
}

}  // namespace

Status launch_gemm_sm80_mma(const GemmParams& p, const ExecContext& context) {
  return dispatch_half(p.dtype, [&](auto tag) { return launch_mma<typename decltype(tag)::type, MmaMath::kHalf>("gemm_sm80_mma", p, context); });
}
Status launch_gemm_sm80_tf32(const GemmParams& p, const ExecContext& context) {
  return launch_mma<float, MmaMath::kTf32>("gemm_sm80_tf32", p, context);
}
Status launch_gemm_sm80_tf32x3(const GemmParams& p, const ExecContext& context) {
  return launch_mma<float, MmaMath::kTf32x3>("gemm_sm80_tf32x3", p, context);
}
Status launch_gemm_sm80_tf32_guarded(const GemmParams& p, const ExecContext& context, const ScaledGuard& guard) {
  return launch_mma<float, MmaMath::kTf32>("gemm_sm80_tf32", p, context, guard);
}
Status launch_gemm_sm80_tf32x3_guarded(const GemmParams& p, const ExecContext& context, const ScaledGuard& guard) {
  return launch_mma<float, MmaMath::kTf32x3>("gemm_sm80_tf32x3", p, context, guard);
}

}  // namespace ortplugins
