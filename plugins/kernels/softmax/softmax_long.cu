// Softmax of long contiguous rows on CUDA.
//
//   resident        a block, or a cluster of some, keeps a row without a mask in registers and shared memory: one read,
//                   one write
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
template <class T>
constexpr int kBatch = sizeof(T) == 2 ? 2 : 4;
constexpr LaunchOptions kOverlapping{1, true};
constexpr int kSharedMostThreads = 512;
constexpr int kResidentMostThreads = 1024;
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
    constexpr int kPacks = kBatch<T>;
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
template <class T>
__global__ void __launch_bounds__(kSharedMostThreads, 1)
    softmax_shared_kernel(const __grid_constant__ SoftmaxParams p, int slice_packs) {
  constexpr int kPacks = kBatch<T>;
  extern __shared__ uint4 smem[];
  __shared__ MaxSum block_stats[2][32];  // (parity of the round, warp)
  __shared__ ClusterStats cluster_stats;
  const int thread_idx = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int rank = rank_in_cluster(), blocks = blocks_in_cluster();
  const int batches = (slice_packs + kPacks * threads - 1) / (kPacks * threads);
  const auto* const cache = reinterpret_cast<const Pack<T>*>(smem);
  const uint32_t cache_address = smem_address(smem);
  const int64_t stride = gridDim.x / blocks;
  int64_t row_idx = blockIdx.x / blocks;
  if (blocks > 1) {
    cluster_stats.init();
    cluster_arrive_relaxed();
  }
  let_next_kernel_start();
  wait_for_previous_kernel();

  Slice<T, true> slice(p, row_idx, rank, slice_packs);
  SoftmaxEdge<T, 1> edge;
  for (int b = 0; b < batches; ++b) slice.fetch(cache_address, b);
  edge.load(slice.row, slice.mask, thread_idx, threads, p.scale);
  if (blocks > 1) cluster_wait();  // all blocks have started

  const auto load_batch = [&](int b) {
    const int first = b * kPacks * threads + thread_idx;
    SoftmaxBatch<T, kPacks, true, int> batch(threads, slice.packs - first);
    batch.load([&](int position) { return cache[first + position]; });
    batch.score(slice.mask, slice.first_col() + first * kPackSize<T>, p.scale);
    return batch;
  };

  for (unsigned round = 0; row_idx < p.rows; ++round, row_idx += stride) {
    MaxSum running;
    for (int b = 0; b < batches; ++b) {
      cp_async_wait_at_most(batches - 1 - b);
      auto batch = load_batch(b);
      accumulate(&running, batch, p.scale);
    }
    const float top = fmaxf(running.max, edge.v[0]), rebased = softmax_reference(top);
    running = {top, running.sum * exp_approx(running.max - rebased) + exp_approx(edge.v[0] - rebased)};
    MaxSum total = block_merge_once(running, block_stats[round % 2]);
    if (blocks > 1) total = cluster_stats.merge(total, round, rank, blocks);
    const float reference = softmax_reference(total.max);
    const SoftmaxFinish finish(total.sum, p.log);

    const bool more = row_idx + stride < p.rows;
    const Slice<T, true> next(p, more ? row_idx + stride : row_idx, rank, slice_packs);
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

// --- A row in registers and shared memory ----------------------------------------------------------------------------

// Of the slice a thread keeps kSoftmaxResidentPacks packs in registers, the others in shared memory, where it reads only
// what it copied itself. It takes exponentials relative to its own maximum, so that the (maximum, sum) of the row costs
// one barrier, and in a cluster one message from each block to each.
template <class T>
__global__ void __launch_bounds__(kResidentMostThreads, 1)
    softmax_resident_kernel(const __grid_constant__ SoftmaxParams p, int slice_packs) {
  constexpr int kSharedBatch = 2;
  extern __shared__ uint4 smem[];
  __shared__ MaxSum block_stats[32];
  __shared__ ClusterStats cluster_stats;
  const int thread_idx = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int rank = rank_in_cluster(), blocks = blocks_in_cluster();
  if (blocks > 1) {
    cluster_stats.init();
    cluster_arrive_relaxed();
  }
  let_next_kernel_start();
  wait_for_previous_kernel();

  const SoftmaxMask<T, false> mask(p, 0, 0);
  const Slice<T, false> slice(p, blockIdx.x / static_cast<unsigned>(blocks), rank, slice_packs);
  const T* const x = slice.row.x + slice.first_col();
  T* const y = slice.row.y + slice.first_col();
  SoftmaxBatch<T, kSoftmaxResidentPacks, false, int> kept(threads, slice.packs - thread_idx);
  kept.load([&](int position) { return load_pack_readonly(x + (thread_idx + position) * kPackSize<T>); });
  const int kept_packs = kSoftmaxResidentPacks * threads, begin = kept_packs + thread_idx;
  for (int i = begin; i < slice.packs; i += threads) {
    cp_async_16(smem_address(smem) + (i - kept_packs) * kPackBytes, x + i * kPackSize<T>);
  }
  cp_async_commit();
  SoftmaxEdge<T, 1> edge;
  edge.load(slice.row, mask, thread_idx, threads, p.scale);
  const auto for_shared = [&](const auto& body) {
    const auto* const cache = reinterpret_cast<const Pack<T>*>(smem) - kept_packs;
    for (int i = begin; i < slice.packs; i += kSharedBatch * threads) {
      SoftmaxBatch<T, kSharedBatch, false, int> batch(threads, slice.packs - i);
      batch.load([&](int position) { return cache[i + position]; });
      batch.score(mask, 0, p.scale);
      body(batch, i);
    }
  };

  kept.score(mask, 0, p.scale);
  const float top = fmaxf(kept.max(p.scale), edge.v[0]), local = softmax_reference(top);
  MaxSum part{top, kept.exponentials(local, p.scale, p.log) + exp_approx(edge.v[0] - local)};
  cp_async_wait<0>();
  for_shared([&](auto& batch, int) { accumulate(&part, batch, p.scale); });
  MaxSum total = block_merge_once(part, block_stats);
  if (blocks > 1) {
    cluster_wait();  // all blocks have started
    total = cluster_stats.merge(total, 0, rank, blocks);
  }

  const float reference = softmax_reference(total.max);
  SoftmaxFinish finish(total.sum, p.log);
  edge.exponentials(reference, p.log);
  edge.store(slice.row, thread_idx, threads, finish);
  for_shared([&](auto& batch, int i) {
    batch.exponentials(reference, p.scale, p.log);
    batch.store(y + i * kPackSize<T>, slice.row.y_packed, reference, p.scale, p.log, finish);
  });
  if (!kept.kKeepsRaw) finish.rebase(top - reference, p.log);
  kept.store(y + thread_idx * kPackSize<T>, slice.row.y_packed, reference, p.scale, p.log, finish);
}

// --- A row read twice ------------------------------------------------------------------------------------------------

// Packs [begin, end) of a row, by a block; body(batch, first pack) for each batch of a thread.
template <class T, class Body>
__device__ __forceinline__ void for_batches(const SoftmaxParams& p, const SoftmaxRow<T, int64_t>& row,
                                            const SoftmaxMask<T, true>& mask, int64_t begin, int64_t end,
                                            const Body& body) {
  constexpr int kPacks = kBatch<T>;
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

// How many clusters of so many blocks run at once, one block on a multiprocessor.
template <class T>
int clusters_at_once(const DeviceInfo& device, int cluster) {
  static ClusterLimit limit;
  return limit.get(softmax_shared_kernel<T>, device, cluster, kSharedMostThreads, softmax_shared_bytes(device));
}

// Blocks of a cluster. The fewer, the better they fill the device (of 132 multiprocessors, clusters of two use all, of
// four or eight 120). More of them where rows are too few to keep all busy, or where the last round of few would be
// half empty.
template <class T>
int cluster_blocks(const SoftmaxParams& p, const DeviceInfo& device) {
  const int64_t packs = p.cols / kPackSize<T>;
  const int most_bytes = softmax_shared_bytes(device);
  if (p.rows <= clusters_at_once<T>(device, kSoftmaxClusterBlocks)) return kSoftmaxClusterBlocks;
  int blocks = 2;
  while (blocks < kSoftmaxClusterBlocks && ceil_div(packs, blocks) * kPackBytes > most_bytes) blocks *= 2;
  const int64_t rounds = ceil_div(p.rows, clusters_at_once<T>(device, blocks));
  return rounds == 1 || rounds >= 4 ? blocks : kSoftmaxClusterBlocks;
}

template <class T>
Status launch_shared(const SoftmaxParams& p, bool clusters, const ExecContext& context) {
  const DeviceInfo& device = *context.device;
  const int most_bytes = softmax_shared_bytes(device);
  static SmemLimit limit;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(softmax_shared_kernel<T>, device, most_bytes));
  const int blocks = clusters ? cluster_blocks<T>(p, device) : 1;
  const int64_t slice_packs = ceil_div(p.cols / kPackSize<T>, blocks);
  const int64_t bytes = slice_packs * kPackBytes;
  const int threads = slice_packs > 4096 ? kSharedMostThreads : slice_packs > 1024 ? 256 : 128;
  const int64_t by_threads = kSharedMostThreads / threads, by_bytes = device.max_smem_per_sm / (bytes + 2048);
  const int64_t per_sm = by_threads < by_bytes ? by_threads : by_bytes > 0 ? by_bytes : 1;
  const unsigned groups = grid_size(p.rows, per_sm * clusters_at_once<T>(device, blocks));
  return launch_with({static_cast<unsigned>(blocks), true},
                     clusters ? "softmax_cluster_shared" : "softmax_block_shared", softmax_shared_kernel<T>,
                     groups * static_cast<unsigned>(blocks), static_cast<unsigned>(threads), static_cast<size_t>(bytes),
                     context, p, static_cast<int>(slice_packs));
}

Status launch_shared(const SoftmaxParams& p, bool clusters, const ExecContext& context) {
  if (p.rows == 0 || p.cols == 0) return {};
  return dispatch(p.dtype,
                  [&](auto tag) { return launch_shared<typename decltype(tag)::type>(p, clusters, context); });
}

template <class T>
Status launch_resident(const SoftmaxParams& p, const SoftmaxResidentShape& shape, const ExecContext& context) {
  const auto kernel = softmax_resident_kernel<T>;
  static SmemLimit limit;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, softmax_shared_bytes(*context.device)));
  return launch_with({static_cast<unsigned>(shape.blocks), true}, "softmax_resident", kernel,
                     static_cast<unsigned>(p.rows * shape.blocks), static_cast<unsigned>(shape.threads),
                     static_cast<size_t>(shape.smem_bytes()), context, p, static_cast<int>(shape.slice_packs));
}

// Chunks of 16 KB, four packs a thread, or more; 256 of a row are enough for all multiprocessors.
int64_t split_chunks(const SoftmaxParams& p) {
  const int64_t chunks = ceil_div(p.cols * static_cast<int64_t>(size_of(p.dtype)), kPackBytes * 4 * kSplitThreads);
  return chunks < 1 ? 1 : chunks < 256 ? chunks : 256;
}

}  // namespace

// As measured on an H200. Blocks of 256 threads with 1000 to 3200 packs each, four on a multiprocessor, do best: while
// one waits or reduces, others load and store. Longer slices, where clusters cannot be larger, take as many threads as
// leave room for two blocks. There are more blocks than that where rows are so few that a multiprocessor would have less
// than two. In us, of float32 and float16, beside what one or two blocks of 512 threads with the row in shared memory
// take: 2048x32768 130, 67 (145, 80); 64x131072 22.1, 12.6 (24.4, 14.3); 512x151936 159, 81 (177, 102); 1024x50257 105,
// 56 (118, 71); 1000x100000 199, 103 (226, 126); 32x40000 6.5, 5.0 (7.5, 6.7).
SoftmaxResidentShape softmax_resident_shape(const SoftmaxParams& p, const DeviceInfo& device) {
  const int64_t packs = softmax_row_packs(p);
  const int most = device.sm >= 90 ? kSoftmaxClusterBlocks : 1;
  int blocks = 1;
  while (blocks < most && (ceil_div(packs, blocks) > 3200 ||
                           (p.rows * blocks < 2 * device.sm_count && packs / blocks >= 2048))) {
    blocks *= 2;
  }
  const int64_t slice = ceil_div(packs, blocks);
  return {slice, blocks, slice <= 3200 ? 256 : slice <= 10240 ? 512 : kResidentMostThreads};
}

Status launch_softmax_resident(const SoftmaxParams& p, const ExecContext& context) {
  if (p.rows == 0 || p.cols == 0) return {};
  return dispatch(p.dtype, [&](auto tag) {
    return launch_resident<typename decltype(tag)::type>(p, softmax_resident_shape(p, *context.device), context);
  });
}

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
