// Scalar functions on the device, with their accuracy.
#pragma once

#include <cmath>

#include "op_enums.h"

namespace ortplugins {

constexpr float kLog2e = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;

// 2^x: one MUFU instruction, at most 2 ulp off; results below 2^-126 become 0. exp2(-inf) = 0, NaN stays NaN.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^x for x <= 0, as softmax needs it. Scale by log2(e) only after the maximum is subtracted: -3.4e38 * log2(e) alone
// would overflow, and a rounded max * log2(e) would cost accuracy near 1.
__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(x * kLog2e); }

__device__ __forceinline__ float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

// One activation, chosen at run time by a value that all threads share.
__device__ __forceinline__ float activate(float x, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
      return x > 0.0F || x != x ? x : 0.0F;  // NaN passes
    case Activation::kGelu:
      return 0.5F * x * (1.0F + erff(x * 0.70710678F));
    case Activation::kGeluTanh:
      return 0.5F * x * (1.0F + tanhf(0.79788456F * (x + 0.044715F * x * x * x)));
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kQuickGelu:
      return x * sigmoid(1.702F * x);
  }
  return x;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// As `activate`, for results that are rounded to 16 bits: at most 2^-21 |x| off, in half of the instructions or less.
__device__ __forceinline__ float activate_approx(float x, Activation activation) {
  const auto sigmoid_approx = [](float v) { return reciprocal_approx(1.0F + exp2_approx(-kLog2e * v)); };
  switch (activation) {
    case Activation::kGelu: {
      // erfc(z) = exp(-z^2) (a1 t + ... + a5 t^5), t = 1 / (1 + 0.3275911 z), z = |x| / sqrt(2), to 1.5e-7 (Abramowitz and
      // Stegun, 7.1.26); here with coefficients a / 2.
      const float t = reciprocal_approx(fmaf(0.3275911F * 0.70710678F, fabsf(x), 1.0F));
      const float e = exp2_approx(-0.5F * kLog2e * x * x);
      float q = fmaf(0.5307027145F, t, -0.7265760135F);
      q = fmaf(q, t, 0.7107068705F);
      q = fmaf(q, t, -0.142248368F);
      q = fmaf(q, t, 0.127414796F) * t * e;
      return x * (x < 0.0F ? q : 1.0F - q);
    }
    case Activation::kGeluTanh:  // 1 + tanh(u) = 2 sigmoid(2 u)
      return x * sigmoid_approx(x * fmaf(1.5957691F * 0.044715F, x * x, 1.5957691F));
    case Activation::kSilu:
      return x * sigmoid_approx(x);
    case Activation::kQuickGelu:
      return x * sigmoid_approx(1.702F * x);
    default:
      return activate(x, activation);
  }
}

}  // namespace ortplugins
