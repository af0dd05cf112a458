// Warp-level matrix instructions (sm_80): ldmatrix and mma.sync.
//
// Fragment layouts, with g = lane / 4 and t = lane % 4 (PTX ISA, "Warp Level Matrix Multiply-Accumulate"):
//   accumulator m16n8, 4 floats:   c0 c1 = (g, 2t) (g, 2t + 1)           c2 c3 = the same columns of row g + 8
//   A m16k16, 16-bit, 4 registers: a0 = (g, 2t..2t+1)  a1 = (g + 8, 2t..)  a2 = (g, 2t + 8..)  a3 = (g + 8, 2t + 8..)
//   B k16n8, 16-bit, 2 registers:  b0 = (2t..2t+1, g)  b1 = (2t + 8..2t + 9, g)
//   A m16k8, tf32, 4 registers:    a0 = (g, t)  a1 = (g + 8, t)  a2 = (g, t + 4)  a3 = (g + 8, t + 4)
//   B k8n8, tf32, 2 registers:     b0 = (t, g)  b1 = (t + 4, g)
// ldmatrix hands row g, bytes 4t to 4t + 3 of an 8 x 16-byte matrix to lane 4g + t. So it loads 16-bit fragments, and tf32
// fragments of tiles whose rows run along k; with .trans, 16-bit fragments of tiles whose rows run along m or n.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ortplugins {

// Four 8 x 16-byte matrices; lane i passes the address of row i % 8 of matrix i / 8, 16-byte aligned.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

// The inverse of ldmatrix (sm_90).
__device__ __forceinline__ void stmatrix_x4(uint32_t smem, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(smem), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// c += a b for 16-bit elements, accumulated in float. Element picks the instruction: __half or __nv_bfloat16.
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b for tf32 elements in 32-bit registers; the unit ignores their 13 lowest bits.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A float rounded to the nearest tf32 (10 stored bits of mantissa), ties away from zero. Where rounding would overflow it
// truncates instead, so that a finite number stays finite; infinities and NaN pass.
__device__ __forceinline__ uint32_t to_tf32(float x) {
  constexpr uint32_t kMask = 0xffffe000U;      // drops the 13 bits that tf32 has not
  constexpr uint32_t kOverflows = 0x7f7ff000U;  // smallest magnitude that would round to infinity
  const uint32_t bits = __float_as_uint(x);
  const uint32_t half_ulp = (bits & 0x7fffffffU) < kOverflows ? 0x1000U : 0U;
  return (bits + half_ulp) & kMask;
}

// The float x = hi + lo in tf32, up to 2^-23 |x|, for products hi lo + lo hi + hi hi. Where x is infinite or NaN it is lo, and
// hi is 1 with its sign: so it enters one product with each element of the other side, and the finite number that the others
// add changes nothing.
struct SplitTf32 {
  uint32_t hi, lo;
};
__device__ __forceinline__ SplitTf32 split_tf32(float x) {
  const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffU, hi = to_tf32(x);
  const float lo = x - __uint_as_float(hi);
  const bool finite = magnitude < 0x7f800000U;
  const uint32_t rounded_lo = __float_as_uint(lo) + 0x1000U;  // the unit ignores the 13 lowest bits
  return {finite ? hi : (bits & 0x80000000U) | 0x3f800000U, finite ? rounded_lo : bits};
}

}  // namespace ortplugins
