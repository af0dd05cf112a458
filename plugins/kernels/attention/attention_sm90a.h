// What the kernels of FusedAttention for 16-bit types on Hopper share.
#pragma once

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

}  // namespace ortplugins
