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
//   - A mask of keys that only leaves keys out, as padding does, comes to a bit for each; only other values are added.
//     It is asked for before q, k and v, or it would come after them.
//   - Rows of a mask are loaded to registers while the scores are multiplied.
//
// Shared memory: q (64 rows), k and v (kBlockN rows each) in rows of 128 bytes with the 128-byte swizzle, then the
// mask: values of the keys, or 64 rows as they lie in memory. Warp w owns rows 16 w to 16 w + 15 of q, and brings their y
// together there.
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

struct ShortLaunch {
  AttentionLaunch a;
  KeyTensors keys;
  KeyBand band{};  // of every sequence, unless their lengths lie in device memory
  Divisor group;
  int rows = 0, total_len = 0, mask_len = 0, head_dim = 0, v_head_dim = 0;
  bool prefetch = false;
  int mask_row_bytes = 0;
  bool mask_packs = false, mask_pairs = false;  // rows of a mask start at multiples of 16 bytes, or of two values
};

// kIssued: steps of 16 keys whose products with v are issued together. kBlocksPerSm: as many as registers allow, or shared
// memory, for grids of many blocks. kRows: a mask whose rows differ.
template <int kBlockN_, int kIssued_, int kBlocksPerSm_, bool kRows_ = false>
struct ShortTile {
  static constexpr int kBlockN = kBlockN_, kIssued = kIssued_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr bool kRows = kRows_;
  static constexpr int kBytesQ = kBlockM * 128, kBytesK = kBlockN * 128;
  // Of rows of the mask that start at multiples of 16 bytes: rows g of a warp lie in different banks. Others take less.
  static constexpr int kMaskPitch = kBlockN * 2 + 16;
  static constexpr int kSmemBytes =
      kBytesQ + 2 * kBytesK + (kRows ? kBlockM * kMaskPitch : kBlockN * static_cast<int>(sizeof(float)));
};

// Of the columns that a lane holds of a row of scores, 8 n and 8 n + 1 from its first one on, those below `limit`: as
// bits 2 n and 2 n + 1.
__device__ __forceinline__ uint32_t columns_below(int limit) {
  const unsigned columns = static_cast<unsigned>(max(limit, 0));
  return __funnelshift_lc(0xffffffffU, 0, columns / 8 * 2 + min(columns % 8, 2U));
}

// Bit 2 n + e of word t: what lane l of warp w says of key key_of_bit(w, l), so that word t has a lane's columns as
// columns_below has them.
__device__ __forceinline__ int key_of_bit(int word, int bit) { return bit / 2 * 8 + word * 2 + bit % 2; }

// The 16 rows of a mask that belong to a warp, one behind the other in memory: packed with a pitch of their own in shared
// memory, or as they lie if they do not start at multiples of 16 bytes.
template <class Tile>
struct MaskRows {
  const char* from;  // the first
  uint32_t to;       // in shared memory, as far behind a multiple of 16 bytes as there
  int pitch, rows;   // none if `rows` is not positive

  __device__ __forceinline__ MaskRows(const ShortLaunch& w, uint32_t tile, int b, int h, int warp_row) {
    const int64_t offset = mask_row_offset(w.a.p, b, h, warp_row);
    from = static_cast<const char*>(w.a.p.mask) + (w.a.p.mask_dtype == DType::kBool ? offset : 2 * offset);
    to = tile + warp_row % kBlockM * Tile::kMaskPitch + static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) % 16);
    pitch = w.mask_packs ? Tile::kMaskPitch : w.mask_row_bytes;
    rows = min(w.rows - warp_row, 16);
  }

  // By the warp; of each row `bytes` at least, as far as there are.
  __device__ __forceinline__ void copy(const ShortLaunch& w, int bytes) const {
    const int lane_idx = static_cast<int>(threadIdx.x % 32);
    if (w.mask_packs) {
      const int row = lane_idx / 16, at = lane_idx % 16 * 16;
      if (at >= min(bytes, w.mask_row_bytes)) return;
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        if (row + i < rows) cp_async_16(to + (row + i) * pitch + at, from + (row + i) * w.mask_row_bytes + at);
      }
    } else {
      const int shift = static_cast<int>(to % 16), end = shift + rows * w.mask_row_bytes;
      for (int at = lane_idx * 16; at < end; at += 32 * 16) cp_async_16(to - shift + at, from - shift + at, min(end - at, 16));
    }
  }
};

// The values of a mask for this lane's scores, columns 8 n and 8 n + 1 from its first one on of rows g and g + 8: as pairs of
// elements or bytes as they lie in memory. Of keys that no row of the warp may see they may be zeros.
template <class Tile>
__device__ __forceinline__ void load_mask_rows(const ShortLaunch& w, const MaskRows<Tile>& mask, int end,
                                               uint32_t (&pairs)[Tile::kBlockN / 8][2]) {
  const int lane_idx = static_cast<int>(threadIdx.x % 32);
  // load(address, column): that one and the next of a row.
  const auto load_all = [&](auto load) {
#pragma unroll
    for (int n = 0; n < Tile::kBlockN / 8; ++n) {
      pairs[n][0] = pairs[n][1] = 0;
      if (n / 2 * 16 >= end) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(lane_idx / 4 + 8 * half, mask.rows - 1);
        pairs[n][half] = load(mask.to + row * mask.pitch, 8 * n + lane_idx % 4 * 2);
      }
    }
  };
  const bool is_bool = w.a.p.mask_dtype == DType::kBool;
  if (w.mask_pairs) {
    if (is_bool) {
      load_all([](uint32_t row, int column) { return load_shared_u16(row + column); });
    } else {
      load_all([](uint32_t row, int column) { return load_shared_u32(row + 2 * column); });
    }
  } else if (is_bool) {
    load_all([](uint32_t row, int column) { return load_shared_u8(row + column) | load_shared_u8(row + column + 1) << 8; });
  } else {
    load_all([](uint32_t row, int column) {
      // Rows that start between two words take a load more, in which no two of them meet in a bank.
      const uint32_t word = row / 4 * 4 + 2 * column;
      const bool between = row % 4 != 0;
      uint32_t next = 0;
      if (between) next = load_shared_u32(word + 4);
      return __byte_perm(load_shared_u32(word), next, between ? 0x5432 : 0x3210);
    });
  }
}

// Products become scores in natural units.
template <class T, int kCount, int kPairs>
__device__ __forceinline__ void add_mask_rows(const AttentionParams& p, float (&s)[kCount],
                                              const uint32_t (&pairs)[kPairs][2]) {
  const auto add = [&](auto values) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const float2 m = values(pairs[i / 4][i / 2 % 2]);
      s[i] = fmaf(s[i], p.scale, m.x);
      s[i + 1] = fmaf(s[i + 1], p.scale, m.y);
    }
  };
  if (p.mask_dtype == DType::kBool) {
    const auto value_of = [](uint32_t open) { return open != 0 ? 0.0F : -INFINITY; };
    add([&](uint32_t pair) { return make_float2(value_of(pair & 0xffU), value_of(pair & 0xff00U)); });
  } else {
    add([](uint32_t pair) { return unpack_half2<T>(pair); });
  }
}

template <class T, class Tile>
__global__ void __launch_bounds__(kThreads, Tile::kBlocksPerSm)
    attention_short_kernel(const __grid_constant__ ShortLaunch w) {
  constexpr int kBlockN = Tile::kBlockN;
  let_next_kernel_start();
  extern __shared__ __align__(1024) char smem[];
  __shared__ uint4 s_open, s_adds;  // keys that their mask leaves open, and those to whose scores it adds something
  const uint32_t sQ = smem_address(smem), sK = sQ + Tile::kBytesQ, sV = sK + Tile::kBytesK, sMask = sV + Tile::kBytesK;

  const AttentionParams& p = w.a.p;
  const int lane_idx = static_cast<int>(threadIdx.x % 32);
  const int warp_idx = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x / 32), 0);
  const int h = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
  const int row0 = static_cast<int>(blockIdx.x) * kBlockM;
  const int kv_head = static_cast<int>(w.group.quotient(blockIdx.y));
  const bool keys_mask = !Tile::kRows && p.mask_dtype != DType::kNone;

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
  const auto own_mask_rows = [&] { return MaskRows<Tile>(w, sMask, b, h, row0 + warp_idx * 16); };
  const int key = key_of_bit(warp_idx, lane_idx);  // whose value this lane brings
  const bool mask_is_bool = p.mask_dtype == DType::kBool;
  const auto key_value_at = [&] {
    const int64_t offset = mask_row_offset(p, b, h, 0) + key * p.mask_stride_key;
    return static_cast<const char*>(p.mask) + (mask_is_bool ? offset : 2 * offset);
  };
  if (w.prefetch) {
    // Harmless where the kernel in front is yet to write them: L2 has but one copy. Each thread asks for one row.
    const auto prefetch = [&](const T* own_chunk, int64_t stride, int rows) {
      const T* const from = own_chunk + chunk * (kStep * stride - 8);
      if (row + chunk * kStep < rows) prefetch_l2(from);
    };
    prefetch(k, w.keys.k_strides.seq, w.total_len);
    prefetch(q, p.q_strides.seq, min(w.rows - row0, kBlockM));
    prefetch(v, w.keys.v_strides.seq, w.total_len);
    if constexpr (Tile::kRows) {
      const MaskRows<Tile> rows = own_mask_rows();
      if (lane_idx * 128 < rows.rows * w.mask_row_bytes) prefetch_l2(rows.from + lane_idx * 128);
    }
    if (keys_mask && key < w.mask_len) prefetch_l2(key_value_at());
  }
  wait_for_previous_kernel();

  const KeyBand band = sequence_band(p, w.band, b);
  uint32_t key_bits = 0;  // nothing is done with them before all copies are under way
  if (keys_mask && key < band.end) {
    const char* const at = key_value_at();
    key_bits = mask_is_bool ? *reinterpret_cast<const uint8_t*>(at) : *reinterpret_cast<const uint16_t*>(at);
  }
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
    if constexpr (Tile::kRows) {
      own_mask_rows().copy(w, band.last(row0 + warp_idx * 16 + 15) * static_cast<int>(mask_is_bool ? 1 : sizeof(T)));
      cp_async_commit();
    }
#pragma unroll
    for (int i = 0; i < kBlockN; i += kStep)
      cp_async_16(sV + own + i * 128, v + i * w.keys.v_strides.seq, i < v_rows ? 16 : 0);
    cp_async_commit();
  }
  if (keys_mask) {
    float key_value = -INFINITY;
    if (key < band.end) {
      key_value = mask_is_bool ? (key_bits != 0 ? 0.0F : -INFINITY) : unpack_half2<T>(key_bits).x;
    }
    if (key < kBlockN) reinterpret_cast<float*>(smem + Tile::kBytesQ + 2 * Tile::kBytesK)[key] = key_value;
    const uint32_t open = __ballot_sync(kFullWarp, key_value != -INFINITY);
    const uint32_t adds = __ballot_sync(kFullWarp, key_value != -INFINITY && key_value != 0.0F);
    if (lane_idx == 0) {
      reinterpret_cast<uint32_t*>(&s_open)[warp_idx] = open;
      reinterpret_cast<uint32_t*>(&s_adds)[warp_idx] = adds;
    }
  }
  cp_async_wait<Tile::kRows ? 2 : 1>();
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
  uint32_t mask_pairs[Tile::kRows ? kBlockN / 8 : 1][2];
  if constexpr (Tile::kRows) {
    cp_async_wait<1>();
    __syncwarp();
    if (own_end > 0) load_mask_rows<Tile>(w, own_mask_rows(), own_end, mask_pairs);
  }
  uint32_t open = 0xffffffffU;  // of this lane's columns
  bool all_seen = band.left + warp_row + 15 <= 0 && min(band.right + warp_row, band.end) >= kBlockN, adds = Tile::kRows;
  if (keys_mask) {
    constexpr uint32_t kColumns = kBlockN == 128 ? 0xffffffffU : (1U << kBlockN / 4) - 1;
    open = reinterpret_cast<const uint32_t*>(&s_open)[t];
    all_seen = all_seen && (s_open.x & s_open.y & s_open.z & s_open.w & kColumns) == kColumns;
    adds = (s_adds.x | s_adds.y | s_adds.z | s_adds.w) != 0;
  }
  wgmma_wait<0>();
  wgmma_pin(s);

  // Weights are exp2(score * unit - offset). The offset is rounded, but all that a row adds up is relative to it, so that
  // this cancels as long as it is small. Large scores are those of a row masked throughout with the lowest number of its
  // type, as exporters do: from them the maximum is subtracted first. Without a mask they are a matter of overflowing inputs.
  float unit = w.a.score_scale, offsets[2] = {}, sums[2] = {};
  if (own_end > 0) {
    if (adds) {  // in natural units
      unit = kLog2e;
      if constexpr (Tile::kRows) {
        add_mask_rows<T>(p, s, mask_pairs);
      } else {
        const uint32_t values = sMask + 2 * t * static_cast<int>(sizeof(float));
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n) {
          const float2 m = load_shared_float2(values + 8 * n * static_cast<int>(sizeof(float)));
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            s[4 * n + 2 * half] = fmaf(s[4 * n + 2 * half], p.scale, m.x);
            s[4 * n + 2 * half + 1] = fmaf(s[4 * n + 2 * half + 1], p.scale, m.y);
          }
        }
      }
    }
    if (!all_seen) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = warp_row + g + 8 * half;
        const uint32_t seen = open & columns_below(band.last(i) - 2 * t) & ~columns_below(band.first(i) - 2 * t);
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
      offsets[half] = softmax_reference(warp_max<4>(fmaxf(max[0], max[1])));
    }
    if (adds && __any_sync(kFullWarp, fmaxf(fabsf(offsets[0]), fabsf(offsets[1])) > 4096.0F)) {
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i) s[i] -= offsets[i / 2 % 2];
      offsets[0] = offsets[1] = 0.0F;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) offsets[half] *= unit;
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
    redo[half] = isnan(sum) || fabsf(offsets[half]) > 0x1p24F;
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
      probe = times_zero_plus<T>(rounded[half][n], probe);
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
  if (p.total_lengths == nullptr) w.band = key_band(p, 0);
  w.rows = static_cast<int>(p.q_len);
  w.total_len = static_cast<int>(p.total_len());
  w.mask_len = static_cast<int>(p.mask_len);
  w.head_dim = static_cast<int>(p.head_dim);
  w.v_head_dim = static_cast<int>(p.v_head_dim);
  if (Tile::kRows) {
    w.mask_row_bytes = static_cast<int>(p.mask_len * static_cast<int64_t>(size_of(p.mask_dtype)));
    w.mask_packs = is_aligned(p.mask, 16) && w.mask_row_bytes % 16 == 0;
    w.mask_pairs = is_aligned(p.mask, 2 * static_cast<int64_t>(size_of(p.mask_dtype))) && p.mask_len % 2 == 0;
  }

  // With room for more blocks than it takes to spread a small grid over the device, some multiprocessors get too many.
  // More shared memory than is used keeps them out. H200, 12 heads of 64, us, two, three and four blocks: 4 x 128 3.1,
  // 3.5, 3.9; 8 x 128 3.2, 3.3, 4.2, with a mask and from memory 4.6, 4.2, 5.3; 16 x 128 5.6, 4.1, 4.5; 32 x 128 8.5,
  // 6.9, 6.5.
  const int64_t tiles = ceil_div(p.q_len, kBlockM), blocks = tiles * p.heads * p.batch, sms = context.device->sm_count;
  constexpr auto smem_for = [](int blocks_per_sm) {
    constexpr int kSmemPerSm = 228 * 1024, kReserved = 1024;  // of a multiprocessor, for each block
    return std::max(kSmemPerSm / (blocks_per_sm + 1) / 128 * 128 - kReserved + 128, Tile::kSmemBytes);
  };
  const int smem_bytes = blocks <= sms ? smem_for(2) : blocks <= 3 * sms ? smem_for(3) : Tile::kSmemBytes;
  w.prefetch = blocks <= 2 * sms;  // later ones could not ask in time
  static SmemLimit limit;
  const auto kernel = attention_short_kernel<T, Tile>;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, smem_for(2)));
  return launch_with({1, true}, "attention_short_kernel", kernel,
                     dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(p.heads), static_cast<unsigned>(p.batch)),
                     kThreads, smem_bytes, context, w);
}

template <class Keys, class Rows>
Status launch_short(const AttentionParams& params, const ExecContext& context) {
  bool done = false;
  ORTPLUGINS_RETURN_IF_ERROR(attention_prologue(params, context, &done));
  if (done) return {};
  return dispatch_half(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return params.mask_dtype == DType::kNone || mask_is_keys(params) ? launch_short_typed<T, Keys>(params, context)
                                                                     : launch_short_typed<T, Rows>(params, context);
  });
}

}  // namespace

bool attention_short_supports(const AttentionParams& p, const DeviceInfo& device, int64_t len) {
  return p.total_len() <= len && p.heads <= 65535 && p.batch <= 65535 && p.softcap == 0.0F && p.scale > 0.0F &&
         attention_wgmma_supports(p, device, 64) &&
         (p.mask_dtype == DType::kNone || mask_is_keys(p) || p.mask_stride_seq == p.mask_len);
}
Status launch_attention_short_80(const AttentionParams& params, const ExecContext& context) {
  return launch_short<ShortTile<80, 5, 5>, ShortTile<80, 5, 5, true>>(params, context);
}
Status launch_attention_short_128(const AttentionParams& params, const ExecContext& context) {
  return launch_short<ShortTile<128, 4, 4>, ShortTile<128, 4, 3, true>>(params, context);
}

}  // namespace ortplugins
