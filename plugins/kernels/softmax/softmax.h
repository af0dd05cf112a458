// FusedSoftmax: y = softmax(scale * x + mask) along one axis, or its logarithm.
#pragma once

#include "core/device.h"
#include "core/shape.h"
#include "core/status.h"
#include "core/variant.h"
#include "device/host_device.h"

namespace ortplugins {

// A row is one softmax. Element (row, col) lies at (row / inner) * cols * inner + row % inner + col * inner.
struct SoftmaxParams {
  const void* x = nullptr;
  void* y = nullptr;
  DType dtype = DType::kNone;
  int64_t rows = 0, cols = 0, inner = 1;
  float scale = 1.0F;
  bool log = false;

  // Mask element (row, col) lies at mask_row_offset(row) + col * mask_col_stride. The row index is split over
  // `mask_rank` dimensions, outermost first; neighbouring ones are already merged where the strides allow it.
  const void* mask = nullptr;
  DType mask_dtype = DType::kNone;  // kNone: no mask; kBool; or dtype
  int mask_rank = 0;
  int64_t mask_dims[kMaxRank] = {};
  int64_t mask_strides[kMaxRank] = {};
  int64_t mask_col_stride = 0;

  ORTPLUGINS_HOST_DEVICE int64_t row_offset(int64_t row) const {
    return inner == 1 ? row * cols : (row / inner) * cols * inner + row % inner;
  }
  ORTPLUGINS_HOST_DEVICE int64_t mask_row_offset(int64_t row) const {
    int64_t offset = 0;
    for (int i = mask_rank - 1; i > 0; --i) {
      offset += (row % mask_dims[i]) * mask_strides[i];
      row /= mask_dims[i];
    }
    return mask_rank > 0 ? offset + row * mask_strides[0] : 0;
  }
};

Status softmax(const SoftmaxParams& params, const ExecContext& context, int variant_id = 0);

}  // namespace ortplugins
