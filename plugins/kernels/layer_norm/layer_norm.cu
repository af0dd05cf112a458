// LayerNorm and RMSNorm of rows on CUDA, from one warp for a row to one block for a row of any length.
//
// A row is walked in 16-byte packs counted from the 16-byte boundary at or below its first element of x, so that rows
// of any length and alignment are read with full-width accesses; the first and the last pack are guarded. Tensors that
// lie otherwise than x are accessed element by element. Of the threads that share a row, thread i owns packs i,
// i + threads, i + 2 threads, ...
//
//   warp_per_row     8 or 32 lanes hold a row in registers; x is read once, no barrier
//   block_registers  a block holds a row in registers; x is read once; aligned rows only
//   block_shared     a block keeps the row in shared memory; x is read once
//   block_reread     a block reads the row three times, of which the caches serve the last two
//
// Aligned rows of 16-bit elements are in most cases faster yet with layer_norm_ring.cu.
//
// The row is kept as packs of the element type: s is rounded to it anyway. Statistics are float32. The mean is found as
// that of s - pivot, where the pivot is the first element of the row: the difference of numbers close to each other is
// exact, so that a large mean costs no accuracy, and a row of equal values has deviations of exactly 0. The variance
// takes a second pass over the kept row, for E[s^2] - E[s]^2 would cancel.
#include "core/device.h"
#include "device/dependent_launch.h"
#include "device/dispatch.h"
#include "device/pack.h"
#include "device/reduce.h"
#include "kernels/layer_norm/variants.h"

namespace ortplugins {
namespace {

constexpr int kWarpRowThreads = 256;
constexpr int kBlockRowThreads = 512;

// Elements [begin, end) of a pack, in one access where it is whole and aligned, as kAligned says of all; the others are
// 0.
template <bool kAligned, class T>
__device__ __forceinline__ Pack<T> load_part(const T* p, int begin, int end) {
  if (kAligned || (end - begin == kPackSize<T> && pack_shift(p) == 0)) return load_pack_readonly(p);
  return load_pack_guarded(p, begin, end, from_float<T>(0.0F));
}
template <bool kAligned, class T>
__device__ __forceinline__ void store_part(T* p, const Pack<T>& pack, int begin, int end) {
  if (kAligned || (end - begin == kPackSize<T> && pack_shift(p) == 0)) {
    store_pack_global(p, pack);
  } else {
    store_pack_guarded(p, pack, begin, end);
  }
}

// One row, seen as packs. Index is int where the row is known to be short: it saves registers. So does kAligned, some
// 30 of them: rows are whole packs and all tensors lie on pack boundaries.
template <class T, class Index, bool kAligned>
struct NormRow {
  static constexpr int kSize = kPackSize<T>;
  const LayerNormParams& p;
  int64_t offset, residual_offset;  // of the row's first element
  Index cols;
  int shift;  // elements by which the row of x lies past a pack boundary
  float pivot;

  __device__ __forceinline__ NormRow(const LayerNormParams& params, int64_t row)
      : p(params),
        offset(row * params.cols),
        residual_offset(params.residual == nullptr ? 0 : params.residual_row(row) * params.cols),
        cols(static_cast<Index>(params.cols)),
        shift(kAligned ? 0 : pack_shift(static_cast<const T*>(params.x) + offset)),
        pivot(0.0F) {
    if (p.rms) return;
    pivot = to_float(static_cast<const T*>(p.x)[offset]);
    if (p.bias != nullptr) pivot += to_float(static_cast<const T*>(p.bias)[0]);
    if (p.residual != nullptr) pivot += to_float(static_cast<const T*>(p.residual)[residual_offset]);
    pivot = to_float(from_float<T>(pivot));
  }

  __device__ __forceinline__ Index packs() const { return (cols + shift + kSize - 1) / kSize; }
  __device__ __forceinline__ Index first_col(Index pack_idx) const { return pack_idx * kSize - shift; }
  // Elements [begin, end) of the pack that starts at column `first` belong to the row; none from the last column on.
  __device__ __forceinline__ int begin(Index first) const {
    return !kAligned && first < 0 ? static_cast<int>(-first) : 0;
  }
  __device__ __forceinline__ int end(Index first) const {
    const Index rest = cols - first;
    if (kAligned) return rest > 0 ? kSize : 0;
    return rest >= kSize ? kSize : rest <= 0 ? 0 : static_cast<int>(rest);
  }

  // The pack of a tensor whose row starts at element `start`.
  __device__ __forceinline__ Pack<T> load(const void* tensor, int64_t start, Index pack_idx) const {
    const Index first = first_col(pack_idx);
    return load_part<kAligned>(static_cast<const T*>(tensor) + (start + first), begin(first), end(first));
  }
  __device__ __forceinline__ void store(void* tensor, const Pack<T>& pack, Index pack_idx) const {
    const Index first = first_col(pack_idx);
    store_part<kAligned>(static_cast<T*>(tensor) + (offset + first), pack, begin(first), end(first));
  }

  // x becomes s; `residual` is looked at only if there is one.
  __device__ __forceinline__ void add(Pack<T>& x, const Pack<T>& residual, Index pack_idx) const {
    if (p.bias == nullptr) {
      x = pack_add(x, residual);
      return;
    }
    float s[kSize], v[kSize];
    unpack(x, s);
    unpack(load(p.bias, 0, pack_idx), v);
#pragma unroll
    for (int i = 0; i < kSize; ++i) s[i] += v[i];
    if (p.residual != nullptr) {
      unpack(residual, v);
#pragma unroll
      for (int i = 0; i < kSize; ++i) s[i] += v[i];
    }
    x = pack_floats<T>(s);
  }

  // Sum of term(s) over the elements that belong to the row.
  template <class Term>
  __device__ __forceinline__ float accumulate(const Pack<T>& s, Index pack_idx, const Term& term) const {
    const Index first = first_col(pack_idx);
    const int from = begin(first), to = end(first);
    if (kAligned && to == 0) return 0.0F;
    float v[kSize], total[2] = {};
    unpack(s, v);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (kAligned || (i >= from && i < to)) total[i % 2] += term(v[i]);
    }
    return total[0] + total[1];
  }

  // What the packs of y are made with; gamma and beta are looked at only if there are such.
  __device__ __forceinline__ void load_affine(Pack<T>* gamma, Pack<T>* beta, Index pack_idx) const {
    if (p.gamma != nullptr) *gamma = load(p.gamma, 0, pack_idx);
    if (p.beta != nullptr) *beta = load(p.beta, 0, pack_idx);
  }
  // Writes y of a pack.
  __device__ __forceinline__ void normalize(const Pack<T>& s, const Pack<T>& gamma, const Pack<T>& beta, Index pack_idx,
                                            const SplitMean& mean, float rstd) const {
    float v[kSize], g[kSize], b[kSize];
    const float offset = -mean.low * rstd;
    unpack(s, v);
    if (p.gamma != nullptr) unpack(gamma, g);
    if (p.beta != nullptr) unpack(beta, b);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      v[i] = fmaf(v[i] - mean.high, rstd, offset);
      if (p.gamma != nullptr && p.beta != nullptr) {
        v[i] = fmaf(v[i], g[i], b[i]);
      } else if (p.gamma != nullptr) {
        v[i] *= g[i];
      } else if (p.beta != nullptr) {
        v[i] += b[i];
      }
    }
    store(p.y, pack_floats<T>(v), pack_idx);
  }

  // From the sum of s - pivot.
  __device__ __forceinline__ SplitMean mean(float sum) const {
    return SplitMean::of(pivot, sum / static_cast<float>(p.cols));
  }
  // From the sum of (s - mean.high)^2: the mean of the squared deviations is smaller by mean.low^2.
  __device__ __forceinline__ float rstd(float square_sum, const SplitMean& mean) const {
    const float variance = square_sum / static_cast<float>(p.cols) - mean.low * mean.low;
    return 1.0F / sqrtf((variance < 0.0F ? 0.0F : variance) + p.epsilon);
  }
};

struct Deviation {
  float pivot;
  __device__ __forceinline__ float operator()(float s) const { return s - pivot; }
};
struct SquaredDeviation {
  float mean;
  __device__ __forceinline__ float operator()(float s) const { return (s - mean) * (s - mean); }
};

// --- A row in registers ----------------------------------------------------------------------------------------------

// kResidualPacks: under way at once, a divisor of kPacks.
template <class T, int kPacks, bool kAligned, int kResidualPacks>
struct RegisterRow {
  using Row = NormRow<T, int, kAligned>;
  // Of gamma and beta; if these are all, they are read ahead, with x.
  static constexpr int kAffinePacks = kPacks <= 2 ? kPacks : 1;
  static constexpr bool kReadsAhead = kAffinePacks == kPacks;
  Pack<T> s[kPacks];
  Pack<T> gamma[kAffinePacks], beta[kAffinePacks];

  __device__ __forceinline__ void load_affine(const Row& row, int thread_idx, int threads, int base) {
    const int packs = row.packs();
#pragma unroll
    for (int i = 0; i < kAffinePacks; ++i) {
      const int pack_idx = thread_idx + (base + i) * threads;
      if (pack_idx < packs) row.load_affine(&gamma[i], &beta[i], pack_idx);
    }
  }

  // Reads this thread's packs and writes their part of `sum`.
  __device__ __forceinline__ void load(const Row& row, int thread_idx, int threads) {
    const int packs = row.packs();
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {  // all loads are under way before the first is used
      const int pack_idx = thread_idx + i * threads;
      if (pack_idx < packs) s[i] = row.load(row.p.x, row.offset, pack_idx);
    }
    if (kReadsAhead) load_affine(row, thread_idx, threads, 0);
    if (row.p.adds()) {
#pragma unroll
      for (int base = 0; base < kPacks; base += kResidualPacks) {
        Pack<T> residual[kResidualPacks];
#pragma unroll
        for (int i = 0; i < kResidualPacks; ++i) {
          const int pack_idx = thread_idx + (base + i) * threads;
          if (row.p.residual != nullptr && pack_idx < packs) {
            residual[i] = row.load(row.p.residual, row.residual_offset, pack_idx);
          }
        }
#pragma unroll
        for (int i = 0; i < kResidualPacks; ++i) {
          const int pack_idx = thread_idx + (base + i) * threads;
          if (pack_idx < packs) row.add(s[base + i], residual[i], pack_idx);
        }
      }
    }
    if (row.p.sum != nullptr) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const int pack_idx = thread_idx + i * threads;
        if (pack_idx < packs) row.store(row.p.sum, s[i], pack_idx);
      }
    }
  }

  template <class Term>
  __device__ __forceinline__ float accumulate(const Row& row, int thread_idx, int threads, const Term& term) const {
    float total = 0.0F;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) total += row.accumulate(s[i], thread_idx + i * threads, term);
    return total;
  }
  // Elements of 16 bits are converted each time that they are used: as floats they would take twice the registers.
  __device__ __forceinline__ void forget_floats() {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) forget(s[i]);
    }
  }

  __device__ __forceinline__ void normalize(const Row& row, int thread_idx, int threads, const SplitMean& mean,
                                            float square_sum) {
    const float rstd = row.rstd(square_sum, mean);
    const int packs = row.packs();
#pragma unroll
    for (int base = 0; base < kPacks; base += kAffinePacks) {
      if (!kReadsAhead) load_affine(row, thread_idx, threads, base);
#pragma unroll
      for (int i = 0; i < kAffinePacks; ++i) {
        const int pack_idx = thread_idx + (base + i) * threads;
        if (pack_idx < packs) row.normalize(s[base + i], gamma[i], beta[i], pack_idx, mean, rstd);
      }
    }
  }
};

// Neither of these kernels loops over rows: the addresses of gamma, beta and bias would stay in registers meanwhile, up
// to 30 of them.

template <class T, int kLanes, int kPacks, bool kAligned>
__global__ void __launch_bounds__(kWarpRowThreads, !kAligned        ? 2
                                                   : sizeof(T) == 2 ? 4
                                                                    : 3)
    layer_norm_warp_per_row_kernel(const __grid_constant__ LayerNormParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  constexpr int kRowsPerBlock = kWarpRowThreads / kLanes;
  const int lane_idx = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t row_idx = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kLanes;
  // Lanes past the last row have one without columns: shuffles need whole warps.
  NormRow<T, int, kAligned> row(p, row_idx < p.rows ? row_idx : p.rows - 1);
  if (row_idx >= p.rows) row.cols = 0;
  RegisterRow<T, kPacks, kAligned, kPacks % 2 == 0 ? 2 : 1> registers;  // more would take too many registers
  registers.load(row, lane_idx, kLanes);
  SplitMean mean;
  if (!p.rms) mean = row.mean(warp_sum<kLanes>(registers.accumulate(row, lane_idx, kLanes, Deviation{row.pivot})));
  const float square_sum = warp_sum<kLanes>(registers.accumulate(row, lane_idx, kLanes, SquaredDeviation{mean.high}));
  registers.normalize(row, lane_idx, kLanes, mean, square_sum);
}

// Several blocks on a multiprocessor: while one reduces, others load and store. Few threads with many packs each do
// better than many with few, which wait for more warps at each barrier.
template <class T, int kPacks>
constexpr int kRegistersMost =
    kPacks == 4 ? 256 : static_cast<int>(kLayerNormBlockElements) / kPacks / kPackSize<T>;  // threads
template <class T, int kPacks>
constexpr int kRegistersBlocks = kPacks == 4      ? 4
                                 : sizeof(T) == 4 ? 2
                                                  : 3;

template <class T, int kPacks>
__global__ void __launch_bounds__(kRegistersMost<T, kPacks>, kRegistersBlocks<T, kPacks>)
    layer_norm_block_registers_kernel(const __grid_constant__ LayerNormParams p) {
  __shared__ float scratch[2][32];
  const int thread_idx = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const NormRow<T, int, true> row(p, blockIdx.x);
  RegisterRow<T, kPacks, true, kPacks> registers;
  registers.load(row, thread_idx, threads);
  SplitMean mean;
  if (!p.rms) {
    const float sum = registers.accumulate(row, thread_idx, threads, Deviation{row.pivot});
    mean = row.mean(block_reduce_once(sum, scratch[0], SumOp{}));
  }
  registers.forget_floats();
  const float squares = registers.accumulate(row, thread_idx, threads, SquaredDeviation{mean.high});
  registers.forget_floats();
  registers.normalize(row, thread_idx, threads, mean, block_reduce_once(squares, scratch[1], SumOp{}));
}

// --- A row in shared memory, or read again ---------------------------------------------------------------------------

// Calls body(pack_idx, pack) for this thread's packs; kUnroll of them are under way at once.
template <int kUnroll, class T, class Index, class Fetch, class Body>
__device__ __forceinline__ void for_packs(const NormRow<T, Index, false>& row, const Fetch& fetch, const Body& body) {
  const Index packs = row.packs(), threads = static_cast<Index>(blockDim.x);
  for (Index base = static_cast<Index>(threadIdx.x); base < packs; base += kUnroll * threads) {
    Pack<T> pack[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * threads < packs) pack[u] = fetch(base + u * threads);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * threads < packs) body(base + u * threads, pack[u]);
    }
  }
}

// kShared: s stays in shared memory between the passes. A thread reads back only packs that it wrote itself, so that no
// barrier is needed for them.
template <class T, bool kShared>
__global__ void __launch_bounds__(kBlockRowThreads, 1)
    layer_norm_block_kernel(const __grid_constant__ LayerNormParams p) {
  using Index = std::conditional_t<kShared, int, int64_t>;
  constexpr int kUnroll = 4;
  __shared__ float scratch[32];
  extern __shared__ uint4 smem[];
  Pack<T>* const cache = reinterpret_cast<Pack<T>*>(smem);
  for (int64_t row_idx = blockIdx.x; row_idx < p.rows; row_idx += gridDim.x) {
    const NormRow<T, Index, false> row(p, row_idx);
    const auto sum_from_global = [&](Index pack_idx) {
      Pack<T> s = row.load(p.x, row.offset, pack_idx);
      if (p.adds()) {
        Pack<T> residual;
        if (p.residual != nullptr) residual = row.load(p.residual, row.residual_offset, pack_idx);
        row.add(s, residual, pack_idx);
      }
      return s;
    };
    const auto sum_again = [&](Index pack_idx) { return kShared ? cache[pack_idx] : sum_from_global(pack_idx); };

    float total = 0.0F;
    for_packs<kUnroll>(row, sum_from_global, [&](Index pack_idx, const Pack<T>& s) {
      if (kShared) cache[pack_idx] = s;
      if (p.sum != nullptr) row.store(p.sum, s, pack_idx);
      total += row.accumulate(s, pack_idx, Deviation{row.pivot});
    });
    SplitMean mean;
    if (!p.rms) mean = row.mean(block_reduce(total, scratch, SumOp{}));
    total = 0.0F;
    for_packs<kUnroll>(row, sum_again, [&](Index pack_idx, const Pack<T>& s) {
      total += row.accumulate(s, pack_idx, SquaredDeviation{mean.high});
    });
    const float rstd = row.rstd(block_reduce(total, scratch, SumOp{}), mean);
    for_packs<kUnroll>(row, sum_again, [&](Index pack_idx, const Pack<T>& s) {
      Pack<T> gamma, beta;
      row.load_affine(&gamma, &beta, pack_idx);
      row.normalize(s, gamma, beta, pack_idx, mean, rstd);
    });
  }
}

// --- Launchers -------------------------------------------------------------------------------------------------------

bool is_empty(const LayerNormParams& p) { return p.rows == 0 || p.cols == 0; }

template <class T, int kLanes, int kPacks, bool kAligned>
Status launch_warp(const LayerNormParams& p, const ExecContext& context) {
  const int64_t blocks = ceil_div(p.rows, kWarpRowThreads / kLanes);
  return launch_with({1, true}, "layer_norm_warp_per_row", layer_norm_warp_per_row_kernel<T, kLanes, kPacks, kAligned>,
                     grid_size(blocks), kWarpRowThreads, 0, context, p);
}

template <class T, int kPacks>
Status launch_registers(const LayerNormParams& p, int64_t packs, const ExecContext& context) {
  const auto threads = static_cast<unsigned>(ceil_div(packs, 32 * kPacks) * 32);
  return launch("layer_norm_block_registers", layer_norm_block_registers_kernel<T, kPacks>,
                static_cast<unsigned>(p.rows), threads, 0, context, p);
}

template <class T, bool kShared>
Status launch_block(const LayerNormParams& p, int64_t packs, size_t smem_bytes, const ExecContext& context) {
  const int64_t wanted = ceil_div(ceil_div(packs, 4), 32) * 32;  // four packs a thread and pass
  const auto threads = static_cast<unsigned>(wanted < kBlockRowThreads ? wanted : kBlockRowThreads);
  return launch(kShared ? "layer_norm_block_shared" : "layer_norm_block_reread", layer_norm_block_kernel<T, kShared>,
                grid_size(p.rows), threads, smem_bytes, context, p);
}

}  // namespace

Status launch_layer_norm_warp_per_row(const LayerNormParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  const int64_t packs = layer_norm_row_packs(p);
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kMaxPacks = static_cast<int>(kLayerNormWarpElements) / 32 / kPackSize<T>;
    if (!layer_norm_aligned(p)) {
      return packs <= 8 ? launch_warp<T, 8, 1, false>(p, context) : launch_warp<T, 32, kMaxPacks, false>(p, context);
    }
    if (packs <= 8) return launch_warp<T, 8, 1, true>(p, context);
    if (packs <= 64) return launch_warp<T, 32, 2, true>(p, context);
    if (packs <= 32 * kMaxPacks * 3 / 4) return launch_warp<T, 32, kMaxPacks * 3 / 4, true>(p, context);  // 768 columns
    return launch_warp<T, 32, kMaxPacks, true>(p, context);
  });
}

Status launch_layer_norm_block_registers(const LayerNormParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  const int64_t packs = layer_norm_row_packs(p);
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return packs <= 1024 ? launch_registers<T, 4>(p, packs, context) : launch_registers<T, 6>(p, packs, context);
  });
}

Status launch_layer_norm_block_shared(const LayerNormParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  const int64_t packs = layer_norm_row_packs(p);
  return dispatch(p.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    static SmemLimit limit;
    ORTPLUGINS_RETURN_IF_ERROR(
        limit.raise(layer_norm_block_kernel<T, true>, *context.device, layer_norm_shared_bytes(*context.device)));
    return launch_block<T, true>(p, packs, static_cast<size_t>(packs * kPackBytes), context);
  });
}

Status launch_layer_norm_block_reread(const LayerNormParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  const int64_t packs = layer_norm_row_packs(p);
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_block<T, false>(p, packs, 0, context);
  });
}

}  // namespace ortplugins
