// Vectors of float of the instruction set's width, for the CPU kernel files (*_cpu.cc): loads and stores that convert
// from and to the storage types, tails, reductions and elementary functions.
//
// Arithmetic and comparisons are the operators of the GNU vector extension; `mask ? a : b` selects by lane. Everything
// lies in an anonymous namespace because each object has its own instruction set: a function with external linkage
// could be merged with another object's and then run where its instructions do not exist.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "core/dispatch.h"

#define ORTPLUGINS_SIMD [[gnu::always_inline, maybe_unused]] inline

namespace ortplugins {
namespace {

// Storage types of float16 and bfloat16 tensors.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Calls body(TypeTag<Element>{}) with the storage type of a floating-point dtype.
template <class Body>
Status dispatch(DType dtype, const Body& body) {
  return dispatch_as<float, Float16, BFloat16>(dtype, body);
}

namespace simd {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

using Float = float __attribute__((vector_size(kWidth * 4)));
using Int = int32_t __attribute__((vector_size(kWidth * 4)));  // also a mask: 0 or -1 in each lane
using UInt = uint32_t __attribute__((vector_size(kWidth * 4)));
using UShort = uint16_t __attribute__((vector_size(kWidth * 2)));
using UChar = uint8_t __attribute__((vector_size(kWidth)));

constexpr float kInfinity = __builtin_inff();

ORTPLUGINS_SIMD Float broadcast(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return Float{x, x, x, x};
#endif
}
ORTPLUGINS_SIMD Float zero() { return Float{}; }

ORTPLUGINS_SIMD Int iota() {
  Int lanes;
  for (int i = 0; i < kWidth; ++i) lanes[i] = i;
  return lanes;
}

// Lanes [0, n).
ORTPLUGINS_SIMD Int lane_mask(int64_t n) { return iota() < static_cast<int32_t>(n); }

// a * b + c, rounded once where the instruction set can.
ORTPLUGINS_SIMD Float fma(Float a, Float b, Float c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// The larger (smaller) one; b where either is NaN.
ORTPLUGINS_SIMD Float max(Float a, Float b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
ORTPLUGINS_SIMD Float min(Float a, Float b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

ORTPLUGINS_SIMD Float abs(Float x) { return (Float)((UInt)x & 0x7fffffffU); }

// Largest lane; where a lane is NaN, any lane.
ORTPLUGINS_SIMD float reduce_max(Float x) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
#else
  const __m256 y = x;
#endif
  __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_max_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
#else
  float m = x[0];
  for (int i = 1; i < kWidth; ++i) m = x[i] > m ? x[i] : m;
  return m;
#endif
}

ORTPLUGINS_SIMD float reduce_sum(Float x) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
#else
  const __m256 y = x;
#endif
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
#else
  float s = 0.0F;
  for (int i = 0; i < kWidth; ++i) s += x[i];
  return s;
#endif
}

// --- Loads and stores; any alignment ---------------------------------------------------------------------------------

namespace detail {

template <class Vector>
ORTPLUGINS_SIMD Vector load_bits(const void* p) {
  Vector v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// The first n (< kWidth) elements of p; the rest is zero.
template <class Vector, class Element>
ORTPLUGINS_SIMD Vector load_bits_tail(const Element* p, int64_t n) {
  Element lanes[kWidth];
  for (int i = 0; i < kWidth; ++i) lanes[i] = i < n ? p[i] : Element{};
  return load_bits<Vector>(lanes);
}

template <class Vector, class Element>
ORTPLUGINS_SIMD void store_bits_tail(Element* p, Vector v, int64_t n) {
  Element lanes[kWidth];
  std::memcpy(lanes, &v, sizeof(v));
  for (int i = 0; i < kWidth; ++i) {
    if (i < n) p[i] = lanes[i];
  }
}

ORTPLUGINS_SIMD Float from_float16(UShort h) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
  return _mm256_cvtph_ps((__m128i)h);
#else
  const UInt bits = __builtin_convertvector(h, UInt);
  const UInt magnitude = (bits & 0x7fffU) << 13;
  const Float finite = (Float)magnitude * 0x1p112F;  // rebiases the exponent; exact, subnormals included
  const UInt special = magnitude | 0x7f800000U;      // infinity and NaN
  const Int is_special = (Int)(bits & 0x7c00U) == 0x7c00;
  return (Float)((UInt)(is_special ? (Int)special : (Int)finite) | (bits & 0x8000U) << 16);
#endif
}

ORTPLUGINS_SIMD UShort to_float16(Float x) {
#if defined(__AVX512F__)
  return (UShort)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (UShort)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const UInt sign = ((UInt)x & 0x80000000U) >> 16;
  const Float a = abs(x);
  // Normal results: round the 13 dropped bits to nearest even while rebiasing the exponent; 65520 and above carry into
  // infinity. Subnormal results: adding 0.5 lets the addition round at 2^-24, the spacing of subnormals.
  const UInt normal = ((UInt)a - (112U << 23) + 0xfffU + (((UInt)a >> 13) & 1U)) >> 13;
  const UInt subnormal = (UInt)(a + 0.5F) - 0x3f000000U;
  const Int finite = a < 0x1p-14F ? (Int)subnormal : (Int)normal;
  const Int large = a >= 65520.0F ? Int{} + 0x7c00 : finite;
  const Int magnitude = a == a ? large : (Int)(((UInt)a >> 13) & 0x3ffU) | 0x7e00;
  return __builtin_convertvector((UInt)magnitude | sign, UShort);
#endif
}

ORTPLUGINS_SIMD UInt widen(UShort h) {
#if defined(__AVX512F__)
  return (UInt)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  return (UInt)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, UInt);
#endif
}

ORTPLUGINS_SIMD Float from_bfloat16(UShort h) { return (Float)(widen(h) << 16); }

ORTPLUGINS_SIMD UShort to_bfloat16(Float x) {
  const UInt bits = (UInt)x;
  const UInt rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;  // to nearest even; overflow carries into infinity
  const UInt quiet_nan = (bits >> 16) | 0x40U;
  const UInt result = (UInt)(x == x ? (Int)rounded : (Int)quiet_nan);
#if defined(__AVX512F__)
  return (UShort)_mm512_cvtepi32_epi16((__m512i)result);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)result, (__m256i)result);  // within 128-bit lanes
  return (UShort)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(result, UShort);
#endif
}

}  // namespace detail

ORTPLUGINS_SIMD Float load(const float* p) { return detail::load_bits<Float>(p); }
ORTPLUGINS_SIMD Float load(const Float16* p) { return detail::from_float16(detail::load_bits<UShort>(p)); }
ORTPLUGINS_SIMD Float load(const BFloat16* p) { return detail::from_bfloat16(detail::load_bits<UShort>(p)); }

ORTPLUGINS_SIMD void store(float* p, Float v) { std::memcpy(p, &v, sizeof(v)); }
ORTPLUGINS_SIMD void store(Float16* p, Float v) {
  const UShort bits = detail::to_float16(v);
  std::memcpy(p, &bits, sizeof(bits));
}
ORTPLUGINS_SIMD void store(BFloat16* p, Float v) {
  const UShort bits = detail::to_bfloat16(v);
  std::memcpy(p, &bits, sizeof(bits));
}

// The first n elements, 0 <= n <= kWidth; the other lanes are zero. Memory behind them is not touched.
ORTPLUGINS_SIMD Float load_tail(const float* p, int64_t n) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << n) - 1), p);
#elif defined(__AVX2__)
  return _mm256_maskload_ps(p, (__m256i)lane_mask(n));
#else
  return detail::load_bits_tail<Float>(p, n);
#endif
}
ORTPLUGINS_SIMD UShort load_tail_bits(const void* p, int64_t n) {
#if defined(__AVX512F__)
  return (UShort)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1U << n) - 1), p);
#else
  return detail::load_bits_tail<UShort>(static_cast<const uint16_t*>(p), n);
#endif
}
ORTPLUGINS_SIMD Float load_tail(const Float16* p, int64_t n) { return detail::from_float16(load_tail_bits(p, n)); }
ORTPLUGINS_SIMD Float load_tail(const BFloat16* p, int64_t n) { return detail::from_bfloat16(load_tail_bits(p, n)); }

// The first n lanes, 0 <= n <= kWidth.
ORTPLUGINS_SIMD void store_tail(float* p, Float v, int64_t n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1U << n) - 1), v);
#elif defined(__AVX2__)
  _mm256_maskstore_ps(p, (__m256i)lane_mask(n), v);
#else
  detail::store_bits_tail(p, v, n);
#endif
}
ORTPLUGINS_SIMD void store_tail_bits(void* p, UShort v, int64_t n) {
#if defined(__AVX512F__)
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1U << n) - 1), (__m256i)v);
#else
  detail::store_bits_tail(static_cast<uint16_t*>(p), v, n);
#endif
}
ORTPLUGINS_SIMD void store_tail(Float16* p, Float v, int64_t n) { store_tail_bits(p, detail::to_float16(v), n); }
ORTPLUGINS_SIMD void store_tail(BFloat16* p, Float v, int64_t n) { store_tail_bits(p, detail::to_bfloat16(v), n); }

// One element.
ORTPLUGINS_SIMD float load_scalar(const float* p) { return *p; }
ORTPLUGINS_SIMD float load_scalar(const Float16* p) { return load_tail(p, 1)[0]; }
ORTPLUGINS_SIMD float load_scalar(const BFloat16* p) { return load_tail(p, 1)[0]; }

// Loops whose last step is shorter: the first n lanes, kWidth in all other steps.
template <class T>
ORTPLUGINS_SIMD Float load_lanes(const T* p, int64_t n) {
  return n == kWidth ? load(p) : load_tail(p, n);
}
template <class T>
ORTPLUGINS_SIMD void store_lanes(T* p, Float v, int64_t n) {
  if (n == kWidth) {
    store(p, v);
  } else {
    store_tail(p, v, n);
  }
}

// v as if it had been stored as T and loaded again.
template <class T>
Float round_to(Float v);
template <>
ORTPLUGINS_SIMD Float round_to<float>(Float v) {
  return v;
}
template <>
ORTPLUGINS_SIMD Float round_to<Float16>(Float v) {
  return detail::from_float16(detail::to_float16(v));
}
template <>
ORTPLUGINS_SIMD Float round_to<BFloat16>(Float v) {
  return detail::from_bfloat16(detail::to_bfloat16(v));
}

// Booleans, one byte each, as a mask; those from n on (at most kWidth) are false.
ORTPLUGINS_SIMD Int load_bool(const bool* p, int64_t n = kWidth) {
#if defined(__AVX512F__)
  return (Int)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(static_cast<__mmask16>((1U << n) - 1), p)) != 0;
#else
  const auto* bytes = reinterpret_cast<const uint8_t*>(p);
  const UChar v = n == kWidth ? detail::load_bits<UChar>(p) : detail::load_bits_tail<UChar>(bytes, n);
#if defined(__AVX2__)
  uint64_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  return (Int)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bits))) != 0;
#else
  return __builtin_convertvector(v, Int) != 0;
#endif
#endif
}

// Writes past the caches; p must be aligned to the vector. Worth it only for outputs larger than the last-level cache.
ORTPLUGINS_SIMD void store_streaming(float* p, Float v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, v);
#else
  store(p, v);
#endif
}

// --- Transposition
// ----------------------------------------------------------------------------------------------------

// rows[i][j] becomes rows[j][i].
ORTPLUGINS_SIMD void transpose(Float (&rows)[kWidth]) {
#if defined(__AVX2__)
  // Within 128-bit blocks first: afterwards block b of rows[4 * g + c] holds rows 4 * g to 4 * g + 3 of column 4 * b +
  // c.
  for (int g = 0; g < kWidth; g += 4) {
#if defined(__AVX512F__)
    const __m512d t0 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[g], rows[g + 1]));
    const __m512d t1 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[g], rows[g + 1]));
    const __m512d t2 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[g + 2], rows[g + 3]));
    const __m512d t3 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[g + 2], rows[g + 3]));
    rows[g] = _mm512_castpd_ps(_mm512_unpacklo_pd(t0, t2));
    rows[g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(t0, t2));
    rows[g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(t1, t3));
    rows[g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(t1, t3));
#else
    const __m256d t0 = _mm256_castps_pd(_mm256_unpacklo_ps(rows[g], rows[g + 1]));
    const __m256d t1 = _mm256_castps_pd(_mm256_unpackhi_ps(rows[g], rows[g + 1]));
    const __m256d t2 = _mm256_castps_pd(_mm256_unpacklo_ps(rows[g + 2], rows[g + 3]));
    const __m256d t3 = _mm256_castps_pd(_mm256_unpackhi_ps(rows[g + 2], rows[g + 3]));
    rows[g] = _mm256_castpd_ps(_mm256_unpacklo_pd(t0, t2));
    rows[g + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(t0, t2));
    rows[g + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(t1, t3));
    rows[g + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(t1, t3));
#endif
  }
  // Then the blocks among the groups g.
  for (int c = 0; c < 4; ++c) {
#if defined(__AVX512F__)
    const __m512 low0 = _mm512_shuffle_f32x4(rows[c], rows[4 + c], 0x44),
                 high0 = _mm512_shuffle_f32x4(rows[c], rows[4 + c], 0xee);
    const __m512 low1 = _mm512_shuffle_f32x4(rows[8 + c], rows[12 + c], 0x44),
                 high1 = _mm512_shuffle_f32x4(rows[8 + c], rows[12 + c], 0xee);
    rows[c] = _mm512_shuffle_f32x4(low0, low1, 0x88);
    rows[4 + c] = _mm512_shuffle_f32x4(low0, low1, 0xdd);
    rows[8 + c] = _mm512_shuffle_f32x4(high0, high1, 0x88);
    rows[12 + c] = _mm512_shuffle_f32x4(high0, high1, 0xdd);
#else
    const __m256 low = _mm256_permute2f128_ps(rows[c], rows[4 + c], 0x20);
    rows[4 + c] = _mm256_permute2f128_ps(rows[c], rows[4 + c], 0x31);
    rows[c] = low;
#endif
  }
#else
  const Float t0 = __builtin_shuffle(rows[0], rows[1], Int{0, 4, 1, 5}),
              t1 = __builtin_shuffle(rows[0], rows[1], Int{2, 6, 3, 7});
  const Float t2 = __builtin_shuffle(rows[2], rows[3], Int{0, 4, 1, 5}),
              t3 = __builtin_shuffle(rows[2], rows[3], Int{2, 6, 3, 7});
  rows[0] = __builtin_shuffle(t0, t2, Int{0, 1, 4, 5});
  rows[1] = __builtin_shuffle(t0, t2, Int{2, 3, 6, 7});
  rows[2] = __builtin_shuffle(t1, t3, Int{0, 1, 4, 5});
  rows[3] = __builtin_shuffle(t1, t3, Int{2, 3, 6, 7});
#endif
}

// Makes streaming stores visible to other threads before whatever follows.
ORTPLUGINS_SIMD void streaming_fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// --- Elementary functions --------------------------------------------------------------------------------------------

namespace detail {

// Nearest integer; |x| < 2^22.
ORTPLUGINS_SIMD Float round_to_integer(Float x) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // Adding 1.5 * 2^23 leaves no bits for a fraction.
  return (x + 12582912.0F) - 12582912.0F;
#endif
}

// p * 2^n for an integer n in [-252, 254].
ORTPLUGINS_SIMD Float scale_by_power_of_2(Float p, Float n) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  // In two factors, since n may lie outside the exponents of normal numbers.
#if defined(__AVX2__)
  const Int exponent = (Int)_mm256_cvtps_epi32(n);
#else
  const Int exponent = __builtin_convertvector(n, Int);
#endif
  const Int half = exponent >> 1;
  return p * (Float)((half + 127) << 23) * (Float)((exponent - half + 127) << 23);
#endif
}

constexpr float kLog2E = 1.44269504F;
constexpr float kLn2 = 0.693147182F;
constexpr float kLn2High = 0.693359375F;  // 9 bits: its product with an exponent is exact
constexpr float kLn2Low = -2.12194440e-4F;

// 2^n e^r for r in +-0.35: a minimax polynomial of degree 6, relative error 3.2e-9.
ORTPLUGINS_SIMD Float exp_of_reduced(Float r, Float n) {
  Float p = broadcast(1.3950597494840622e-3F);
  p = fma(p, r, broadcast(8.368954062461853e-3F));
  p = fma(p, r, broadcast(4.166620597243309e-2F));
  p = fma(p, r, broadcast(0.166665181517601F));
  p = fma(p, r, broadcast(0.5F));
  p = fma(p, r, broadcast(1.0F));
  p = fma(p, r, broadcast(1.0F));
  return scale_by_power_of_2(p, n);
}

// x - n ln 2. Where products are not rounded one float is enough for ln 2: it is off by 1.9e-9, |x| / 20 ulp of e^x.
ORTPLUGINS_SIMD Float minus_multiple_of_ln2(Float x, Float n) {
#if defined(__AVX2__)
  return fma(n, broadcast(-kLn2), x);
#else
  return fma(n, broadcast(-kLn2Low), fma(n, broadcast(-kLn2High), x));
#endif
}

// e^(x + low) for x in [-107, 89] or NaN, where low is the rounding error of x.
ORTPLUGINS_SIMD Float exp_in_range(Float x, Float low) {
  const Float n = round_to_integer(x * kLog2E);
  return exp_of_reduced(minus_multiple_of_ln2(x, n) + low, n);
}

}  // namespace detail

// e^x within 1.2 ulp, for every float: overflow gives infinity, small results are subnormal or 0, NaN stays NaN.
ORTPLUGINS_SIMD Float exp(Float x) {
  x = max(broadcast(-104.0F), min(broadcast(89.0F), x));
  const Float n = detail::round_to_integer(x * detail::kLog2E);
  const Float r = fma(n, broadcast(-detail::kLn2Low), fma(n, broadcast(-detail::kLn2High), x));
  return detail::exp_of_reduced(r, n);
}

// e^x for x <= 0 or NaN, as softmax needs it: fewer instructions, for |x| / 20 ulp more error.
ORTPLUGINS_SIMD Float exp_nonpositive(Float x) {
  x = max(broadcast(-104.0F), x);
  const Float n = detail::round_to_integer(x * detail::kLog2E);
  return detail::exp_of_reduced(detail::minus_multiple_of_ln2(x, n), n);
}

// e^(x + low), where low is the rounding error of x.
ORTPLUGINS_SIMD Float exp(Float x, Float low) {
  const Float clamped = max(broadcast(-104.0F), min(broadcast(89.0F), x));
  return detail::exp_in_range(clamped, clamped == x ? low : zero());
}

// 1 / x within 1 ulp, for a normal x whose reciprocal is normal.
ORTPLUGINS_SIMD Float reciprocal(Float x) {
#if defined(__AVX512F__)
  const Float estimate = _mm512_rcp14_ps(x);  // relative error 2^-14, squared by the step
  return fma(estimate, fma(-x, estimate, broadcast(1.0F)), estimate);
#else
  return 1.0F / x;
#endif
}

// Rounding error of the product a * b, whose rounded value is `product`.
ORTPLUGINS_SIMD Float product_error(Float a, Float b, Float product) {
#if defined(__AVX2__)
  return fma(a, b, -product);
#else
  // Without a fused multiply-add: split both factors into halves of 12 bits, whose products are exact.
  const Float a_high = (Float)((UInt)a & 0xfffff000U), b_high = (Float)((UInt)b & 0xfffff000U);
  const Float a_low = a - a_high, b_low = b - b_high;
  return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low;
#endif
}

// 1 / (1 + e^-(x + low)), where low is the rounding error of x, within 4 ulp for every x.
ORTPLUGINS_SIMD Float sigmoid(Float x, Float low) {
  const Int negative = x < zero();
  const Float z = exp(negative ? x : -x, negative ? low : -low);  // at most 1: no overflow, no cancellation
  return (negative ? z : broadcast(1.0F)) / (1.0F + z);
}

// tanh x within 1.5 ulp.
ORTPLUGINS_SIMD Float tanh(Float x) {
  const Float a = abs(x);
  // |x| <= 0.625: x + x^3 q(x^2), relative error 4.2e-9; above: 1 - 2 / (e^2|x| + 1), which loses nothing there.
  const Float s = a * a;
  Float q = broadcast(-5.717016290873289e-3F);
  q = fma(q, s, broadcast(2.0650560036301613e-2F));
  q = fma(q, s, broadcast(-5.374348908662796e-2F));
  q = fma(q, s, broadcast(0.13331490755081177F));
  q = fma(q, s, broadcast(-0.3333328366279602F));
  const Float small = fma(a * s, q, a);
  const Float large = 1.0F - 2.0F / (exp(a + a) + 1.0F);
  const Float magnitude = a <= 0.625F ? small : large;
  return (Float)((UInt)magnitude | ((UInt)x & 0x80000000U));
}

// Standard normal distribution function, (1 + erf(x / sqrt 2)) / 2, within 7 ulp for every x, however small the result:
// with t = |x| and R(t) = e^(t^2/2) erfc(t / sqrt 2) / 2 it is q = e^(-t^2/2) R(t) for x < 0 and 1 - q otherwise. R is
// smooth; up to t = 14.6, where float ends, R(t) (t + 4) is a polynomial of degree 8 in (t - 4) / (t + 4) (relative
// error 9.7e-8).
ORTPLUGINS_SIMD Float normal_cdf(Float x) {
  const Float t = min(broadcast(14.6F), abs(x));  // NaN stays NaN
  const Float inverse = reciprocal(t + 4.0F);
  const Float w = (t - 4.0F) * inverse;
  Float r = broadcast(0.0003916877321898937F);
  r = fma(r, w, broadcast(0.0015410891501232982F));
  r = fma(r, w, broadcast(-0.0036688398104161024F));
  r = fma(r, w, broadcast(-0.00754075450822711F));
  r = fma(r, w, broadcast(0.06044213846325874F));
  r = fma(r, w, broadcast(-0.18651962280273438F));
  r = fma(r, w, broadcast(0.3871336877346039F));
  r = fma(r, w, broadcast(-0.6078967452049255F));
  r = fma(r, w, broadcast(0.7552852034568787F));
  // The rounding error of t^2 / 2 alone would change the result by up to 50 ulp.
  const Float half = -0.5F * t;
  const Float exponent = half * t;
  const Float q = detail::exp_in_range(exponent, product_error(half, t, exponent)) * (r * inverse);
  return x < zero() ? q : 1.0F - q;
}

}  // namespace simd
}  // namespace
}  // namespace ortplugins
