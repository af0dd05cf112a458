// FusedSoftmax on the CPU.
//
// Along contiguous columns a row is a run of vectors: its scores (scale * x + mask) and then its exponentials lie in y
// itself where y is float, else in a buffer in L1. A longer row goes block by block, with a running maximum and sum.
// Float blocks are rescaled at the end by what the maximum has grown since; of other types x is read again.
//
// Along any other axis the lanes of a vector are different rows. With at least kWidth of them side by side (inner), a
// step is one column of 4 or 1 vectors of rows. With fewer, a step takes as many whole columns as fit into a vector;
// the lanes of one row are brought together after the last step.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "device/cpu_isa.h"
#include "device/cpu_simd.h"
#include "kernels/softmax/variants.h"

namespace ortplugins {
namespace {

using simd::Float;
using simd::Int;
using simd::kInfinity;
using simd::kWidth;
using simd::load_lanes;
using simd::store_lanes;

constexpr int64_t kBufferCols = 4096;  // 16 KiB: half of the smallest L1
constexpr int64_t kBlockCols = 2048;   // of a longer row; also the longest single sum
constexpr int64_t kMaxBlocks = 512;    // of a float row; beyond a million columns blocks are longer
// Short rows go in groups, of at most this many columns together: x and y then stay in L1 between the steps.
constexpr int64_t kGroupRows = 8, kGroupCols = 1024;
constexpr int kRegisterVecs = 8;  // rows of seven to eight vectors stay in registers: 128 columns with AVX-512
constexpr int64_t kTaskElements = 16384;  // about 10 us, several times the cost of handing out a task
constexpr int64_t kTasksPerCore = 4;      // more break up the streams through memory: 32 tasks for two cores cost up to 15 %
enum class Mask : uint8_t { kNone, kAdditive, kBool };

template <class T, Mask kMask>
using MaskElement = std::conditional_t<kMask == Mask::kBool, bool, T>;

// scale * x with the mask elements at `mask`, which are the same for all lanes where `uniform`.
template <Mask kMask, class T>
ORTPLUGINS_SIMD Float score(Float x, Float scale, const MaskElement<T, kMask>* mask, bool uniform, int64_t n) {
  if constexpr (kMask == Mask::kAdditive) {
    return simd::fma(x, scale, uniform ? simd::broadcast(simd::load_scalar(mask)) : load_lanes(mask, n));
  } else if constexpr (kMask == Mask::kBool) {
    const Int visible = uniform ? Int{} - static_cast<int32_t>(*mask) : simd::load_bool(mask, n);
    return visible ? x * scale : simd::broadcast(-kInfinity);
  } else {
    return x * scale;
  }
}

// What is subtracted from the scores of a row with maximum m: a row of nothing but -inf (and NaN) must not become NaN.
float shift_of(float m) { return m == -kInfinity ? 0.0F : m; }

// Factor on the exponentials: 0 for a fully masked row.
float factor_of(float m, float sum) { return m == -kInfinity && sum == 0.0F ? 0.0F : 1.0F / sum; }

// What is subtracted from a shifted score to give its logarithm.
float log_sum_of(float m, float sum) { return m == -kInfinity && sum == 0.0F ? 0.0F : std::log(sum); }

// --- Rows of contiguous columns
// ----------------------------------------------------------------------------------------

// kScaled: scores are not simply x; where they are, both passes over x do without the multiplication.
template <class T, Mask kMask, bool kScaled>
class ContiguousRows {
 public:
  explicit ContiguousRows(const SoftmaxParams& p) : p_(p), scale_(simd::broadcast(p.scale)) {}

  void run(int64_t first_row, int64_t end_row) {
    const int64_t fit = kGroupCols / p_.cols;
    const int64_t group = fit > kGroupRows ? kGroupRows : fit < 1 ? 1 : fit;
    if (!p_.log && p_.cols > (kRegisterVecs - 1) * kWidth && p_.cols <= kRegisterVecs * kWidth) {
      for (int64_t row = first_row; row < end_row; ++row) register_row(row);
      return;
    }
    for (int64_t row = first_row; row < end_row; row += group) {
      if (p_.cols <= (kInPlace ? kBlockCols : kBufferCols)) {
        short_rows(row, end_row - row < group ? end_row - row : group);
      } else {
        long_row(row);
      }
    }
  }

 private:
  using Element = MaskElement<T, kMask>;
  static constexpr bool kInPlace = sizeof(T) == sizeof(float);
  // Reading float x again is cheaper than writing its scores.
  static constexpr bool kRecompute = kInPlace && kMask == Mask::kNone;

  const T* x_of(int64_t row) const { return static_cast<const T*>(p_.x) + row * p_.cols; }
  T* y_of(int64_t row) const { return static_cast<T*>(p_.y) + row * p_.cols; }
  const Element* mask_of(int64_t row) const {
    if constexpr (kMask == Mask::kNone) return nullptr;
    return static_cast<const Element*>(p_.mask) + p_.mask_row_offset(row);
  }
  // Where the scores of row i of a group that starts at `row` lie.
  float* scratch_of(int64_t row, int64_t i) {
    if constexpr (kInPlace) {
      return y_of(row + i);
    } else {
      return buffer_ + i * p_.cols;
    }
  }

  Float score_at(const T* x, const Element* mask, int64_t c, int64_t n) const {
    if constexpr (!kScaled) return load_lanes(x + c, n);
    return score<kMask, T>(load_lanes(x + c, n), scale_, mask + c * p_.mask_col_stride, p_.mask_col_stride == 0, n);
  }

  // Maximum of the scores of n columns, which go to `out` where `kStore`.
  template <bool kStore>
  float scores(const T* x, const Element* mask, int64_t n, float* out) const {
    Float m[4];
    for (Float& v : m) v = simd::broadcast(-kInfinity);
    int64_t c = 0;
    for (; c + 4 * kWidth <= n; c += 4 * kWidth) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) {
        const Float v = score_at(x, mask, c + u * kWidth, kWidth);
        m[u] = simd::max(m[u], v);
        if constexpr (kStore) simd::store(out + c + u * kWidth, v);
      }
    }
    for (; c < n; c += kWidth) {
      const int64_t lanes = n - c < kWidth ? n - c : kWidth;
      const Float s = score_at(x, mask, c, lanes);
      const Float v = simd::lane_mask(lanes) ? s : simd::broadcast(-kInfinity);
      m[0] = simd::max(m[0], v);
      if constexpr (kStore) store_lanes(out + c, s, lanes);
    }
    return simd::reduce_max(simd::max(simd::max(m[0], m[1]), simd::max(m[2], m[3])));
  }

  // Sum of e^(score - shift) of n columns, from x or from scores that lie in `out`; where `kStore` the exponentials go
  // there, too.
  template <bool kFromX, bool kStore>
  float exponentials(const T* x, const Element* mask, int64_t n, float shift, float* out) const {
    const Float shifts = simd::broadcast(shift);
    const auto step = [&](int64_t c, int64_t lanes, Float& total) {
      Float v = kFromX ? score_at(x, mask, c, lanes) : load_lanes(out + c, lanes);
      if (lanes < kWidth) v = simd::lane_mask(lanes) ? v : simd::broadcast(-kInfinity);
      const Float e = simd::exp_nonpositive(v - shifts);
      total += e;
      if constexpr (kStore) store_lanes(out + c, e, lanes);
    };
    float total = 0.0F;
    for (int64_t begin = 0; begin < n; begin += kBlockCols) {  // one long sum would lose a digit
      const int64_t end = begin + kBlockCols < n ? begin + kBlockCols : n;
      Float sum[2] = {simd::zero(), simd::zero()};
      int64_t c = begin;
      for (; c + 2 * kWidth <= end; c += 2 * kWidth) {
        step(c, kWidth, sum[0]);
        step(c + kWidth, kWidth, sum[1]);
      }
      for (; c < end; c += kWidth) step(c, end - c < kWidth ? end - c : kWidth, sum[0]);
      total += simd::reduce_sum(sum[0] + sum[1]);
    }
    return total;
  }

  // y[c] = value(c, lanes) for c < n.
  template <class Value>
  void write(T* y, int64_t n, const Value& value) const {
    int64_t c = 0;
    for (; c + kWidth <= n; c += kWidth) simd::store(y + c, value(c, kWidth));
    if (c < n) simd::store_tail(y + c, value(c, n - c), n - c);
  }

  // A row that fits in registers is read once and written once.
  void register_row(int64_t row) {
    const T* x = x_of(row);
    const Element* mask = mask_of(row);
    const int64_t last = p_.cols - (kRegisterVecs - 1) * kWidth;  // lanes of the last vector
    Float e[kRegisterVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kRegisterVecs; ++v) {
      const int64_t lanes = v + 1 < kRegisterVecs ? kWidth : last;
      e[v] = score_at(x, mask, v * kWidth, lanes);
      if (v + 1 == kRegisterVecs && lanes < kWidth) e[v] = simd::lane_mask(lanes) ? e[v] : simd::broadcast(-kInfinity);
    }
    const float m = simd::reduce_max(max_of(e));
    const Float shift = simd::broadcast(shift_of(m));
    Float sum[2] = {simd::zero(), simd::zero()};
#pragma GCC unroll 8
    for (int v = 0; v < kRegisterVecs; ++v) {
      e[v] = simd::exp_nonpositive(e[v] - shift);
      sum[v % 2] += e[v];
    }
    const Float factor = simd::broadcast(factor_of(m, simd::reduce_sum(sum[0] + sum[1])));
    T* y = y_of(row);
#pragma GCC unroll 8
    for (int v = 0; v + 1 < kRegisterVecs; ++v) simd::store(y + v * kWidth, e[v] * factor);
    store_lanes(y + (kRegisterVecs - 1) * kWidth, e[kRegisterVecs - 1] * factor, last);
  }

  static Float max_of(const Float (&v)[kRegisterVecs]) {
    Float m[2] = {v[0], v[1]};
#pragma GCC unroll 8
    for (int i = 2; i < kRegisterVecs; ++i) m[i % 2] = simd::max(m[i % 2], v[i]);
    return simd::max(m[0], m[1]);
  }

  // Each step is done for all rows of a group before the next, so that the end of one row's maximum or sum, a chain of
  // dependent instructions, overlaps with other rows.
  void short_rows(int64_t row, int64_t count) {
    float m[kGroupRows], sum[kGroupRows];
    for (int64_t i = 0; i < count; ++i)
      m[i] = scores<!kRecompute>(x_of(row + i), mask_of(row + i), p_.cols, scratch_of(row, i));
    for (int64_t i = 0; i < count; ++i) {
      const T* x = x_of(row + i);
      const Element* mask = mask_of(row + i);
      float* scratch = scratch_of(row, i);
      sum[i] = p_.log ? exponentials<kRecompute, false>(x, mask, p_.cols, shift_of(m[i]), scratch)
                      : exponentials<kRecompute, true>(x, mask, p_.cols, shift_of(m[i]), scratch);
    }
    for (int64_t i = 0; i < count; ++i) {
      const float* scratch = scratch_of(row, i);
      if (p_.log) {
        const T* x = x_of(row + i);
        const Element* mask = mask_of(row + i);
        const Float shift = simd::broadcast(shift_of(m[i])), log_sum = simd::broadcast(log_sum_of(m[i], sum[i]));
        write(y_of(row + i), p_.cols, [&](int64_t c, int64_t lanes) {
          const Float v = kRecompute ? score_at(x, mask, c, lanes) : load_lanes(scratch + c, lanes);
          return (v - shift) - log_sum;
        });
      } else {
        const Float factor = simd::broadcast(factor_of(m[i], sum[i]));
        write(y_of(row + i), p_.cols,
              [&](int64_t c, int64_t lanes) { return load_lanes(scratch + c, lanes) * factor; });
      }
    }
  }

  void long_row(int64_t row) {
    const T* x = x_of(row);
    const Element* mask = mask_of(row);
    T* y = y_of(row);
    const int64_t least = (p_.cols + kMaxBlocks - 1) / kMaxBlocks;
    const int64_t block = kInPlace && least > kBlockCols ? (least + kWidth - 1) / kWidth * kWidth : kBlockCols;
    float block_m[kMaxBlocks];  // the maximum when the exponentials of the block were made
    float m = -kInfinity, sum = 0.0F;
    for (int64_t c = 0; c < p_.cols; c += block) {
      const int64_t n = p_.cols - c < block ? p_.cols - c : block;
      const Element* mask_c = mask + c * p_.mask_col_stride;
      float* scratch = buffer_;
      if constexpr (kInPlace) scratch = y + c;
      const float old_m = m, new_m = scores<!kRecompute>(x + c, mask_c, n, scratch);
      m = new_m > m ? new_m : m;
      const float shift = shift_of(m);
      const float block_sum = kInPlace && !p_.log ? exponentials<kRecompute, true>(x + c, mask_c, n, shift, scratch)
                                                  : exponentials<kRecompute, false>(x + c, mask_c, n, shift, scratch);
      sum = sum * std::exp(old_m - shift) + block_sum;
      if constexpr (kInPlace) block_m[c / block] = m;
    }
    const Float shift = simd::broadcast(shift_of(m));
    if (p_.log) {
      const Float log_sum = simd::broadcast(log_sum_of(m, sum));
      write(y, p_.cols, [&](int64_t c, int64_t lanes) {
        if constexpr (kInPlace && !kRecompute) return (load_lanes(y + c, lanes) - shift) - log_sum;
        return (score_at(x, mask, c, lanes) - shift) - log_sum;
      });
    } else if constexpr (kInPlace) {
      for (int64_t c = 0; c < p_.cols; c += block) {
        const float then = block_m[c / block];
        const float growth =
            then == m || then == -kInfinity ? 1.0F : std::exp(then - m);  // nothing but zeros before -inf
        const Float factor = simd::broadcast(factor_of(m, sum) * growth);
        const int64_t n = p_.cols - c < block ? p_.cols - c : block;
        write(y + c, n, [&](int64_t i, int64_t lanes) { return load_lanes(y + c + i, lanes) * factor; });
      }
    } else {
      const Float factor = simd::broadcast(factor_of(m, sum));
      write(y, p_.cols, [&](int64_t c, int64_t lanes) {
        return simd::exp_nonpositive(score_at(x, mask, c, lanes) - shift) * factor;
      });
    }
  }

  const SoftmaxParams& p_;
  const Float scale_;
  alignas(64) float buffer_[kInPlace ? 1 : kBufferCols];
};

// --- Rows side by side
// ---------------------------------------------------------------------------------------------------

// kVectors vectors of lanes that walk together in steps along the axis. Lane i starts at x[i] and advances by `stride`;
// in the last of the `steps` only `last_lanes` lanes are left. Lanes whose numbers differ by a multiple of `period`
// belong to one row.
template <class T, Mask kMask, int kVectors>
class Lanes {
 public:
  using Element = MaskElement<T, kMask>;

  const T* x;
  T* y;
  int64_t lanes, last_lanes, steps, stride, period;
  const Element* mask = nullptr;
  int64_t mask_offset[kVectors * kWidth] = {};
  int64_t mask_stride = 0;

  void run(const SoftmaxParams& p) {
    scale_ = simd::broadcast(p.scale);
    if constexpr (kMask != Mask::kNone) inspect_mask();

    Float m[kVectors], sum[kVectors], part[kVectors];
    for (int v = 0; v < kVectors; ++v) m[v] = simd::broadcast(-kInfinity), sum[v] = part[v] = simd::zero();
    for_each([&](int64_t step, int v, int64_t n) {
      const Float s = score_at(step, v, n);
      m[v] = simd::max(m[v], n == kWidth ? s : simd::lane_mask(n) ? s : simd::broadcast(-kInfinity));
    });
    if (period < lanes) fold(m[0], [](float a, float b) { return a > b ? a : b; });

    Float shift[kVectors];
    for (int v = 0; v < kVectors; ++v) shift[v] = m[v] == -kInfinity ? simd::zero() : m[v];
    for_each([&](int64_t step, int v, int64_t n) {
      const Float e = simd::exp_nonpositive(score_at(step, v, n) - shift[v]);
      part[v] += n == kWidth ? e : simd::lane_mask(n) ? e : simd::zero();
      if (step % 64 == 63) {  // one long sum would lose a digit on thousands of columns
        sum[v] += part[v];
        part[v] = simd::zero();
      }
    });
    for (int v = 0; v < kVectors; ++v) sum[v] += part[v];
    if (period < lanes) fold(sum[0], [](float a, float b) { return a + b; });

    Float last[kVectors];  // log of the sum, or the factor
    for (int v = 0; v < kVectors; ++v) {
      for (int i = 0; i < kWidth; ++i)
        last[v][i] = p.log ? log_sum_of(m[v][i], sum[v][i]) : factor_of(m[v][i], sum[v][i]);
    }
    if (p.log) {
      for_each([&](int64_t step, int v, int64_t n) {
        store_lanes(y + step * stride + v * kWidth, (score_at(step, v, n) - shift[v]) - last[v], n);
      });
    } else {
      for_each([&](int64_t step, int v, int64_t n) {
        store_lanes(y + step * stride + v * kWidth, simd::exp_nonpositive(score_at(step, v, n) - shift[v]) * last[v],
                    n);
      });
    }
  }

 private:
  template <class Body>
  ORTPLUGINS_SIMD void for_each(const Body& body) const {
    const int64_t whole_steps = lanes == kVectors * kWidth ? steps - (last_lanes < lanes ? 1 : 0) : 0;
    for (int64_t step = 0; step < whole_steps; ++step) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) body(step, v, int64_t{kWidth});
    }
    for (int64_t step = whole_steps; step < steps; ++step)
      body(step, 0, step + 1 < steps ? lanes : last_lanes);  // kVectors is 1
  }

  // Brings the lanes of each row together and gives all of them the result.
  template <class Combine>
  void fold(Float& values, const Combine& combine) const {
    float lane[kWidth];
    simd::store(lane, values);
    for (int64_t i = period; i < lanes; ++i) lane[i % period] = combine(lane[i % period], lane[i]);
    for (int64_t i = period; i < lanes; ++i) lane[i] = lane[i % period];
    values = simd::load(lane);
  }

  void inspect_mask() {
    uniform_ = contiguous_ = true;
    for (int64_t i = 1; i < lanes; ++i) {
      uniform_ &= mask_offset[i] == mask_offset[0];
      contiguous_ &= mask_offset[i] == mask_offset[0] + i;
    }
  }

  ORTPLUGINS_SIMD Float score_at(int64_t step, int v, int64_t n) const {
    const Float values = load_lanes(x + step * stride + v * kWidth, n);
    if constexpr (kMask == Mask::kNone) return values * scale_;
    const Element* at = mask + step * mask_stride;
    if (uniform_) return score<kMask, T>(values, scale_, at + mask_offset[0], true, n);
    if (contiguous_) return score<kMask, T>(values, scale_, at + mask_offset[0] + v * kWidth, false, n);
    Element gathered[kWidth] = {};
    for (int64_t i = 0; i < n; ++i) gathered[i] = at[mask_offset[v * kWidth + i]];
    return score<kMask, T>(values, scale_, gathered, false, n);
  }

  Float scale_;
  bool uniform_ = false, contiguous_ = false;
};

template <class T, Mask kMask>
class StridedRows {
 public:
  explicit StridedRows(const SoftmaxParams& p)
      : p_(p), wide_(p.inner >= kWidth), units_per_slice_(wide_ ? (p.inner + kLanes - 1) / kLanes : 1) {}

  // A unit is up to kLanes rows of one outer index.
  int64_t units() const { return p_.rows / p_.inner * units_per_slice_; }

  void run(int64_t first_unit, int64_t end_unit) const {
    for (int64_t unit = first_unit; unit < end_unit; ++unit) {
      const int64_t slice = unit / units_per_slice_;
      if (!wide_) {
        narrow(slice);
        continue;
      }
      const int64_t begin = unit % units_per_slice_ * kLanes;
      const int64_t end = begin + kLanes < p_.inner ? begin + kLanes : p_.inner;
      if (end - begin == kLanes) {
        columns<kVectors>(slice, begin, kLanes);
      } else {
        for (int64_t i = begin; i < end; i += kWidth) columns<1>(slice, i, end - i < kWidth ? end - i : kWidth);
      }
    }
  }

 private:
  static constexpr int kVectors = 4;
  static constexpr int64_t kLanes = kVectors * kWidth;

  template <int kCount>
  Lanes<T, kMask, kCount> lanes_at(int64_t slice, int64_t i) const {
    Lanes<T, kMask, kCount> unit;
    const int64_t offset = slice * p_.cols * p_.inner + i;
    unit.x = static_cast<const T*>(p_.x) + offset;
    unit.y = static_cast<T*>(p_.y) + offset;
    unit.mask = static_cast<const MaskElement<T, kMask>*>(p_.mask);
    return unit;
  }

  // Rows [i, i + n) of a slice, one column in a step.
  template <int kCount>
  void columns(int64_t slice, int64_t i, int64_t n) const {
    auto unit = lanes_at<kCount>(slice, i);
    unit.lanes = unit.last_lanes = unit.period = n;
    unit.steps = p_.cols;
    unit.stride = p_.inner;
    if constexpr (kMask != Mask::kNone) {
      for (int64_t lane = 0; lane < n; ++lane) unit.mask_offset[lane] = p_.mask_row_offset(slice * p_.inner + i + lane);
      unit.mask_stride = p_.mask_col_stride;
    }
    unit.run(p_);
  }

  // All rows of a slice, as many columns in a step as fit.
  void narrow(int64_t slice) const {
    auto unit = lanes_at<1>(slice, 0);
    const int64_t fit = kWidth / p_.inner, cols_per_step = fit < p_.cols ? fit : p_.cols;
    unit.period = p_.inner;
    unit.lanes = unit.stride = cols_per_step * p_.inner;
    unit.steps = (p_.cols + cols_per_step - 1) / cols_per_step;
    unit.last_lanes = (p_.cols - (unit.steps - 1) * cols_per_step) * p_.inner;
    if constexpr (kMask != Mask::kNone) {
      for (int64_t lane = 0; lane < unit.lanes; ++lane) {
        unit.mask_offset[lane] =
            p_.mask_row_offset(slice * p_.inner + lane % p_.inner) + lane / p_.inner * p_.mask_col_stride;
      }
      unit.mask_stride = cols_per_step * p_.mask_col_stride;
    }
    unit.run(p_);
  }

  const SoftmaxParams& p_;
  const bool wide_;
  const int64_t units_per_slice_;
};

// Hands out [0, count) in pieces of similar size.
template <class Body>
void parallel_ranges(const ExecContext& context, const SoftmaxParams& p, int64_t count, const Body& body) {
  int64_t tasks = p.rows * p.cols / kTaskElements;
  const int64_t most = kTasksPerCore * context.device->cores;
  tasks = tasks > most ? most : tasks;
  tasks = tasks > count ? count : tasks < 1 ? 1 : tasks;
  context.pool.parallel_for(tasks, [&](int64_t task) { body(count * task / tasks, count * (task + 1) / tasks); });
}

template <class T, Mask kMask>
Status run(const SoftmaxParams& p, const ExecContext& context) {
  if (p.inner == 1) {
    parallel_ranges(context, p, p.rows,
                    [&](int64_t begin, int64_t end) {
                      if (kMask == Mask::kNone && p.scale == 1.0F) {
                        ContiguousRows<T, kMask, kMask != Mask::kNone>(p).run(begin, end);
                      } else {
                        ContiguousRows<T, kMask, true>(p).run(begin, end);
                      }
                    });
  } else {
    const StridedRows<T, kMask> rows(p);
    parallel_ranges(context, p, rows.units(), [&](int64_t begin, int64_t end) { rows.run(begin, end); });
  }
  return {};
}

template <class T>
Status run(const SoftmaxParams& p, const ExecContext& context) {
  if (p.mask_dtype == DType::kNone) return run<T, Mask::kNone>(p, context);
  if (p.mask_dtype == DType::kBool) return run<T, Mask::kBool>(p, context);
  return run<T, Mask::kAdditive>(p, context);
}

}  // namespace

Status ORTPLUGINS_CPU_NAME(launch_softmax_cpu)(const SoftmaxParams& p, const ExecContext& context) {
  if (p.rows == 0 || p.cols == 0) return {};
  return dispatch(p.dtype, [&](auto tag) { return run<typename decltype(tag)::type>(p, context); });
}

}  // namespace ortplugins
