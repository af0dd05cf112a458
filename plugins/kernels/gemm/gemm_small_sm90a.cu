// Gemm for batches of small products: a tile or few, and few steps of k each.
//
// A block of two warps computes tiles of 64 x 64, of all products in turn, each warp 64 x 32; six blocks share a multiprocessor.
// Operands come by cp.async, 128 bytes deep along k, through a ring of stages that runs on across the ends of products: while
// one is multiplied and finished, the next is on its way. When the sums of a tile are complete, the stage that was multiplied
// last becomes the tile of y.
//
// The arithmetic is FFMA (a thread has rows 8 apart and two quads of columns), or mma.sync for 16-bit elements and in tf32, one
// product or three (tf32x3). Sums stay where they are for all of k: the table takes up to 128 of it.
#include "device/cp_async.h"
#include "device/dependent_launch.h"
#include "device/layout.h"
#include "device/mma.h"
#include "device/tile_copy.h"
#include "kernels/gemm/gemm_cuda.h"

namespace ortplugins {
namespace {

enum class SmallMath { kIeee, kTf32, kTf32x3, kHalf };

template <class T>
struct SmallConfig {
  using Element = T;
  // 16-bit products begin with all copies of a tile, and leave out what is smaller than a tile does not have: 16384 products
  // 32 x 32 x 32 in 68 us on an H200, 104 with wgmma. In float32 it costs about 5 % of 64 x 64 x 64.
  static constexpr bool kLean = sizeof(T) == 2;
  static constexpr int kBlock = 64, kBlockK = 128 / static_cast<int>(sizeof(T)), kStepK = 16;  // of m and n; of k, at most and at once
  static constexpr int kStages = 2, kBlocks = 6;                                               // blocks on a multiprocessor
  static constexpr int kWarpsN = 2, kThreads = 32 * kWarpsN, kWarpN = kBlock / kWarpsN;
  static constexpr int kTileBytes = kBlock * 128, kStageBytes = 2 * kTileBytes;
  using TileC = EpilogueTile<kBlock, kBlock, kThreads>;
  static constexpr int kSmemBytes = kStages * kStageBytes;
  static_assert(TileC::kBytes <= kStageBytes, "a stage becomes the tile of y");
};

// Read again where it is used: what follows from it would be held in registers over the products otherwise.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(index));
  return index;
}

// 64 of m or n by 128 bytes of k in shared memory, as they are stored: rows along k, or along n. The same chunk of eight
// neighbouring rows lies in different banks; where ldmatrix cannot transpose, two chunks of four.
template <class C, bool kAlongK>
struct SmallTile {
  using T = typename C::Element;
  static constexpr int kRows = kAlongK ? C::kBlock : C::kBlockK, kCols = kAlongK ? C::kBlockK : C::kBlock;
  static constexpr int kRowBytes = kCols * static_cast<int>(sizeof(T));
  using Layout = std::conditional_t<kAlongK || sizeof(T) == 2, LdmatrixLayout<kRowBytes>, PairLayout<kRowBytes>>;

  // Begins to copy the tile at `source`, of which `major` of m or n and `k_left` of k exist. Behind them come zeros; a lean copy
  // ends with the multiple of kStepK of k and with `major`: what lies behind ends in elements of y that nobody stores.
  __device__ __forceinline__ static void copy(uint32_t smem, const T* source, int64_t ld, int major, int k_left) {
    constexpr int kRowChunks = kCols / kPackSize<T>, kRowStep = C::kThreads / kRowChunks, kPasses = kRows / kRowStep;
    static_assert(kRowStep % (std::is_same_v<Layout, PairLayout<kRowBytes>> ? 4 : 8) == 0, "a thread's rows share one swizzle");
    const int alignment = row_alignment(source, ld);
    const int thread_idx = thread_index(), row = thread_idx / kRowChunks, chunk = thread_idx % kRowChunks;
    source += row * ld + kPackSize<T> * chunk;
    smem += Layout::offset(row, chunk);
    const int64_t step = kRowStep * ld;
    if (major >= C::kBlock && k_left >= C::kBlockK && alignment == 16) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i, source += step) cp_async_16_if(true, smem + i * kRowStep * kRowBytes, source);
      return;
    }
    const int major_end = C::kLean ? major : C::kBlock, k_end = C::kLean ? (k_left + C::kStepK - 1) / C::kStepK * C::kStepK : C::kBlockK;
    const int rows = kAlongK ? major : k_left, row_end = kAlongK ? major_end : k_end;
    const int cols = kAlongK ? k_left : major, col_end = kAlongK ? k_end : major_end;
    if (kPackSize<T> * chunk >= col_end) return;
    const int left = (cols - kPackSize<T> * chunk) * static_cast<int>(sizeof(T)), bytes = left < 0 ? 0 : left < 16 ? left : 16;
#pragma unroll 1
    for (int r = row; r < row_end; r += kRowStep, source += step, smem += kRowStep * kRowBytes) copy_chunk(smem, source, r < rows ? bytes : 0, alignment);
  }
};

__device__ __forceinline__ void load_quad(float (&v)[4], const char* at) {
  const float4 quad = *reinterpret_cast<const float4*>(at);
  v[0] = quad.x;
  v[1] = quad.y;
  v[2] = quad.z;
  v[3] = quad.w;
}

// A thread's products in FFMA: rows row + 8 i, columns col + 16 q to col + 16 q + 3.
template <class C, bool kTransB>
struct SmallSimt {
  static constexpr int kThreadM = C::kBlock / 8, kThreadN = 8;
  int row, col, of_eight, of_four;
  float acc[kThreadM][kThreadN];  // the sums of column j are in acc[.][j ^ 1]

  __device__ __forceinline__ SmallSimt() {
    const int lane_idx = static_cast<int>(threadIdx.x) % 32, warp_idx = static_cast<int>(threadIdx.x) / 32;
    // Interleaved over m and n, so that eight lanes read few different words.
    of_eight = lane_idx >> 1 & 7, of_four = (lane_idx & 1) | (lane_idx >> 3 & 2);
    row = of_eight;
    col = warp_idx * C::kWarpN + 4 * of_four;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
      for (int j = 0; j < kThreadN; ++j) acc[i][j] = 0.0F;
    }
  }
  // Float tiles are not lean: all of the stage.
  __device__ __forceinline__ void multiply(const char* stage, int, int, int) {
    static_assert(!C::kLean, "no part of a tile is left out");
    const char* const tile_a = stage + row * 128;
    const char* const tile_b = stage + C::kTileBytes;
#pragma unroll 1
    for (int first_k = 0; first_k < C::kBlockK; first_k += C::kStepK) {
#pragma unroll kTransB ? 1 : 4
      for (int quad = 0; quad < C::kStepK / 4; ++quad) {
        const int chunk = first_k / 4 + quad;
        float a[kThreadM][4];
#pragma unroll
        for (int i = 0; i < kThreadM; ++i) load_quad(a[i], tile_a + i * 1024 + ((chunk ^ of_eight) << 4));
        if constexpr (kTransB) {
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            float b[4][4];
#pragma unroll
            for (int j = 0; j < 4; ++j) load_quad(b[j], tile_b + (col + 16 * q + j) * 128 + ((chunk ^ ((4 * of_four + j) & 7)) << 4));
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
              for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                  const int j = i % 2 == 0 ? step : 3 - step;
                  float& sum = acc[i][4 * q + (j ^ 1)];
                  sum = fmaf(a[i][k], b[j][k], sum);
                }
              }
            }
          }
        } else {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            float b[kThreadN];
#pragma unroll
            for (int q = 0; q < 2; ++q) load_quad(reinterpret_cast<float(&)[4]>(b[4 * q]), tile_b + (4 * chunk + k) * 256 + (((col / 4 + 4 * q) ^ (k << 1)) << 4));
            // To and fro over the columns, and sums in the other bank of registers than b: as in gemm_simt.h.
#pragma unroll
            for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
              for (int step = 0; step < kThreadN; ++step) {
                const int j = i % 2 == 0 ? step : kThreadN - 1 - step;
                acc[i][j ^ 1] = fmaf(a[i][k], b[j], acc[i][j ^ 1]);
              }
            }
          }
        }
      }
    }
  }
  __device__ __forceinline__ void put(char* tile_c) const {
#pragma unroll
    for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
      for (int j = 0; j < kThreadN; j += 4) C::TileC::put(tile_c, row + 8 * i, col + 4 * j, make_float4(acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]));
    }
  }
  __device__ __forceinline__ static float4 read(const char* tile_c, int r, int c) {
    const float4 v = C::TileC::get(tile_c, r, c);
    return make_float4(v.y, v.x, v.w, v.z);
  }
};

// A warp's products by mma.sync.
template <class C, bool kTransB, SmallMath kMath>
struct SmallMma {
  using T = typename C::Element;
  using TileA = SmallTile<C, true>;
  using TileB = SmallTile<C, kTransB>;
  static constexpr bool kSplit = kMath == SmallMath::kTf32x3;
  static constexpr int kFragmentsM = C::kBlock / 16, kFragmentsN = C::kWarpN / 8;
  static constexpr int kMmaK = 32 / static_cast<int>(sizeof(T));
  int lane_idx, g, t, warp_n;
  float acc[kFragmentsM][kFragmentsN][4];

  __device__ __forceinline__ SmallMma() {
    const int warp_idx = static_cast<int>(threadIdx.x) / 32;
    lane_idx = static_cast<int>(threadIdx.x) % 32;
    g = lane_idx / 4;
    t = lane_idx % 4;
    warp_n = warp_idx * C::kWarpN;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.0F;
      }
    }
  }

  // As to_tf32, for an operand: the unit ignores the 13 lowest bits.
  __device__ __forceinline__ static uint32_t rounded(uint32_t bits) {
    constexpr uint32_t kOverflows = 0x7f7ff000U;
    return fabsf(__uint_as_float(bits)) < __uint_as_float(kOverflows) ? bits + 0x1000U : bits;
  }
  __device__ __forceinline__ static uint32_t operand(uint32_t bits) { return kMath == SmallMath::kHalf ? bits : rounded(bits); }
  __device__ __forceinline__ static void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (kMath == SmallMath::kHalf) {
      mma_m16n8k16<T>(c, a, b[0], b[1]);
    } else {
      mma_m16n8k8_tf32(c, a, b[0], b[1]);
    }
  }
  // hi is x rounded to tf32, lo the rest. What is not finite enters hi hi only: times lo, which has any sign or is 0, an infinity
  // would make NaN of what is infinite.
  struct Parts {
    uint32_t hi, finite, lo;
  };
  __device__ __forceinline__ static Parts split(uint32_t bits) {
    const uint32_t hi = rounded(bits) & 0xffffe000U;
    const float lo = __uint_as_float(bits) - __uint_as_float(hi);
    const bool finite = fabsf(__uint_as_float(bits)) < __uint_as_float(0x7f800000U);
    return {hi, finite ? hi : 0U, finite ? __float_as_uint(lo) + 0x1000U : 0U};
  }

  // The first k_left of k. Lean: warps and lower halves that have no element of y have nothing to do.
  __device__ __forceinline__ void multiply(const char* stage, int m_left, int n_left, int k_left) {
    if (!C::kLean) return multiply_rows<kFragmentsM>(stage, C::kBlockK);
    if (warp_n >= n_left) return;
    if (m_left <= 32) {
      multiply_rows<kFragmentsM / 2>(stage, k_left);
    } else {
      multiply_rows<kFragmentsM>(stage, k_left);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void multiply_rows(const char* stage, int k_left) {
#pragma unroll 1
    for (int first_k = 0; first_k < k_left; first_k += C::kStepK) {
#pragma unroll(kSplit ? 1 : 2)  // two steps of tf32x3 need more registers than there are
      for (int k_step = 0; k_step < C::kStepK / kMmaK; ++k_step) multiply_step<kCount>(stage, first_k / kMmaK + k_step);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void multiply_step(const char* stage, int k_step) {
    const uint32_t tile_a = smem_address(stage), tile_b = tile_a + C::kTileBytes;
    uint32_t b[kFragmentsN][2];
    if constexpr (kTransB || kMath == SmallMath::kHalf) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; j += 2) {
        const int block = j + (lane_idx >> 4), half = lane_idx >> 3 & 1;
        uint32_t r[4];
        if constexpr (kTransB) {
          ldmatrix_x4(r, tile_b + TileB::Layout::offset(warp_n + 8 * block + (lane_idx & 7), 2 * k_step + half));
        } else {
          ldmatrix_x4_trans(r, tile_b + TileB::Layout::offset(16 * k_step + 8 * half + (lane_idx & 7), warp_n / 8 + block));
        }
        b[j][0] = r[0];
        b[j][1] = r[1];
        b[j + 1][0] = r[2];
        b[j + 1][1] = r[3];
      }
    } else {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          b[j][half] = *reinterpret_cast<const uint32_t*>(stage + C::kTileBytes + TileB::Layout::offset(8 * k_step + 4 * half + t, warp_n / 4 + 2 * j + g / 4) + g % 4 * 4);
        }
      }
    }
    uint32_t b_finite[kFragmentsN][2], b_lo[kFragmentsN][2];
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (kSplit) {
          const Parts parts = split(b[j][half]);
          b[j][half] = parts.hi;
          b_finite[j][half] = parts.finite;
          b_lo[j][half] = parts.lo;
        } else {
          b[j][half] = operand(b[j][half]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint32_t a[4], a_finite[4], a_lo[4];
      ldmatrix_x4(a, tile_a + TileA::Layout::offset(16 * i + (lane_idx & 15), 2 * k_step + (lane_idx >> 4)));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (kSplit) {
          const Parts parts = split(a[e]);
          a[e] = parts.hi;
          a_finite[e] = parts.finite;
          a_lo[e] = parts.lo;
        } else {
          a[e] = operand(a[e]);
        }
      }
      if constexpr (kSplit) {  // small products first
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) multiply_add(acc[i][j], a_lo, b_finite[j]);
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) multiply_add(acc[i][j], a_finite, b_lo[j]);
      }
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) multiply_add(acc[i][j], a, b[j]);
    }
  }
  __device__ __forceinline__ void put(char* tile_c) const {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * i + 8 * half + g;
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) C::TileC::put(tile_c, row, warp_n + 8 * j + 2 * t, acc[i][j][2 * half], acc[i][j][2 * half + 1]);
      }
    }
  }
  __device__ __forceinline__ static float4 read(const char* tile_c, int row, int col) { return C::TileC::get(tile_c, row, col); }
};

template <SmallMath kMath, class C, bool kTransB>
using SmallProducts = std::conditional_t<kMath == SmallMath::kIeee, SmallSimt<C, kTransB>, SmallMma<C, kTransB, kMath>>;

// Where a tile of y lies in the batch.
struct SmallPlace {
  int64_t batch_idx, first_m, first_n;
};

// kPlain: whole float tiles, of which y = alpha * acc; all rows of a thread are stored at once. H200, 4096 x 64 x 64 x 64 in tf32:
// 49.8 us instead of 50.8.
template <SmallMath kMath, class C, bool kTransB, bool kPlain>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) gemm_small_kernel(const __grid_constant__ GemmParams p) {
  using T = typename C::Element;
  extern __shared__ __align__(128) char smem_generic[];
  const uint32_t smem = smem_address(smem_generic);
  const auto ceil_blocks = [](int64_t size) { return static_cast<uint32_t>((size + C::kBlock - 1) / C::kBlock); };
  const uint32_t tiles_n = ceil_blocks(p.n), tiles = ceil_blocks(p.m) * tiles_n, all_tiles = tiles * static_cast<uint32_t>(p.batch);
  const int k_tiles = p.k == 0 ? 1 : static_cast<int>((p.k + C::kBlockK - 1) / C::kBlockK);
  const auto place_of = [&](uint32_t index) {
    if (tiles == 1) return SmallPlace{index, 0, 0};
    const uint32_t batch_idx = index / tiles, tile = index - batch_idx * tiles, tile_m = tile / tiles_n;
    return SmallPlace{batch_idx, static_cast<int64_t>(tile_m) * C::kBlock, static_cast<int64_t>(tile - tile_m * tiles_n) * C::kBlock};
  };
  const auto at_most = [](int64_t count, int most) { return count < most ? static_cast<int>(count) : most; };

  // The tile whose operands are copied next.
  uint32_t next = blockIdx.x;
  int next_k = 0;
  const auto copy_next = [&](int stage) {
    if (next < all_tiles) {
      const SmallPlace place = place_of(next);
      int64_t a_offset, b_offset;
      p.batch_offsets(place.batch_idx, &a_offset, &b_offset);
      const T* const a = static_cast<const T*>(p.a) + a_offset + place.first_m * p.lda + next_k;
      const T* const b = static_cast<const T*>(p.b) + b_offset + (kTransB ? place.first_n * p.ldb + next_k : next_k * p.ldb + place.first_n);
      const int k_left = at_most(p.k - next_k, C::kBlockK);
      const uint32_t target = smem + stage * C::kStageBytes;
      SmallTile<C, true>::copy(target, a, p.lda, at_most(p.m - place.first_m, C::kBlock), k_left);
      SmallTile<C, kTransB>::copy(target + C::kTileBytes, b, p.ldb, at_most(p.n - place.first_n, C::kBlock), k_left);
      next_k += C::kBlockK;
      if (next_k >= k_tiles * C::kBlockK) {
        next_k = 0;
        next += gridDim.x;
      }
    }
    cp_async_commit();  // also an empty group, which keeps the count
  };

  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int stage = 0; stage < C::kStages - (C::kLean ? 0 : 1); ++stage) copy_next(stage);
  SmallProducts<kMath, C, kTransB> products;
  int stage = 0, free_stage = C::kLean ? -1 : C::kStages - 1;  // -1: none yet
#pragma unroll 1
  for (uint32_t index = blockIdx.x; index < all_tiles; index += gridDim.x) {
    const SmallPlace place = place_of(index);
    const int m_left = at_most(p.m - place.first_m, C::kBlock), n_left = at_most(p.n - place.first_n, C::kBlock);
    products.clear();
    char* this_stage = nullptr;
#pragma unroll 1
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      if (C::kLean && free_stage < 0) {
        cp_async_wait<C::kStages - 1>();
        __syncthreads();
      } else {
        cp_async_wait<C::kStages - 2>();
        __syncthreads();  // for all threads, and all are done with the stage before it
        copy_next(free_stage);
      }
      this_stage = smem_generic + stage * C::kStageBytes;
      products.multiply(this_stage, m_left, n_left, at_most(p.k - k_tile * C::kBlockK, C::kBlockK));
      free_stage = stage;
      stage = stage + 1 == C::kStages ? 0 : stage + 1;
    }
    __syncthreads();
    products.put(this_stage);
    __syncthreads();
    if constexpr (kPlain) {
      const int row = thread_index() / 16, col = thread_index() % 16 * 4;
      float* const y = static_cast<float*>(p.y) + place.batch_idx * p.m * p.n + (place.first_m + row) * p.n + place.first_n + col;
#pragma unroll
      for (int i = 0; i < C::kBlock; i += C::kThreads / 16) {
        const float4 v = C::TileC::get(this_stage, row + i, col);
        *reinterpret_cast<float4*>(y + i * p.n) = make_float4(p.alpha * v.x, p.alpha * v.y, p.alpha * v.z, p.alpha * v.w);
      }
      continue;
    }
    const GemmOperands<T> operands(p, place.batch_idx);
    const auto read = [&](int row, int col) { return products.read(this_stage, row, col); };
    C::TileC::store_rows(this_stage, read, operands.epilogue, place.first_m, place.first_n, 0, C::kBlock, thread_index());
  }
}

template <SmallMath kMath, class C>
Status launch_small(const char* what, const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  const auto launch_layout = [&](auto trans_b, auto plain) {
    static SmemLimit limit;
    const auto kernel = gemm_small_kernel<kMath, C, decltype(trans_b)::value, decltype(plain)::value>;
    ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, C::kSmemBytes));
    const int64_t tiles = ceil_div(p.m, C::kBlock) * ceil_div(p.n, C::kBlock) * p.batch;
    // FFMA takes longer than the copies, which hide behind it. The tensor cores do not; there blocks that come and go share out
    // the bandwidth better than a fixed number of them. 4096 x 64 x 64 x 64 on an H200, us, walking and not: ieee 67 and 78,
    // tf32x3 65 and 64, tf32 58 and 53.
    const int64_t most = kMath == SmallMath::kIeee ? C::kBlocks * context.device->sm_count : tiles;
    return launch_with({1, true}, what, kernel, dim3(grid_size(tiles, most)), C::kThreads, C::kSmemBytes, context, p);
  };
  if constexpr (kMath == SmallMath::kTf32) {
    const bool plain = p.m % C::kBlock == 0 && p.n % C::kBlock == 0 && is_aligned(p.y, 16) && p.bias == nullptr && p.residual == nullptr &&
                       p.activation == Activation::kNone;
    if (plain) return p.trans_b ? launch_layout(std::true_type{}, std::true_type{}) : launch_layout(std::false_type{}, std::true_type{});
  }
  return p.trans_b ? launch_layout(std::true_type{}, std::false_type{}) : launch_layout(std::false_type{}, std::false_type{});
}

}  // namespace

Status launch_gemm_sm90a_small(const GemmParams& p, const ExecContext& context) {
  return launch_small<SmallMath::kIeee, SmallConfig<float>>("gemm_sm90a_small", p, context);
}
Status launch_gemm_sm90a_small_half(const GemmParams& p, const ExecContext& context) {
  return dispatch_half(p.dtype, [&](auto tag) { return launch_small<SmallMath::kHalf, SmallConfig<typename decltype(tag)::type>>("gemm_sm90a_small_half", p, context); });
}
Status launch_gemm_sm90a_small_tf32(const GemmParams& p, const ExecContext& context) {
  return launch_small<SmallMath::kTf32, SmallConfig<float>>("gemm_sm90a_small_tf32", p, context);
}
Status launch_gemm_sm90a_small_tf32x3(const GemmParams& p, const ExecContext& context) {
  return launch_small<SmallMath::kTf32x3, SmallConfig<float>>("gemm_sm90a_small_tf32x3", p, context);
}

}  // namespace ortplugins
