// Brings float32 operands to scaled float16 (gemm_scaled.h): one kernel finds the largest magnitude of each row or column,
// the next writes the parts and counts the elements that the guard asks for.
//
// A block takes kTileRows x kTileCols of one stored matrix; a warp reads whole rows of it, four elements a lane, so that
// all loads of a thread are in flight at once. Statistics go along the rows or down the columns, whichever k is.
#include "device/dependent_launch.h"
#include "device/dispatch.h"
#include "device/pack.h"
#include "kernels/gemm/gemm_scaled.h"

namespace ortplugins {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTileRows = 64, kTileCols = 128;
constexpr int kWarpRows = kTileRows / kWarps;

// This thread's elements of a tile: rows warp + 8 i, columns 4 lane to 4 lane + 3.
struct TilePart {
  int64_t matrix, first_row, first_col;
  const ScaleJob& job;
  float v[kWarpRows][4];

  __device__ __forceinline__ TilePart(const ScaleJob& job, int64_t index) : job(job) {
    const int64_t tiles_x = (job.cols + kTileCols - 1) / kTileCols, tiles_y = (job.rows + kTileRows - 1) / kTileRows;
    matrix = index / (tiles_x * tiles_y);
    index -= matrix * tiles_x * tiles_y;
    first_row = index / tiles_x * kTileRows + static_cast<int>(threadIdx.x) / 32;
    first_col = index % tiles_x * kTileCols + static_cast<int>(threadIdx.x) % 32 * 4;
    const float* at = job.x + matrix * job.matrix_stride + first_row * job.ld + first_col;
    const bool aligned = job.ld % 4 == 0 && pack_shift(at) == 0 && first_col + 4 <= job.cols;
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) v[i][j] = 0.0F;
      if (!row_exists(i)) continue;
      const float* const row = at + i * kWarps * job.ld;
      if (aligned) {
        const Pack<float> pack = load_pack(row);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i][j] = pack.v[j];
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (first_col + j < job.cols) v[i][j] = row[j];
        }
      }
    }
  }
  __device__ __forceinline__ bool row_exists(int i) const { return first_row + i * kWarps < job.rows; }
  __device__ __forceinline__ int64_t stats_offset() const { return matrix * (job.along_row ? job.rows : job.cols); }
};

// Adds up the columns of a tile over its warps: `mine` of column 4 lane + j by `combine`, then `finish(column, total)`.
template <class Combine, class Finish>
__device__ __forceinline__ void combine_columns(const uint32_t (&mine)[4], const Combine& combine, const Finish& finish) {
  __shared__ uint32_t columns[kWarps][kTileCols];
  const int thread_idx = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int j = 0; j < 4; ++j) columns[thread_idx / 32][thread_idx % 32 * 4 + j] = mine[j];
  __syncthreads();
  if (thread_idx >= kTileCols) return;
  uint32_t total = columns[0][thread_idx];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) total = combine(total, columns[warp][thread_idx]);
  finish(thread_idx, total);
}

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffU; }

__device__ __forceinline__ void find_max(const ScaleJob& job, int64_t index) {
  const TilePart part(job, index);
  uint32_t* const out = job.max + part.stats_offset();
  if (job.along_row) {
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) largest = max(largest, magnitude_bits(part.v[i][j]));
      largest = __reduce_max_sync(0xffffffffU, largest);
      if (threadIdx.x % 32 == 0 && part.row_exists(i)) atomicMax(out + part.first_row + i * kWarps, largest);
    }
  } else {
    uint32_t largest[4] = {};
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) largest[j] = max(largest[j], magnitude_bits(part.v[i][j]));
    }
    const int64_t tile_col = part.first_col - static_cast<int>(threadIdx.x) % 32 * 4;
    combine_columns(
        largest, [](uint32_t a, uint32_t b) { return max(a, b); },
        [&](int column, uint32_t total) {
          if (tile_col + column < job.cols) atomicMax(out + tile_col + column, total);
        });
  }
}

// Four elements as hi, and with kParts 2 as lo, in float16; adds to `large` where they reach kGuardLarge.
template <int kParts>
__device__ __forceinline__ void split_and_store(const float (&v)[4], const float (&scale)[4], __half* hi, int64_t part_stride, int count,
                                                uint32_t (&large)[4]) {
  __half h[4], l[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float x = v[j] * scale[j];
    large[j] += fabsf(x) >= kGuardLarge ? 1 : 0;
    h[j] = __float2half_rn(x);
    l[j] = __float2half_rn(x - __half2float(h[j]));
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const __half(&from)[4] = part == 0 ? h : l;
    __half* const to = hi + part * part_stride;
    if (count == 4) {  // rows of the copy are 16-byte aligned
      *reinterpret_cast<uint2*>(to) = make_uint2(*reinterpret_cast<const uint32_t*>(&from[0]), *reinterpret_cast<const uint32_t*>(&from[2]));
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < count) to[j] = from[j];
      }
    }
  }
}

template <int kParts>
__device__ __forceinline__ void split(const ScaleJob& job, int64_t index) {
  const TilePart part(job, index);
  const uint32_t* const max_bits = job.max + part.stats_offset();
  int* const large_out = job.large + part.stats_offset();
  const int64_t left = job.cols - part.first_col;
  const int count = left >= 4 ? 4 : left < 0 ? 0 : static_cast<int>(left);
  const int64_t part_stride = job.rows * job.out_ld;
  __half* const out = job.out + kParts * part.matrix * part_stride + part.first_row * job.out_ld + part.first_col;
  float scale[4];
  if (!job.along_row) {
#pragma unroll
    for (int j = 0; j < 4; ++j) scale[j] = j < count ? exp2_int(scale_exponent(max_bits[part.first_col + j])) : 0.0F;
  }
  uint32_t large_in_column[4] = {};
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    if (!part.row_exists(i)) break;
    if (job.along_row) {
      const float row_scale = exp2_int(scale_exponent(max_bits[part.first_row + i * kWarps]));
#pragma unroll
      for (int j = 0; j < 4; ++j) scale[j] = row_scale;
    }
    uint32_t large[4] = {};
    split_and_store<kParts>(part.v[i], scale, out + i * kWarps * job.out_ld, part_stride, count, large);
    if (job.along_row) {
      const uint32_t total = __reduce_add_sync(0xffffffffU, large[0] + large[1] + large[2] + large[3]);
      if (threadIdx.x % 32 == 0) atomicAdd(large_out + part.first_row + i * kWarps, static_cast<int>(total));
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) large_in_column[j] += large[j];
    }
  }
  if (job.along_row) return;
  const int64_t tile_col = part.first_col - static_cast<int>(threadIdx.x) % 32 * 4;
  combine_columns(
      large_in_column, [](uint32_t a, uint32_t b) { return a + b; },
      [&](int column, uint32_t total) {
        if (tile_col + column < job.cols) atomicAdd(large_out + tile_col + column, static_cast<int>(total));
      });
}

// The first blocks_a blocks work on a, the others on b.
__global__ void __launch_bounds__(kThreads) gemm_scale_max_kernel(const __grid_constant__ ScaleJob a, const __grid_constant__ ScaleJob b,
                                                                  int64_t blocks_a) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t index = blockIdx.x;
  index < blocks_a ? find_max(a, index) : find_max(b, index - blocks_a);
}

template <int kParts>
__global__ void __launch_bounds__(kThreads) gemm_scale_split_kernel(const __grid_constant__ ScaleJob a, const __grid_constant__ ScaleJob b,
                                                                    int64_t blocks_a) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t index = blockIdx.x;
  index < blocks_a ? split<kParts>(a, index) : split<kParts>(b, index - blocks_a);
}

int64_t blocks_of(const ScaleJob& job) { return ceil_div(job.rows, kTileRows) * ceil_div(job.cols, kTileCols) * job.matrices; }

}  // namespace

Status scale_operands(const ScaleJob& a, const ScaleJob& b, int parts, const ExecContext& context) {
  const int64_t blocks_a = blocks_of(a), blocks = blocks_a + blocks_of(b);
  if (blocks > 0x7fffffff) return Status::unsupported("a", "and b have more than 2^31 tiles");
  const unsigned grid = static_cast<unsigned>(blocks);
  const LaunchOptions options{1, blocks <= 8 * context.device->sm_count};
  ORTPLUGINS_RETURN_IF_ERROR(launch_with(options, "gemm_scale_max", gemm_scale_max_kernel, grid, kThreads, 0, context, a, b, blocks_a));
  return launch_with(options, "gemm_scale_split", parts == 2 ? gemm_scale_split_kernel<2> : gemm_scale_split_kernel<1>, grid, kThreads, 0, context, a, b, blocks_a);
}

}  // namespace ortplugins
