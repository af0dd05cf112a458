// What the CUDA gemm kernels share: the view of one product of the batch, the order of tiles and the launch.
#pragma once

#include "device/dispatch.h"
#include "device/epilogue.h"
#include "kernels/gemm/gemm_scaled.h"
#include "kernels/gemm/variants.h"

namespace ortplugins {

// The operands of product `batch_idx`.
template <class T>
struct GemmOperands {
  const T* a;
  const T* b;
  EpilogueArgs<T> epilogue;

  __device__ __forceinline__ GemmOperands(const GemmParams& p, int64_t batch_idx) {
    int64_t a_offset, b_offset;
    p.batch_offsets(batch_idx, &a_offset, &b_offset);
    const int64_t y_offset = batch_idx * p.m * p.n;
    a = static_cast<const T*>(p.a) + a_offset;
    b = static_cast<const T*>(p.b) + b_offset;
    epilogue = {p.alpha,
                p.beta,
                static_cast<const T*>(p.bias),
                p.bias_stride_m,
                p.bias_stride_n,
                p.residual == nullptr ? nullptr : static_cast<const T*>(p.residual) + y_offset,
                static_cast<T*>(p.y) + y_offset,
                p.m,
                p.n,
                p.activation};
  }
};

inline bool is_empty(const GemmParams& p) { return p.m == 0 || p.n == 0 || p.batch == 0; }

// One block for each tile of y (x) and product of the batch (y and z).
inline dim3 gemm_grid(const GemmParams& p, int64_t block_m, int64_t block_n) {
  const unsigned batch_y = grid_size(p.batch, 65535);
  return dim3(grid_size(ceil_div(p.m, block_m) * ceil_div(p.n, block_n)), batch_y, grid_size(ceil_div(p.batch, batch_y), 65535));
}
// May be past the last product, in the last layer of z.
__device__ __forceinline__ int64_t gemm_batch_index() { return blockIdx.y + static_cast<int64_t>(blockIdx.z) * gridDim.y; }

// Calls body(std::bool_constant<trans_a>, std::bool_constant<trans_b>).
template <class Body>
Status dispatch_layout(const GemmParams& p, const Body& body) {
  if (p.trans_a) return p.trans_b ? body(std::true_type{}, std::true_type{}) : body(std::true_type{}, std::false_type{});
  return p.trans_b ? body(std::false_type{}, std::true_type{}) : body(std::false_type{}, std::false_type{});
}

// The mma.sync kernels on the tiles for which the scaled float16 product does not hold; without statistics, on all.
struct ScaledGuard {
  ScaleStats a, b;
};
Status launch_gemm_sm80_tf32_guarded(const GemmParams& params, const ExecContext& context, const ScaledGuard& guard);
Status launch_gemm_sm80_tf32x3_guarded(const GemmParams& params, const ExecContext& context, const ScaledGuard& guard);

}  // namespace ortplugins
