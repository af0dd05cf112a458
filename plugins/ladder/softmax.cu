// The stages of softmax below the production kernels, in the order of the climb. A block (of the last stage: eight) takes a
// row.
//
//   three_pass  maximum, sum, result: the row is read three times
//   online      maximum and sum in one pass: twice
//   vectors     the same in 16-byte pieces
//   registers   once; the row waits in registers. Up to 32768 columns
//   shared      once; the row waits in shared memory. Up to some 57000 columns
//   cluster     once; the row waits in the shared memory of eight blocks. Up to some 460000 columns, and from sm_90 on
//
// A stage's kernel is followed by its launcher. Rows of -inf give zeros.
#include "device/cluster.h"
#include "device/cp_async.h"
#include "device/dispatch.h"
#include "device/pack.h"
#include "device/reduce.h"
#include "device/tile_copy.h"
#include "ladder/ladder.h"

namespace ortplugins::ladder {
namespace {

bool is_empty(const SoftmaxProblem& p) { return p.rows == 0 || p.cols == 0; }
constexpr int kThreads = 256;

__device__ __forceinline__ float inverse(float sum) { return sum == 0.0F ? 0.0F : 1.0F / sum; }

// --- three_pass ------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) softmax_three_pass_kernel(const __grid_constant__ SoftmaxProblem p) {
  __shared__ float scratch[64];
  const float* const x = p.x + blockIdx.x * p.cols;
  float* const y = p.y + blockIdx.x * p.cols;
  float max = -INFINITY;
  for (int64_t col = threadIdx.x; col < p.cols; col += kThreads) max = fmaxf(max, x[col]);
  const float reference = softmax_reference(block_reduce_once(max, scratch, MaxOp{}));
  float sum = 0.0F;
  for (int64_t col = threadIdx.x; col < p.cols; col += kThreads) sum += exp_approx(x[col] - reference);
  const float factor = inverse(block_reduce_once(sum, scratch + 32, SumOp{}));
  for (int64_t col = threadIdx.x; col < p.cols; col += kThreads) y[col] = exp_approx(x[col] - reference) * factor;
}

}  // namespace

Status launch_softmax_three_pass(const SoftmaxProblem& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return launch("softmax_three_pass", softmax_three_pass_kernel, grid_size(p.rows), kThreads, 0, context, p);
}

// --- online ----------------------------------------------------------------------------------------------------------

namespace {

__global__ void __launch_bounds__(kThreads) softmax_online_kernel(const __grid_constant__ SoftmaxProblem p) {
  __shared__ MaxSum scratch[32];
  const float* const x = p.x + blockIdx.x * p.cols;
  float* const y = p.y + blockIdx.x * p.cols;
  MaxSum running;  // a larger maximum rescales the sum so far
  for (int64_t col = threadIdx.x; col < p.cols; col += kThreads) running = merge(running, {x[col], 1.0F});
  const MaxSum row = block_merge_once(running, scratch);
  const float reference = softmax_reference(row.max), factor = inverse(row.sum);
  for (int64_t col = threadIdx.x; col < p.cols; col += kThreads) y[col] = exp_approx(x[col] - reference) * factor;
}

}  // namespace

Status launch_softmax_online(const SoftmaxProblem& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return launch("softmax_online", softmax_online_kernel, grid_size(p.rows), kThreads, 0, context, p);
}

// --- vectors ---------------------------------------------------------------------------------------------------------

namespace {

// A row in packs of four. What lies past its end is -inf, which changes neither maximum nor sum. Where rows do not lie on
// 16-byte boundaries, a pack is read and written element by element.
struct Row {
  const float* x;
  float* y;
  int64_t cols, packs;
  bool aligned;
  __device__ __forceinline__ Row(const SoftmaxProblem& p, int64_t row_idx)
      : x(p.x + row_idx * p.cols), y(p.y + row_idx * p.cols), cols(p.cols), packs((p.cols + 3) / 4) {
    aligned = row_alignment(p.x, p.cols) == 16 && row_alignment(p.y, p.cols) == 16;
  }
  __device__ __forceinline__ int count(int64_t pack) const { return static_cast<int>(min(cols - 4 * pack, int64_t{4})); }
  __device__ __forceinline__ Pack<float> load(int64_t pack) const {
    return aligned ? load_pack(x + 4 * pack) : load_pack_guarded(x + 4 * pack, 0, count(pack), -INFINITY);
  }
  __device__ __forceinline__ void store(int64_t pack, const Pack<float>& v) const {
    if (aligned) {
      store_pack_global(y + 4 * pack, v);
    } else {
      store_pack_guarded(y + 4 * pack, v, 0, count(pack));
    }
  }
};

// Of a pack: the sum of exp(v - reference), and exp(v - reference) * factor.
__device__ __forceinline__ float exponentials(const Pack<float>& v, float reference) {
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum += exp_approx(v.v[i] - reference);
  return sum;
}
__device__ __forceinline__ Pack<float> result(const Pack<float>& v, float reference, float factor) {
  Pack<float> r;
#pragma unroll
  for (int i = 0; i < 4; ++i) r.v[i] = exp_approx(v.v[i] - reference) * factor;
  return r;
}
// One rescaling for four elements.
__device__ __forceinline__ void accumulate(MaxSum* running, const Pack<float>& v) {
  const float max = fmaxf(running->max, largest(v)), reference = softmax_reference(max);
  running->sum = running->sum * exp_approx(running->max - reference) + exponentials(v, reference);
  running->max = max;
}

__global__ void __launch_bounds__(kThreads) softmax_vectors_kernel(const __grid_constant__ SoftmaxProblem p) {
  __shared__ MaxSum scratch[32];
  const Row row(p, blockIdx.x);
  MaxSum running;
#pragma unroll 4
  for (int64_t pack = threadIdx.x; pack < row.packs; pack += kThreads) accumulate(&running, row.load(pack));
  const MaxSum total = block_merge_once(running, scratch);
  const float reference = softmax_reference(total.max), factor = inverse(total.sum);
#pragma unroll 4
  for (int64_t pack = threadIdx.x; pack < row.packs; pack += kThreads) row.store(pack, result(row.load(pack), reference, factor));
}

}  // namespace

Status launch_softmax_vectors(const SoftmaxProblem& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return launch("softmax_vectors", softmax_vectors_kernel, grid_size(p.rows), kThreads, 0, context, p);
}

// --- registers -------------------------------------------------------------------------------------------------------

namespace {

constexpr int kMostThreads = 1024;

template <int kPacks>
__global__ void __launch_bounds__(kMostThreads) softmax_registers_kernel(const __grid_constant__ SoftmaxProblem p) {
  __shared__ float scratch[64];
  const Row row(p, blockIdx.x);
  Pack<float> r[kPacks];
  float max = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {  // all loads are under way before the first is used
    const int64_t pack = threadIdx.x + i * blockDim.x;
    r[i] = pack < row.packs ? row.load(pack) : filled_pack(-INFINITY);
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) max = fmaxf(max, largest(r[i]));
  const float reference = softmax_reference(block_reduce_once(max, scratch, MaxOp{}));
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {  // each exponential once
    r[i] = result(r[i], reference, 1.0F);
    sum += r[i].v[0] + r[i].v[1] + r[i].v[2] + r[i].v[3];
  }
  const float factor = inverse(block_reduce_once(sum, scratch + 32, SumOp{}));
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t pack = threadIdx.x + i * blockDim.x;
#pragma unroll
    for (int j = 0; j < 4; ++j) r[i].v[j] *= factor;
    if (pack < row.packs) row.store(pack, r[i]);
  }
}

unsigned whole_warps(int64_t threads) { return static_cast<unsigned>(ceil_div(threads, 32) * 32); }

}  // namespace

Status launch_softmax_registers(const SoftmaxProblem& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  const int64_t packs = ceil_div(p.cols, 4);
  const auto with = [&](auto kernel, int kept) {
    return launch("softmax_registers", kernel, grid_size(p.rows), whole_warps(ceil_div(packs, kept)), 0, context, p);
  };
  if (packs <= 256) return with(softmax_registers_kernel<1>, 1);
  if (packs <= 2048) return with(softmax_registers_kernel<4>, 4);
  if (packs <= 8 * kMostThreads) return with(softmax_registers_kernel<8>, 8);
  return Status::unsupported("x", "has {} columns, of which the registers of a block hold {}", {p.cols, 32 * kMostThreads});
}

// --- shared ----------------------------------------------------------------------------------------------------------

namespace {

constexpr int kSharedThreads = 512;

// Packs [first, first + count) of a row in shared memory. A thread reads only what it has copied itself, so that no barrier
// lies between the two.
struct SharedPart {
  const Row& row;
  Pack<float>* s;
  int64_t first;
  int count;

  __device__ __forceinline__ void fetch() const {
    const int alignment = row.aligned ? 16 : 4;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      copy_chunk(smem_address(s + i), row.x + 4 * (first + i), 4 * row.count(first + i), alignment);
    }
    cp_async_commit();
    cp_async_wait<0>();
    // The copy has filled up the last pack with zeros.
    const int last = count - 1, rest = row.count(first + last);
    if (last >= 0 && rest < 4 && last % static_cast<int>(blockDim.x) == static_cast<int>(threadIdx.x)) {
      for (int i = rest; i < 4; ++i) s[last].v[i] = -INFINITY;
    }
  }
  __device__ __forceinline__ MaxSum max_sum() const {
    MaxSum running;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) accumulate(&running, s[i]);
    return running;
  }
  __device__ __forceinline__ void finish(const MaxSum& total) const {
    const float reference = softmax_reference(total.max), factor = inverse(total.sum);
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) row.store(first + i, result(s[i], reference, factor));
  }
};

__global__ void __launch_bounds__(kSharedThreads) softmax_shared_kernel(const __grid_constant__ SoftmaxProblem p) {
  extern __shared__ __align__(16) Pack<float> s[];
  __shared__ MaxSum scratch[32];
  const Row row(p, blockIdx.x);
  const SharedPart part{row, s, 0, static_cast<int>(row.packs)};
  part.fetch();
  part.finish(block_merge_once(part.max_sum(), scratch));
}

constexpr int64_t kReservedShared = 2048;  // static shared memory and what the system keeps

}  // namespace

Status launch_softmax_shared(const SoftmaxProblem& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  const int64_t packs = ceil_div(p.cols, 4), most = context.device->max_smem_per_block - kReservedShared;
  if (packs * kPackBytes > most) return Status::unsupported("x", "has {} columns, of which shared memory holds {}", {p.cols, most / 4});
  static SmemLimit limit;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(softmax_shared_kernel, *context.device, static_cast<int>(most)));
  const unsigned threads = whole_warps(packs < kSharedThreads ? packs : kSharedThreads);
  return launch("softmax_shared", softmax_shared_kernel, grid_size(p.rows), threads, packs * kPackBytes, context, p);
}

// --- cluster ---------------------------------------------------------------------------------------------------------

namespace {

constexpr int kClusterBlocks = 8;

__global__ void __launch_bounds__(kSharedThreads) softmax_cluster_kernel(const __grid_constant__ SoftmaxProblem p, int part_packs) {
  extern __shared__ __align__(16) Pack<float> s[];
  __shared__ MaxSum scratch[32];
  __shared__ __align__(8) MaxSum of_blocks[kClusterBlocks];
  cluster_arrive();  // the wait is below: until then no block may write to another, which may not have started
  const Row row(p, blockIdx.x / kClusterBlocks);
  const int64_t first = static_cast<int64_t>(rank_in_cluster()) * part_packs, left = row.packs - first;
  const SharedPart part{row, s, first, static_cast<int>(max(min(left, static_cast<int64_t>(part_packs)), int64_t{0}))};
  part.fetch();
  const MaxSum of_block = block_merge_once(part.max_sum(), scratch);
  cluster_wait();
  if (threadIdx.x < kClusterBlocks) {
    store_to_block(&of_blocks[rank_in_cluster()].max, static_cast<int>(threadIdx.x), of_block.max, of_block.sum);
  }
  cluster_arrive();
  cluster_wait();
  MaxSum total;
#pragma unroll
  for (int block = 0; block < kClusterBlocks; ++block) total = merge(total, of_blocks[block]);
  part.finish(total);
}

}  // namespace

Status launch_softmax_cluster(const SoftmaxProblem& p, const ExecContext& context) {
  if (context.device->sm < 90) return Status::unsupported("device", "has no thread block clusters: sm_{}", {context.device->sm});
  if (is_empty(p)) return {};
  const int64_t part = ceil_div(ceil_div(p.cols, 4), kClusterBlocks), most = context.device->max_smem_per_block - kReservedShared;
  if (part * kPackBytes > most) return Status::unsupported("x", "has {} columns, of which a cluster holds {}", {p.cols, kClusterBlocks * most / 4});
  static SmemLimit limit;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(softmax_cluster_kernel, *context.device, static_cast<int>(most)));
  const unsigned threads = whole_warps(part < kSharedThreads ? part : kSharedThreads);
  return launch_cluster("softmax_cluster", softmax_cluster_kernel, grid_size(p.rows * kClusterBlocks), threads, part * kPackBytes, kClusterBlocks,
                        context, p, static_cast<int>(part));
}

namespace {
__global__ void ladder_boundary_kernel() {}
}  // namespace

Status launch_boundary(const ExecContext& context) { return launch("ladder_boundary", ladder_boundary_kernel, 1, 1, 0, context); }

}  // namespace ortplugins::ladder
