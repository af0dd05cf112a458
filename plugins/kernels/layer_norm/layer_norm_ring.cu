// LayerNorm and RMSNorm of aligned rows of 16-bit elements on CUDA, with x and the residual brought by the copy engine
// (sm_90).
//
// A group of warps, one of those of a block or all of them, holds a row in registers, 32 * kPacks packs a warp; lane i
// owns packs i, i + 32, ... of these. Blocks stay for many rows, so that gamma and beta stay in registers, too. Each
// warp has a ring of buffers in shared memory, one for its part of a row, and fills it on its own: when a row has been
// taken into registers, its buffer takes that of a later row. Reads of memory thus go on while a group reduces and
// writes.
//
// Statistics are those of layer_norm.cu, found by each warp for its part and then joined, which takes one barrier: the
// warps' means, as differences to the first one's, and their squared deviations. Each warp's pivot is the first element
// of its part.
#include "core/device.h"
#include "device/bulk_copy.h"
#include "device/dependent_launch.h"
#include "device/dispatch.h"
#include "device/pack.h"
#include "device/reduce.h"
#include "kernels/layer_norm/variants.h"

namespace ortplugins {
namespace {

// kMostThreads: of all blocks of a multiprocessor together; registers are shared out so.
template <class T, int kPacks, int kMostThreads>
__global__ void __launch_bounds__(kMostThreads, 1)
    layer_norm_ring_kernel(const __grid_constant__ LayerNormParams p, int group_warps, int slots) {
  constexpr int kSize = kPackSize<T>;
  extern __shared__ uint4 smem[];
  __shared__ float4 stats[2][32];  // (parity of the round, warp)
  const int warp_idx = static_cast<int>(threadIdx.x) / 32, lane_idx = static_cast<int>(threadIdx.x) % 32;
  const int part_idx = warp_idx % group_warps, groups = static_cast<int>(blockDim.x) / 32 / group_warps;
  const bool has_residual = p.residual != nullptr;
  const int cols = static_cast<int>(p.cols);
  const int first = part_idx * 32 * kPacks;  // pack of the row
  const int packs = max(0, min(32 * kPacks, cols / kSize - first));
  constexpr int kPartBytes = 32 * kPacks * kPackBytes;
  const int slot_bytes = has_residual ? 2 * kPartBytes : kPartBytes;
  WarpRing ring(smem_address(smem), slots, slot_bytes);
  const char* const of_warp = reinterpret_cast<const char*>(smem) + warp_idx * slots * slot_bytes;
  let_next_kernel_start();
  wait_for_previous_kernel();

  const int rows = static_cast<int>(p.rows), stride = static_cast<int>(gridDim.x) * groups;
  int row_idx = static_cast<int>(blockIdx.x) * groups + warp_idx / group_warps, next_row = row_idx;
  const auto fill = [&](int slot_idx) {
    if (next_row >= rows) return;
    const T* const x = static_cast<const T*>(p.x) + (next_row * p.cols + first * kSize);
    if (has_residual) {
      const unsigned from_row = p.residual_rows == p.rows
                                    ? static_cast<unsigned>(next_row)
                                    : static_cast<unsigned>(next_row) % static_cast<unsigned>(p.residual_rows);
      const T* const residual = static_cast<const T*>(p.residual) + (from_row * p.cols + first * kSize);
      ring.fill(slot_idx, x, residual, kPartBytes, packs * kPackBytes);
    } else {
      ring.fill(slot_idx, x, packs * kPackBytes);
    }
    next_row += stride;
  };
  for (int i = 0; i < slots; ++i) fill(i);

  Pack<T> gamma[kPacks], beta[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    gamma[i] = filled_pack(from_float<T>(1.0F));
    beta[i] = filled_pack(from_float<T>(-0.0F));  // leaves even -0 as it is
    const int position = lane_idx + 32 * i;
    if (position >= packs) continue;
    if (p.gamma != nullptr) gamma[i] = load_pack_readonly(static_cast<const T*>(p.gamma) + (first + position) * kSize);
    if (p.beta != nullptr) beta[i] = load_pack_readonly(static_cast<const T*>(p.beta) + (first + position) * kSize);
  }

  const auto has = [&](int i) { return lane_idx + 32 * i < packs; };
  for (int round = 0; row_idx < rows; round ^= 1, row_idx += stride) {
    Pack<T> s[kPacks];
    const auto forget_floats = [&] {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) forget(s[i]);
    };
    ring.wait();
    const auto* const slot = reinterpret_cast<const Pack<T>*>(of_warp + ring.slot * slot_bytes);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (!has(i)) continue;
      Pack<T> pack = slot[lane_idx + 32 * i];
      if (has_residual) pack = pack_add(pack, slot[lane_idx + 32 * (kPacks + i)]);
      s[i] = pack;
      if (p.sum != nullptr) {
        store_pack_global(static_cast<T*>(p.sum) + (row_idx * p.cols + (first + lane_idx + 32 * i) * kSize), pack);
      }
    }
    __syncwarp();
    fill(ring.slot);
    ring.advance();

    // add(total, x) for all elements of this lane, of even and of odd ones of a pack for themselves.
    const auto sum_of = [&](const auto& add) {
      float sum = 0.0F;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (!has(i)) continue;
        float e[kSize], total[2] = {};
        unpack(s[i], e);
#pragma unroll
        for (int j = 0; j < kSize; ++j) total[j % 2] = add(total[j % 2], e[j]);
        sum += total[0] + total[1];
      }
      return sum;
    };
    SplitMean mean;  // of the warp's part, then of the row
    if (!p.rms) {
      float of_first[kSize];
      unpack(s[0], of_first);
      const float pivot = __shfl_sync(kFullWarp, of_first[0], 0);
      const float sum = sum_of([&](float total, float x) { return total + (x - pivot); });
      mean = SplitMean::of(pivot, warp_sum(sum) / static_cast<float>(packs * kSize));
    }
    forget_floats();
    const float squares = warp_sum(sum_of([&](float total, float x) {  // of deviations from mean.high
      const float d = x - mean.high;
      return fmaf(d, d, total);
    }));
    forget_floats();
    float variance;
    if (group_warps == 1) {
      variance = squares / static_cast<float>(packs * kSize) - mean.low * mean.low;
    } else {
      if (lane_idx == 0) {
        stats[round][warp_idx] = make_float4(mean.high, mean.low, squares, static_cast<float>(packs * kSize));
      }
      __syncthreads();
      const float4 of_lane = lane_idx < group_warps ? stats[round][lane_idx] : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      const float base = __shfl_sync(kFullWarp, of_lane.x, 0);
      const float d = (of_lane.x - base) + of_lane.y;  // of this part's mean from `base`
      const float shift = warp_sum(of_lane.w == 0.0F ? 0.0F : of_lane.w * d) / static_cast<float>(cols);
      mean = SplitMean::of(base, shift);
      const float between = d - shift;
      variance =
          warp_sum(of_lane.w == 0.0F ? 0.0F : of_lane.z + of_lane.w * (between * between - of_lane.y * of_lane.y)) /
          static_cast<float>(cols);
    }
    const float rstd = 1.0F / sqrtf((variance < 0.0F ? 0.0F : variance) + p.epsilon);
    const float offset = -mean.low * rstd;
    T* const y = static_cast<T*>(p.y) + (row_idx * p.cols + (first + lane_idx) * kSize);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (!has(i)) continue;
      float e[kSize], g[kSize], b[kSize];
      unpack(s[i], e);
      forget(gamma[i]);
      forget(beta[i]);
      unpack(gamma[i], g);
      unpack(beta[i], b);
#pragma unroll
      for (int j = 0; j < kSize; ++j) e[j] = fmaf(fmaf(e[j] - mean.high, rstd, offset), g[j], b[j]);
      store_pack_global(y + 32 * i * kSize, pack_floats<T>(e));
    }
  }
}

// kSlots: buffers of a warp, or as many as fit.
template <class T, int kPacks, int kMostThreads, int kSlots>
Status launch_ring(const LayerNormParams& p, const ExecContext& context) {
  const DeviceInfo& device = *context.device;
  const auto kernel = layer_norm_ring_kernel<T, kPacks, kMostThreads>;
  constexpr int kStaticBytes = 1024;
  const int block_bytes = layer_norm_shared_bytes(device) - kStaticBytes;
  static SmemLimit limit;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, device, block_bytes));
  const int group_warps = static_cast<int>(ceil_div(p.cols / kPackSize<T>, 32 * kPacks));
  const int groups = group_warps == 1 ? 8 : 1, warps = groups * group_warps;
  const int blocks = kMostThreads / 32 / warps;  // of a multiprocessor
  const int slot_bytes = 32 * kPacks * kPackBytes * (p.residual != nullptr ? 2 : 1);
  const int most_bytes = blocks == 1 ? block_bytes : device.max_smem_per_sm / blocks - 2 * kStaticBytes - 256;
  const int fitting = most_bytes / WarpRing::bytes(warps, 1, slot_bytes), slots = fitting < kSlots ? fitting : kSlots;
  return launch_with({1, true}, "layer_norm_ring", kernel,
                     grid_size(ceil_div(p.rows, groups), blocks * device.sm_count), static_cast<unsigned>(32 * warps),
                     static_cast<size_t>(WarpRing::bytes(warps, slots, slot_bytes)), context, p, group_warps, slots);
}

}  // namespace

Status launch_layer_norm_ring(const LayerNormParams& p, const ExecContext& context) {
  if (p.rows == 0 || p.cols == 0) return {};
  return dispatch_half(p.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    // As few lanes as can be are without a pack. On an H200 (16384, 768) takes 15.4 us, with a residual 22.0 (6, 512:
    // 17.2 and 22.9); (16384, 1536) 29.3 (4, 512: 35.3); (16384, 4096) 71.5 (6, 512: 73.5); (4096, 12288) 56.7 (4, 512:
    // 63.1), with a residual 74.9 (6, 512: 83.6). More slots than these are slower by up to 7 %.
    const int64_t packs = p.cols / kPackSize<T>;
    if (p.cols <= kLayerNormRingWarpElements) return launch_ring<T, 3, 768, 2>(p, context);
    const bool wide = p.residual == nullptr && ((packs > 128 && packs <= 192) || packs > 1024);
    return wide ? launch_ring<T, 6, 512, 6>(p, context) : launch_ring<T, 4, 512, 1>(p, context);
  });
}

}  // namespace ortplugins
