// FusedGemm on the CPU.
//
// A task computes a block of y: it walks over K in steps that keep a panel of B and a strip of A in the caches, over
// strips of kTileM rows, and over panels of kTileN columns. Each step is one register tile (device/cpu_gemm.h). The
// epilogue (alpha, bias, residual, activation, conversion) runs over the tile while it is in L1.
//
// float32 rows of A are read where they lie; a strip of another type, or of a transposed A, is converted first. B comes
// packed by `prepack`; else a task packs the block it needs; else, with few rows of A, it is read where it lies,
// because packing would cost more than it saves.
#include <cstdint>

#include "device/cpu_gemm.h"
#include "device/cpu_isa.h"
#include "kernels/gemm/variants.h"

namespace ortplugins {
namespace {

using cpu_gemm::ceil_div;
using cpu_gemm::kTileM;
using cpu_gemm::kTileN;
using simd::Float;

// Steps of K: 12 rows of A are 24 KiB, within L1 beside the lines of B that pass through.
constexpr int64_t kMaxBlockK = 512;
// Stack buffers of a task, in floats: 64 KiB of packed B, 128 KiB of sums that wait for the next step of K.
constexpr int64_t kPackFloats = 16384;
constexpr int64_t kPartialFloats = 32768;
// B packed ahead: a block of it stays in L2 (1 MiB on current servers) while the strips of A go by.
constexpr int64_t kPackedBlockFloats = 98304;
constexpr int64_t kBlockNOnTheFly = 64;
constexpr int64_t kMaxDirectRows = 4 * kTileM;  // with up to four strips, B is read where it lies
constexpr double kMinTaskFlops = 1e6;           // about 10 us, several times the cost of handing out a task
constexpr int64_t kMaxTasks = 32;

// --- Constant B
// --------------------------------------------------------------------------------------------------------

// In front of the panels, so that a kernel can tell whether they have its width.
struct alignas(64) PackedHeader {
  int64_t tile_n;
};

const PackedHeader* packed_header(const void* packed) {
  return reinterpret_cast<const PackedHeader*>((reinterpret_cast<uintptr_t>(packed) + 63) & ~uintptr_t{63});
}

// Panels of all matrices of B, or null where they were not packed for this instruction set.
const float* packed_panels(const void* packed) {
  if (packed == nullptr) return nullptr;
  const PackedHeader* header = packed_header(packed);
  return header->tile_n == kTileN ? reinterpret_cast<const float*>(header + 1) : nullptr;
}

// --- Epilogue
// ------------------------------------------------------------------------------------------------------------

struct Identity {
  static Float apply(Float x) { return x; }
};
struct Relu {
  static Float apply(Float x) { return simd::max(simd::zero(), x); }
};
struct Gelu {
  static Float apply(Float x) { return x * simd::normal_cdf(x); }
};
struct GeluTanh {
  // (1 + tanh u) / 2 is sigmoid(2 u). 2 u = x (c0 + c1 x^2) is carried in two floats: where the sigmoid is small, its
  // relative error is the absolute error of 2 u.
  static Float apply(Float x) {
    const Float c0 = simd::broadcast(1.59576912F), c0_low = simd::broadcast(-4.5340680e-08F);   // 2 sqrt(2 / pi)
    const Float c1 = simd::broadcast(0.0713548139F), c1_low = simd::broadcast(2.3988324e-09F);  // 0.044715 c0
    const Float s = x * x;
    const Float s_low = simd::product_error(x, x, s);
    const Float t = c1 * s;
    const Float t_low = simd::product_error(c1, s, t) + (c1 * s_low + c1_low * s);
    const Float p = c0 + t;
    const Float t_seen = p - c0;  // two-sum: what the addition lost
    const Float p_low = (c0 - (p - t_seen)) + (t - t_seen) + (t_low + c0_low);
    const Float u = x * p;
    const Float u_low = simd::product_error(x, p, u) + x * p_low;
    return x * simd::sigmoid(u, u_low);
  }
};
struct Silu {
  static Float apply(Float x) { return x * simd::sigmoid(x, simd::zero()); }
};
struct QuickGelu {
  static Float apply(Float x) {
    const Float c = simd::broadcast(1.702F), c_low = simd::broadcast(-2.1934509e-08F);
    const Float u = c * x;
    return x * simd::sigmoid(u, simd::product_error(c, x, u) + c_low * x);
  }
};

template <class T>
struct Epilogue {
  const T* bias;
  const T* residual;  // of this matrix
  T* y;               // of this matrix
  int64_t n;
  int64_t bias_stride_m, bias_stride_n;
  float alpha, beta;

  // beta * bias in row i, n columns from j on.
  ORTPLUGINS_SIMD Float addend(int64_t i, int64_t j, int64_t lanes) const {
    const T* at = bias + i * bias_stride_m + j * bias_stride_n;
    return (bias_stride_n == 0 ? simd::broadcast(simd::load_scalar(at)) : simd::load_lanes(at, lanes)) * beta;
  }

  // y[i0 ..][j0 ..] from the rows x cols sums in c. kWhole: cols is kTileN.
  template <class Activation, bool kWhole>
  ORTPLUGINS_SIMD void rows_of_tile(const float* c, int64_t ldc, int64_t i0, int64_t j0, int64_t rows,
                                    int64_t cols) const {
    const int vectors = kWhole || cols > simd::kWidth ? 2 : 1;
    const int64_t lanes[2] = {kWhole || vectors == 2 ? simd::kWidth : cols,
                              kWhole ? simd::kWidth : cols - simd::kWidth};
    Float add[2] = {simd::zero(), simd::zero()};
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = (i0 + i) * n + j0;
      const bool new_bias = bias != nullptr && (i == 0 || bias_stride_m != 0);
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) {
        const int64_t j = v * simd::kWidth;
        if (new_bias) add[v] = addend(i0 + i, j0 + j, lanes[v]);
        Float x = simd::fma(simd::load(c + i * ldc + j), simd::broadcast(alpha), add[v]);
        if (residual != nullptr) x += simd::load_lanes(residual + at + j, lanes[v]);
        simd::store_lanes(y + at + j, Activation::apply(x), lanes[v]);
      }
    }
  }

  template <class Activation>
  static void apply(const Epilogue& e, const float* c, int64_t ldc, int64_t i0, int64_t j0, int64_t rows,
                    int64_t cols) {
    if (cols == kTileN) {
      e.rows_of_tile<Activation, true>(c, ldc, i0, j0, rows, cols);
    } else {
      e.rows_of_tile<Activation, false>(c, ldc, i0, j0, rows, cols);
    }
  }

  using Function = void (*)(const Epilogue&, const float*, int64_t, int64_t, int64_t, int64_t, int64_t);
  static Function choose(Activation activation) {
    switch (activation) {
      case Activation::kNone:
        return apply<Identity>;
      case Activation::kRelu:
        return apply<Relu>;
      case Activation::kGelu:
        return apply<Gelu>;
      case Activation::kGeluTanh:
        return apply<GeluTanh>;
      case Activation::kSilu:
        return apply<Silu>;
      case Activation::kQuickGelu:
        return apply<QuickGelu>;
    }
    return nullptr;
  }
};

// --- Blocks and tasks
// ----------------------------------------------------------------------------------------------------

enum class SourceB : uint8_t { kPacked, kDirect, kOnTheFly };

struct Blocking {
  SourceB source_b;
  int64_t block_m, block_n, block_k;
  int64_t blocks_m, blocks_n;
  int64_t matrices_per_task;  // more than one only where a matrix is one block
  int64_t tasks;
};

constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

Blocking choose_blocking(const GemmParams& p, bool packed) {
  Blocking b;
  b.source_b = packed                                                              ? SourceB::kPacked
               : p.dtype == DType::kFloat32 && !p.trans_b && p.m <= kMaxDirectRows ? SourceB::kDirect
                                                                                   : SourceB::kOnTheFly;
  const double flops = 2.0 * static_cast<double>(p.batch) * static_cast<double>(p.m) * static_cast<double>(p.n) *
                       static_cast<double>(p.k + 16);  // the epilogue is worth about 16 steps of K
  const int64_t wanted =
      flops < kMinTaskFlops * kMaxTasks ? clamp(static_cast<int64_t>(flops / kMinTaskFlops), 1, kMaxTasks) : kMaxTasks;

  const int64_t max_k = b.source_b == SourceB::kOnTheFly ? kPackFloats / kBlockNOnTheFly : kMaxBlockK;
  b.block_k = p.k <= max_k ? p.k : ceil_div(p.k, ceil_div(p.k, max_k));
  // Blocks as square as can be: together they read A blocks_n times and B blocks_m times.
  const int64_t area = ceil_div(p.m * p.n, ceil_div(wanted, p.batch));
  int64_t side = kTileN;
  while (side * side < area) side += kTileN;
  const int64_t padded_n = round_up(p.n, kTileN);
  if (b.source_b == SourceB::kOnTheFly) {
    b.block_n = kBlockNOnTheFly;
  } else {
    const int64_t fits_l2 = b.block_k == 0 ? padded_n : kPackedBlockFloats / b.block_k / kTileN * kTileN;
    b.block_n = clamp(side, kTileN, fits_l2);
  }
  if (b.block_n > padded_n) b.block_n = padded_n;
  if (b.block_k < p.k && b.block_n > kPartialFloats / (4 * kTileM))
    b.block_n = kPartialFloats / (4 * kTileM) / kTileN * kTileN;
  b.block_m = round_up(ceil_div(area, b.block_n), kTileM);
  if (b.block_k < p.k && b.block_m * b.block_n > kPartialFloats)
    b.block_m = kPartialFloats / b.block_n / kTileM * kTileM;
  // Packing a block pays off only over several strips.
  if (b.source_b == SourceB::kOnTheFly && b.block_m < 8 * kTileM) b.block_m = 8 * kTileM;
  if (b.block_m > p.m) b.block_m = p.m;
  b.blocks_m = ceil_div(p.m, b.block_m);
  b.blocks_n = ceil_div(p.n, b.block_n);
  b.block_m = round_up(ceil_div(p.m, b.blocks_m), kTileM);  // even blocks
  b.blocks_m = ceil_div(p.m, b.block_m);
  b.matrices_per_task = b.blocks_m * b.blocks_n == 1 ? ceil_div(p.batch, wanted) : 1;
  b.tasks = ceil_div(p.batch, b.matrices_per_task) * b.blocks_m * b.blocks_n;
  return b;
}

// Block [m0, m1) x [n0, n1) of matrix `index`.
template <class T>
void run_block(const GemmParams& p, const Blocking& blocking, const float* panels, int64_t index, int64_t m0,
               int64_t m1, int64_t n0, int64_t n1) {
  alignas(64) float tile_sums[kTileM * kTileN];
  alignas(64) float strip[kTileM * kMaxBlockK];
  alignas(64) float pack[kPackFloats];
  alignas(64) float partial[kPartialFloats];

  int64_t a_offset, b_offset;
  p.batch_offsets(index, &a_offset, &b_offset);
  const T* a = static_cast<const T*>(p.a) + a_offset;
  const T* b = static_cast<const T*>(p.b) + b_offset;
  const int64_t y_offset = index * p.m * p.n;
  const Epilogue<T> epilogue = {p.beta == 0.0F ? nullptr : static_cast<const T*>(p.bias),
                                p.residual == nullptr ? nullptr : static_cast<const T*>(p.residual) + y_offset,
                                static_cast<T*>(p.y) + y_offset,
                                p.n,
                                p.bias_stride_m,
                                p.bias_stride_n,
                                p.alpha,
                                p.beta};
  const typename Epilogue<T>::Function finish = Epilogue<T>::choose(p.activation);
  const int64_t ld_partial = round_up(n1 - n0, kTileN);

  int64_t k0 = 0;
  do {  // once with an empty K
    const int64_t depth = p.k - k0 < blocking.block_k ? p.k - k0 : blocking.block_k;
    const bool first = k0 == 0, last = k0 + depth == p.k;

    // Panel j of the block is at b_panels + j * panel_stride, its rows ld_panel apart.
    const float* b_panels = pack;
    int64_t panel_stride = depth * kTileN, ld_panel = kTileN;
    if (blocking.source_b == SourceB::kPacked) {
      const int64_t matrix = p.k * p.n == 0 ? 0 : b_offset / (p.k * p.n);
      b_panels = panels + matrix * cpu_gemm::packed_size(p.k, p.n) + n0 * p.k + k0 * kTileN;
      panel_stride = p.k * kTileN;
    } else if (blocking.source_b == SourceB::kOnTheFly) {
      cpu_gemm::pack_b(b + (p.trans_b ? n0 * p.ldb + k0 : k0 * p.ldb + n0), p.ldb, p.trans_b, depth, n1 - n0, pack,
                       panel_stride);
    } else if constexpr (sizeof(T) == sizeof(float)) {
      b_panels = b + k0 * p.ldb + n0;
      panel_stride = kTileN;
      ld_panel = p.ldb;
      // The last columns may not be read in whole vectors.
      if (const int64_t cols = (n1 - n0) % kTileN; cols != 0) {
        cpu_gemm::pack_b(b_panels + (n1 - n0 - cols), p.ldb, false, depth, cols, pack, 0);
      }
    }

    for (int64_t i = m0; i < m1; i += kTileM) {
      const int64_t rows = m1 - i < kTileM ? m1 - i : kTileM;
      const float* a_strip = strip;
      int64_t ld_strip = kMaxBlockK;
      if (p.trans_a) {
        cpu_gemm::transpose(a + k0 * p.lda + i, p.lda, depth, rows, strip, kMaxBlockK);
      } else if constexpr (sizeof(T) == sizeof(float)) {
        a_strip = a + i * p.lda + k0;
        ld_strip = p.lda;
      } else {
        cpu_gemm::convert(a + i * p.lda + k0, p.lda, rows, depth, strip, kMaxBlockK);
      }
      for (int64_t j = n0; j < n1; j += kTileN) {
        const int64_t cols = n1 - j < kTileN ? n1 - j : kTileN;
        float* c = tile_sums;
        int64_t ldc = kTileN;
        if (!(first && last)) {
          c = partial + (i - m0) * ld_partial + (j - n0);
          ldc = ld_partial;
        }
        const float* b_panel = b_panels + (j - n0) / kTileN * panel_stride;
        if (blocking.source_b == SourceB::kDirect && cols < kTileN) {
          cpu_gemm::tile(rows, cols, depth, a_strip, ld_strip, pack, kTileN, c, ldc, !first);
        } else {
          cpu_gemm::tile(rows, cols, depth, a_strip, ld_strip, b_panel, ld_panel, c, ldc, !first);
        }
        if (last) finish(epilogue, c, ldc, i, j, rows, cols);
      }
    }
    k0 += depth;
  } while (k0 < p.k);
}

template <class T>
Status run(const GemmParams& p, const ExecContext& context) {
  const float* panels = packed_panels(p.packed_b);
  const Blocking blocking = choose_blocking(p, panels != nullptr);
  const int64_t blocks = blocking.blocks_m * blocking.blocks_n;
  context.pool.parallel_for(blocking.tasks, [&](int64_t task) {
    // Blocks of columns are outermost, so that tasks that run at the same time share panels of B.
    const int64_t block = task % blocks;
    const int64_t m0 = block % blocking.blocks_m * blocking.block_m, n0 = block / blocking.blocks_m * blocking.block_n;
    const int64_t m1 = m0 + blocking.block_m < p.m ? m0 + blocking.block_m : p.m;
    const int64_t n1 = n0 + blocking.block_n < p.n ? n0 + blocking.block_n : p.n;
    const int64_t first = task / blocks * blocking.matrices_per_task;
    const int64_t end = first + blocking.matrices_per_task < p.batch ? first + blocking.matrices_per_task : p.batch;
    for (int64_t index = first; index < end; ++index) run_block<T>(p, blocking, panels, index, m0, m1, n0, n1);
  });
  return {};
}

template <class T>
void pack(const T* b, bool trans, int64_t batch, int64_t k, int64_t n, float* panels) {
  for (int64_t i = 0; i < batch; ++i) {
    cpu_gemm::pack_b(b + i * k * n, trans ? k : n, trans, k, n, panels + i * cpu_gemm::packed_size(k, n), k * kTileN);
  }
}

}  // namespace

Status ORTPLUGINS_CPU_NAME(launch_gemm_cpu)(const GemmParams& p, const ExecContext& context) {
  if (p.batch == 0 || p.m == 0 || p.n == 0) return {};
  return dispatch(p.dtype, [&](auto tag) { return run<typename decltype(tag)::type>(p, context); });
}

int64_t ORTPLUGINS_CPU_NAME(packed_gemm_b_bytes_cpu)(int64_t batch, int64_t k, int64_t n) {
  const int64_t floats = batch * cpu_gemm::packed_size(k, n);
  if (floats == 0) return 0;
  return static_cast<int64_t>(2 * sizeof(PackedHeader)) + floats * static_cast<int64_t>(sizeof(float));
}

void ORTPLUGINS_CPU_NAME(pack_gemm_b_cpu)(const void* b, DType dtype, bool trans, int64_t batch, int64_t k, int64_t n,
                                          void* packed) {
  auto* header = const_cast<PackedHeader*>(packed_header(packed));
  header->tile_n = kTileN;
  auto* panels = reinterpret_cast<float*>(header + 1);
  (void)dispatch(dtype, [&](auto tag) {  // of a dtype that the op takes
    pack(static_cast<const typename decltype(tag)::type*>(b), trans, batch, k, n, panels);
    return Status{};
  });
}

}  // namespace ortplugins
