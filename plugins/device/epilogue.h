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

template <int kCount>
__device__ __forceinline__ void activate_all(float (&v)[kCount], Activation activation) {
  switch (activation) {
#define ORTPLUGINS_ACTIVATION(name)                                             \
  case Activation::name:                                                        \
    _Pragma("unroll") for (int i = 0; i < kCount; ++i) v[i] = activate(v[i], Activation::name); \
    break;
    ORTPLUGINS_ACTIVATION(kRelu)
    ORTPLUGINS_ACTIVATION(kGelu)
    ORTPLUGINS_ACTIVATION(kGeluTanh)
    ORTPLUGINS_ACTIVATION(kSilu)
    ORTPLUGINS_ACTIVATION(kQuickGelu)
#undef ORTPLUGINS_ACTIVATION
    case Activation::kNone:
      break;
  }
}

// A float tile of kBlockM x kBlockN in shared memory, on its way to y.
template <int kBlockM, int kBlockN, int kThreads>
struct EpilogueTile {
  using Layout = PairLayout<kBlockN * 4>;
  static constexpr int kBytes = kBlockM * kBlockN * 4;

  // Columns col and col + 1 (col even), and col to col + 3 (col a multiple of 4), of one row.
  __device__ __forceinline__ static void put(char* tile, int row, int col, float v0, float v1) {
    *reinterpret_cast<float2*>(tile + Layout::offset(row, col / 4) + col % 4 * 4) = make_float2(v0, v1);
  }
  __device__ __forceinline__ static void put(char* tile, int row, int col, float4 v) {
    *reinterpret_cast<float4*>(tile + Layout::offset(row, col / 4)) = v;
  }

  // Finishes the tile whose first element is (first_row, first_col) of y. A barrier must lie between `put` and this.
  template <class T>
  __device__ __forceinline__ static void store(const char* tile, const EpilogueArgs<T>& args, int64_t first_row, int64_t first_col) {
    constexpr int kSize = kPackSize<T>;
    constexpr int kRowPacks = kBlockN / kSize;
    const bool y_aligned = args.cols % kSize == 0 && pack_shift(args.y) == 0;
    const bool residual_aligned = args.cols % kSize == 0 && pack_shift(args.residual) == 0;
    const bool bias_aligned = args.bias_stride_n == 1 && args.bias_stride_m % kSize == 0 && pack_shift(args.bias) == 0;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kBlockM * kRowPacks; i += kThreads) {
      const int tile_row = i / kRowPacks, tile_col = i % kRowPacks * kSize;
      const int64_t row = first_row + tile_row, col = first_col + tile_col;
      if (row >= args.rows || col >= args.cols) continue;
      const int count = args.cols - col < kSize ? static_cast<int>(args.cols - col) : kSize;
      const bool whole = count == kSize;
      float v[kSize];
#pragma unroll
      for (int j = 0; j < kSize; j += 4) {
        const float4 acc = *reinterpret_cast<const float4*>(tile + Layout::offset(tile_row, (tile_col + j) / 4));
        v[j] = args.alpha * acc.x;
        v[j + 1] = args.alpha * acc.y;
        v[j + 2] = args.alpha * acc.z;
        v[j + 3] = args.alpha * acc.w;
      }
      if (args.bias != nullptr) {
        const T* bias = args.bias + row * args.bias_stride_m + col * args.bias_stride_n;
        Pack<T> pack;
        if (whole && bias_aligned) {
          pack = load_pack(bias);
        } else {
#pragma unroll
          for (int j = 0; j < kSize; ++j) pack.v[j] = j < count ? bias[j * args.bias_stride_n] : from_float<T>(0.0F);
        }
#pragma unroll
        for (int j = 0; j < kSize; ++j) v[j] += args.beta * to_float(pack.v[j]);
      }
      const int64_t offset = row * args.cols + col;
      if (args.residual != nullptr) {
        const Pack<T> pack = whole && residual_aligned ? load_pack(args.residual + offset)
                                                       : load_pack_guarded(args.residual + offset, 0, count, from_float<T>(0.0F));
#pragma unroll
        for (int j = 0; j < kSize; ++j) v[j] += to_float(pack.v[j]);
      }
      activate_all(v, args.activation);
      Pack<T> out;
#pragma unroll
      for (int j = 0; j < kSize; ++j) out.v[j] = from_float<T>(v[j]);
      if (whole && y_aligned) {
        store_pack(args.y + offset, out);
      } else {
        store_pack_guarded(args.y + offset, out, 0, count);
      }
    }
  }
};

// Which tile of y a block works on. Blocks that run at the same time take tiles that are close in both directions: kGroup
// rows of tiles are walked column by column, so that their parts of a and b are found in L2.
struct TileIndex {
  int64_t m, n;
};
__device__ __forceinline__ TileIndex grouped_tile(int64_t index, int64_t tiles_m, int64_t tiles_n) {
  constexpr int64_t kGroup = 8;
  const int64_t group = index / (kGroup * tiles_n), first_m = group * kGroup;
  const int64_t height = tiles_m - first_m < kGroup ? tiles_m - first_m : kGroup;
  const int64_t within = index - group * kGroup * tiles_n;
  return {first_m + within % height, within / height};
}

}  // namespace ortplugins
