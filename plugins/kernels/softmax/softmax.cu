// Softmax of rows that fit into registers, and of rows along any axis, on CUDA. Longer rows: softmax_long.cu.
//
//   warp_per_row     8 or 32 lanes hold a row in registers; one read, one write, no barrier
//   block_registers  a block holds a row in registers; one read, one write, two barriers
//   strided_online   for any `inner`; neighbouring threads own neighbouring rows, which are read twice: running
//                    (maximum, sum), then the result
//
// Arithmetic is float32. exp is taken of (score - maximum); a row whose maximum is -inf gives zeros.
#include "core/device.h"
#include "device/dependent_launch.h"
#include "device/dispatch.h"
#include "device/pack.h"
#include "device/reduce.h"
#include "kernels/softmax/softmax_device.h"
#include "kernels/softmax/variants.h"

namespace ortplugins {
namespace {

constexpr int kWarpRowThreads = 256;
constexpr int kBlockRowThreads = 512;
constexpr int kStridedThreads = 256;

// --- A row in registers ----------------------------------------------------------------------------------------------

// The threads that share a row and how they reduce over it.
template <int kLaneCount>
struct LaneGroup {
  static constexpr int kLeast = kLaneCount;  // threads
  int thread_idx;
  static constexpr int threads = kLaneCount;
  __device__ __forceinline__ float max(float v) const { return warp_max<kLaneCount>(v); }
  __device__ __forceinline__ float sum(float v) const { return warp_sum<kLaneCount>(v); }
};
struct BlockGroup {
  static constexpr int kLeast = 32;
  int thread_idx, threads;
  float* scratch;  // (2, 32)
  __device__ __forceinline__ float max(float v) const { return block_reduce_once(v, scratch, MaxOp{}); }
  __device__ __forceinline__ float sum(float v) const { return block_reduce_once(v, scratch + 32, SumOp{}); }
};

template <class T, int kPacks, bool kMasked, class Group>
__device__ __forceinline__ void softmax_in_registers(const SoftmaxParams& p, int64_t row_idx, const Group& group,
                                                     bool writes) {
  const SoftmaxRow<T, int> row(p, row_idx);
  const SoftmaxMask<T, kMasked> mask(p, row_idx, row.head);
  SoftmaxBatch<T, kPacks, kMasked, int> batch(group.threads, row.packs - group.thread_idx);
  SoftmaxEdge<T, (kSoftmaxMostEdge<T> + Group::kLeast - 1) / Group::kLeast> edge;
  const int first_col = row.col_of_pack(group.thread_idx);
  batch.load([x = row.x + first_col](int position) { return load_pack_readonly(x + position * kPackSize<T>); });
  edge.load(row, mask, group.thread_idx, group.threads, p.scale);
  batch.score(mask, first_col, p.scale);
  const float reference = softmax_reference(group.max(fmaxf(batch.max(p.scale), edge.max())));
  const float part = batch.exponentials(reference, p.scale, p.log) + edge.exponentials(reference, p.log);
  const SoftmaxFinish finish(group.sum(part), p.log);
  if (!writes) return;
  edge.store(row, group.thread_idx, group.threads, finish);
  batch.store(row.y + first_col, row.y_packed, reference, p.scale, p.log, finish);
}

// One row for each group of lanes: a grid of 2^31 - 1 blocks has enough of them for any tensor that fits into memory.
template <class T, int kLanes, int kPacks, bool kMasked>
__global__ void __launch_bounds__(kWarpRowThreads, kMasked          ? 2
                                                   : sizeof(T) == 2 ? 5
                                                                    : 4)
    softmax_warp_per_row_kernel(const __grid_constant__ SoftmaxParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  constexpr int kRowsPerBlock = kWarpRowThreads / kLanes;
  const LaneGroup<kLanes> group{static_cast<int>(threadIdx.x) % kLanes};
  const int64_t row_idx = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kLanes;
  // Groups past the last row repeat it, since shuffles need whole warps, and write nothing.
  softmax_in_registers<T, kPacks, kMasked>(p, row_idx < p.rows ? row_idx : p.rows - 1, group, row_idx < p.rows);
}

// Without a mask 64 registers a thread, 32 of which hold elements.
template <class T, int kPacks, bool kMasked>
__global__ void __launch_bounds__(kBlockRowThreads, !kMasked && sizeof(T) == 2 ? 3 : 2)
    softmax_block_registers_kernel(const __grid_constant__ SoftmaxParams p) {
  __shared__ float scratch[64];
  const BlockGroup group{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), scratch};
  softmax_in_registers<T, kPacks, kMasked>(p, blockIdx.x, group, true);
}

// --- Any axis --------------------------------------------------------------------------------------------------------

// Threads form `threads_x` columns of neighbouring rows by kStridedThreads / threads_x parts of the softmax axis, so
// that a warp reads memory in runs. `threads_x` is a power of two.
template <class T>
__global__ void __launch_bounds__(kStridedThreads)
    softmax_strided_kernel(const __grid_constant__ SoftmaxParams p, int threads_x) {
  __shared__ MaxSum partial[kStridedThreads];
  const int x_idx = static_cast<int>(threadIdx.x) & (threads_x - 1);
  const int y_idx = static_cast<int>(threadIdx.x) / threads_x, threads_y = kStridedThreads / threads_x;
  const int64_t inner_tiles = (p.inner + threads_x - 1) / threads_x;
  const int64_t tiles = p.rows / p.inner * inner_tiles;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t outer_idx = tile / inner_tiles;
    const int64_t inner_idx = (tile - outer_idx * inner_tiles) * threads_x + x_idx;
    const bool active = inner_idx < p.inner;
    const int64_t row_idx = outer_idx * p.inner + (active ? inner_idx : 0);
    const T* x = static_cast<const T*>(p.x) + p.row_offset(row_idx);
    T* y = static_cast<T*>(p.y) + p.row_offset(row_idx);
    const SoftmaxMask<T, true> mask(p, row_idx, 0);

    MaxSum running;
    if (active) {
#pragma unroll 4
      for (int64_t col = y_idx; col < p.cols; col += threads_y) {
        const float score = mask.apply(p.scale * to_float(x[col * p.inner]), col);
        running = merge(running, {score, 1.0F});
      }
    }
    partial[threadIdx.x] = running;
    __syncthreads();
    for (int half = threads_y / 2; half > 0; half /= 2) {
      if (y_idx < half) partial[threadIdx.x] = merge(partial[threadIdx.x], partial[threadIdx.x + half * threads_x]);
      __syncthreads();
    }
    const float reference = softmax_reference(partial[x_idx].max);
    const SoftmaxFinish finish(partial[x_idx].sum, p.log);
    __syncthreads();  // `partial` is written again in the next round
    if (active) {
#pragma unroll 4
      for (int64_t col = y_idx; col < p.cols; col += threads_y) {
        const float score = mask.apply(p.scale * to_float(x[col * p.inner]), col);
        y[col * p.inner] = from_float<T>(finish(p.log ? score - reference : exp_approx(score - reference)));
      }
    }
  }
}

// --- Launchers -------------------------------------------------------------------------------------------------------

bool is_empty(const SoftmaxParams& p) { return p.rows == 0 || p.cols == 0; }

template <class T, int kLanes, int kPacks, bool kMasked>
Status launch_warp(const SoftmaxParams& p, const ExecContext& context) {
  const int64_t blocks = ceil_div(p.rows, kWarpRowThreads / kLanes);
  return launch_with({1, true}, "softmax_warp_per_row", softmax_warp_per_row_kernel<T, kLanes, kPacks, kMasked>,
                     grid_size(blocks), kWarpRowThreads, 0, context, p);
}

}  // namespace

Status launch_softmax_warp_per_row(const SoftmaxParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  const int64_t packs = p.cols / (kPackBytes / static_cast<int64_t>(size_of(p.dtype)));
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kMost = static_cast<int>(kSoftmaxWarpElements) / 32 / kPackSize<T>;  // 4 packs, of float 8
    if (!softmax_is_plain(p)) {
      return packs <= 32 ? launch_warp<T, 8, 4, true>(p, context) : launch_warp<T, 32, kMost, true>(p, context);
    }
    if (packs <= 8) return launch_warp<T, 8, 1, false>(p, context);
    if (packs <= 16) return launch_warp<T, 8, 2, false>(p, context);
    if (packs <= 32) return launch_warp<T, 8, 4, false>(p, context);
    if (packs <= 64) return launch_warp<T, 32, 2, false>(p, context);
    if (packs <= 128) return launch_warp<T, 32, 4, false>(p, context);
    return launch_warp<T, 32, kMost, false>(p, context);
  });
}

Status launch_softmax_block_registers(const SoftmaxParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kPacks =
        static_cast<int>(kSoftmaxBlockElements) / kBlockRowThreads / kPackSize<T>;  // 4 packs, of float 8
    const int64_t packs = p.cols / kPackSize<T>;
    const int64_t threads = packs == 0 ? 32 : ceil_div(packs, 32 * kPacks) * 32;
    const auto kernel = softmax_is_plain(p) ? softmax_block_registers_kernel<T, kPacks, false>
                                            : softmax_block_registers_kernel<T, kPacks, true>;
    return launch("softmax_block_registers", kernel, static_cast<unsigned>(p.rows), static_cast<unsigned>(threads), 0,
                  context, p);
  });
}

Status launch_softmax_strided_online(const SoftmaxParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  // Up to 32 neighbouring rows, for full memory sectors; more where the axis is too short to occupy the other threads.
  int threads_x = 1;
  while (threads_x < p.inner &&
         (threads_x < 32 || (threads_x < kStridedThreads && kStridedThreads / threads_x > p.cols)))
    threads_x *= 2;
  const int64_t tiles = p.rows / p.inner * ceil_div(p.inner, threads_x);
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch("softmax_strided_online", softmax_strided_kernel<T>, grid_size(tiles), kStridedThreads, 0, context, p,
                  threads_x);
  });
}

}  // namespace ortplugins
