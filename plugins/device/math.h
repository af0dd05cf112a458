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
      // The normal distribution's tail below -|x| is 2^q(|x|), q a polynomial that is at most 2^-23 off where it matters
      // (least squares in Chebyshev form up to 5.5, weighted by the tail). Its leading coefficient is negative: 0 far out.
      const float a = fabsf(x);
      float q = fmaf(-1.79920613e-6F, a, 2.81546828e-5F);
      q = fmaf(q, a, -1.38487811e-4F);
      q = fmaf(q, a, -2.38722011e-4F);
      q = fmaf(q, a, 7.17944542e-3F);
      q = fmaf(q, a, -5.25655053e-2F);
      q = fmaf(q, a, -0.459188436F);
      q = fmaf(q, a, -1.15110735F);
      const float tail = exp2_approx(fmaf(q, a, -0.999999953F));
      return x * (x < 0.0F ? tail : 1.0F - tail);
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
