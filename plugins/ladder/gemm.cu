// The stages of the matrix product below the production kernels, in the order of the climb.
//
//   naive            a thread computes one element of y; b is column-major
//   coalesced        the same with b row-major
//   shared_tile      a block of 32 x 32 threads shares tiles of a and b in shared memory
//   micro_tile       a thread computes 8 x 8 elements of a block's 128 x 128 in registers
//   double_buffered  the next tiles come by cp.async while the present ones are multiplied
//
// A stage's kernel is followed by its launcher. Elements outside of the matrices are read as zeros and not written.
#include "device/cp_async.h"
#include "device/dispatch.h"
#include "device/pack.h"
#include "device/tile_copy.h"
#include "ladder/ladder.h"

namespace ortplugins::ladder {
namespace {

bool is_empty(const GemmProblem& p) { return p.m == 0 || p.n == 0; }

// First row and column of a block's tile. The blocks of a row of tiles follow each other.
template <int kBlockM, int kBlockN>
struct TileOrigin {
  int64_t m, n;
  __device__ __forceinline__ explicit TileOrigin(const GemmProblem& p) {
    const int64_t tiles_n = (p.n + kBlockN - 1) / kBlockN;
    m = blockIdx.x / tiles_n * kBlockM;
    n = blockIdx.x % tiles_n * kBlockN;
  }
};
template <int kBlockM, int kBlockN>
unsigned tile_grid(const GemmProblem& p) {
  return grid_size(ceil_div(p.m, kBlockM) * ceil_div(p.n, kBlockN));
}

// A row-major matrix that is read in quads: four neighbouring elements of a row, from a column that is a multiple of 4.
struct QuadReader {
  const float* base;
  int64_t rows, cols;
  bool aligned;
  __device__ __forceinline__ QuadReader(const float* base, int64_t rows, int64_t cols)
      : base(base), rows(rows), cols(cols), aligned(row_alignment(base, cols) == 16) {}
  __device__ __forceinline__ Pack<float> operator()(int64_t row, int64_t col) const {
    if (row >= rows || col >= cols) return filled_pack(0.0F);
    const float* const quad = base + row * cols + col;
    return aligned ? load_pack(quad) : load_pack_guarded(quad, 0, static_cast<int>(min(cols - col, int64_t{4})), 0.0F);
  }
};

// --- naive and coalesced ---------------------------------------------------------------------------------------------

struct ThreadPerElement {
  static constexpr int kBlockM = 8, kBlockN = 32;  // a warp has 32 neighbouring columns of one row
};

template <bool kColumnMajorB>
__device__ __forceinline__ void multiply_element(const GemmProblem& p) {
  const TileOrigin<ThreadPerElement::kBlockM, ThreadPerElement::kBlockN> tile(p);
  const int64_t row = tile.m + threadIdx.y, col = tile.n + threadIdx.x;
  if (row >= p.m || col >= p.n) return;
  float acc = 0.0F;
  for (int64_t k = 0; k < p.k; ++k) {
    // Lanes that stand side by side in n read b p.k floats apart: 32 sectors of 32 bytes for 128 bytes of use. Row-major,
    // they read 4 sectors. All lanes read the same element of a.
    const float b = kColumnMajorB ? p.b[col * p.k + k] : p.b[k * p.n + col];
    acc = fmaf(p.a[row * p.k + k], b, acc);
  }
  p.y[row * p.n + col] = acc;
}

__global__ void __launch_bounds__(256) gemm_naive_kernel(const __grid_constant__ GemmProblem p) { multiply_element<true>(p); }
__global__ void __launch_bounds__(256) gemm_coalesced_kernel(const __grid_constant__ GemmProblem p) { multiply_element<false>(p); }

Status launch_per_element(const char* what, void (*kernel)(GemmProblem), const GemmProblem& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  using C = ThreadPerElement;
  return launch(what, kernel, tile_grid<C::kBlockM, C::kBlockN>(p), dim3(C::kBlockN, C::kBlockM), 0, context, p);
}

}  // namespace

Status launch_gemm_naive(const GemmProblem& p, const ExecContext& context) {
  return launch_per_element("gemm_naive", gemm_naive_kernel, p, context);
}
Status launch_gemm_coalesced(const GemmProblem& p, const ExecContext& context) {
  return launch_per_element("gemm_coalesced", gemm_coalesced_kernel, p, context);
}

// --- shared_tile -----------------------------------------------------------------------------------------------------

namespace {

constexpr int kTile = 32;

__global__ void __launch_bounds__(kTile* kTile) gemm_shared_tile_kernel(const __grid_constant__ GemmProblem p) {
  __shared__ __align__(16) float sA[kTile][kTile];  // (m, k)
  __shared__ __align__(16) float sB[kTile][kTile];  // (k, n)
  const TileOrigin<kTile, kTile> tile(p);
  const int row = static_cast<int>(threadIdx.x) / kTile, col = static_cast<int>(threadIdx.x) % kTile;

  // 256 quads of a and as many of b: one for each of the first 512 threads.
  constexpr int kRowQuads = kTile / 4, kQuads = kTile * kRowQuads;
  const bool copies_a = threadIdx.x < kQuads, copies_b = !copies_a && threadIdx.x < 2 * kQuads;
  const int quad_idx = static_cast<int>(threadIdx.x) % kQuads, quad_row = quad_idx / kRowQuads, quad_col = quad_idx % kRowQuads * 4;
  const QuadReader a(p.a, p.m, p.k), b(p.b, p.k, p.n);

  float acc = 0.0F;
  for (int64_t k0 = 0; k0 < p.k; k0 += kTile) {
    if (copies_a) store_pack(&sA[quad_row][quad_col], a(tile.m + quad_row, k0 + quad_col));
    if (copies_b) store_pack(&sB[quad_row][quad_col], b(k0 + quad_row, tile.n + quad_col));
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTile; k += 4) {
      const Pack<float> rA = load_pack(&sA[row][k]);  // one word for the whole warp
#pragma unroll
      for (int i = 0; i < 4; ++i) acc = fmaf(rA.v[i], sB[k + i][col], acc);
    }
    __syncthreads();
  }
  if (tile.m + row < p.m && tile.n + col < p.n) p.y[(tile.m + row) * p.n + tile.n + col] = acc;
}

}  // namespace

Status launch_gemm_shared_tile(const GemmProblem& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return launch("gemm_shared_tile", gemm_shared_tile_kernel, tile_grid<kTile, kTile>(p), kTile * kTile, 0, context, p);
}

// --- micro_tile ------------------------------------------------------------------------------------------------------

namespace {

// A block computes 128 x 128 of y with 256 threads, 16 x 16 of them; a thread 8 x 8, in four quads of 4 x 4 that are 64
// rows or columns apart, so that neighbouring threads read neighbouring float4.
struct MicroTile {
  static constexpr int kBlockM = 128, kBlockN = 128, kBlockK = 8;
  static constexpr int kThreads = 256;
  static constexpr int kThreadM = 8, kThreadN = 8, kQuadStep = 64;
  // a is stored transposed. With 4 floats of padding the words that a warp writes to it fall in 32 banks, and rows stay
  // 16-byte aligned.
  static constexpr int kRowA = kBlockM + 4, kRowB = kBlockN;

  struct Operands {
    float a[kBlockK][kRowA];  // (k, m)
    float b[kBlockK][kRowB];  // (k, n)
  };
  using Accumulators = float[kThreadM][kThreadN];

  int m = static_cast<int>(threadIdx.x) / 16 * 4, n = static_cast<int>(threadIdx.x) % 16 * 4;  // of the thread's first quad

  // 16 floats are read for 64 fused multiply-adds. Unrolled by 8 it would take more than the 128 registers with which two
  // blocks fit on a multiprocessor.
  __device__ __forceinline__ void multiply(Accumulators& acc, const Operands& s) const {
#pragma unroll 4
    for (int k = 0; k < kBlockK; ++k) {
      float rA[kThreadM], rB[kThreadN];
#pragma unroll
      for (int i = 0; i < kThreadM; i += 4) *reinterpret_cast<float4*>(&rA[i]) = *reinterpret_cast<const float4*>(&s.a[k][m + i / 4 * kQuadStep]);
#pragma unroll
      for (int j = 0; j < kThreadN; j += 4) *reinterpret_cast<float4*>(&rB[j]) = *reinterpret_cast<const float4*>(&s.b[k][n + j / 4 * kQuadStep]);
#pragma unroll
      for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
        for (int j = 0; j < kThreadN; ++j) acc[i][j] = fmaf(rA[i], rB[j], acc[i][j]);
      }
    }
  }

  __device__ __forceinline__ void store(const Accumulators& acc, const GemmProblem& p, const TileOrigin<kBlockM, kBlockN>& tile) const {
    const bool aligned = row_alignment(p.y, p.n) == 16;
#pragma unroll
    for (int i = 0; i < kThreadM; ++i) {
      const int64_t row = tile.m + m + i / 4 * kQuadStep + i % 4;
#pragma unroll
      for (int j = 0; j < kThreadN; j += 4) {
        const int64_t col = tile.n + n + j / 4 * kQuadStep;
        if (row >= p.m || col >= p.n) continue;
        const Pack<float> quad = {acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]};
        float* const y = p.y + row * p.n + col;
        if (aligned) {
          store_pack_global(y, quad);
        } else {
          store_pack_guarded(y, quad, 0, static_cast<int>(min(p.n - col, int64_t{4})));
        }
      }
    }
  }
};

__global__ void __launch_bounds__(MicroTile::kThreads) gemm_micro_tile_kernel(const __grid_constant__ GemmProblem p) {
  using C = MicroTile;
  __shared__ __align__(16) C::Operands s;
  const TileOrigin<C::kBlockM, C::kBlockN> tile(p);
  const MicroTile thread;

  // A quad of each operand for each thread: 2 in a row of a, 32 in a row of b.
  const int thread_idx = static_cast<int>(threadIdx.x);
  const int a_row = thread_idx / 2, a_col = thread_idx % 2 * 4, b_row = thread_idx / 32, b_col = thread_idx % 32 * 4;
  const QuadReader a(p.a, p.m, p.k), b(p.b, p.k, p.n);

  C::Accumulators acc = {};
  for (int64_t k0 = 0; k0 < p.k; k0 += C::kBlockK) {
    const Pack<float> quad = a(tile.m + a_row, k0 + a_col);
#pragma unroll
    for (int i = 0; i < 4; ++i) s.a[a_col + i][a_row] = quad.v[i];
    store_pack(&s.b[b_row][b_col], b(k0 + b_row, tile.n + b_col));
    __syncthreads();
    thread.multiply(acc, s);
    __syncthreads();
  }
  thread.store(acc, p, tile);
}

}  // namespace

Status launch_gemm_micro_tile(const GemmProblem& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  using C = MicroTile;
  return launch("gemm_micro_tile", gemm_micro_tile_kernel, tile_grid<C::kBlockM, C::kBlockN>(p), C::kThreads, 0, context, p);
}

// --- double_buffered -------------------------------------------------------------------------------------------------

namespace {

// The tiles of an operand, brought to shared memory by cp.async. a is transposed on the way, 4 bytes at a time: 8 lanes along
// k and 4 along m, which fall in 32 banks. b comes in quads, and where its rows are not aligned to them also 4 bytes at a time.
struct AsyncCopy {
  using C = MicroTile;
  static constexpr int kRowStep = C::kThreads / C::kBlockK;
  const float *a, *b;
  int k_a, k_b, rows_a, cols_b, target_a, target_b;

  __device__ __forceinline__ AsyncCopy(const GemmProblem& p, const TileOrigin<C::kBlockM, C::kBlockN>& tile) {
    const int thread_idx = static_cast<int>(threadIdx.x);
    const int row_a = thread_idx / C::kBlockK, col_b = thread_idx % 32 * 4;
    k_a = thread_idx % C::kBlockK;
    k_b = thread_idx / 32;
    a = p.a + (tile.m + row_a) * p.k + k_a;
    b = p.b + k_b * p.n + tile.n + col_b;
    rows_a = static_cast<int>(min(p.m - tile.m, int64_t{C::kBlockM})) - row_a;
    cols_b = static_cast<int>(min(p.n - tile.n, int64_t{C::kBlockN})) - col_b;
    target_a = (k_a * C::kRowA + row_a) * 4;
    target_b = (k_b * C::kRowB + col_b) * 4;
  }

  // The tiles at hand, of which the matrices have `k_left` elements along k.
  __device__ __forceinline__ void fetch_and_advance(const GemmProblem& p, MicroTile::Operands& s, int64_t k_left) {
#pragma unroll
    for (int i = 0; i < C::kBlockM / kRowStep; ++i) {
      cp_async_4(smem_address(s.a) + target_a + i * kRowStep * 4, a + i * (kRowStep * p.k), i * kRowStep < rows_a && k_a < k_left ? 4 : 0);
    }
    copy_chunk(smem_address(s.b) + target_b, b, k_b < k_left && cols_b > 0 ? 4 * min(cols_b, 4) : 0, row_alignment(p.b, p.n));
    cp_async_commit();
    a += C::kBlockK;
    b += C::kBlockK * p.n;
  }
};

__global__ void __launch_bounds__(MicroTile::kThreads, 2) gemm_double_buffered_kernel(const __grid_constant__ GemmProblem p) {
  using C = MicroTile;
  __shared__ __align__(16) C::Operands s[2];
  const TileOrigin<C::kBlockM, C::kBlockN> tile(p);
  const MicroTile thread;

  AsyncCopy copy(p, tile);

  C::Accumulators acc = {};
  if (p.k > 0) copy.fetch_and_advance(p, s[0], p.k);
  int stage = 0;
#pragma unroll 1
  for (int64_t k_left = p.k; k_left > 0; k_left -= C::kBlockK) {
    cp_async_wait<0>();
    __syncthreads();  // the tiles have arrived for all threads, and all are done with those before
    if (k_left > C::kBlockK) copy.fetch_and_advance(p, s[stage ^ 1], k_left - C::kBlockK);
    thread.multiply(acc, s[stage]);
    stage ^= 1;
  }
  thread.store(acc, p, tile);
}

}  // namespace

Status launch_gemm_double_buffered(const GemmProblem& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  using C = MicroTile;
  return launch("gemm_double_buffered", gemm_double_buffered_kernel, tile_grid<C::kBlockM, C::kBlockN>(p), C::kThreads, 0, context, p);
}

}  // namespace ortplugins::ladder
