// What the kernels for contiguous rows (inner == 1) are made of: a row seen as 16-byte packs, its mask, and the packs
// that a thread holds on their way from element to result.
//
// A row of any length and alignment is a run of whole packs on 16-byte boundaries and, at its two ends, up to two packs
// less two elements: the edge. Threads own packs i, i + threads, i + 2 threads, ...; of the edge each owns an element
// or two.
//
// With s = scale * x + mask, m = max(s): softmax is exp(s - m) / sum(exp(s - m)), its logarithm (s - m) - log(sum).
// Without a mask the maximum is found on the elements as they are stored, before any is converted, for a negative scale
// on the elements with the other sign: s = |scale| * -x.
//
// Elements of 16 bits cost as much arithmetic as those of 32 in half the time. Without a mask and a logarithm they go
// from element to exp(s - m) in one FMA and one exp2, both times that it is needed, so that only raw elements are kept:
// exp2(x * (|scale| log2(e)) - m log2(e)), and for the result the logarithm of the sum is in the second term. Rounding
// that term to float32 costs |m| 2^-24, which is nothing in 11 bits as long as m is not large.
#pragma once

#include "device/bulk_copy.h"
#include "device/cluster.h"
#include "device/pack.h"
#include "device/reduce.h"
#include "kernels/softmax/softmax.h"
#include "kernels/softmax/variants.h"

namespace ortplugins {

template <class T>
constexpr int kSoftmaxMostEdge = 2 * (kPackSize<T> - 1);

// One contiguous row. Index is int where the row is known to be short: it saves registers.
template <class T, class Index>
struct SoftmaxRow {
  static constexpr int kSize = kPackSize<T>;
  const T* x;  // element of column 0
  T* y;
  Index cols, packs;
  int head, edge;  // elements of the edge in front of the packs, and in all
  bool y_packed;   // the packs of y lie on boundaries, too

  __device__ __forceinline__ SoftmaxRow(const SoftmaxParams& p, int64_t row_idx)
      : x(static_cast<const T*>(p.x) + row_idx * p.cols),
        y(static_cast<T*>(p.y) + row_idx * p.cols),
        cols(static_cast<Index>(p.cols)) {
    const int to_boundary = (kSize - pack_shift(x)) % kSize;
    head = cols < to_boundary ? static_cast<int>(cols) : to_boundary;
    packs = (cols - head) / kSize;
    edge = static_cast<int>(cols - packs * kSize);
    y_packed = pack_shift(y + head) == 0;
  }
  __device__ __forceinline__ Index col_of_pack(Index pack_idx) const { return head + pack_idx * kSize; }
  __device__ __forceinline__ Index col_of_edge(int edge_idx) const {
    return edge_idx < head ? edge_idx : cols - edge + edge_idx;
  }
};

// Adds the mask to scores. Without kMasked there is none; with it there may be none.
template <class T, bool kMasked>
struct SoftmaxMask {
  __device__ __forceinline__ SoftmaxMask(const SoftmaxParams&, int64_t, int) {}
  __device__ __forceinline__ float apply(float score, int64_t) const { return score; }
};

template <class T>
struct SoftmaxMask<T, true> {
  const void* data;  // element of column 0
  DType dtype;
  bool packed;  // elements for a pack of x lie side by side on a boundary of their size
  int64_t col_stride;

  // `head`: column of the first pack.
  __device__ __forceinline__ SoftmaxMask(const SoftmaxParams& p, int64_t row_idx, int head)
      : data(nullptr), dtype(p.mask_dtype), packed(false), col_stride(p.mask_col_stride) {
    if (dtype == DType::kNone) return;
    const int size = dtype == DType::kBool ? 1 : static_cast<int>(sizeof(T));
    data = static_cast<const char*>(p.mask) + p.mask_row_offset(row_idx) * size;
    packed = col_stride == 1 &&
             (reinterpret_cast<uintptr_t>(data) + static_cast<unsigned>(head * size)) % (kPackSize<T> * size) == 0;
  }

  __device__ __forceinline__ float apply(float score, int64_t col) const {
    if (dtype == DType::kNone) return score;
    if (dtype == DType::kBool) return static_cast<const uint8_t*>(data)[col * col_stride] != 0 ? score : -INFINITY;
    return score + to_float(static_cast<const T*>(data)[col * col_stride]);
  }
  __device__ __forceinline__ void apply_pack(float (&score)[kPackSize<T>], int64_t col) const {
    if (packed && dtype == DType::kBool) {
      uint32_t keep[kPackSize<T> / 4];
      const auto* const words = reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(data) + col);
#pragma unroll
      for (int i = 0; i < kPackSize<T> / 4; ++i) keep[i] = __ldg(words + i);
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) {
        if ((keep[i / 4] >> 8 * (i % 4) & 0xff) == 0) score[i] = -INFINITY;
      }
    } else if (packed) {
      const Pack<T> mask = load_pack_readonly(static_cast<const T*>(data) + col);
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) score[i] += to_float(mask.v[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) score[i] = apply(score[i], col + i);
    }
  }
};

// From (s - m), or its exponential, to the result, once the sum of the row is known: value * factor + offset.
struct SoftmaxFinish {
  float factor, offset;
  float log2_sum;  // 0 for a fully masked row

  __device__ __forceinline__ SoftmaxFinish(float sum, bool log) {
    // A fully masked row has sum 0 and gives zeros; an infinite offset makes their logarithms -inf - inf = -inf.
    factor = log ? 1.0F : sum == 0.0F ? 0.0F : 1.0F / sum;
    offset = !log ? 0.0F : sum == 0.0F ? -INFINITY : -logf(sum);
    log2_sum = sum == 0.0F ? 0.0F : log2f(sum);
  }
  __device__ __forceinline__ float operator()(float value) const { return fmaf(value, factor, offset); }
  // For values that were taken relative to another maximum, `difference` above m; -inf if all of them are 0.
  __device__ __forceinline__ void rebase(float difference, bool log) {
    if (log) {
      offset += difference;
    } else {
      factor *= exp_approx(difference);
    }
  }
};

// kPacks packs of a thread, `step` packs apart. Positions count from the first of them; those from `left` on do not
// exist. Without kMasked these are filled with -inf, which needs no further guards: such kernels must not be given a
// scale of 0.
template <class T, int kPacks, bool kMasked, class Index>
struct SoftmaxBatch {
  static constexpr int kSize = kPackSize<T>;
  static constexpr bool kInPlace = sizeof(T) == 4;          // floats take the place of elements
  static constexpr bool kKeepsRaw = !kInPlace && !kMasked;  // floats are made anew whenever they are needed
  static constexpr float kMostForOneFma = 1024.0F;          // |m| log2(e)
  Index step, left;
  Pack<T> raw[kPacks];
  float converted[kInPlace || kKeepsRaw ? 1 : kPacks][kSize];

  __device__ __forceinline__ SoftmaxBatch(Index pack_step, Index packs_left) : step(pack_step), left(packs_left) {}
  __device__ __forceinline__ Index at(int i) const { return i * step; }
  __device__ __forceinline__ bool has(int i) const { return at(i) < left; }
  // A pack as floats: scores with a mask; then s - m or its exponential.
  __device__ __forceinline__ float (&floats(int i)) [kSize] {
    if constexpr (kInPlace) {
      return raw[i].v;
    } else {
      return converted[i];
    }
  }

  // load_one(position); all loads are under way before the first is used.
  template <class Load>
  __device__ __forceinline__ void load(const Load& load_one) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (!kMasked) raw[i] = filled_pack(from_float<T>(-INFINITY));
      if (has(i)) raw[i] = load_one(at(i));
    }
  }

  // Elements become those whose product with |scale| is wanted; with a mask, scores. `first_col`: of the first pack.
  __device__ __forceinline__ void score(const SoftmaxMask<T, kMasked>& mask, Index first_col, float scale) {
    if constexpr (kMasked) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (!has(i)) continue;
        float (&v)[kSize] = floats(i);
        unpack(raw[i], v);
#pragma unroll
        for (int j = 0; j < kSize; ++j) v[j] *= scale;
        if (mask.dtype != DType::kNone) mask.apply_pack(v, first_col + at(i) * kSize);
      }
    } else if (scale < 0.0F) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (has(i)) negate(raw[i]);
      }
    }
  }

  // Largest score; -inf without packs.
  __device__ __forceinline__ float max(float scale) {
    if constexpr (kMasked) {
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (!has(i)) continue;
#pragma unroll
        for (int j = 0; j < kSize; ++j) top = fmaxf(top, floats(i)[j]);
      }
      return top;
    } else {
      Pack<T> top = raw[0];
#pragma unroll
      for (int i = 1; i < kPacks; ++i) top = pack_max(top, raw[i]);
      return __fmul_rn(fabsf(scale), largest(top));
    }
  }

  // Sum of exp(s - reference). Floats that are kept become these, or s - reference for the logarithm.
  __device__ __forceinline__ float exponentials(float reference, float scale, bool log) {
    if constexpr (kKeepsRaw) {
      return takes_one_fma(reference, log) ? sum_of_raw<true>(reference, scale) : sum_of_raw<false>(reference, scale);
    } else {
      return log ? replace_floats<true>(reference, scale) : replace_floats<false>(reference, scale);
    }
  }

  // Writes the results; the first pack goes to `y`. `exponentials` came before, for the same reference.
  __device__ __forceinline__ void store(T* y, bool packed, float reference, float scale, bool log,
                                        const SoftmaxFinish& finish) {
    const float factor = fabsf(scale) * kLog2e, offset = -reference * kLog2e - finish.log2_sum;
    const bool one_fma = takes_one_fma(reference, log);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (!has(i)) continue;
      Pack<T> result;
      if constexpr (kKeepsRaw) {
        float v[kSize];
        unpack(raw[i], v);
        if (one_fma) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) v[j] = exp2_approx(fmaf(v[j], factor, offset));
        } else {
#pragma unroll
          for (int j = 0; j < kSize; ++j) {
            const float shifted = __fmul_rn(v[j], fabsf(scale)) - reference;
            v[j] = finish(log ? shifted : exp_approx(shifted));
          }
        }
        result = pack_floats<T>(v);
      } else {
        float (&v)[kSize] = floats(i);
#pragma unroll
        for (int j = 0; j < kSize; ++j) v[j] = finish(v[j]);
        result = pack_floats<T>(v);
      }
      T* const to = y + at(i) * kSize;
      if (packed) {
        store_pack_global(to, result);
      } else {
        store_pack_guarded(to, result, 0, kSize);
      }
    }
  }

 private:
  static __device__ __forceinline__ bool takes_one_fma(float reference, bool log) {
    return !log && fabsf(reference) * kLog2e < kMostForOneFma;
  }

  template <bool kOneFma>
  __device__ __forceinline__ float sum_of_raw(float reference, float scale) const {
    const float factor = fabsf(scale) * kLog2e, offset = -reference * kLog2e;
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float v[kSize], part[2] = {};
      unpack(raw[i], v);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        part[j % 2] +=
            kOneFma ? exp2_approx(fmaf(v[j], factor, offset)) : exp_approx(__fmul_rn(v[j], fabsf(scale)) - reference);
      }
      sum += part[0] + part[1];
    }
    return sum;
  }

  template <bool kLog>
  __device__ __forceinline__ float replace_floats(float reference, float scale) {
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (kMasked && !has(i)) continue;
      float (&v)[kSize] = floats(i);
      float part[2] = {};
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        // Not one FMA: equal elements shall give exactly 0, however large they are.
        const float shifted = (kMasked ? v[j] : __fmul_rn(v[j], fabsf(scale))) - reference;
        const float e = exp_approx(shifted);
        part[j % 2] += e;
        v[j] = kLog ? shifted : e;
      }
      sum += part[0] + part[1];
    }
    return sum;
  }
};

// Elements thread_idx, thread_idx + threads, ... of the edge: scores, -inf for those that do not exist.
template <class T, int kEdges>
struct SoftmaxEdge {
  float v[kEdges];

  template <class Index, bool kMasked>
  __device__ __forceinline__ void load(const SoftmaxRow<T, Index>& row, const SoftmaxMask<T, kMasked>& mask,
                                       int thread_idx, int threads, float scale) {
#pragma unroll
    for (int i = 0; i < kEdges; ++i) {
      v[i] = -INFINITY;
      if (thread_idx + i * threads < row.edge) {
        const Index col = row.col_of_edge(thread_idx + i * threads);
        v[i] = mask.apply(scale * to_float(row.x[col]), col);
      }
    }
  }
  __device__ __forceinline__ float max() const {
    float top = v[0];
#pragma unroll
    for (int i = 1; i < kEdges; ++i) top = fmaxf(top, v[i]);
    return top;
  }
  __device__ __forceinline__ float exponentials(float reference, bool log) {
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kEdges; ++i) {
      v[i] -= reference;
      const float e = exp_approx(v[i]);
      sum += e;
      if (!log) v[i] = e;
    }
    return sum;
  }
  template <class Index>
  __device__ __forceinline__ void store(const SoftmaxRow<T, Index>& row, int thread_idx, int threads,
                                        const SoftmaxFinish& finish) const {
#pragma unroll
    for (int i = 0; i < kEdges; ++i) {
      if (thread_idx + i * threads < row.edge)
        row.y[row.col_of_edge(thread_idx + i * threads)] = from_float<T>(finish(v[i]));
    }
  }
};

// The (maximum, sum) of each block of a cluster, in the shared memory of all of them: each block sends its own to all,
// and goes on when as many bytes have come, which takes no barrier of the cluster. Two sets, for a block may be a round
// ahead of another, though not two: it has had the other's message by then. A block ends after its last message has come.
struct ClusterStats {
  float2 of_blocks[2][kSoftmaxClusterBlocks];  // (parity of the round, block)
  uint64_t barriers[2];

  // Before a barrier of the cluster.
  __device__ __forceinline__ void init() {
    if (threadIdx.x < 2) mbarrier_init(smem_address(barriers + threadIdx.x), 1);
    fence_barrier_init();
  }
  // Of the row, for all threads. `of_block` is the same in all threads of a block.
  __device__ __forceinline__ MaxSum merge(const MaxSum& of_block, unsigned round, int rank, int blocks) {
    const int thread_idx = static_cast<int>(threadIdx.x), lane_idx = thread_idx % 32;
    const unsigned set = round % 2;
    const uint32_t barrier = smem_address(barriers + set);
    if (thread_idx < blocks) send_to_block(&of_blocks[set][rank].x, barrier, thread_idx, of_block.max, of_block.sum);
    if (thread_idx == 0) mbarrier_arrive_expect(barrier, blocks * static_cast<int>(sizeof(MaxSum)));
    mbarrier_wait(barrier, round / 2 % 2);
    const float2 of_lane = of_blocks[set][lane_idx < blocks ? lane_idx : 0];
    return warp_merge(lane_idx < blocks ? MaxSum{of_lane.x, of_lane.y} : MaxSum{});
  }
};

}  // namespace ortplugins
