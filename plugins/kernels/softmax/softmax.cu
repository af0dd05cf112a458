// Softmax of rows on CUDA, from one warp for a row to one block for a row of any length.
//
// A row that is contiguous in memory (inner == 1) is walked in 16-byte packs counted from the 16-byte boundary at or below
// its first element, so that rows of any length and alignment are read with full-width accesses; only the first and the
// last pack are guarded. Thread i of the threads that share a row owns packs i, i + threads, i + 2 threads, ...
//
//   warp_per_row     8 or 32 lanes hold a row in registers; one read, one write, no barrier
//   block_registers  a block holds a row in registers; one read, one write
//   block_shared     a block keeps the row as it was read in shared memory; one read, one write
//   block_online     a block reads the row twice: running (maximum, sum), then the result
//   strided_online   the same for any `inner`; neighbouring threads own neighbouring rows
//
// Arithmetic is float32. exp is taken of (score - maximum); a row whose maximum is -inf gives zeros.
#include "core/device.h"
#include "device/dispatch.h"
#include "device/pack.h"
#include "device/reduce.h"
#include "kernels/softmax/variants.h"

namespace ortplugins {
namespace {

constexpr int kWarpRowThreads = 256;
constexpr int kBlockRowThreads = 512;  // 1024 would leave 64 registers a thread, and spill
constexpr int kStridedThreads = 256;

// --- Scores --------------------------------------------------------------------------------------------------------

template <class T>
struct RowMask {
  const void* data;  // element of column 0
  DType dtype;
  int64_t col_stride;

  __device__ __forceinline__ RowMask(const SoftmaxParams& p, int64_t row) : data(nullptr), dtype(p.mask_dtype), col_stride(p.mask_col_stride) {
    if (dtype == DType::kNone) return;
    const int64_t offset = p.mask_row_offset(row) * static_cast<int64_t>(dtype == DType::kBool ? 1 : sizeof(T));
    data = static_cast<const char*>(p.mask) + offset;
  }

  __device__ __forceinline__ float apply(float score, int64_t col) const {
    if (dtype == DType::kNone) return score;
    if (dtype == DType::kBool) return static_cast<const uint8_t*>(data)[col * col_stride] != 0 ? score : -INFINITY;
    return score + to_float(static_cast<const T*>(data)[col * col_stride]);
  }

  // Columns first + begin to first + end of a pack.
  __device__ __forceinline__ void apply_pack(float (&score)[kPackSize<T>], int64_t first, int begin, int end) const {
    if (dtype == DType::kBool) {
      const uint8_t* at = static_cast<const uint8_t*>(data) + first * col_stride;
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) {
        if (i >= begin && i < end && at[i * col_stride] == 0) score[i] = -INFINITY;
      }
      return;
    }
    const T* at = static_cast<const T*>(data) + first * col_stride;
    if (col_stride == 1 && begin == 0 && end == kPackSize<T> && pack_shift(at) == 0) {
      const Pack<T> mask = load_pack(at);
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) score[i] += to_float(mask.v[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) {
      if (i >= begin && i < end) score[i] += to_float(at[i * col_stride]);
    }
  }
};

// One contiguous row, seen as packs. Index is int where the row is known to be short: it saves registers.
template <class T, class Index>
struct PackedRow {
  static constexpr int kSize = kPackSize<T>;
  const T* x;
  T* y;
  Index cols;
  int shift;      // elements by which x lies past a pack boundary
  bool y_packed;  // y lies as far past a boundary as x
  RowMask<T> mask;
  float scale;

  __device__ __forceinline__ PackedRow(const SoftmaxParams& p, int64_t row)
      : x(static_cast<const T*>(p.x) + row * p.cols),
        y(static_cast<T*>(p.y) + row * p.cols),
        cols(static_cast<Index>(p.cols)),
        shift(pack_shift(x)),
        y_packed(pack_shift(y) == shift),
        mask(p, row),
        scale(p.scale) {}

  __device__ __forceinline__ Index packs() const { return (cols + shift + kSize - 1) / kSize; }
  __device__ __forceinline__ Index first_col(Index pack_idx) const { return pack_idx * kSize - shift; }
  __device__ __forceinline__ bool is_whole(Index first) const { return first >= 0 && first + kSize <= cols; }
  // Elements [begin, end) of the pack that starts at column `first` belong to the row.
  __device__ __forceinline__ int begin(Index first) const { return first < 0 ? static_cast<int>(-first) : 0; }
  __device__ __forceinline__ int end(Index first) const {
    const Index rest = cols - first;
    return rest >= kSize ? kSize : rest <= 0 ? 0 : static_cast<int>(rest);
  }

  __device__ __forceinline__ Pack<T> load(Index pack_idx) const {
    const Index first = first_col(pack_idx);
    if (is_whole(first)) return load_pack(x + first);
    return load_pack_guarded(x + first, begin(first), end(first), from_float<T>(0.0F));
  }
  // scale * x + mask; -inf outside the row.
  __device__ __forceinline__ void scores(const Pack<T>& pack, Index pack_idx, float (&score)[kSize]) const {
    const Index first = first_col(pack_idx);
#pragma unroll
    for (int i = 0; i < kSize; ++i) score[i] = scale * to_float(pack.v[i]);
    if (is_whole(first)) {
      if (mask.dtype != DType::kNone) mask.apply_pack(score, first, 0, kSize);
      return;
    }
    const int from = begin(first), to = end(first);
    if (mask.dtype != DType::kNone) mask.apply_pack(score, first, from, to);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i < from || i >= to) score[i] = -INFINITY;
    }
  }
  __device__ __forceinline__ void store(const float (&value)[kSize], Index pack_idx) const {
    const Index first = first_col(pack_idx);
    Pack<T> pack;
#pragma unroll
    for (int i = 0; i < kSize; ++i) pack.v[i] = from_float<T>(value[i]);
    if (y_packed && is_whole(first)) {
      store_pack(y + first, pack);
    } else {
      store_pack_guarded(y + first, pack, begin(first), end(first));
    }
  }
};

// From score to result, once maximum and sum of the row are known.
struct Normalizer {
  float reference, inverse_sum, log_sum;

  __device__ __forceinline__ explicit Normalizer(const MaxSum& row)
      : reference(softmax_reference(row.max)),
        inverse_sum(row.sum == 0.0F ? 0.0F : 1.0F / row.sum),
        // A fully masked row has sum 0; +inf here makes its log-softmax -inf - inf = -inf.
        log_sum(row.sum == 0.0F ? INFINITY : logf(row.sum)) {}

  __device__ __forceinline__ float exponential(float score) const { return exp_approx(score - reference); }
  __device__ __forceinline__ float softmax(float score) const { return exponential(score) * inverse_sum; }
  __device__ __forceinline__ float log_softmax(float score) const { return (score - reference) - log_sum; }
};

// --- A row in registers -----------------------------------------------------------------------------------------------

template <class T, int kPacks>
struct RegisterRow {
  float v[kPacks][kPackSize<T>];

  // Reads and scores this thread's packs; returns their maximum.
  __device__ __forceinline__ float load(const PackedRow<T, int>& row, int thread_idx, int threads) {
    const int packs = row.packs();
    Pack<T> raw[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {  // all loads are under way before the first is used
      const int pack_idx = thread_idx + i * threads;
      if (pack_idx < packs) raw[i] = row.load(pack_idx);
    }
    float max = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int pack_idx = thread_idx + i * threads;
      row.scores(raw[i], pack_idx, v[i]);
#pragma unroll
      for (int j = 0; j < kPackSize<T>; ++j) max = fmaxf(max, v[i][j]);
    }
    return max;
  }

  // Sum of exp(score - maximum). Without `log` the scores become these exponentials.
  __device__ __forceinline__ float exponentials(float max, bool log) {
    const float reference = softmax_reference(max);
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < kPackSize<T>; ++j) {
        const float e = exp_approx(v[i][j] - reference);
        sum += e;
        if (!log) v[i][j] = e;
      }
    }
    return sum;
  }

  __device__ __forceinline__ void store(const PackedRow<T, int>& row, int thread_idx, int threads, const MaxSum& stats, bool log) {
    const Normalizer normalizer(stats);
    const int packs = row.packs();
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < kPackSize<T>; ++j) v[i][j] = log ? normalizer.log_softmax(v[i][j]) : v[i][j] * normalizer.inverse_sum;
      const int pack_idx = thread_idx + i * threads;
      if (pack_idx < packs) row.store(v[i], pack_idx);
    }
  }
};

template <class T, int kLanes, int kPacks>
__global__ void __launch_bounds__(kWarpRowThreads, 2) softmax_warp_per_row_kernel(const __grid_constant__ SoftmaxParams p) {
  constexpr int kRowsPerBlock = kWarpRowThreads / kLanes;
  const int lane_idx = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kRowsPerBlock;
  // Whole warps go round together, as the shuffles need; lanes past the last row repeat it and write nothing.
  const int64_t group_idx = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kLanes;
  const int64_t warp_first = group_idx - threadIdx.x % 32 / kLanes;
  for (int64_t base = 0; warp_first + base < p.rows; base += stride) {
    const int64_t row_idx = group_idx + base;
    const PackedRow<T, int> row(p, row_idx < p.rows ? row_idx : p.rows - 1);
    RegisterRow<T, kPacks> registers;
    const float max = warp_max<kLanes>(registers.load(row, lane_idx, kLanes));
    const float sum = warp_sum<kLanes>(registers.exponentials(max, p.log));
    if (row_idx < p.rows) registers.store(row, lane_idx, kLanes, {max, sum}, p.log);
  }
}

template <class T, int kPacks, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads, 1) softmax_block_registers_kernel(const __grid_constant__ SoftmaxParams p) {
  __shared__ float scratch[32];
  const int thread_idx = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int64_t row_idx = blockIdx.x; row_idx < p.rows; row_idx += gridDim.x) {
    const PackedRow<T, int> row(p, row_idx);
    RegisterRow<T, kPacks> registers;
    const float max = block_reduce(registers.load(row, thread_idx, threads), scratch, MaxOp{});
    const float sum = block_reduce(registers.exponentials(max, p.log), scratch, SumOp{});
    registers.store(row, thread_idx, threads, {max, sum}, p.log);
  }
}

// --- A row in shared memory, or read twice ----------------------------------------------------------------------------

// Adds scores to a running pair. One rescaling for all of them.
template <int kCount>
__device__ __forceinline__ void accumulate(MaxSum* running, const float (&score)[kCount]) {
  float max = running->max;
#pragma unroll
  for (int i = 0; i < kCount; ++i) max = fmaxf(max, score[i]);
  const float reference = softmax_reference(max);
  float sum = running->sum * exp_approx(running->max - reference);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += exp_approx(score[i] - reference);
  *running = {max, sum};
}

// kShared: the row stays in shared memory between the passes. A thread reads back only packs that it wrote itself, so
// that no barrier is needed for them.
template <class T, bool kShared>
__global__ void __launch_bounds__(kBlockRowThreads, 1) softmax_block_kernel(const __grid_constant__ SoftmaxParams p) {
  using Index = std::conditional_t<kShared, int, int64_t>;
  constexpr int kUnroll = 4;  // packs under way for each thread
  __shared__ float scratch[32];
  extern __shared__ uint4 smem[];
  Pack<T>* const cache = reinterpret_cast<Pack<T>*>(smem);
  for (int64_t row_idx = blockIdx.x; row_idx < p.rows; row_idx += gridDim.x) {
    const PackedRow<T, Index> row(p, row_idx);
    const Index packs = row.packs(), threads = static_cast<Index>(blockDim.x);
    MaxSum running;
    for (Index base = static_cast<Index>(threadIdx.x); base < packs; base += kUnroll * threads) {
      Pack<T> raw[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (base + u * threads < packs) raw[u] = row.load(base + u * threads);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const Index pack_idx = base + u * threads;
        if (pack_idx >= packs) continue;
        if (kShared) cache[pack_idx] = raw[u];
        float score[kPackSize<T>];
        row.scores(raw[u], pack_idx, score);
        accumulate(&running, score);
      }
    }
    const Normalizer normalizer(block_merge(running, scratch));
    for (Index base = static_cast<Index>(threadIdx.x); base < packs; base += kUnroll * threads) {
      Pack<T> raw[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const Index pack_idx = base + u * threads;
        if (pack_idx < packs) raw[u] = kShared ? cache[pack_idx] : row.load(pack_idx);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const Index pack_idx = base + u * threads;
        if (pack_idx >= packs) continue;
        float score[kPackSize<T>];
        row.scores(raw[u], pack_idx, score);
#pragma unroll
        for (int i = 0; i < kPackSize<T>; ++i) score[i] = p.log ? normalizer.log_softmax(score[i]) : normalizer.softmax(score[i]);
        row.store(score, pack_idx);
      }
    }
  }
}

// --- Any axis ---------------------------------------------------------------------------------------------------------

// Threads form `threads_x` columns of neighbouring rows by kStridedThreads / threads_x parts of the softmax axis, so that a
// warp reads memory in runs. `threads_x` is a power of two.
template <class T>
__global__ void __launch_bounds__(kStridedThreads)
softmax_strided_kernel(const __grid_constant__ SoftmaxParams p, int threads_x) {
  __shared__ MaxSum partial[kStridedThreads];
  const int x_idx = static_cast<int>(threadIdx.x) & (threads_x - 1);
  const int y_idx = static_cast<int>(threadIdx.x) / threads_x, threads_y = kStridedThreads / threads_x;
  const int64_t inner_tiles = (p.inner + threads_x - 1) / threads_x;
  const int64_t tiles = p.rows / p.inner * inner_tiles;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t inner_idx = tile % inner_tiles * threads_x + x_idx;
    const bool active = inner_idx < p.inner;
    const int64_t row_idx = tile / inner_tiles * p.inner + (active ? inner_idx : 0);
    const T* x = static_cast<const T*>(p.x) + p.row_offset(row_idx);
    T* y = static_cast<T*>(p.y) + p.row_offset(row_idx);
    const RowMask<T> mask(p, row_idx);

    MaxSum running;
    if (active) {
#pragma unroll 4
      for (int64_t col = y_idx; col < p.cols; col += threads_y) {
        const float score[1] = {mask.apply(p.scale * to_float(x[col * p.inner]), col)};
        accumulate(&running, score);
      }
    }
    partial[threadIdx.x] = running;
    __syncthreads();
    for (int half = threads_y / 2; half > 0; half /= 2) {
      if (y_idx < half) partial[threadIdx.x] = merge(partial[threadIdx.x], partial[threadIdx.x + half * threads_x]);
      __syncthreads();
    }
    const Normalizer normalizer(partial[x_idx]);
    __syncthreads();  // `partial` is written again in the next round
    if (active) {
#pragma unroll 4
      for (int64_t col = y_idx; col < p.cols; col += threads_y) {
        const float score = mask.apply(p.scale * to_float(x[col * p.inner]), col);
        y[col * p.inner] = from_float<T>(p.log ? normalizer.log_softmax(score) : normalizer.softmax(score));
      }
    }
  }
}

// --- Launchers --------------------------------------------------------------------------------------------------------

bool is_empty(const SoftmaxParams& p) { return p.rows == 0 || p.cols == 0; }

template <class T, int kLanes, int kPacks>
Status launch_warp(const SoftmaxParams& p, const ExecContext& context) {
  const int64_t blocks = ceil_div(p.rows, kWarpRowThreads / kLanes);
  return launch("softmax_warp_per_row", softmax_warp_per_row_kernel<T, kLanes, kPacks>, grid_size(blocks), kWarpRowThreads, 0, context, p);
}

template <class T, int kPacks, int kMaxThreads>
Status launch_registers(const SoftmaxParams& p, int64_t packs, const ExecContext& context) {
  const auto threads = static_cast<unsigned>(ceil_div(ceil_div(packs, kPacks), 32) * 32);
  return launch("softmax_block_registers", softmax_block_registers_kernel<T, kPacks, kMaxThreads>, grid_size(p.rows), threads, 0, context, p);
}

template <class T, bool kShared>
Status launch_block(const SoftmaxParams& p, int64_t packs, size_t smem_bytes, const ExecContext& context) {
  const int64_t wanted = ceil_div(ceil_div(packs, 4), 32) * 32;  // four packs a thread and pass
  const auto threads = static_cast<unsigned>(wanted < kBlockRowThreads ? wanted : kBlockRowThreads);
  return launch(kShared ? "softmax_block_shared" : "softmax_block_online", softmax_block_kernel<T, kShared>, grid_size(p.rows), threads, smem_bytes, context, p);
}

}  // namespace

Status launch_softmax_warp_per_row(const SoftmaxParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  const int64_t packs = softmax_row_packs(p);
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (packs <= 8) return launch_warp<T, 8, 1>(p, context);
    if (packs <= 32) return launch_warp<T, 32, 1>(p, context);
    if (packs <= 64) return launch_warp<T, 32, 2>(p, context);
    if (packs <= 128) return launch_warp<T, 32, 4>(p, context);
    return launch_warp<T, 32, 32 / kPackSize<T>>(p, context);  // 8 packs of float; half types have returned
  });
}

Status launch_softmax_block_registers(const SoftmaxParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  const int64_t packs = softmax_row_packs(p);
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    // 16 elements a thread up to 256 threads; above, 32 a thread and up to 512 threads, which may have 128 registers.
    if (packs * kPackSize<T> <= 256 * 16) return launch_registers<T, 16 / kPackSize<T>, 256>(p, packs, context);
    return launch_registers<T, 32 / kPackSize<T>, 512>(p, packs, context);
  });
}

Status launch_softmax_block_shared(const SoftmaxParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  const int64_t packs = softmax_row_packs(p);
  return dispatch(p.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    static SmemLimit limit;
    ORTPLUGINS_RETURN_IF_ERROR(limit.raise(softmax_block_kernel<T, true>, *context.device, softmax_shared_bytes(*context.device)));
    return launch_block<T, true>(p, packs, static_cast<size_t>(packs * kPackBytes), context);
  });
}

Status launch_softmax_block_online(const SoftmaxParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  const int64_t packs = softmax_row_packs(p);
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_block<T, false>(p, packs, 0, context);
  });
}

Status launch_softmax_strided_online(const SoftmaxParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  // Up to 32 neighbouring rows, for full memory sectors; more where the axis is too short to occupy the other threads.
  int threads_x = 1;
  while (threads_x < p.inner && (threads_x < 32 || (threads_x < kStridedThreads && kStridedThreads / threads_x > p.cols))) threads_x *= 2;
  const int64_t tiles = p.rows / p.inner * ceil_div(p.inner, threads_x);
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch("softmax_strided_online", softmax_strided_kernel<T>, grid_size(tiles), kStridedThreads, 0, context, p, threads_x);
  });
}

}  // namespace ortplugins
