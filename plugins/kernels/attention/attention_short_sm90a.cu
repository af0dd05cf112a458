// FusedAttention for 16-bit types on Hopper, short sequences: all keys are one tile, and a block is one warpgroup with
// 64 query rows of one head.
//
// With so little to compute (128 x 128 scores of a head of 64 take a multiprocessor 0.5 us) latency is what counts,
// from the end of the kernel in front to the last store. On an H200, of 3.3 us for 8 x 12 x 128 x 64:
//   - Addresses are computed while the kernel in front still runs, and L2 is asked for q, k and v. Where they are in
//     memory that saves 0.5 us, where they are in L2 nothing.
//   - The threads copy q, k and v themselves (cp.async), so that no descriptor is fetched: TMA takes 0.35 us more.
//     Keys that no row may see become zeros, unread.
//   - The softmax needs one pass, as all scores of a row are there before the first exponential. With 128 keys the
//     products with the first half of v run while the exponentials of the second are computed.
//   - y goes out in whole rows of 128 bytes, by way of shared memory: as it lies in registers it takes 0.7 us more.
//   - Small blocks let those of the next kernel in beside them. How many share a multiprocessor: launch_short_typed.
//
// Shared memory: q (64 rows), k and v (kBlockN rows each) in rows of 128 bytes with the 128-byte swizzle, then the
// mask's values of the keys. Warp w owns rows 16 w to 16 w + 15 of q, and brings their y together there.
#include <algorithm>

#include "device/dependent_launch.h"
#include "device/mma.h"
#include "device/shared_memory.h"
#include "device/sm90_rs.h"
#include "kernels/attention/attention_device.h"
#include "kernels/attention/attention_sm90a.h"
#include "kernels/attention/variants.h"

namespace ortplugins {
namespace {

constexpr int kBlockM = 64, kThreads = 128;
constexpr int kFar = 1 << 28;  // further than any two positions are apart

struct ShortLaunch {
  AttentionLaunch a;
  KeyTensors keys;
  Divisor group;
  int rows = 0, total_len = 0, mask_len = 0, head_dim = 0, v_head_dim = 0;
  int offset = 0, left = 0,
      right = 0;  // KeyBand's are offset + left and offset + right; lengths in device memory change offset
  bool prefetch = false;
};

// kIssued: steps of 16 keys whose products with v are issued together. kBlocksPerSm: as many as registers allow, for
// grids of many blocks.
template <int kBlockN_, int kIssued_, int kBlocksPerSm_>
struct ShortTile {
  static constexpr int kBlockN = kBlockN_, kIssued = kIssued_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kBytesQ = kBlockM * 128, kBytesK = kBlockN * 128;
  static constexpr int kSmemBytes = kBytesQ + 2 * kBytesK + kBlockN * static_cast<int>(sizeof(float));
};

// Of the columns that a lane holds of a row of scores, 8 n and 8 n + 1 from its first one on, those below `limit`: as
// bits 2 n and 2 n + 1.
__device__ __forceinline__ uint32_t columns_below(int limit) {
  const unsigned columns = static_cast<unsigned>(max(limit, 0));
  return __funnelshift_lc(0xffffffffU, 0, columns / 8 * 2 + min(columns % 8, 2U));
}

// Adds nothing to `probe`, 0 at first, for a pair of numbers; after a NaN or an infinity it is not 0.
template <class T>
__device__ __forceinline__ void probe_pair(uint32_t* probe, uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;\n" : "+r"(*probe) : "r"(pair), "r"(0));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;\n" : "+r"(*probe) : "r"(pair), "r"(0));
  }
}

template <class T, class Tile>
__global__ void __launch_bounds__(kThreads, Tile::kBlocksPerSm)
    attention_short_kernel(const __grid_constant__ ShortLaunch w) {
  constexpr int kBlockN = Tile::kBlockN;
  let_next_kernel_start();
  extern __shared__ __align__(1024) char smem[];
  float* const mask_values = reinterpret_cast<float*>(smem + Tile::kBytesQ + 2 * Tile::kBytesK);
  const uint32_t sQ = smem_address(smem), sK = sQ + Tile::kBytesQ, sV = sK + Tile::kBytesK;

  const AttentionParams& p = w.a.p;
  const int thread_idx = static_cast<int>(threadIdx.x), lane_idx = static_cast<int>(threadIdx.x % 32);
  const int warp_idx = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x / 32), 0);
  const int h = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
  const int row0 = static_cast<int>(blockIdx.x) * kBlockM;
  const int kv_head = static_cast<int>(w.group.quotient(blockIdx.y));
  const bool masked = p.mask_dtype != DType::kNone;

  // A thread copies chunk `chunk`, 16 bytes, of rows `row`, `row` + kStep and so on.
  constexpr int kStep = kThreads / 8;
  const int row = static_cast<int>(threadIdx.x / 8), chunk = static_cast<int>(threadIdx.x % 8);
  const uint32_t own = row * 128 + (chunk ^ row % 8) * 16;
  const auto own_source = [&](const void* base, const AttentionStrides& s, int head, int first_row) {
    return static_cast<const T*>(base) + b * s.batch + head * s.head + (first_row + row) * s.seq + chunk * 8;
  };
  const T* const q = own_source(p.q, p.q_strides, h, row0);
  const T* const k = own_source(w.keys.k, w.keys.k_strides, kv_head, 0);
  const T* const v = own_source(w.keys.v, w.keys.v_strides, kv_head, 0);
  if (w.prefetch) {
    // Harmless where the kernel in front is yet to write them: L2 has but one copy. Each thread asks for one row.
    const auto prefetch = [&](const T* own_chunk, int64_t stride, int rows) {
      const T* const from = own_chunk + chunk * (kStep * stride - 8);
      if (row + chunk * kStep < rows) asm volatile("prefetch.global.L2 [%0];\n" ::"l"(from));
    };
    prefetch(k, w.keys.k_strides.seq, w.total_len);
    prefetch(q, p.q_strides.seq, min(w.rows - row0, kBlockM));
    prefetch(v, w.keys.v_strides.seq, w.total_len);
  }
  wait_for_previous_kernel();

  int length = w.total_len, offset = w.offset;
  if (p.total_lengths != nullptr) {
    const int64_t n = p.total_lengths[b];
    length = static_cast<int>(min(max(n, int64_t{0}), static_cast<int64_t>(length)));
    offset = static_cast<int>(min(max(n - w.rows, int64_t{-kFar}), int64_t{kFar}));
  }
  const KeyBand band{masked ? min(length, w.mask_len) : length, offset + w.left, offset + w.right};
  {
    const int last = band.last(row0 + kBlockM - 1) - row;  // end of the keys that some row may see, from this thread's first
    const int k_rows = chunk * 8 < w.head_dim ? last : 0, v_rows = chunk * 8 < w.v_head_dim ? last : 0;
    const int q_rows = chunk * 8 < w.head_dim ? w.rows - row0 - row : 0;
#pragma unroll
    for (int i = 0; i < kBlockN; i += kStep)
      cp_async_16(sK + own + i * 128, k + i * w.keys.k_strides.seq, i < k_rows ? 16 : 0);
#pragma unroll
    for (int i = 0; i < kBlockM; i += kStep)
      cp_async_16(sQ + own + i * 128, q + i * p.q_strides.seq, i < q_rows ? 16 : 0);
    cp_async_commit();
#pragma unroll
    for (int i = 0; i < kBlockN; i += kStep)
      cp_async_16(sV + own + i * 128, v + i * w.keys.v_strides.seq, i < v_rows ? 16 : 0);
    cp_async_commit();
  }
  if (masked && thread_idx < kBlockN) {
    const int64_t mask_row = mask_row_offset(p, b, h, 0);
    mask_values[thread_idx] =
        thread_idx < band.end ? mask_value<T>(p, mask_row + thread_idx * p.mask_stride_key) : -INFINITY;
  }
  cp_async_wait<1>();
  fence_async_proxy();
  __syncthreads();

  float s[kBlockN / 2];
  const uint64_t desc_q = wgmma_descriptor(sQ), desc_k = wgmma_descriptor(sK),
                 desc_v = wgmma_descriptor(sV, Tile::kBytesK);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 4; ++kk)
    Wgmma<T, kBlockN, false, false>::run(s, desc_q + kk * 32 / 16, desc_k + kk * 32 / 16, kk != 0);
  wgmma_commit();

  // Keys that some row of this warp may see end at own_end.
  const int warp_row = row0 + warp_idx * 16, g = lane_idx / 4, t = lane_idx % 4;
  const int own_end = warp_row < w.rows ? band.last(min(warp_row + 15, w.rows - 1)) : 0;
  const bool all_seen =
      band.left + warp_row + 15 <= 0 && min(band.right + warp_row, masked ? kBlockN : band.end) >= kBlockN;
  wgmma_wait<0>();
  wgmma_pin(s);

  // Weights are exp2(score * unit - offset). Without a mask the offset is rounded, but all that a row adds up is
  // relative to it, so that this cancels as long as it is small. With one the scores have been brought to units of
  // log2, and it is exact: large scores are those of a row masked throughout with the lowest number of its type, as
  // exporters do.
  float unit = w.a.score_scale, offsets[2] = {}, sums[2] = {};
  if (own_end > 0) {
    if (masked) {
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) {
        const float2 m = *reinterpret_cast<const float2*>(mask_values + 8 * n + 2 * t);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          s[4 * n + 2 * half] = fmaf(s[4 * n + 2 * half], unit, m.x);
          s[4 * n + 2 * half + 1] = fmaf(s[4 * n + 2 * half + 1], unit, m.y);
        }
      }
      unit = 1.0F;
    }
    if (!all_seen) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = warp_row + g + 8 * half;
        const uint32_t seen = columns_below(band.last(i) - 2 * t) & ~columns_below(band.first(i) - 2 * t);
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if ((seen >> (2 * n + e) & 1) == 0) s[4 * n + 2 * half + e] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max[2] = {s[2 * half], s[2 * half + 1]};
#pragma unroll
      for (int n = 1; n < kBlockN / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) max[e] = fmaxf(max[e], s[4 * n + 2 * half + e]);
      }
      offsets[half] = softmax_reference(warp_max<4>(fmaxf(max[0], max[1]))) * unit;
    }
  }
  cp_async_wait<0>();
  fence_async_proxy();
  __syncthreads();

  float acc[32];
  uint32_t weights[kBlockN / 16][4];
#pragma unroll
  for (int step = 0; step < kBlockN / 16; step += Tile::kIssued) {
    constexpr int kLast = kBlockN / 16;
#pragma unroll
    for (int kk = step; kk < step + Tile::kIssued && kk < kLast; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[kk][i] = 0;
    }
    if (step * 16 < own_end) {
#pragma unroll
      for (int kk = step; kk < step + Tile::kIssued && kk < kLast; ++kk) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float lo = exp2_approx(fmaf(s[8 * kk + 2 * i], unit, -offsets[i % 2]));
          const float hi = exp2_approx(fmaf(s[8 * kk + 2 * i + 1], unit, -offsets[i % 2]));
          sums[i % 2] += lo + hi;
          weights[kk][i] = pack_half2<T>(lo, hi);
        }
      }
    }
    wgmma_fence();
#pragma unroll
    for (int kk = step; kk < step + Tile::kIssued && kk < kLast; ++kk) {
      WgmmaRegisters<T, 64>::run(acc, weights[kk], desc_v + kk * 2048 / 16, kk != 0);
    }
    wgmma_commit();
  }
  float inverse[2];
  bool redo[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = warp_sum<4>(sums[half]);
    inverse[half] = sum == 0.0F ? 0.0F : reciprocal_approx(sum);
    redo[half] = isnan(sum) || (!masked && fabsf(offsets[half]) > 0x1p24F);
  }
  wgmma_wait<0>();
  wgmma_pin(acc);

  // Epilogue. Rows g and g + 8 as pairs of elements, in matrices of 8 x 8 for stmatrix.
  uint32_t rounded[2][8];
  unsigned spoilt[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t probe = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      rounded[half][n] =
          pack_half2<T>(acc[4 * n + 2 * half] * inverse[half], acc[4 * n + 2 * half + 1] * inverse[half]);
      probe_pair<T>(&probe, rounded[half][n]);
    }
    spoilt[half] = __ballot_sync(kFullWarp, redo[half] || probe != 0);
  }
  const uint32_t own_tile = sQ + warp_idx * 16 * 128,
                 to = own_tile + lane_idx % 16 * 128 + (lane_idx / 16 ^ lane_idx % 8) * 16;
#pragma unroll
  for (int n = 0; n < 8; n += 2)
    stmatrix_x4(to ^ n * 16, {rounded[0][n], rounded[1][n], rounded[0][n + 1], rounded[1][n + 1]});
  __syncwarp();
  const int y_row = lane_idx / 8;
  const uint32_t from = own_tile + y_row * 128 + (chunk ^ y_row) * 16;
  T* const y = static_cast<T*>(p.y) + b * p.y_strides.batch + h * p.y_strides.head +
               (warp_row + y_row) * p.y_strides.seq + chunk * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Pack<T> pack;
    *reinterpret_cast<float4*>(&pack) = load_shared_float4((from ^ i % 2 * 64) + i * 4 * 128);
    if (warp_row + y_row + 4 * i < w.rows && chunk * 8 < w.v_head_dim)
      store_pack_global(y + 4 * i * p.y_strides.seq, pack);
  }
  // A masked NaN or infinity of k or v leaked, or there is a NaN to be seen: see attend_row_exactly.
  if ((spoilt[0] | spoilt[1]) != 0) {
    __syncwarp();
    for (int r = 0; r < 16; ++r) {
      if (((r < 8 ? spoilt[0] : spoilt[1]) >> (4 * (r % 8)) & 0xf) != 0 && warp_row + r < w.rows) {
        attend_row_exactly_inline<T>(w.a, b, h, warp_row + r, 0, p.v_head_dim);
      }
    }
  }
}

template <class T, class Tile>
Status launch_short_typed(const AttentionParams& p, const ExecContext& context) {
  ShortLaunch w;
  w.a = make_attention_launch(p);
  w.keys = key_tensors(p);
  w.group = Divisor(w.a.group);
  w.rows = static_cast<int>(p.q_len);
  w.total_len = static_cast<int>(p.total_len());
  w.mask_len = static_cast<int>(p.mask_len);
  w.head_dim = static_cast<int>(p.head_dim);
  w.v_head_dim = static_cast<int>(p.v_head_dim);
  w.offset = static_cast<int>(p.past_len);
  w.left = p.window >= 0 ? -static_cast<int>(std::min<int64_t>(p.window, kFar)) : -kFar;
  w.right = p.window_right >= 0 ? static_cast<int>(std::min<int64_t>(p.window_right + 1, kFar)) : kFar;
  if (p.is_causal) w.right = std::min(w.right, 1);

  // With room for more blocks than it takes to spread a small grid over the device, some multiprocessors get too many.
  // More shared memory than is used keeps them out. H200, 12 heads of 64, us, two, three and four blocks: 4 x 128 3.1,
  // 3.5, 3.9; 8 x 128 3.2, 3.3, 4.2, with a mask and from memory 4.6, 4.2, 5.3; 16 x 128 5.6, 4.1, 4.5; 32 x 128 8.5,
  // 6.9, 6.5.
  const int64_t tiles = ceil_div(p.q_len, kBlockM), blocks = tiles * p.heads * p.batch, sms = context.device->sm_count;
  constexpr auto smem_for = [](int blocks_per_sm) {
    constexpr int kSmemPerSm = 228 * 1024, kReserved = 1024;  // of a multiprocessor, for each block
    return kSmemPerSm / (blocks_per_sm + 1) / 128 * 128 - kReserved + 128;
  };
  static_assert(smem_for(3) >= Tile::kSmemBytes);
  const int smem_bytes = blocks <= sms ? smem_for(2) : blocks <= 3 * sms ? smem_for(3) : Tile::kSmemBytes;
  w.prefetch = blocks <= 2 * sms;  // later ones could not ask in time
  static SmemLimit limit;
  const auto kernel = attention_short_kernel<T, Tile>;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, smem_for(2)));
  return launch_with({1, true}, "attention_short_kernel", kernel,
                     dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(p.heads), static_cast<unsigned>(p.batch)),
                     kThreads, smem_bytes, context, w);
}

template <class Tile>
Status launch_short(const AttentionParams& params, const ExecContext& context) {
  bool done = false;
  ORTPLUGINS_RETURN_IF_ERROR(attention_prologue(params, context, &done));
  if (done) return {};
  return dispatch_half(
      params.dtype, [&](auto tag) { return launch_short_typed<typename decltype(tag)::type, Tile>(params, context); });
}

}  // namespace

bool attention_short_supports(const AttentionParams& p, const DeviceInfo& device, int64_t len) {
  return p.total_len() <= len && p.q_len <= kFar / 2 && p.heads <= 65535 && p.batch <= 65535 &&
         attention_wgmma_supports_plain(p, device, 64);
}
Status launch_attention_short_80(const AttentionParams& params, const ExecContext& context) {
  return launch_short<ShortTile<80, 5, 5>>(params, context);
}
Status launch_attention_short_128(const AttentionParams& params, const ExecContext& context) {
  return launch_short<ShortTile<128, 4, 4>>(params, context);
}

}  // namespace ortplugins
