// Gemm with up to 16 rows: a stream of b, read once.
//
// Each warp, or pair of warps side by side in n, works for itself: it takes tiles of up to 64 of k by 128 bytes of columns for
// each warp (b stored (k, n)) or 64 columns by 128 bytes of k (b stored (n, k)), brings them with the matching tile of a by TMA
// into its own ring, and multiplies them: float16 and bfloat16 by mma.sync, tf32 with more than 8 rows, too, float32 by FFMA. A
// multiprocessor has 64 to 128 KB of b on their way, more than latency times bandwidth takes (about 40 KB).
//
// The rings of a block and the blocks of a cluster split k. At the end each warp sends its sums to the blocks that finish
// them, column by column, and these add up what has come, always in the order of k. With more groups of columns than
// multiprocessors a block takes several, one after the other: the tiles of the next are on their way while it finishes one
// (float32, 1 x 11008 x 4096 47 us, 50 with a block for each group).
//
// Memory must not rest between two kernels either. A block that starts while the kernel in front still runs asks L2 for its
// first tiles of b: nothing is read by that, and what the other kernel may yet write to b goes through L2 as well. After a
// short kernel the next one starts when the last tiles are on their way: what L2 was asked for long before is gone when it is read.
// Most multiprocessors have room for two blocks, so that those of the next kernel do not wait for the last of this one.
#include "device/dependent_launch.h"
#include "device/mma.h"
#include "device/shared_memory.h"
#include "device/sm90.h"
#include "device/tensor_map.h"
#include "kernels/gemm/gemm_cuda.h"

namespace ortplugins {
namespace {

constexpr int kRows = 16;
constexpr int kRowBytes = 128;                 // of all tiles, swizzled by TMA
constexpr int kBoxABytes = kRows * kRowBytes;  // 16 rows of a, 128 bytes of k

struct SkinnyArgs {
  CUtensorMap a, b;
  int rows_a;                         // that a copy of a brings
  int groups;                         // of columns, Config::kCols each
  int parts_offset, barriers_offset;  // in shared memory
  bool next_at_once;                  // the next kernel starts with this one, not when the last tiles are on their way
  bool y_in_pairs;                    // two neighbours of y may be stored at once
};

// The address of 16-byte chunk `chunk` of a row of a tile.
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) { return tile + row * kRowBytes + ((chunk ^ (row & 7)) << 4); }
__device__ __forceinline__ void store_cluster(uint32_t address, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};\n" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// What the variants of a warp's products share: kCols columns of y, kDepth of k in a tile, and for each thread the sums of
// columns in pairs. `each(row, col, x, y)` is called with those that the thread holds in the end.

// 16-bit elements by mma.sync m16n8k16: lane g = lane / 4, t = lane % 4.
template <class T, bool kTransB>
struct HalfProducts {
  static constexpr int kCols = 64, kDepth = 64, kTileRows = 64, kBoxesA = 1;
  float acc[kCols / 8][4] = {};

  __device__ __forceinline__ void multiply(uint32_t tile_a, uint32_t tile_b, int lane_idx) {
    const int row = lane_idx % 8, odd = lane_idx / 8 % 2, upper = lane_idx / 16;
#pragma unroll
    for (int k_step = 0; k_step < kDepth / 16; ++k_step) {
      uint32_t a[4];
      ldmatrix_x4(a, chunk_address(tile_a, row + 8 * odd, 2 * k_step + upper));
#pragma unroll
      for (int j = 0; j < kCols / 16; ++j) {  // 16 columns: b0 b1 of the first eight, then of the others
        uint32_t b[4];
        if constexpr (kTransB) {
          ldmatrix_x4(b, chunk_address(tile_b, 16 * j + 8 * upper + row, 2 * k_step + odd));
        } else {
          ldmatrix_x4_trans(b, chunk_address(tile_b, 16 * k_step + 8 * odd + row, 2 * j + upper));
        }
        mma_m16n8k16<T>(acc[2 * j], a, b[0], b[1]);
        mma_m16n8k16<T>(acc[2 * j + 1], a, b[2], b[3]);
      }
    }
  }
  template <class Each>
  __device__ __forceinline__ void finish(int lane_idx, const Each& each) {
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) each(lane_idx / 4 + 8 * i, 8 * j + lane_idx % 4 * 2, acc[j][2 * i], acc[j][2 * i + 1]);
    }
  }
};

// float32, b stored (k, n): a lane has kChunks x 4 columns (chunks 8 / kChunks apart) of every (4 kChunks)-th group of four k.
// With more columns a lane reads a less often, which counts when there are many rows.
template <int kM, int kChunks, int kTileDepth>
struct FloatProducts {
  static constexpr int kCols = 32, kDepth = kTileDepth, kTileRows = kDepth, kBoxesA = kDepth / 32;
  static constexpr int kLanesN = 8 / kChunks, kParts = 32 / kLanesN;
  float acc[kM][4 * kChunks] = {};

  __device__ __forceinline__ void multiply(uint32_t tile_a, uint32_t tile_b, int lane_idx) {
    const int lane_n = lane_idx % kLanesN, part = lane_idx / kLanesN;
#pragma unroll 1
    for (int k = 4 * part; k < kDepth; k += 4 * kParts) {
      float4 b[4][kChunks];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) b[i][c] = load_shared_float4(chunk_address(tile_b, k + i, lane_n + kLanesN * c));
      }
      const uint32_t box = tile_a + k / 32 * kBoxABytes;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const float4 v = load_shared_float4(chunk_address(box, m, k % 32 / 4));
        const float a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            acc[m][4 * c] = fmaf(a[i], b[i][c].x, acc[m][4 * c]);
            acc[m][4 * c + 1] = fmaf(a[i], b[i][c].y, acc[m][4 * c + 1]);
            acc[m][4 * c + 2] = fmaf(a[i], b[i][c].z, acc[m][4 * c + 2]);
            acc[m][4 * c + 3] = fmaf(a[i], b[i][c].w, acc[m][4 * c + 3]);
          }
        }
      }
    }
  }
  // Lanes that differ in their part of k share out the rows: each round a lane gives half of its rows away and adds up the
  // others.
  template <int kCount>
  __device__ __forceinline__ void exchange(int lane_idx, int distance) {
    const bool upper = (lane_idx & distance) != 0;
#pragma unroll
    for (int m = 0; m < kCount / 2; ++m) {
#pragma unroll
      for (int j = 0; j < 4 * kChunks; ++j) {
        const float given = upper ? acc[m][j] : acc[m + kCount / 2][j], kept = upper ? acc[m + kCount / 2][j] : acc[m][j];
        acc[m][j] = kept + __shfl_xor_sync(0xffffffffU, given, distance);
      }
    }
  }
  template <class Each>
  __device__ __forceinline__ void finish(int lane_idx, const Each& each) {
    exchange<kM>(lane_idx, 16);
    exchange<kM / 2>(lane_idx, 8);
    int first = lane_idx / 16 * (kM / 2) + lane_idx / 8 % 2 * (kM / 4);
    if constexpr (kChunks == 2) {
      exchange<kM / 4>(lane_idx, 4);
      first += lane_idx / 4 % 2 * (kM / 8);
    }
#pragma unroll
    for (int m = 0; m < kM / kParts; ++m) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int col = 4 * (lane_idx % kLanesN + kLanesN * c);
        each(first + m, col, acc[m][4 * c], acc[m][4 * c + 1]);
        each(first + m, col + 2, acc[m][4 * c + 2], acc[m][4 * c + 3]);
      }
    }
  }
};

// tf32, b stored (k, n), by mma.sync m16n8k8: lane g = lane / 4, t = lane % 4. Of every eight k the products take 2 t as their t and
// 2 t + 1 as their t + 4, and of a tile's columns 4 g + j as column g of product j: b comes in 16 bytes, from all banks.
struct Tf32Products {
  static constexpr int kCols = 32, kDepth = 32, kTileRows = kDepth, kBoxesA = 1;
  float acc[kCols / 8][4] = {};

  __device__ __forceinline__ void multiply(uint32_t tile_a, uint32_t tile_b, int lane_idx) {
    const int g = lane_idx / 4, t = lane_idx % 4;
    float sum[kCols / 8][4] = {};  // of one tile: the unit cuts off what it adds to a large sum
#pragma unroll
    for (int k = 0; k < kDepth; k += 8) {
      const float2 upper = load_shared_float2(chunk_address(tile_a, g, k / 4 + t / 2) + t % 2 * 8);
      const float2 lower = load_shared_float2(chunk_address(tile_a, g + 8, k / 4 + t / 2) + t % 2 * 8);
      const uint32_t a[4] = {to_tf32(upper.x), to_tf32(lower.x), to_tf32(upper.y), to_tf32(lower.y)};
      const float4 b0 = load_shared_float4(chunk_address(tile_b, k + 2 * t, g)), b1 = load_shared_float4(chunk_address(tile_b, k + 2 * t + 1, g));
      mma_m16n8k8_tf32(sum[0], a, to_tf32(b0.x), to_tf32(b1.x));
      mma_m16n8k8_tf32(sum[1], a, to_tf32(b0.y), to_tf32(b1.y));
      mma_m16n8k8_tf32(sum[2], a, to_tf32(b0.z), to_tf32(b1.z));
      mma_m16n8k8_tf32(sum[3], a, to_tf32(b0.w), to_tf32(b1.w));
    }
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[j][i] += sum[j][i];
    }
  }
  template <class Each>
  __device__ __forceinline__ void finish(int lane_idx, const Each& each) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane_idx / 4 + 8 * (i / 2), col = 4 * (lane_idx % 4 * 2 + i % 2);
      each(row, col, acc[0][i], acc[1][i]);
      each(row, col + 2, acc[2][i], acc[3][i]);
    }
  }
};

// float32, b stored (n, k): a lane has columns lane % 16 and 16 more, and half of the rows.
template <int kM>
struct FloatProductsTransB {
  static constexpr int kCols = 32, kDepth = 32, kTileRows = kCols, kBoxesA = 1;
  static constexpr int kLaneRows = kM / 2, kLaneCols = kCols / 16;
  float acc[kLaneRows][kLaneCols] = {};

  __device__ __forceinline__ void multiply(uint32_t tile_a, uint32_t tile_b, int lane_idx) {
    const int col = lane_idx % 16, first_row = lane_idx / 16 * kLaneRows;
#pragma unroll 2
    for (int chunk = 0; chunk < kDepth / 4; ++chunk) {
      // Eight lanes see eight rows of the tile, which the swizzle puts in different banks.
      float4 b[kLaneCols];
#pragma unroll
      for (int j = 0; j < kLaneCols; ++j) b[j] = load_shared_float4(chunk_address(tile_b, col + 16 * j, chunk));
#pragma unroll
      for (int m = 0; m < kLaneRows; ++m) {
        const float4 a = load_shared_float4(chunk_address(tile_a, first_row + m, chunk));
#pragma unroll
        for (int j = 0; j < kLaneCols; ++j) acc[m][j] = fmaf(a.w, b[j].w, fmaf(a.z, b[j].z, fmaf(a.y, b[j].y, fmaf(a.x, b[j].x, acc[m][j]))));
      }
    }
  }
  // Neighbouring lanes make pairs of columns: the even one of the first 16, the odd one of the others.
  template <class Each>
  __device__ __forceinline__ void finish(int lane_idx, const Each& each) {
    const bool odd = lane_idx % 2 != 0;
    const int col = lane_idx % 16, first_row = lane_idx / 16 * kLaneRows;
#pragma unroll
    for (int m = 0; m < kLaneRows; ++m) {
      const float other = __shfl_xor_sync(0xffffffffU, odd ? acc[m][0] : acc[m][1], 1);
      if (odd) {
        each(first_row + m, 16 + col - 1, other, acc[m][1]);
      } else {
        each(first_row + m, col, acc[m][0], other);
      }
    }
  }
};

// kBlockCount blocks fit a multiprocessor. kRingWarps warps share a ring: each has a tile of b of its own, next to the others' in n,
// and all have the tile of a, which L2 then gives less often. kPersistent: a block takes several groups of columns.
template <class ProductsType, int kWarpCount, int kStageCount, int kBlockCount, bool kSeveralGroups, int kRingWarpCount = 1>
struct Config {
  using Products = ProductsType;
  static constexpr int kWarps = kWarpCount, kThreads = 32 * kWarps, kStages = kStageCount, kBlocks = kBlockCount;
  static constexpr bool kPersistent = kSeveralGroups;
  static constexpr int kRingWarps = kRingWarpCount, kRings = kWarps / kRingWarps, kCols = kRingWarps * Products::kCols;
  static constexpr int kBoxBBytes = Products::kTileRows * kRowBytes, kTileBBytes = kRingWarps * kBoxBBytes;
  static constexpr int kStageBytes = kTileBBytes + Products::kBoxesA * kBoxABytes, kRingBytes = kStages * kStageBytes;
  static constexpr int kPairs = kCols / 2;
  // Shared memory: the rings, the sums of this block's columns (ring of k, row, pair of columns), the barriers.
  static constexpr int parts_bytes(int splits, int rows) { return kRings * splits * rows * 8 * ((kPairs + splits - 1) / splits); }
  static constexpr int kBarriers = kRings * kStages;
};

template <class T, bool kTransB, class C>
__device__ __forceinline__ void multiply_skinny(const GemmParams& p, const SkinnyArgs& args, char* smem_generic) {
  using Products = typename C::Products;
  constexpr int kStages = C::kStages, kCols = C::kCols, kDepth = Products::kDepth, kDepthA = kRowBytes / static_cast<int>(sizeof(T));
  // warp_idx by a shuffle: the compiler then knows that it is the same in all lanes, and addresses for TMA are too.
  const int thread_idx = static_cast<int>(threadIdx.x), lane_idx = thread_idx % 32, warp_idx = __shfl_sync(0xffffffffU, thread_idx / 32, 0);
  const int ring_idx = warp_idx / C::kRingWarps, warp_n = warp_idx % C::kRingWarps;
  const uint32_t smem = smem_address(smem_generic), ring = smem + ring_idx * C::kRingBytes;
  const int rank = rank_in_cluster(), splits = blocks_in_cluster(), slices = C::kRings * splits, rows = static_cast<int>(p.m);
  // Block r finishes pairs of columns kPairs r / splits and on.
  const int pair_stride = (C::kPairs + splits - 1) / splits, part_bytes = rows * 8 * pair_stride;
  const int pair_begin = C::kPairs * rank / splits, pairs = C::kPairs * (rank + 1) / splits - pair_begin;
  const uint32_t barriers = smem + args.barriers_offset + 8 * kStages * ring_idx;
  // Slices take tiles of k in turn, so that what is on its way at any time lies together in memory.
  const int tiles = static_cast<int>((p.k + kDepth - 1) / kDepth), slice = rank * C::kRings + ring_idx;
  const int first_group = static_cast<int>(blockIdx.x) / splits, group_step = static_cast<int>(gridDim.x) / splits;
  const bool loads = warp_n == 0 && lane_idx == 0;

  // The next tile to ask for: of the group at hand or, while that is multiplied and finished, of the one after it.
  int load_group = first_group, load_tile = slice;
  const auto x = [&](int group, int tile, int box) { return kTransB ? tile * kDepth : group * kCols + box * Products::kCols; };
  const auto y = [&](int group, int tile, int box) { return kTransB ? group * kCols + box * Products::kCols : tile * kDepth; };
  const auto load_next = [&](int stage) {
    if (load_tile >= tiles) return;
    if (loads) {
      const uint32_t barrier = barriers + 8 * stage, at = ring + stage * C::kStageBytes;
      mbarrier_arrive_expect(barrier, C::kTileBBytes + Products::kBoxesA * args.rows_a * kRowBytes);
#pragma unroll
      for (int i = 0; i < C::kRingWarps; ++i) {
        tma_load_3d_once(at + i * C::kBoxBBytes, &args.b, barrier, x(load_group, load_tile, i), y(load_group, load_tile, i), 0);
      }
#pragma unroll
      for (int i = 0; i < Products::kBoxesA; ++i) tma_load_3d(at + C::kTileBBytes + i * kBoxABytes, &args.a, barrier, load_tile * kDepth + i * kDepthA, 0, 0);
    }
    load_tile += slices;
    if (load_tile < tiles) return;
    if (C::kPersistent && load_group + group_step < args.groups) {
      load_group += group_step;
      load_tile = slice;
    } else if (!args.next_at_once) {
      let_next_kernel_start();
    }
  };
  if (loads) {
    if (slice < tiles) {
#pragma unroll
      for (int i = 0; i < C::kRingWarps; ++i) tma_prefetch_l2_3d(&args.b, x(first_group, slice, i), y(first_group, slice, i), 0);
    }
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(barriers + 8 * stage, 1);
    fence_barrier_init();
    tma_prefetch(&args.b);
    tma_prefetch(&args.a);
  }
  if (C::kRingWarps > 1) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  cluster_arrive_relaxed();
  wait_for_previous_kernel();
  if (args.next_at_once) let_next_kernel_start();
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) load_next(stage);
  __syncwarp();

  constexpr int kThreadPairs = (kRows * C::kPairs + C::kThreads - 1) / C::kThreads;  // at most
  const EpilogueArgs<T> epilogue = GemmOperands<T>(p, 0).epilogue;
  PipelineState<kStages> state;
  int group = first_group;
  do {
    float added[kThreadPairs][2];  // bias and residual, on their way while the products run
    const auto place = [&](int i, int* row, int64_t* col) {
      const int at = thread_idx + i * C::kThreads;
      *row = at / pairs;
      *col = static_cast<int64_t>(group) * kCols + 2 * (pair_begin + at % pairs);
      return *row < p.m;
    };
#pragma unroll
    for (int i = 0; i < kThreadPairs; ++i) {
      int row;
      int64_t col;
      const bool exists = place(i, &row, &col);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        added[i][e] = 0.0F;
        if (!exists || col + e >= p.n) continue;
        if (epilogue.bias != nullptr) added[i][e] = p.beta * to_float(epilogue.bias[row * epilogue.bias_stride_m + (col + e) * epilogue.bias_stride_n]);
        if (epilogue.residual != nullptr) added[i][e] += to_float(epilogue.residual[row * p.n + col + e]);
      }
    }

    Products products;
    for (int tile = slice; tile < tiles; tile += slices) {
      mbarrier_wait(barriers + 8 * state.stage, state.parity);
      const uint32_t at = ring + state.stage * C::kStageBytes;
      products.multiply(at + C::kTileBBytes, at + warp_n * C::kBoxBBytes, lane_idx);
      if (C::kRingWarps > 1) {
        named_barrier_sync(1 + ring_idx, 32 * C::kRingWarps);
      } else {
        __syncwarp();
      }
      load_next(state.stage);
      state.advance();
    }

    // Parts of a block: (slice, row, own column).
    if (group == first_group) cluster_wait();  // all blocks have started
    // All threads have read the parts of the last group, or the tiles in whose place they come; there is one block in the cluster.
    if ((C::kPersistent && group != first_group) || args.parts_offset == 0) __syncthreads();
    products.finish(lane_idx, [&](int row, int tile_col, float v0, float v1) {
      const int pair = (warp_n * Products::kCols + tile_col) / 2, owner = (pair * splits + splits - 1) / C::kPairs;
      const int at = args.parts_offset + 8 * ((slice * rows + row) * pair_stride + pair - C::kPairs * owner / splits);
      if (row >= rows) return;
      if (splits == 1) {
        *reinterpret_cast<float2*>(smem_generic + at) = make_float2(v0, v1);
      } else {
        store_cluster(cluster_address(smem + at, owner), v0, v1);
      }
    });
    if (splits == 1) {  // a barrier of the cluster costs a membar.gpu
      __syncthreads();
    } else {
      cluster_arrive();
      cluster_wait();
    }
#pragma unroll
    for (int i = 0; i < kThreadPairs; ++i) {
      int row;
      int64_t col;
      if (!place(i, &row, &col)) break;
      const int pair = (thread_idx + i * C::kThreads) % pairs;
      float2 sum = make_float2(0.0F, 0.0F);
      const char* const parts = smem_generic + args.parts_offset + 8 * (row * pair_stride + pair);
#pragma unroll 8
      for (int other = 0; other < slices; ++other) {
        const float2 v = *reinterpret_cast<const float2*>(parts + other * part_bytes);
        sum.x += v.x;
        sum.y += v.y;
      }
      float v[2] = {p.alpha * sum.x + added[i][0], p.alpha * sum.y + added[i][1]};
      if (p.activation != Activation::kNone) {
#pragma unroll 1
        for (int e = 0; e < 2; ++e) {
          const float activated = activate(e == 0 ? v[0] : v[1], p.activation);
          (e == 0 ? v[0] : v[1]) = activated;
        }
      }
      T* const to = epilogue.y + row * p.n + col;
      if (args.y_in_pairs && col < p.n) {
        struct alignas(2 * sizeof(T)) Pair {
          T x, y;
        };
        *reinterpret_cast<Pair*>(to) = {from_float<T>(v[0]), from_float<T>(v[1])};
      } else {
        if (col < p.n) to[0] = from_float<T>(v[0]);
        if (col + 1 < p.n) to[1] = from_float<T>(v[1]);
      }
    }
    group += group_step;
  } while (C::kPersistent && group < args.groups);
}

template <class T, bool kTransB, class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) gemm_skinny_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ SkinnyArgs args) {
  extern __shared__ __align__(1024) char smem[];
  multiply_skinny<T, kTransB, C>(p, args, smem);
}

template <class T, bool kTransB, class C>
Status launch_skinny(const GemmParams& p, const ExecContext& context) {
  using Products = typename C::Products;
  const int64_t groups = ceil_div(p.n, C::kCols), tiles = ceil_div(p.k, Products::kDepth), multiprocessors = context.device->sm_count;
  // Clusters give more multiprocessors something to do (1 x 4096 x 4096 float16 9.4 us with pairs of blocks, 10.2 us without). But half of
  // them take in all that memory gives, if each has 128 KB on its way, as blocks have that do not share one; and of these clusters of
  // four find room late (16 x 1024 x 4096 float32 10.4 us in pairs, 14.8 in fours).
  int splits = 1;
  while (splits < 8 && (C::kBlocks == 1 && splits > 1 ? 3 : 2) * splits * groups <= multiprocessors && tiles >= 2 * splits * C::kRings * 2) splits *= 2;
  // Where groups are more than multiprocessors, persistent blocks are as many as have the same number of them.
  const bool one_wave = groups <= multiprocessors;
  const int64_t blocks = one_wave || !C::kPersistent ? groups * splits : ceil_div(groups, ceil_div(groups, multiprocessors));
  SkinnyArgs args = {};
  constexpr int kRowElements = kRowBytes / static_cast<int>(sizeof(T));
  const auto encode = [](CUtensorMap* map, const void* x, int64_t cols, int64_t rows, int64_t ld, int box_rows, CUtensorMapL2promotion promotion) {
    const int64_t dims[3] = {cols, rows, 1}, strides[3] = {1, ld, ld * rows};
    const int box[3] = {kRowElements, box_rows, 1};
    return encode_tensor_map(map, static_cast<const T*>(x), 3, dims, strides, box, promotion);
  };
  args.rows_a = p.m <= 8 ? 8 : kRows;
  args.groups = static_cast<int>(groups);
  // Blocks that start late gather on the multiprocessors that are done first, and share them: 1 x 14336 x 4096 float16 34.4 us, and
  // 29.2 us where the next kernel starts at once. Short kernels lose by it (4096 x 4096 10.0 us, before 9.3).
  args.next_at_once = C::kRingWarps > 1 || !one_wave;
  args.y_in_pairs = p.n % 2 == 0 && reinterpret_cast<uintptr_t>(p.y) % (2 * sizeof(T)) == 0;
  // Where too few blocks would fit a multiprocessor, the sums of a block's only group take the place of its tiles.
  constexpr int kRingsBytes = C::kRings * C::kRingBytes, kBarrierBytes = 8 * C::kBarriers, kReservedBytes = 1024;
  const int parts_bytes = C::parts_bytes(splits, static_cast<int>(p.m));
  const bool fits = C::kBlocks * (kRingsBytes + parts_bytes + kBarrierBytes + kReservedBytes) <= context.device->max_smem_per_sm;
  args.parts_offset = fits || splits > 1 || !one_wave ? kRingsBytes : 0;
  args.barriers_offset = args.parts_offset == 0 && parts_bytes < kRingsBytes ? kRingsBytes : args.parts_offset + parts_bytes;
  ORTPLUGINS_RETURN_IF_ERROR(encode(&args.a, p.a, p.k, p.m, p.lda, args.rows_a, CU_TENSOR_MAP_L2_PROMOTION_L2_256B));
  // What lies beside the 128 bytes of a row another warp asks for: with promotion to 256 bytes L2 was asked twice (537 MB at 4.1
  // TB/s, and 4.3 with 128).
  ORTPLUGINS_RETURN_IF_ERROR(encode(&args.b, p.b, kTransB ? p.k : p.n, kTransB ? p.n : p.k, p.ldb, Products::kTileRows, CU_TENSOR_MAP_L2_PROMOTION_L2_128B));
  static SmemLimit limit;
  const auto kernel = gemm_skinny_kernel<T, kTransB, C>;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, 227 * 1024));
  return launch_with({static_cast<unsigned>(splits), true}, "gemm_skinny", kernel, static_cast<unsigned>(blocks), C::kThreads,
                     args.barriers_offset + kBarrierBytes, context, p, args);
}

}  // namespace

Status launch_gemm_sm90a_skinny(const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  if (p.dtype == DType::kFloat32) {
    if (p.trans_b) {
      // Eight warps where a block has one group of columns (4 x 4096 x 4096 17.6 us, 19.1 with four), and where products keep them
      // busy (8 x 11008 x 4096 47.9 us, 53.2 with four); else the next kernel's blocks find room beside four (4 rows: 46 and 47 us).
      if (p.m > 8) return launch_skinny<float, true, Config<FloatProductsTransB<16>, 8, 4, 1, true>>(p, context);
      if (p.m > 4) return launch_skinny<float, true, Config<FloatProductsTransB<8>, 8, 4, 1, true>>(p, context);
      return ceil_div(p.n, 32) > context.device->sm_count ? launch_skinny<float, true, Config<FloatProductsTransB<4>, 4, 4, 2, true>>(p, context)
                                                          : launch_skinny<float, true, Config<FloatProductsTransB<4>, 8, 4, 1, true>>(p, context);
    }
    // With more than 8 rows the registers are too few for two blocks, and eight warps are wanted to keep FFMA busy; tiles of 32 of k
    // make the last one shorter (16 x 4096 x 4096 20.5 us, 21.5 with 64). Tensor cores have time left: 17.4 us, but in tf32x3,
    // where the parts of b cost more than FFMA, 23.5.
    return p.m <= 4   ? launch_skinny<float, false, Config<FloatProducts<4, 1, 64>, 4, 2, 2, true>>(p, context)
           : p.m <= 8 ? launch_skinny<float, false, Config<FloatProducts<8, 2, 64>, 4, 2, 2, true>>(p, context)
           : p.precision == Precision::kTf32 ? launch_skinny<float, false, Config<Tf32Products, 8, 2, 2, true>>(p, context)
                                             : launch_skinny<float, false, Config<FloatProducts<16, 2, 32>, 8, 3, 1, true>>(p, context);
  }
  return dispatch_half(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    // Pairs of warps where groups of 64 columns are more than multiprocessors: 16 x 11008 x 4096 24.0 us, 25.2 us in two rounds of 64.
    const auto run = [&](auto trans_b) {
      using Products = HalfProducts<T, trans_b.value>;
      return ceil_div(p.n, 64) > context.device->sm_count ? launch_skinny<T, trans_b.value, Config<Products, 4, 3, 2, true, 2>>(p, context)
                                                          : launch_skinny<T, trans_b.value, Config<Products, 4, 2, 2, true>>(p, context);
    };
    return p.trans_b ? run(std::true_type{}) : run(std::false_type{});
  });
}

}  // namespace ortplugins
