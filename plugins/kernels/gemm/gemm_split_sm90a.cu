// Gemm of 16-bit elements by wgmma for products with few tiles: 128 x 128 with a multiprocessor to themselves, 128 x 64, of which
// two may share one, or 64 x 64, of which three may.
//
// A warpgroup holds 64 rows of the tile in registers (consumers); one thread of a last warp brings the operands (producer).
// Operand tiles, 64 deep along k, pass through a ring of stages in shared memory in the 128-byte swizzle, laid out as they are
// stored: wgmma takes 16-bit operands along k and across it.
//
// The blocks of a cluster split k (gemm_layers.h), and each finishes its part of the columns. In the end the stages become the
// block's sums, in the order of the threads that hold them: 8 columns of a warp's 16 rows are a piece, 16 bytes of each lane. A
// warp sends the pieces of the other layers to the same warp there by bulk copies, waits for its own, and adds up in the order of
// k. Results go through shared memory once more, in rows of y, to which the residual was brought meanwhile. H200, 1024 x 768 x 3072
// with GELU in tiles of 128 x 128 12.9 us; 13.6 where each block reads the sums of the other through the cluster and waits for all of it.
#include "device/sm90.h"
#include "device/tensor_map.h"
#include "device/tile_copy.h"
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
  LayerGrid grid;
};

template <class T, int kGroups, int kBlockNValue, bool kTransA, bool kTransB>
struct SplitGemm {
  static constexpr int kConsumerThreads = 128 * kGroups, kThreads = kConsumerThreads + 32, kBlockM = 64 * kGroups, kBlockN = kBlockNValue;
  static constexpr int kTileABytes = kBlockM * kRowBytes, kStageBytes = kTileABytes + kBlockN * kRowBytes;
  static constexpr int kMostBlocks = kBlockN == 128 ? 1 : kGroups == 2 ? 2 : 3;  // on a multiprocessor
  static constexpr int kWarps = 4 * kGroups, kPieces = kBlockN / 8, kPieceShift = kPieces == 16 ? 4 : 3, kPieceBytes = 512;
  static constexpr int kBatch = 4, kBatches = kPieces / 2 / kBatch;  // pieces that a warp finishes at once; times that it does, of two layers
  using TileC = EpilogueTile<kBlockM, kBlockN, kConsumerThreads, 1>;  // where the stages were
  static constexpr int kTileBytes = 4 * kBlockM * kBlockN, kResultRowBytes = 2 * kBlockN;
  static constexpr int kLeastStages = (kTileBytes + kBlockM * kResultRowBytes + kStageBytes - 1) / kStageBytes;  // they become sums and results
  // Behind the stages: what the other layers send, the bias, and a barrier for each batch of each warp: its pieces are there.
  static constexpr int received_bytes(int layers) { return kTileBytes / layers * (layers - 1); }
  using Exchange = LayerExchange<kWarps, kBatches>;
  static constexpr int kBiasBytes = 4 * kBlockN, kOtherBytes = kBiasBytes + Exchange::kBarrierBytes;

  // acc (64 x kBlockN) = or += tile a x tile b, over the 64 of k in the stage; descriptors. tile_a is that of the warpgroup.
  __device__ __forceinline__ static void multiply(float (&acc)[kBlockN / 2], uint64_t tile_a, uint64_t tile_b, bool accumulate) {
    using Product = Wgmma<T, kBlockN, kTransA, !kTransB>;
    // Across k, blocks of 64 of n are kBlockBytes apart, and 16 rows of k are 2048 bytes.
    constexpr int kStepA = kTransA ? 2048 : 32, kStepB = kTransB ? 32 : 2048;
#pragma unroll
    for (int k_step = 0; k_step < kBlockK / 16; ++k_step) {
      Product::run(acc, wgmma_descriptor_at(tile_a, k_step * kStepA), wgmma_descriptor_at(tile_b, k_step * kStepB), accumulate || k_step > 0);
    }
  }

  // Coordinates of box `box` of a tile: 64 of m or n from `major` by 64 of k.
  template <bool kAlongK>
  __device__ __forceinline__ static int2 box_at(int major, int k, int box) {
    return kAlongK ? make_int2(k, major + 64 * box) : make_int2(major + 64 * box, k);
  }

  // All of k is in `acc`: the tile goes through shared memory, and threads finish 16 bytes of y each.
  __device__ __forceinline__ static void finish_tile(const float (&acc)[kBlockN / 2], const GemmParams& p, const EpilogueArgs<T>& epilogue, char* tile,
                                                     const float* bias, int first_m, int first_n) {
    const int thread_idx = static_cast<int>(threadIdx.x), lane_idx = thread_idx % 32;
    const int warp_row = thread_idx / 32 * 16 + lane_idx / 4;
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      const int col = 8 * j + lane_idx % 4 * 2;
      TileC::put(tile, warp_row, col, acc[4 * j], acc[4 * j + 1]);
      TileC::put(tile, warp_row + 8, col, acc[4 * j + 2], acc[4 * j + 3]);
    }
    named_barrier_sync(1, kConsumerThreads);
    const bool whole_packs = p.n % 8 == 0 && pack_shift(epilogue.y) == 0 && pack_shift(epilogue.residual) == 0 && p.bias_stride_m == 0;
    if (!whole_packs) return TileC::store(tile, epilogue, first_m, first_n, thread_idx);
    // The common case in little code, since each block of a small product runs it once.
    constexpr int kRowPacks = kBlockN / 8, kRowStep = kConsumerThreads / kRowPacks;  // of 16 bytes of y; rows that threads take at once
    const int tile_col = thread_idx % kRowPacks * 8;
    const int64_t col = first_n + tile_col;
    const int rows = col < p.n ? static_cast<int>(p.m - first_m < kBlockM ? p.m - first_m : kBlockM) : 0;
#pragma unroll 1
    for (int row = thread_idx / kRowPacks; row < rows; row += kRowStep) {
      const int64_t offset = (first_m + row) * p.n + col;
      Pack<T> residual = {};
      if (epilogue.residual != nullptr) residual = load_pack_readonly(epilogue.residual + offset);
      float v[8], added[8];
      const float4 first = TileC::get(tile, row, tile_col), second = TileC::get(tile, row, tile_col + 4);
      const float sums[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
      unpack(residual, added);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = p.alpha * sums[j] + bias[tile_col + j] + added[j];
      activate_all<T>(v, p.activation);
      store_pack(epilogue.y + offset, pack_floats<T>(v));
    }
  }

  __device__ __forceinline__ static void run(const GemmParams& p, const SplitArgs& args, char* smem_generic) {
    const uint32_t smem = smem_address(smem_generic);
    const int stages = args.stages, layer_shift = args.grid.layer_shift, layers = 1 << layer_shift;
    const int pieces = kPieces >> layer_shift, piece_shift = kPieceShift - layer_shift;       // of a layer
    const int part_bytes = kTileBytes >> layer_shift, warp_bytes = kPieceBytes * pieces;  // of a layer, and of one warp in it
    const int received_offset = stages * kStageBytes, bias_offset = received_offset + kTileBytes - part_bytes;
    const Ring ring{smem + bias_offset + kOtherBytes, stages};
    // A warpgroup's index by a shuffle: see wgmma_descriptor_at.
    const int thread_idx = static_cast<int>(threadIdx.x), warp_idx = thread_idx / 32, lane_idx = thread_idx % 32;
    const int group_idx = __shfl_sync(0xffffffffU, thread_idx / 128, 0);
    const LayerPlace place(args.grid);
    const int first_m = place.tile_m * kBlockM, first_n = place.tile_n * kBlockN, k_begin = place.k_begin, k_end = place.k_end, layer = place.layer;
    const Exchange exchange{smem, smem + bias_offset + kBiasBytes, received_offset, layer, layers, warp_idx, warp_bytes, kPieceBytes * (pieces < kBatch ? pieces : kBatch)};
    if (layers > 1 && thread_idx == kConsumerThreads) exchange.begin();
    ring.begin(thread_idx == kConsumerThreads, kWarps, args.a, args.b);
    if (layers > 1) cluster_arrive_relaxed();  // copies may come; who sends them waits for this

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
      return;
    }

    // The residual is on its way to L2 while the products run.
    const GemmOperands<T> operands(p, place.batch_idx);
    const int first_col = first_n + 8 * pieces * layer;
    if (p.residual != nullptr && thread_idx < kBlockM && first_m + thread_idx < p.m) {
      for (int64_t col = first_col; col < p.n && col < first_col + 8 * pieces; col += 64) {
        prefetch_l2(operands.epilogue.residual + (first_m + thread_idx) * p.n + col);
      }
    }
    float* const bias = reinterpret_cast<float*>(smem_generic + bias_offset);
    if (thread_idx < kBlockN) {
      const int64_t col = first_n + thread_idx;
      const bool exists = p.bias != nullptr && p.bias_stride_m == 0 && col < p.n;
      bias[thread_idx] = exists ? p.beta * to_float(operands.epilogue.bias[col * p.bias_stride_n]) : 0.0F;
    }

    float acc[kBlockN / 2];
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) acc[i] = 0.0F;
    int previous = 0;
    const uint64_t first_tile_a = wgmma_descriptor(smem + group_idx * kBlockBytes, kTransA ? kBlockBytes : 16);
    const uint64_t first_tile_b = wgmma_descriptor(smem + kTileABytes, kTransB ? 16 : kBlockBytes);
    for (int k_tile = k_begin; k_tile < k_end; ++k_tile) {
      mbarrier_wait(ring.full(state.stage), state.parity);
      const int stage_offset = state.stage * kStageBytes;
      wgmma_fence();
      multiply(acc, wgmma_descriptor_at(first_tile_a, stage_offset), wgmma_descriptor_at(first_tile_b, stage_offset), k_tile > k_begin);
      wgmma_commit();
      wgmma_wait<1>();
      if (k_tile > k_begin && lane_idx == 0) mbarrier_arrive(ring.empty(previous));
      previous = state.stage;
      state.advance(stages);
    }
    wgmma_wait<0>();
    wgmma_pin(acc);
    named_barrier_sync(1, kConsumerThreads);  // all are done with the stages

    if (layers == 1) return finish_tile(acc, p, operands.epilogue, smem_generic, bias, first_m, first_n);

    // Results: 16 rows of a warp, of kBlockN columns. Neighbouring rows have a chunk in different banks.
    const EpilogueArgs<T>& epilogue = operands.epilogue;
    const int first_row = first_m + 16 * warp_idx;
    char* const results = smem_generic + kTileBytes + 16 * warp_idx * kResultRowBytes;
    const auto result_at = [](int row, int chunk) { return row * kResultRowBytes + ((chunk ^ (row & 7)) << 4); };
    // body(place in results, offset in y, elements that exist) for each chunk of this lane.
    const auto for_chunks = [&](const auto& body) {
#pragma unroll 1
      for (int i = lane_idx; i < 16 * pieces; i += 32) {
        const int row = i >> piece_shift, chunk = i & (pieces - 1);
        const int64_t at_row = first_row + row, left = p.n - (first_col + 8 * chunk);
        if (at_row < p.m && left > 0) body(result_at(row, chunk), at_row * p.n + first_col + 8 * chunk, left < 8 ? static_cast<int>(left) : 8);
      }
    };
    if (epilogue.residual != nullptr) {
      const int alignment = row_alignment(epilogue.residual, p.n);
      const uint32_t target = smem_address(results);
      for_chunks([&](int at, int64_t offset, int count) { copy_chunk(target + at, epilogue.residual + offset, 2 * count, alignment); });
      cp_async_commit();
    }

    const int warp_offset = warp_idx * warp_bytes;
    const auto put = [&](bool own) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int target = j >> piece_shift;
        if ((target == layer) != own) continue;
        const int at = target * (part_bytes - warp_bytes) + j * kPieceBytes + warp_offset + 16 * lane_idx;
        *reinterpret_cast<float4*>(smem_generic + at) = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
      }
    };
    put(false);
    exchange.send(smem + lane_idx * part_bytes + warp_offset, lane_idx);
    put(true);
    cp_async_wait<0>();
    __syncwarp();

    const int g = lane_idx / 4, t = lane_idx % 4;
    const bool row_bias = p.bias != nullptr && p.bias_stride_m != 0;
#pragma unroll 1
    for (int piece = 0; piece < pieces; piece += kBatch) {
      exchange.wait(piece / kBatch);
      float v[4 * kBatch] = {};
      const int at = 16 * lane_idx + piece * kPieceBytes;
      exchange.add_up(v, smem_generic + layer * part_bytes + warp_offset + at, smem_generic, at, pieces - piece, kPieceBytes);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float2 b = *reinterpret_cast<const float2*>(bias + (first_col - first_n + 8 * (piece + i < pieces ? piece + i : 0) + 2 * t));
#pragma unroll
        for (int e = 0; e < 4; ++e) v[4 * i + e] = p.alpha * v[4 * i + e] + (e % 2 == 0 ? b.x : b.y);
      }
      if (row_bias) {
#pragma unroll
        for (int i = 0; i < 4 * kBatch; ++i) {
          const int64_t row = first_row + g + i % 4 / 2 * 8, col = first_col + 8 * (piece + i / 4) + 2 * t + i % 2;
          if (row < p.m && col < p.n) v[i] += p.beta * to_float(epilogue.bias[row * p.bias_stride_m + col * p.bias_stride_n]);
        }
      }
      // Rows g and g + 8 have the same swizzle.
      const auto result_of = [&](int i, int half) { return reinterpret_cast<uint32_t*>(results + result_at(g + 8 * half, piece + i) + 4 * t); };
      if (epilogue.residual != nullptr) {
#pragma unroll
        for (int i = 0; i < 2 * kBatch; ++i) {
          if (piece + i / 2 >= pieces) continue;
          const float2 pair = unpack_half2<T>(*result_of(i / 2, i % 2));
          v[2 * i] += pair.x;
          v[2 * i + 1] += pair.y;
        }
      }
      activate_all<T>(v, p.activation);
#pragma unroll
      for (int i = 0; i < 2 * kBatch; ++i) {
        if (piece + i / 2 < pieces) *result_of(i / 2, i % 2) = pack_half2<T>(v[2 * i], v[2 * i + 1]);
      }
    }
    __syncwarp();
    cluster_arrive_relaxed();
    const bool y_aligned = row_alignment(epilogue.y, p.n) == 16;
    for_chunks([&](int at, int64_t offset, int count) {
      const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(results + at);
      if (y_aligned) {
        store_pack(epilogue.y + offset, pack);
      } else {
        store_pack_guarded(epilogue.y + offset, pack, 0, count);
      }
    });
    cluster_wait();  // copies may still read this block's sums
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
    const int64_t tiles_m = ceil_div(p.m, kBlockM), tiles_n = ceil_div(p.n, kBlockN), tiles = tiles_m * tiles_n * p.batch, k_tiles = ceil_div(p.k, kBlockK);
    const int layers = choose_layers(tiles, k_tiles, context.device->sm_count);
    const int64_t grid = tiles * layers;
    args.grid = {layers, tiles_m, tiles_n, k_tiles};
    const int other_bytes = Gemm::received_bytes(layers) + Gemm::kOtherBytes;
    args.stages = choose_stages(grid, Gemm::kMostBlocks, context.device->sm_count, Gemm::kStageBytes, other_bytes, ceil_div(k_tiles, layers), Gemm::kLeastStages);
    const int smem_bytes = args.stages * (Gemm::kStageBytes + 16) + other_bytes;
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
Status launch_gemm_sm90a_split_128x64(const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return dispatch_half(p.dtype, [&](auto tag) { return launch_split<typename decltype(tag)::type, 2, 64>("gemm_sm90a_split_128x64", p, context); });
}
Status launch_gemm_sm90a_split_64x64(const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return dispatch_half(p.dtype, [&](auto tag) { return launch_split<typename decltype(tag)::type, 1, 64>("gemm_sm90a_split_64x64", p, context); });
}

}  // namespace ortplugins
