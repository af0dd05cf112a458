// FusedAttention: y = softmax(softcap(scale * q k^T) + mask) v, with grouped-query heads and a key-value cache.
#pragma once

#include "core/device.h"
#include "op_enums.h"
#include "core/shape.h"
#include "core/status.h"
#include "core/variant.h"
#include "device/host_device.h"

namespace ortplugins {

// Strides, in elements, of a (batch, sequence, head, dim) tensor; dim is contiguous.
struct AttentionStrides {
  int64_t batch = 0, seq = 0, head = 0;
};

struct AttentionParams {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* y = nullptr;
  DType dtype = DType::kNone;
  AttentionStrides q_strides, k_strides, v_strides, y_strides;

  int64_t batch = 0, heads = 0, kv_heads = 0;  // heads is a multiple of kv_heads; query head h reads h / (heads / kv_heads)
  int64_t q_len = 0;
  int64_t kv_len = 0;    // keys in k and v, without the past
  int64_t past_len = 0;  // keys in the cache
  int64_t head_dim = 0, v_head_dim = 0;

  // Cache, BNSH and contiguous; keys are past_k followed by k. Where `present_k` is not null it receives both.
  const void* past_k = nullptr;
  const void* past_v = nullptr;
  void* present_k = nullptr;
  void* present_v = nullptr;

  // Mask element (b, h, i, j) at b * batch + h * head + i * seq + j * key; keys j >= mask_len have no weight.
  const void* mask = nullptr;
  DType mask_dtype = DType::kNone;  // kNone: no mask; kBool; or dtype
  int64_t mask_stride_batch = 0, mask_stride_head = 0, mask_stride_seq = 0, mask_stride_key = 0;
  int64_t mask_len = 0;

  const int64_t* total_lengths = nullptr;  // (batch), on the device; null: every key is valid

  float scale = 1.0F;
  float softcap = 0.0F;  // 0: off
  bool is_causal = false;
  int64_t window = -1, window_right = -1;  // -1: unbounded
  Precision precision = Precision::kIeee;

  ORTPLUGINS_HOST_DEVICE int64_t total_len() const { return past_len + kv_len; }

  // Valid keys of sequence b.
  ORTPLUGINS_HOST_DEVICE int64_t valid_len(int64_t b) const {
    if (total_lengths == nullptr) return total_len();
    const int64_t n = total_lengths[b];
    return n < 0 ? 0 : n < total_len() ? n : total_len();
  }
  // Position of query 0 among the keys of sequence b.
  ORTPLUGINS_HOST_DEVICE int64_t query_offset(int64_t b) const {
    return total_lengths != nullptr ? total_lengths[b] - q_len : past_len;
  }
  // Query i of sequence b may see keys [first, last), before the mask.
  ORTPLUGINS_HOST_DEVICE void key_range(int64_t b, int64_t i, int64_t* first, int64_t* last) const {
    const int64_t p = i + query_offset(b);
    *first = window >= 0 && p - window > 0 ? p - window : 0;
    int64_t end = valid_len(b);
    if (mask_dtype != DType::kNone && mask_len < end) end = mask_len;
    if (is_causal && p + 1 < end) end = p + 1;
    if (window_right >= 0 && p + window_right + 1 < end) end = p + window_right + 1;
    *last = end < *first ? *first : end;
  }
};

Status attention(const AttentionParams& params, const ExecContext& context, int variant_id = 0);

}  // namespace ortplugins
