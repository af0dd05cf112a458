// Softmax of long contiguous rows on CUDA.
//
//   block_shared    a block keeps the row in shared memory: one read, one write. Blocks stay for several rows: while one
//                   is written, the next comes into the shared memory that becomes free
//   cluster_shared  as block_shared, the row lying in the shared memory of the blocks of a cluster
//   split           many blocks find the (maximum, sum) of a chunk of a row each; a second kernel writes the result and
//                   reads the row again, from L2 if it fits there
//   block_online    a block reads the row twice
#include "core/device.h"
#include "device/cluster.h"
#include "device/cp_async.h"
#include "device/dependent_launch.h"
#include "device/dispatch.h"
#include "kernels/softmax/softmax_device.h"
#include "kernels/softmax/variants.h"

namespace ortplugins {
namespace {

// Packs of a thread under way at once. Scores with a mask take registers of their own.
template <class T, bool kMasked>
constexpr int kBatch = kMasked && sizeof(T) == 2 ? 2 : 4;
constexpr LaunchOptions kOverlapping{1, true};
constexpr int kSharedMostThreads = 512;
constexpr int kOnlineThreads = 512;
constexpr int kSplitThreads = 256;

// Adds a batch to the running pair of a thread. One rescaling for all of its elements.
template <class T, int kPacks, bool kMasked, class Index>
__device__ __forceinline__ void accumulate(MaxSum* running, SoftmaxBatch<T, kPacks, kMasked, Index>& batch,
                                           float scale) {
  const float max = fmaxf(running->max, batch.max(scale));
  const float reference = softmax_reference(max);
  running->sum = running->sum * exp_approx(running->max - reference) + batch.exponentials(reference, scale, false);
  running->max = max;
}

// --- A row in shared memory ------------------------------------------------------------------------------------------

// The part of a row that a block of a cluster keeps. Its first block also keeps the edge.
template <class T, bool kMasked>
struct Slice {
  SoftmaxRow<T, int> row;
  SoftmaxMask<T, kMasked> mask;
  int first, packs;  // of the row

  __device__ __forceinline__ Slice(const SoftmaxParams& p, int64_t row_idx, int rank, int slice_packs)
      : row(p, row_idx),
        mask(p, row_idx, row.head),
        first(rank * slice_packs),
        packs(min(slice_packs, row.packs - first)) {
    if (rank != 0) row.edge = 0;
  }
  __device__ __forceinline__ int first_col() const { return row.col_of_pack(first); }

  // Starts copies of this thread's packs of one batch; they are one group, empty or not.
  __device__ __forceinline__ void fetch(uint32_t smem, int batch) const {
    constexpr int kPacks = kBatch<T, kMasked>;
    const int threads = static_cast<int>(blockDim.x);
    const T* const x = row.x + first_col();
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int pack_idx = (batch * kPacks + i) * threads + static_cast<int>(threadIdx.x);
      if (pack_idx < packs) cp_async_16(smem + pack_idx * kPackBytes, x + pack_idx * kPackSize<T>);
    }
    cp_async_commit();
  }
};

// Shared memory holds the slice as it was read. A thread reads only packs that it copied itself, so that no barrier is
// needed for them, and refills their place for the next row when it has used them.
template <class T, bool kMasked>
__global__ void __launch_bounds__(kSharedMostThreads, kMasked ? 1 : 2)
    softmax_shared_kernel(const __grid_constant__ SoftmaxParams p, int slice_packs) {
  constexpr int kPacks = kBatch<T, kMasked>;
  extern __shared__ uint4 smem[];
  __shared__ MaxSum block_stats[2][32];                       // (parity of the round, warp)
  __shared__ MaxSum cluster_stats[2][kSoftmaxClusterBlocks];  // (parity of the round, block)
  const int thread_idx = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int rank = rank_in_cluster(), blocks = blocks_in_cluster();
  const int batches = (slice_packs + kPacks * threads - 1) / (kPacks * threads);
  const auto* const cache = reinterpret_cast<const Pack<T>*>(smem);
  const uint32_t cache_address = smem_address(smem);
  const int64_t stride = gridDim.x / blocks;
  int64_t row_idx = blockIdx.x / blocks;
  if (blocks > 1) cluster_arrive();
  let_next_kernel_start();
  wait_for_previous_kernel();

  Slice<T, kMasked> slice(p, row_idx, rank, slice_packs);
  SoftmaxEdge<T, 1> edge;
  for (int b = 0; b < batches; ++b) slice.fetch(cache_address, b);
  edge.load(slice.row, slice.mask, thread_idx, threads, p.scale);
  if (blocks > 1) cluster_wait();  // all blocks have started

  const auto load_batch = [&](int b) {
    const int first = b * kPacks * threads + thread_idx;
    SoftmaxBatch<T, kPacks, kMasked, int> batch(threads, slice.packs - first);
    batch.load([&](int position) { return cache[first + position]; });
    batch.score(slice.mask, slice.first_col() + first * kPackSize<T>, p.scale);
    return batch;
  };

  for (int round = 0; row_idx < p.rows; round ^= 1, row_idx += stride) {
    MaxSum running;
    for (int b = 0; b < batches; ++b) {
      cp_async_wait_at_most(batches - 1 - b);
      auto batch = load_batch(b);
      accumulate(&running, batch, p.scale);
    }
    const float top = fmaxf(running.max, edge.v[0]), rebased = softmax_reference(top);
    running = {top, running.sum * exp_approx(running.max - rebased) + exp_approx(edge.v[0] - rebased)};
    MaxSum total = block_merge_once(running, block_stats[round]);
    if (blocks > 1) {
      if (thread_idx < blocks) store_to_block(&cluster_stats[round][rank].max, thread_idx, total.max, total.sum);
      cluster_arrive();
      cluster_wait();
      total = warp_merge(thread_idx % 32 < blocks ? cluster_stats[round][thread_idx % 32] : MaxSum{});
    }
    const float reference = softmax_reference(total.max);
    const SoftmaxFinish finish(total.sum, p.log);

    const bool more = row_idx + stride < p.rows;
    const Slice<T, kMasked> next(p, more ? row_idx + stride : row_idx, rank, slice_packs);
    edge.exponentials(reference, p.log);
    edge.store(slice.row, thread_idx, threads, finish);
    if (more) edge.load(next.row, next.mask, thread_idx, threads, p.scale);
    T* const y = slice.row.y + slice.first_col();
    for (int b = 0; b < batches; ++b) {
      auto batch = load_batch(b);
      batch.exponentials(reference, p.scale, p.log);
      batch.store(y + (b * kPacks * threads + thread_idx) * kPackSize<T>, slice.row.y_packed, reference, p.scale, p.log,
                  finish);
      if (more) next.fetch(cache_address, b);
    }
    slice = next;
  }
}

// --- A row read twice ------------------------------------------------------------------------------------------------

// Packs [begin, end) of a row, by a block; body(batch, first pack) for each batch of a thread.
template <class T, class Body>
__device__ __forceinline__ void for_batches(const SoftmaxParams& p, const SoftmaxRow<T, int64_t>& row,
                                            const SoftmaxMask<T, true>& mask, int64_t begin, int64_t end,
                                            const Body& body) {
  constexpr int kPacks = kBatch<T, true>;
  const int64_t threads = blockDim.x;
  for (int64_t first = begin + threadIdx.x; first < end; first += kPacks * threads) {
    SoftmaxBatch<T, kPacks, true, int64_t> batch(threads, end - first);
    batch.load([&](int64_t position) { return load_pack_readonly(row.x + row.col_of_pack(first + position)); });
    batch.score(mask, row.col_of_pack(first), p.scale);
    body(batch, first);
  }
}

// This thread's part of the (maximum, sum) of packs [begin, end), and of the edge.
template <class T>
__device__ __forceinline__ MaxSum part_of(const SoftmaxParams& p, const SoftmaxRow<T, int64_t>& row,
                                          const SoftmaxMask<T, true>& mask, int64_t begin, int64_t end,
                                          const SoftmaxEdge<T, 1>& edge) {
  MaxSum running = {edge.v[0], exp_approx(edge.v[0] - softmax_reference(edge.v[0]))};
  for_batches(p, row, mask, begin, end, [&](auto& batch, int64_t) { accumulate(&running, batch, p.scale); });
  return running;
}

template <class T>
__device__ __forceinline__ void write_part(const SoftmaxParams& p, const SoftmaxRow<T, int64_t>& row,
                                           const SoftmaxMask<T, true>& mask, int64_t begin, int64_t end,
                                           SoftmaxEdge<T, 1>& edge, const MaxSum& total) {
  const float reference = softmax_reference(total.max);
  const SoftmaxFinish finish(total.sum, p.log);
  for_batches(p, row, mask, begin, end, [&](auto& batch, int64_t first) {
    batch.exponentials(reference, p.scale, p.log);
    batch.store(row.y + row.col_of_pack(first), row.y_packed, reference, p.scale, p.log, finish);
  });
  edge.exponentials(reference, p.log);
  edge.store(row, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), finish);
}

template <class T>
__global__ void __launch_bounds__(kOnlineThreads, 1) softmax_online_kernel(const __grid_constant__ SoftmaxParams p) {
  __shared__ MaxSum scratch[2][32];
  for (int64_t row_idx = blockIdx.x, round = 0; row_idx < p.rows; row_idx += gridDim.x, round ^= 1) {
    const SoftmaxRow<T, int64_t> row(p, row_idx);
    const SoftmaxMask<T, true> mask(p, row_idx, row.head);
    SoftmaxEdge<T, 1> edge;
    edge.load(row, mask, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), p.scale);
    const MaxSum total = block_merge_once(part_of(p, row, mask, 0, row.packs, edge), scratch[round]);
    write_part(p, row, mask, 0, row.packs, edge, total);
  }
}

// Block i does chunk i % chunks of row i / chunks. kWrites: the second kernel. `partial` is (row, chunk).
template <class T, bool kWrites>
__global__ void __launch_bounds__(kSplitThreads)
    softmax_split_kernel(const __grid_constant__ SoftmaxParams p, int chunks, int64_t chunk_packs, MaxSum* partial) {
  __shared__ MaxSum scratch[32];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t row_idx = blockIdx.x / static_cast<unsigned>(chunks);
  const int chunk_idx = static_cast<int>(blockIdx.x % static_cast<unsigned>(chunks));
  SoftmaxRow<T, int64_t> row(p, row_idx);
  const SoftmaxMask<T, true> mask(p, row_idx, row.head);
  if (chunk_idx != 0) row.edge = 0;
  const int64_t begin = chunk_idx * chunk_packs, end = min(row.packs, begin + chunk_packs);
  SoftmaxEdge<T, 1> edge;
  edge.load(row, mask, static_cast<int>(threadIdx.x), kSplitThreads, p.scale);
  MaxSum* const of_row = partial + row_idx * chunks;
  if (!kWrites) {
    const MaxSum total = block_merge_once(part_of(p, row, mask, begin, end, edge), scratch);
    if (threadIdx.x == 0) of_row[chunk_idx] = total;
    return;
  }
  MaxSum total;
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += kSplitThreads) total = merge(total, of_row[i]);
  write_part(p, row, mask, begin, end, edge, block_merge_once(total, scratch));
}

// --- Launchers -------------------------------------------------------------------------------------------------------

// How many clusters of `cluster` (a power of two) blocks run at once, one block on a multiprocessor. Asked once.
template <class T, bool kMasked>
int clusters_at_once(const DeviceInfo& device, int cluster, int smem_bytes) {
  if (cluster == 1) return device.sm_count;
  static std::atomic<int> known[64][kSoftmaxClusterBlocks + 1];
  std::atomic<int>& count = known[device.ordinal & 63][cluster];
  if (const int n = count.load(std::memory_order_relaxed); n > 0) return n;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(cluster);
  config.blockDim = kSharedMostThreads;
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  int n = 0;
  if (cudaOccupancyMaxActiveClusters(&n, softmax_shared_kernel<T, kMasked>, &config) != cudaSuccess)
    (void)cudaGetLastError();
  n = n > 0 ? n : 1;
  count.store(n, std::memory_order_relaxed);
  return n;
}

// Blocks of a cluster. The fewer, the better they fill the device (of 132 multiprocessors, clusters of two use all, of
// four or eight 120). More of them where rows are too few to keep all busy, or where the last round of few would be
// half empty.
template <class T, bool kMasked>
int cluster_blocks(const SoftmaxParams& p, const DeviceInfo& device) {
  const int64_t packs = p.cols / kPackSize<T>;
  const int most_bytes = softmax_shared_bytes(device);
  if (p.rows <= clusters_at_once<T, kMasked>(device, kSoftmaxClusterBlocks, most_bytes)) return kSoftmaxClusterBlocks;
  int blocks = 2;
  while (blocks < kSoftmaxClusterBlocks && ceil_div(packs, blocks) * kPackBytes > most_bytes) blocks *= 2;
  const int64_t rounds = ceil_div(p.rows, clusters_at_once<T, kMasked>(device, blocks, most_bytes));
  return rounds == 1 || rounds >= 4 ? blocks : kSoftmaxClusterBlocks;
}

template <class T, bool kMasked>
Status launch_shared(const SoftmaxParams& p, bool clusters, const ExecContext& context) {
  const DeviceInfo& device = *context.device;
  const int most_bytes = softmax_shared_bytes(device);
  static SmemLimit limit;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(softmax_shared_kernel<T, kMasked>, device, most_bytes));
  const int blocks = clusters ? cluster_blocks<T, kMasked>(p, device) : 1;
  const int64_t slice_packs = ceil_div(p.cols / kPackSize<T>, blocks);
  const int64_t bytes = slice_packs * kPackBytes;
  const int threads = slice_packs > 4096 ? kSharedMostThreads : slice_packs > 1024 ? 256 : 128;
  const int64_t by_threads = (kMasked ? 512 : 1024) / threads, by_bytes = device.max_smem_per_sm / (bytes + 2048);
  const int64_t per_sm = by_threads < by_bytes ? by_threads : by_bytes > 0 ? by_bytes : 1;
  const unsigned groups = grid_size(p.rows, per_sm * clusters_at_once<T, kMasked>(device, blocks, most_bytes));
  return launch_with({static_cast<unsigned>(blocks), true},
                     clusters ? "softmax_cluster_shared" : "softmax_block_shared", softmax_shared_kernel<T, kMasked>,
                     groups * static_cast<unsigned>(blocks), static_cast<unsigned>(threads), static_cast<size_t>(bytes),
                     context, p, static_cast<int>(slice_packs));
}

Status launch_shared(const SoftmaxParams& p, bool clusters, const ExecContext& context) {
  if (p.rows == 0 || p.cols == 0) return {};
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return softmax_is_plain(p) ? launch_shared<T, false>(p, clusters, context)
                               : launch_shared<T, true>(p, clusters, context);
  });
}

// Chunks of 16 KB, four packs a thread, or more; 256 of a row are enough for all multiprocessors.
int64_t split_chunks(const SoftmaxParams& p) {
  const int64_t chunks = ceil_div(p.cols * static_cast<int64_t>(size_of(p.dtype)), kPackBytes * 4 * kSplitThreads);
  return chunks < 1 ? 1 : chunks < 256 ? chunks : 256;
}

}  // namespace

Status launch_softmax_block_shared(const SoftmaxParams& p, const ExecContext& context) {
  return launch_shared(p, false, context);
}

Status launch_softmax_cluster_shared(const SoftmaxParams& p, const ExecContext& context) {
  return launch_shared(p, true, context);
}

int64_t softmax_split_workspace(const SoftmaxParams& p, const DeviceInfo&) {
  return p.rows * split_chunks(p) * static_cast<int64_t>(sizeof(MaxSum));
}

Status launch_softmax_split(const SoftmaxParams& p, const ExecContext& context) {
  if (p.rows == 0 || p.cols == 0) return {};
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto chunks = static_cast<int>(split_chunks(p));
    const int64_t chunk_packs = ceil_div(p.cols / kPackSize<T>, chunks);
    auto* const partial = static_cast<MaxSum*>(context.workspace);
    const auto grid = static_cast<unsigned>(p.rows * chunks);
    ORTPLUGINS_RETURN_IF_ERROR(launch_with(kOverlapping, "softmax_split_partial", softmax_split_kernel<T, false>, grid,
                                           kSplitThreads, 0, context, p, chunks, chunk_packs, partial));
    return launch_with(kOverlapping, "softmax_split_write", softmax_split_kernel<T, true>, grid, kSplitThreads, 0,
                       context, p, chunks, chunk_packs, partial);
  });
}

Status launch_softmax_block_online(const SoftmaxParams& p, const ExecContext& context) {
  if (p.rows == 0 || p.cols == 0) return {};
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t wanted = ceil_div(p.cols / kPackSize<T> + 1, 32 * 4) * 32;
    const auto threads = static_cast<unsigned>(wanted < kOnlineThreads ? wanted : kOnlineThreads);
    return launch("softmax_block_online", softmax_online_kernel<T>, grid_size(p.rows), threads, 0, context, p);
  });
}

}  // namespace ortplugins
