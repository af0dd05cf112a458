// A float32 product as three tf32 products (x = hi + lo; lo lo is left out), on tensor cores that truncate when they add:
// how much of the exactness is lost to that, and how often the sums must leave the tensor cores to keep it. For the table
// of errors, not for speed: a warp computes 16 x 8 elements of y and reads its operands where they lie.
#include "device/dispatch.h"
#include "device/mma.h"
#include "ladder/ladder.h"

namespace ortplugins::ladder {
namespace {

constexpr int kBlockM = 16, kBlockN = 32;  // four warps side by side

// kPromote: after so much of k the sums are added to registers, which rounds; 0: at the end only.
template <int kPromote>
__global__ void __launch_bounds__(128) gemm_three_products_kernel(const __grid_constant__ GemmProblem p) {
  const int64_t tiles_n = (p.n + kBlockN - 1) / kBlockN;
  const int lane_idx = static_cast<int>(threadIdx.x) % 32, g = lane_idx / 4, t = lane_idx % 4;
  const int64_t row = blockIdx.x / tiles_n * kBlockM + g, col0 = blockIdx.x % tiles_n * kBlockN + threadIdx.x / 32 * 8;
  const auto a = [&](int64_t m, int64_t k) { return split_tf32(m < p.m && k < p.k ? p.a[m * p.k + k] : 0.0F); };
  const auto b = [&](int64_t k, int64_t n) { return split_tf32(k < p.k && n < p.n ? p.b[k * p.n + n] : 0.0F); };
  float sum[4] = {}, acc[4] = {};
  for (int64_t k = 0; k < p.k; k += 8) {
    const SplitTf32 rA[4] = {a(row, k + t), a(row + 8, k + t), a(row, k + t + 4), a(row + 8, k + t + 4)};
    const SplitTf32 rB[2] = {b(k + t, col0 + g), b(k + t + 4, col0 + g)};
    const uint32_t hi[4] = {rA[0].hi, rA[1].hi, rA[2].hi, rA[3].hi}, lo[4] = {rA[0].lo, rA[1].lo, rA[2].lo, rA[3].lo};
    mma_m16n8k8_tf32(acc, lo, rB[0].hi, rB[1].hi);
    mma_m16n8k8_tf32(acc, hi, rB[0].lo, rB[1].lo);
    mma_m16n8k8_tf32(acc, hi, rB[0].hi, rB[1].hi);
    if (k + 8 >= p.k || (kPromote > 0 && (k + 8) % (kPromote > 0 ? kPromote : 1) == 0)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[i] += acc[i];
        acc[i] = 0.0F;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t m = row + i / 2 * 8, n = col0 + 2 * t + i % 2;
    if (m < p.m && n < p.n) p.y[m * p.n + n] = sum[i];
  }
}

template <int kPromote>
Status launch_three_products(const GemmProblem& p, const ExecContext& context) {
  if (p.m == 0 || p.n == 0) return {};
  const unsigned grid = grid_size(ceil_div(p.m, kBlockM) * ceil_div(p.n, kBlockN));
  return launch("gemm_three_products", gemm_three_products_kernel<kPromote>, grid, 128, 0, context, p);
}

}  // namespace

Status launch_gemm_three_products(const GemmProblem& p, const ExecContext& context) { return launch_three_products<0>(p, context); }
Status launch_gemm_three_products_128(const GemmProblem& p, const ExecContext& context) { return launch_three_products<128>(p, context); }
Status launch_gemm_three_products_32(const GemmProblem& p, const ExecContext& context) { return launch_three_products<32>(p, context); }

}  // namespace ortplugins::ladder
