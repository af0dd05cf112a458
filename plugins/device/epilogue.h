// The end of a matrix product: y = activation(alpha * acc + beta * bias + residual), converted once at the very end.
//
// Accumulators go through shared memory, whatever their fragment layout, so that global memory sees 16-byte accesses in
// runs and the code of the activations exists once.
#pragma once

#include <cstdint>

#include "device/layout.h"
#include "device/math.h"
#include "device/pack.h"

namespace ortplugins {

template <class T>
struct EpilogueArgs {
  float alpha, beta;
  const T* bias;      // element (i, j) at i * bias_stride_m + j * bias_stride_n; null: none
  int64_t bias_stride_m, bias_stride_n;
  const T* residual;  // laid out as y; null: none
  T* y;               // rows x cols, leading dimension cols
  int64_t rows, cols;
  Activation activation;
};

// For results of type T.
template <class T, Activation kActivation, int kCount>
__device__ __forceinline__ void activate_each(float (&v)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = sizeof(T) == 2 ? activate_approx(v[i], kActivation) : activate(v[i], kActivation);
}
template <class T, int kCount>
__device__ __forceinline__ void activate_all(float (&v)[kCount], Activation activation) {
  // The most frequent ones do not go through the table of jumps.
  if (activation == Activation::kNone) return;
  if (activation == Activation::kGelu) return activate_each<T, Activation::kGelu>(v);
  switch (activation) {
    case Activation::kRelu: return activate_each<T, Activation::kRelu>(v);
    case Activation::kGeluTanh: return activate_each<T, Activation::kGeluTanh>(v);
    case Activation::kSilu: return activate_each<T, Activation::kSilu>(v);
    case Activation::kQuickGelu: return activate_each<T, Activation::kQuickGelu>(v);
    default: break;
  }
}

// A float tile of kBlockM x kBlockN in shared memory, on its way to y. kBatch: rows of which a thread has loads of the
// residual in flight at once; fewer need fewer registers.
template <int kBlockM, int kBlockN, int kThreads, int kBatch = 4>
struct EpilogueTile {
  using Layout = PairLayout<kBlockN * 4>;
  static constexpr int kRowBytes = kBlockN * 4;
  static constexpr int kBytes = kBlockM * kRowBytes;

  // Columns col and col + 1 (col even), and col to col + 3 (col a multiple of 4), of one row.
  __device__ __forceinline__ static void put(char* tile, int row, int col, float v0, float v1) {
    *reinterpret_cast<float2*>(tile + Layout::offset(row, col / 4) + col % 4 * 4) = make_float2(v0, v1);
  }
  __device__ __forceinline__ static void put(char* tile, int row, int col, float4 v) {
    *reinterpret_cast<float4*>(tile + Layout::offset(row, col / 4)) = v;
  }

  // Columns col to col + 3 of one row.
  __device__ __forceinline__ static float4 get(const char* tile, int row, int col) {
    return *reinterpret_cast<const float4*>(tile + Layout::offset(row, col / 4));
  }

  // Finishes the tile whose first element is (first_row, first_col) of y. A barrier must lie between `put` and this.
  template <class T>
  __device__ __forceinline__ static void store(char* tile, const EpilogueArgs<T>& args, int64_t first_row, int64_t first_col,
                                               int thread_idx = static_cast<int>(threadIdx.x)) {
    store_rows(tile, [tile](int row, int col) { return get(tile, row, col); }, args, first_row, first_col, 0, kBlockM, thread_idx);
  }

  // As `store`, for rows row_begin to row_end of the tile, whose values are read(row, col) to (row, col + 3). The rows of
  // `tile` itself are scratch: values before the activation wait there, so that its code stands in a loop and not once for
  // each of a thread's rows.
  template <class T, class Read>
  __device__ __forceinline__ static void store_rows(char* tile, const Read& read, const EpilogueArgs<T>& args, int64_t first_row,
                                                    int64_t first_col, int row_begin, int row_end, int thread_idx) {
    constexpr int kSize = kPackSize<T>;
    constexpr int kRowPacks = kBlockN / kSize;
    constexpr int kRowStep = kThreads / kRowPacks;
    static_assert(kThreads % kRowPacks == 0, "a thread stays in its columns");
    const int tile_col = thread_idx % kRowPacks * kSize;
    const int64_t col = first_col + tile_col;
    if (col >= args.cols) return;
    const int count = args.cols - col < kSize ? static_cast<int>(args.cols - col) : kSize;
    const bool whole = count == kSize;
    const bool y_aligned = whole && args.cols % kSize == 0 && pack_shift(args.y) == 0;
    const bool residual_aligned = whole && args.cols % kSize == 0 && pack_shift(args.residual) == 0;
    const bool row_bias = args.bias != nullptr && args.bias_stride_m != 0;
    float column_bias[kSize] = {};
    if (args.bias != nullptr && !row_bias) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) column_bias[j] = j < count ? args.beta * to_float(args.bias[(col + j) * args.bias_stride_n]) : 0.0F;
    }
    // What is rare or long stands in a loop, for the sake of the instruction cache: small products run all code just once.
    const bool direct = y_aligned && !row_bias && args.activation == Activation::kNone && (args.residual == nullptr || residual_aligned);
    const int rows = args.rows - first_row < row_end ? static_cast<int>(args.rows - first_row) : row_end;
    // Two reads of half a 32-byte pack would meet in the banks of every second lane: such lanes read the halves in turn.
    const bool swap = kSize == 8 && (thread_idx & 4) != 0;

#pragma unroll 1
    for (int row0 = row_begin + thread_idx / kRowPacks; row0 < rows; row0 += kBatch * kRowStep) {
      const int64_t offset = (first_row + row0) * args.cols + col, step = kRowStep * args.cols;
      Pack<T> residual[kBatch];
      if (args.residual != nullptr && residual_aligned) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (row0 + i * kRowStep < rows) residual[i] = load_pack(args.residual + offset + i * step);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = row0 + i * kRowStep;
        if (row >= rows) break;
        float v[kSize];
        if constexpr (kSize == 8) {
          const float4 first = read(row, tile_col + (swap ? 4 : 0)), second = read(row, tile_col + (swap ? 0 : 4));
          unpack(v, swap ? second : first);
          unpack(v + 4, swap ? first : second);
        } else {
          unpack(v, read(row, tile_col));
        }
#pragma unroll
        for (int j = 0; j < kSize; ++j) v[j] = args.alpha * v[j] + column_bias[j];
        if (args.residual != nullptr && residual_aligned) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) v[j] += to_float(residual[i].v[j]);
        }
        if (direct) {
          store_pack(args.y + offset + i * step, converted<T>(v));
        } else {
#pragma unroll
          for (int j = 0; j < kSize; j += 4) put(tile, row, tile_col + j, make_float4(v[j], v[j + 1], v[j + 2], v[j + 3]));
        }
      }
      if (direct) continue;
#pragma unroll 1
      for (int i = 0; i < kBatch; ++i) {
        const int row = row0 + i * kRowStep;
        if (row >= rows) break;
        const int64_t at = offset + i * step;
        float v[kSize];
#pragma unroll
        for (int j = 0; j < kSize; j += 4) unpack(v + j, get(tile, row, tile_col + j));
        if (row_bias) {
          const T* bias = args.bias + (first_row + row) * args.bias_stride_m + col * args.bias_stride_n;
#pragma unroll
          for (int j = 0; j < kSize; ++j) v[j] += j < count ? args.beta * to_float(bias[j * args.bias_stride_n]) : 0.0F;
        }
        if (args.residual != nullptr && !residual_aligned) {
          const Pack<T> pack = load_pack_guarded(args.residual + at, 0, count, from_float<T>(0.0F));
#pragma unroll
          for (int j = 0; j < kSize; ++j) v[j] += to_float(pack.v[j]);
        }
        activate_all<T>(v, args.activation);
        if (y_aligned) {
          store_pack(args.y + at, converted<T>(v));
        } else {
          store_pack_guarded(args.y + at, converted<T>(v), 0, count);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static void unpack(float* v, float4 x) {
    v[0] = x.x;
    v[1] = x.y;
    v[2] = x.z;
    v[3] = x.w;
  }
  template <class T>
  __device__ __forceinline__ static Pack<T> converted(const float (&v)[kPackSize<T>]) {
    Pack<T> pack;
#pragma unroll
    for (int j = 0; j < kPackSize<T>; ++j) pack.v[j] = from_float<T>(v[j]);
    return pack;
  }
};

// Which tile of y a block works on. Blocks that run at the same time take tiles that are close in both directions: kGroup
// rows of tiles are walked column by column, so that their parts of a and b are found in L2.
struct TileIndex {
  int64_t m, n;
};
template <class Int>
__device__ __forceinline__ TileIndex grouped_tile(Int index, Int tiles_m, Int tiles_n) {
  constexpr Int kGroup = 8;
  const Int group = index / (kGroup * tiles_n), first_m = group * kGroup;
  const Int height = tiles_m - first_m < kGroup ? tiles_m - first_m : kGroup;
  const Int within = index - group * kGroup * tiles_n;
  return {first_m + within % height, within / height};
}

}  // namespace ortplugins
