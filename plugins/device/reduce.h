// Reductions over lanes of a warp and over a block, and the running (maximum, sum) pair of the online softmax.
#pragma once

#include <cmath>

#include "device/math.h"

namespace ortplugins {

constexpr unsigned kFullWarp = 0xffffffffU;

struct MaxOp {
  static constexpr float kIdentity = -INFINITY;
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct SumOp {
  static constexpr float kIdentity = 0.0F;
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// Butterfly over groups of kLanes (a power of two up to 32) neighbouring lanes; every lane gets the result.
template <int kLanes = 32, class Op>
__device__ __forceinline__ float warp_reduce(float v, Op op) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) v = op(v, __shfl_xor_sync(kFullWarp, v, offset));
  return v;
}
template <int kLanes = 32>
__device__ __forceinline__ float warp_max(float v) { return warp_reduce<kLanes>(v, MaxOp{}); }
template <int kLanes = 32>
__device__ __forceinline__ float warp_sum(float v) { return warp_reduce<kLanes>(v, SumOp{}); }

// Over a one-dimensional block of whole warps; every thread gets the result. `scratch` holds 32 floats in shared memory
// and may be used again right after.
template <class Op>
__device__ __forceinline__ float block_reduce(float v, float* scratch, Op op) {
  const int lane_idx = static_cast<int>(threadIdx.x) % 32, warp_idx = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  v = warp_reduce(v, op);
  if (warps == 1) return v;
  if (lane_idx == 0) scratch[warp_idx] = v;
  __syncthreads();
  v = warp_reduce(lane_idx < warps ? scratch[lane_idx] : Op::kIdentity, op);
  __syncthreads();
  return v;
}

// As block_reduce with one barrier less: `scratch` must not be written again before all threads have passed another barrier.
template <class Op>
__device__ __forceinline__ float block_reduce_once(float v, float* scratch, Op op) {
  const int lane_idx = static_cast<int>(threadIdx.x) % 32, warp_idx = static_cast<int>(threadIdx.x) / 32;
  v = warp_reduce(v, op);
  if (lane_idx == 0) scratch[warp_idx] = v;
  __syncthreads();
  return warp_reduce(lane_idx < static_cast<int>(blockDim.x) / 32 ? scratch[lane_idx] : Op::kIdentity, op);
}

// max(v) and sum(exp(v - max)) of the values seen so far; -inf and 0 before the first.
struct MaxSum {
  float max = -INFINITY;
  float sum = 0.0F;
};

// The reference point of exp(v - reference): the maximum, or 0 for a row of -inf so that -inf - -inf does not occur.
__device__ __forceinline__ float softmax_reference(float max) { return max == -INFINITY ? 0.0F : max; }

__device__ __forceinline__ MaxSum merge(const MaxSum& a, const MaxSum& b) {
  MaxSum r;
  r.max = fmaxf(a.max, b.max);
  const float reference = softmax_reference(r.max);
  r.sum = a.sum * exp_approx(a.max - reference) + b.sum * exp_approx(b.max - reference);
  return r;
}

template <int kLanes = 32>
__device__ __forceinline__ MaxSum warp_merge(MaxSum v) {
  const float max = warp_max<kLanes>(v.max);
  const float sum = warp_sum<kLanes>(v.sum * exp_approx(v.max - softmax_reference(max)));
  return {max, sum};
}

// As block_reduce_once, of the pair.
__device__ __forceinline__ MaxSum block_merge_once(MaxSum v, MaxSum* scratch) {
  const int lane_idx = static_cast<int>(threadIdx.x) % 32, warp_idx = static_cast<int>(threadIdx.x) / 32;
  v = warp_merge(v);
  if (lane_idx == 0) scratch[warp_idx] = v;
  __syncthreads();
  return warp_merge(lane_idx < static_cast<int>(blockDim.x) / 32 ? scratch[lane_idx] : MaxSum{});
}

}  // namespace ortplugins
