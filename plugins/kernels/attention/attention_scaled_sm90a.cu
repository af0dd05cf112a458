// Brings q, k and v from float32 to scaled float16 (attention_scaled.h). A block has one tile of kScaledTileElements in
// its registers: it finds the largest magnitude, scales, splits and writes. Thread i holds four columns of every
// kPassRows-th row.
#include "device/dispatch.h"
#include "device/math.h"
#include "kernels/attention/attention_scaled.h"

namespace ortplugins {
namespace {

constexpr int kThreads = 256;

struct ScaleLaunch {
  AttentionLaunch a;
  ScaledTensor q, k, v;
  int64_t blocks_q = 0, blocks_k = 0;
  int* next = nullptr;
  int blocks = 0;
  float least = 0.0F;
};

// 2^e, e from -126 to 127.
__device__ __forceinline__ float exp2_int(int e) { return __int_as_float((e + 127) << 23); }
__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffU; }

template <int kDim, int kParts>
__global__ void __launch_bounds__(kThreads) attention_scale_kernel(const __grid_constant__ ScaleLaunch w) {
  constexpr int kRows = kScaledTileElements / kDim;
  constexpr int kLanes = kDim / 4;  // of a row
  constexpr int kPassRows = kThreads / kLanes;
  constexpr int kPasses = kRows / kPassRows;
  __shared__ uint32_t s_max[kThreads / 32];
  __shared__ __align__(16) uint32_t s_columns[kPassRows][kDim];

  const AttentionParams& p = w.a.p;
  int64_t index = work_item();
  if (index == 0 && threadIdx.x == 0) *w.next = w.blocks;
  const bool is_q = index < w.blocks_q, is_k = !is_q && index < w.blocks_q + w.blocks_k, is_v = !is_q && !is_k;
  const ScaledTensor& to = is_q ? w.q : is_k ? w.k : w.v;
  index -= is_q ? 0 : is_k ? w.blocks_q : w.blocks_q + w.blocks_k;
  const int64_t head_idx = index / to.tiles;
  if (head_idx >= to.heads) return;
  const int64_t heads = is_q ? p.heads : p.kv_heads, b = head_idx / heads, h = head_idx % heads;
  const int len = static_cast<int>(to.len), row0 = static_cast<int>(index % to.tiles) * kRows;
  int first = 0, last = len;  // rows that count; keys that no query sees do not, and may hold anything
  if (!is_q) {
    const KeyBand band = key_band(p, b);
    first = band.first(0);
    last = min(len, band.last(static_cast<int>(p.q_len) - 1));
  }
  if (row0 >= last || row0 + kRows <= first) return;

  const int thread_idx = static_cast<int>(threadIdx.x);
  const int thread_row = row0 + thread_idx / kLanes, col = thread_idx % kLanes * 4;
  const int dim = static_cast<int>(is_v ? p.v_head_dim : p.head_dim);
  const bool packs = (w.a.packs & (is_q ? kPacksQ : is_k ? kPacksK : kPacksV)) != 0;
  const float* const q = static_cast<const float*>(p.q) + b * p.q_strides.batch + h * p.q_strides.head;
  const KeyRows<float> keys = is_v ? v_rows<float>(p, b, h) : k_rows<float>(p, b, h);
  float x[kPasses][4];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int j = thread_row + i * kPassRows;
    const int valid = j >= first && j < last ? dim - col : 0;
    const float* const from = (is_q ? q + j * p.q_strides.seq : keys.row(j)) + col;
    const Pack<float> pack = packs && valid > 0 ? load_pack(from) : load_pack_guarded(from, 0, valid, 0.0F);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[i][e] = pack.v[e];
  }

  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) largest = max(largest, magnitude_bits(x[i][e]));
  }
  largest = __reduce_max_sync(kFullWarp, largest);
  if (thread_idx % 32 == 0) s_max[thread_idx / 32] = largest;
  if (is_v) {
    uint32_t columns[4] = {};
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) columns[e] = max(columns[e], magnitude_bits(x[i][e]));
    }
    *reinterpret_cast<uint4*>(&s_columns[thread_idx / kLanes][col]) =
        make_uint4(columns[0], columns[1], columns[2], columns[3]);
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) largest = max(largest, s_max[warp]);
  // Numbers below 2^-112 stay smaller than the others; a tile of zeros has the factor 1, so that products of factors do
  // not vanish.
  const int shift = largest == 0 ? 0 : min(141 - static_cast<int>(largest >> 23), 126);
  const float scale = exp2_int(shift);

  bool holds = largest < 0x7f800000U;
  if (is_v) {
    const auto reaches = [&](uint32_t bits) { return bits == 0 || __uint_as_float(bits) * scale >= w.least; };
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      uint32_t row_max = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) row_max = max(row_max, magnitude_bits(x[i][e]));
#pragma unroll
      for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
        row_max = max(row_max, __shfl_xor_sync(kFullWarp, row_max, lanes));
      holds &= reaches(row_max);
    }
    if (thread_idx < kDim) {
      uint32_t column_max = 0;
#pragma unroll
      for (int i = 0; i < kPassRows; ++i) column_max = max(column_max, s_columns[i][thread_idx]);
      holds &= reaches(column_max);
    }
    holds = __syncthreads_and(holds);
  }
  if (thread_idx == 0) to.factors[head_idx * to.tiles + row0 / kRows] = holds ? exp2_int(-shift) : NAN;

  if (col >= to.ld) return;
  __half* const out = to.parts + (head_idx * to.len + thread_row) * to.ld + col;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    if (thread_row + i * kPassRows >= len) return;
    float scaled[4];
    uint32_t hi[2], lo[2];
#pragma unroll
    for (int e = 0; e < 4; ++e) scaled[e] = x[i][e] * scale;
#pragma unroll
    for (int e = 0; e < 2; ++e) split_half2(scaled[2 * e], scaled[2 * e + 1], &hi[e], &lo[e]);
    __half* const row = out + i * kPassRows * to.ld;
    *reinterpret_cast<uint2*>(row) = make_uint2(hi[0], hi[1]);
    if constexpr (kParts == 2) *reinterpret_cast<uint2*>(row + to.heads * to.len * to.ld) = make_uint2(lo[0], lo[1]);
  }
}

}  // namespace

Status scale_attention(const AttentionLaunch& a, const ScaledWorkspace& workspace, int parts, int padded_dim,
                       float least, int blocks, const ExecContext& context) {
  ScaleLaunch w;
  w.a = a;
  w.q = workspace.q;
  w.k = workspace.k;
  w.v = workspace.v;
  w.blocks_q = w.q.heads * w.q.tiles;
  w.blocks_k = w.k.heads * w.k.tiles;
  w.next = workspace.next;
  w.blocks = blocks;
  w.least = least;
  const auto kernel = padded_dim == 64 ? (parts == 2 ? attention_scale_kernel<64, 2> : attention_scale_kernel<64, 1>)
                                       : (parts == 2 ? attention_scale_kernel<128, 2> : attention_scale_kernel<128, 1>);
  return launch("attention_scale_kernel", kernel, work_grid(w.blocks_q + w.blocks_k + w.v.heads * w.v.tiles), kThreads,
                0, context, w);
}

}  // namespace ortplugins
