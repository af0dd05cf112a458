// FusedGemm: y = activation(alpha * op(a) op(b) + beta * bias + residual), batched with MatMul broadcasting.
#pragma once

#include "core/device.h"
#include "op_enums.h"
#include "core/shape.h"
#include "core/status.h"
#include "core/variant.h"
#include "device/host_device.h"

namespace ortplugins {

// Row-major storage. op(a) is m x k, op(b) is k x n, y is m x n with leading dimension n. Where b has no batch of its own
// and a is not transposed, `bind` has merged the batch into m.
struct GemmParams {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;      // element (i, j) at i * bias_stride_m + j * bias_stride_n; null: none
  const void* residual = nullptr;  // laid out as y; null: none
  void* y = nullptr;
  DType dtype = DType::kNone;
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0;
  bool trans_a = false, trans_b = false;
  int64_t bias_stride_m = 0, bias_stride_n = 0;
  float alpha = 1.0F, beta = 1.0F;
  Activation activation = Activation::kNone;
  Precision precision = Precision::kIeee;
  const void* packed_b = nullptr;  // b as `prepack` laid it out for this device, or null

  // Batch index, outermost dimension first; y and the residual are contiguous over it.
  int64_t batch = 1;
  int batch_rank = 0;
  int64_t batch_dims[kMaxRank] = {};
  int64_t a_batch_strides[kMaxRank] = {};  // elements; 0 where broadcast
  int64_t b_batch_strides[kMaxRank] = {};

  ORTPLUGINS_HOST_DEVICE void batch_offsets(int64_t index, int64_t* a_offset, int64_t* b_offset) const {
    *a_offset = *b_offset = 0;
    if (batch_rank == 0) return;
    for (int i = batch_rank - 1; i > 0; --i) {
      const int64_t at = index % batch_dims[i];
      index /= batch_dims[i];
      *a_offset += at * a_batch_strides[i];
      *b_offset += at * b_batch_strides[i];
    }
    *a_offset += index * a_batch_strides[0];
    *b_offset += index * b_batch_strides[0];
  }
};

Status gemm(const GemmParams& params, const ExecContext& context, int variant_id = 0);

}  // namespace ortplugins
