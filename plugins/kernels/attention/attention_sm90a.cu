// FusedAttention for 16-bit types on Hopper: TMA brings tiles of q, k, v (and of the mask) to shared memory, wgmma multiplies.
//
// A block is one producer warpgroup and kConsumers consumer warpgroups, and stays on its multiprocessor: it walks a list of
// work items, each kBlockM = 64 * kConsumers query rows of one head. The producer runs ahead of the consumers by kStages
// tiles of keys, also from one item into the next. A consumer warpgroup owns 64 rows: scores, weights and its part of y stay
// in registers, and the weights are the A operand of the second product as they stand (device/sm90_rs.h).
//
// What keeps the tensor cores busy while exponentials are computed:
//   - within a warpgroup, the product of the next tile's scores and that of this tile's weights with v are issued together;
//     the softmax of the next tile runs while the second is in flight;
//   - between warpgroups, a token (named barriers) lets one issue its products at a time, so that one multiplies while
//     another is in its softmax.
//
// Shared memory, each tile in blocks of 64 elements (rows of 128 bytes, swizzled by TMA), 1024-byte aligned:
//   q (kBlockM rows), k and v (kStages x kBlockN rows each), with a mask also kStages mask tiles (kBlockM rows) or rows.
#include <algorithm>

#include "device/sm90_rs.h"
#include "device/tensor_map.h"
#include "kernels/attention/attention_device.h"
#include "kernels/attention/variants.h"

namespace ortplugins {
namespace {

// How scores are masked. kKeys: one value for each key, the same for all rows of an item; it is turned into floats by a
// producer warp. kRows16, kRowsBool: a tile of elements or of bytes, brought by TMA.
enum class MaskTiles : int { kNone, kKeys, kRows16, kRowsBool };

struct WgmmaLaunch {
  AttentionLaunch a;
  CUtensorMap q, k, v, mask;
  const void* keys_mask = nullptr;
  MaskTiles mask_tiles = MaskTiles::kNone;
  bool mask_has_batch = false, mask_has_head = false;
  bool scores = false;      // products need more than a positive factor: softcap, or a scale that is not positive
  int items = 0;
  int q_bytes = 0;          // of a tile of q
  int section_heads = 0;    // heads (of all sequences) whose keys and values fit in L2 together
};

// All numbers of a variant. kScores: masks, softcap and any scale; without, a product only takes a positive factor. kSplit:
// few queries on a long cache. Then a tile's rows are those of all query heads that share a key head, row r being query
// r % q_len of head r / q_len of the group, and the keys are split over items, whose results are merged afterwards.
template <int kDim_, int kBlockN_, int kConsumers_, int kStages_, bool kScores_, bool kSplit_ = false>
struct WgmmaTile {
  static constexpr int kDim = kDim_, kBlockN = kBlockN_, kConsumers = kConsumers_, kStages = kStages_;
  static constexpr bool kScores = kScores_, kSplit = kSplit_;
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kDimBlocks = (kDim + 63) / 64;
  static constexpr int kBytesQ = kDimBlocks * kBlockM * 128;
  static constexpr int kBytesK = kDimBlocks * kBlockN * 128;
  static constexpr int kBytesMask = kScores && !kSplit ? (kBlockN + 63) / 64 * kBlockM * 128 : 0;  // of 16-bit elements
  static constexpr int kSmemBytes = 1024 + kBytesQ + kStages * (2 * kBytesK + kBytesMask);
  static_assert(kSmemBytes <= 227 * 1024);
};

// Registers of the two roles, out of 64 K: what the consumers gain is what the producer gives. With one consumer warpgroup a
// thread may have 255 anyway.
template <class Tile>
__device__ __forceinline__ void take_producer_registers() {
  if constexpr (Tile::kConsumers > 1) registers_decrease<Tile::kConsumers == 3 ? 32 : Tile::kScores ? 40 : 24>();
}
template <class Tile>
__device__ __forceinline__ void take_consumer_registers() {
  if constexpr (Tile::kConsumers > 1) registers_increase<Tile::kConsumers == 3 ? 160 : Tile::kScores ? 232 : 240>();
}

// Barriers in shared memory, by their 32-bit addresses.
template <int kStages>
struct WgmmaBarriers {
  uint32_t base;
  static constexpr int kCount = 2 + 6 * kStages;
  __device__ __forceinline__ uint32_t at(int i) const { return base + 8 * i; }
  __device__ __forceinline__ uint32_t q_full() const { return at(0); }
  __device__ __forceinline__ uint32_t q_empty() const { return at(1); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return at(2 + stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return at(2 + kStages + stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return at(2 + 2 * kStages + stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return at(2 + 3 * kStages + stage); }
  __device__ __forceinline__ uint32_t mask_full(int stage) const { return at(2 + 4 * kStages + stage); }
  __device__ __forceinline__ uint32_t mask_empty(int stage) const { return at(2 + 5 * kStages + stage); }
};

// Item of this block in a round; items count tiles fastest, then heads and sequences, longest tiles first under a causal mask.
// -1 past the end. Under a causal mask items become shorter:
// within a section of heads that share L2 the longest come first, and every other round runs backwards, so that a block
// which got the longest of one round gets the shortest of the next.
__device__ __forceinline__ int wgmma_item(const WgmmaLaunch& w, int round) {
  const int grid = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  if (!w.a.p.is_causal) {
    const int slot = round * grid + block;
    return slot < w.items ? slot : -1;
  }
  const int slot = round * grid + (round % 2 == 0 ? block : grid - 1 - block);
  if (slot >= w.items) return -1;
  const int tiles = static_cast<int>(w.a.tiles);
  const int section_items = w.section_heads * tiles;
  const int section = slot / section_items, rest = slot % section_items;
  const int heads = min(w.section_heads, w.items / tiles - section * w.section_heads);
  return (section * w.section_heads + rest % heads) * tiles + rest / heads;
}

// What an item is about. 32-bit numbers throughout: a division of 64-bit ones takes hundreds of cycles, and an item of a
// short sequence only a few thousand.
struct WgmmaItem {
  int b, h, kv_head;
  int row0;         // first query
  int split;
  int first, last;  // keys that some of its queries may see, and that belong to its split
};

// Rounds of items until this block's part of the list ends; visit(item, band) for each.
template <class Tile, class Visit>
__device__ __forceinline__ void for_each_item(const WgmmaLaunch& w, Visit visit) {
  constexpr int kBlockM = Tile::kBlockM;
  const unsigned tiles = static_cast<unsigned>(w.a.tiles), heads = static_cast<unsigned>(w.a.p.heads);
  const int rows = static_cast<int>(w.a.p.q_len);
  for (int round = 0; round * static_cast<int>(gridDim.x) < w.items; ++round) {
    if constexpr (Tile::kSplit) {
      const unsigned index = static_cast<unsigned>(round) * gridDim.x + blockIdx.x;
      if (index >= static_cast<unsigned>(w.items)) return;
      const unsigned splits = static_cast<unsigned>(w.a.splits), kv_heads = static_cast<unsigned>(w.a.p.kv_heads);
      const unsigned head = index / splits;
      WgmmaItem item;
      item.split = static_cast<int>(index - head * splits);
      item.b = static_cast<int>(head / kv_heads);
      item.kv_head = static_cast<int>(head % kv_heads);
      item.h = item.kv_head * w.a.group;
      item.row0 = 0;
      const KeyBand band = key_band(w.a.p, item.b);
      const int first = band.first(0), last = band.last(rows - 1);
      const int tiles_n = max(0, last - first + Tile::kBlockN - 1) / Tile::kBlockN;
      const int part = (tiles_n + w.a.splits - 1) / w.a.splits * Tile::kBlockN;
      item.first = min(last, first + item.split * part);
      item.last = min(last, item.first + part);
      visit(item, band);
      continue;
    }
    const int index = wgmma_item(w, round);
    if (index < 0) continue;
    const unsigned head = static_cast<unsigned>(index) / tiles;
    unsigned tile = static_cast<unsigned>(index) - head * tiles;
    if (w.a.p.is_causal) tile = tiles - 1 - tile;
    WgmmaItem item;
    item.b = static_cast<int>(head / heads);
    item.h = static_cast<int>(head % heads);
    item.split = 0;
    item.kv_head = static_cast<int>(static_cast<unsigned>(item.h) / static_cast<unsigned>(w.a.group));
    item.row0 = static_cast<int>(tile) * kBlockM;
    const KeyBand band = key_band(w.a.p, item.b);
    item.first = band.first(item.row0);
    item.last = band.last(min(item.row0 + kBlockM, rows) - 1);
    visit(item, band);
  }
}

// 4 x 4 transpose of registers among the four lanes of a group: afterwards register i of lane t is register t of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&r)[4], int t) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t received = __shfl_xor_sync(kFullWarp, (t & 1) != 0 ? r[i] : r[i + 1], 1);
    if ((t & 1) != 0) r[i] = received; else r[i + 1] = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t received = __shfl_xor_sync(kFullWarp, (t & 2) != 0 ? r[i] : r[i + 2], 2);
    if ((t & 2) != 0) r[i] = received; else r[i + 2] = received;
  }
}

template <class T>
__device__ __forceinline__ float2 unpack_half2(uint32_t bits);
template <>
__device__ __forceinline__ float2 unpack_half2<__half>(uint32_t bits) { return __half22float2(*reinterpret_cast<const __half2*>(&bits)); }
template <>
__device__ __forceinline__ float2 unpack_half2<__nv_bfloat16>(uint32_t bits) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000U));
}

__device__ __forceinline__ uint32_t load_shared_u32(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared_u16(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float2 load_shared_float2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

// The mask's value for one key in natural units (not log2).
template <class T>
__device__ __forceinline__ float key_mask_value(const WgmmaLaunch& w, int64_t offset) {
  if (w.a.p.mask_dtype == DType::kBool) return static_cast<const uint8_t*>(w.a.p.mask)[offset] != 0 ? 0.0F : -INFINITY;
  return to_float(static_cast<const T*>(w.a.p.mask)[offset]);
}

// A consumer thread's share of 64 rows: rows g and g + 8 of its warp's 16, in accumulator order.
template <class T, class Tile>
struct Softmax {
  static constexpr int kCount = Tile::kBlockN / 2;
  float max[2], sum[2], correction[2];  // max in natural units (not log2); sum of this lane's columns alone

  __device__ __forceinline__ void reset() {
    max[0] = max[1] = -INFINITY;
    sum[0] = sum[1] = 0.0F;
  }

  // Turns the scores of a tile into weights relative to the new maximum. `factor`, positive, brings them to natural units.
  // A weight is exp2(score * unit - offset) in one fused multiply-add. The offset is rounded, but all that a row adds up is
  // relative to it, so that this cancels as long as it is small.
  __device__ __forceinline__ void update(float (&s)[kCount], float factor) {
    float new_max[2];
    {
      float m[4][2];  // four chains for each row, so that maxima do not wait for each other
#pragma unroll
      for (int i = 0; i < 16; i += 2) m[i / 4][i / 2 % 2] = fmaxf(s[i], s[i + 1]);
#pragma unroll
      for (int i = 16; i < kCount; i += 2) m[i / 4 % 4][i / 2 % 2] = fmaxf(m[i / 4 % 4][i / 2 % 2], fmaxf(s[i], s[i + 1]));
#pragma unroll
      for (int half = 0; half < 2; ++half) new_max[half] = fmaxf(fmaxf(m[0][half], m[1][half]), fmaxf(m[2][half], m[3][half]));
    }
#pragma unroll
    for (int lanes = 2; lanes > 0; lanes /= 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(kFullWarp, new_max[half], lanes));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) new_max[half] = fmaxf(max[half], new_max[half] * factor);
    if constexpr (Tile::kScores) {
      const float larger = fmaxf(fabsf(softmax_reference(new_max[0])), fabsf(softmax_reference(new_max[1])));
      if (__any_sync(kFullWarp, larger > 4096.0F)) {
        update_large(s, new_max, factor);
        return;
      }
    }
    const float unit = factor * kLog2e;
    float offset[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      offset[half] = softmax_reference(new_max[half]) * kLog2e;
      correction[half] = exp2_approx(fmaf(max[half], kLog2e, -offset[half]));
      max[half] = new_max[half];
    }
    float part[4] = {};  // row 0: 0 and 1, row 1: 2 and 3
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(fmaf(s[i], unit, -offset[i / 2 % 2]));
      part[i % 4] += s[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = fmaf(sum[half], correction[half], part[2 * half] + part[2 * half + 1]);
  }

  // As `update` where a maximum is large: a row masked throughout with the lowest number of its type, as exporters do. Times
  // log2(e) it may be infinite, and what is rounded off the offset counts. So the maximum is subtracted first.
  __device__ __forceinline__ void update_large(float (&s)[kCount], const float (&new_max)[2], float factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = softmax_reference(new_max[half]);
      correction[half] = exp2_approx((max[half] - reference) * kLog2e);
      max[half] = new_max[half];
      float total = 0.0F;
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
        for (int e = 4 * n + 2 * half; e < 4 * n + 2 * half + 2; ++e) {
          s[e] = exp2_approx(fmaf(s[e], factor, -reference) * kLog2e);
          total += s[e];
        }
      }
      sum[half] = fmaf(sum[half], correction[half], total);
    }
  }

  // Whether some score of a row was too large for `update`: from here on a rounded offset is off by 2 and more. Without a
  // mask that is a matter of overflowing inputs.
  __device__ __forceinline__ bool is_spoilt(int half) const { return !Tile::kScores && fabsf(softmax_reference(max[half])) > 0x1p24F; }
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) attention_wgmma_kernel(const __grid_constant__ WgmmaLaunch w) {
  constexpr int kDim = Tile::kDim, kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kStages = Tile::kStages;
  extern __shared__ char smem_unaligned[];
  __shared__ uint64_t s_barriers[WgmmaBarriers<kStages>::kCount];
  __shared__ __align__(16) float s_keys_mask[Tile::kScores ? kStages : 1][kBlockN];
  __shared__ int s_keys_masked[kStages];  // whether some value of the tile's mask is not zero
  const uint32_t smem = (smem_address(smem_unaligned) + 1023) & ~1023U;
  const uint32_t sQ = smem, sK = sQ + Tile::kBytesQ, sV = sK + kStages * Tile::kBytesK, sMask = sV + kStages * Tile::kBytesK;
  const WgmmaBarriers<kStages> barriers{smem_address(s_barriers)};

  const AttentionParams& p = w.a.p;
  const int warp_idx = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane_idx = static_cast<int>(threadIdx.x) % 32;
  const bool keys_mask = Tile::kScores && w.mask_tiles == MaskTiles::kKeys;
  const bool rows_mask = Tile::kScores && (w.mask_tiles == MaskTiles::kRows16 || w.mask_tiles == MaskTiles::kRowsBool);
  if constexpr (Tile::kSplit) {
    // Rows that no copy fills, so that their products are harmless.
    for (int i = static_cast<int>(threadIdx.x); i < Tile::kBytesQ / 16; i += Tile::kThreads) {
      *reinterpret_cast<uint4*>(smem_unaligned + (sQ - smem_address(smem_unaligned)) + i * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
  }
  if (threadIdx.x == 0) {
    mbarrier_init(barriers.q_full(), 1);
    mbarrier_init(barriers.q_empty(), 4 * Tile::kConsumers);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barriers.k_full(stage), 1);
      mbarrier_init(barriers.v_full(stage), 1);
      mbarrier_init(barriers.mask_full(stage), keys_mask ? 32 : 1);
      mbarrier_init(barriers.k_empty(stage), 4 * Tile::kConsumers);  // one lane of each consumer warp
      mbarrier_init(barriers.v_empty(stage), 4 * Tile::kConsumers);
      mbarrier_init(barriers.mask_empty(stage), 4 * Tile::kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();

  if (warp_idx < 4) {
    take_producer_registers<Tile>();
    if (warp_idx == 0 && lane_idx == 0) {
      tma_prefetch(&w.q);
      tma_prefetch(&w.k);
      tma_prefetch(&w.v);
      PipelineState<kStages> state;
      uint32_t q_parity = 0;
      for_each_item<Tile>(w, [&](const WgmmaItem& tile, const KeyBand&) {
        if (tile.first >= tile.last) return;
        const int h = tile.h, b = tile.b, kv_head = tile.kv_head;
        mbarrier_wait(barriers.q_empty(), q_parity ^ 1);
        q_parity ^= 1;
        mbarrier_arrive_expect(barriers.q_full(), w.q_bytes);
#pragma unroll
        for (int block = 0; block < Tile::kDimBlocks; ++block) {
          tma_load_4d(sQ + block * kBlockM * 128, &w.q, barriers.q_full(), block * 64, tile.row0, h, b);
        }
        for (int j0 = tile.first; j0 < tile.last; j0 += kBlockN) {
          mbarrier_wait(barriers.k_empty(state.stage), state.parity ^ 1);
          mbarrier_arrive_expect(barriers.k_full(state.stage), Tile::kBytesK);
#pragma unroll
          for (int block = 0; block < Tile::kDimBlocks; ++block) {
            tma_load_4d(sK + state.stage * Tile::kBytesK + block * kBlockN * 128, &w.k, barriers.k_full(state.stage), block * 64, j0,
                        kv_head, b);
          }
          if (rows_mask) {
            const bool bytes = w.mask_tiles == MaskTiles::kRowsBool;
            const int mask_b = w.mask_has_batch ? b : 0, mask_h = w.mask_has_head ? h : 0;
            mbarrier_wait(barriers.mask_empty(state.stage), state.parity ^ 1);
            const int blocks = (kBlockN + (bytes ? 127 : 63)) / (bytes ? 128 : 64);
            mbarrier_arrive_expect(barriers.mask_full(state.stage), blocks * kBlockM * 128);
            for (int block = 0; block < blocks; ++block) {
              tma_load_4d(sMask + state.stage * Tile::kBytesMask + block * kBlockM * 128, &w.mask, barriers.mask_full(state.stage),
                          j0 + block * (bytes ? 128 : 64), tile.row0, mask_h, mask_b);
            }
          }
          mbarrier_wait(barriers.v_empty(state.stage), state.parity ^ 1);
          mbarrier_arrive_expect(barriers.v_full(state.stage), Tile::kBytesK);
#pragma unroll
          for (int block = 0; block < Tile::kDimBlocks; ++block) {
            tma_load_4d(sV + state.stage * Tile::kBytesK + block * kBlockN * 128, &w.v, barriers.v_full(state.stage), block * 64, j0,
                        kv_head, b);
          }
          state.advance();
        }
      });
    } else if (keys_mask && warp_idx == 1) {
      PipelineState<kStages> state;
      for_each_item<Tile>(w, [&](const WgmmaItem& tile, const KeyBand& band) {
        const int64_t row = mask_row_offset(p, tile.b, tile.h, 0);
        for (int j0 = tile.first; j0 < tile.last; j0 += kBlockN) {
          float values[kBlockN / 32];
          bool masked = false;
#pragma unroll
          for (int i = 0; i < kBlockN / 32; ++i) {
            const int j = j0 + i * 32 + lane_idx;
            values[i] = j < band.end ? key_mask_value<T>(w, row + j * p.mask_stride_key) : 0.0F;
            masked |= values[i] != 0.0F;
          }
          masked = __any_sync(kFullWarp, masked);
          mbarrier_wait(barriers.mask_empty(state.stage), state.parity ^ 1);
#pragma unroll
          for (int i = 0; i < kBlockN / 32; ++i) s_keys_mask[state.stage][i * 32 + lane_idx] = values[i];
          if (lane_idx == 0) s_keys_masked[state.stage] = masked ? 1 : 0;
          mbarrier_arrive(barriers.mask_full(state.stage));
          state.advance();
        }
      });
    }
    return;
  }

  take_consumer_registers<Tile>();
  const int consumer_idx = warp_idx / 4 - 1;
  const int g = lane_idx / 4, t = lane_idx % 4;
  const int warp_row = consumer_idx * 64 + warp_idx % 4 * 16;  // in the tile
  // Token: barrier 1 + i lets consumer i issue; 256 threads, those of consumer i and of the one before it.
  const int own_token = 1 + consumer_idx, next_token = 1 + (consumer_idx + 1) % Tile::kConsumers;
  if (Tile::kConsumers > 1 && consumer_idx == Tile::kConsumers - 1) named_barrier_arrive(next_token, 256);

  const uint64_t desc_q = wgmma_descriptor(sQ + consumer_idx * 64 * 128);
  const uint64_t desc_k = wgmma_descriptor(sK), desc_v = wgmma_descriptor(sV, kBlockN * 128);
  float acc[kDim / 2];
  float s[kBlockN / 2];
  uint32_t weights[kBlockN / 16][4];
  Softmax<T, Tile> softmax;

  const auto issue_scores = [&](int stage) {
    const uint64_t desc = desc_k + static_cast<unsigned>(stage) * (Tile::kBytesK / 16U);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kDim / 16; ++kk) {
      Wgmma<T, kBlockN, false, false>::run(s, desc_q + (kk / 4 * kBlockM * 128 + kk % 4 * 32) / 16,
                                           desc + (kk / 4 * kBlockN * 128 + kk % 4 * 32) / 16, kk != 0);
    }
    wgmma_commit();
  };
  const auto issue_values = [&](int stage) {
    const uint64_t desc = desc_v + static_cast<unsigned>(stage) * (Tile::kBytesK / 16U);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kBlockN / 16; ++kk) WgmmaRegisters<T, kDim>::run(acc, weights[kk], desc + kk * 2048 / 16, 1);
    wgmma_commit();
  };
  const auto arrive = [&](uint32_t barrier) {
    if (lane_idx == 0) mbarrier_arrive(barrier);
  };

  const int rows = static_cast<int>(p.q_len);
  PipelineState<kStages> k_state, v_state;  // mask tiles go with k
  uint32_t q_parity = 0;
  for_each_item<Tile>(w, [&](const WgmmaItem& tile, const KeyBand& band) {
    const int row0 = tile.row0 + warp_row + g;  // rows row0 and row0 + 8 of this thread
    softmax.reset();
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) acc[i] = 0.0F;

    if (tile.first < tile.last) {
      // Tiles within [all_first, all_last) are seen whole by every row of this warp: only the others need a check of each score.
      const int all_first = band.first(Tile::kSplit ? rows - 1 : min(tile.row0 + warp_row + 15, rows - 1));
      const int all_last = Tile::kSplit ? min(band.last(0), tile.last) : band.last(min(tile.row0 + warp_row, rows - 1));
      int first[2], last[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row0 + 8 * half;
        const int i = Tile::kSplit ? static_cast<int>(static_cast<unsigned>(r) % static_cast<unsigned>(rows)) : min(r, rows - 1);
        first[half] = band.first(i) - 2 * t;
        last[half] = min(band.last(i), tile.last) - 2 * t;
      }

      // Scores of the tile at j0 to weights. `stage` is that of its mask.
      const auto weigh = [&](int j0, int stage, uint32_t parity) {
        float factor = Tile::kScores ? p.scale : w.a.p.scale;
        if constexpr (Tile::kScores) {
          bool masked = rows_mask;
          if (w.mask_tiles != MaskTiles::kNone) {
            mbarrier_wait(barriers.mask_full(stage), parity);
            if (keys_mask) masked = s_keys_masked[stage] != 0;
          }
          if (w.scores || masked) {
            if (p.softcap != 0.0F) {
              const float in = w.a.score_scale * (2.0F * kLog2e);
#pragma unroll
              for (int i = 0; i < kBlockN / 2; ++i) {
                s[i] = p.softcap * (1.0F - __fdividef(2.0F, exp2_approx(s[i] * in) + 1.0F));
              }
              factor = 1.0F;
            }
            if (keys_mask) {
              const uint32_t values = smem_address(&s_keys_mask[stage][2 * t]);
#pragma unroll
              for (int n = 0; n < kBlockN / 8; ++n) {
                const float2 m = load_shared_float2(values + n * 32);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  if constexpr (Tile::kSplit) {  // the merge takes no NaN from keys that have no weight
                    if (m.x == -INFINITY) s[4 * n + 2 * half] = 0.0F;
                    if (m.y == -INFINITY) s[4 * n + 2 * half + 1] = 0.0F;
                  }
                  s[4 * n + 2 * half] = fmaf(s[4 * n + 2 * half], factor, m.x);
                  s[4 * n + 2 * half + 1] = fmaf(s[4 * n + 2 * half + 1], factor, m.y);
                }
              }
            } else if (w.mask_tiles == MaskTiles::kRows16) {
              const uint32_t rows = sMask + stage * Tile::kBytesMask + (warp_row + g) * 128 + 4 * t;
#pragma unroll
              for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  const float2 m = unpack_half2<T>(load_shared_u32(rows + n / 8 * kBlockM * 128 + half * 8 * 128 + (((n % 8) ^ g) << 4)));
                  s[4 * n + 2 * half] = fmaf(s[4 * n + 2 * half], factor, m.x);
                  s[4 * n + 2 * half + 1] = fmaf(s[4 * n + 2 * half + 1], factor, m.y);
                }
              }
            } else if (w.mask_tiles == MaskTiles::kRowsBool) {
              const uint32_t rows = sMask + stage * Tile::kBytesMask + (warp_row + g) * 128 + 2 * t;
#pragma unroll
              for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  const uint32_t m = load_shared_u16(rows + n / 16 * kBlockM * 128 + half * 8 * 128 + (((n % 16 / 2) ^ g) << 4) + n % 2 * 8);
                  s[4 * n + 2 * half] = (m & 0xffU) != 0 ? s[4 * n + 2 * half] * factor : -INFINITY;
                  s[4 * n + 2 * half + 1] = (m & 0xff00U) != 0 ? s[4 * n + 2 * half + 1] * factor : -INFINITY;
                }
              }
            } else {
#pragma unroll
              for (int i = 0; i < kBlockN / 2; ++i) s[i] *= factor;
            }
            factor = 1.0F;
          }
          if (w.mask_tiles != MaskTiles::kNone) {
            __syncwarp();
            arrive(barriers.mask_empty(stage));
          }
        }
        if (j0 < all_first || j0 + kBlockN > all_last) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int lo = first[half] - j0, hi = last[half] - j0;
#pragma unroll
            for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                if (8 * n + e < lo || 8 * n + e >= hi) s[4 * n + 2 * half + e] = -INFINITY;
              }
            }
          }
        }
        softmax.update(s, factor);
      };
      const auto pack_weights = [&] {
#pragma unroll
        for (int kk = 0; kk < kBlockN / 16; ++kk) {
#pragma unroll
          for (int i = 0; i < 4; ++i) weights[kk][i] = pack_half2<T>(s[8 * kk + 2 * i], s[8 * kk + 2 * i + 1]);
        }
      };

      // Until k of the tile at j0 is there, if there is such a tile. In the mainloop it stands between the softmax and the wait
      // for the product with v: a branch, across which the compiler does not move that wait. Left to itself it waits for the
      // product before the softmax that should hide it.
      const auto wait_for_scores = [&](int j0) {
        if (j0 < tile.last) mbarrier_wait(barriers.k_full(k_state.stage), k_state.parity);
      };

      // Prologue: the first tile's weights.
      mbarrier_wait(barriers.q_full(), q_parity);
      q_parity ^= 1;
      mbarrier_wait(barriers.k_full(k_state.stage), k_state.parity);
      issue_scores(k_state.stage);
      wgmma_wait<0>();
      wgmma_pin(s);
      arrive(barriers.k_empty(k_state.stage));
      weigh(tile.first, k_state.stage, k_state.parity);
      k_state.advance();
      pack_weights();
      wait_for_scores(tile.first + kBlockN);

      // Mainloop: scores of the tile at j0, values of the one before.
      for (int j0 = tile.first + kBlockN; j0 < tile.last; j0 += kBlockN) {
        if constexpr (Tile::kConsumers > 1) named_barrier_sync(own_token, 256);
        issue_scores(k_state.stage);
        mbarrier_wait(barriers.v_full(v_state.stage), v_state.parity);
        issue_values(v_state.stage);
        if constexpr (Tile::kConsumers > 1) named_barrier_arrive(next_token, 256);
        wgmma_wait<1>();
        wgmma_pin(s);
        arrive(barriers.k_empty(k_state.stage));
        weigh(j0, k_state.stage, k_state.parity);
        k_state.advance();
        wgmma_pin(s);
        wait_for_scores(j0 + kBlockN);
        wgmma_wait<0>();
        wgmma_pin(acc);
        arrive(barriers.v_empty(v_state.stage));
        v_state.advance();
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) acc[i] *= softmax.correction[i / 2 % 2];
        pack_weights();
      }
      arrive(barriers.q_empty());
      mbarrier_wait(barriers.v_full(v_state.stage), v_state.parity);
      issue_values(v_state.stage);
      wgmma_wait<0>();
      wgmma_pin(acc);
      arrive(barriers.v_empty(v_state.stage));
      v_state.advance();
    }

    // Epilogue of a split: y and the softmax's state, to be merged.
    if constexpr (Tile::kSplit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row0 + 8 * half;
        const float sum = warp_sum<4>(softmax.sum[half]);
        if (r >= rows * w.a.group) continue;
        const int64_t slot = ((static_cast<int64_t>(tile.b) * p.heads + tile.h) * rows + r) * w.a.splits + tile.split;
        // In log2 units, but finite where it is: a row masked with the lowest number throughout is the mean of v.
        const float max = softmax.max[half] == -INFINITY ? -INFINITY : fmaxf(softmax.max[half] * kLog2e, -FLT_MAX);
        if (t == 0) w.a.partial_ms[slot] = make_float2(max, sum);
        float* const part = w.a.partial_y + slot * p.v_head_dim + 2 * t;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          if (n * 8 < p.v_head_dim) *reinterpret_cast<float2*>(part + n * 8) = make_float2(acc[4 * n + 2 * half], acc[4 * n + 2 * half + 1]);
        }
      }
      return;
    }

    // Epilogue: y goes out of the registers in 16-byte chunks, four of a row at a time.
    unsigned spoilt[2];
    T* const y = static_cast<T*>(p.y) + tile.b * p.y_strides.batch + tile.h * p.y_strides.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = warp_sum<4>(softmax.sum[half]);
      const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
      bool redo = isnan(sum) || softmax.is_spoilt(half);
      const int i = row0 + 8 * half;
#pragma unroll
      for (int chunk = 0; chunk < kDim / 8; chunk += 4) {
        uint32_t r[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          r[c] = 0;
          if (chunk + c >= kDim / 8) continue;
          const float lo = acc[4 * (chunk + c) + 2 * half], hi = acc[4 * (chunk + c) + 2 * half + 1];
          redo |= (isnan(lo) || isnan(hi)) && sum != 0.0F;
          r[c] = pack_half2<T>(sum == 0.0F ? 0.0F : lo * inverse, sum == 0.0F ? 0.0F : hi * inverse);
        }
        transpose_quad(r, t);
        const int d = (chunk + t) * 8;
        if (i < rows && d < p.v_head_dim) {
          *reinterpret_cast<uint4*>(y + i * p.y_strides.seq + d) = make_uint4(r[0], r[1], r[2], r[3]);
        }
      }
      spoilt[half] = __ballot_sync(kFullWarp, redo);
    }
    // A masked NaN or infinity of k or v leaked, or there is a NaN to be seen: see attend_row_exactly.
    if ((spoilt[0] | spoilt[1]) != 0) {
      __syncwarp();
      for (int r = 0; r < 16; ++r) {
        const int i = tile.row0 + warp_row + r;
        if (((r < 8 ? spoilt[0] : spoilt[1]) >> (4 * (r % 8)) & 0xf) != 0 && i < rows) {
          attend_row_exactly_inline<T>(w.a, tile.b, tile.h, i, 0, p.v_head_dim);
        }
      }
    }
  });
}

// Keys and values as the kernel reads them: with a cache, `present` holds both parts.
struct KeyTensors {
  const void *k, *v;
  AttentionStrides k_strides, v_strides;
};
KeyTensors key_tensors(const AttentionParams& p) {
  if (p.past_len == 0) return {p.k, p.v, p.k_strides, p.v_strides};
  const int64_t len = p.total_len();
  return {p.present_k, p.present_v, {p.kv_heads * len * p.head_dim, p.head_dim, len * p.head_dim},
          {p.kv_heads * len * p.v_head_dim, p.v_head_dim, len * p.v_head_dim}};
}

bool mask_is_keys(const AttentionParams& p) { return p.mask_stride_seq == 0 || p.q_len == 1; }

// What TMA asks of a mask whose rows differ.
bool mask_allows_tma(const AttentionParams& p) {
  const int64_t size = static_cast<int64_t>(size_of(p.mask_dtype));
  const int64_t strides = p.mask_stride_seq | p.mask_stride_head | p.mask_stride_batch;
  return p.mask_stride_key == 1 && is_aligned(p.mask, 16) && strides * size % 16 == 0;
}

// Parts into which the keys of a split launch are cut: what gives the shortest longest list of tiles to a multiprocessor, if
// an item costs one tile and a half more than its tiles.
int wgmma_splits(const AttentionParams& p, const DeviceInfo& device, int64_t block_n) {
  const int64_t tiles = ceil_div(p.total_len(), block_n), heads = p.batch * p.kv_heads;
  int best = 2;
  int64_t best_cost = INT64_MAX;
  for (int splits = 2; splits <= 128 && splits <= std::max<int64_t>(tiles, 2); ++splits) {
    const int64_t cost = ceil_div(heads * splits, device.sm_count) * (2 * ceil_div(tiles, splits) + 3);
    if (cost < best_cost) {
      best_cost = cost;
      best = splits;
    }
  }
  return best;
}

template <class Tile>
Status launch_wgmma_tile(const AttentionParams& params, const ExecContext& context) {
  WgmmaLaunch w;
  const AttentionParams& p = params;
  const KeyTensors keys = key_tensors(p);
  w.a = make_attention_launch(p);
  w.a.tiles = ceil_div(p.q_len, Tile::kBlockM);
  w.items = static_cast<int>(w.a.tiles * p.heads * p.batch);
  w.q_bytes = Tile::kBytesQ;
  if constexpr (Tile::kSplit) {
    ORTPLUGINS_RETURN_IF_ERROR(split_launch(wgmma_splits(p, *context.device, Tile::kBlockN), context, &w.a));
    w.items = static_cast<int>(p.batch * p.kv_heads * w.a.splits);
    w.q_bytes = Tile::kDimBlocks * static_cast<int>(p.q_len) * w.a.group * 128;
  }
  w.scores = p.softcap != 0.0F || !(p.scale > 0.0F);
  // Keys and values of a head, shared by a group; half of L2, as q, y and masks pass through it too.
  const int64_t head_bytes = p.total_len() * (p.head_dim + p.v_head_dim) * 2 / w.a.group;
  const int64_t fitting = context.device->l2_bytes / 2 / (head_bytes > 0 ? head_bytes : 1);
  const int64_t heads = p.heads * p.batch;
  w.section_heads = static_cast<int>(fitting < 1 ? 1 : fitting < heads ? fitting : heads);
  return dispatch_half(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto encode = [&](CUtensorMap* map, const void* base, int64_t dim, int64_t len, int64_t tensor_heads, const AttentionStrides& s,
                            int rows, int box_heads) {
      const int64_t dims[4] = {dim, len, tensor_heads, p.batch};
      const int64_t strides[4] = {1, s.seq, s.head, s.batch};
      const int box[4] = {64, rows, box_heads, 1};
      return encode_tensor_map(map, static_cast<const T*>(base), 4, dims, strides, box);
    };
    ORTPLUGINS_RETURN_IF_ERROR(encode(&w.q, p.q, p.head_dim, p.q_len, p.heads, p.q_strides,
                                      Tile::kSplit ? static_cast<int>(p.q_len) : Tile::kBlockM, Tile::kSplit ? w.a.group : 1));
    ORTPLUGINS_RETURN_IF_ERROR(encode(&w.k, keys.k, p.head_dim, p.total_len(), p.kv_heads, keys.k_strides, Tile::kBlockN, 1));
    ORTPLUGINS_RETURN_IF_ERROR(encode(&w.v, keys.v, p.v_head_dim, p.total_len(), p.kv_heads, keys.v_strides, Tile::kBlockN, 1));
    if (p.mask_dtype != DType::kNone) {
      if (mask_is_keys(p)) {
        w.mask_tiles = MaskTiles::kKeys;
      } else {
        w.mask_has_batch = p.mask_stride_batch != 0;
        w.mask_has_head = p.mask_stride_head != 0;
        const int64_t dims[4] = {p.mask_len, p.q_len, w.mask_has_head ? p.heads : 1, w.mask_has_batch ? p.batch : 1};
        // A dimension of one still needs a stride; any multiple of 16 bytes.
        const int64_t strides[4] = {1, p.mask_stride_seq, w.mask_has_head ? p.mask_stride_head : p.mask_stride_seq,
                                    w.mask_has_batch ? p.mask_stride_batch : p.mask_stride_seq};
        if (p.mask_dtype == DType::kBool) {
          const int box[4] = {128, Tile::kBlockM, 1, 1};
          w.mask_tiles = MaskTiles::kRowsBool;
          ORTPLUGINS_RETURN_IF_ERROR(encode_tensor_map(&w.mask, static_cast<const uint8_t*>(p.mask), 4, dims, strides, box));
        } else {
          const int box[4] = {64, Tile::kBlockM, 1, 1};
          w.mask_tiles = MaskTiles::kRows16;
          ORTPLUGINS_RETURN_IF_ERROR(encode_tensor_map(&w.mask, static_cast<const T*>(p.mask), 4, dims, strides, box));
        }
      }
    }
    static SmemLimit limit;
    const auto kernel = attention_wgmma_kernel<T, Tile>;
    ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, Tile::kSmemBytes));
    const int blocks = w.items < context.device->sm_count ? w.items : context.device->sm_count;
    return launch("attention_wgmma_kernel", kernel, dim3(static_cast<unsigned>(blocks)), Tile::kThreads, Tile::kSmemBytes, context, w);
  });
}

template <class Plain, class Scores>
Status launch_wgmma(const AttentionParams& params, const ExecContext& context) {
  bool done = false;
  ORTPLUGINS_RETURN_IF_ERROR(attention_prologue(params, context, &done));
  if (done) return {};
  const bool plain = params.mask_dtype == DType::kNone && params.softcap == 0.0F && params.scale > 0.0F;
  return plain ? launch_wgmma_tile<Plain>(params, context) : launch_wgmma_tile<Scores>(params, context);
}

// Smaller heads are padded: the copy engine brings zeros without reading them, and the products are not what limits it.
using SplitTile = WgmmaTile<128, 128, 1, 2, true, true>;

}  // namespace

bool attention_wgmma_supports(const AttentionParams& p, const DeviceInfo& device, int64_t dim) {
  if (device.sm != 90 || p.dtype == DType::kFloat32 || p.head_dim > dim || p.v_head_dim > dim) return false;
  if (p.head_dim < 1 || p.v_head_dim < 1 || p.total_len() < 1) return false;
  if (p.past_len > 0 && (p.present_k == nullptr || p.present_v == nullptr)) return false;
  constexpr int64_t kMost = int64_t{1} << 30;
  if (p.total_len() > kMaxAttentionLen || p.q_len > kMaxAttentionLen || p.batch > kMost || p.heads > kMost) return false;
  if (p.batch * p.heads > kMost || p.batch * p.heads * ceil_div(p.q_len, 64) > kMost) return false;
  const KeyTensors keys = key_tensors(p);
  if (!rows_in_packs(p.q, p.q_strides, p.head_dim, 2) || !rows_in_packs(keys.k, keys.k_strides, p.head_dim, 2) ||
      !rows_in_packs(keys.v, keys.v_strides, p.v_head_dim, 2) || !rows_in_packs(p.y, p.y_strides, p.v_head_dim, 2)) {
    return false;
  }
  if (p.mask_dtype != DType::kNone && !mask_is_keys(p) && !mask_allows_tma(p)) return false;
  return tensor_map_encoder() != nullptr;
}

// A key's mask must be the same for all rows of a tile: those of a group of heads.
bool attention_wgmma_split_supports(const AttentionParams& p, const DeviceInfo& device) {
  if (p.q_len < 1 || p.q_len > 16 || p.kv_heads < 1 || !attention_wgmma_supports(p, device, 128)) return false;
  const int64_t group = p.heads / p.kv_heads;
  return p.q_len * group <= 64 && 
         (p.mask_dtype == DType::kNone || (mask_is_keys(p) && (p.mask_stride_head == 0 || group == 1)));
}
int64_t attention_wgmma_split_workspace(const AttentionParams& params, const DeviceInfo& device) {
  return SplitWorkspace(params, wgmma_splits(params, device, SplitTile::kBlockN)).bytes;
}
Status launch_attention_wgmma_split(const AttentionParams& params, const ExecContext& context) {
  bool done = false;
  ORTPLUGINS_RETURN_IF_ERROR(attention_prologue(params, context, &done));
  if (done) return {};
  AttentionLaunch a = make_attention_launch(params);
  ORTPLUGINS_RETURN_IF_ERROR(split_launch(wgmma_splits(params, *context.device, SplitTile::kBlockN), context, &a));
  ORTPLUGINS_RETURN_IF_ERROR(launch_wgmma_tile<SplitTile>(params, context));
  return launch_attention_merge(a, context);
}

// Keys of a tile: as many as registers and shared memory allow, 128 where they allow it. A mask takes shared memory too.
Status launch_attention_wgmma_192x48(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<48, 128, 3, 2, false>, WgmmaTile<48, 128, 3, 2, true>>(params, context);
}
Status launch_attention_wgmma_192x64(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<64, 128, 3, 2, false>, WgmmaTile<64, 128, 3, 2, true>>(params, context);
}
Status launch_attention_wgmma_64(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<64, 128, 2, 2, false>, WgmmaTile<64, 128, 2, 2, true>>(params, context);
}
Status launch_attention_wgmma_80(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<80, 128, 2, 2, false>, WgmmaTile<80, 128, 2, 2, true>>(params, context);
}
Status launch_attention_wgmma_96(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<96, 128, 2, 2, false>, WgmmaTile<96, 128, 2, 2, true>>(params, context);
}
Status launch_attention_wgmma_128(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<128, 128, 2, 2, false>, WgmmaTile<128, 128, 2, 2, true>>(params, context);
}
Status launch_attention_wgmma_192(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<192, 96, 2, 2, false>, WgmmaTile<192, 64, 2, 2, true>>(params, context);
}
Status launch_attention_wgmma_256(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<256, 80, 2, 2, false>, WgmmaTile<256, 64, 2, 2, true>>(params, context);
}

}  // namespace ortplugins
