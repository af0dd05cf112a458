// Gemm with up to 16 rows: a stream of b, read once.
//
// A block of eight warps computes all rows of 64 columns of y; the blocks of a cluster share the columns and split k, and so
// do the warps of a block. b goes from global memory straight into the registers that multiply it, 16 bytes a load; which
// element of a step of k lies in which lane does not matter as long as a is read in the same order. Each warp leaves its
// sums in shared memory; after a barrier of the cluster each block adds up and finishes a part of the rows, always in the
// order of k.
#include "device/mma.h"
#include "device/sm90.h"
#include "kernels/gemm/gemm_cuda.h"

namespace ortplugins {
namespace {

constexpr int kRows = 16, kCols = 64;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
using TileC = EpilogueTile<kRows, kCols, kThreads, 1>;
constexpr int kSmemBytes = kWarps * TileC::kBytes;

// 16 bytes at p, or zeros where they do not exist. b is read once and does not stay in L1.
__device__ __forceinline__ uint4 load_stream(const void* p, bool exists) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (exists) asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Products of one warp, for 16-bit elements by mma.sync: lane g = lane / 4, t = lane % 4.
template <class T, bool kTransB>
struct HalfProducts {
  static constexpr int kStep = kTransB ? 32 : 16;
  static constexpr int kUnroll = kTransB ? 1 : 2;  // so that eight loads of b are in flight
  static constexpr int kLoads = kTransB ? 8 : 4;
  float acc[kCols / 8][4] = {};

  // b stored (k, n): rows 4 t to 4 t + 3 of the step, columns 8 g to 8 g + 7; column 8 n' + j is column n' of product j.
  // b stored (n, k): row 8 j + g, elements 8 t to 8 t + 7 of the step, of which products 2 j and 2 j + 1 take four each.
  uint4 b[kLoads];
  uint4 a[2];  // the same elements of k of rows g and g + 8; with b stored (k, n) only x and y

  __device__ __forceinline__ void load(const GemmParams& p, const T* pa, const T* pb, int64_t first_n, int64_t k, int lane_idx) {
    const int g = lane_idx / 4, t = lane_idx % 4;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (kTransB) {
        const int64_t n = first_n + 8 * i + g;
        b[i] = load_stream(pb + n * p.ldb + k + 8 * t, n < p.n && k + 8 * t < p.k);
      } else {
        b[i] = load_stream(pb + (k + 4 * t + i) * p.ldb + first_n + 8 * g, first_n + 8 * g < p.n && k + 4 * t + i < p.k);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool row_exists = g + 8 * i < p.m;
      a[i] = make_uint4(0, 0, 0, 0);
      if (kTransB) {
        if (row_exists && k + 8 * t < p.k) a[i] = __ldg(reinterpret_cast<const uint4*>(pa + (g + 8 * i) * p.lda + k + 8 * t));
      } else if (row_exists && k + 4 * t < p.k) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(pa + (g + 8 * i) * p.lda + k + 4 * t));
        a[i].x = v.x;
        a[i].y = v.y;
      }
    }
  }

  __device__ __forceinline__ void multiply(const GemmParams&) {
    const uint32_t first[4] = {a[0].x, a[1].x, a[0].y, a[1].y}, second[4] = {a[0].z, a[1].z, a[0].w, a[1].w};
    if constexpr (kTransB) {
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j) {
        mma_m16n8k16<T>(acc[j], first, b[j].x, b[j].y);
        mma_m16n8k16<T>(acc[j], second, b[j].z, b[j].w);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j) {
        const uint32_t order = j % 2 == 0 ? 0x5410 : 0x7632;
        mma_m16n8k16<T>(acc[j], first, __byte_perm(word(b[0], j / 2), word(b[1], j / 2), order),
                        __byte_perm(word(b[2], j / 2), word(b[3], j / 2), order));
      }
    }
  }

  __device__ __forceinline__ void put(char* tile, int lane_idx) const {
    const int g = lane_idx / 4, t = lane_idx % 4;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = g + e / 2 * 8;
      if constexpr (kTransB) {
        if (e % 2 != 0) continue;
#pragma unroll
        for (int j = 0; j < kCols / 8; ++j) TileC::put(tile, row, 8 * j + 2 * t, acc[j][e], acc[j][e + 1]);
      } else {
        const int col = 8 * (2 * t + e % 2);
        TileC::put(tile, row, col, make_float4(acc[0][e], acc[1][e], acc[2][e], acc[3][e]));
        TileC::put(tile, row, col + 4, make_float4(acc[4][e], acc[5][e], acc[6][e], acc[7][e]));
      }
    }
  }

 private:
  __device__ __forceinline__ static uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
};

// Products of one warp in float32, b stored (k, n): each half of the warp takes four rows of a step and four columns a lane.
template <int kM>
struct FloatProducts {
  static constexpr int kStep = 8;
  static constexpr int kUnroll = kM <= 4 ? 2 : 1;
  float acc[kM][4] = {};
  uint4 b[4];
  const float* a;  // row 0, at the step; read when it is multiplied, since L1 has it soon
  bool row_exists;

  __device__ __forceinline__ void load(const GemmParams& p, const float* pa, const float* pb, int64_t first_n, int64_t k, int lane_idx) {
    const int64_t row = k + lane_idx / 16 * 4, col = first_n + lane_idx % 16 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = load_stream(pb + (row + i) * p.ldb + col, col < p.n && row + i < p.k);
    a = pa + row;
    row_exists = row < p.k;
  }
  __device__ __forceinline__ void multiply(const GemmParams& p) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if (m % 4 == 0) asm volatile("" ::: "memory");  // four loads of a at a time; more would need more registers
      float4 v = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      if (row_exists && m < p.m) v = __ldg(reinterpret_cast<const float4*>(a + m * p.lda));
      const float at[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[m][0] = fmaf(at[i], __uint_as_float(b[i].x), acc[m][0]);
        acc[m][1] = fmaf(at[i], __uint_as_float(b[i].y), acc[m][1]);
        acc[m][2] = fmaf(at[i], __uint_as_float(b[i].z), acc[m][2]);
        acc[m][3] = fmaf(at[i], __uint_as_float(b[i].w), acc[m][3]);
      }
    }
  }
  __device__ __forceinline__ void put(char* tile, int lane_idx) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[m][j] += __shfl_xor_sync(0xffffffffU, acc[m][j], 16);
      if (lane_idx < 16) TileC::put(tile, m, lane_idx * 4, make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]));
    }
  }
};

template <class T, class Products>
__global__ void __launch_bounds__(kThreads, 2) gemm_skinny_kernel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(128) char smem[];
  const int lane_idx = static_cast<int>(threadIdx.x) % 32, warp_idx = static_cast<int>(threadIdx.x) / 32;
  const int rank = rank_in_cluster(), splits = blocks_in_cluster();
  const GemmOperands<T> operands(p, 0);
  const int64_t first_n = static_cast<int64_t>(blockIdx.x) / splits * kCols;

  // Slice `rank * kWarps + warp` of k, in whole steps.
  const int64_t steps = (p.k + Products::kStep - 1) / Products::kStep, slices = kWarps * splits, slice = rank * kWarps + warp_idx;
  const int64_t end = steps * (slice + 1) / slices;
  Products products;
#pragma unroll(Products::kUnroll)
  for (int64_t step = steps * slice / slices; step < end; ++step) {
    products.load(p, operands.a, operands.b, first_n, step * Products::kStep, lane_idx);
    products.multiply(p);
  }
  products.put(smem + warp_idx * TileC::kBytes, lane_idx);
  cluster_sync();

  const auto read = [&](int row, int col) {
    float4 sum = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    const uint32_t at = smem_address(smem) + TileC::Layout::offset(row, col / 4);
    for (int other = 0; other < splits; ++other) {
      const uint32_t tiles = cluster_address(at, other);
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        const float4 v = load_cluster(tiles + warp * TileC::kBytes);
        sum.x += v.x;
        sum.y += v.y;
        sum.z += v.z;
        sum.w += v.w;
      }
    }
    return sum;
  };
  const int rows = static_cast<int>(p.m);
  TileC::store_rows(smem, read, operands.epilogue, 0, first_n, rows * rank / splits, rows * (rank + 1) / splits, static_cast<int>(threadIdx.x));
  cluster_sync_relaxed();  // the other blocks may still read this one's sums
}

template <class T, class Products>
Status launch_skinny(const GemmParams& p, const ExecContext& context) {
  // Two blocks on each multiprocessor read at full bandwidth, if each warp has a few steps of k.
  const int64_t groups = ceil_div(p.n, kCols);
  unsigned splits = 1;
  while (splits < 8 && groups * splits < context.device->sm_count && p.k >= static_cast<int64_t>(2 * splits) * kWarps * 2 * Products::kStep) splits *= 2;
  return launch_cluster("gemm_skinny", gemm_skinny_kernel<T, Products>, static_cast<unsigned>(groups * splits), kThreads, kSmemBytes, splits, context, p);
}

}  // namespace

Status launch_gemm_sm90a_skinny(const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  if (p.dtype == DType::kFloat32) {
    return p.m <= 4 ? launch_skinny<float, FloatProducts<4>>(p, context) : launch_skinny<float, FloatProducts<16>>(p, context);
  }
  return dispatch_half(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return p.trans_b ? launch_skinny<T, HalfProducts<T, true>>(p, context) : launch_skinny<T, HalfProducts<T, false>>(p, context);
  });
}

}  // namespace ortplugins
