// Gemm of 16-bit elements by wgmma for products with few tiles: 128 x 128 with a multiprocessor to themselves, or 64 x 64, of
// which three share one.
//
// A warpgroup holds 64 rows of the tile in registers (consumers); one thread of a last warp brings the operands (producer).
// Operand tiles, 64 deep along k, pass through a ring of stages in shared memory in the 128-byte swizzle, laid out as they are
// stored: wgmma takes 16-bit operands along k and across it. The blocks of a cluster split k (gemm_layers.h); each adds up and
// finishes its part of the rows from the shared memory of all, in the order of k.
#include "device/sm90.h"
#include "device/tensor_map.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/gemm_layers.h"

namespace ortplugins {
namespace {

constexpr int kBlockK = 64;
constexpr int kRowBytes = 128;
constexpr int kBlockBytes = 64 * kRowBytes;  // 64 rows of m or n (along k), or 64 of k by 64 of m or n

struct SplitArgs {
  CUtensorMap a, b;  // (contiguous, rows, matrix); boxes of 64 x 64
  bool a_batched, b_batched;
  int stages;
};

template <class T, int kGroups, int kBlockNValue, bool kTransA, bool kTransB>
struct SplitGemm {
  static constexpr int kConsumerThreads = 128 * kGroups, kThreads = kConsumerThreads + 32, kBlockM = 64 * kGroups, kBlockN = kBlockNValue;
  static constexpr int kTileABytes = kBlockM * kRowBytes, kStageBytes = kTileABytes + kBlockN * kRowBytes;
  static constexpr int kMostBlocks = kGroups == 2 ? 1 : 3;  // on a multiprocessor
  using TileC = EpilogueTile<kBlockM, kBlockN, kConsumerThreads, 1>;  // where the stages were
  static constexpr int kRowPacks = kBlockN / 8, kRowStep = kConsumerThreads / kRowPacks;  // of 16 bytes of y; rows that threads take at once
  static constexpr int kLeastStages = (TileC::kBytes + kStageBytes - 1) / kStageBytes;  // the stages become the tile of y
  static constexpr int kBiasBytes = 4 * kBlockN;

  // acc (64 x kBlockN) = or += tile a x tile b, over the 64 of k in the stage. tile_a is that of the warpgroup.
  __device__ __forceinline__ static void multiply(float (&acc)[kBlockN / 2], uint32_t tile_a, uint32_t tile_b, bool accumulate) {
    using Product = Wgmma<T, kBlockN, kTransA, !kTransB>;
    // Across k, blocks of 64 of n are kBlockBytes apart, and 16 rows of k are 2048 bytes.
    constexpr int kStepA = kTransA ? 2048 : 32, kStepB = kTransB ? 32 : 2048;
#pragma unroll
    for (int k_step = 0; k_step < kBlockK / 16; ++k_step) {
      Product::run(acc, wgmma_descriptor(tile_a + k_step * kStepA, kTransA ? kBlockBytes : 16),
                   wgmma_descriptor(tile_b + k_step * kStepB, kTransB ? 16 : kBlockBytes), accumulate || k_step > 0);
    }
  }

  // Coordinates of box `box` of a tile: 64 of m or n from `major` by 64 of k.
  template <bool kAlongK>
  __device__ __forceinline__ static int2 box_at(int major, int k, int box) {
    return kAlongK ? make_int2(k, major + 64 * box) : make_int2(major + 64 * box, k);
  }

  __device__ __forceinline__ static void run(const GemmParams& p, const SplitArgs& args, char* smem_generic) {
    const uint32_t smem = smem_address(smem_generic);
    const int stages = args.stages;
    const Ring ring{smem + stages * kStageBytes + kBiasBytes, stages};
    const int thread_idx = static_cast<int>(threadIdx.x), group_idx = thread_idx / 128, lane_idx = thread_idx % 32;
    const int layers = blocks_in_cluster();
    const LayerPlace place(rank_in_cluster(), layers, p.m, p.n, p.k, kBlockM, kBlockN, kBlockK);
    const int first_m = place.tile_m * kBlockM, first_n = place.tile_n * kBlockN, k_begin = place.k_begin, k_end = place.k_end;
    ring.begin(thread_idx == kConsumerThreads, 4 * kGroups, args.a, args.b);

    RingState state;
    if (group_idx == kGroups) {
      if (thread_idx == kConsumerThreads) {
        const int matrix_a = args.a_batched ? place.batch_idx : 0, matrix_b = args.b_batched ? place.batch_idx : 0;
        for (int k_tile = k_begin; k_tile < k_end; ++k_tile) {
          const int k = k_tile * kBlockK;
          mbarrier_wait(ring.empty(state.stage), state.parity ^ 1);
          const uint32_t barrier = ring.full(state.stage), tile_a = smem + state.stage * kStageBytes;
          mbarrier_arrive_expect(barrier, kStageBytes);
#pragma unroll
          for (int i = 0; i < kGroups; ++i) {
            const int2 at = box_at<!kTransA>(first_m, k, i);
            tma_load_3d(tile_a + i * kBlockBytes, &args.a, barrier, at.x, at.y, matrix_a);
          }
#pragma unroll
          for (int i = 0; i < kBlockN / 64; ++i) {
            const int2 at = box_at<kTransB>(first_n, k, i);
            tma_load_3d(tile_a + kTileABytes + i * kBlockBytes, &args.b, barrier, at.x, at.y, matrix_b);
          }
          state.advance(stages);
        }
      }
      end_producer(layers);
      return;
    }

    // The residual is on its way to L2 while the products run.
    const GemmOperands<T> operands(p, place.batch_idx);
    const int row_begin = kBlockM / layers * place.layer, row_end = kBlockM / layers * (place.layer + 1);
    constexpr int kLines = kBlockN / 64;  // of 128 bytes in a row
    for (int i = thread_idx; i < kLines * (row_end - row_begin); i += kConsumerThreads) {
      const int64_t row = first_m + row_begin + i / kLines, col = first_n + i % kLines * 64;
      if (p.residual != nullptr && row < p.m && col < p.n) prefetch_l2(operands.epilogue.residual + row * p.n + col);
    }
    float* const bias = reinterpret_cast<float*>(smem_generic + stages * kStageBytes);
    if (thread_idx < kBlockN) {
      const int64_t col = first_n + thread_idx;
      const bool exists = p.bias != nullptr && p.bias_stride_m == 0 && col < p.n;
      bias[thread_idx] = exists ? p.beta * to_float(operands.epilogue.bias[col * p.bias_stride_n]) : 0.0F;
    }

    float acc[kBlockN / 2];
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) acc[i] = 0.0F;
    int previous = 0;
    for (int k_tile = k_begin; k_tile < k_end; ++k_tile) {
      mbarrier_wait(ring.full(state.stage), state.parity);
      const uint32_t tile_a = smem + state.stage * kStageBytes;
      wgmma_fence();
      multiply(acc, tile_a + group_idx * kBlockBytes, tile_a + kTileABytes, k_tile > k_begin);
      wgmma_commit();
      wgmma_wait<1>();
      if (k_tile > k_begin && lane_idx == 0) mbarrier_arrive(ring.empty(previous));
      previous = state.stage;
      state.advance(stages);
    }
    wgmma_wait<0>();
    wgmma_pin(acc);
    named_barrier_sync(1, kConsumerThreads);  // all are done with the stages
    {
      const int row = group_idx * 64 + thread_idx % 128 / 32 * 16 + lane_idx / 4;
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j) {
        const int col = 8 * j + lane_idx % 4 * 2;
        TileC::put(smem_generic, row, col, acc[4 * j], acc[4 * j + 1]);
        TileC::put(smem_generic, row + 8, col, acc[4 * j + 2], acc[4 * j + 3]);
      }
    }
    if (layers == 1) {
      named_barrier_sync(1, kConsumerThreads);
    } else {
      cluster_sync();
    }
    // Four columns of a row, from layer `other`; eight, or four, of all layers.
    const auto read_half = [&](int row, int col, int other) {
      return layers == 1 ? TileC::get(smem_generic, row, col) : load_cluster(cluster_address(smem + TileC::Layout::offset(row, col / 4), other));
    };
    const auto read = [&](float(&v)[8], int row, int col) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = 0.0F;
#pragma unroll 4
      for (int other = 0; other < layers; ++other) {
        const float4 first = read_half(row, col, other), second = read_half(row, col + 4, other);
        const float parts[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] += parts[j];
      }
    };
    const EpilogueArgs<T>& epilogue = operands.epilogue;
    const bool whole_packs = p.n % 8 == 0 && pack_shift(epilogue.y) == 0 && pack_shift(epilogue.residual) == 0 && p.bias_stride_m == 0;
    if (whole_packs) {
      // The common case in little code, since each block of a small product runs it once.
      const int tile_col = thread_idx % kRowPacks * 8;
      const int64_t col = first_n + tile_col;
      const int rows = col < p.n ? static_cast<int>(p.m - first_m < row_end ? p.m - first_m : row_end) : 0;
#pragma unroll 1
      for (int row = row_begin + thread_idx / kRowPacks; row < rows; row += kRowStep) {
        const int64_t offset = (first_m + row) * p.n + col;
        Pack<T> residual = {};
        if (epilogue.residual != nullptr) residual = load_pack_readonly(epilogue.residual + offset);
        float v[8], added[8];
        read(v, row, tile_col);
        unpack(residual, added);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = p.alpha * v[j] + bias[tile_col + j] + added[j];
        activate_all<T>(v, p.activation);
        store_pack(epilogue.y + offset, pack_floats<T>(v));
      }
    } else {
      const auto read_four = [&](int row, int col) {
        float4 sum = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
        for (int other = 0; other < layers; ++other) {
          const float4 v = read_half(row, col, other);
          sum.x += v.x;
          sum.y += v.y;
          sum.z += v.z;
          sum.w += v.w;
        }
        return sum;
      };
      TileC::store_rows(smem_generic, read_four, epilogue, first_m, first_n, row_begin, row_end, thread_idx);
    }
    if (layers > 1) cluster_sync_relaxed();  // the other blocks may still read this one's tile
  }
};

template <class Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, Gemm::kMostBlocks)
gemm_sm90a_split_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ SplitArgs args) {
  extern __shared__ __align__(1024) char smem[];
  Gemm::run(p, args, smem);
}

template <class T, int kGroups, int kBlockN>
Status launch_split(const char* what, const GemmParams& p, const ExecContext& context) {
  constexpr int kBlockM = 64 * kGroups;
  SplitArgs args = {};
  args.a_batched = p.batch_rank > 0 && p.a_batch_strides[0] != 0;
  args.b_batched = p.batch_rank > 0 && p.b_batch_strides[0] != 0;
  const auto encode = [&](CUtensorMap* map, const void* x, int64_t cols, int64_t rows, int64_t ld, bool batched, int64_t stride) {
    const int64_t dims[3] = {cols, rows, batched ? p.batch : 1}, strides[3] = {1, ld, batched ? stride : ld * rows};
    const int box[3] = {64, 64, 1};
    return encode_tensor_map(map, static_cast<const T*>(x), 3, dims, strides, box);
  };
  ORTPLUGINS_RETURN_IF_ERROR(encode(&args.a, p.a, p.trans_a ? p.m : p.k, p.trans_a ? p.k : p.m, p.lda, args.a_batched, p.a_batch_strides[0]));
  ORTPLUGINS_RETURN_IF_ERROR(encode(&args.b, p.b, p.trans_b ? p.k : p.n, p.trans_b ? p.n : p.k, p.ldb, args.b_batched, p.b_batch_strides[0]));
  return dispatch_layout(p, [&](auto trans_a, auto trans_b) {
    using Gemm = SplitGemm<T, kGroups, kBlockN, decltype(trans_a)::value, decltype(trans_b)::value>;
    const int64_t tiles = ceil_div(p.m, kBlockM) * ceil_div(p.n, kBlockN) * p.batch, k_tiles = ceil_div(p.k, kBlockK);
    const int layers = choose_layers(tiles, k_tiles, context.device->sm_count);
    const int64_t grid = tiles * layers;
    args.stages = choose_stages(grid, Gemm::kMostBlocks, context.device->sm_count, Gemm::kStageBytes, Gemm::kBiasBytes, ceil_div(k_tiles, layers),
                                Gemm::kLeastStages);
    const int smem_bytes = args.stages * (Gemm::kStageBytes + 16) + Gemm::kBiasBytes;
    const bool overlaps = grid <= 4 * Gemm::kMostBlocks * context.device->sm_count;  // starting early costs blocks that wait their turn
    static SmemLimit limit;
    const auto kernel = gemm_sm90a_split_kernel<Gemm>;
    ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, 227 * 1024));
    return launch_with({static_cast<unsigned>(layers), overlaps}, what, kernel, static_cast<unsigned>(grid), Gemm::kThreads, smem_bytes, context, p, args);
  });
}

}  // namespace

Status launch_gemm_sm90a_split_128x128(const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return dispatch_half(p.dtype, [&](auto tag) { return launch_split<typename decltype(tag)::type, 2, 128>("gemm_sm90a_split_128x128", p, context); });
}
Status launch_gemm_sm90a_split_64x64(const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return dispatch_half(p.dtype, [&](auto tag) { return launch_split<typename decltype(tag)::type, 1, 64>("gemm_sm90a_split_64x64", p, context); });
}

}  // namespace ortplugins
