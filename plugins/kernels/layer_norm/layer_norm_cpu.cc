// FusedLayerNorm on the CPU, one row at a time.
//
// LayerNorm takes two passes for its statistics: the mean, then the squared deviations from it. The mean is found as
// that of s - pivot, where the pivot is the mean of the first vector: the difference of numbers close to each other is
// exact, so that a large mean costs no accuracy, and a row of equal values has deviations of exactly 0. RMSNorm takes
// one pass.
//
// Where s is x in float32, every pass reads x, which the first one has brought into L1. Otherwise the first pass leaves
// s in a buffer in L1; a row longer than that is added up again in each pass.
#include <cmath>
#include <cstdint>

#include "device/cpu_isa.h"
#include "device/cpu_simd.h"
#include "kernels/layer_norm/variants.h"

namespace ortplugins {
namespace {

using simd::Float;
using simd::kWidth;
using simd::load_lanes;
using simd::store_lanes;

constexpr int64_t kBufferCols = 4096;  // 16 KiB: half of the smallest L1
constexpr int64_t kSumCols = 2048;     // summed in vectors before they join the row's sum: rounding errors stay small
constexpr int64_t kTaskElements = 16384;  // a few us, several times the cost of handing out a task
constexpr int64_t kMaxTasks = 32;
// An output larger than this will not be read back from a cache; writing past the caches saves reading its lines first.
constexpr int64_t kStreamingBytes = int64_t{24} << 20;

// kAdds: s is not x, or is wanted as an output.
template <class T, bool kAdds, bool kRms>
class Rows {
 public:
  explicit Rows(const LayerNormParams& p)
      : p_(p),
        gamma_(static_cast<const T*>(p.gamma)),
        beta_(static_cast<const T*>(p.beta)),
        bias_(static_cast<const T*>(p.bias)),
        streaming_(sizeof(T) == sizeof(float) && p.rows * p.cols * static_cast<int64_t>(sizeof(T)) >= kStreamingBytes) {
  }

  void run(int64_t first_row, int64_t end_row) {
    for (int64_t row = first_row; row < end_row; ++row) {
      x_ = static_cast<const T*>(p_.x) + row * p_.cols;
      y_ = static_cast<T*>(p_.y) + row * p_.cols;
      if constexpr (kAdds) {
        residual_ =
            p_.residual == nullptr ? nullptr : static_cast<const T*>(p_.residual) + p_.residual_row(row) * p_.cols;
        sum_ = p_.sum == nullptr ? nullptr : static_cast<T*>(p_.sum) + row * p_.cols;
      }
      if constexpr (kAdds || sizeof(T) != sizeof(float)) {
        if (p_.cols <= kBufferCols) {
          normalize<true>();
          continue;
        }
      }
      normalize<false>();
    }
    if (streaming_) simd::streaming_fence();
  }

 private:
  // s of n columns from c on; 0 in the lanes behind them.
  ORTPLUGINS_SIMD Float sum_at(int64_t c, int64_t n) const {
    Float s = load_lanes(x_ + c, n);
    if constexpr (kAdds) {
      if (bias_ != nullptr) s += load_lanes(bias_ + c, n);
      if (residual_ != nullptr) s += load_lanes(residual_ + c, n);
      s = simd::round_to<T>(s);
    }
    return s;
  }

  // Calls body(column, lanes, u) for columns [c, end); u counts four independent accumulators.
  template <class Body>
  ORTPLUGINS_SIMD static void for_columns(int64_t c, int64_t end, const Body& body) {
    for (; c + 4 * kWidth <= end; c += 4 * kWidth) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) body(c + u * kWidth, int64_t{kWidth}, u);
    }
    for (; c < end; c += kWidth) body(c, end - c < kWidth ? end - c : int64_t{kWidth}, 0);
  }

  // Mean of the first vector of a row; exactly its value where all are equal.
  ORTPLUGINS_SIMD float first_mean() const {
    const int64_t n = p_.cols < kWidth ? p_.cols : kWidth;
    const Float s = sum_at(0, n);
    return s[0] + simd::reduce_sum(simd::lane_mask(n) ? s - s[0] : simd::zero()) / static_cast<float>(n);
  }

  // Mean over the row of what body(column, lanes, &total) adds up.
  template <class Body>
  ORTPLUGINS_SIMD float mean_of(const Body& body) const {
    float sum = 0.0F;
    for (int64_t begin = 0; begin < p_.cols; begin += kSumCols) {
      Float total[4] = {};
      for_columns(begin, p_.cols - begin < kSumCols ? p_.cols : begin + kSumCols,
                  [&](int64_t c, int64_t n, int u) __attribute__((always_inline)) { body(c, n, &total[u]); });
      sum += simd::reduce_sum((total[0] + total[1]) + (total[2] + total[3]));
    }
    return sum / static_cast<float>(p_.cols);
  }

  template <bool kBuffered>
  void normalize() {
    const float pivot = kRms ? 0.0F : first_mean();
    const float first_pass = mean_of([&](int64_t c, int64_t n, Float* total) __attribute__((always_inline)) {
      const Float s = sum_at(c, n);
      if constexpr (kBuffered) simd::store(buffer_ + c, s);
      if constexpr (kAdds) {
        if (sum_ != nullptr) store_lanes(sum_ + c, s, n);
      }
      if constexpr (kRms) {
        *total = simd::fma(s, s, *total);
      } else {
        const Float d = s - pivot;
        *total += n == kWidth ? d : simd::lane_mask(n) ? d : simd::zero();
      }
    });
    const SplitMean mean = kRms ? SplitMean{} : SplitMean::of(pivot, first_pass);
    const auto deviation_at = [&](int64_t c, int64_t n) __attribute__((always_inline)) {
      const Float s = kBuffered ? simd::load(buffer_ + c) : sum_at(c, n);
      return kRms ? s : (s - mean.high) - mean.low;
    };
    float mean_square = first_pass;
    if constexpr (!kRms) {
      mean_square = mean_of([&](int64_t c, int64_t n, Float* total) __attribute__((always_inline)) {
        Float d = deviation_at(c, n);
        if (n != kWidth) d = simd::lane_mask(n) ? d : simd::zero();
        *total = simd::fma(d, d, *total);
      });
    }
    const Float rstd = simd::broadcast(1.0F / std::sqrt(mean_square + p_.epsilon));
    const bool streaming = streaming_ && reinterpret_cast<uintptr_t>(y_) % sizeof(Float) == 0;
    for_columns(0, p_.cols, [&](int64_t c, int64_t n, int) __attribute__((always_inline)) {
      Float v = deviation_at(c, n) * rstd;
      if (gamma_ != nullptr) v *= load_lanes(gamma_ + c, n);
      if (beta_ != nullptr) v += load_lanes(beta_ + c, n);
      if constexpr (sizeof(T) == sizeof(float)) {
        if (streaming && n == kWidth) return simd::store_streaming(y_ + c, v);
      }
      store_lanes(y_ + c, v, n);
    });
  }

  const LayerNormParams& p_;
  const T *const gamma_, *const beta_, *const bias_;
  const bool streaming_;
  const T *x_ = nullptr, *residual_ = nullptr;  // of the row
  T *y_ = nullptr, *sum_ = nullptr;
  alignas(64) float buffer_[kBufferCols + kWidth];  // the last vector may reach past the columns
};

template <class T, bool kAdds, bool kRms>
Status run(const LayerNormParams& p, const ExecContext& context) {
  int64_t tasks = p.rows * p.cols / kTaskElements;
  tasks = tasks > kMaxTasks ? kMaxTasks : tasks;
  tasks = tasks > p.rows ? p.rows : tasks < 1 ? 1 : tasks;
  context.pool.parallel_for(
      tasks, [&](int64_t task) { Rows<T, kAdds, kRms>(p).run(p.rows * task / tasks, p.rows * (task + 1) / tasks); });
  return {};
}

template <class T>
Status run(const LayerNormParams& p, const ExecContext& context) {
  if (p.adds() || p.sum != nullptr) return p.rms ? run<T, true, true>(p, context) : run<T, true, false>(p, context);
  return p.rms ? run<T, false, true>(p, context) : run<T, false, false>(p, context);
}

}  // namespace

Status ORTPLUGINS_CPU_NAME(launch_layer_norm_cpu)(const LayerNormParams& p, const ExecContext& context) {
  if (p.rows == 0 || p.cols == 0) return {};
  return dispatch(p.dtype, [&](auto tag) { return run<typename decltype(tag)::type>(p, context); });
}

}  // namespace ortplugins
