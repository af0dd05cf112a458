// FusedAttention for float32 on Hopper's tensor cores, as products of scaled float16 (attention_scaled.h).
//
// kParts 2 (tf32x3): both products are hi hi + hi lo + lo hi, with the error of float32. kParts 1 (tf32): hi hi alone,
// whose operands have the 11 bits of TF32. A weight, at most 1, is scaled by 2^15 and split in its registers.
//
// A block stays on its multiprocessor and takes items, kBlockM = 128 query rows of one head each, from a common list.
// One thread of the producer warpgroup brings tiles by TMA and asks for the next item; two consumer warpgroups own 64
// rows each. Scores, weights and y stay in registers, and the weights are the A operand of the second product as they
// stand (device/sm90_rs.h).
//
// Tensor cores truncate as they add up, so that their sums stay short: those of a tile go to the accumulators by
// ordinary additions, which bring the factor of the tile of v with them. Three products for one take so long (at a head
// of 128 three quarters of all time) that the softmax of one warpgroup hides behind the products of the other.
//
// Shared memory, each tile in blocks of 64 elements (rows of 128 bytes, swizzled by TMA), 1024-byte aligned:
//   q (kParts x kBlockM rows), k and v (kStages x kParts x kBlockN rows each), and one tile of a mask that TMA can
//   bring.
#include <algorithm>

#include "device/sm90_rs.h"
#include "device/tensor_map.h"
#include "kernels/attention/attention_scaled.h"
#include "kernels/attention/variants.h"

namespace ortplugins {
namespace {

// How scores are masked. kKeys: one value for each key, the same for all rows of an item; a producer warp reads them.
// kTiles: TMA brings a tile. kDirect: where it cannot, each thread reads what it needs.
enum class MaskSource : int { kNone, kKeys, kTiles, kDirect };

constexpr float kWeightShift = 15.0F;  // weights are scaled by 2^15: their floor is then 2^-40

struct Fp16Launch {
  AttentionLaunch a;
  CUtensorMap q, k, v, mask;
  MaskSource mask_source = MaskSource::kNone;
  bool mask_has_batch = false, mask_has_head = false;
  const float *q_factors, *k_factors;  // (batch, head, tile)
  int64_t v_factors;                   // of v, elements behind those of k
  uint8_t* redo;
  int q_tiles, k_tiles;  // of a head
  int items = 0;
  int* next;                 // the first item that no block has taken
  int section_heads = 0;     // heads (of all sequences) whose keys and values fit in L2 together
  float largest_factor = 0;  // of a product of q and k, above which the floor of float16 may show in scores
};

// kScores: masks, softcap and any scale; without, a product only takes a positive factor to become a score.
// kOverlap: the scores of the next tile and this one's product with v are issued together, and the softmax of the one
// runs beside the other; a token lets one warpgroup issue at a time. That takes the registers of both, and gains 3 % at
// a head of 64. Otherwise a warpgroup's softmax runs beside the other's products only.
template <int kDim_, int kBlockN_, int kParts_, bool kScores_, bool kOverlap_>
struct Fp16Tile {
  static constexpr int kDim = kDim_, kBlockN = kBlockN_, kParts = kParts_;
  static constexpr bool kScores = kScores_, kOverlap = kOverlap_;
  static constexpr int kConsumers = 2, kStages = 2;
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kDimBlocks = kDim / 64;
  static constexpr int kPartQ = kDimBlocks * kBlockM * 128, kPartK = kDimBlocks * kBlockN * 128;  // bytes
  static constexpr int kBytesQ = kParts * kPartQ, kBytesK = kParts * kPartK;
  static constexpr int kBytesMask = kScores ? kBlockM * kBlockN * 4 : 0;
  static constexpr int kSmemBytes = 1024 + kBytesQ + kStages * 2 * kBytesK + kBytesMask;
  static_assert(!(kScores && kOverlap), "a mask takes the registers of an overlap");
  static_assert(kDim * kBlockN == kScaledTileElements && kBlockM % kBlockN == 0 && kSmemBytes <= 227 * 1024);
};

template <int kStages>
struct Fp16Barriers {
  uint32_t base;
  static constexpr int kCount = 6 + 6 * kStages;
  __device__ __forceinline__ uint32_t q_full() const { return base; }
  __device__ __forceinline__ uint32_t q_empty() const { return base + 8; }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return base + 16 + 8 * stage; }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return k_full(kStages + stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return k_full(2 * kStages + stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return k_full(3 * kStages + stage); }
  __device__ __forceinline__ uint32_t mask_full(int stage) const { return k_full(4 * kStages + stage); }
  __device__ __forceinline__ uint32_t mask_empty(int stage) const { return k_full(5 * kStages + stage); }
  __device__ __forceinline__ uint32_t item_full(int slot) const { return k_full(6 * kStages + slot); }
  __device__ __forceinline__ uint32_t item_empty(int slot) const { return k_full(6 * kStages + 2 + slot); }
};

struct Fp16Item {
  int b, h, kv_head;
  int row0;         // first query
  int first, last;  // keys that some of its queries may see; first is that of a tile
};

// This block's items; visit(item, band) for each. next() gives their places in a list that counts tiles fastest, so
// that neighbours read the same keys. Under a causal mask items differ in length: within a section of heads that share
// L2 the longest come first.
template <class Tile, class Next, class Visit>
__device__ __forceinline__ void for_each_item(const Fp16Launch& w, Next next, Visit visit) {
  const AttentionParams& p = w.a.p;
  const int tiles = static_cast<int>(w.a.tiles), heads = static_cast<int>(p.heads), rows = static_cast<int>(p.q_len);
  for (int index = next(); index < w.items; index = next()) {
    int tile = index % tiles;
    if (p.is_causal) {
      const int section = index / (w.section_heads * tiles), rest = index % (w.section_heads * tiles);
      const int section_heads = min(w.section_heads, w.items / tiles - section * w.section_heads);
      index = (section * w.section_heads + rest % section_heads) * tiles;
      tile = tiles - 1 - rest / section_heads;
    }
    Fp16Item item;
    const int head = index / tiles;
    item.b = head / heads;
    item.h = head % heads;
    item.kv_head = item.h / w.a.group;
    item.row0 = tile * Tile::kBlockM;
    const KeyBand band = key_band(p, item.b);
    item.first = band.first(item.row0) / Tile::kBlockN * Tile::kBlockN;
    item.last = band.last(min(item.row0 + Tile::kBlockM, rows) - 1);
    visit(item, band);
  }
}

// A consumer thread's share of 64 rows: rows g and g + 8 of its warp's 16, in accumulator order.
template <class Tile>
struct Fp16Softmax {
  static constexpr int kCount = Tile::kBlockN / 2;
  float reference[2];   // a weight is 2^(score - reference): the maximum, less kWeightShift
  float sum[2];         // of this lane's columns alone
  float correction[2];  // of what was summed before the last tile

  __device__ __forceinline__ void reset() {
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0.0F;
  }

  // Turns products into weights. `unit`, positive, brings them to log2 units.
  __device__ __forceinline__ void update(float (&s)[kCount], float unit) {
    float max[2][2];  // two chains for each row, so that maxima do not wait for each other
#pragma unroll
    for (int i = 0; i < 8; i += 2) max[i / 2 % 2][i / 4] = fmaxf(s[i], s[i + 1]);
#pragma unroll
    for (int i = 8; i < kCount; i += 2)
      max[i / 2 % 2][i / 4 % 2] = fmaxf(max[i / 2 % 2][i / 4 % 2], fmaxf(s[i], s[i + 1]));
    float used[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float tile_max = warp_max<4>(fmaxf(max[half][0], max[half][1]));
      const float next = fmaxf(reference[half], fmaf(tile_max, unit, -kWeightShift));
      used[half] = softmax_reference(next);
      correction[half] = exp2_approx(reference[half] - used[half]);
      reference[half] = next;
    }
    float part[4] = {};  // row 0: 0 and 1, row 1: 2 and 3
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(fmaf(s[i], unit, -used[i / 2 % 2]));
      part[i % 4] += s[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sum[half] = fmaf(sum[half], correction[half], part[2 * half] + part[2 * half + 1]);
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) attention_fp16_kernel(const __grid_constant__ Fp16Launch w) {
  constexpr int kDim = Tile::kDim, kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kStages = Tile::kStages,
                kParts = Tile::kParts;
  extern __shared__ char smem_unaligned[];
  __shared__ uint64_t s_barriers[Fp16Barriers<kStages>::kCount];
  __shared__ __align__(16) float s_keys_mask[Tile::kScores ? kStages : 1][kBlockN];
  __shared__ int s_keys_masked[kStages];  // whether some value of the tile's mask is not zero
  const uint32_t smem = (smem_address(smem_unaligned) + 1023) & ~1023U;
  const uint32_t sQ = smem, sK = sQ + Tile::kBytesQ, sV = sK + kStages * Tile::kBytesK,
                 sMask = sV + kStages * Tile::kBytesK;
  __shared__ int s_items[2];  // a ring
  const Fp16Barriers<kStages> barriers{smem_address(s_barriers)};

  const AttentionParams& p = w.a.p;
  const int warp_idx = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane_idx = static_cast<int>(threadIdx.x) % 32;
  const bool mask_keys = Tile::kScores && w.mask_source == MaskSource::kKeys;
  const bool mask_tiles = Tile::kScores && w.mask_source == MaskSource::kTiles;
  if (threadIdx.x == 0) {
    mbarrier_init(barriers.q_full(), 1);
    mbarrier_init(barriers.q_empty(), 4 * Tile::kConsumers);  // one lane of each consumer warp
    for (int slot = 0; slot < 2; ++slot) {
      mbarrier_init(barriers.item_full(slot), 1);
      mbarrier_init(barriers.item_empty(slot), 4 * Tile::kConsumers + (mask_keys ? 1 : 0));
    }
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barriers.k_full(stage), 1);
      mbarrier_init(barriers.v_full(stage), 1);
      mbarrier_init(barriers.k_empty(stage), 4 * Tile::kConsumers);
      mbarrier_init(barriers.v_empty(stage), 4 * Tile::kConsumers);
      mbarrier_init(barriers.mask_full(stage), mask_keys ? 32 : 1);
      mbarrier_init(barriers.mask_empty(stage), 4 * Tile::kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();

  // Blocks take items as they get done: the producer asks for the next while it loads one, and tells the other warps.
  unsigned item_count = 0;
  const auto follow_item = [&] {
    const int slot = item_count & 1;
    mbarrier_wait(barriers.item_full(slot), item_count >> 1 & 1);
    ++item_count;
    const int index = s_items[slot];
    __syncwarp();
    if (lane_idx == 0) mbarrier_arrive(barriers.item_empty(slot));
    return index;
  };

  if (warp_idx < 4) {
    registers_decrease<Tile::kScores ? 40 : 24>();
    if (warp_idx == 0 && lane_idx == 0) {
      tma_prefetch(&w.q);
      tma_prefetch(&w.k);
      tma_prefetch(&w.v);
      PipelineState<kStages> state;
      uint32_t q_parity = 0, mask_parity = 0;
      int next_item = static_cast<int>(blockIdx.x);
      const auto take_item = [&] {
        const int index = next_item, slot = item_count & 1;
        mbarrier_wait(barriers.item_empty(slot), (item_count >> 1 & 1) ^ 1);
        ++item_count;
        s_items[slot] = index;
        mbarrier_arrive(barriers.item_full(slot));
        if (index < w.items) next_item = atomicAdd(w.next, 1);
        return index;
      };
      for_each_item<Tile>(w, take_item, [&](const Fp16Item& item, const KeyBand&) {
        if (item.first >= item.last) return;
        const int q_head = item.b * static_cast<int>(p.heads) + item.h,
                  k_head = item.b * static_cast<int>(p.kv_heads) + item.kv_head;
        const auto load = [&](uint32_t to, const CUtensorMap* map, uint32_t barrier, int rows, int row, int head) {
          mbarrier_arrive_expect(barrier, kParts * Tile::kDimBlocks * rows * 128);
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int block = 0; block < Tile::kDimBlocks; ++block) {
              tma_load_4d(to + (part * Tile::kDimBlocks + block) * rows * 128, map, barrier, block * 64, row, head,
                          part);
            }
          }
        };
        mbarrier_wait(barriers.q_empty(), q_parity ^ 1);
        q_parity ^= 1;
        load(sQ, &w.q, barriers.q_full(), kBlockM, item.row0, q_head);
        for (int j0 = item.first; j0 < item.last; j0 += kBlockN) {
          mbarrier_wait(barriers.k_empty(state.stage), state.parity ^ 1);
          load(sK + state.stage * Tile::kBytesK, &w.k, barriers.k_full(state.stage), kBlockN, j0, k_head);
          if (mask_tiles) {
            const bool bytes = p.mask_dtype == DType::kBool;
            const int step = bytes ? 128 : 32, boxes = (kBlockN + step - 1) / step;  // of 128 bytes of a row
            mbarrier_wait(barriers.mask_empty(0), mask_parity ^ 1);
            mask_parity ^= 1;
            mbarrier_arrive_expect(barriers.mask_full(0), boxes * kBlockM * 128);
            for (int box = 0; box < boxes; ++box) {
              tma_load_4d(sMask + box * kBlockM * 128, &w.mask, barriers.mask_full(0), j0 + box * step, item.row0,
                          w.mask_has_head ? item.h : 0, w.mask_has_batch ? item.b : 0);
            }
          }
          mbarrier_wait(barriers.v_empty(state.stage), state.parity ^ 1);
          load(sV + state.stage * Tile::kBytesK, &w.v, barriers.v_full(state.stage), kBlockN, j0, k_head);
          state.advance();
        }
      });
    } else if (mask_keys && warp_idx == 1) {
      PipelineState<kStages> state;
      for_each_item<Tile>(w, follow_item, [&](const Fp16Item& item, const KeyBand& band) {
        const int64_t row = mask_row_offset(p, item.b, item.h, 0);
        for (int j0 = item.first; j0 < item.last; j0 += kBlockN) {
          float values[kBlockN / 32];
          bool masked = false;
#pragma unroll
          for (int i = 0; i < kBlockN / 32; ++i) {
            const int j = j0 + i * 32 + lane_idx;
            values[i] = j < band.end ? mask_value<float>(p, row + j * p.mask_stride_key) : 0.0F;
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

  registers_increase<Tile::kScores ? 232 : 240>();
  const int consumer_idx = warp_idx / 4 - 1;
  const int g = lane_idx / 4, t = lane_idx % 4;
  const int warp_row = (static_cast<int>(threadIdx.x) - 128) / 32 * 16;  // in the tile
  // Token: barrier 1 + i lets consumer i issue; 256 threads, those of consumer i and of the one before it.
  const int own_token = 1 + consumer_idx, next_token = 1 + (consumer_idx + 1) % Tile::kConsumers;
  if (Tile::kOverlap && consumer_idx == Tile::kConsumers - 1) named_barrier_arrive(next_token, 256);

  const uint64_t desc_q = wgmma_descriptor(sQ + consumer_idx * 64 * 128);
  const uint64_t desc_k = wgmma_descriptor(sK), desc_v = wgmma_descriptor(sV, kBlockN * 128);
  float acc[kDim / 2];   // y, in units of 2^kWeightShift weights
  float part[kDim / 2];  // the last tile's, in units of its v
  float s[kBlockN / 2];
  uint32_t weights[kParts][kBlockN / 16][4];
  Fp16Softmax<Tile> softmax;

  const auto issue_scores = [&](int stage) {
    const uint64_t desc = desc_k + static_cast<unsigned>(stage) * (Tile::kBytesK / 16U);
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i)
      s[i] = 0.0F;  // rather than not accumulating at first, which keeps the old ones alive
    wgmma_fence();
    const auto product = [&](int q_part, int k_part) {
#pragma unroll
      for (int kk = 0; kk < kDim / 16; ++kk) {
        Wgmma<__half, kBlockN, false, false>::run(
            s, desc_q + (q_part * Tile::kPartQ + kk / 4 * kBlockM * 128 + kk % 4 * 32) / 16,
            desc + (k_part * Tile::kPartK + kk / 4 * kBlockN * 128 + kk % 4 * 32) / 16, 1);
      }
    };
    if constexpr (kParts == 2) {  // small terms first
      product(1, 0);
      product(0, 1);
    }
    product(0, 0);
    wgmma_commit();
  };
  const auto issue_values = [&](int stage) {
    const uint64_t desc = desc_v + static_cast<unsigned>(stage) * (Tile::kBytesK / 16U);
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) part[i] = 0.0F;
    wgmma_fence();
    const auto product = [&](const uint32_t (&a)[kBlockN / 16][4], int v_part) {
#pragma unroll
      for (int kk = 0; kk < kBlockN / 16; ++kk) {
        WgmmaRegisters<__half, kDim>::run(part, a[kk], desc + (v_part * Tile::kPartK + kk * 2048) / 16, 1);
      }
    };
    if constexpr (kParts == 2) {
      product(weights[1], 0);
      product(weights[0], 1);
    }
    product(weights[0], 0);
    wgmma_commit();
  };
  const auto arrive = [&](uint32_t barrier) {
    if (lane_idx == 0) mbarrier_arrive(barrier);
  };
  const auto split_weights = [&] {
#pragma unroll
    for (int kk = 0; kk < kBlockN / 16; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = s[8 * kk + 2 * i], y = s[8 * kk + 2 * i + 1];
        if constexpr (kParts == 2) {
          split_half2(x, y, &weights[0][kk][i], &weights[1][kk][i]);
        } else {
          weights[0][kk][i] = pack_half2<__half>(x, y);
        }
      }
    }
  };

  const int rows = static_cast<int>(p.q_len);
  PipelineState<kStages> k_state;
  uint32_t q_parity = 0;
  for_each_item<Tile>(w, follow_item, [&](const Fp16Item& item, const KeyBand& band) {
    const auto row0 = [&] {
      return computed_in_place(item.row0) + warp_row + g;
    };  // rows row0 and row0 + 8 of this thread
    softmax.reset();
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) acc[i] = 0.0F;
    const auto q_head = [&] { return static_cast<int64_t>(computed_in_place(item.b)) * p.heads + item.h; };

    if (item.first < item.last) {
      const int64_t k_head = static_cast<int64_t>(item.b) * p.kv_heads + item.kv_head;
      const float* factors =
          w.k_factors + k_head * w.k_tiles + item.first / kBlockN;  // those of v: v_factors elements on
      const float q_factor = w.q_factors[q_head() * w.q_tiles + min((item.row0 + warp_row) / kBlockN, w.q_tiles - 1)];
      const auto query = [&](int half) { return min(row0() + 8 * half, rows - 1); };

      // Adds the mask of the tile at j0 to its scores.
      const auto add_mask_tile = [&](int j0) {
        if (w.mask_source == MaskSource::kNone) return;
        if (w.mask_source == MaskSource::kDirect) {
          const auto add_rows = [&](auto tag, const auto& value) {
            using M = typename decltype(tag)::type;
            const int first = j0 + 2 * t, left = band.end - first;
            const M* const row = static_cast<const M*>(p.mask) +
                                 mask_row_offset(p, computed_in_place(item.b), computed_in_place(item.h), query(0)) +
                                 first;
            const int64_t step = (query(1) - query(0)) * p.mask_stride_seq;
#pragma unroll
            for (int i = 0; i < kBlockN / 4; ++i) {
              const int at = 4 * (i / 2) + i % 2, j = 8 * (i / 2) + i % 2;
              s[at] = add_mask(s[at], j < left ? value(row[j]) : 0.0F);
              s[at + 2] = add_mask(s[at + 2], j < left ? value(row[step + j]) : 0.0F);
            }
          };
          if (p.mask_dtype == DType::kBool) {
            add_rows(TypeTag<uint8_t>{}, [](uint8_t m) { return m != 0 ? 0.0F : -INFINITY; });
          } else {
            add_rows(TypeTag<float>{}, [](float m) { return mask_log2(m); });
          }
          return;
        }
        // A mask of keys goes with k; tiles are a ring of one, whose parity is the stage of two.
        static_assert(kStages == 2);
        const int stage = mask_keys ? k_state.stage : 0;
        mbarrier_wait(barriers.mask_full(stage), mask_keys ? k_state.parity : static_cast<uint32_t>(k_state.stage));
        const auto add = [&](float& score, float m) { score = add_mask(score, m); };
        if (mask_keys) {
          if (s_keys_masked[stage] != 0) {
            const float* const values = &s_keys_mask[stage][2 * t];
#pragma unroll
            for (int n = 0; n < kBlockN / 8; ++n) {
              const float2 m = *reinterpret_cast<const float2*>(values + 8 * n);
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                add(s[4 * n + 2 * half], m.x);
                add(s[4 * n + 2 * half + 1], m.y);
              }
            }
          }
        } else {
          // Rows of 128 bytes, whose 16-byte chunks TMA permutes by the row.
          const char* const rows_mask = smem_unaligned + (sMask - smem_address(smem_unaligned)) + (warp_row + g) * 128;
          if (p.mask_dtype == DType::kBool) {
#pragma unroll
            for (int i = 0; i < kBlockN / 4; ++i) {
              const int n = i / 2, half = i % 2;
              const auto m = *reinterpret_cast<const uint16_t*>(rows_mask + half * 8 * 128 + (((n / 2) ^ g) << 4) +
                                                                n % 2 * 8 + 2 * t);
              if ((m & 0xffU) == 0) s[4 * n + 2 * half] = -INFINITY;
              if ((m & 0xff00U) == 0) s[4 * n + 2 * half + 1] = -INFINITY;
            }
          } else {
#pragma unroll
            for (int i = 0; i < kBlockN / 4; ++i) {
              const int n = i / 2, half = i % 2;
              const float2 m = *reinterpret_cast<const float2*>(rows_mask + n / 4 * kBlockM * 128 + half * 8 * 128 +
                                                                (((n % 4 * 2 + t / 2) ^ g) << 4) + t % 2 * 8);
              add(s[4 * n + 2 * half], mask_log2(m.x));
              add(s[4 * n + 2 * half + 1], mask_log2(m.y));
            }
          }
        }
        __syncwarp();
        arrive(barriers.mask_empty(stage));
      };
      // Products of the tile at j0 to weights. `factor` undoes the scaling of q and k.
      const auto weigh = [&](int j0, float factor) {
        float unit = factor * w.a.score_scale;
        if constexpr (!Tile::kScores) unit = fmaxf(unit, FLT_MIN);  // what is masked is -inf, which zero would make NaN
        unit = fabsf(factor) <= w.largest_factor ? unit : NAN;
        if constexpr (Tile::kScores) {
          if (w.a.cap != 0.0F) {
#pragma unroll
            for (int i = 0; i < kBlockN / 2; ++i) s[i] = w.a.cap * tanhf(s[i] * unit);
          } else {
#pragma unroll
            for (int i = 0; i < kBlockN / 2; ++i) s[i] *= unit;
          }
          unit = 1.0F;
          add_mask_tile(j0);
        }
        // A tile that every row of this warp sees whole needs no check of each score.
        const int warp_row0 = computed_in_place(item.row0 + warp_row);
        if (j0 < band.first(min(warp_row0 + 15, rows - 1)) || j0 + kBlockN > band.last(min(warp_row0, rows - 1))) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int lo = band.first(query(half)) - 2 * t - j0, hi = band.last(query(half)) - 2 * t - j0;
#pragma unroll
            for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                if (8 * n + e < lo || 8 * n + e >= hi) s[4 * n + 2 * half + e] = -INFINITY;
              }
            }
          }
        }
        softmax.update(s, unit);
      };
      // Adds the last tile's part to y; `correction` is that of its own softmax.
      const auto collect = [&](float v_factor, const float (&correction)[2]) {
        const float factor = v_factor * 0x1p-15F;
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) acc[i] = fmaf(part[i], factor, acc[i] * correction[i / 2 % 2]);
      };
      // Until k of the tile at j0 is there, if there is such a tile: a branch between softmax and the wait for the
      // product with v, across which the compiler does not move that wait.
      const auto wait_for_scores = [&](int j0) {
        if (j0 < item.last) mbarrier_wait(barriers.k_full(k_state.stage), k_state.parity);
      };

      if constexpr (!Tile::kOverlap) {
        mbarrier_wait(barriers.q_full(), q_parity);
        q_parity ^= 1;
        for (int j0 = item.first; j0 < item.last; j0 += kBlockN, ++factors) {
          float factor[2] = {factors[0], factors[w.v_factors]};
          mbarrier_wait(barriers.k_full(k_state.stage), k_state.parity);
          issue_scores(k_state.stage);
          wgmma_wait<0>();
          wgmma_pin(s);
          arrive(barriers.k_empty(k_state.stage));
          wgmma_pin(factor);  // on its way while the scores are in the making
          weigh(j0, q_factor * factor[0]);
          split_weights();
          mbarrier_wait(barriers.v_full(k_state.stage), k_state.parity);
          issue_values(k_state.stage);
          wgmma_wait<0>();
          wgmma_pin(part);
          arrive(barriers.v_empty(k_state.stage));
          k_state.advance();
          collect(factor[1], softmax.correction);
        }
        arrive(barriers.q_empty());
      } else {
        // v is one tile behind k.
        static_assert(kStages == 2);
        const auto v_stage = [&] { return k_state.stage ^ 1; };
        const auto v_parity = [&] { return k_state.parity ^ (k_state.stage == 0 ? 1U : 0U); };
        // Prologue: the first tile's weights.
        const float first_factor = q_factor * factors[0];
        mbarrier_wait(barriers.q_full(), q_parity);
        q_parity ^= 1;
        mbarrier_wait(barriers.k_full(k_state.stage), k_state.parity);
        issue_scores(k_state.stage);
        wgmma_wait<0>();
        wgmma_pin(s);
        arrive(barriers.k_empty(k_state.stage));
        k_state.advance();
        weigh(item.first, first_factor);
        float correction[2] = {softmax.correction[0], softmax.correction[1]};
        split_weights();
        wait_for_scores(item.first + kBlockN);

        // Mainloop: scores of the tile at j0, values of the one before.
        for (int j0 = item.first + kBlockN; j0 < item.last; j0 += kBlockN, ++factors) {
          float factor[2] = {factors[1], factors[w.v_factors]};
          named_barrier_sync(own_token, 256);
          issue_scores(k_state.stage);
          mbarrier_wait(barriers.v_full(v_stage()), v_parity());
          issue_values(v_stage());
          named_barrier_arrive(next_token, 256);
          wgmma_wait<1>();
          wgmma_pin(s);
          arrive(barriers.k_empty(k_state.stage));
          k_state.advance();
          wgmma_pin(factor);  // on its way while the scores are in the making
          weigh(j0, q_factor * factor[0]);
          wgmma_pin(s);
          wait_for_scores(j0 + kBlockN);
          wgmma_wait<0>();
          wgmma_pin(part);
          arrive(barriers.v_empty(k_state.stage));  // of the tile before the one that has just been weighed
          collect(factor[1], correction);
          correction[0] = softmax.correction[0];
          correction[1] = softmax.correction[1];
          split_weights();
        }
        arrive(barriers.q_empty());
        mbarrier_wait(barriers.v_full(v_stage()), v_parity());
        issue_values(v_stage());
        wgmma_wait<0>();
        wgmma_pin(part);
        arrive(barriers.v_empty(v_stage()));
        collect(factors[w.v_factors], correction);
      }
    }

    // Epilogue: y as pairs, four of which make a sector of 32 bytes; and whether a NaN has come up: see
    // attention_scaled.h.
    float* const y = static_cast<float*>(p.y) + item.b * p.y_strides.batch + item.h * p.y_strides.head;
    const bool pairs = (w.a.packs & kPacksY) != 0;
    bool redo = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = warp_sum<4>(softmax.sum[half]);
      const float inverse = sum == 0.0F ? 0.0F : 0x1p15F / sum;
      float probe = sum * 0.0F;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          acc[4 * n + e] *= inverse;
          probe = fmaf(acc[4 * n + e], 0.0F, probe);
        }
      }
      const int i = row0() + 8 * half;
      float* const row = y + i * p.y_strides.seq + 2 * t;
      const int columns = i < rows ? static_cast<int>(p.v_head_dim) - 2 * t : 0;
      if (pairs) {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          if (8 * n < columns)
            *reinterpret_cast<float2*>(row + 8 * n) = make_float2(acc[4 * n + 2 * half], acc[4 * n + 2 * half + 1]);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * n + e < columns) row[8 * n + e] = acc[4 * n + 2 * half + e];
          }
        }
      }
      redo |= isnan(probe) && i < rows;
    }
    redo = __any_sync(kFullWarp, redo);
    const int tile64 = (item.row0 + warp_row) / kRedoRows, tiles64 = (rows + kRedoRows - 1) / kRedoRows;
    if (lane_idx == 0 && tile64 < tiles64) {
      w.redo[(q_head() * tiles64 + tile64) * 4 + threadIdx.x / 32 % 4] = redo ? 1 : 0;
    }
  });
}

bool mask_is_keys(const AttentionParams& p) { return p.mask_stride_seq == 0 || p.q_len == 1; }

// What TMA asks of a mask whose rows differ.
bool mask_allows_tma(const AttentionParams& p) {
  const int64_t size = static_cast<int64_t>(size_of(p.mask_dtype));
  const int64_t strides = p.mask_stride_seq | p.mask_stride_head | p.mask_stride_batch;
  return p.mask_stride_key == 1 && is_aligned(p.mask, 16) && strides * size % 16 == 0;
}

template <class Tile>
Status launch_fp16_tile(const AttentionLaunch& a, const ExecContext& context) {
  const AttentionParams& p = a.p;
  const ScaledWorkspace workspace(p, Tile::kParts, Tile::kDim, context.workspace);
  if (context.workspace_bytes < workspace.bytes) {
    return Status::invalid("workspace", "{} bytes are needed, got {}", {workspace.bytes, context.workspace_bytes});
  }
  Fp16Launch w;
  w.a = a;
  w.a.tiles = ceil_div(p.q_len, Tile::kBlockM);
  w.items = static_cast<int>(w.a.tiles * p.heads * p.batch);
  const int blocks = std::min(w.items, context.device->sm_count);
  // What a floor of 2^-25 does is far below the roundings of TF32 anyway; it must only not swallow rows and columns.
  ORTPLUGINS_RETURN_IF_ERROR(
      scale_attention(a, workspace, Tile::kParts, Tile::kDim, Tile::kParts == 2 ? 0x1p2F : 0x1p-10F, blocks, context));
  w.q_factors = workspace.q.factors;
  w.k_factors = workspace.k.factors;
  w.v_factors = workspace.v.factors - workspace.k.factors;
  w.q_tiles = static_cast<int>(workspace.q.tiles);
  w.k_tiles = static_cast<int>(workspace.k.tiles);
  w.redo = workspace.redo;
  w.next = workspace.next;
  // Scaled elements are below 2^15, so that floors of 2^-25 move a score by at most 2^-9 head_dim |scale| factor: by
  // 2^-22 (tf32: 2^-11), if all of them agreed.
  w.largest_factor = (Tile::kParts == 2 ? 0x1p-13F : 0x1p-2F) /
                     (static_cast<float>(p.head_dim) * std::max(std::fabs(p.scale), FLT_MIN));
  // Keys and values of a head, shared by a group; half of L2, as q and y pass through it too.
  const int64_t head_bytes = workspace.k.len * (workspace.k.ld + workspace.v.ld) * 2 * Tile::kParts / w.a.group;
  const int64_t heads = p.heads * p.batch, fitting = context.device->l2_bytes / 2 / std::max<int64_t>(head_bytes, 1);
  w.section_heads = static_cast<int>(std::clamp<int64_t>(fitting, 1, heads));

  const auto encode = [&](CUtensorMap* map, const ScaledTensor& t, int rows) {
    const int64_t dims[4] = {t.ld, t.len, t.heads, Tile::kParts};
    const int64_t strides[4] = {1, t.ld, t.len * t.ld, t.heads * t.len * t.ld};
    const int box[4] = {64, rows, 1, 1};
    return encode_tensor_map(map, t.parts, 4, dims, strides, box);
  };
  ORTPLUGINS_RETURN_IF_ERROR(encode(&w.q, workspace.q, Tile::kBlockM));
  ORTPLUGINS_RETURN_IF_ERROR(encode(&w.k, workspace.k, Tile::kBlockN));
  ORTPLUGINS_RETURN_IF_ERROR(encode(&w.v, workspace.v, Tile::kBlockN));
  if (p.mask_dtype != DType::kNone) {
    w.mask_source = mask_is_keys(p) ? MaskSource::kKeys : mask_allows_tma(p) ? MaskSource::kTiles : MaskSource::kDirect;
  }
  if (w.mask_source == MaskSource::kTiles) {
    w.mask_has_batch = p.mask_stride_batch != 0;
    w.mask_has_head = p.mask_stride_head != 0;
    const int64_t dims[4] = {p.mask_len, p.q_len, w.mask_has_head ? p.heads : 1, w.mask_has_batch ? p.batch : 1};
    // A dimension of one still needs a stride; any multiple of 16 bytes.
    const int64_t strides[4] = {1, p.mask_stride_seq, w.mask_has_head ? p.mask_stride_head : p.mask_stride_seq,
                                w.mask_has_batch ? p.mask_stride_batch : p.mask_stride_seq};
    const bool bytes = p.mask_dtype == DType::kBool;
    const int box[4] = {bytes ? 128 : 32, Tile::kBlockM, 1, 1};
    ORTPLUGINS_RETURN_IF_ERROR(
        bytes ? encode_tensor_map(&w.mask, static_cast<const uint8_t*>(p.mask), 4, dims, strides, box)
              : encode_tensor_map(&w.mask, static_cast<const float*>(p.mask), 4, dims, strides, box));
  }
  static SmemLimit limit;
  const auto kernel = attention_fp16_kernel<Tile>;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, Tile::kSmemBytes));
  ORTPLUGINS_RETURN_IF_ERROR(launch("attention_fp16_kernel", kernel, dim3(static_cast<unsigned>(blocks)),
                                    Tile::kThreads, Tile::kSmemBytes, context, w));
  return launch_attention_redo(w.a, workspace.redo, Tile::kDim, context);
}

template <int kDim, int kBlockN, int kParts, bool kOverlap>
Status launch_fp16(const AttentionParams& params, const ExecContext& context) {
  bool done = false;
  ORTPLUGINS_RETURN_IF_ERROR(attention_prologue(params, context, &done));
  if (done) return {};
  const AttentionLaunch a = make_attention_launch(params);
  return a.folds_scale ? launch_fp16_tile<Fp16Tile<kDim, kBlockN, kParts, false, kOverlap>>(a, context)
                       : launch_fp16_tile<Fp16Tile<kDim, kBlockN, kParts, true, false>>(a, context);
}

template <int kDim, int kParts>
int64_t fp16_workspace(const AttentionParams& p) {
  return ScaledWorkspace(p, kParts, kDim, nullptr).bytes;
}

}  // namespace

bool attention_fp16_supports(const AttentionParams& p, const DeviceInfo& device, int64_t dim) {
  if (device.sm != 90 || p.dtype != DType::kFloat32 || p.precision == Precision::kIeee) return false;
  if (p.head_dim < 1 || p.v_head_dim < 1 || p.head_dim > dim || p.v_head_dim > dim || p.total_len() < 1) return false;
  if (p.mask_dtype != DType::kNone && !mask_is_keys(p) && p.mask_stride_key != 1) return false;
  constexpr int64_t kMost = int64_t{1} << 30;
  if (p.total_len() > kMaxAttentionLen || p.q_len > kMaxAttentionLen || p.batch > kMost || p.heads > kMost)
    return false;
  if (p.batch * p.heads > kMost || p.batch * p.heads * ceil_div(p.q_len, 64) > kMost) return false;
  return tensor_map_encoder() != nullptr;
}

// Tiles of 8192 elements: with two parts they leave room for two stages, and a mask, in shared memory.
Status launch_attention_fp16x3_64(const AttentionParams& params, const ExecContext& context) {
  return launch_fp16<64, 128, 2, true>(params, context);
}
Status launch_attention_fp16x3_128(const AttentionParams& params, const ExecContext& context) {
  return launch_fp16<128, 64, 2, false>(params, context);
}
Status launch_attention_fp16_64(const AttentionParams& params, const ExecContext& context) {
  return launch_fp16<64, 128, 1, true>(params, context);
}
Status launch_attention_fp16_128(const AttentionParams& params, const ExecContext& context) {
  return launch_fp16<128, 64, 1, false>(params, context);
}
int64_t attention_fp16x3_64_workspace(const AttentionParams& params, const DeviceInfo&) {
  return fp16_workspace<64, 2>(params);
}
int64_t attention_fp16x3_128_workspace(const AttentionParams& params, const DeviceInfo&) {
  return fp16_workspace<128, 2>(params);
}
int64_t attention_fp16_64_workspace(const AttentionParams& params, const DeviceInfo&) {
  return fp16_workspace<64, 1>(params);
}
int64_t attention_fp16_128_workspace(const AttentionParams& params, const DeviceInfo&) {
  return fp16_workspace<128, 1>(params);
}

}  // namespace ortplugins
