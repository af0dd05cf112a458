// What the kernels of FusedAttention for 16-bit types on Hopper share.
#pragma once

#include <type_traits>

#include "device/divisor.h"
#include "kernels/attention/attention_device.h"

namespace ortplugins {

// Keys and values as the kernel reads them: with a cache, `present` holds both parts.
struct KeyTensors {
  const void *k, *v;
  AttentionStrides k_strides, v_strides;
};
inline KeyTensors key_tensors(const AttentionParams& p) {
  if (p.past_len == 0) return {p.k, p.v, p.k_strides, p.v_strides};
  const int64_t len = p.total_len();
  return {p.present_k, p.present_v, {p.kv_heads * len * p.head_dim, p.head_dim, len * p.head_dim},
          {p.kv_heads * len * p.v_head_dim, p.v_head_dim, len * p.v_head_dim}};
}

// Whether a mask has one value for each key, the same for all queries.
inline bool mask_is_keys(const AttentionParams& p) { return p.mask_stride_seq == 0 || p.q_len == 1; }

// Of sequence b; `common` is that of every sequence, unless lengths lie in device memory.
__device__ __forceinline__ KeyBand sequence_band(const AttentionParams& p, const KeyBand& common, int b) {
  return p.total_lengths == nullptr ? common : key_band(p, b);
}

// 0 * x + y of two halves: not 0 once an x was infinite or NaN.
template <class T>
__device__ __forceinline__ uint32_t times_zero_plus(uint32_t x, uint32_t y) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;\n" : "+r"(y) : "r"(x), "r"(0));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;\n" : "+r"(y) : "r"(x), "r"(0));
  }
  return y;
}

}  // namespace ortplugins
