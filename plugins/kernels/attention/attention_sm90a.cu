// FusedAttention for 16-bit types on Hopper: TMA brings tiles of q, k, v (and of the mask) to shared memory, wgmma multiplies.
//
// A block is one producer warpgroup and kConsumers consumer warpgroups, and stays on its multiprocessor: it walks a list of
// work items, each kBlockM = 64 * kConsumers query rows of one head. The producer runs ahead of the consumers by kStages
// tiles of keys, also from one item into the next. A consumer warpgroup owns 64 rows: scores, weights and its part of y stay
// in registers, and the weights are the A operand of the second product as they stand (device/sm90_rs.h). Tiles that none
// of its rows may see it hands back unread.
//
// What keeps the tensor cores busy while exponentials are computed (at a head of 64, exponentials and products each take
// half of the time, and instructions to issue some more; four warpgroups overlap them best):
//   - no maxima are looked for while there is no need to (see Softmax);
//   - within a warpgroup, the product of the next tile's scores and that of this tile's weights with v are issued together;
//     the softmax of the next tile runs while the second is in flight;
//   - between warpgroups, a token (named barriers) lets one issue its products at a time, so that one multiplies while
//     another is in its softmax. Some tiles do better without: warpgroups that drift apart start and end items at different
//     times.
// What remains: while the tensor cores multiply, exponentials take 13 cycles a warp instead of 8, and each instruction of the
// FMA pipe takes a cycle from the products. So a polynomial in place of a quarter of the exponentials takes 10 % more time,
// and heads of 40 would take only 8 % less without any scaling or sums: what limits them is exponentials beside products.
//
// At the end of an item a consumer has much to do that is not products: the producer decodes items for them, and results go
// out by TMA, by way of the shared memory of their q.
//
// Shared memory, each tile in blocks of 64 elements (rows of 128 bytes, swizzled by TMA), 1024-byte aligned:
//   q (kStagesQ x kBlockM rows), k and v (kStages x kBlockN rows each), with a mask also kStages mask tiles (kBlockM rows)
//   or rows.
#include <algorithm>

#include "device/dependent_launch.h"
#include "device/mma.h"
#include "device/shared_memory.h"
#include "device/sm90_rs.h"
#include "device/tensor_map.h"
#include "kernels/attention/attention_device.h"
#include "kernels/attention/attention_sm90a.h"
#include "kernels/attention/variants.h"

namespace ortplugins {
namespace {

// How scores are masked. kKeys: one value for each key, the same for all rows of an item; it is turned into floats by a
// producer warp. kRows16, kRowsBool: a tile of elements or of bytes, brought by TMA. kRowsLoads: rows whose alignment TMA
// does not take; each thread loads the values of its own scores.
enum class MaskTiles : int { kNone, kKeys, kRows16, kRowsBool, kRowsLoads };

// Boxes of a tensor whose rows have `dim` elements: of 64, and of those that are left after whole blocks of 64. A box that
// reaches past the row would take the copy engine up to twice the time: on an H200, 8 cycles for each row of 128 bytes.
struct TileMaps {
  CUtensorMap wide, last;
  int dim = 0;
  int bytes = 0;  // of a tile
};

struct WgmmaLaunch {
  AttentionLaunch a;
  TileMaps q, k, v, y;
  CUtensorMap mask;
  MaskTiles mask_tiles = MaskTiles::kNone;
  bool mask_has_batch = false, mask_has_head = false;
  bool batch_inner = false;  // items count sequences before heads: those that run together read the same rows of a mask
  bool scores = false;      // products need more than a positive factor: softcap, or a scale that is not positive
  int items = 0;
  int section_heads = 1;    // heads (of all sequences) whose items are dealt out together under a causal mask
  int heads = 1;            // of all sequences
  KeyBand band{};           // of every sequence, unless their lengths lie in device memory
  Divisor tiles, inner;     // of a head; heads of a sequence, or sequences if batch_inner
  Divisor group;
  Divisor section, full_section, last_section;  // items of a section; heads of each section but the last, and of that one
};

// What becomes of a product, each with all that stands before it: a positive factor and a mask of keys; a mask whose rows
// differ, brought by TMA; softcap, any scale, and a mask that TMA does not take.
enum class Scores : int { kFactor, kRows, kAny };

// All numbers of a variant. kSplit: few queries on a long cache. Then a tile's rows are those of all query heads that share a
// key head, row r being query r % q_len of head r / q_len of the group, and the keys are split over items, whose results are
// merged afterwards.
template <int kDim_, int kBlockN_, int kConsumers_, int kStages_, Scores kScores_ = Scores::kFactor, bool kTokens_ = true,
          bool kSplit_ = false>
struct WgmmaTile {
  static constexpr int kDim = kDim_, kBlockN = kBlockN_, kConsumers = kConsumers_, kStages = kStages_;
  static constexpr bool kSplit = kSplit_;
  static constexpr bool kRows = kScores_ != Scores::kFactor && !kSplit, kAny = kScores_ == Scores::kAny;
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr bool kTokens = kTokens_ && kConsumers > 1;

  static constexpr int kDimBlocks = (kDim + 63) / 64;
  static constexpr int kBytesQ = kDimBlocks * kBlockM * 128;
  static constexpr int kBytesK = kDimBlocks * kBlockN * 128;
  static constexpr int kBytesMask = kRows ? (kBlockN + 63) / 64 * kBlockM * 128 : 0;  // of 16-bit elements
  static constexpr int smem_bytes(int stages_q) { return 1024 + stages_q * kBytesQ + kStages * (2 * kBytesK + kBytesMask); }

  // Blocks of one consumer warpgroup, for short sequences, share a multiprocessor: one computes while another starts or ends.
  static constexpr int kBlocksPerSm = kConsumers > 1 || kSplit ? 1 : 3;
  // With room for a second tile of q, the loads of the next item start before this one ends. Barriers and what else lies in
  // static shared memory take up to 2 KB, the system takes 1.
  // A block of a split has an item or two, and starts sooner with less shared memory to clear.
  static constexpr int kStagesQ = !kSplit && kBlocksPerSm * (smem_bytes(2) + 3072) <= 228 * 1024 ? 2 : 1;
  // Then results pass through the rows of their q, and the copy engine takes them out while the next item is under way.
  static constexpr bool kStoresTiles = kStagesQ == 2;
  // One lane of each consumer warp hands an item and its rows of q back. Where there is one slot, written again at once, each
  // lane does that has read it: racecheck does not see that the others have, too.
  static constexpr bool kAllHandBack = kStagesQ == 1;
  static constexpr int kSmemBytes = smem_bytes(kStagesQ);
  static_assert(kSmemBytes <= 227 * 1024);

  // Registers of the two roles, out of 64 K for all blocks of a multiprocessor: what the consumers gain is what the producer
  // gives; 0: as launched. A block gets no more than it was launched with, so that both come out short.
  static constexpr int kProducerRegisters = kSplit ? 0 : kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 4 ? 112 : kConsumers == 2 ? 232 : 128;
  static_assert(kSplit || kBlocksPerSm * 128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 64 * 1024);
  static_assert(!kAny || kConsumers == 2 || kSplit, "not enough registers");
};

// Barriers in shared memory, by their 32-bit addresses.
template <int kStagesQ, int kStages>
struct WgmmaBarriers {
  uint32_t base;
  static constexpr int kCount = 3 * kStagesQ + 4 * kStages;
  __device__ __forceinline__ uint32_t at(int group, int stage) const { return base + 8 * (3 * kStagesQ + group * kStages + stage); }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return base + 8 * stage; }
  __device__ __forceinline__ uint32_t q_empty(int stage) const { return base + 8 * (kStagesQ + stage); }
  __device__ __forceinline__ uint32_t span_full(int stage) const { return base + 8 * (2 * kStagesQ + stage); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return at(0, stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return at(1, stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return at(2, stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return at(3, stage); }
};

// Item of this block in a round, -1 past the end; items count tiles fastest, then heads and sequences. Under a causal mask
// their lengths differ: within a section of heads the longest come first, and every other round runs backwards, so that a
// block which got the longest of one round gets the shortest of the next.
__device__ __forceinline__ int wgmma_item(const WgmmaLaunch& w, int round) {
  const int grid = computed_in_place(static_cast<int>(gridDim.x)), block = computed_in_place(static_cast<int>(blockIdx.x));
  if (!w.a.p.is_causal) {
    const int slot = round * grid + block;
    return slot < w.items ? slot : -1;
  }
  const int slot = round * grid + (round % 2 == 0 ? block : grid - 1 - block);
  if (slot >= w.items) return -1;
  const int tiles = static_cast<int>(w.a.tiles);
  const int section_items = w.section_heads * tiles;
  const int section = static_cast<int>(w.section.quotient(static_cast<unsigned>(slot))), rest = slot - section * section_items;
  const int heads = min(w.section_heads, w.heads - section * w.section_heads);
  const int tile = static_cast<int>((heads == w.section_heads ? w.full_section : w.last_section).quotient(static_cast<unsigned>(rest)));
  return (section * w.section_heads + rest - tile * heads) * tiles + tile;
}

// The keys of a row of a kKeys mask that are not masked lie in [first, last); if it is `clean`, those are all of them and
// nothing is added to their scores, as with padding at either end. Then tiles of padding are skipped, and the mask costs
// nothing in the others.
struct alignas(16) KeySpan {  // a vector load of one touches no other
  int first, last, clean;
};

// What an item is about. 32-bit numbers throughout: a division of 64-bit ones takes hundreds of cycles, and an item of a
// short sequence only a few thousand.
struct WgmmaItem {
  int b, h, kv_head;
  int row0;         // first query
  int split;
  int first, last;  // keys that some of its queries may see, and that belong to its split

  __device__ __forceinline__ void clip(const KeySpan& span) {
    first = max(first, span.first);
    last = min(last, span.last);
  }
};

// An item as the producer hands it to the consumers, which takes the decoding out of their way. The last one has b = -1.
struct alignas(16) WgmmaItemSlot {
  WgmmaItem item;
  KeyBand band;
};

template <class Tile>
__device__ __forceinline__ WgmmaItem split_item(const WgmmaLaunch& w, unsigned index, KeyBand* band) {
  const unsigned splits = static_cast<unsigned>(w.a.splits), kv_heads = static_cast<unsigned>(w.a.p.kv_heads);
  const unsigned head = index / splits;
  WgmmaItem item;
  item.split = static_cast<int>(index - head * splits);
  item.b = static_cast<int>(head / kv_heads);
  item.kv_head = static_cast<int>(head % kv_heads);
  item.h = item.kv_head * w.a.group;
  item.row0 = 0;
  *band = sequence_band(w.a.p, w.band, item.b);
  const int first = band->first(0), last = band->last(static_cast<int>(w.a.p.q_len) - 1);
  const int tiles = max(0, last - first + Tile::kBlockN - 1) / Tile::kBlockN;
  const int part = (tiles + w.a.splits - 1) / w.a.splits * Tile::kBlockN;
  item.first = min(last, first + item.split * part);
  item.last = min(last, item.first + part);
  return item;
}

// Rounds of items until this block's part of the list ends; visit(item, band, round) for each.
template <class Tile, class Visit>
__device__ __forceinline__ void for_each_item(const WgmmaLaunch& w, Visit visit) {
  constexpr int kBlockM = Tile::kBlockM;
  const unsigned tiles = static_cast<unsigned>(w.a.tiles), heads = static_cast<unsigned>(w.a.p.heads);
  const int rows = static_cast<int>(w.a.p.q_len);
  for (int round = 0; round * computed_in_place(static_cast<int>(gridDim.x)) < w.items; ++round) {
    if constexpr (Tile::kSplit) {
      const unsigned index = static_cast<unsigned>(round) * gridDim.x + blockIdx.x;
      if (index >= static_cast<unsigned>(w.items)) return;
      KeyBand band;
      const WgmmaItem item = split_item<Tile>(w, index, &band);
      visit(item, band, round);
      continue;
    }
    const int index = wgmma_item(w, round);
    if (index < 0) continue;
    const unsigned head = w.tiles.quotient(static_cast<unsigned>(index));
    unsigned tile = static_cast<unsigned>(index) - head * tiles;
    if (w.a.p.is_causal) tile = tiles - 1 - tile;
    WgmmaItem item;
    item.row0 = static_cast<int>(tile) * kBlockM;
    const unsigned inner = w.batch_inner ? static_cast<unsigned>(w.a.p.batch) : heads;
    const unsigned outer = w.inner.quotient(head);
    const int outer_idx = static_cast<int>(outer), inner_idx = static_cast<int>(head - outer * inner);
    item.b = w.batch_inner ? inner_idx : outer_idx;
    item.h = w.batch_inner ? outer_idx : inner_idx;
    item.split = 0;
    item.kv_head = static_cast<int>(w.group.quotient(static_cast<unsigned>(item.h)));
    const KeyBand band = sequence_band(w.a.p, w.band, item.b);
    // The columns of a box must start at a multiple of 16 bytes, which those of a mask are then.
    item.first = Tile::kRows ? band.first(item.row0) & ~15 : band.first(item.row0);
    item.last = band.last(min(item.row0 + kBlockM, rows) - 1);
    visit(item, band, round);
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

// Read where it is needed, so that neither it nor what depends on it holds a register of a consumer meanwhile.
__device__ __forceinline__ int lane_in_place() {
  int lane_idx;
  asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(lane_idx));
  return lane_idx;
}

// The mask's value for one key in natural units (not log2).
template <class T>
__device__ __forceinline__ float key_mask_value(const AttentionParams& p, int64_t offset) {
  if (p.mask_dtype == DType::kBool) return static_cast<const uint8_t*>(p.mask)[offset] != 0 ? 0.0F : -INFINITY;
  return to_float(static_cast<const T*>(p.mask)[offset]);
}

// What one lane has seen of a row of the mask.
struct KeyCount {
  int lo = INT_MAX, hi = 0;  // keys not masked lie in [lo, hi)
  int zeros = 0;             // keys to whose scores nothing is added

  __device__ __forceinline__ void see(int j, float value) {
    if (value == -INFINITY) return;
    lo = min(lo, j);
    hi = max(hi, j + 1);
    zeros += value == 0.0F ? 1 : 0;
  }
};

// By a whole warp, for keys [first, last) of the row of the mask at `row`. 16 bytes of a mask in flight, or three loads: few,
// as a producer has few registers.
template <class T>
__device__ __forceinline__ KeySpan key_span(const WgmmaLaunch& w, int64_t row, int first, int last) {
  const AttentionParams& p = w.a.p;
  const int lane_idx = static_cast<int>(threadIdx.x) % 32;
  KeyCount count;
  int j = first;
  const bool is_bool = p.mask_dtype == DType::kBool;
  const int size = is_bool ? 1 : 2;
  const char* const bytes = static_cast<const char*>(p.mask) + row * size;
  if (p.mask_stride_key == 1 && reinterpret_cast<uintptr_t>(bytes + first * size) % 16 == 0) {
    const int pack = 16 / size;
    for (j += pack * lane_idx; j <= last - pack; j += pack * 32) {
      const uint4 keys = *reinterpret_cast<const uint4*>(bytes + static_cast<int64_t>(j) * size);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = i == 0 ? keys.x : i == 1 ? keys.y : i == 2 ? keys.z : keys.w;
        if (!is_bool) {
          const float2 values = unpack_half2<T>(word);
          count.see(j + 2 * i, values.x);
          count.see(j + 2 * i + 1, values.y);
          continue;
        }
        const uint32_t open = __vcmpne4(word, 0);
        if (open == 0) continue;
        count.zeros += __popc(open) / 8;
        count.lo = min(count.lo, j + 4 * i + (__ffs(static_cast<int>(open)) - 1) / 8);
        count.hi = max(count.hi, j + 4 * i + 4 - __clz(static_cast<int>(open)) / 8);
      }
    }
    j = first + (last - first) / pack * pack;
  }
  constexpr int kLoads = 3;
  for (j += lane_idx; j < last; j += 32 * kLoads) {
    float values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      values[i] = j + 32 * i < last ? key_mask_value<T>(p, row + (j + 32 * i) * p.mask_stride_key) : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) count.see(j + 32 * i, values[i]);
  }
  KeySpan span;
  span.last = __reduce_max_sync(kFullWarp, count.hi);
  span.first = min(__reduce_min_sync(kFullWarp, count.lo), span.last);  // both 0 if all keys are masked
  span.clean = __reduce_add_sync(kFullWarp, count.zeros) == span.last - span.first ? 1 : 0;
  return span;
}

// Scores in natural units, with the mask's values for rows row0 and row0 + 8 and columns from `column` on. Element is that of
// the mask, one byte for bool.
template <class Element, int kCount>
__device__ __forceinline__ void add_loaded_mask(float (&s)[kCount], const WgmmaLaunch& w, int b, int h, int row0, int column,
                                                float factor) {
  const AttentionParams& p = w.a.p;
  const int valid = static_cast<int>(p.mask_len) - column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = min(row0 + 8 * half, static_cast<int>(p.q_len) - 1);
    const Element* values = static_cast<const Element*>(p.mask) + mask_row_offset(p, b, h, i) + column;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * n + 2 * half + e];
        if constexpr (sizeof(Element) == 1) {
          x = 8 * n + e < valid && values[8 * n + e] != 0 ? x * factor : -INFINITY;
        } else {
          x = fmaf(x, factor, 8 * n + e < valid ? to_float(values[8 * n + e]) : 0.0F);
        }
      }
    }
  }
}

// A consumer thread's share of 64 rows: rows g and g + 8 of its warp's 16, in accumulator order.
template <class T, class Tile>
struct Softmax {
  static constexpr int kCount = Tile::kBlockN / 2;
  // Weights stay relative to an old maximum until a row of the warp exceeds it by this much. Neither type minds weights of
  // e^5.5 = 245, and y and the sums are hardly ever rescaled: 3 to 7 % less time.
  static constexpr float kSlack = 5.5F;
  float max[2], sum[2];            // max in natural units (not log2); sum of this lane's columns alone
  float offset[2];                 // max in units of log2; NaN where there is none that the next tile could go on from
  float unit, part[2];             // of this tile: weight exp2(score * unit - offset), sums

  __device__ __forceinline__ void reset() {
    max[0] = max[1] = -INFINITY;
    sum[0] = sum[1] = 0.0F;
    offset[0] = offset[1] = NAN;
  }

  // The scores of a tile become weights in three steps: `go_on`, `weigh`, and `end`, which adds up. `factor`, positive, brings
  // scores to natural units. A weight is exp2(score * unit - offset) in one fused multiply-add. The offset is rounded, but all
  // that a row adds up is relative to it, so that this cancels as long as it is small.
  //
  // Hardly any tile but the first raises a maximum by much. So weights are computed without looking for maxima, and their
  // sums, which are needed anyway, tell whether one has grown. Then the tile is done again, from new scores, by `redo`. At a
  // head of 64 this saves 19 % of all instructions, and the wait for the maxima.
  __device__ __forceinline__ void go_on(float factor) {
    unit = factor * kLog2e;
    part[0] = part[1] = 0.0F;
  }
  __device__ __forceinline__ void weigh(float (&s)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(fmaf(s[i], unit, -offset[i / 2 % 2]));
      part[i / 2 % 2] += s[i];
    }
  }
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] += part[half];
  }
  // After all weights: whether they are of no use, as some row of the warp had no offset, or has weights that are too large, or
  // NaN. If no maximum has grown by more than kSlack, a lane's kBlockN / 4 weights of a row add up to at most 32 * 245.
  __device__ __forceinline__ bool must_redo() const {
    static_assert(kCount <= 64);
    return __any_sync(kFullWarp, !(part[0] <= 8192.0F) || !(part[1] <= 8192.0F));
  }
  // Weights by way of the maxima; y is to be multiplied by `correction`. Large maxima are looked for if `may_be_large`: those
  // of a row masked throughout with the lowest number of its type, as exporters do. Times log2(e) they may be infinite, and
  // what is rounded off the offset counts. So they are subtracted first.
  __device__ __forceinline__ void redo(float (&s)[kCount], float factor, bool may_be_large, float (&correction)[2]) {
    float new_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kCount; ++i) new_max[i / 2 % 2] = fmaxf(new_max[i / 2 % 2], s[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int lanes = 2; lanes > 0; lanes /= 2) new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(kFullWarp, new_max[half], lanes));
      new_max[half] = fmaxf(max[half], new_max[half] * factor);
    }
    go_on(factor);
    const float larger = fmaxf(fabsf(softmax_reference(new_max[0])), fabsf(softmax_reference(new_max[1])));
    const bool is_large = may_be_large && __any_sync(kFullWarp, larger > 4096.0F);
    const bool rises = __any_sync(kFullWarp, !(new_max[0] <= max[0] + kSlack && new_max[1] <= max[1] + kSlack) ||
                                                 isnan(offset[0]) || isnan(offset[1]));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      correction[half] = 1.0F;
      const float reference = softmax_reference(new_max[half]);
      if (is_large) {
        correction[half] = exp2_approx((max[half] - reference) * kLog2e);
        offset[half] = 0.0F;
#pragma unroll
        for (int i = 0; i < kCount; ++i) s[i] = i / 2 % 2 == half ? fmaf(s[i], factor, -reference) : s[i];
      } else if (rises) {
        offset[half] = reference * kLog2e;
        correction[half] = exp2_approx(fmaf(max[half], kLog2e, -offset[half]));
      }
      if (is_large || rises) max[half] = new_max[half];
      sum[half] *= correction[half];
    }
    if (is_large) unit = kLog2e;
    weigh(s);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_large || max[half] == -INFINITY) offset[half] = NAN;
    }
  }

  // Whether some score of a row was too large without being looked for: from here on a rounded offset is off by 2 and more.
  // Without a mask that is a matter of overflowing inputs.
  __device__ __forceinline__ bool is_spoilt(int half, bool may_be_large) const {
    return !may_be_large && fabsf(softmax_reference(max[half])) > 0x1p24F;
  }
};

// Calls copy(map, offset, column) for each block of 64 columns of a tile of `rows` rows, as far as there are columns. Of a split
// all: its boxes may reach past the rows, as neither the copy engine nor products are what limits it, and the fewer instructions
// stand in front of the first copy the better.
template <class Tile, class Copy>
__device__ __forceinline__ void for_each_block(const TileMaps& maps, int rows, Copy copy) {
#pragma unroll
  for (int block = 0; block < Tile::kDimBlocks; ++block) {
    const int column = block * 64;
    const uint32_t offset = static_cast<uint32_t>(block * rows * 128);
    if (Tile::kSplit || column + 64 <= maps.dim) {
      copy(&maps.wide, offset, column);
    } else if (column < maps.dim) {
      copy(&maps.last, offset, column);
    }
  }
}

// Asks L2 for what this block reads first, while the kernel in front still runs: a cache is there long before, and asking for
// what is not does no harm. The lengths in device memory must not be read yet; with them nothing is asked for. On an H200, 1.6 of
// 22 us for 67 MB of keys and values; three tiles and more gain nothing.
template <class Tile>
__device__ __forceinline__ void prefetch_first_keys(const WgmmaLaunch& w) {
  if (w.a.p.total_lengths != nullptr || blockIdx.x >= static_cast<unsigned>(w.items)) return;
  KeyBand band;
  const WgmmaItem item = split_item<Tile>(w, blockIdx.x, &band);
  const int last = min(item.last, item.first + 2 * Tile::kBlockN);
  for (int j0 = item.first; j0 < last; j0 += Tile::kBlockN) {
    for (const TileMaps* maps : {&w.k, &w.v}) {
      for_each_block<Tile>(*maps, Tile::kBlockN, [&](const CUtensorMap* map, uint32_t, int column) {
        tma_prefetch_l2_4d(map, column, j0, item.kv_head, item.b);
      });
    }
  }
}

// Zeros in columns [first, last), multiples of 8, of `stages` tiles in blocks of 64 columns: no copy brings them, but
// products read them. By all threads of the block.
template <int kThreads>
__device__ __forceinline__ void clear_columns(uint32_t tiles, int tile_bytes, int stages, int rows, int first, int last) {
  for (int chunk = first / 8; chunk < last / 8; ++chunk) {
    for (int i = static_cast<int>(threadIdx.x); i < stages * rows; i += kThreads) {
      const int stage = i / rows, row = i - stage * rows;
      store_shared(tiles + stage * tile_bytes + (chunk / 8 * rows + row) * 128 + (chunk % 8 ^ row % 8) * 16, uint4{});
    }
  }
}

// Zeros in columns from `first` on, a multiple of 8, of 16 rows of q, where results that are NaN may have come. By a warp.
template <class Tile>
__device__ __forceinline__ void clear_columns_of_rows(uint32_t rows, int first) {
  const int row = lane_in_place();
  if (row < 16) {
    for (int chunk = first / 8; chunk < (Tile::kDim + 15) / 16 * 2; ++chunk) {
      store_shared(rows + (chunk / 8 * Tile::kBlockM + row) * 128 + (chunk % 8 ^ row % 8) * 16, uint4{});
    }
  }
  fence_async_proxy();
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm) attention_wgmma_kernel(const __grid_constant__ WgmmaLaunch w) {
  constexpr int kDim = Tile::kDim, kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kStages = Tile::kStages, kStagesQ = Tile::kStagesQ;
  extern __shared__ char smem_unaligned[];
  __shared__ uint64_t s_barriers[WgmmaBarriers<kStagesQ, kStages>::kCount];
  __shared__ __align__(16) float s_keys_mask[kStages][kBlockN];
  __shared__ int s_keys_masked[kStages];  // whether some value of the tile's mask is not zero
  __shared__ WgmmaItemSlot s_items[kStagesQ];
  __shared__ KeySpan s_key_span[kStagesQ];
  __shared__ KeySpan s_last_span;  // the one found last, which often serves the next item too
  const uint32_t smem = (smem_address(smem_unaligned) + 1023) & ~1023U;
  const uint32_t sQ = smem, sK = sQ + kStagesQ * Tile::kBytesQ, sV = sK + kStages * Tile::kBytesK, sMask = sV + kStages * Tile::kBytesK;
  const WgmmaBarriers<kStagesQ, kStages> barriers{smem_address(s_barriers)};

  const AttentionParams& p = w.a.p;
  const int warp_idx = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane_idx = static_cast<int>(threadIdx.x) % 32;
  const bool keys_mask = w.mask_tiles == MaskTiles::kKeys;
  const bool mask_tiles = Tile::kRows && (w.mask_tiles == MaskTiles::kRows16 || w.mask_tiles == MaskTiles::kRowsBool);
  if constexpr (Tile::kSplit) {
    // Rows that no copy fills, so that their products are harmless.
    for (int i = static_cast<int>(threadIdx.x); i < Tile::kBytesQ / 16; i += Tile::kThreads) store_shared(sQ + i * 16, uint4{});
  } else {
    constexpr int kColumns = (kDim + 15) / 16 * 16;  // that the products for scores read
    clear_columns<Tile::kThreads>(sQ, Tile::kBytesQ, kStagesQ, kBlockM, w.q.dim, kColumns);
    clear_columns<Tile::kThreads>(sK, Tile::kBytesK, kStages, kBlockN, w.k.dim, kColumns);
    clear_columns<Tile::kThreads>(sV, Tile::kBytesK, kStages, kBlockN, w.v.dim, kDim);
  }
  fence_async_proxy();
  if (threadIdx.x == 0) {
    if constexpr (Tile::kSplit) {
      for (const TileMaps* maps : {&w.q, &w.k, &w.v}) tma_prefetch(&maps->wide);
    } else {
      for (const TileMaps* maps : {&w.q, &w.k, &w.v, &w.y}) {
        if (maps->dim >= 64) tma_prefetch(&maps->wide);
        if (maps->dim % 64 != 0) tma_prefetch(&maps->last);
      }
    }
    // One lane of each consumer warp hands a buffer back. Of a buffer with a mask of keys all do, as all have read it.
    const int readers = (keys_mask ? 128 : 4) * Tile::kConsumers;
    for (int stage = 0; stage < kStagesQ; ++stage) {
      mbarrier_init(barriers.q_full(stage), 1);
      mbarrier_init(barriers.q_empty(stage), (Tile::kAllHandBack ? 128 : 4) * Tile::kConsumers);
      mbarrier_init(barriers.span_full(stage), 1);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barriers.k_full(stage), keys_mask ? 33 : 1);  // with a mask of keys also the warp that brings it
      mbarrier_init(barriers.v_full(stage), 1);
      mbarrier_init(barriers.k_empty(stage), readers);
      mbarrier_init(barriers.v_empty(stage), 4 * Tile::kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();
  let_next_kernel_start();
  if constexpr (Tile::kSplit) {
    if (threadIdx.x == 0) prefetch_first_keys<Tile>(w);
  }
  wait_for_previous_kernel();

  // Of tiles of q, what consumers hand back first is the first or the second one, see release_last_rows.
  constexpr uint32_t kEmptyParity = Tile::kStoresTiles ? 0 : 1;
  if (warp_idx < 4) {
    if constexpr (Tile::kProducerRegisters > 0) registers_decrease<Tile::kProducerRegisters>();
    if (warp_idx == 0 && lane_idx == 0) {
      // Whoever decodes reads the whole cache anew for the next token.
      constexpr auto load_tile = Tile::kSplit ? tma_load_4d_once : tma_load_4d;
      PipelineState<kStages> state;
      PipelineState<kStagesQ> q_state;
      // Bytes of a mask that come with a tile of keys, in blocks of 128 to a row.
      const int mask_block = w.mask_tiles == MaskTiles::kRowsBool ? 128 : 64;
      const int mask_blocks = mask_tiles ? (kBlockN + mask_block - 1) / mask_block : 0;
      for_each_item<Tile>(w, [&](WgmmaItem tile, const KeyBand& band, int) {
        const int h = tile.h, b = tile.b, kv_head = tile.kv_head;
        mbarrier_wait(barriers.q_empty(q_state.stage), q_state.parity ^ kEmptyParity);
        if (keys_mask) {
          mbarrier_wait(barriers.span_full(q_state.stage), q_state.parity);
          tile.clip(s_key_span[q_state.stage]);
        }
        s_items[q_state.stage] = {tile, band};
        if (tile.first >= tile.last) {
          mbarrier_arrive(barriers.q_full(q_state.stage));
          q_state.advance();
          return;
        }
        mbarrier_arrive_expect(barriers.q_full(q_state.stage), w.q.bytes);
        for_each_block<Tile>(w.q, kBlockM, [&](const CUtensorMap* map, uint32_t offset, int column) {
          tma_load_4d(sQ + q_state.stage * Tile::kBytesQ + offset, map, barriers.q_full(q_state.stage), column, tile.row0, h, b);
        });
        q_state.advance();
        for (int j0 = tile.first; j0 < tile.last; j0 += kBlockN) {
          mbarrier_wait(barriers.k_empty(state.stage), state.parity ^ 1);
          mbarrier_arrive_expect(barriers.k_full(state.stage), w.k.bytes + mask_blocks * kBlockM * 128);
          for_each_block<Tile>(w.k, kBlockN, [&](const CUtensorMap* map, uint32_t offset, int column) {
            load_tile(sK + state.stage * Tile::kBytesK + offset, map, barriers.k_full(state.stage), column, j0, kv_head, b);
          });
          if constexpr (Tile::kRows) {
            const int mask_b = w.mask_has_batch ? b : 0, mask_h = w.mask_has_head ? h : 0;
            for (int block = 0; block < mask_blocks; ++block) {
              tma_load_4d(sMask + state.stage * Tile::kBytesMask + block * kBlockM * 128, &w.mask, barriers.k_full(state.stage),
                          j0 + block * mask_block, tile.row0, mask_h, mask_b);
            }
            // A mask is larger than k and v, and is read for the first time, and large tiles have room for two stages only.
            if constexpr (Tile::kConsumers == 2) {
              for (int block = 0; block < mask_blocks && j0 + 2 * kBlockN < tile.last; ++block) {
                tma_prefetch_l2_4d(&w.mask, j0 + 2 * kBlockN + block * mask_block, tile.row0, mask_h, mask_b);
              }
            }
          }
          mbarrier_wait(barriers.v_empty(state.stage), state.parity ^ 1);
          mbarrier_arrive_expect(barriers.v_full(state.stage), w.v.bytes);
          for_each_block<Tile>(w.v, kBlockN, [&](const CUtensorMap* map, uint32_t offset, int column) {
            load_tile(sV + state.stage * Tile::kBytesK + offset, map, barriers.v_full(state.stage), column, j0, kv_head, b);
          });
          state.advance();
        }
      });
      mbarrier_wait(barriers.q_empty(q_state.stage), q_state.parity ^ kEmptyParity);
      s_items[q_state.stage].item.b = -1;
      mbarrier_arrive(barriers.q_full(q_state.stage));
    } else if (warp_idx == 1 && keys_mask) {
      PipelineState<kStages> state;
      int span_head = -1;  // of all heads of all sequences, the one whose mask s_last_span is of
      for_each_item<Tile>(w, [&](WgmmaItem tile, const KeyBand& band, int round) {
        // Of the ring of q; from the round, as a producer is short of registers.
        const int q_stage = round % kStagesQ;
        const uint32_t q_parity = static_cast<uint32_t>(round) / kStagesQ % 2;
        const int64_t row = mask_row_offset(p, tile.b, tile.h, 0);
        const int head = tile.b * static_cast<int>(p.heads) + (p.mask_stride_head != 0 ? tile.h : 0);
        if (Tile::kSplit || head != span_head) {
          span_head = head;
          const KeySpan found = key_span<T>(w, row, Tile::kSplit ? tile.first : 0, Tile::kSplit ? tile.last : band.end);
          __syncwarp();
          if (lane_idx == 0) s_last_span = found;
          __syncwarp();
        }
        const KeySpan span = s_last_span;
        if (lane_idx == 0) {
          mbarrier_wait(barriers.q_empty(q_stage), q_parity ^ kEmptyParity);
          s_key_span[q_stage] = span;
          mbarrier_arrive(barriers.span_full(q_stage));
        }
        tile.clip(span);
        float values[(kBlockN + 31) / 32];
        const auto load_values = [&](int j0) {
#pragma unroll
          for (int i = 0; i < kBlockN; i += 32) {
            const int j = j0 + i + lane_idx;
            values[i / 32] = span.clean == 0 && j < tile.last ? key_mask_value<T>(p, row + j * p.mask_stride_key) : 0.0F;
          }
        };
        load_values(tile.first);
        for (int j0 = tile.first; j0 < tile.last; j0 += kBlockN) {
          bool masked = false;
#pragma unroll
          for (int i = 0; i < kBlockN; i += 32) masked |= values[i / 32] != 0.0F;
          masked = __any_sync(kFullWarp, masked);
          mbarrier_wait(barriers.k_empty(state.stage), state.parity ^ 1);
          if (masked) {
#pragma unroll
            for (int i = 0; i < kBlockN; i += 32) {
              if (i + lane_idx < kBlockN) s_keys_mask[state.stage][i + lane_idx] = values[i / 32];
            }
          }
          if (lane_idx == 0) s_keys_masked[state.stage] = masked ? 1 : 0;
          load_values(j0 + kBlockN);
          mbarrier_arrive(barriers.k_full(state.stage));
          state.advance();
        }
      });
    }
    return;
  }

  if constexpr (Tile::kProducerRegisters > 0) registers_increase<Tile::kConsumerRegisters>();
  const int consumer_idx = warp_idx / 4 - 1;
  const bool may_be_large = Tile::kRows || Tile::kAny || keys_mask;
  const int warp_row = consumer_idx * 64 + warp_idx % 4 * 16;  // in the tile
  // Token: barrier 1 + i lets consumer i issue; 256 threads, those of consumer i and of the one before it.
  const int own_token = 1 + consumer_idx, next_token = 1 + (consumer_idx + 1) % Tile::kConsumers;
  if (Tile::kTokens && consumer_idx == Tile::kConsumers - 1) named_barrier_arrive(next_token, 256);

  const uint64_t desc_q = wgmma_descriptor(sQ + consumer_idx * 64 * 128);
  const uint64_t desc_k = wgmma_descriptor(sK), desc_v = wgmma_descriptor(sV, kBlockN * 128);
  float acc[kDim / 2];
  float s[kBlockN / 2];
  uint32_t weights[kBlockN / 16][4];
  Softmax<T, Tile> softmax;

  PipelineState<kStagesQ> q_state;
  const auto issue_scores = [&](int stage) {
    const uint64_t desc = desc_k + static_cast<unsigned>(stage) * (Tile::kBytesK / 16U);
    const uint64_t desc_rows = desc_q + static_cast<unsigned>(q_state.stage) * (Tile::kBytesQ / 16U);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < (kDim + 15) / 16; ++kk) {
      Wgmma<T, kBlockN, false, false>::run(s, desc_rows + (kk / 4 * kBlockM * 128 + kk % 4 * 32) / 16,
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
  const auto arrive_reader = [&](uint32_t barrier) {
    if (keys_mask || lane_idx == 0) mbarrier_arrive(barrier);
  };

  const int rows = static_cast<int>(p.q_len);
  PipelineState<kStages> k_state, v_state;
  // Hands back the rows of q of the item before, once its results have left them: in each item, so that it takes no flag. The
  // first one hands back rows that were never used, and those of its own are ready from the start.
  const auto release_last_rows = [&] {
    if constexpr (!Tile::kStoresTiles) return;
    __syncwarp();
    if (lane_idx == 0) {
      tma_store_wait<0>();
      mbarrier_arrive(barriers.q_empty(q_state.stage ^ 1));
    }
  };
  if constexpr (Tile::kStoresTiles) arrive(barriers.q_empty(0));
  for (;;) {
    mbarrier_wait(barriers.q_full(q_state.stage), q_state.parity);
    // Read where it is needed, so that no registers hold it meanwhile.
    const volatile WgmmaItemSlot& tile = s_items[q_state.stage];
    const auto uniform = [](int v) { return __shfl_sync(kFullWarp, v, 0); };
    if (uniform(tile.item.b) < 0) break;
    const auto item_band = [&] { return KeyBand{uniform(tile.band.end), uniform(tile.band.left), uniform(tile.band.right)}; };
    softmax.reset();
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) acc[i] = 0.0F;

    int out_b = 0, out_h = 0, out_row0 = 0, out_split = 0;  // where results go
    const auto read_place = [&] {
      out_b = uniform(tile.item.b);
      out_h = uniform(tile.item.h);
      out_row0 = uniform(tile.item.row0);
      out_split = uniform(tile.item.split);
    };
    // The item and its rows of q are not needed any more, unless results pass through them.
    const auto release_rows = [&] {
      if constexpr (Tile::kStoresTiles) return;
      read_place();
      __syncwarp();
      if (Tile::kAllHandBack || lane_idx == 0) mbarrier_arrive(barriers.q_empty(q_state.stage));
    };
    const int first = uniform(tile.item.first), last = uniform(tile.item.last), row0 = uniform(tile.item.row0);
    const KeyBand bounds = item_band();
    if (first < last) {
      // Rows of this warpgroup see tiles [own_first, own_last) of the item. The others it only hands back.
      int own_first = first, own_last = last;
      if constexpr (!Tile::kSplit && Tile::kConsumers > 1) {
        const int wg_row = row0 + consumer_idx * 64;
        if (wg_row < rows) {
          own_first += max(0, bounds.first(wg_row) - first) / kBlockN * kBlockN;
          own_last = min(own_last, bounds.last(min(wg_row + 63, rows - 1)));
        } else {
          own_last = own_first;
        }
      }
      const bool any = own_first < own_last;

      // Tiles within [whole_first(), whole_last()) are seen whole by every row of this warp: only the others need a check of each
      // score. Large heads have no register for the end, and ask where it may be near: rows of a warpgroup differ by up to 63.
      const auto whole_first = [&] {
        return uniform(tile.band.left) + (Tile::kSplit ? rows - 1 : uniform(tile.item.row0) + warp_row + 15);
      };
      const auto whole_last = [&] {
        return min(uniform(tile.item.last), uniform(tile.band.right) + (Tile::kSplit ? 0 : uniform(tile.item.row0) + warp_row));
      };
      constexpr bool kHoldsEnd = kDim <= 80;
      const int whole_end = kHoldsEnd ? whole_last() : own_last - 63;
      const auto is_past_whole = [&](int j) { return j > whole_end && (kHoldsEnd || j > whole_last()); };

      // What stands between products and the softmax, for the tile at j0; `check`: in any case whether a row sees its keys.
      // Returns the factor that is left to be applied.
      const auto finish_scores = [&](int j0, bool check) {
        float factor = w.a.p.scale;
        const int stage = k_state.stage;
        const bool masked = keys_mask ? s_keys_masked[stage] != 0 : Tile::kRows && w.mask_tiles != MaskTiles::kNone;
        if (masked || (Tile::kAny && w.scores)) {
          if constexpr (Tile::kAny) {
            if (p.softcap != 0.0F) {
              const float in = w.a.score_scale * (2.0F * kLog2e);
#pragma unroll
              for (int i = 0; i < kBlockN / 2; ++i) {
                s[i] = p.softcap * (1.0F - __fdividef(2.0F, exp2_approx(s[i] * in) + 1.0F));
              }
              factor = 1.0F;
            }
          }
          // mask_pair(n, half): the values for registers 4 n + 2 half and the one after it.
          const auto add_mask = [&](auto mask_pair) {
#pragma unroll
            for (int i = 0; i < kBlockN / 2; i += 2) {
              const float2 m = mask_pair(i / 4, i / 2 % 2);
              s[i] = fmaf(s[i], factor, m.x);
              s[i + 1] = fmaf(s[i + 1], factor, m.y);
            }
          };
          if (!(Tile::kRows || Tile::kAny) || (masked && keys_mask)) {
            const uint32_t values = smem_address(&s_keys_mask[stage][lane_in_place() % 4 * 2]);
            add_mask([&](int n, int half) {
              const float2 m = load_shared_float2(values + n * 32);
              if constexpr (Tile::kSplit) {  // the merge takes no NaN from keys that have no weight
                if (m.x == -INFINITY) s[4 * n + 2 * half] = 0.0F;
                if (m.y == -INFINITY) s[4 * n + 2 * half + 1] = 0.0F;
              }
              return m;
            });
            factor = 1.0F;
          } else if (Tile::kRows && w.mask_tiles == MaskTiles::kRows16) {
            const int lane = lane_in_place(), g = lane / 4;
            const uint32_t own = sMask + stage * Tile::kBytesMask + (warp_row + g) * 128 + g * 16 + lane % 4 * 4;
            add_mask([&](int n, int half) {
              return unpack_half2<T>(load_shared_u32((own ^ (n % 8 * 16)) + n / 8 * kBlockM * 128 + half * 8 * 128));
            });
            factor = 1.0F;
          } else if (Tile::kRows && (!Tile::kAny || w.mask_tiles == MaskTiles::kRowsBool)) {
            const int lane = lane_in_place(), g = lane / 4;
            const uint32_t own = sMask + stage * Tile::kBytesMask + (warp_row + g) * 128 + g * 16 + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < kBlockN / 2; i += 2) {
              const int n = i / 4, half = i / 2 % 2;
              const uint32_t m = load_shared_u16((own ^ (n % 16 / 2 * 16)) + n / 16 * kBlockM * 128 + half * 8 * 128 + n % 2 * 8);
              if ((m & 0xffU) == 0) s[i] = -INFINITY;
              if ((m & 0xff00U) == 0) s[i + 1] = -INFINITY;
            }
          } else if (Tile::kRows && w.mask_tiles == MaskTiles::kRowsLoads) {
            const int lane = lane_in_place(), row0 = tile.item.row0 + warp_row + lane / 4, column = j0 + lane % 4 * 2;
            if (p.mask_dtype == DType::kBool) {
              add_loaded_mask<uint8_t>(s, w, tile.item.b, tile.item.h, row0, column, factor);
            } else {
              add_loaded_mask<T>(s, w, tile.item.b, tile.item.h, row0, column, factor);
            }
            factor = 1.0F;
          }
          if (Tile::kAny && !(factor > 0.0F)) {
#pragma unroll
            for (int i = 0; i < kBlockN / 2; ++i) s[i] *= factor;
            factor = 1.0F;
          }
        }
        if (check || is_past_whole(j0 + kBlockN) || (p.window >= 0 && j0 < whole_first())) {
          const KeyBand band = item_band();
          const int item_last = uniform(tile.item.last), item_row0 = uniform(tile.item.row0);
          const int lane = lane_in_place(), column = j0 + lane % 4 * 2;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int r = item_row0 + warp_row + lane / 4 + 8 * half;
            const int i = Tile::kSplit ? static_cast<int>(static_cast<unsigned>(r) % static_cast<unsigned>(rows)) : min(r, rows - 1);
            const int lo = band.first(i) - column, hi = min(band.last(i), item_last) - column;
#pragma unroll
            for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                if (8 * n + e < lo || 8 * n + e >= hi) s[4 * n + 2 * half + e] = -INFINITY;
              }
            }
          }
        }
        return factor;
      };
      // Scores of this warp's rows once more, with mma: wgmma takes all four warps, of which the others may have no need.
      const auto repeat_scores = [&] {
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) s[i] = 0.0F;
        // Rows for ldmatrix, and within them chunks of 16 bytes, which the swizzle swaps by the row's number % 8.
        const int lane = lane_in_place();
        const uint32_t own_q =
            sQ + q_state.stage * Tile::kBytesQ + (warp_row + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
        const uint32_t own_k =
            sK + k_state.stage * Tile::kBytesK + (lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16;
        constexpr int kTiles = 2;  // of 16 keys at a time: more would take more registers than there are
#pragma unroll
        for (int n0 = 0; n0 < kBlockN / 16; n0 += kTiles) {
#pragma unroll 1
          for (int kk = 0; kk < (kDim + 15) / 16; ++kk) {
            uint32_t rQ[4];
            ldmatrix_x4(rQ, (own_q ^ kk % 4 * 32) + kk / 4 * kBlockM * 128);
#pragma unroll
            for (int n = n0; n < n0 + kTiles && n < kBlockN / 16; ++n) {
              uint32_t rK[4];
              ldmatrix_x4(rK, (own_k ^ kk % 4 * 32) + kk / 4 * kBlockN * 128 + n * 16 * 128);
              mma_m16n8k16<T>(*reinterpret_cast<float(*)[4]>(&s[8 * n]), rQ, rK[0], rK[1]);
              mma_m16n8k16<T>(*reinterpret_cast<float(*)[4]>(&s[8 * n + 4]), rQ, rK[2], rK[3]);
            }
          }
        }
      };
      // The keys and the mask of a tile are not needed any more.
      const auto hand_back_scores = [&] {
        __syncwarp();
        arrive_reader(barriers.k_empty(k_state.stage));
        k_state.advance();
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
        PipelineState<kStages> next = k_state;
        next.advance();
        if (j0 < own_last) mbarrier_wait(barriers.k_full(next.stage), next.parity);
      };

      // Hands a tile back. Every warpgroup passes the token once for each tile but one, whether or not it multiplies.
      const auto skip = [&](bool passes) {
        mbarrier_wait(barriers.k_full(k_state.stage), k_state.parity);
        hand_back_scores();
        mbarrier_wait(barriers.v_full(v_state.stage), v_state.parity);
        arrive(barriers.v_empty(v_state.stage));
        v_state.advance();
        if (Tile::kTokens && passes) {
          named_barrier_sync(own_token, 256);
          named_barrier_arrive(next_token, 256);
        }
      };
      const auto tiles_behind = [&] {
        const int from = uniform(tile.item.first);
        const int done = from + (own_last - from + kBlockN - 1) / kBlockN * kBlockN;
        return (max(0, uniform(tile.item.last) - done) + kBlockN - 1) / kBlockN;
      };

      if (any) {
        for (int j0 = first; j0 < own_first; j0 += kBlockN) skip(true);

        // Prologue: the first tile's weights.
        mbarrier_wait(barriers.k_full(k_state.stage), k_state.parity);
        issue_scores(k_state.stage);
        wgmma_wait<0>();
        wgmma_pin(s);
        float correction[2];
        softmax.redo(s, finish_scores(own_first, false), may_be_large, correction);
        softmax.end();
        pack_weights();
        wait_for_scores(own_first + kBlockN);
        hand_back_scores();
        release_last_rows();

        // Mainloop: scores of the tile at j0, values of the one before.
        for (int j0 = own_first + kBlockN; j0 < own_last; j0 += kBlockN) {
          if constexpr (Tile::kTokens) named_barrier_sync(own_token, 256);
          issue_scores(k_state.stage);
          mbarrier_wait(barriers.v_full(v_state.stage), v_state.parity);
          issue_values(v_state.stage);
          if constexpr (Tile::kTokens) named_barrier_arrive(next_token, 256);
          wgmma_wait<1>();
          wgmma_pin(s);
          softmax.go_on(finish_scores(j0, false));
          softmax.weigh(s);
          wgmma_pin(s);
          wait_for_scores(j0 + kBlockN);
          wgmma_wait<0>();
          wgmma_pin(acc);
          arrive(barriers.v_empty(v_state.stage));
          v_state.advance();
          if (softmax.must_redo()) {
            repeat_scores();
            softmax.redo(s, finish_scores(j0, true), may_be_large, correction);
#pragma unroll
            for (int i = 0; i < kDim / 2; ++i) acc[i] *= correction[i / 2 % 2];
          }
          hand_back_scores();
          softmax.end();
          pack_weights();
        }
        int behind = 0;
        if constexpr (!Tile::kStoresTiles) behind = tiles_behind();
        release_rows();
        mbarrier_wait(barriers.v_full(v_state.stage), v_state.parity);
        issue_values(v_state.stage);
        wgmma_wait<0>();
        wgmma_pin(acc);
        arrive(barriers.v_empty(v_state.stage));
        v_state.advance();
        if constexpr (Tile::kStoresTiles) behind = tiles_behind();
        for (; behind > 0; --behind) skip(true);
      } else {
        release_rows();
        release_last_rows();
        for (int j0 = first; j0 < last; j0 += kBlockN) skip(j0 != first);
      }
    } else {
      release_rows();
      release_last_rows();
    }

    if constexpr (Tile::kStoresTiles) read_place();
    const int t = lane_in_place() % 4, own_row = out_row0 + warp_row + lane_in_place() / 4;

    // Epilogue of a split: y and the softmax's state, to be merged.
    if (Tile::kSplit && w.a.splits > 1) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = own_row + 8 * half;
        const float sum = warp_sum<4>(softmax.sum[half]);
        if (r >= rows * w.a.group) continue;
        const int64_t slot = ((static_cast<int64_t>(out_b) * p.heads + out_h) * rows + r) * w.a.splits + out_split;
        // In log2 units, but finite where it is: a row masked with the lowest number throughout is the mean of v.
        const float max = softmax.max[half] == -INFINITY ? -INFINITY : fmaxf(softmax.max[half] * kLog2e, -FLT_MAX);
        if (t == 0) w.a.partial_ms[slot] = make_float2(max, sum);
        float* const part = w.a.partial_y + slot * p.v_head_dim + 2 * t;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          if (n * 8 < p.v_head_dim) *reinterpret_cast<float2*>(part + n * 8) = make_float2(acc[4 * n + 2 * half], acc[4 * n + 2 * half + 1]);
        }
      }
      q_state.advance();
      continue;
    }

    const auto head_of = [&](int r) { return Tile::kSplit ? out_h + r / rows : out_h; };
    const auto query_of = [&](int r) { return Tile::kSplit ? r % rows : r; };
    const int item_rows = Tile::kSplit ? rows * w.a.group : rows;
    unsigned spoilt[2];
    float sums[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) sums[half] = warp_sum<4>(softmax.sum[half]);
    if constexpr (Tile::kStoresTiles) {
      // Epilogue: y takes the place of this warp's rows of q, once all of the warpgroup's products have read theirs, and the copy
      // engine takes it to memory in whole sectors, while the next item is under way.
      named_barrier_sync(5 + consumer_idx, 128);
      const int lane = lane_in_place();
      const uint32_t sY = sQ + q_state.stage * Tile::kBytesQ + warp_row * 128;
      const uint32_t own = sY + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
      float inverse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) inverse[half] = sums[half] == 0.0F ? 0.0F : reciprocal_approx(sums[half]);
      uint32_t probe[2] = {0, 0};  // NaN if there is one in the row, or something that overflows
#pragma unroll
      for (int n = 0; n < kDim / 8; n += 2) {
        uint32_t r[4] = {};  // zeros where there is no column, as there are in q
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int half = i % 2, at = 4 * (n + i / 2) + 2 * half;
          if (n + i / 2 >= kDim / 8) continue;
          r[i] = pack_half2<T>(acc[at] * inverse[half], acc[at + 1] * inverse[half]);
          probe[half] = times_zero_plus<T>(r[i], probe[half]);
        }
        stmatrix_x4((own ^ n % 8 * 16) + n / 8 * kBlockM * 128, r);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        spoilt[half] = __ballot_sync(kFullWarp, isnan(sums[half]) || softmax.is_spoilt(half, may_be_large) || probe[half] != 0);
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0 && out_row0 + warp_row < rows) {
        for_each_block<Tile>(w.y, kBlockM, [&](const CUtensorMap* map, uint32_t offset, int column) {
          tma_store_4d(map, sY + offset, column, out_row0 + warp_row, out_h, out_b);
        });
        tma_store_commit();
        if ((spoilt[0] | spoilt[1]) != 0) tma_store_wait_all();  // they are overwritten below
      }
    } else {
      // Or y goes out of the registers in 16-byte chunks, four of a row at a time. Stored as it lies there, 16 bytes of a row from
      // four lanes, it takes a quarter of the instructions, but 1 to 6 % more time: L2 gets halves of sectors.
      T* const y = static_cast<T*>(p.y) + out_b * p.y_strides.batch;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = sums[half];
        const float inverse = reciprocal_approx(sum);
        const bool redo = isnan(sum) || softmax.is_spoilt(half, may_be_large);
        const int r_idx = own_row + 8 * half;
        T* const y_row = y + head_of(r_idx) * p.y_strides.head + query_of(r_idx) * p.y_strides.seq;
        bool has_nan = false;
#pragma unroll
        for (int chunk = 0; chunk < kDim / 8; chunk += 4) {
          uint32_t r[4] = {};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int n = chunk + i;
            if (n >= kDim / 8) continue;
            const float lo = acc[4 * n + 2 * half], hi = acc[4 * n + 2 * half + 1];
            has_nan |= !(lo <= hi) && !(lo > hi);  // one comparison of both
            r[i] = sum == 0.0F ? 0 : pack_half2<T>(lo * inverse, hi * inverse);
          }
          transpose_quad(r, t);
          const int d = (chunk + t) * 8;
          if (r_idx < item_rows && d < p.v_head_dim) *reinterpret_cast<uint4*>(y_row + d) = make_uint4(r[0], r[1], r[2], r[3]);
        }
        spoilt[half] = __ballot_sync(kFullWarp, redo || (has_nan && sum != 0.0F));
      }
    }
    // A masked NaN or infinity of k or v leaked, or there is a NaN to be seen: see attend_row_exactly.
    if ((spoilt[0] | spoilt[1]) != 0) {
      __syncwarp();
      if constexpr (Tile::kStoresTiles) {
        clear_columns_of_rows<Tile>(sQ + q_state.stage * Tile::kBytesQ + warp_row * 128, w.y.dim);
      }
      for (int r = 0; r < 16; ++r) {
        const int r_idx = out_row0 + warp_row + r;
        if (((r < 8 ? spoilt[0] : spoilt[1]) >> (4 * (r % 8)) & 0xf) != 0 && r_idx < item_rows) {
          attend_row_exactly_inline<T>(w.a, out_b, head_of(r_idx), query_of(r_idx), 0, p.v_head_dim);
        }
      }
    }
    q_state.advance();
  }
  if (Tile::kStoresTiles && lane_idx == 0) tma_store_wait<0>();  // shared memory must last until then
}

// What TMA asks of a mask whose rows differ.
bool mask_allows_tma(const AttentionParams& p) {
  const int64_t size = static_cast<int64_t>(size_of(p.mask_dtype));
  const int64_t strides = p.mask_stride_seq | p.mask_stride_head | p.mask_stride_batch;
  return p.mask_stride_key == 1 && is_aligned(p.mask, 16) && strides * size % 16 == 0;
}

// Parts into which the keys of a split launch are cut: what gives the shortest longest list of tiles to a multiprocessor, if
// an item costs 192 keys more than it has, and merging as much.
int wgmma_splits(const AttentionParams& p, const DeviceInfo& device, int64_t block_n) {
  const int64_t tiles = ceil_div(p.total_len(), block_n), heads = p.batch * p.kv_heads;
  int best = 1;
  int64_t best_cost = INT64_MAX;
  for (int splits = 1; splits <= 128 && splits <= tiles; ++splits) {
    const int64_t cost =
        ceil_div(heads * splits, device.sm_count) * (ceil_div(tiles, splits) * block_n + 192) + (splits > 1 ? 192 : 0);
    if (cost < best_cost) {
      best_cost = cost;
      best = splits;
    }
  }
  return best;
}

// Heads of a section under a causal mask, see wgmma_item; at least 1. Blocks get equal shares if a section is a whole number
// of pairs of rounds, or nearly so, and the last one is nearly full; or if there is one section only. Other sections leave
// some blocks with 10 to 30 % more than their share. As blocks that share a head read its keys at the same time, they need
// not fit in L2 while there are two blocks and more for each head; beyond, `fitting` heads do.
int wgmma_section_heads(int heads, int tiles, int blocks, int fitting) {
  const int pair = 2 * blocks;
  const int most = blocks / 2;
  for (int section = (pair + tiles - 1) / tiles; section < heads && section <= most; ++section) {
    const int misfit = std::min(section * tiles % pair, pair - section * tiles % pair);
    if (misfit * 32 > pair) continue;
    const int last = heads % section;
    const int64_t drift = static_cast<int64_t>(misfit) * ((heads - 1) / section);
    if (drift * 32 <= pair && (last == 0 || last * 8 >= section * 7)) return section;
  }
  return heads <= most ? heads : fitting;
}

template <class T, class Tile>
Status launch_wgmma_typed(const AttentionParams& params, const ExecContext& context) {
  WgmmaLaunch w;
  const AttentionParams& p = params;
  const KeyTensors keys = key_tensors(p);
  w.a = make_attention_launch(p);
  w.a.tiles = ceil_div(p.q_len, Tile::kBlockM);
  w.items = static_cast<int>(w.a.tiles * p.heads * p.batch);
  if constexpr (Tile::kSplit) {
    ORTPLUGINS_RETURN_IF_ERROR(split_launch(wgmma_splits(p, *context.device, Tile::kBlockN), context, &w.a));
    w.items = static_cast<int>(p.batch * p.kv_heads * w.a.splits);
  }
  if (p.total_lengths == nullptr) w.band = key_band(p, 0);
  w.scores = p.softcap != 0.0F || !(p.scale > 0.0F);
  // Keys and values of a head, shared by a group; half of L2, as q, y and masks pass through it too.
  const int64_t head_bytes = p.total_len() * (p.head_dim + p.v_head_dim) * 2 / w.a.group;
  const int64_t fitting = context.device->l2_bytes / 2 / (head_bytes > 0 ? head_bytes : 1);
  const int64_t heads = p.heads * p.batch;
  const int most = context.device->sm_count * Tile::kBlocksPerSm;
  const int blocks = w.items < most ? w.items : most;
  if (p.is_causal && !Tile::kSplit && w.items > 0) {
    w.section_heads = wgmma_section_heads(static_cast<int>(heads), static_cast<int>(w.a.tiles), blocks,
                                          static_cast<int>(std::clamp<int64_t>(fitting, 1, heads)));
  }
  // Boxes of `rows` rows of `box_heads` heads, together `dim` columns wide.
  const auto encode = [&](TileMaps* maps, const void* base, int64_t tensor_dim, int64_t len, int64_t tensor_heads,
                          const AttentionStrides& s, int64_t dim, int rows, int box_heads) {
    const int64_t dims[4] = {tensor_dim, len, tensor_heads, p.batch};
    const int64_t strides[4] = {1, s.seq, s.head, s.batch};
    const auto encode_box = [&](CUtensorMap* map, int columns) {
      const int box[4] = {columns, rows, box_heads, 1};
      return encode_tensor_map(map, static_cast<const T*>(base), 4, dims, strides, box,
                               Tile::kSplit ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
    };
    maps->dim = static_cast<int>(Tile::kSplit ? Tile::kDim : dim);
    maps->bytes = rows * box_heads * maps->dim * 2;
    if (maps->dim >= 64) ORTPLUGINS_RETURN_IF_ERROR(encode_box(&maps->wide, 64));
    return maps->dim % 64 == 0 ? Status{} : encode_box(&maps->last, maps->dim % 64);
  };
  // Results pass through the rows of q: if they are wider, zeros must come there anew.
  const int64_t dim = Tile::kStoresTiles ? std::max(p.head_dim, p.v_head_dim) : p.head_dim;
  const int q_rows = Tile::kSplit ? static_cast<int>(p.q_len) : Tile::kBlockM, q_heads = Tile::kSplit ? w.a.group : 1;
  constexpr int kBlockN = Tile::kBlockN;
  ORTPLUGINS_RETURN_IF_ERROR(encode(&w.q, p.q, p.head_dim, p.q_len, p.heads, p.q_strides, dim, q_rows, q_heads));
  ORTPLUGINS_RETURN_IF_ERROR(encode(&w.k, keys.k, p.head_dim, p.total_len(), p.kv_heads, keys.k_strides, dim, kBlockN, 1));
  ORTPLUGINS_RETURN_IF_ERROR(encode(&w.v, keys.v, p.v_head_dim, p.total_len(), p.kv_heads, keys.v_strides, p.v_head_dim, kBlockN, 1));
  if constexpr (Tile::kStoresTiles) {
    ORTPLUGINS_RETURN_IF_ERROR(encode(&w.y, p.y, p.v_head_dim, p.q_len, p.heads, p.y_strides, p.v_head_dim, 16, 1));
  }
  if (p.mask_dtype == DType::kNone) {
    w.mask_tiles = MaskTiles::kNone;
  } else if (mask_is_keys(p)) {
    w.mask_tiles = MaskTiles::kKeys;
  } else if (!mask_allows_tma(p)) {
    w.mask_tiles = MaskTiles::kRowsLoads;
  } else {
    w.mask_has_batch = p.mask_stride_batch != 0;
    w.mask_has_head = p.mask_stride_head != 0;
    w.batch_inner = w.mask_has_head && !w.mask_has_batch;
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
  w.tiles = Divisor(w.a.tiles);
  w.inner = Divisor(w.batch_inner ? p.batch : p.heads);
  w.group = Divisor(w.a.group);
  w.heads = static_cast<int>(heads);
  w.section = Divisor(w.section_heads * w.a.tiles);
  w.full_section = Divisor(w.section_heads);
  w.last_section = Divisor(heads % w.section_heads == 0 ? w.section_heads : heads % w.section_heads);
  static SmemLimit limit;
  const auto kernel = attention_wgmma_kernel<T, Tile>;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, Tile::kSmemBytes));
  ORTPLUGINS_RETURN_IF_ERROR(launch_with({1, true}, "attention_wgmma_kernel", kernel, dim3(static_cast<unsigned>(blocks)), Tile::kThreads,
                                         Tile::kSmemBytes, context, w));
  return Tile::kSplit && w.a.splits > 1 ? launch_attention_merge(w.a, context) : Status{};
}

template <class Tile>
Status launch_wgmma_tile(const AttentionParams& params, const ExecContext& context) {
  return dispatch_half(params.dtype, [&](auto tag) { return launch_wgmma_typed<typename decltype(tag)::type, Tile>(params, context); });
}

Scores scores_of(const AttentionParams& p) {
  if (p.softcap != 0.0F || !(p.scale > 0.0F)) return Scores::kAny;
  if (p.mask_dtype == DType::kNone || mask_is_keys(p)) return Scores::kFactor;
  return mask_allows_tma(p) ? Scores::kRows : Scores::kAny;
}

// Tiles in the order of Scores. Without one of the last the variant does not support what it is for.
template <class Factor, class Rows = Factor, class Any = Rows>
Status launch_wgmma(const AttentionParams& params, const ExecContext& context) {
  bool done = false;
  ORTPLUGINS_RETURN_IF_ERROR(attention_prologue(params, context, &done));
  if (done) return {};
  switch (scores_of(params)) {
    case Scores::kFactor:
      return launch_wgmma_tile<Factor>(params, context);
    case Scores::kRows:
      return launch_wgmma_tile<Rows>(params, context);
    case Scores::kAny:
      break;
  }
  return launch_wgmma_tile<Any>(params, context);
}

// Smaller heads are padded: the copy engine brings zeros without reading them, and the products are not what limits it.
using SplitTile = WgmmaTile<128, 96, 1, 4, Scores::kAny, false, true>;

}  // namespace

bool attention_wgmma_supports(const AttentionParams& p, const DeviceInfo& device, int64_t dim) {
  if (device.sm != 90 || p.dtype == DType::kFloat32 || p.head_dim > dim || p.v_head_dim > dim) return false;
  if (p.head_dim < 1 || p.v_head_dim < 1 || p.total_len() < 1) return false;
  if (p.past_len > 0 && (p.present_k == nullptr || p.present_v == nullptr)) return false;
  constexpr int64_t kMost = int64_t{1} << 30;
  if (p.total_len() > kMaxAttentionLen || p.q_len > kMaxAttentionLen || p.batch > kMost || p.heads > kMost) return false;
  if (p.mask_dtype != DType::kNone && !mask_is_keys(p) && p.mask_stride_key != 1) return false;
  if (p.batch * p.heads > kMost || p.batch * p.heads * ceil_div(p.q_len, 64) > kMost) return false;
  const KeyTensors keys = key_tensors(p);
  if (!rows_in_packs(p.q, p.q_strides, p.head_dim, 2) || !rows_in_packs(keys.k, keys.k_strides, p.head_dim, 2) ||
      !rows_in_packs(keys.v, keys.v_strides, p.v_head_dim, 2) || !rows_in_packs(p.y, p.y_strides, p.v_head_dim, 2)) {
    return false;
  }
  return tensor_map_encoder() != nullptr;
}

bool attention_wgmma_supports_plain(const AttentionParams& p, const DeviceInfo& device, int64_t dim) {
  return scores_of(p) == Scores::kFactor && attention_wgmma_supports(p, device, dim);
}
bool attention_wgmma_supports_rows(const AttentionParams& p, const DeviceInfo& device, int64_t dim) {
  return scores_of(p) != Scores::kAny && attention_wgmma_supports(p, device, dim);
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
  return done ? Status{} : launch_wgmma_tile<SplitTile>(params, context);
}

// Keys of a tile: as many as registers and shared memory allow, 128 where they allow it. A mask takes shared memory too. With
// the token and without, 4 x 16 x 2048 on an H200, us, and under a causal mask: 40 107 and 109, 68 and 65; 64 123 and 125, 76 and 73;
// 72 139 and 152, 82 and 84; 80 147 and 146, 88 and 86; 96 174 and 168, 104 and 97. Heads of 40 are those of diffusion models.
Status launch_attention_wgmma_256x40(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<40, 64, 4, 6>>(params, context);
}
Status launch_attention_wgmma_256x64(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<64, 64, 4, 8, Scores::kFactor, false>, WgmmaTile<64, 64, 4, 3, Scores::kRows>>(params, context);
}
Status launch_attention_wgmma_256x72(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<72, 64, 4, 3>>(params, context);
}
Status launch_attention_wgmma_64x64(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<64, 64, 1, 2>, WgmmaTile<64, 64, 1, 2, Scores::kRows>>(params, context);
}
Status launch_attention_wgmma_64(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<64, 128, 2, 2>, WgmmaTile<64, 128, 2, 2, Scores::kAny>>(params, context);
}
Status launch_attention_wgmma_256x80(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<80, 48, 4, 4, Scores::kFactor, false>>(params, context);
}
Status launch_attention_wgmma_256x96(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<96, 48, 4, 4, Scores::kFactor, false>>(params, context);
}
Status launch_attention_wgmma_80(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<80, 128, 2, 2>, WgmmaTile<80, 128, 2, 2, Scores::kAny>>(params, context);
}
Status launch_attention_wgmma_96(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<96, 128, 2, 2>, WgmmaTile<96, 128, 2, 2, Scores::kAny>>(params, context);
}
// A bias has a tile without what only softcap or other alignments need. H200, 16 heads, 8192 queries and keys, us: 1205, and 1180 as
// L2 is asked for the mask two tiles ahead; with that tile 1247 and 1231.
Status launch_attention_wgmma_128(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<128, 128, 2, 2>, WgmmaTile<128, 128, 2, 2, Scores::kRows>, WgmmaTile<128, 128, 2, 2, Scores::kAny>>(
      params, context);
}
Status launch_attention_wgmma_192(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<192, 96, 2, 2>, WgmmaTile<192, 64, 2, 2, Scores::kAny>>(params, context);
}
Status launch_attention_wgmma_256(const AttentionParams& params, const ExecContext& context) {
  return launch_wgmma<WgmmaTile<256, 80, 2, 2>, WgmmaTile<256, 48, 2, 2, Scores::kAny>>(params, context);
}

}  // namespace ortplugins
