// FusedLayerNorm: y = norm(s) * gamma + beta with s = x + bias + residual; norm is LayerNorm or RMSNorm of rows.
#pragma once

#include "core/device.h"
#include "core/shape.h"
#include "core/status.h"
#include "core/variant.h"
#include "device/host_device.h"

namespace ortplugins {

// A row is what is normalised together: `cols` neighbouring elements.
//
// s is x + bias + residual in float32, added in this order and rounded to the element type once. Statistics are those
// of the rounded s: a variant gives the same y whether or not `sum` is asked for, and what a norm that reads `sum` would
// give.
struct LayerNormParams {
  const void* x = nullptr;
  const void* residual = nullptr;  // (residual_rows, cols); row i of x takes row i % residual_rows
  const void* gamma = nullptr;     // (cols), as are beta and bias; each may be absent
  const void* beta = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
  void* sum = nullptr;  // s; null if it is not wanted
  DType dtype = DType::kNone;
  int64_t rows = 0, cols = 0, residual_rows = 0;
  float epsilon = 0.0F;
  bool rms = false;  // divide by the root of the mean square; nothing is subtracted

  // Whether s is something other than x.
  ORTPLUGINS_HOST_DEVICE bool adds() const { return bias != nullptr || residual != nullptr; }
  ORTPLUGINS_HOST_DEVICE int64_t residual_row(int64_t row) const {
    return residual_rows == rows ? row : row % residual_rows;
  }
};

// The mean of a row as the sum of two floats, from the mean of s - pivot. (s - high) - low is a deviation to float32
// accuracy whatever the sizes of pivot and mean: pivot + mean rounded to one float would cost half a unit of the mean.
struct SplitMean {
  float high = 0.0F, low = 0.0F;

  static ORTPLUGINS_HOST_DEVICE SplitMean of(float pivot, float mean) {
    SplitMean m;
    m.high = pivot + mean;
    const float part = m.high - pivot;  // Knuth's two-sum: low is the exact error of high
    m.low = (pivot - (m.high - part)) + (mean - part);
    return m;
  }
};

Status layer_norm(const LayerNormParams& params, const ExecContext& context, int variant_id = 0);

}  // namespace ortplugins
