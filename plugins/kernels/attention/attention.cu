// FusedAttention on CUDA cores, in float32 for every element type and head size, and what all CUDA variants share: the
// copy to present_k and present_v, and the merge of launches that are split over the keys.
//
// A block of 16 x 16 threads computes kBlockM = 16 * kRows query rows against tiles of 64 keys. Thread (ty, tx) owns
//   scores  rows ty * kRows + i, keys tx + 16 * j                     (i < kRows, j < 4)
//   y       the same rows, columns 64 * c + 4 * tx .. + 3             (c < kBlockV / 64)
// so that a row's maximum and sum stay within 16 lanes and the factor that rescales y is already in its thread.
// q, k and v pass through shared memory as floats: q and k in slices of 32 of the head, v in slices of 4096 / kBlockV keys.
#include "device/dependent_launch.h"
#include "device/reduce.h"
#include "kernels/attention/attention_device.h"
#include "kernels/attention/variants.h"

namespace ortplugins {
namespace {

constexpr int kThreads = 256;
constexpr int kBlockN = 64;
constexpr int kSliceD = 32;
constexpr int kStrideD = kSliceD + 4;  // rows stay 16-byte aligned, and 8 of them cover all banks
constexpr int kStrideP = kBlockN + 4;
constexpr int kSliceV = 4096;  // floats of v in shared memory

// Eight elements of a row as floats; elements from `valid` on are zero and not read.
template <class T>
__device__ __forceinline__ void load_8(const T* p, int64_t valid, bool packs, float (&out)[8]) {
  if (packs && valid >= 8) {
#pragma unroll
    for (int n = 0; n < 8 / kPackSize<T>; ++n) {
      const Pack<T> pack = load_pack(p + n * kPackSize<T>);
#pragma unroll
      for (int e = 0; e < kPackSize<T>; ++e) out[n * kPackSize<T> + e] = to_float(pack.v[e]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) out[e] = e < valid ? to_float(p[e]) : 0.0F;
  }
}

__device__ __forceinline__ void store_8(float* smem, const float (&v)[8]) {
  *reinterpret_cast<float4*>(smem) = make_float4(v[0], v[1], v[2], v[3]);
  *reinterpret_cast<float4*>(smem + 4) = make_float4(v[4], v[5], v[6], v[7]);
}

__device__ __forceinline__ float element(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

template <class T, int kRows, int kBlockV>
__global__ void __launch_bounds__(kThreads) attention_simt_kernel(const __grid_constant__ AttentionLaunch a) {
  constexpr int kBlockM = 16 * kRows;
  constexpr int kCols = kBlockN / 16;
  constexpr int kVecs = kBlockV / 64;
  constexpr int kSliceKeys = kSliceV / kBlockV;
  constexpr int kSliceFloats = (kBlockM + kBlockN) * kStrideD > kSliceV ? (kBlockM + kBlockN) * kStrideD : kSliceV;
  __shared__ __align__(16) float s_slice[kSliceFloats];        // q and k, then v
  __shared__ __align__(16) float sP[kBlockM][kStrideP];
  __shared__ int s_redo[kBlockM];
  float* const sQ = s_slice;                        // (row, d)
  float* const sK = s_slice + kBlockM * kStrideD;   // (key, d)
  float* const sV = s_slice;                        // (key, column)

  const AttentionParams& p = a.p;
  const int64_t v_tiles = (p.v_head_dim + kBlockV - 1) / kBlockV;
  const int64_t v0 = work_item() % v_tiles * kBlockV;
  AttentionTile tile;
  KeyBand band;
  if (!attention_tile(a, work_item() / v_tiles, kBlockM, kBlockN, &tile, &band)) return;
  const int64_t kv_head = tile.head0 / a.group;
  const int v_cols = static_cast<int>(min(p.v_head_dim - v0, static_cast<int64_t>(kBlockV)));
  const KeyRows<T> k = k_rows<T>(p, tile.b, kv_head), v = v_rows<T>(p, tile.b, kv_head);

  const int thread = static_cast<int>(threadIdx.x);
  const int tx = thread % 16, ty = thread / 16;
  const int load_row = thread / 4, load_d = thread % 4 * 8;

  const int q_row = tile.row0 + load_row;
  const bool loads_q = load_row < kBlockM && q_row < tile.rows;
  const T* const q = static_cast<const T*>(p.q) + tile.b * p.q_strides.batch +
                     (loads_q ? tile.head(p, q_row) * p.q_strides.head + tile.query(p, q_row) * p.q_strides.seq : 0);

  int first[kRows], last[kRows];
  int64_t mask_row[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = tile.row0 + ty * kRows + i;
    const bool valid = r < tile.rows;
    const int query = valid ? tile.query(p, r) : 0;
    first[i] = max(band.first(query), tile.first);
    last[i] = valid ? min(band.last(query), tile.last) : 0;
    mask_row[i] = valid ? mask_row_offset(p, tile.b, tile.head(p, r), query) : 0;
  }

  float row_max[kRows], row_sum[kRows], acc[kRows][kVecs][4];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    row_max[i] = -INFINITY;
    row_sum[i] = 0.0F;
#pragma unroll
    for (int c = 0; c < kVecs; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][c][e] = 0.0F;
    }
  }

  for (int j0 = tile.first; j0 < tile.last; j0 += kBlockN) {
    // Scores.
    float s[kRows][kCols] = {};
    for (int64_t d0 = 0; d0 < p.head_dim; d0 += kSliceD) {
      __syncthreads();
      float x[8];
      const int64_t left = p.head_dim - d0 - load_d;
      if (load_row < kBlockM) {
        load_8(q + d0 + load_d, loads_q ? left : 0, (a.packs & kPacksQ) != 0, x);
        store_8(sQ + load_row * kStrideD + load_d, x);
      }
      const int j = j0 + load_row;
      load_8(j < tile.last ? k.row(j) + d0 + load_d : k.current, j < tile.last ? left : 0, (a.packs & kPacksK) != 0, x);
      store_8(sK + load_row * kStrideD + load_d, x);
      __syncthreads();
#pragma unroll
      for (int d = 0; d < kSliceD; d += 4) {
        float4 rQ[kRows], rK[kCols];
#pragma unroll
        for (int i = 0; i < kRows; ++i) rQ[i] = *reinterpret_cast<const float4*>(sQ + (ty * kRows + i) * kStrideD + d);
#pragma unroll
        for (int n = 0; n < kCols; ++n) rK[n] = *reinterpret_cast<const float4*>(sK + (tx + 16 * n) * kStrideD + d);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int n = 0; n < kCols; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[i][n] = fmaf(element(rQ[i], e), element(rK[n], e), s[i][n]);
          }
        }
      }
    }

    // Online softmax; a row lies in 16 neighbouring lanes.
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float tile_max = -INFINITY;
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        const int j = j0 + tx + 16 * n;
        float t = -INFINITY;
        if (j >= first[i] && j < last[i]) {
          t = to_score<sizeof(T) == 4>(a, s[i][n]);
          if (p.mask_dtype != DType::kNone) t = add_mask(t, mask_value<T>(p, mask_row[i] + j * p.mask_stride_key));
        }
        s[i][n] = t;
        tile_max = fmaxf(tile_max, t);
      }
      const float new_max = fmaxf(row_max[i], warp_max<16>(tile_max));
      const float reference = softmax_reference(new_max);
      const float correction = exp2f(row_max[i] - reference);
      row_max[i] = new_max;
      row_sum[i] *= correction;
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        const float weight = exp2f(s[i][n] - reference);
        row_sum[i] += weight;
        sP[ty * kRows + i][tx + 16 * n] = weight;
      }
#pragma unroll
      for (int c = 0; c < kVecs; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][c][e] *= correction;
      }
    }
    __syncwarp();  // a row of sP is written and read by the same half-warp

    // y += weights * v. Keys past the end are zeros in shared memory: 0 * garbage would be NaN.
    for (int key0 = 0; key0 < kBlockN && j0 + key0 < tile.last; key0 += kSliceKeys) {
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kSliceV / 8 / kThreads; ++n) {
        const int idx = (thread + n * kThreads) * 8;
        const int key = idx / kBlockV, col = idx % kBlockV;
        const int j = j0 + key0 + key;
        float x[8];
        load_8(j < tile.last ? v.row(j) + v0 + col : v.current, j < tile.last ? v_cols - col : 0, (a.packs & kPacksV) != 0, x);
        store_8(sV + idx, x);
      }
      __syncthreads();
#pragma unroll 2
      for (int key = 0; key < kSliceKeys; key += 4) {
        float4 rP[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) rP[i] = *reinterpret_cast<const float4*>(&sP[ty * kRows + i][key0 + key]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int c = 0; c < kVecs; ++c) {
            if (c * 64 < v_cols) {
              const float4 rV = *reinterpret_cast<const float4*>(sV + (key + e) * kBlockV + c * 64 + tx * 4);
#pragma unroll
              for (int i = 0; i < kRows; ++i) {
                const float weight = element(rP[i], e);
                acc[i][c][0] = fmaf(weight, rV.x, acc[i][c][0]);
                acc[i][c][1] = fmaf(weight, rV.y, acc[i][c][1]);
                acc[i][c][2] = fmaf(weight, rV.z, acc[i][c][2]);
                acc[i][c][3] = fmaf(weight, rV.w, acc[i][c][3]);
              }
            }
          }
        }
      }
    }
  }

  // Epilogue.
  if (thread < kBlockM) s_redo[thread] = 0;
  __syncthreads();
  bool redo_any = false;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float sum = warp_sum<16>(row_sum[i]);
    const int r = tile.row0 + ty * kRows + i;
    if (r >= tile.rows) continue;
    const int64_t h = tile.head(p, r), query = tile.query(p, r);
    const int64_t slot = ((tile.b * p.heads + h) * p.q_len + query) * a.splits + tile.split;
    T* const y = static_cast<T*>(p.y) + tile.b * p.y_strides.batch + h * p.y_strides.head + query * p.y_strides.seq + v0;
    if (a.splits > 1 && tx == 0 && v0 == 0) a.partial_ms[slot] = make_float2(row_max[i], sum);
    bool redo = false;
#pragma unroll
    for (int c = 0; c < kVecs; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int col = c * 64 + tx * 4 + e;
        if (col >= v_cols) continue;
        if (a.splits > 1) {
          a.partial_y[slot * p.v_head_dim + v0 + col] = acc[i][c][e];
        } else {
          redo |= isnan(acc[i][c][e]) && sum > 0.0F;
          y[col] = from_float<T>(sum == 0.0F ? 0.0F : acc[i][c][e] / sum);
        }
      }
    }
    if (redo) s_redo[ty * kRows + i] = 1;
    redo_any |= redo;
  }
  if (__syncthreads_or(redo_any)) {
    for (int row = thread / 32; row < kBlockM; row += kThreads / 32) {
      if (s_redo[row] == 0) continue;
      const int r = tile.row0 + row;
      attend_row_exactly<T>(a, tile.b, tile.head(p, r), tile.query(p, r), v0, v0 + v_cols);
    }
  }
}

template <class T, int kRows, int kBlockV>
Status launch_simt(AttentionLaunch a, const ExecContext& context) {
  const AttentionParams& p = a.p;
  a.tiles = ceil_div(p.q_len * a.tile_heads, 16 * kRows);
  const int64_t blocks = a.tiles * (p.heads / a.tile_heads) * p.batch * a.splits * ceil_div(p.v_head_dim, kBlockV);
  return launch("attention_simt_kernel", attention_simt_kernel<T, kRows, kBlockV>, work_grid(blocks), kThreads, 0, context, a);
}

// --- present_k and present_v --------------------------------------------------------------------------------------------

struct PresentCopy {
  const void* past;
  const void* current;
  void* present;
  AttentionStrides strides;  // of `current`; like all sizes here in units of the copy
  int64_t kv_heads, past_len, total_len, dim, units;
};

template <class Unit>
__global__ void __launch_bounds__(kThreads) attention_present_kernel(const __grid_constant__ PresentCopy c) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < c.units; i += step) {
    const int64_t d = i % c.dim, row = i / c.dim;
    const int64_t j = row % c.total_len, b_head = row / c.total_len;
    const Unit* from = j < c.past_len
                           ? static_cast<const Unit*>(c.past) + (b_head * c.past_len + j) * c.dim
                           : static_cast<const Unit*>(c.current) + b_head / c.kv_heads * c.strides.batch +
                                 b_head % c.kv_heads * c.strides.head + (j - c.past_len) * c.strides.seq;
    static_cast<Unit*>(c.present)[i] = from[d];
  }
}

Status copy_present(const AttentionParams& p, const void* past, const void* current, AttentionStrides strides, int64_t dim,
                    void* present, const ExecContext& context) {
  const int64_t elements = p.batch * p.kv_heads * p.total_len() * dim;
  if (present == nullptr || elements == 0) return {};
  const auto size = static_cast<int64_t>(size_of(p.dtype));
  const bool packs = rows_in_packs(current, strides, dim, size) && is_aligned(past, kPackBytes) && is_aligned(present, kPackBytes);
  const int64_t per_unit = packs ? kPackBytes / size : 1;
  strides = {strides.batch / per_unit, strides.seq / per_unit, strides.head / per_unit};
  const PresentCopy c = {past, current, present, strides, p.kv_heads, p.past_len, p.total_len(), dim / per_unit, elements / per_unit};
  const dim3 grid = grid_size(ceil_div(c.units, kThreads), static_cast<int64_t>(context.device->sm_count) * 32);
  const auto kernel = packs ? attention_present_kernel<uint4> : size == 4 ? attention_present_kernel<uint32_t> : attention_present_kernel<uint16_t>;
  return launch("attention_present_kernel", kernel, grid, kThreads, 0, context, c);
}

// --- Merge of split launches ----------------------------------------------------------------------------------------------

constexpr int kMergeThreads = 128;
constexpr int kMergeLoads = 12;

template <class T>
__global__ void __launch_bounds__(kMergeThreads) attention_merge_kernel(const __grid_constant__ AttentionLaunch a) {
  const AttentionParams& p = a.p;
  const int64_t row = work_item();  // (batch, head, query)
  if (row >= p.batch * p.heads * p.q_len) return;
  const int64_t query = row % p.q_len, h = row / p.q_len % p.heads, b = row / p.q_len / p.heads;
  const float2* const ms = a.partial_ms + row * a.splits;
  const float* const part = a.partial_y + row * a.splits * p.v_head_dim;
  __shared__ float s_weight[kMaxSplits];
  const int lane_idx = static_cast<int>(threadIdx.x) % 32;
  let_next_kernel_start();
  wait_for_previous_kernel();
  // The kernel is a chain of latencies: parts are loaded many at a time, the first of them before their weights are known.
  float parts[kMergeLoads];
  const auto load_parts = [&](int64_t d, int split0) {
#pragma unroll
    for (int i = 0; i < kMergeLoads; ++i) {
      parts[i] = split0 + i < a.splits && d < p.v_head_dim ? part[(split0 + i) * p.v_head_dim + d] : 0.0F;
    }
  };
  load_parts(threadIdx.x, 0);
  // Each warp for itself, a lane for each split, so that the loads do not follow each other.
  float max = -INFINITY;
  for (int s = lane_idx; s < a.splits; s += 32) max = fmaxf(max, ms[s].x);
  const float reference = softmax_reference(warp_max(max));
  float sum = 0.0F;
  for (int s = lane_idx; s < a.splits; s += 32) {
    const float weight = exp2f(ms[s].x - reference);
    sum += ms[s].y * weight;
    if (threadIdx.x < 32) s_weight[s] = weight;
  }
  sum = warp_sum(sum);
  __syncthreads();
  T* const y = static_cast<T*>(p.y) + b * p.y_strides.batch + h * p.y_strides.head + query * p.y_strides.seq;
  bool redo = false;
  for (int64_t d = threadIdx.x; d < p.v_head_dim; d += kMergeThreads) {
    float acc = 0.0F;
    for (int split0 = 0; split0 < a.splits; split0 += kMergeLoads) {
      if (split0 > 0 || d >= kMergeThreads) load_parts(d, split0);
#pragma unroll
      for (int i = 0; i < kMergeLoads; ++i) {
        if (split0 + i < a.splits) acc += parts[i] * s_weight[split0 + i];
      }
    }
    redo |= isnan(acc) && sum > 0.0F;
    y[d] = from_float<T>(sum == 0.0F ? 0.0F : acc / sum);
  }
  if (__syncthreads_or(redo) && threadIdx.x < 32) attend_row_exactly<T>(a, b, h, query, 0, p.v_head_dim);
}

int64_t simt_split_blocks(const AttentionParams& p) { return ceil_div(p.q_len * (p.heads / p.kv_heads), 16) * p.kv_heads * p.batch; }

int simt_splits(const AttentionParams& p, const DeviceInfo& device) {
  if (p.kv_heads == 0) return 1;
  return choose_splits(p, device, simt_split_blocks(p), 4, 4 * kBlockN);
}

}  // namespace

Status attention_prologue(const AttentionParams& p, const ExecContext& context, bool* done) {
  *done = p.batch * p.heads * p.q_len * p.v_head_dim == 0;
  if (p.total_len() > kMaxAttentionLen) return Status::unsupported("k", "CUDA kernels take at most {} keys, got {}", {kMaxAttentionLen, p.total_len()});
  if (p.q_len * (p.kv_heads > 0 ? p.heads / p.kv_heads : 1) > kMaxAttentionLen) {
    return Status::unsupported("q", "CUDA kernels take at most {} queries in all heads of a group", {kMaxAttentionLen});
  }
  ORTPLUGINS_RETURN_IF_ERROR(copy_present(p, p.past_k, p.k, p.k_strides, p.head_dim, p.present_k, context));
  return copy_present(p, p.past_v, p.v, p.v_strides, p.v_head_dim, p.present_v, context);
}

Status launch_attention_merge(const AttentionLaunch& a, const ExecContext& context) {
  const dim3 grid = work_grid(a.p.batch * a.p.heads * a.p.q_len);
  return dispatch(a.p.dtype, [&](auto tag) {
    return launch_with({1, true}, "attention_merge_kernel", attention_merge_kernel<typename decltype(tag)::type>, grid, kMergeThreads, 0,
                       context, a);
  });
}

Status launch_attention_simt(const AttentionParams& params, const ExecContext& context) {
  bool done = false;
  ORTPLUGINS_RETURN_IF_ERROR(attention_prologue(params, context, &done));
  if (done) return {};
  const AttentionLaunch a = make_attention_launch(params);
  return dispatch(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    // Wide values: 32 rows, so that a thread's part of y stays at 64 registers.
    return params.v_head_dim <= 128 ? launch_simt<T, 4, 128>(a, context) : launch_simt<T, 2, 512>(a, context);
  });
}

int64_t attention_simt_split_workspace(const AttentionParams& params, const DeviceInfo& device) {
  return SplitWorkspace(params, simt_splits(params, device)).bytes;
}

Status launch_attention_simt_split(const AttentionParams& params, const ExecContext& context) {
  bool done = false;
  ORTPLUGINS_RETURN_IF_ERROR(attention_prologue(params, context, &done));
  if (done) return {};
  AttentionLaunch a = make_attention_launch(params);
  a.tile_heads = a.group;
  ORTPLUGINS_RETURN_IF_ERROR(split_launch(simt_splits(params, *context.device), context, &a));
  ORTPLUGINS_RETURN_IF_ERROR(dispatch(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_simt<T, 1, 256>(a, context);
  }));
  return a.splits > 1 ? launch_attention_merge(a, context) : Status{};
}

}  // namespace ortplugins
