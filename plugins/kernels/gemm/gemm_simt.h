// What the FFMA kernels share: the tiles of operands in shared memory, and a thread's products.
#pragma once

#include "device/cp_async.h"
#include "device/tile_copy.h"
#include "kernels/gemm/gemm_cuda.h"

namespace ortplugins {

// kBlocks: on a multiprocessor.
template <int kBlockMValue, int kBlockNValue, int kBlockKValue, int kStagesValue, int kBlocksValue, int kWarpsMValue = 2, int kWarpNValue = 32>
struct SimtConfig {
  static constexpr int kBlockM = kBlockMValue, kBlockN = kBlockNValue, kBlockK = kBlockKValue;
  static constexpr int kStages = kStagesValue, kBlocks = kBlocksValue;
  static constexpr int kWarpsM = kWarpsMValue, kWarpN = kWarpNValue, kWarpsN = kBlockN / kWarpN, kThreads = 32 * kWarpsM * kWarpsN;
  // Lanes stand 8 x 4 or 4 x 8. A thread has two quads beside each other, and the others below; between them are the quads of
  // the other lanes.
  static constexpr int kWarpM = kBlockM / kWarpsM, kLanesN = kWarpN / 8;
  static constexpr int kStepM = 128 / kLanesN, kStepN = 4 * kLanesN, kQuadsM = kWarpM / kStepM, kQuadsN = 2;
  static constexpr int kThreadM = 4 * kQuadsM, kThreadN = 4 * kQuadsN;
  // A row of shared memory: the elements of one k, and 4 of padding. 8 lanes along k and 4 along m that transpose write to
  // 32 different banks, and rows stay 16-byte aligned for float4.
  static constexpr int kRowA = kBlockM + 4, kRowB = kBlockN + 4;
  static constexpr int kBytesA = kBlockK * kRowA * 4, kStageBytes = kBytesA + kBlockK * kRowB * 4;
  using TileC = EpilogueTile<kBlockM, kBlockN, kThreads>;
  static constexpr int kSmemBytes = kStages * kStageBytes + TileC::kBytes;
  // Every 1024 of k the sums are added to the tile of y and begin again from zero: one long sum would lose bits with every
  // addition. H200, max abs / (|A||B|) with k = 8192: 7.2e-8, of positive products 8.1e-7; cuBLAS 3.7e-7 and 6.2e-6. Every 512
  // would halve the errors and cost 1 % of the time.
  static constexpr int kSumTiles = 1024 / kBlockK;
};

// Brings kBlockK x kMajor of an operand to shared memory as (k, m), kThreads threads from kFirstThread on together.
template <int kMajor, int kBlockK, bool kAlongK, int kThreads, int kFirstThread = 0>
class SimtCopy {
  static constexpr int kRow = kMajor + 4;
  // Stored along k: element (m, k) by lane k % 8 of thread row m, so that a warp reads 32 bytes of each of 4 rows. Else
  // 16-byte chunks, kMajor / 4 of them in a row of k.
  static constexpr int kRowThreads = kAlongK ? 8 : kMajor / 4;
  static constexpr int kPassRows = kThreads / kRowThreads;  // of m in one pass; of k if not along it
  static constexpr int kPasses = (kAlongK ? kMajor : kBlockK) / kPassRows;
  static constexpr int kCopies = kAlongK ? kPasses * kBlockK / 8 : kPasses;  // of a thread for one tile
  // Copies at one step of the products. The compiler puts three empty instructions between reads of shared memory and copies.
  static constexpr int kGroup = 4, kGroups = (kCopies + kGroup - 1) / kGroup;
  static_assert(kPassRows * kRowThreads == kThreads && kPasses * kPassRows == (kAlongK ? kMajor : kBlockK), "whole passes");

 public:
  // `base` is the first element of the block's rows, `major` how many rows of m or n there are from it.
  __device__ __forceinline__ SimtCopy(const float* base, int64_t ld, int64_t major)
      : step_(kPassRows * ld), major_(major < kMajor ? static_cast<int>(major) : kMajor), alignment_(row_alignment(base, ld)) {
    source_ = base + row() * ld + within();
    target_ = (k_idx() * kRow + major_idx()) * 4;
  }

  // Begins the copy of the next tile, of which `k_left` elements of k exist; 0: there is no tile. Most tiles are whole, and
  // `copy_step` brings them between the products; the others are brought here, which may take longer.
  __device__ __forceinline__ void begin(uint32_t smem, int k_left) {
    whole_ = major_ == kMajor && k_left == kBlockK && (kAlongK || alignment_ == 16);
    if (!whole_ && k_left > 0) copy_guarded(smem, k_left);
  }
  // Step `step` (known at compile time) of kBlockK.
  __device__ __forceinline__ void copy_step(uint32_t smem, int step) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i / kGroup * kBlockK / kGroups != step) continue;
      if constexpr (kAlongK) {
        constexpr int kParts = kBlockK / 8;
        const int pass = i / kParts, k = i % kParts * 8;
        cp_async_4_if(whole_, smem + target_ + (k * kRow + kPassRows * pass) * 4, source_ + pass * step_ + k);
      } else {
        cp_async_16_if(whole_, smem + target_ + i * kPassRows * kRow * 4, source_ + i * step_);
      }
    }
  }
  // Without products in between.
  __device__ __forceinline__ void copy_and_advance(uint32_t smem, int k_left) {
    begin(smem, k_left);
#pragma unroll
    for (int step = 0; step < kBlockK; ++step) copy_step(smem, step);
    advance();
  }
  __device__ __forceinline__ void advance() { source_ += kAlongK ? kBlockK : kPasses * step_; }

 private:
  __device__ __forceinline__ static int thread_idx() { return static_cast<int>(threadIdx.x) - kFirstThread; }
  __device__ __forceinline__ static int row() { return thread_idx() / kRowThreads; }
  __device__ __forceinline__ static int within() { return thread_idx() % kRowThreads * (kAlongK ? 1 : 4); }
  __device__ __forceinline__ static int k_idx() { return kAlongK ? within() : row(); }
  __device__ __forceinline__ static int major_idx() { return kAlongK ? row() : within(); }

  __device__ __forceinline__ void copy_guarded(uint32_t smem, int k_left) const {
    const uint32_t target = smem + target_;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      if constexpr (kAlongK) {
        const bool row_exists = major_idx() + pass * kPassRows < major_;
#pragma unroll 1
        for (int k = 0; k < kBlockK; k += 8) {
          cp_async_4(target + (k * kRow + kPassRows * pass) * 4, source_ + pass * step_ + k, row_exists && k_idx() + k < k_left ? 4 : 0);
        }
      } else {
        const int bytes = k_idx() + pass * kPassRows < k_left ? 4 * (major_ - major_idx()) : 0;
        copy_chunk(target + pass * kPassRows * kRow * 4, source_ + pass * step_, bytes < 0 ? 0 : bytes < 16 ? bytes : 16, alignment_);
      }
    }
  }

  const float* source_;
  int64_t step_;  // between this thread's rows
  int target_, major_, alignment_;
  bool whole_ = false;
};

// A thread's quads of the block's tile of y.
template <class C>
struct SimtProducts {
  using TileC = typename C::TileC;
  int thread_m, thread_n;
  float rA[2][C::kThreadM], rB[2][C::kThreadN];  // double-buffered over k
  float acc[C::kThreadM][C::kThreadN];           // the sums of column j are in acc[.][j ^ 1]

  __device__ __forceinline__ SimtProducts() {
    const int lane_idx = static_cast<int>(threadIdx.x) % 32, warp_idx = static_cast<int>(threadIdx.x) / 32;
    // Neighbouring lanes are interleaved over m and n so that the float4 reads of eight lanes touch few different words.
    const int of_eight = lane_idx >> 1 & 7, of_four = (lane_idx & 1) | (lane_idx >> 3 & 2);
    thread_m = warp_idx / C::kWarpsN * C::kWarpM + (C::kLanesN == 4 ? of_eight : of_four) * 4;
    thread_n = warp_idx % C::kWarpsN * C::kWarpN + (C::kLanesN == 4 ? of_four : of_eight) * 4;
    clear();
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < C::kThreadM; ++i) {
#pragma unroll
      for (int j = 0; j < C::kThreadN; ++j) acc[i][j] = 0.0F;
    }
  }
  // Reads the fragments of one k of a stage.
  __device__ __forceinline__ void load(const char* stage, int k) {
    const auto* sA = reinterpret_cast<const float*>(stage) + k * C::kRowA + thread_m;
    const auto* sB = reinterpret_cast<const float*>(stage + C::kBytesA) + k * C::kRowB + thread_n;
#pragma unroll
    for (int quad = 0; quad < C::kQuadsM; ++quad) *reinterpret_cast<float4*>(&rA[k & 1][4 * quad]) = *reinterpret_cast<const float4*>(sA + C::kStepM * quad);
#pragma unroll
    for (int quad = 0; quad < C::kQuadsN; ++quad) *reinterpret_cast<float4*>(&rB[k & 1][4 * quad]) = *reinterpret_cast<const float4*>(sB + C::kStepN * quad);
  }
  // Rows are walked to and fro, so that an element of a stays an operand over a row, and one of b at its ends: fewer
  // registers are read (4096 x 4096 x 4096: 1.6 % of the time). float4 puts b_j in a register of the parity of j, and the
  // sums, too; moved by one they lie in the other bank of registers.
  __device__ __forceinline__ void multiply(int k) {
#pragma unroll
    for (int i = 0; i < C::kThreadM; ++i) {
#pragma unroll
      for (int step = 0; step < C::kThreadN; ++step) {
        const int j = i % 2 == 0 ? step : C::kThreadN - 1 - step;
        acc[i][j ^ 1] = fmaf(rA[k & 1][i], rB[k & 1][j], acc[i][j ^ 1]);
      }
    }
  }
  // Adds the sums to the tile of y, or begins it with them.
  __device__ __forceinline__ void put(char* tile_c, bool add) const {
#pragma unroll
    for (int i = 0; i < C::kThreadM; ++i) {
      const int row = thread_m + i / 4 * C::kStepM + i % 4;
#pragma unroll
      for (int j = 0; j < C::kThreadN; j += 4) {
        float4 v = make_float4(acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]);
        if (add) {
          const float4 sum = TileC::get(tile_c, row, thread_n + j / 4 * C::kStepN);
          v = make_float4(v.x + sum.x, v.y + sum.y, v.z + sum.z, v.w + sum.w);
        }
        TileC::put(tile_c, row, thread_n + j / 4 * C::kStepN, v);
      }
    }
  }
  // Four columns of the tile of y as `put` leaves them, in their order.
  __device__ __forceinline__ static float4 ordered(float4 v) { return make_float4(v.y, v.x, v.w, v.z); }
};

}  // namespace ortplugins
