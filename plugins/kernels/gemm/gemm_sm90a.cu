// Gemm on Hopper's tensor cores for products that fill the GPU: wgmma on wide tiles that TMA brings.
//
// A tile is 128 x 256 or 128 x 192 of y. In a block one thread issues the copies (producer), and two warpgroups hold 64 x kBlockN of y each in registers
// (consumers). Operand tiles, 64 deep along k, pass through kStages stages of shared memory in the
// 128-byte swizzle, laid out as they are stored: wgmma takes 16-bit operands along k and across it.
//
// Persistent; two blocks of a cluster work on tiles above each other, and each brings half of their common tile of b for both.
#include "device/dependent_launch.h"
#include "device/mma.h"
#include "device/shared_memory.h"
#include "device/sm90.h"
#include "device/tensor_map.h"
#include "kernels/gemm/gemm_cuda.h"

namespace ortplugins {
namespace {

constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kBlockM = 64 * kConsumers;
constexpr int kBlockK = 64;      // elements: 128 bytes
constexpr int kRowBytes = 128;   // of a tile in shared memory
constexpr int kSwizzleRows = 64 * kRowBytes;  // 64 rows of m or n (along k), or 64 of k by 64 of m or n

// Operands as the copies see them: (contiguous, rows, matrix). Scaled operands have matrices hi and lo in turn.
struct WgmmaArgs {
  CUtensorMap a, b;
  CUtensorMap y, residual;  // boxes of 64 rows of 128 bytes; only where store_by_tma
  bool store_by_tma;
  bool a_batched, b_batched;  // false: one matrix for all products
  ScaledGuard stats;
};

// One stage: kParts tiles of a, then kParts of b.
template <int kBlockN, int kParts, int kStageCount>
struct StagePlan {
  static constexpr int kStages = kStageCount;
  static constexpr int kTileABytes = kBlockM * kRowBytes, kTileBBytes = kBlockN * kRowBytes;
  static constexpr int kBytesB = kParts * kTileABytes;  // where the tiles of b begin
  static constexpr int kStageBytes = kParts * (kTileABytes + kTileBBytes);
};

// Barriers at `smem`: `full` of each stage, then `empty`.
template <int kStages>
struct Pipeline {
  uint32_t smem;
  static constexpr int kBytes = 16 * kStages;
  __device__ __forceinline__ uint32_t full(int stage) const { return smem + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return smem + 8 * (kStages + stage); }
  // One thread. A stage is empty once every consumer warp of `blocks` blocks says so.
  __device__ __forceinline__ void init(int blocks) const {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full(stage), 1);
      mbarrier_init(empty(stage), 4 * kConsumers * blocks);
    }
    fence_barrier_init();
  }
};

// --- Consumer: products of one stage ---------------------------------------------------------------------------------------

// acc (64 x kBlockN) = or += tile a x tile b, over the 64 of k in the stage. tile_a is that of the warpgroup.
template <class T, int kBlockN, bool kTransA, bool kTransB>
__device__ __forceinline__ void multiply_tile(float (&acc)[kBlockN / 2], uint32_t tile_a, uint32_t tile_b, bool accumulate) {
  using Product = Wgmma<T, kBlockN, kTransA, !kTransB>;
  // Across k, blocks of 64 of n are kSwizzleRows apart, and 16 rows of k are 2048 bytes.
  constexpr int kStepA = kTransA ? 2048 : 32, kStepB = kTransB ? 32 : 2048;
#pragma unroll
  for (int k_step = 0; k_step < kBlockK / 16; ++k_step) {
    Product::run(acc, wgmma_descriptor(tile_a + k_step * kStepA, kTransA ? kSwizzleRows : 16),
                 wgmma_descriptor(tile_b + k_step * kStepB, kTransB ? 16 : kSwizzleRows), accumulate || k_step > 0);
  }
}

// Puts columns first_col to first_col + kCols of a warpgroup's accumulators into a tile, whose row 0 is the warpgroup's.
template <class Tile, int kCols, int kCount>
__device__ __forceinline__ void put_columns(char* tile, const float (&acc)[kCount], int first_col, int thread_idx) {
  const int lane_idx = thread_idx % 32, row = thread_idx / 32 * 16 + lane_idx / 4;
#pragma unroll
  for (int j = 0; j < kCols / 8; ++j) {
    const int col = 8 * j + lane_idx % 4 * 2, at = 4 * (first_col / 8 + j);
    Tile::put(tile, row, col, acc[at], acc[at + 1]);
    Tile::put(tile, row + 8, col, acc[at + 2], acc[at + 3]);
  }
}

// --- Producer: copies of one stage ---------------------------------------------------------------------------------------

template <class Plan, int kBlockN, int kParts, bool kTransA, bool kTransB>
__device__ __forceinline__ void load_a(uint32_t stage, const WgmmaArgs& args, uint32_t barrier, int first_m, int k, int matrix) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const uint32_t tile = stage + part * Plan::kTileABytes;
    if (kTransA) {
#pragma unroll
      for (int i = 0; i < kConsumers; ++i) {
        tma_load_3d(tile + i * kSwizzleRows, &args.a, barrier, first_m + 64 * i, k, kParts * matrix + part);
      }
    } else {
      tma_load_3d(tile, &args.a, barrier, k, first_m, kParts * matrix + part);
    }
  }
}

// Part `slice` of kSlices of the tile of b; with more than one, to all blocks of the cluster. Where b is stored across k, its
// blocks of 64 columns are shared out, or if they are odd in number the rows of all.
template <int kBlockN, int kSlices>
constexpr bool kSliceColumns = kBlockN / 64 % kSlices == 0;

template <class Plan, int kBlockN, int kParts, bool kTransB, int kSlices>
__device__ __forceinline__ void load_b(uint32_t stage, const WgmmaArgs& args, uint32_t barrier, int first_n, int k, int matrix, int slice) {
  const auto load = [&](uint32_t smem, int x, int y, int z) {
    if constexpr (kSlices > 1) {
      tma_load_3d_multicast(smem, &args.b, barrier, x, y, z, (1 << kSlices) - 1);
    } else {
      tma_load_3d(smem, &args.b, barrier, x, y, z);
    }
  };
  constexpr bool kColumns = kTransB || kSliceColumns<kBlockN, kSlices>;
  const int col = kColumns ? slice * (kBlockN / kSlices) : 0, row = kColumns ? 0 : slice * (kBlockK / kSlices);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const uint32_t tile = stage + Plan::kBytesB + part * Plan::kTileBBytes + (col + row) * kRowBytes;
    if (kTransB) {
      load(tile, k, first_n + col, kParts * matrix + part);
    } else {
#pragma unroll
      for (int i = 0; i < (kColumns ? kBlockN / kSlices : kBlockN) / 64; ++i) {
        load(tile + i * kSwizzleRows, first_n + col + 64 * i, k + row, kParts * matrix + part);
      }
    }
  }
}

// --- Epilogue of a warpgroup through TMA ------------------------------------------------------------------------------------

// Finishes 64 x kBlockN of y, 128 bytes of columns at a time, in kBuffers buffers of 64 rows in turn. What is in registers is
// finished there, goes to a buffer, and from it to y while the next products run. The residual comes to the same places
// before: that of the first kBuffers pieces while the products before it run.
// Activations are as exact as results of type Rounded are.
template <class T, class Rounded, int kBlockN, int kBufferCount>
struct TmaEpilogue {
  static constexpr int kCols = 128 / static_cast<int>(sizeof(T));
  static constexpr int kBuffers = kBufferCount, kBufferBytes = 64 * kRowBytes;
  static constexpr int kBytes = kBuffers * kBufferBytes;
  static constexpr int kPieces = kBlockN / kCols;
  static_assert(kPieces % kBuffers == 0, "every tile begins with the first buffer");

  uint32_t buffers, barriers;  // 1024-byte aligned; one barrier for each buffer: its part of the residual is there
  float* bias;                 // of kBlockN columns, times beta
  const CUtensorMap* y;
  const CUtensorMap* residual;  // null: none
  int barrier_id;               // of the warpgroup
  uint32_t parity = 0;

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < kBuffers; ++i) mbarrier_init(barriers + 8 * i, 1);
  }

  // One thread: brings piece `piece` of the residual, once its buffer is no longer read.
  __device__ __forceinline__ void load_residual(int piece, int row, int first_col, int batch_idx) const {
    const int buffer = piece % kBuffers;
    mbarrier_arrive_expect(barriers + 8 * buffer, kBufferBytes);
    tma_load_3d(buffers + buffer * kBufferBytes, residual, barriers + 8 * buffer, first_col + piece * kCols, row, batch_idx);
  }
  __device__ __forceinline__ void load_first_residuals(int row, int first_col, int batch_idx) const {
    for (int piece = 0; piece < kBuffers; ++piece) load_residual(piece, row, first_col, batch_idx);
  }

  // This thread's part of the bias, on its way while the products run; then to shared memory.
  static constexpr int kThreadBias = (kBlockN + 127) / 128;
  __device__ __forceinline__ static void load_bias(float (&r)[kThreadBias], const GemmParams& p, int first_col, int thread_idx) {
#pragma unroll
    for (int i = 0; i < kThreadBias; ++i) {
      const int col = first_col + thread_idx + 128 * i;
      r[i] = p.bias != nullptr && col < p.n ? to_float(static_cast<const T*>(p.bias)[col * p.bias_stride_n]) : 0.0F;
    }
  }
  __device__ __forceinline__ void put_bias(const float (&r)[kThreadBias], float beta, int thread_idx) const {
#pragma unroll
    for (int i = 0; i < kThreadBias; ++i) {
      if (thread_idx + 128 * i < kBlockN) bias[thread_idx + 128 * i] = beta * r[i];
    }
  }

  // Where chunk `chunk` (16 bytes) of a row lies in a buffer, in the swizzle of TMA.
  __device__ __forceinline__ static uint32_t place(uint32_t buffer, int row, int chunk) { return buffer + row * kRowBytes + ((chunk ^ (row & 7)) << 4); }

  // The accumulators of kStepCols columns to their place in a buffer, which is `first_chunk` chunks into its rows; the
  // residual that lies there is added, and `activate` is applied.
  static constexpr int kSteps = 4, kStepCols = kCols / kSteps;
  template <class Activate>
  __device__ __forceinline__ void finish(float (&v)[kStepCols / 2], const GemmParams& p, uint32_t buffer, int first_chunk, int first_col, int thread_idx,
                                         const Activate& activate) const {
    const int lane_idx = thread_idx % 32, warp_row = thread_idx / 32 * 16;
#pragma unroll
    for (int j = 0; j < kStepCols / 8; ++j) {
      float2 b = make_float2(0.0F, 0.0F);
      if (p.bias != nullptr) b = *reinterpret_cast<const float2*>(bias + first_col + 8 * j + lane_idx % 4 * 2);
#pragma unroll
      for (int e = 0; e < 4; ++e) v[4 * j + e] = p.alpha * v[4 * j + e] + (e % 2 == 0 ? b.x : b.y);
    }
    if constexpr (sizeof(T) == 2) {
      const int row = warp_row + lane_idx % 8 + lane_idx / 8 % 2 * 8, chunk = first_chunk + lane_idx / 16;
      if (residual != nullptr) {
#pragma unroll
        for (int j = 0; j < kStepCols / 8; j += 2) {
          uint32_t r[4];
          ldmatrix_x4(r, place(buffer, row, j + chunk));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack_half2<T>(r[i]);
            v[4 * j + 2 * i] += pair.x;
            v[4 * j + 2 * i + 1] += pair.y;
          }
        }
      }
      activate(v);
#pragma unroll
      for (int j = 0; j < kStepCols / 8; j += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = pack_half2<T>(v[4 * j + 2 * i], v[4 * j + 2 * i + 1]);
        stmatrix_x4(place(buffer, row, j + chunk), r);
      }
    } else {
      const int row = warp_row + lane_idx / 4, chunk = first_chunk + lane_idx % 4 / 2, within = lane_idx % 2 * 8;
      if (residual != nullptr) {
#pragma unroll
        for (int j = 0; j < kStepCols / 8; ++j) {
          const float2 upper = load_shared_float2(place(buffer, row, 2 * j + chunk) + within), lower = load_shared_float2(place(buffer, row + 8, 2 * j + chunk) + within);
          v[4 * j] += upper.x;
          v[4 * j + 1] += upper.y;
          v[4 * j + 2] += lower.x;
          v[4 * j + 3] += lower.y;
        }
      }
      activate(v);
#pragma unroll
      for (int j = 0; j < kStepCols / 8; ++j) {
        store_shared(place(buffer, row, 2 * j + chunk) + within, make_float2(v[4 * j], v[4 * j + 1]));
        store_shared(place(buffer, row + 8, 2 * j + chunk) + within, make_float2(v[4 * j + 2], v[4 * j + 3]));
      }
    }
  }

  // `row` is the first of the warpgroup's rows of y. Activations are long, so there is a loop around them, and registers
  // have no run-time index: its piece is always the first, and the others move up. GELU, the most frequent one, is short where
  // it is approximate: all steps of a piece are one run of code, without a jump to the activation in each. H200, float16,
  // 16384 x 3072 x 768, us: 187 with the jumps, 152 so; without activation 130.
  __device__ __forceinline__ void store(float (&acc)[kBlockN / 2], const GemmParams& p, int row, int first_col, int batch_idx,
                                        int thread_idx) {
    // Columns of step `step` of a piece, whose accumulators begin at `at`.
    const auto finish_step = [&](int at, int piece, int step, uint32_t buffer, const auto& activate) {
      float v[kStepCols / 2];
#pragma unroll
      for (int i = 0; i < kStepCols / 2; ++i) v[i] = acc[at + step * kStepCols / 2 + i];
      finish(v, p, buffer, 2 * step, piece * kCols + step * kStepCols, thread_idx, activate);
    };
    const auto next_piece = [&] {
#pragma unroll
      for (int i = 0; i < (kBlockN - kCols) / 2; ++i) acc[i] = acc[i + kCols / 2];
    };
    if (p.activation == Activation::kNone) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const uint32_t buffer = begin_piece(piece, thread_idx);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) finish_step(piece * kCols / 2, piece, step, buffer, [](auto&) {});
        end_piece(piece, buffer, row, first_col, batch_idx, thread_idx);
      }
    } else if (sizeof(T) == 2 && p.activation == Activation::kGelu) {
#pragma unroll 1
      for (int piece = 0; piece < kPieces; ++piece) {
        const uint32_t buffer = begin_piece(piece, thread_idx);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          finish_step(0, piece, step, buffer, [](auto& v) { activate_each<Rounded, Activation::kGelu>(v); });
        }
        end_piece(piece, buffer, row, first_col, batch_idx, thread_idx);
        next_piece();
      }
    } else {
#pragma unroll 1
      for (int piece = 0; piece < kPieces; ++piece) {
        const uint32_t buffer = begin_piece(piece, thread_idx);
#pragma unroll 1
        for (int step = 0; step < kSteps; ++step) {
          float v[kStepCols / 2];
#pragma unroll
          for (int constant = 0; constant < kSteps; ++constant) {
            if (constant != step) continue;
#pragma unroll
            for (int i = 0; i < kStepCols / 2; ++i) v[i] = acc[constant * kStepCols / 2 + i];
          }
          finish(v, p, buffer, 2 * step, piece * kCols + step * kStepCols, thread_idx, [&](auto& x) { activate_all<Rounded>(x, p.activation); });
        }
        end_piece(piece, buffer, row, first_col, batch_idx, thread_idx);
        next_piece();
      }
    }
  }

 private:
  // Returns the buffer, once it may be written.
  __device__ __forceinline__ uint32_t begin_piece(int piece, int thread_idx) {
    const int buffer_idx = piece % kBuffers;
    if (residual == nullptr && thread_idx == 0) tma_store_wait<kBuffers - 1>();
    if (residual == nullptr || piece == 0) named_barrier_sync(barrier_id, 128);  // the buffer is free, the bias is there
    if (residual != nullptr) mbarrier_wait(barriers + 8 * buffer_idx, parity);
    if (buffer_idx == kBuffers - 1) parity ^= 1;
    return buffers + buffer_idx * kBufferBytes;
  }
  __device__ __forceinline__ void end_piece(int piece, uint32_t buffer, int row, int first_col, int batch_idx, int thread_idx) const {
    fence_async_proxy();
    named_barrier_sync(barrier_id, 128);
    if (thread_idx != 0) return;
    tma_store_3d(y, buffer, first_col + piece * kCols, row, batch_idx);
    tma_store_commit();
    if (residual != nullptr && piece + kBuffers < kPieces) {
      tma_store_wait<0>();
      load_residual(piece + kBuffers, row, first_col, batch_idx);
    }
  }
};

// --- WideGemm ------------------------------------------------------------------------------------------------------------

// kParts 1: one product of T. kParts 2: float as hi and lo, hi hi + hi lo + lo hi. kScaled: operands of gemm_scaled.h.
template <class T, class Out, int kBlockNValue, int kParts, int kStageCount, int kBuffers, bool kTransA, bool kTransB>
struct WideGemm {
  using Element = Out;
  static constexpr int kBlockN = kBlockNValue;
  static constexpr int kCluster = 2;
  static constexpr bool kScaled = !std::is_same_v<T, Out>;
  using Plan = StagePlan<kBlockN, kParts, kStageCount>;
  static constexpr int kStages = Plan::kStages;
  using TileC = EpilogueTile<64, 64, 128, 2>;  // of one warpgroup, 64 columns at a time
  static constexpr int kTileCOffset = kStages * Plan::kStageBytes;
  // One product of float16 parts is tf32: approximate activations, 2^-21 off, are lost in its roundings.
  using Rounded = std::conditional_t<kScaled && kParts == 1, T, Out>;
  using Epilogue = TmaEpilogue<Out, Rounded, kBlockN, kBuffers>;
  static_assert(Epilogue::kBytes >= TileC::kBytes, "they take turns");
  static constexpr int kBiasOffset = kTileCOffset + kConsumers * Epilogue::kBytes;
  static constexpr int kBarrierOffset = kBiasOffset + kConsumers * kBlockN * 4;
  static constexpr int kEpilogueBarrierOffset = kBarrierOffset + Pipeline<kStages>::kBytes;
  static constexpr int kSmemBytes = kEpilogueBarrierOffset + kConsumers * 8 * Epilogue::kBuffers;
  static_assert(kSmemBytes <= 227 * 1024, "shared memory of one block");
  using Accumulators = float[kBlockN / 2];

  // The tiles of a cluster, kCluster above each other.
  struct Work {
    int batch_idx, first_m, first_n;
  };
  __device__ __forceinline__ static Work work(int index, int tiles_m, int tiles_n, int rank) {
    const int batch_idx = index / (tiles_m * tiles_n);
    const TileIndex tile = grouped_tile(index - batch_idx * tiles_m * tiles_n, tiles_m, tiles_n);
    return {batch_idx, (static_cast<int>(tile.m) * kCluster + rank) * kBlockM, static_cast<int>(tile.n) * kBlockN};
  }

  __device__ __forceinline__ static void release(const Pipeline<kStages>& pipeline, int stage, int lane_idx) {
    if (lane_idx < kCluster) mbarrier_arrive_cluster(cluster_address(pipeline.empty(stage), lane_idx));
  }

  __device__ __forceinline__ static void multiply_whole(Accumulators& acc, const Pipeline<kStages>& pipeline, PipelineState<kStages>& state,
                                                        uint32_t smem, int k_tiles, int group_idx, int lane_idx) {
    int previous = 0;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      mbarrier_wait(pipeline.full(state.stage), state.parity);
      const uint32_t stage = smem + state.stage * Plan::kStageBytes;
      wgmma_fence();
      multiply_tile<T, kBlockN, kTransA, kTransB>(acc, stage + group_idx * kSwizzleRows, stage + Plan::kBytesB, k_tile > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (k_tile > 0) release(pipeline, previous, lane_idx);
      previous = state.stage;
      state.advance();
    }
    wgmma_wait<0>();
    wgmma_pin(acc);
    if (k_tiles > 0) release(pipeline, previous, lane_idx);
  }

  // Tensor cores truncate when they add, so sums leave them for registers every 64 of k. Two sets of accumulators: one is
  // filled while the other is added up.
  __device__ __forceinline__ static void multiply_split(Accumulators& sum, const Pipeline<kStages>& pipeline, PipelineState<kStages>& state,
                                                        uint32_t smem, int k_tiles, int group_idx, int lane_idx) {
    float acc_even[kBlockN / 2], acc_odd[kBlockN / 2];
    const auto issue = [&](float(&acc)[kBlockN / 2]) {
      const int at = state.stage;
      mbarrier_wait(pipeline.full(at), state.parity);
      const uint32_t stage = smem + at * Plan::kStageBytes;
      const uint32_t a_hi = stage + group_idx * kSwizzleRows, a_lo = a_hi + Plan::kTileABytes;
      const uint32_t b_hi = stage + Plan::kBytesB, b_lo = b_hi + Plan::kTileBBytes;
      wgmma_fence();
      multiply_tile<T, kBlockN, kTransA, kTransB>(acc, a_lo, b_hi, false);
      multiply_tile<T, kBlockN, kTransA, kTransB>(acc, a_hi, b_lo, true);
      multiply_tile<T, kBlockN, kTransA, kTransB>(acc, a_hi, b_hi, true);
      wgmma_commit();
      state.advance();
      return at;
    };
    const auto collect = [&](float(&acc)[kBlockN / 2], int stage) {
      wgmma_pin(acc);
      release(pipeline, stage, lane_idx);
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i) sum[i] += acc[i];
    };
    if (k_tiles == 0) return;
    int even = issue(acc_even);
    int k_tile = 1;
    for (; k_tile + 1 < k_tiles; k_tile += 2) {
      const int odd = issue(acc_odd);
      wgmma_wait<1>();
      collect(acc_even, even);
      even = issue(acc_even);
      wgmma_wait<1>();
      collect(acc_odd, odd);
    }
    if (k_tile < k_tiles) {
      const int odd = issue(acc_odd);
      wgmma_wait<1>();
      collect(acc_even, even);
      wgmma_wait<0>();
      collect(acc_odd, odd);
    } else {
      wgmma_wait<0>();
      collect(acc_even, even);
    }
  }

  __device__ __forceinline__ static void unscale(Accumulators& acc, const GemmParams& p, const WgmmaArgs& args, const Work& at,
                                                 int group_idx, int thread_idx) {
    const int lane_idx = thread_idx % 32;
    const int row = at.first_m + group_idx * 64 + thread_idx / 32 * 16 + lane_idx / 4;
    const uint32_t* const a_max = args.stats.a.max + at.batch_idx * args.stats.a.batch_stride;
    const uint32_t* const b_max = args.stats.b.max + at.batch_idx * args.stats.b.batch_stride;
    const Unscale upper(row < p.m ? a_max[row] : 0), lower(row + 8 < p.m ? a_max[row + 8] : 0);
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int col = at.first_n + 8 * j + lane_idx % 4 * 2 + e;
        const Unscale of_col(col < p.n ? b_max[col] : 0);
        acc[4 * j + e] = upper.apply(acc[4 * j + e], of_col);
        acc[4 * j + 2 + e] = lower.apply(acc[4 * j + 2 + e], of_col);
      }
    }
  }

  __device__ __forceinline__ static void run(const GemmParams& p, const WgmmaArgs& args, char* smem_generic) {
    const uint32_t smem = smem_address(smem_generic);
    const Pipeline<kStages> pipeline{smem + kBarrierOffset};
    const int group_idx = static_cast<int>(threadIdx.x) / 128 - 1;  // -1: producer
    const int rank = rank_in_cluster();
    const int tiles_m = static_cast<int>((p.m + kCluster * kBlockM - 1) / (kCluster * kBlockM));
    const int tiles_n = static_cast<int>((p.n + kBlockN - 1) / kBlockN), total = tiles_m * tiles_n * static_cast<int>(p.batch);
    const int k_tiles = static_cast<int>((p.k + kBlockK - 1) / kBlockK);
    const auto epilogue_of = [&](int group) {
      return Epilogue{smem + kTileCOffset + group * Epilogue::kBytes, smem + kEpilogueBarrierOffset + group * 8 * Epilogue::kBuffers,
                      reinterpret_cast<float*>(smem_generic + kBiasOffset) + group * kBlockN, &args.y,
                      p.residual == nullptr ? nullptr : &args.residual, 1 + group};
    };
    if (threadIdx.x == 0) {
      for (int group = 0; group < kConsumers; ++group) epilogue_of(group).init_barriers();
      pipeline.init(kCluster);
      tma_prefetch(&args.a);
      tma_prefetch(&args.b);
    }
    cluster_sync_relaxed();
    wait_for_previous_kernel();
    let_next_kernel_start();

    PipelineState<kStages> state;
    const int first = static_cast<int>(blockIdx.x) / kCluster, step = static_cast<int>(gridDim.x) / kCluster;
    if (group_idx < 0) {
      registers_decrease<40>();
      if (threadIdx.x == 0) {
        for (int index = first; index < total; index += step) {
          const Work at = work(index, tiles_m, tiles_n, rank);
          const int matrix_a = args.a_batched ? at.batch_idx : 0, matrix_b = args.b_batched ? at.batch_idx : 0;
          for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
            mbarrier_wait(pipeline.empty(state.stage), state.parity ^ 1);
            const uint32_t barrier = pipeline.full(state.stage), stage = smem + state.stage * Plan::kStageBytes;
            mbarrier_arrive_expect(barrier, Plan::kStageBytes);
            load_a<Plan, kBlockN, kParts, kTransA, kTransB>(stage, args, barrier, at.first_m, k_tile * kBlockK, matrix_a);
            load_b<Plan, kBlockN, kParts, kTransB, kCluster>(stage, args, barrier, at.first_n, k_tile * kBlockK, matrix_b, rank);
            state.advance();
          }
        }
      }
    } else {
      registers_increase<232>();
      const int thread_idx = static_cast<int>(threadIdx.x) % 128, lane_idx = thread_idx % 32;
      char* const tile_c = smem_generic + kTileCOffset + group_idx * Epilogue::kBytes;
      Epilogue epilogue = epilogue_of(group_idx);
      const bool brings_residual = args.store_by_tma && p.residual != nullptr && thread_idx == 0;
      const auto load_first_residuals = [&](int index) {
        if (index >= total) return;
        const Work at = work(index, tiles_m, tiles_n, rank);
        epilogue.load_first_residuals(at.first_m + group_idx * 64, at.first_n, at.batch_idx);
      };
      if (brings_residual) load_first_residuals(first);
      for (int index = first; index < total; index += step) {
        const Work at = work(index, tiles_m, tiles_n, rank);
        float r_bias[Epilogue::kThreadBias];
        if (args.store_by_tma) Epilogue::load_bias(r_bias, p, at.first_n, thread_idx);
        float acc[kBlockN / 2];
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) acc[i] = 0.0F;
        if constexpr (kParts == 2) {
          multiply_split(acc, pipeline, state, smem, k_tiles, group_idx, lane_idx);
        } else {
          multiply_whole(acc, pipeline, state, smem, k_tiles, group_idx, lane_idx);
        }
        if constexpr (kScaled) unscale(acc, p, args, at, group_idx, thread_idx);
        if (args.store_by_tma) {
          epilogue.put_bias(r_bias, p.beta, thread_idx);
          epilogue.store(acc, p, at.first_m + group_idx * 64, at.first_n, at.batch_idx, thread_idx);
          if (brings_residual && index + step < total) {
            tma_store_wait<0>();
            load_first_residuals(index + step);
          }
          continue;
        }
        const GemmOperands<Out> operands(p, at.batch_idx);
#pragma unroll 1
        for (int col = 0; col < kBlockN; col += 64) {
          named_barrier_sync(1 + group_idx, 128);  // all are done with the columns before
#pragma unroll
          for (int constant = 0; constant < kBlockN; constant += 64) {  // registers have no run-time index
            if (constant == col) put_columns<TileC, 64>(tile_c, acc, constant, thread_idx);
          }
          named_barrier_sync(1 + group_idx, 128);
          TileC::store(tile_c, operands.epilogue, at.first_m + group_idx * 64, at.first_n + col, thread_idx);
        }
      }
      if (args.store_by_tma && thread_idx == 0) tma_store_wait<0>();  // shared memory must last until it is read
    }
    cluster_sync_relaxed();  // the other block may still arrive at this one's barriers
  }
};

template <class Gemm>
__global__ void __launch_bounds__(kThreads, 1) gemm_sm90a_wide_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ WgmmaArgs args) {
  extern __shared__ __align__(1024) char smem[];
  Gemm::run(p, args, smem);
}

// --- Launchers -----------------------------------------------------------------------------------------------------------

// The map of an operand stored as rows x cols, `matrices` of them `matrix_stride` elements apart; a copy brings 64 columns
// of `box_rows` rows.
template <class T>
Status encode_operand(CUtensorMap* map, const T* base, int64_t cols, int64_t rows, int64_t ld, int64_t matrices, int64_t matrix_stride, int box_rows) {
  const int64_t dims[3] = {cols, rows, matrices}, strides[3] = {1, ld, matrices == 1 ? ld * rows : matrix_stride};
  const int box[3] = {64, box_rows, 1};
  return encode_tensor_map(map, base, 3, dims, strides, box);
}

// Rows that a copy of load_a or load_b brings: of m or n where they are stored along k, else of k.
constexpr int box_rows_a(bool along_k) { return along_k ? kBlockM : kBlockK; }
template <int kBlockN, int kSlices>
constexpr int box_rows_b(bool along_k) {
  return along_k ? kBlockN / kSlices : kSliceColumns<kBlockN, kSlices> ? kBlockK : kBlockK / kSlices;
}

template <class T, int kBlockN, int kSlices>
Status encode_half_operands(const GemmParams& p, WgmmaArgs* args) {
  args->a_batched = p.batch_rank > 0 && p.a_batch_strides[0] != 0;
  args->b_batched = p.batch_rank > 0 && p.b_batch_strides[0] != 0;
  ORTPLUGINS_RETURN_IF_ERROR(encode_operand(&args->a, static_cast<const T*>(p.a), p.trans_a ? p.m : p.k, p.trans_a ? p.k : p.m, p.lda,
                                            args->a_batched ? p.batch : 1, p.a_batch_strides[0], box_rows_a(!p.trans_a)));
  return encode_operand(&args->b, static_cast<const T*>(p.b), p.trans_b ? p.k : p.n, p.trans_b ? p.n : p.k, p.ldb,
                        args->b_batched ? p.batch : 1, p.b_batch_strides[0], box_rows_b<kBlockN, kSlices>(p.trans_b));
}

// TMA stores whole boxes of y and reads those of the residual, if both are aligned; it has no place for a bias of rows.
template <class T>
Status encode_epilogue(const GemmParams& p, WgmmaArgs* args) {
  constexpr int kCols = 128 / static_cast<int>(sizeof(T));
  const int64_t row_bytes = p.n * static_cast<int64_t>(sizeof(T));
  args->store_by_tma = (p.bias == nullptr || p.bias_stride_m == 0) && tensor_map_allows(p.y, row_bytes, p.m, p.n) &&
                       tensor_map_allows(p.residual, row_bytes, p.m, p.n);
  if (!args->store_by_tma) return {};
  const int64_t dims[3] = {p.n, p.m, p.batch}, strides[3] = {1, p.n, p.m * p.n};
  const int box[3] = {kCols, 64, 1};
  ORTPLUGINS_RETURN_IF_ERROR(encode_tensor_map(&args->y, static_cast<const T*>(p.y), 3, dims, strides, box));
  return p.residual == nullptr ? Status{} : encode_tensor_map(&args->residual, static_cast<const T*>(p.residual), 3, dims, strides, box);
}

template <class Gemm>
Status launch_wide(const char* what, const GemmParams& p, const ExecContext& context, WgmmaArgs& args) {
  ORTPLUGINS_RETURN_IF_ERROR(encode_epilogue<typename Gemm::Element>(p, &args));
  static SmemLimit limit;
  const auto kernel = gemm_sm90a_wide_kernel<Gemm>;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, Gemm::kSmemBytes));
  const int64_t clusters = ceil_div(p.m, Gemm::kCluster * kBlockM) * ceil_div(p.n, Gemm::kBlockN) * p.batch;
  const unsigned grid = Gemm::kCluster * grid_size(clusters, context.device->sm_count / Gemm::kCluster);
  return launch_with({Gemm::kCluster, true}, what, kernel, grid, kThreads, Gemm::kSmemBytes, context, p, args);
}

// The workspace of a scaled product; offsets in bytes.
struct ScaledWorkspace {
  ScaleJob a, b;
  int64_t a_out, b_out, stats, stats_bytes, bytes;

  ScaledWorkspace(const GemmParams& p, int parts) {
    const auto describe = [&](ScaleJob* job, const void* x, bool batched, int64_t stride, bool along_row, int64_t major, int64_t ld) {
      job->x = static_cast<const float*>(x);
      job->rows = along_row ? major : p.k;
      job->cols = along_row ? p.k : major;
      job->ld = ld;
      job->matrices = batched ? p.batch : 1;
      job->matrix_stride = stride;
      job->along_row = along_row;
      job->out_ld = ceil_div(job->cols, 8) * 8;
    };
    describe(&a, p.a, p.batch_rank > 0 && p.a_batch_strides[0] != 0, p.a_batch_strides[0], !p.trans_a, p.m, p.lda);
    describe(&b, p.b, p.batch_rank > 0 && p.b_batch_strides[0] != 0, p.b_batch_strides[0], p.trans_b, p.n, p.ldb);
    const auto out_bytes = [&](const ScaleJob& job) { return ceil_div(parts * job.matrices * job.rows * job.out_ld * 2, 256) * 256; };
    a_out = 0;
    b_out = out_bytes(a);
    stats = b_out + out_bytes(b);
    stats_bytes = 8 * (a.matrices * p.m + b.matrices * p.n);
    bytes = stats + stats_bytes;
  }

  void place(const GemmParams& p, void* workspace) {
    char* const base = static_cast<char*>(workspace);
    a.out = reinterpret_cast<__half*>(base + a_out);
    b.out = reinterpret_cast<__half*>(base + b_out);
    a.max = reinterpret_cast<uint32_t*>(base + stats);
    b.max = a.max + a.matrices * p.m;
    a.large = reinterpret_cast<int*>(b.max + b.matrices * p.n);
    b.large = a.large + a.matrices * p.m;
  }
};

Status encode_scaled(CUtensorMap* map, const ScaleJob& job, int parts, int box_rows) {
  return encode_operand(map, job.out, job.cols, job.rows, job.out_ld, parts * job.matrices, job.rows * job.out_ld, box_rows);
}

// Scales, multiplies, and has tiles that the guard refuses done again without scaling.
template <int kBlockN, int kParts, int kStages>
Status launch_scaled(const char* what, const GemmParams& p, const ExecContext& context) {
  ScaledWorkspace workspace(p, kParts);
  if (context.workspace_bytes < workspace.bytes) return Status::invalid("workspace", "{} bytes are needed, {} given", {workspace.bytes, context.workspace_bytes});
  workspace.place(p, context.workspace);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  ORTPLUGINS_RETURN_IF_ERROR(status_of(cudaMemsetAsync(workspace.a.max, 0, static_cast<size_t>(workspace.stats_bytes), stream), "cudaMemsetAsync"));
  ORTPLUGINS_RETURN_IF_ERROR(scale_operands(workspace.a, workspace.b, kParts, context));
  WgmmaArgs args = {};
  args.a_batched = workspace.a.matrices > 1;
  args.b_batched = workspace.b.matrices > 1;
  args.stats.a = {workspace.a.max, workspace.a.large, args.a_batched ? p.m : 0};
  args.stats.b = {workspace.b.max, workspace.b.large, args.b_batched ? p.n : 0};
  ORTPLUGINS_RETURN_IF_ERROR(encode_scaled(&args.a, workspace.a, kParts, box_rows_a(workspace.a.along_row)));
  ORTPLUGINS_RETURN_IF_ERROR((encode_scaled(&args.b, workspace.b, kParts, box_rows_b<kBlockN, 2>(workspace.b.along_row))));
  ORTPLUGINS_RETURN_IF_ERROR(dispatch_layout(p, [&](auto trans_a, auto trans_b) {
    return launch_wide<WideGemm<__half, float, kBlockN, kParts, kStages, 2, decltype(trans_a)::value, decltype(trans_b)::value>>(what, p, context, args);
  }));
  return kParts == 2 ? launch_gemm_sm80_tf32x3_guarded(p, context, args.stats) : launch_gemm_sm80_tf32_guarded(p, context, args.stats);
}

template <int kBlockN, int kBuffers>
Status launch_wide_half(const char* what, const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return dispatch_half(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    WgmmaArgs args = {};
    ORTPLUGINS_RETURN_IF_ERROR((encode_half_operands<T, kBlockN, 2>(p, &args)));
    return dispatch_layout(p, [&](auto trans_a, auto trans_b) {
      return launch_wide<WideGemm<T, T, kBlockN, 1, 4, kBuffers, decltype(trans_a)::value, decltype(trans_b)::value>>(what, p, context, args);
    });
  });
}

}  // namespace

Status launch_gemm_sm90a_128x256(const GemmParams& p, const ExecContext& context) { return launch_wide_half<256, 2>("gemm_sm90a_128x256", p, context); }
Status launch_gemm_sm90a_128x192(const GemmParams& p, const ExecContext& context) { return launch_wide_half<192, 3>("gemm_sm90a_128x192", p, context); }

int64_t gemm_sm90a_fp16x3_workspace_bytes(const GemmParams& p, const DeviceInfo&) { return ScaledWorkspace(p, 2).bytes; }
Status launch_gemm_sm90a_fp16x3(const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return launch_scaled<128, 2, 3>("gemm_sm90a_fp16x3", p, context);
}

int64_t gemm_sm90a_fp16_workspace_bytes(const GemmParams& p, const DeviceInfo&) { return ScaledWorkspace(p, 1).bytes; }
Status launch_gemm_sm90a_fp16(const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return launch_scaled<256, 1, 4>("gemm_sm90a_fp16", p, context);
}

}  // namespace ortplugins
