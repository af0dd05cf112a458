// FusedAttention on the CPU: q k^T, softmax and p v in one pass over the keys, with the online softmax, so that no
// score matrix exists. Two kernels, chosen by the number of query rows that share a key-value head (the queries of all
// heads of its group):
//
// - The tile kernel keeps query rows in vector lanes. Per block of keys it computes S^T = K Q^T, the softmax down the
//   columns of S^T, and O^T += V^T P^T. Keys and values enter as broadcast scalars: a block of them is copied
//   (converted, and brought together from rows that lie a token apart) but not transposed, head dimensions need no
//   padding to vectors, and maxima and sums over keys cross no lanes. Only q and y are transposed, once.
// - The row kernel serves a few query rows, which would leave lanes empty (decoding). It keeps head_dim in the lanes
// and
//   reads every key and value once for up to four rows.
//
// A task is a range of rows of one (sequence, key-value head); with fewer tasks than threads may wait for, the keys are
// split too and a second pass combines the parts. What a task holds lies in its thread's slot of the workspace:
//
//   sQ   (block, head_dim, row)     scaled queries        tile kernel; the row kernel has (row, head_dim)
//   sO   (block, v_head_dim, row)   unnormalised output   and (row, v_head_dim)
//   sK   (key, head_dim)            one block of keys     tile kernel only
//   sV   (key, v_head_dim)          one block of values   tile kernel only
//   sP   (key, row)                 scores, then weights  the row kernel has (row, key)
//   sBias (key, row)                mask as a bias; where every row has the same mask, (key)
//   sMax, sSum (block, row)         running maximum of the scores and sum of the weights
#include <algorithm>
#include <atomic>
#include <cstring>

#include "device/cpu_isa.h"
#include "device/cpu_simd.h"
#include "kernels/attention/variants.h"

namespace ortplugins {
namespace {

using simd::Float;
using simd::Int;
using simd::kWidth;

// Register tile: kTileM keys or output columns by kTileVecs vectors of rows. 24 + 3 + 1 of 32 registers with AVX-512,
// 12 + 3 + 1 of 16 with AVX2; without FMA the product needs a register of its own, hence 8 + 2 + 2 of 16.
constexpr int kTileM = kWidth == 16 ? 8 : 4;
constexpr int kTileVecs = kWidth == 4 ? 2 : 3;
constexpr int kBlockRows = kTileVecs * kWidth;
constexpr int kBlockKeys = 96;              // sP of 18 KiB leaves room in 32 KiB for the columns of sV in use
constexpr int kTaskBlocks = 8;              // row blocks that share one copy of a block of keys
constexpr int64_t kTaskFloats = 64 * 1024;  // sQ and sO of a task: 256 KiB, half of a small second-level cache
constexpr int kFewRows = kWidth / 2;        // up to here the row kernel is faster
constexpr int kRowBlockKeys = 256;
constexpr int64_t kMinTasks = 16;  // below this, tasks are made smaller, then keys are split
constexpr int64_t kMinSplitKeys = 256;
constexpr int64_t kAlign = 64;  // floats; parts of the workspace share no cache line

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

enum class MaskKind : uint8_t { kNone, kPerKey, kPerRow };

// How the problem is cut up; a function of shapes only, so that a result does not depend on threads.
struct Plan {
  int64_t group = 1;  // query heads per key-value head
  int64_t rows = 0;   // rows of a key-value head: row r is query r / group of head r % group of the group
  bool few_rows = false;
  int64_t blocks =
      1;  // row blocks of a key-value head; block i has vectors [i * vecs / blocks, (i + 1) * vecs / blocks)
  int64_t vecs = 0;
  int64_t task_blocks = 1;
  int64_t row_tasks = 1;
  int64_t splits = 1;
  int64_t split_keys = 0;
  int64_t heads = 0;  // batch * kv_heads
  int64_t tasks = 0;
  MaskKind mask = MaskKind::kNone;
  int64_t ldv = 0;

  // Offsets in a slot, in floats
  int64_t q = 0, o = 0, k = 0, v = 0, p = 0, bias = 0, max = 0, sum = 0, slot_floats = 0;
  int64_t slots = 0;
  // Offsets in the workspace, in floats: unnormalised outputs, maxima and sums of each (head, split, row)
  int64_t part_o = 0, part_max = 0, part_sum = 0, total_floats = 0;

  int64_t first_vec(int64_t block) const { return block * vecs / blocks; }
};

Plan make_plan(const AttentionParams& p, const DeviceInfo& device) {
  Plan plan;
  plan.heads = p.batch * p.kv_heads;
  plan.group = p.kv_heads > 0 ? p.heads / p.kv_heads : 1;
  plan.rows = plan.group * p.q_len;
  if (plan.heads == 0 || plan.rows == 0 || p.v_head_dim == 0) {
    plan.heads = 0;
    return plan;
  }
  plan.few_rows = plan.rows <= kFewRows;
  if (p.mask_dtype != DType::kNone) {
    const bool per_key = (p.mask_stride_head == 0 || plan.group == 1) && (p.mask_stride_seq == 0 || p.q_len == 1);
    plan.mask = per_key ? MaskKind::kPerKey : MaskKind::kPerRow;
  }
  int64_t min_split_keys = kMinSplitKeys;
  if (plan.few_rows) {
    plan.ldv = round_up(p.v_head_dim, kWidth);
  } else {
    plan.ldv = round_up(p.v_head_dim, kTileM);
    plan.vecs = ceil_div(plan.rows, kWidth);
    plan.blocks = ceil_div(plan.vecs, kTileVecs);
    plan.task_blocks = std::clamp<int64_t>(kTaskFloats / ((p.head_dim + plan.ldv) * kBlockRows), 1, kTaskBlocks);
    while (plan.task_blocks > 1 && plan.heads * ceil_div(plan.blocks, plan.task_blocks) < kMinTasks) --plan.task_blocks;
    plan.row_tasks = ceil_div(plan.blocks, plan.task_blocks);
    plan.task_blocks = ceil_div(plan.blocks, plan.row_tasks);
    min_split_keys *= 2;
  }
  const int64_t base_tasks = plan.heads * plan.row_tasks;
  plan.splits = std::clamp<int64_t>(p.total_len() / min_split_keys, 1, ceil_div(kMinTasks, base_tasks));
  plan.split_keys = ceil_div(p.total_len(), plan.splits);
  plan.tasks = base_tasks * plan.splits;
  plan.slots = std::min<int64_t>(plan.tasks, std::max(1, device.cores));

  int64_t at = 0;
  const auto take = [&at](int64_t floats) {
    const int64_t offset = at;
    at = round_up(at + floats, kAlign);
    return offset;
  };
  if (plan.few_rows) {
    plan.q = take(kFewRows * round_up(p.head_dim, kWidth));
    plan.o = take(kFewRows * plan.ldv);
    plan.p = take(kFewRows * kRowBlockKeys);
    plan.max = take(kFewRows);
    plan.sum = take(kFewRows);
  } else {
    const int64_t rows = plan.task_blocks * kBlockRows;
    plan.q = take(rows * p.head_dim);
    plan.o = take(rows * plan.ldv);
    plan.k = take(kBlockKeys * p.head_dim + kWidth);  // copies end in whole vectors
    plan.v = take(kBlockKeys * plan.ldv + kWidth);
    plan.p = take(kBlockKeys * kBlockRows);
    plan.bias = take(plan.mask == MaskKind::kPerRow ? kBlockKeys * kBlockRows : kBlockKeys);
    plan.max = take(rows);
    plan.sum = take(rows);
  }
  plan.slot_floats = at;
  at *= plan.slots;
  if (plan.splits > 1) {
    plan.part_o = take(plan.heads * plan.splits * plan.rows * p.v_head_dim);
    plan.part_max = take(plan.heads * plan.splits * plan.rows);
    plan.part_sum = take(plan.heads * plan.splits * plan.rows);
  }
  plan.total_floats = at;
  return plan;
}

// --- What a task reads and writes
// --------------------------------------------------------------------------------------

// Rows [begin, end) of one key-value head against keys [first_key, last_key).
struct Task {
  int64_t batch, kv_head, head;  // head: index of (batch, kv_head)
  int64_t block = 0, blocks = 0;
  int64_t begin, end;
  int64_t split;
  int64_t first_key, last_key;
};

// The keys or values of one key-value head: the past, then the new ones.
template <class T>
struct KeyRows {
  const T* past;
  const T* fresh;
  int64_t past_len, past_stride, fresh_stride;

  const T* row(int64_t key) const {
    return key < past_len ? past + key * past_stride : fresh + (key - past_len) * fresh_stride;
  }
  int64_t stride(int64_t key) const { return key < past_len ? past_stride : fresh_stride; }
};

template <class T>
KeyRows<T> key_rows(const AttentionParams& p, const Task& t) {
  return {static_cast<const T*>(p.past_k) + t.head * p.past_len * p.head_dim,
          static_cast<const T*>(p.k) + t.batch * p.k_strides.batch + t.kv_head * p.k_strides.head, p.past_len,
          p.head_dim, p.k_strides.seq};
}

template <class T>
KeyRows<T> value_rows(const AttentionParams& p, const Task& t) {
  return {static_cast<const T*>(p.past_v) + t.head * p.past_len * p.v_head_dim,
          static_cast<const T*>(p.v) + t.batch * p.v_strides.batch + t.kv_head * p.v_strides.head, p.past_len,
          p.v_head_dim, p.v_strides.seq};
}

// Walks through the rows of a task without dividing for each.
struct RowCursor {
  const Plan& plan;
  const Task& task;
  int64_t query, member;

  RowCursor(const Plan& plan, const Task& task, int64_t row)
      : plan(plan), task(task), query(row / plan.group), member(row % plan.group) {}

  void advance() {
    if (++member == plan.group) {
      member = 0;
      ++query;
    }
  }
  int64_t offset(const AttentionStrides& strides) const {
    return task.batch * strides.batch + query * strides.seq + (task.kv_head * plan.group + member) * strides.head;
  }
  int64_t mask_offset(const AttentionParams& p) const {
    return task.batch * p.mask_stride_batch + query * p.mask_stride_seq +
           (task.kv_head * plan.group + member) * p.mask_stride_head;
  }
};

// The mask at elements [offset, offset + n), n <= kWidth, as a bias; lanes from n on are zero (boolean: -inf).
template <class T>
ORTPLUGINS_SIMD Float load_bias(const AttentionParams& p, int64_t offset, int64_t n) {
  if (p.mask_dtype == DType::kBool) {
    return simd::load_bool(static_cast<const bool*>(p.mask) + offset, n) ? simd::zero()
                                                                         : simd::broadcast(-simd::kInfinity);
  }
  const T* mask = static_cast<const T*>(p.mask) + offset;
  return n == kWidth ? simd::load(mask) : simd::load_tail(mask, n);
}

// The bias of `n` keys from `key` on, of a row whose mask starts at `offset`.
template <class T>
ORTPLUGINS_SIMD Float load_bias_of_keys(const AttentionParams& p, int64_t offset, int64_t key, int64_t n) {
  if (p.mask_stride_key == 0) return simd::broadcast(load_bias<T>(p, offset, 1)[0]);
  return load_bias<T>(p, offset + key, n);
}

ORTPLUGINS_SIMD bool any(Int mask) {
  int32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= mask[i];
  return bits != 0;
}

// score + bias, but -inf where the bias is -inf: a masked key has no weight even if its score is NaN.
ORTPLUGINS_SIMD Float add_bias(Float score, Float bias) { return bias == -simd::kInfinity ? bias : score + bias; }

ORTPLUGINS_SIMD Float cap(Float score, float softcap) { return softcap * simd::tanh(score / softcap); }

// Where a row has met no key yet its maximum is -inf; subtracting 0 instead leaves its weights at exp(-inf) = 0.
ORTPLUGINS_SIMD Float finite_max(Float max) { return max == -simd::kInfinity ? simd::zero() : max; }

// Columns of `kWidth` rows, transposed, times `scale`: out[(c, row)] for c < columns. load(row, c, n) gives n elements.
template <class Load>
ORTPLUGINS_SIMD void load_transposed(int64_t columns, float* out, int64_t ld_out, Float scale, const Load& load) {
  for (int64_t c = 0; c < columns; c += kWidth) {
    const int64_t n = std::min<int64_t>(kWidth, columns - c);
    Float tile[kWidth];
    for (int r = 0; r < kWidth; ++r) tile[r] = load(r, c, n);
    simd::transpose(tile);
    for (int i = 0; i < n; ++i) simd::store(out + (c + i) * ld_out, tile[i] * scale);
  }
}

// Copies rows as float32; columns from `columns` to the end of the last vector are zeroed, and then overwritten by the
// next row where they lie beyond `ld_out`. Returns whether every element is finite.
template <class T>
bool copy_rows(const T* in, int64_t stride, int64_t rows, int64_t columns, float* out, int64_t ld_out) {
  Float zeros = simd::zero();  // NaN once 0 * infinity or 0 * NaN was added
  for (int64_t r = 0; r < rows; ++r) {
    int64_t c = 0;
    for (; c + kWidth <= columns; c += kWidth) {
      const Float x = simd::load(in + r * stride + c);
      zeros = simd::fma(x, simd::zero(), zeros);
      simd::store(out + r * ld_out + c, x);
    }
    if (c < columns) {
      const Float x = simd::load_tail(in + r * stride + c, columns - c);
      zeros = simd::fma(x, simd::zero(), zeros);
      simd::store(out + r * ld_out + c, x);
    }
  }
  return !any(zeros != zeros);
}

// Asks for rows ahead of `copy_rows`. Rows of one head lie a whole token apart, which hardware prefetchers do not
// follow.
template <class T>
void prefetch_rows(const T* in, int64_t stride, int64_t rows, int64_t columns) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; c += kLine) __builtin_prefetch(in + r * stride + c, 0, 2);
  }
}

// --- Tile kernel: a block of rows against a block of keys
// ---------------------------------------------------------------

// acc[i] += sum over k of a[i * a_row + k * a_k] * b[k], b[k] being kVecs vectors.
template <int kVecs>
ORTPLUGINS_SIMD void multiply_tile(int64_t depth, const float* a, int64_t a_row, int64_t a_k, const float* b,
                                   Float (&acc)[kTileM][kVecs]) {
  for (int64_t k = 0; k < depth; ++k) {
    Float row[kVecs];
    for (int v = 0; v < kVecs; ++v) row[v] = simd::load(b + v * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < kTileM; ++i) {
      const Float x = simd::broadcast(a[i * a_row]);
      for (int v = 0; v < kVecs; ++v) acc[i][v] = simd::fma(x, row[v], acc[i][v]);
    }
    a += a_k;
    b += kVecs * kWidth;
  }
}

// The three steps of a block are functions of their own, so that registers are given out for each tile alone: inlined
// into one, the accumulators of a tile compete with the constants of the next step and are spilled.

// sP = sK sQ for the keys, rounded up to whole tiles, and the running maximum over them.
template <int kVecs>
[[gnu::noinline]] void score_block(int64_t keys, int64_t head_dim, const float* sK, const float* sQ, float* sP,
                                   Float (&max)[kVecs]) {
  for (int64_t j = 0; j < keys; j += kTileM) {
    Float acc[kTileM][kVecs] = {};
    multiply_tile<kVecs>(head_dim, sK + j * head_dim, head_dim, 1, sQ, acc);
    float* s = sP + j * kVecs * kWidth;
    for (int i = 0; i < kTileM; ++i) {
      for (int v = 0; v < kVecs; ++v) simd::store(s + (i * kVecs + v) * kWidth, acc[i][v]);
    }
    if (j + kTileM <= keys) {
      for (int i = 0; i < kTileM; ++i) {
        for (int v = 0; v < kVecs; ++v) max[v] = simd::max(acc[i][v], max[v]);
      }
    } else {
      for (int64_t i = 0; i < keys - j; ++i) {
        for (int v = 0; v < kVecs; ++v) max[v] = simd::max(simd::load(s + (i * kVecs + v) * kWidth), max[v]);
      }
    }
  }
}

// sP[j] = f(j, v, sP[j]) for every vector v of key j, and the running maximum over the new scores.
template <int kVecs, class F>
ORTPLUGINS_SIMD void change_scores(int64_t keys, float* sP, const float* sMax, Float (&max)[kVecs], const F& f) {
  for (int v = 0; v < kVecs; ++v) max[v] = simd::load(sMax + v * kWidth);
  for (int64_t j = 0; j < keys; ++j) {
    for (int v = 0; v < kVecs; ++v) {
      float* s = sP + (j * kVecs + v) * kWidth;
      const Float score = f(j, v, simd::load(s));
      simd::store(s, score);
      max[v] = simd::max(score, max[v]);
    }
  }
}

// sO = sO * alpha + sV^T sP; ldv is a multiple of kTileM.
template <int kVecs>
[[gnu::noinline]] void value_block(int64_t keys, int64_t ldv, const float* sV, const float* sP,
                                   const Float (&alpha)[kVecs], float* sO) {
  for (int64_t c = 0; c < ldv; c += kTileM) {
    Float acc[kTileM][kVecs];
    for (int i = 0; i < kTileM; ++i) {
      for (int v = 0; v < kVecs; ++v) acc[i][v] = alpha[v] * simd::load(sO + ((c + i) * kVecs + v) * kWidth);
    }
    multiply_tile<kVecs>(keys, sV + c, 1, ldv, sP, acc);
    for (int i = 0; i < kTileM; ++i) {
      for (int v = 0; v < kVecs; ++v) simd::store(sO + ((c + i) * kVecs + v) * kWidth, acc[i][v]);
    }
  }
}

// The same for values that are not all finite: a key without weight adds nothing, instead of 0 * NaN.
template <int kVecs>
void value_block_guarded(int64_t keys, int64_t ldv, const float* sV, const float* sP, const Float (&alpha)[kVecs],
                         float* sO) {
  for (int64_t c = 0; c < ldv; ++c) {
    for (int v = 0; v < kVecs; ++v) {
      float* o = sO + (c * kVecs + v) * kWidth;
      Float acc = alpha[v] * simd::load(o);
      for (int64_t j = 0; j < keys; ++j) {
        const Float weight = simd::load(sP + (j * kVecs + v) * kWidth);
        acc = simd::fma(weight, weight == 0.0F ? simd::zero() : simd::broadcast(sV[j * ldv + c]), acc);
      }
      simd::store(o, acc);
    }
  }
}

// A block of rows: lanes behind `rows` repeat the last row.
struct RowBlock {
  int64_t first_row = 0;
  int rows = 0;
  int vecs = 0;
  int64_t first_key = 0, last_key = 0;        // keys that some row may see
  int64_t first_common = 0, last_common = 0;  // keys that every row may see
};

// What the blocks of rows share of a block of keys. first and last bound each row's keys, counted from the block's
// first; null: no bounds within the block.
struct BlockArgs {
  int64_t keys, head_dim, ldv;
  float softcap;
  bool finite_values;
  const float* sK;
  const float* sV;
  const float* key_bias;
  const float* bias;
  const Float* first;
  const Float* last;
};

// Turns sP from scores into weights exp(score - max), updates max and sum, and sets alpha, the factor on what was
// summed before. `max` is the maximum over sMax and the scores.
template <int kVecs>
[[gnu::noinline]] void softmax_block(const BlockArgs& a, Float (&max)[kVecs], float* sP, float* sMax, float* sSum,
                                     Float (&alpha)[kVecs]) {
  if (a.softcap != 0.0F) {
    change_scores<kVecs>(a.keys, sP, sMax, max, [&](int64_t, int, Float s) { return cap(s, a.softcap); });
  }
  if (a.bias != nullptr) {
    change_scores<kVecs>(a.keys, sP, sMax, max, [&](int64_t j, int v, Float s) {
      return add_bias(s, simd::load(a.bias + (j * kVecs + v) * kWidth));
    });
  }
  if (a.key_bias != nullptr) {
    change_scores<kVecs>(a.keys, sP, sMax, max,
                         [&](int64_t j, int, Float s) { return add_bias(s, simd::broadcast(a.key_bias[j])); });
  }
  if (a.first != nullptr) {
    change_scores<kVecs>(a.keys, sP, sMax, max, [&](int64_t j, int v, Float s) {
      const Float key = simd::broadcast(static_cast<float>(j));
      return (key >= a.first[v]) & (key < a.last[v]) ? s : simd::broadcast(-simd::kInfinity);
    });
  }
  Float shift[kVecs], sum[kVecs] = {};
  for (int v = 0; v < kVecs; ++v) {
    shift[v] = finite_max(max[v]);
    alpha[v] = simd::exp_nonpositive(simd::load(sMax + v * kWidth) - shift[v]);
    simd::store(sMax + v * kWidth, max[v]);
  }
  for (int64_t j = 0; j < a.keys; ++j) {
    for (int v = 0; v < kVecs; ++v) {
      float* s = sP + (j * kVecs + v) * kWidth;
      const Float weight = simd::exp_nonpositive(simd::load(s) - shift[v]);
      simd::store(s, weight);
      sum[v] += weight;
    }
  }
  for (int v = 0; v < kVecs; ++v)
    simd::store(sSum + v * kWidth, simd::fma(simd::load(sSum + v * kWidth), alpha[v], sum[v]));
}

template <int kVecs>
void attend_block(const BlockArgs& a, const float* sQ, float* sP, float* sMax, float* sSum, float* sO) {
  Float max[kVecs], alpha[kVecs];
  for (int v = 0; v < kVecs; ++v) max[v] = simd::load(sMax + v * kWidth);
  score_block<kVecs>(a.keys, a.head_dim, a.sK, sQ, sP, max);
  softmax_block<kVecs>(a, max, sP, sMax, sSum, alpha);
  if (a.finite_values) {
    value_block<kVecs>(a.keys, a.ldv, a.sV, sP, alpha, sO);
  } else {
    value_block_guarded<kVecs>(a.keys, a.ldv, a.sV, sP, alpha, sO);
  }
}

void attend_block(int vecs, const BlockArgs& a, const float* sQ, float* sP, float* sMax, float* sSum, float* sO) {
  switch (vecs) {
    case 1:
      return attend_block<1>(a, sQ, sP, sMax, sSum, sO);
    case 2:
      return attend_block<2>(a, sQ, sP, sMax, sSum, sO);
    default:
      return attend_block<kTileVecs>(a, sQ, sP, sMax, sSum, sO);
  }
}

// Fills sBias (key, row) with the mask of a block; false if every element is -inf.
template <class T>
bool load_bias_block(const AttentionParams& p, const Plan& plan, const Task& t, const RowBlock& block, int64_t key,
                     int64_t keys, float* sBias) {
  const int64_t ld = block.vecs * kWidth;
  Int unmasked = {};
  for (int v = 0; v < block.vecs; ++v) {
    int64_t offsets[kWidth];
    RowCursor row(plan, t, block.first_row + v * kWidth);
    for (int r = 0; r < kWidth; ++r) {
      offsets[r] = row.mask_offset(p);
      if (v * kWidth + r + 1 < block.rows) row.advance();
    }
    load_transposed(keys, sBias + v * kWidth, ld, simd::broadcast(1.0F),
                    [&](int r, int64_t c, int64_t n) { return load_bias_of_keys<T>(p, offsets[r], key + c, n); });
    for (int64_t j = 0; j < keys; ++j) unmasked |= ~(simd::load(sBias + j * ld + v * kWidth) == -simd::kInfinity);
  }
  return any(unmasked);
}

// Fills sBias (key) with the mask that all rows of the task share; false if every element is -inf.
template <class T>
bool load_key_bias(const AttentionParams& p, const Plan& plan, const Task& t, int64_t key, int64_t keys, float* sBias) {
  const int64_t offset = RowCursor(plan, t, t.begin).mask_offset(p);
  Int unmasked = {};
  for (int64_t j = 0; j < keys; j += kWidth) {
    const int64_t n = std::min<int64_t>(kWidth, keys - j);
    const Float bias = load_bias_of_keys<T>(p, offset, key + j, n);
    simd::store_tail(sBias + j, bias, n);
    unmasked |= ~(bias == -simd::kInfinity) & simd::lane_mask(n);
  }
  return any(unmasked);
}

// Writes one vector of rows of sO, times `factor`, or zeros where `empty`.
template <class Out>
void store_rows(const float* sO, int64_t ld, int64_t ldv, int64_t columns, Float factor, Int empty, Out* const* rows,
                int count) {
  for (int64_t c = 0; c < columns; c += kWidth) {
    Float tile[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      tile[i] = c + i < ldv ? (empty ? simd::zero() : simd::load(sO + (c + i) * ld) * factor) : simd::zero();
    }
    simd::transpose(tile);
    const int64_t n = std::min<int64_t>(kWidth, columns - c);
    for (int r = 0; r < kWidth; ++r) {
      if (r >= count) break;
      if (n == kWidth) {
        simd::store(rows[r] + c, tile[r]);
      } else {
        simd::store_tail(rows[r] + c, tile[r], n);
      }
    }
  }
}

template <class T>
void run_tile_task(const AttentionParams& p, const Plan& plan, const Task& t, float* slot, float* workspace) {
  float* const sQ = slot + plan.q;
  float* const sO = slot + plan.o;
  float* const sK = slot + plan.k;
  float* const sV = slot + plan.v;
  float* const sP = slot + plan.p;
  float* const sBias = slot + plan.bias;
  float* const sMax = slot + plan.max;
  float* const sSum = slot + plan.sum;

  // Prologue: queries into lanes, and which keys each row may see.
  RowBlock blocks[kTaskBlocks];
  int64_t first_keys[kTaskBlocks * kBlockRows], last_keys[kTaskBlocks * kBlockRows];
  int64_t first_key = t.last_key, last_key = t.first_key;
  for (int64_t i = 0; i < t.blocks; ++i) {
    RowBlock& block = blocks[i];
    block.first_row = plan.first_vec(t.block + i) * kWidth;
    block.vecs = static_cast<int>(plan.first_vec(t.block + i + 1) - plan.first_vec(t.block + i));
    block.rows = static_cast<int>(std::min<int64_t>(block.vecs * kWidth, plan.rows - block.first_row));
    block.first_key = block.last_common = t.last_key;
    block.last_key = block.first_common = t.first_key;
    RowCursor row(plan, t, block.first_row);
    int64_t first = 0, last = 0, known_query = -1;
    for (int r = 0; r < block.vecs * kWidth; ++r) {
      if (row.query != known_query) {
        known_query = row.query;
        p.key_range(t.batch, row.query, &first, &last);
        if (first < last) {
          block.first_key = std::min(block.first_key, first);
          block.last_key = std::max(block.last_key, last);
        }
        block.first_common = std::max(block.first_common, first);
        block.last_common = std::min(block.last_common, last);
      }
      first_keys[i * kBlockRows + r] = first;
      last_keys[i * kBlockRows + r] = last;
      if (r + 1 < block.rows) row.advance();
    }
    first_key = std::min(first_key, std::max(block.first_key, t.first_key));
    last_key = std::max(last_key, std::min(block.last_key, t.last_key));
  }
  const KeyRows<T> k_rows = key_rows<T>(p, t);
  const KeyRows<T> v_rows = value_rows<T>(p, t);
  const auto block_end = [&](int64_t key) {  // no block spans the border between the past and the new keys
    return std::min(key + kBlockKeys, key < p.past_len ? std::min(p.past_len, last_key) : last_key);
  };
  const auto prefetch_block = [&](int64_t key) {
    if (key >= last_key) return;
    prefetch_rows(k_rows.row(key), k_rows.stride(key), block_end(key) - key, p.head_dim);
    prefetch_rows(v_rows.row(key), v_rows.stride(key), block_end(key) - key, p.v_head_dim);
  };
  prefetch_block(first_key);
  for (int64_t i = 0; i < t.blocks; ++i) {
    const RowBlock& block = blocks[i];
    RowCursor row(plan, t, block.first_row);
    for (int v = 0; v < block.vecs; ++v) {
      const T* rows[kWidth];
      for (int r = 0; r < kWidth; ++r) {
        rows[r] = static_cast<const T*>(p.q) + row.offset(p.q_strides);
        if (v * kWidth + r + 1 < block.rows) row.advance();
      }
      load_transposed(p.head_dim, sQ + i * kBlockRows * p.head_dim + v * kWidth, block.vecs * kWidth,
                      simd::broadcast(p.scale), [&](int r, int64_t c, int64_t n) {
                        return n == kWidth ? simd::load(rows[r] + c) : simd::load_tail(rows[r] + c, n);
                      });
    }
  }
  std::memset(sO, 0, t.blocks * kBlockRows * plan.ldv * sizeof(float));
  std::fill_n(sMax, t.blocks * kBlockRows, -simd::kInfinity);
  std::fill_n(sSum, t.blocks * kBlockRows, 0.0F);

  // Mainloop over blocks of keys
  int64_t end = 0;
  for (int64_t key = first_key; key < last_key; key = end) {
    end = block_end(key);
    const int64_t keys = end - key;
    if (plan.mask == MaskKind::kPerKey && !load_key_bias<T>(p, plan, t, key, keys, sBias)) continue;
    copy_rows(k_rows.row(key), k_rows.stride(key), keys, p.head_dim, sK, p.head_dim);
    std::memset(sK + keys * p.head_dim, 0, (round_up(keys, kTileM) - keys) * p.head_dim * sizeof(float));
    const bool finite = copy_rows(v_rows.row(key), v_rows.stride(key), keys, p.v_head_dim, sV, plan.ldv);
    prefetch_block(end);
    for (int64_t i = 0; i < t.blocks; ++i) {
      const RowBlock& block = blocks[i];
      if (key >= block.last_key || end <= block.first_key) continue;
      if (plan.mask == MaskKind::kPerRow && !load_bias_block<T>(p, plan, t, block, key, keys, sBias)) continue;
      Float first[kTileVecs], last[kTileVecs];
      const bool bounded = key < block.first_common || end > block.last_common;
      if (bounded) {
        float bounds[2][kBlockRows];
        for (int r = 0; r < block.vecs * kWidth; ++r) {
          bounds[0][r] = static_cast<float>(std::clamp<int64_t>(first_keys[i * kBlockRows + r] - key, 0, keys));
          bounds[1][r] = static_cast<float>(std::clamp<int64_t>(last_keys[i * kBlockRows + r] - key, 0, keys));
        }
        for (int v = 0; v < block.vecs; ++v) {
          first[v] = simd::load(bounds[0] + v * kWidth);
          last[v] = simd::load(bounds[1] + v * kWidth);
        }
      }
      const BlockArgs args{keys,
                           p.head_dim,
                           plan.ldv,
                           p.softcap,
                           finite,
                           sK,
                           sV,
                           plan.mask == MaskKind::kPerKey ? sBias : nullptr,
                           plan.mask == MaskKind::kPerRow ? sBias : nullptr,
                           bounded ? first : nullptr,
                           bounded ? last : nullptr};
      attend_block(block.vecs, args, sQ + i * kBlockRows * p.head_dim, sP, sMax + i * kBlockRows, sSum + i * kBlockRows,
                   sO + i * kBlockRows * plan.ldv);
    }
  }

  // Epilogue: normalised rows of y, or the parts of one split.
  const int64_t part = (t.head * plan.splits + t.split) * plan.rows;
  for (int64_t i = 0; i < t.blocks; ++i) {
    const RowBlock& block = blocks[i];
    const int64_t ld = block.vecs * kWidth;
    const float* block_o = sO + i * kBlockRows * plan.ldv;
    RowCursor cursor(plan, t, block.first_row);
    for (int v = 0; v < block.vecs; ++v) {
      const int64_t row = block.first_row + v * kWidth;
      const int count = static_cast<int>(std::min<int64_t>(kWidth, block.first_row + block.rows - row));
      const Float sum = simd::load(sSum + i * kBlockRows + v * kWidth);
      if (plan.splits > 1) {
        float* rows[kWidth];
        for (int r = 0; r < count; ++r) rows[r] = workspace + plan.part_o + (part + row + r) * p.v_head_dim;
        store_rows(block_o + v * kWidth, ld, plan.ldv, p.v_head_dim, simd::broadcast(1.0F), Int{}, rows, count);
        simd::store_tail(workspace + plan.part_max + part + row, simd::load(sMax + i * kBlockRows + v * kWidth), count);
        simd::store_tail(workspace + plan.part_sum + part + row, sum, count);
      } else {
        T* rows[kWidth];
        for (int r = 0; r < count; ++r, cursor.advance()) rows[r] = static_cast<T*>(p.y) + cursor.offset(p.y_strides);
        store_rows(block_o + v * kWidth, ld, plan.ldv, p.v_head_dim, 1.0F / sum, sum == 0.0F, rows, count);
      }
    }
  }
}

// --- Row kernel: a few rows, head_dim in the lanes
// ----------------------------------------------------------------------

// Sums of each of kWidth vectors, one to a lane.
ORTPLUGINS_SIMD Float sum_each(Float (&v)[kWidth]) {
  simd::transpose(v);
#pragma GCC unroll 4
  for (int n = kWidth / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) v[i] += v[i + n];
  }
  return v[0];
}

// sS[r][j] = q[r] . k[j] for kRows rows; kWidth products at a time. sS has room for whole vectors of keys.
template <int kRows, class T>
void score_rows(int64_t keys, int64_t head_dim, const T* k, int64_t stride, const float* q, int64_t ldq, float* sS) {
  constexpr int kKeys = kWidth / kRows;
  for (int64_t j = 0; j < keys; j += kKeys) {
    const T* rows[kKeys];
    for (int u = 0; u < kKeys; ++u) rows[u] = k + std::min<int64_t>(j + u, keys - 1) * stride;
    Float acc[kWidth] = {};
    const auto add = [&](int64_t d, const auto& load_key) {
#pragma GCC unroll 16
      for (int u = 0; u < kKeys; ++u) {
        const Float x = load_key(rows[u] + d);
        for (int r = 0; r < kRows; ++r)
          acc[r * kKeys + u] = simd::fma(x, simd::load(q + r * ldq + d), acc[r * kKeys + u]);
      }
    };
    int64_t d = 0;
    for (; d + kWidth <= head_dim; d += kWidth) add(d, [](const T* x) { return simd::load(x); });
    if (d < head_dim) add(d, [n = head_dim - d](const T* x) { return simd::load_tail(x, n); });
    float sums[kWidth];
    simd::store(sums, sum_each(acc));
    for (int r = 0; r < kRows; ++r) std::memcpy(sS + r * kRowBlockKeys + j, sums + r * kKeys, sizeof(float) * kKeys);
  }
}

// Scores of one row to weights; returns alpha. `zeros` becomes true if a key has no weight.
template <class T>
float softmax_row(const AttentionParams& p, int64_t mask_offset, int64_t key, int64_t keys, int64_t first, int64_t last,
                  float* s, float* max, float* sum, bool* zeros) {
  Float row_max = simd::broadcast(-simd::kInfinity);
  for (int64_t j = 0; j < keys; j += kWidth) {
    const int64_t n = std::min<int64_t>(kWidth, keys - j);
    Float score = simd::load(s + j);
    if (p.softcap != 0.0F) score = cap(score, p.softcap);
    if (p.mask_dtype != DType::kNone) score = add_bias(score, load_bias_of_keys<T>(p, mask_offset, key + j, n));
    const Int visible = ~simd::lane_mask(std::clamp<int64_t>(first - key - j, 0, kWidth)) &
                        simd::lane_mask(std::clamp<int64_t>(last - key - j, 0, n));
    score = visible ? score : simd::broadcast(-simd::kInfinity);
    row_max = simd::max(score, row_max);
    simd::store(s + j, score);
  }
  const float new_max = std::max(*max, simd::reduce_max(row_max));
  const Float shift = finite_max(simd::broadcast(new_max));
  const float alpha = simd::exp_nonpositive(simd::broadcast(*max) - shift)[0];
  Float row_sum = simd::zero();
  Int none = {};
  for (int64_t j = 0; j < keys; j += kWidth) {
    const Float weight = simd::exp_nonpositive(simd::load(s + j) - shift);
    row_sum += weight;
    none |= weight == 0.0F;
    simd::store(s + j, weight);
  }
  *zeros |= any(none);
  *max = new_max;
  *sum = *sum * alpha + simd::reduce_sum(row_sum);
  return alpha;
}

// kVecs vectors of columns of kRows rows: sO = sO * alpha + p v; n: columns of the last vector. With `zeros`, keys
// without weight are passed over, so that their values may be anything.
template <int kRows, int kVecs, class T>
void value_columns(int64_t keys, const T* v, int64_t stride, const float* sS, const float* alpha, bool zeros, int64_t n,
                   float* sO, int64_t ldo) {
  Float acc[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVecs; ++c) acc[r][c] = alpha[r] * simd::load(sO + r * ldo + c * kWidth);
  }
  for (int64_t j = 0; j < keys; ++j) {
    Float x[kVecs];
    for (int c = 0; c < kVecs - 1; ++c) x[c] = simd::load(v + j * stride + c * kWidth);
    const T* tail = v + j * stride + (kVecs - 1) * kWidth;
    x[kVecs - 1] = n == kWidth ? simd::load(tail) : simd::load_tail(tail, n);
    for (int r = 0; r < kRows; ++r) {
      const float weight = sS[r * kRowBlockKeys + j];
      if (zeros && weight == 0.0F) continue;
      for (int c = 0; c < kVecs; ++c) acc[r][c] = simd::fma(simd::broadcast(weight), x[c], acc[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVecs; ++c) simd::store(sO + r * ldo + c * kWidth, acc[r][c]);
  }
}

template <int kRows, class T>
void value_rows_block(int64_t keys, int64_t columns, const T* v, int64_t stride, const float* sS, const float* alpha,
                      bool zeros, float* sO, int64_t ldo) {
  constexpr int kVecs = kWidth == 16 ? 4 : 2;
  int64_t c = 0;
  for (; c + kVecs * kWidth <= columns; c += kVecs * kWidth) {
    value_columns<kRows, kVecs>(keys, v + c, stride, sS, alpha, zeros, kWidth, sO + c, ldo);
  }
  for (; c < columns; c += kWidth) {
    value_columns<kRows, 1>(keys, v + c, stride, sS, alpha, zeros, std::min<int64_t>(kWidth, columns - c), sO + c, ldo);
  }
}

// Calls f<4>, f<2> or f<1> for the row groups of `rows`.
template <class F>
void for_row_groups(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) f.template operator()<4>(r);
  for (; r + 2 <= rows; r += 2) f.template operator()<2>(r);
  for (; r < rows; ++r) f.template operator()<1>(r);
}

template <class T>
void run_row_task(const AttentionParams& p, const Plan& plan, const Task& t, float* slot, float* workspace) {
  const int64_t ldq = round_up(p.head_dim, kWidth);
  const int64_t rows = plan.rows;
  float* const sQ = slot + plan.q;
  float* const sO = slot + plan.o;
  float* const sS = slot + plan.p;
  float* const sMax = slot + plan.max;
  float* const sSum = slot + plan.sum;

  // Prologue
  int64_t first_keys[kFewRows], last_keys[kFewRows];
  int64_t first_key = t.last_key, last_key = t.first_key;
  for (int64_t r = 0; r < rows; ++r) {
    const RowCursor row(plan, t, r);
    const T* q = static_cast<const T*>(p.q) + row.offset(p.q_strides);
    for (int64_t d = 0; d < p.head_dim; d += kWidth) {
      simd::store(sQ + r * ldq + d, simd::load_tail(q + d, std::min<int64_t>(kWidth, p.head_dim - d)) * p.scale);
    }
    p.key_range(t.batch, row.query, &first_keys[r], &last_keys[r]);
    if (first_keys[r] < last_keys[r]) {
      first_key = std::min(first_key, first_keys[r]);
      last_key = std::max(last_key, last_keys[r]);
    }
  }
  first_key = std::max(first_key, t.first_key);
  last_key = std::min(last_key, t.last_key);
  std::fill_n(sO, rows * plan.ldv, 0.0F);
  std::fill_n(sMax, rows, -simd::kInfinity);
  std::fill_n(sSum, rows, 0.0F);

  // Mainloop
  const KeyRows<T> k_rows = key_rows<T>(p, t);
  const KeyRows<T> v_rows = value_rows<T>(p, t);
  int64_t keys = 0;
  for (int64_t key = first_key; key < last_key; key += keys) {
    keys = std::min<int64_t>(kRowBlockKeys, (key < p.past_len ? std::min(p.past_len, last_key) : last_key) - key);
    const T* k = k_rows.row(key);
    const T* v = v_rows.row(key);
    for_row_groups(rows, [&]<int kRows>(int64_t r) {
      score_rows<kRows>(keys, p.head_dim, k, k_rows.stride(key), sQ + r * ldq, ldq, sS + r * kRowBlockKeys);
    });
    float alpha[kFewRows];
    bool zeros = false;
    for (int64_t r = 0; r < rows; ++r) {
      alpha[r] = softmax_row<T>(p, RowCursor(plan, t, r).mask_offset(p), key, keys, first_keys[r], last_keys[r],
                                sS + r * kRowBlockKeys, sMax + r, sSum + r, &zeros);
    }
    for_row_groups(rows, [&]<int kRows>(int64_t r) {
      value_rows_block<kRows>(keys, p.v_head_dim, v, v_rows.stride(key), sS + r * kRowBlockKeys, alpha + r, zeros,
                              sO + r * plan.ldv, plan.ldv);
    });
  }

  // Epilogue
  const int64_t part = (t.head * plan.splits + t.split) * rows;
  for (int64_t r = 0; r < rows; ++r) {
    const float* o = sO + r * plan.ldv;
    if (plan.splits > 1) {
      std::memcpy(workspace + plan.part_o + (part + r) * p.v_head_dim, o, p.v_head_dim * sizeof(float));
      workspace[plan.part_max + part + r] = sMax[r];
      workspace[plan.part_sum + part + r] = sSum[r];
      continue;
    }
    T* y = static_cast<T*>(p.y) + RowCursor(plan, t, r).offset(p.y_strides);
    for (int64_t c = 0; c < p.v_head_dim; c += kWidth) {
      const Float x = sSum[r] == 0.0F ? simd::zero() : simd::load(o + c) / sSum[r];
      simd::store_tail(y + c, x, std::min<int64_t>(kWidth, p.v_head_dim - c));
    }
  }
}

// --- The whole call -------------------------------------------------------------------------------------------------

// One row of y from the parts of its splits, in their order.
template <class T>
void combine_row(const AttentionParams& p, const Plan& plan, const float* workspace, int64_t head, int64_t row) {
  const float* maxima = workspace + plan.part_max + head * plan.splits * plan.rows + row;
  const float* sums = workspace + plan.part_sum + head * plan.splits * plan.rows + row;
  const float* parts = workspace + plan.part_o + (head * plan.splits * plan.rows + row) * p.v_head_dim;
  const Task t{.batch = head / p.kv_heads,
               .kv_head = head % p.kv_heads,
               .head = head,
               .begin = 0,
               .end = 0,
               .split = 0,
               .first_key = 0,
               .last_key = 0};
  T* y = static_cast<T*>(p.y) + RowCursor(plan, t, row).offset(p.y_strides);

  float max = -simd::kInfinity;
  for (int64_t s = 0; s < plan.splits; ++s) max = std::max(max, maxima[s * plan.rows]);
  float weights[kMinTasks];  // splits <= kMinTasks
  float sum = 0.0F;
  for (int64_t s = 0; s < plan.splits; ++s) {
    weights[s] = simd::exp_nonpositive(simd::broadcast(maxima[s * plan.rows]) - finite_max(simd::broadcast(max)))[0];
    sum += weights[s] * sums[s * plan.rows];
  }
  for (int64_t c = 0; c < p.v_head_dim; c += kWidth) {
    const int64_t n = std::min<int64_t>(kWidth, p.v_head_dim - c);
    Float acc = simd::zero();
    for (int64_t s = 0; s < plan.splits; ++s) {
      acc = simd::fma(simd::broadcast(weights[s]), simd::load_tail(parts + s * plan.rows * p.v_head_dim + c, n), acc);
    }
    simd::store_tail(y + c, sum == 0.0F ? simd::zero() : acc / sum, n);
  }
}

// Past and new rows of one head, one behind the other.
void append_cache(const void* past, const void* fresh, void* present, int64_t past_len, int64_t len, int64_t dim,
                  int64_t stride, size_t element) {
  auto* out = static_cast<char*>(present);
  const auto* in = static_cast<const char*>(fresh);
  const size_t row_bytes = dim * element;
  if (past_len > 0) std::memcpy(out, past, past_len * row_bytes);
  for (int64_t j = 0; j < len; ++j) std::memcpy(out + (past_len + j) * row_bytes, in + j * stride * element, row_bytes);
}

void append_caches(const AttentionParams& p, int64_t head) {
  const size_t element = size_of(p.dtype);
  const int64_t b = head / p.kv_heads, h = head % p.kv_heads;
  const auto at = [element](const void* base, int64_t offset) {
    return static_cast<const char*>(base) + offset * element;
  };
  if (p.present_k != nullptr) {
    append_cache(at(p.past_k, head * p.past_len * p.head_dim), at(p.k, b * p.k_strides.batch + h * p.k_strides.head),
                 static_cast<char*>(p.present_k) + head * p.total_len() * p.head_dim * element, p.past_len, p.kv_len,
                 p.head_dim, p.k_strides.seq, element);
  }
  if (p.present_v != nullptr) {
    append_cache(at(p.past_v, head * p.past_len * p.v_head_dim), at(p.v, b * p.v_strides.batch + h * p.v_strides.head),
                 static_cast<char*>(p.present_v) + head * p.total_len() * p.v_head_dim * element, p.past_len, p.kv_len,
                 p.v_head_dim, p.v_strides.seq, element);
  }
}

Task task_at(const AttentionParams& p, const Plan& plan, int64_t index) {
  Task t{};
  t.split = index % plan.splits;
  // From the last rows to the first: with a causal mask the long tasks then come first.
  const int64_t row_task = plan.row_tasks - 1 - index / plan.splits % plan.row_tasks;
  t.head = index / plan.splits / plan.row_tasks;
  t.batch = t.head / p.kv_heads;
  t.kv_head = t.head % p.kv_heads;
  if (plan.few_rows) {
    t.end = plan.rows;
  } else {
    t.block = row_task * plan.blocks / plan.row_tasks;
    t.blocks = (row_task + 1) * plan.blocks / plan.row_tasks - t.block;
    t.begin = plan.first_vec(t.block) * kWidth;
    t.end = std::min(plan.rows, plan.first_vec(t.block + t.blocks) * kWidth);
  }
  t.first_key = t.split * plan.split_keys;
  t.last_key = std::min(p.total_len(), t.first_key + plan.split_keys);
  return t;
}

template <class T>
void attention_cpu(const AttentionParams& p, const Plan& plan, const ExecContext& context) {
  auto* const workspace = static_cast<float*>(context.workspace);
  if (plan.tasks > 0) {
    // One iteration per slot; each takes tasks until none is left, so a slot is never shared.
    std::atomic<int64_t> next{0};
    context.pool.parallel_for(plan.slots, [&](int64_t slot_idx) {
      float* const slot = workspace + slot_idx * plan.slot_floats;
      for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < plan.tasks;
           i = next.fetch_add(1, std::memory_order_relaxed)) {
        const Task t = task_at(p, plan, i);
        if (plan.few_rows) {
          run_row_task<T>(p, plan, t, slot, workspace);
        } else {
          run_tile_task<T>(p, plan, t, slot, workspace);
        }
      }
    });
  }
  if (plan.splits > 1) {
    context.pool.parallel_for(plan.heads, [&](int64_t head) {
      for (int64_t row = 0; row < plan.rows; ++row) combine_row<T>(p, plan, workspace, head, row);
    });
  }
  if (p.present_k != nullptr || p.present_v != nullptr) {
    context.pool.parallel_for(p.batch * p.kv_heads, [&](int64_t head) { append_caches(p, head); });
  }
}

}  // namespace

int64_t ORTPLUGINS_CPU_NAME(attention_cpu_workspace_bytes)(const AttentionParams& params, const DeviceInfo& device) {
  return make_plan(params, device).total_floats * static_cast<int64_t>(sizeof(float));
}

Status ORTPLUGINS_CPU_NAME(launch_attention_cpu)(const AttentionParams& params, const ExecContext& context) {
  const Plan plan = make_plan(params, *context.device);
  return dispatch(params.dtype, [&](auto tag) {
    attention_cpu<typename decltype(tag)::type>(params, plan, context);
    return Status{};
  });
}

}  // namespace ortplugins
