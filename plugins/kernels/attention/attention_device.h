// What the CUDA kernels of FusedAttention share: where rows of q, k and v lie, which keys a query may see, how a product
// becomes a score, and the exact way out for rows that a masked NaN has spoilt.
//
// Scores are kept in units of log2: softmax is exp2(t - max t) with t = log2(e) * (softcap(scale * q k) + mask).
#pragma once

#include <cfloat>
#include <cmath>

#include "device/dispatch.h"
#include "device/math.h"
#include "device/pack.h"
#include "device/reduce.h"
#include "kernels/attention/attention.h"

namespace ortplugins {

// Positions are 32-bit in the kernels, offsets in memory 64-bit.
constexpr int64_t kMaxAttentionLen = int64_t{1} << 30;
constexpr int kMaxSplits = 256;

// Flags: every row of the tensor starts at a multiple of 16 bytes and is a multiple of 16 bytes long.
enum AttentionPacks : int { kPacksQ = 1, kPacksK = 2, kPacksV = 4, kPacksY = 8 };

// Params and what is derived from them once for a launch.
struct AttentionLaunch {
  AttentionParams p;
  int packs = 0;
  int group = 1;              // query heads of a key head
  float score_scale = 1.0F;   // of the product: log2(e) * scale, or scale / softcap
  float cap = 0.0F;           // log2(e) * softcap; 0: off
  bool folds_scale = false;   // the scale may be applied within the exponent: nothing else happens to a product
  int tile_heads = 1;         // query heads whose rows follow each other in a tile: 1, or `group`
  int64_t tiles = 0;          // tiles of query rows for each (batch, tile_heads heads)
  int splits = 1;             // parts into which the keys are cut
  float* partial_y = nullptr;    // (batch, heads, q_len, splits, v_head_dim), not yet divided by the sum
  float2* partial_ms = nullptr;  // (batch, heads, q_len, splits): maximum and sum
};

// The workspace of a split launch. Sized and divided here only.
struct SplitWorkspace {
  int64_t rows, y_bytes, bytes;

  SplitWorkspace(const AttentionParams& p, int splits) {
    rows = p.batch * p.heads * p.q_len * splits;
    y_bytes = ceil_div(rows * p.v_head_dim * static_cast<int64_t>(sizeof(float)), 256) * 256;
    bytes = splits > 1 ? y_bytes + rows * static_cast<int64_t>(sizeof(float2)) : 0;
  }
};

inline bool rows_in_packs(const void* data, const AttentionStrides& s, int64_t dim, int64_t element_size) {
  const int64_t n = kPackBytes / element_size;
  return is_aligned(data, kPackBytes) && dim % n == 0 && s.batch % n == 0 && s.seq % n == 0 && s.head % n == 0;
}

inline AttentionLaunch make_attention_launch(const AttentionParams& p) {
  AttentionLaunch a;
  a.p = p;
  const auto size = static_cast<int64_t>(size_of(p.dtype));
  const bool past = p.past_len > 0;
  if (rows_in_packs(p.q, p.q_strides, p.head_dim, size)) a.packs |= kPacksQ;
  if (rows_in_packs(p.k, p.k_strides, p.head_dim, size) && (!past || is_aligned(p.past_k, kPackBytes))) a.packs |= kPacksK;
  if (rows_in_packs(p.v, p.v_strides, p.v_head_dim, size) && (!past || is_aligned(p.past_v, kPackBytes))) a.packs |= kPacksV;
  if (rows_in_packs(p.y, p.y_strides, p.v_head_dim, size)) a.packs |= kPacksY;
  a.group = static_cast<int>(p.heads / p.kv_heads);
  a.cap = p.softcap * kLog2e;
  a.score_scale = p.softcap != 0.0F ? p.scale / p.softcap : p.scale * kLog2e;
  a.folds_scale = p.softcap == 0.0F && p.mask_dtype == DType::kNone && p.scale > 0.0F;
  return a;
}

// A one-dimensional grid of `blocks` work items may need two dimensions; kernels ask work_item() and leave when it is
// past the end.
inline dim3 work_grid(int64_t blocks) {
  constexpr int64_t kMaxX = int64_t{1} << 30;
  return blocks <= kMaxX ? dim3(static_cast<unsigned>(blocks)) : dim3(kMaxX, static_cast<unsigned>(ceil_div(blocks, kMaxX)));
}
__device__ __forceinline__ int64_t work_item() { return static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x; }

// The keys that query i of one sequence may see before the mask: [first(i), last(i)). The 32-bit form of
// AttentionParams::key_range; both ends never fall as i grows.
struct KeyBand {
  int end;    // no query sees a key from here on
  int left;   // first(i) = max(0, i + left)
  int right;  // last(i) = min(end, i + right)

  __device__ __forceinline__ int first(int i) const { return max(0, i + left); }
  __device__ __forceinline__ int last(int i) const { return min(end, i + right); }
};

ORTPLUGINS_HOST_DEVICE KeyBand key_band(const AttentionParams& p, int64_t b) {
  const auto clamp = [](int64_t v) { return static_cast<int>(min(max(v, -kMaxAttentionLen), kMaxAttentionLen)); };
  const int64_t offset = clamp(p.query_offset(b));
  KeyBand band;
  band.end = clamp(p.mask_dtype != DType::kNone ? min(p.valid_len(b), p.mask_len) : p.valid_len(b));
  band.left = clamp(p.window >= 0 ? offset - min(p.window, 2 * kMaxAttentionLen) : -kMaxAttentionLen);
  int64_t right = kMaxAttentionLen;
  if (p.window_right >= 0) right = offset + min(p.window_right, 2 * kMaxAttentionLen) + 1;
  if (p.is_causal) right = min(right, offset + 1);
  band.right = clamp(right);
  return band;
}

// Rows of k or v of one (sequence, key head): the cache first, then the new ones.
template <class T>
struct KeyRows {
  const T* past;
  const T* current;  // row past_len
  int64_t past_stride, stride;
  int past_len;

  __device__ __forceinline__ const T* row(int j) const {
    return j < past_len ? past + j * past_stride : current + (j - past_len) * stride;
  }
};

template <class T>
__device__ __forceinline__ KeyRows<T> key_rows(const void* past, const void* current, const AttentionStrides& strides,
                                               const AttentionParams& p, int64_t dim, int64_t b, int64_t kv_head) {
  KeyRows<T> r;
  r.past = static_cast<const T*>(past) + (b * p.kv_heads + kv_head) * p.past_len * dim;
  r.current = static_cast<const T*>(current) + b * strides.batch + kv_head * strides.head;
  r.past_stride = dim;
  r.stride = strides.seq;
  r.past_len = static_cast<int>(p.past_len);
  return r;
}
template <class T>
__device__ __forceinline__ KeyRows<T> k_rows(const AttentionParams& p, int64_t b, int64_t kv_head) {
  return key_rows<T>(p.past_k, p.k, p.k_strides, p, p.head_dim, b, kv_head);
}
template <class T>
__device__ __forceinline__ KeyRows<T> v_rows(const AttentionParams& p, int64_t b, int64_t kv_head) {
  return key_rows<T>(p.past_v, p.v, p.v_strides, p, p.v_head_dim, b, kv_head);
}

__device__ __forceinline__ int64_t mask_row_offset(const AttentionParams& p, int64_t b, int64_t h, int64_t i) {
  return b * p.mask_stride_batch + h * p.mask_stride_head + i * p.mask_stride_seq;
}

// What a mask's number adds, in log2 units. A finite one stays finite: the lowest float times log2(e) would not, and a row of
// them is the mean of v, not a masked row. NaN stays NaN.
__device__ __forceinline__ float mask_log2(float m) {
  const float t = m * kLog2e;
  return m >= -FLT_MAX && t < -FLT_MAX ? -FLT_MAX : t;
}
template <class T>
__device__ __forceinline__ float mask_value(const AttentionParams& p, int64_t offset) {
  if (p.mask_dtype == DType::kBool) return static_cast<const uint8_t*>(p.mask)[offset] != 0 ? 0.0F : -INFINITY;
  return mask_log2(to_float(static_cast<const T*>(p.mask)[offset]));
}

// Score plus mask. -inf wins over everything, also over the NaN of a masked key.
__device__ __forceinline__ float add_mask(float t, float m) {
  const float sum = t + m;
  return m == -INFINITY ? -INFINITY : sum < -FLT_MAX ? -FLT_MAX : sum;
}

// Product to score. kExact: tanhf; else 1 - 2 / (exp(2x) + 1), whose error is some 1e-7 of the cap.
template <bool kExact>
__device__ __forceinline__ float to_score(const AttentionLaunch& a, float product) {
  const float x = product * a.score_scale;
  if (a.cap == 0.0F) return x;
  if constexpr (kExact) {
    return a.cap * tanhf(x);
  } else {
    return a.cap * (1.0F - __fdividef(2.0F, exp2f(x * (2.0F * kLog2e)) + 1.0F));
  }
}

// Keeps the compiler from computing what depends on `v` ahead of a loop, where it would hold registers all the while.
template <class Integer>
__device__ __forceinline__ Integer computed_in_place(Integer v) {
  if constexpr (sizeof(Integer) == 8) {
    asm volatile("" : "+l"(v));
  } else {
    asm volatile("" : "+r"(v));
  }
  return v;
}

// Elements [dim_begin, dim_end) of one row of y, by one warp, key by key. A masked key's NaN cannot reach it, because a key without weight is not
// multiplied at all. Matrix tiles cannot leave out single products (0 * NaN is NaN), so a kernel that finds NaN in a row
// whose sum of weights is a number has this do the row again.
template <class T>
__device__ __forceinline__ void attend_row_exactly_inline(const AttentionLaunch& a, int64_t b, int64_t h, int64_t i,
                                                          int64_t dim_begin, int64_t dim_end) {
  const AttentionParams& p = a.p;
  constexpr int kLaneDims = 8;
  const int lane_idx = computed_in_place(static_cast<int>(threadIdx.x) % 32);
  const KeyBand band = key_band(p, b);
  const int first = band.first(static_cast<int>(i)), last = band.last(static_cast<int>(i));
  const T* q = static_cast<const T*>(p.q) + b * p.q_strides.batch + h * p.q_strides.head + i * p.q_strides.seq;
  T* y = static_cast<T*>(p.y) + b * p.y_strides.batch + h * p.y_strides.head + i * p.y_strides.seq;
  const KeyRows<T> k = k_rows<T>(p, b, h / a.group), v = v_rows<T>(p, b, h / a.group);
  const int64_t mask_row = mask_row_offset(p, b, h, i);
  for (int64_t dim0 = dim_begin; dim0 < dim_end; dim0 += 32 * kLaneDims) {
    float row_max = -INFINITY, row_sum = 0.0F, acc[kLaneDims] = {};
    for (int j = first; j < last; ++j) {
      const float m = p.mask_dtype == DType::kNone ? 0.0F : mask_value<T>(p, mask_row + j * p.mask_stride_key);
      if (m == -INFINITY) continue;
      float product = 0.0F;
      for (int64_t d = lane_idx; d < p.head_dim; d += 32) product += to_float(q[d]) * to_float(k.row(j)[d]);
      const float t = add_mask(to_score<true>(a, warp_sum(product)), m);
      const float new_max = fmaxf(row_max, t), reference = softmax_reference(new_max);
      const float weight = exp2f(t - reference), correction = exp2f(row_max - reference);
      row_sum = row_sum * correction + weight;
      row_max = new_max;
#pragma unroll
      for (int n = 0; n < kLaneDims; ++n) {
        const int64_t d = dim0 + n * 32 + lane_idx;
        acc[n] *= correction;
        if (weight != 0.0F && d < dim_end) acc[n] += weight * to_float(v.row(j)[d]);
      }
    }
#pragma unroll
    for (int n = 0; n < kLaneDims; ++n) {
      const int64_t d = dim0 + n * 32 + lane_idx;
      if (d < dim_end) y[d] = from_float<T>(row_sum == 0.0F ? 0.0F : acc[n] / row_sum);
    }
  }
}

// As a call, which takes few registers of the kernel. A kernel with wgmma must not contain calls: they make it wait for
// every product.
template <class T>
__device__ __noinline__ void attend_row_exactly(const AttentionLaunch& a, int64_t b, int64_t h, int64_t i,
                                                 int64_t dim_begin, int64_t dim_end) {
  attend_row_exactly_inline<T>(a, b, h, i, dim_begin, dim_end);
}

// The part of the work that one block does: a tile of query rows of one sequence against a range of keys. Row r of a tile
// is query r % q_len of head head0 + r / q_len; with tile_heads = 1 there is one head and r is the query.
struct AttentionTile {
  int64_t b, head0;
  int row0, rows;   // of the tile; rows of all tiles together
  int split;
  int first, last;  // keys that some row of the tile may see, and that belong to this split

  __device__ __forceinline__ int64_t head(const AttentionParams& p, int r) const { return head0 + r / static_cast<int>(p.q_len); }
  __device__ __forceinline__ int query(const AttentionParams& p, int r) const { return r % static_cast<int>(p.q_len); }
};

// `item` counts splits fastest, then tiles, heads and sequences, so that blocks which run at the same time read the same
// keys. False past the end. Tiles with the most keys under a causal mask come first: the short ones fill the gaps.
__device__ __forceinline__ bool attention_tile(const AttentionLaunch& a, int64_t item, int block_m, int block_n,
                                               AttentionTile* t, KeyBand* band) {
  const AttentionParams& p = a.p;
  t->split = static_cast<int>(item % a.splits);
  item /= a.splits;
  int64_t tile = item % a.tiles;
  item /= a.tiles;
  if (p.is_causal) tile = a.tiles - 1 - tile;
  const int64_t groups = p.heads / a.tile_heads;
  t->head0 = item % groups * a.tile_heads;
  t->b = item / groups;
  if (t->b >= p.batch) return false;
  t->row0 = static_cast<int>(tile * block_m);
  t->rows = static_cast<int>(p.q_len * a.tile_heads);
  *band = key_band(p, t->b);
  const int last_row = min(t->row0 + block_m, t->rows) - 1;
  const bool one_head = t->head(p, t->row0) == t->head(p, last_row);
  t->first = band->first(one_head ? t->query(p, t->row0) : 0);
  t->last = band->last(one_head ? t->query(p, last_row) : static_cast<int>(p.q_len) - 1);
  if (a.splits > 1) {
    const int blocks = max(0, t->last - t->first + block_n - 1) / block_n;
    const int64_t part = static_cast<int64_t>((blocks + a.splits - 1) / a.splits) * block_n;
    const int64_t first = t->first + t->split * part;
    t->last = static_cast<int>(min(static_cast<int64_t>(t->last), first + part));
    t->first = static_cast<int>(min(first, static_cast<int64_t>(t->last)));
  }
  return true;
}

// Host side, in attention.cu. Done first by every launcher: checks the limits, writes present_k and present_v, and says in
// `done` whether y is empty.
Status attention_prologue(const AttentionParams& params, const ExecContext& context, bool* done);

// Merges the parts of a split launch, in their order.
Status launch_attention_merge(const AttentionLaunch& a, const ExecContext& context);

// Gives `a` its share of the caller's workspace.
inline Status split_launch(int splits, const ExecContext& context, AttentionLaunch* a) {
  const SplitWorkspace workspace(a->p, splits);
  if (context.workspace_bytes < workspace.bytes) {
    return Status::invalid("workspace", "{} bytes are needed, got {}", {workspace.bytes, context.workspace_bytes});
  }
  a->splits = splits;
  a->partial_y = static_cast<float*>(context.workspace);
  a->partial_ms = reinterpret_cast<float2*>(static_cast<char*>(context.workspace) + workspace.y_bytes);
  return {};
}

// Parts into which the keys are cut so that `blocks` blocks of a launch without splits become enough for the device, each
// with at least `min_keys` keys. From sizes the host knows; a short sequence in a long cache is cut on the device.
inline int choose_splits(const AttentionParams& p, const DeviceInfo& device, int64_t blocks, int blocks_per_sm, int64_t min_keys) {
  const int64_t wanted = ceil_div(static_cast<int64_t>(device.sm_count) * blocks_per_sm, blocks > 0 ? blocks : 1);
  const int64_t most = ceil_div(p.total_len(), min_keys);
  const int64_t splits = wanted < most ? wanted : most;
  return static_cast<int>(splits < 1 ? 1 : splits < kMaxSplits ? splits : kMaxSplits);
}

}  // namespace ortplugins
