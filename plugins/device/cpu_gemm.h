// Building blocks of matrix products on the CPU: panels of B, and the register tile that multiplies with them.
//
// The tile computes kTileM x kTileN elements of C, with all accumulators in registers: 12 x 32 with AVX-512 (24 of 32
// registers, then 2 for B and 1 for A), 6 x 16 with AVX2 (12 of 16), 4 x 8 elsewhere. A is read row by row where it
// lies; a panel of B is stored k-major, [k][kTileN], so that a step of k reads one or two whole cache lines.
#pragma once

#include <cstdint>

#include "device/cpu_simd.h"

namespace ortplugins {
namespace {
namespace cpu_gemm {

#if defined(__AVX512F__)
constexpr int kTileM = 12;
#elif defined(__AVX2__)
constexpr int kTileM = 6;
#else
constexpr int kTileM = 4;
#endif
constexpr int kTileN = 2 * simd::kWidth;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Floats of all panels of a k x n matrix.
constexpr int64_t packed_size(int64_t k, int64_t n) { return ceil_div(n, kTileN) * kTileN * k; }

namespace detail {

// Four elements as the lanes of one 128-bit block, of which `columns` builds its vectors.
#if defined(__AVX2__)
ORTPLUGINS_SIMD __m128 load4(const float* p) { return _mm_loadu_ps(p); }
ORTPLUGINS_SIMD __m128 load4(const Float16* p) {
  return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
ORTPLUGINS_SIMD __m128 load4(const BFloat16* p) {
  const __m128i bits = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm_castsi128_ps(_mm_slli_epi32(bits, 16));
}
#endif

// Columns 0 to 3 of kWidth rows of p.
template <class T>
ORTPLUGINS_SIMD void columns(const T* p, int64_t ld, simd::Float out[4]) {
#if defined(__AVX512F__)
  // Rows i, i + 4, i + 8, i + 12 side by side; a 4 x 4 transpose within the 128-bit blocks then leaves rows in order.
  __m512 r[4];
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_castps128_ps512(load4(p + i * ld));
    r[i] = _mm512_insertf32x4(r[i], load4(p + (i + 4) * ld), 1);
    r[i] = _mm512_insertf32x4(r[i], load4(p + (i + 8) * ld), 2);
    r[i] = _mm512_insertf32x4(r[i], load4(p + (i + 12) * ld), 3);
  }
  const __m512d t0 = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1])),
                t1 = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1]));
  const __m512d t2 = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3])),
                t3 = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(t0, t2));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(t0, t2));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(t1, t3));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(t1, t3));
#elif defined(__AVX2__)
  __m256 r[4];
  for (int i = 0; i < 4; ++i)
    r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(load4(p + i * ld)), load4(p + (i + 4) * ld), 1);
  const __m256d t0 = _mm256_castps_pd(_mm256_unpacklo_ps(r[0], r[1])),
                t1 = _mm256_castps_pd(_mm256_unpackhi_ps(r[0], r[1]));
  const __m256d t2 = _mm256_castps_pd(_mm256_unpacklo_ps(r[2], r[3])),
                t3 = _mm256_castps_pd(_mm256_unpackhi_ps(r[2], r[3]));
  out[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(t0, t2));
  out[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(t0, t2));
  out[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(t1, t3));
  out[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(t1, t3));
#else
  simd::Float r[simd::kWidth];
  for (int i = 0; i < simd::kWidth; ++i) r[i] = simd::load(p + i * ld);  // kWidth is 4 here
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < simd::kWidth; ++i) out[j][i] = r[i][j];
  }
#endif
}

}  // namespace detail

// out[j * ld_out + i] = in[i * ld + j] for i < rows, j < cols.
template <class T>
[[maybe_unused]] void transpose(const T* in, int64_t ld, int64_t rows, int64_t cols, float* out, int64_t ld_out) {
  int64_t i = 0;
  for (; i + simd::kWidth <= rows; i += simd::kWidth) {
    int64_t j = 0;
    for (; j + 4 <= cols; j += 4) {
      simd::Float column[4];
      detail::columns(in + i * ld + j, ld, column);
      for (int c = 0; c < 4; ++c) simd::store(out + (j + c) * ld_out + i, column[c]);
    }
    for (; j < cols; ++j) {
      for (int r = 0; r < simd::kWidth; ++r) out[j * ld_out + i + r] = simd::load_scalar(in + (i + r) * ld + j);
    }
  }
  for (; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) out[j * ld_out + i] = simd::load_scalar(in + i * ld + j);
  }
}

// out[i * ld_out + j] = in[i * ld + j] for i < rows, j < cols.
template <class T>
[[maybe_unused]] void convert(const T* in, int64_t ld, int64_t rows, int64_t cols, float* out, int64_t ld_out) {
  for (int64_t i = 0; i < rows; ++i) {
    int64_t j = 0;
    for (; j + simd::kWidth <= cols; j += simd::kWidth) simd::store(out + i * ld_out + j, simd::load(in + i * ld + j));
    if (j < cols) simd::store_tail(out + i * ld_out + j, simd::load_tail(in + i * ld + j, cols - j), cols - j);
  }
}

// Writes the panels of the k x n matrix op(b) to `packed`, `panel_stride` floats (at least k * kTileN) from one to the
// next. Columns past n are zero. b is row-major, k x n or (trans) n x k.
template <class T>
[[maybe_unused]] void pack_b(const T* b, int64_t ldb, bool trans, int64_t k, int64_t n, float* packed,
                             int64_t panel_stride) {
  for (int64_t j = 0; j < n; j += kTileN, packed += panel_stride) {
    const int64_t cols = n - j < kTileN ? n - j : kTileN;
    if (cols < kTileN) std::memset(packed, 0, static_cast<size_t>(k * kTileN) * sizeof(float));
    if (trans) {
      transpose(b + j * ldb, ldb, cols, k, packed, kTileN);
    } else {
      convert(b + j, ldb, k, cols, packed, kTileN);
    }
  }
}

namespace detail {

// kRows x (kVectors * kWidth) elements of C, from row-major A and rows of B that lie ldb apart.
template <int kRows, int kVectors>
[[gnu::noinline]] void tile(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                            bool accumulate) {
  using simd::Float;
  constexpr int kGroups = (kRows + 2) / 3;  // three rows per pointer: lda and 2 lda are address scales
  Float acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      acc[i][v] = accumulate ? simd::load(c + i * ldc + v * simd::kWidth) : simd::zero();
  }
  const float* rows[kGroups];
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) rows[g] = a + 3 * g * lda;
  for (int64_t p = 0; p < k; ++p) {
    Float bv[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) bv[v] = simd::load(b + v * simd::kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Float av = simd::broadcast(rows[i / 3][(i % 3) * lda]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) acc[i][v] = simd::fma(av, bv[v], acc[i][v]);
    }
    b += ldb;
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) ++rows[g];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) simd::store(c + i * ldc + v * simd::kWidth, acc[i][v]);
  }
}

template <int kVectors>
ORTPLUGINS_SIMD void tile_of_rows(int rows, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                                  float* c, int64_t ldc, bool accumulate) {
  switch (rows) {
    case 1:
      return tile<1, kVectors>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 2:
      return tile<2, kVectors>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 3:
      return tile<3, kVectors>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 4:
      return tile<4, kVectors>(k, a, lda, b, ldb, c, ldc, accumulate);
#if defined(__AVX2__)
    case 5:
      return tile<5, kVectors>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 6:
      return tile<6, kVectors>(k, a, lda, b, ldb, c, ldc, accumulate);
#endif
#if defined(__AVX512F__)
    case 7:
      return tile<7, kVectors>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 8:
      return tile<8, kVectors>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 9:
      return tile<9, kVectors>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 10:
      return tile<10, kVectors>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 11:
      return tile<11, kVectors>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 12:
      return tile<12, kVectors>(k, a, lda, b, ldb, c, ldc, accumulate);
#endif
    default:
      return;
  }
}

}  // namespace detail

// C = A B, or C += A B: rows <= kTileM of row-major A, and a panel of B with rows ldb apart (kTileN when packed), of
// which the first `cols` columns are wanted. B is read and C is read and written in whole vectors: kWidth columns where
// cols <= kWidth, else kTileN. k may be 0.
ORTPLUGINS_SIMD void tile(int64_t rows, int64_t cols, int64_t k, const float* a, int64_t lda, const float* b,
                          int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  if (cols <= simd::kWidth) {
    detail::tile_of_rows<1>(static_cast<int>(rows), k, a, lda, b, ldb, c, ldc, accumulate);
  } else {
    detail::tile_of_rows<2>(static_cast<int>(rows), k, a, lda, b, ldb, c, ldc, accumulate);
  }
}

}  // namespace cpu_gemm
}  // namespace
}  // namespace ortplugins
