// Gemm of float32 by wgmma in tf32, one product or three of them (tf32x3), in one launch.
//
// wgmma takes tf32 tiles in shared memory only along k, and b is stored across it. So a block computes the transposed
// product: the fragments of b^T come from shared memory into registers, where any layout will do, and a, which is stored
// along k, stays in shared memory. A warpgroup (consumer) computes kBlockM rows of 128 columns of y; another brings
// tiles of a and b, 32 deep along k, by TMA (producer). A consumer waits for its fragments, so that a multiprocessor wants
// two: blocks that share it, or where tiles are few the two teams of one block, which take the tiles of k in turn.
//
// Which column of y a row of the transposed product is may be chosen: lane (g, t) reads 16 bytes of row t of b, four
// columns side by side, chunk 4 (g % 2) + g / 2 of 128 bytes, so that eight lanes find eight different chunks whatever the
// swizzle. These columns go to four fragment rows, and in the end the thread holds four neighbouring columns of y.
//
// The blocks of a cluster split k (gemm_layers.h), and each finishes its part of the rows. In the end the stages become the
// block's sums, in the order of the threads that hold them; a warp sends those of the other layers to the same warp there by a
// bulk copy each, waits for its own, and adds up in the order of k. Many tiles are finished out of registers by blocks that walk
// over them.
//
// tf32x3: x = hi + lo, and y = hi lo + lo hi + hi hi. Tensor cores cut off when they add, always towards zero, so that a long
// sum shrinks. Sums leave them every 32 of k, and the small products of a tile come before its four hi hi: of twelve additions
// four are to a sum of full size. H200, k = 768, mean of (y - exact) / exact where all terms are positive, and what y shrinks by
// where they have random signs: -1.2e-7 and 0.9e-7; with sums of 128 of k and the three products of a step in turn -8.3e-7 and
// 5.7e-7; float32 without tensor cores 1e-10.
#include "device/mma.h"
#include "device/shared_memory.h"
#include "device/sm90.h"
#include "device/sm90_tf32.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/gemm_layers.h"

namespace ortplugins {
namespace {

constexpr int kBlockN = 128, kBlockK = 32;
constexpr int kRowBytes = 128;                  // 32 elements of k (a) or of n (b)
constexpr int kBoxBytes = kBlockK * kRowBytes;  // 32 columns of b
constexpr int kTeamThreads = 128;  // of a warpgroup of consumers

struct Tf32Args {
  CUtensorMap a, b;  // (contiguous, rows, matrix)
  bool a_batched, b_batched;
  int stages;
  LayerGrid grid;
};

template <bool kSplit, int kBlockMValue, int kTeamCount>
struct Tf32Gemm {
  static constexpr int kTeams = kTeamCount, kConsumerThreads = kTeams * kTeamThreads, kThreads = kConsumerThreads + 128;
  static constexpr int kMostBlocks = kTeams == 1 ? 2 : 1;  // on a multiprocessor
  static constexpr bool kSplits = kSplit;
  static constexpr int kBlockM = kBlockMValue;
  static constexpr int kTileBBytes = 4 * kBoxBytes, kTileABytes = kBlockM * kRowBytes;
  static constexpr int kStageBytes = kTileBBytes + kTileABytes * (kSplit ? 2 : 1);  // b, a (hi), a (lo)
  static constexpr int kSlots = kBlockM / 4;  // of four columns of y in one row, for each thread
  static constexpr int kSlotBytes = 512;      // of a warp; one after the other
  static constexpr int kTileBytes = 4 * kSlots * kSlotBytes;
  static constexpr int kLeastStages = (2 * kTileBytes - 1) / kStageBytes + 1;  // the stages become the sums, and those that others send
  using Exchange = LayerExchange<4 * kTeams, 1>;                               // its barriers lie behind those of the stages
  static constexpr int kSteps = kBlockK / 8;
  using Stored = std::conditional_t<kSplit, float, RoundedFloat>;
  using Product = WgmmaTf32Registers<kBlockM>;
  using Accumulators = float[2][kBlockM / 2];

  // Four columns of two rows of k: fragment rows g and g + 8 of two products.
  struct Fragments {
    uint32_t r[2][4];
    __device__ __forceinline__ void put(const float4& v, int half) {
      r[0][2 * half] = __float_as_uint(v.x);
      r[0][2 * half + 1] = __float_as_uint(v.y);
      r[1][2 * half] = __float_as_uint(v.z);
      r[1][2 * half + 1] = __float_as_uint(v.w);
    }
  };

  // Reads step `k_step` of the warp's 32 columns. `box` is theirs.
  __device__ __forceinline__ static void load(Fragments& f, uint32_t box, int k_step, int lane_idx) {
    const int g = lane_idx / 4, t = lane_idx % 4, chunk = g % 2 * 4 + g / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 4 * half + t;  // its low three bits: the swizzle
      f.put(load_shared_float4(box + (8 * k_step + row) * kRowBytes + ((chunk ^ row) << 4)), half);
    }
  }
  __device__ __forceinline__ static void load_split(Fragments& hi, Fragments& lo, uint32_t box, int k_step, int lane_idx) {
    Fragments whole;
    load(whole, box, k_step, lane_idx);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const SplitTf32 parts = split_tf32(__uint_as_float(whole.r[i][e]));
        hi.r[i][e] = parts.hi;
        lo.r[i][e] = parts.lo;
      }
    }
  }

  __device__ __forceinline__ static void multiply(Accumulators& acc, const Fragments& f, uint64_t tile_a, int k_step, bool accumulate) {
#pragma unroll
    for (int i = 0; i < 2; ++i) Product::run(acc[i], f.r[i], wgmma_descriptor_at(tile_a, 32 * k_step), accumulate);
  }
  // The tile of a becomes hi, and lo behind it.
  __device__ __forceinline__ static void split_tile_a(uint32_t tile_a, int thread_idx) {
#pragma unroll
    for (int i = 0; i < kTileABytes / 16 / kTeamThreads; ++i) {
      const uint32_t at = tile_a + 16 * (thread_idx + i * kTeamThreads);
      const float4 v = load_shared_float4(at);
      const SplitTf32 x = split_tf32(v.x), y = split_tf32(v.y), z = split_tf32(v.z), w = split_tf32(v.w);
      store_shared(at, make_uint4(x.hi, y.hi, z.hi, w.hi));
      store_shared(at + kTileABytes, make_uint4(x.lo, y.lo, z.lo, w.lo));
    }
    fence_async_proxy();
    named_barrier_sync(2, kTeamThreads);
  }

  __device__ __forceinline__ static void run(const GemmParams& p, const Tf32Args& args, char* smem_generic) {
    const uint32_t smem = smem_address(smem_generic);
    const int stages = args.stages;
    const Ring ring{smem + stages * kStageBytes, stages};
    // A team's index by a shuffle: see wgmma_descriptor_at.
    const int team_idx = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / kTeamThreads, 0), thread_idx = static_cast<int>(threadIdx.x) % kTeamThreads;
    const int lane_idx = thread_idx % 32, warp_idx = thread_idx / 32;
    const int layers = 1 << args.grid.layer_shift;
    const LayerPlace place(args.grid);
    const int first_m = place.tile_m * kBlockM, first_n = place.tile_n * kBlockN, batch_idx = place.batch_idx, layer = place.layer;
    const int k_begin = place.k_begin, k_end = place.k_end;
    const int part_slots = kSlots / kTeams >> args.grid.layer_shift;  // that the warps of a team in a layer finish
    const int warp_bytes = part_slots * kSlotBytes;
    const Exchange exchange{smem, smem + stages * (kStageBytes + 16), kTileBytes, layer, layers, 4 * team_idx + warp_idx, warp_bytes, warp_bytes};
    if (layers > 1 && threadIdx.x == kConsumerThreads) exchange.begin();
    ring.begin(threadIdx.x == kConsumerThreads, 4, args.a, args.b);

    RingState state;
    if (team_idx == kTeams) {
      registers_decrease<40>();
      if (thread_idx == 0) {
        const int matrix_a = args.a_batched ? batch_idx : 0, matrix_b = args.b_batched ? batch_idx : 0;
        for (int k_tile = k_begin; k_tile < k_end; ++k_tile) {
          mbarrier_wait(ring.empty(state.stage), state.parity ^ 1);
          const uint32_t barrier = ring.full(state.stage), tile_b = smem + state.stage * kStageBytes;
          mbarrier_arrive_expect(barrier, kTileABytes + kTileBBytes);
          const int k = k_tile * kBlockK;
          tma_load_3d(tile_b + kTileBBytes, &args.a, barrier, k, first_m, matrix_a);
#pragma unroll
          for (int i = 0; i < 4; ++i) tma_load_3d(tile_b + i * kBoxBytes, &args.b, barrier, first_n + 32 * i, k, matrix_b);
          state.advance(stages);
        }
      }
      return;
    }

    registers_increase<kTeams == 1 ? 216 : 232>();
    // Consumer. This thread's columns of y, and their bias.
    const int g = lane_idx / 4, t = lane_idx % 4;
    const int64_t col = first_n + 32 * warp_idx + 4 * (g % 2 * 4 + g / 2);
    float bias[4] = {};
    if (p.bias != nullptr && col < p.n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) bias[e] = p.beta * static_cast<const float*>(p.bias)[(col + e) * p.bias_stride_n];
    }

    // The residual is on its way to L2 while the products run.
    const auto row_of = [&](int slot) { return static_cast<int64_t>(first_m + slot / 2 * 8 + 2 * t + slot % 2); };
    const int64_t y_offset = batch_idx * p.m * p.n;
    const int slot_begin = (layer * kTeams + team_idx) * part_slots, slot_end = col < p.n ? slot_begin + part_slots : 0;
    if (p.residual != nullptr && g == 0) {
      for (int slot = slot_begin; slot < slot_end; ++slot) {
        if (row_of(slot) < p.m) prefetch_l2(static_cast<const float*>(p.residual) + y_offset + row_of(slot) * p.n + col);
      }
    }

    Accumulators acc = {};
    float sum[2][kSplit ? kBlockM / 2 : 1] = {};
    const auto tile_b_of = [&](int stage) { return smem + stage * kStageBytes; };
    const auto tile_a_of = [&](int stage) { return tile_b_of(stage) + kTileBBytes; };
    const uint64_t first_tile_a = wgmma_descriptor(smem + kTileBBytes);
    if constexpr (kSplit) {
      const auto bring = [&] {
        mbarrier_wait(ring.full(state.stage), state.parity);
        split_tile_a(tile_a_of(state.stage), thread_idx);
      };
      if (k_begin < k_end) bring();
      for (int k_tile = k_begin; k_tile < k_end; ++k_tile) {
        const int stage = state.stage;
        const uint64_t tile_a = wgmma_descriptor_at(first_tile_a, stage * kStageBytes);
        const uint32_t box = tile_b_of(stage) + warp_idx * kBoxBytes;
        Fragments hi[kSteps], lo[2];
#pragma unroll
        for (int k_step = 0; k_step < kSteps; ++k_step) {
          wgmma_wait<1>();  // the step that used these registers has read them
          load_split(hi[k_step], lo[k_step % 2], box, k_step, lane_idx);
          wgmma_fence();
          multiply(acc, hi[k_step], wgmma_descriptor_at(tile_a, kTileABytes), k_step, k_step > 0);
          multiply(acc, lo[k_step % 2], tile_a, k_step, true);
          wgmma_commit();
        }
#pragma unroll
        for (int k_step = 0; k_step < kSteps; ++k_step) multiply(acc, hi[k_step], tile_a, k_step, true);
        wgmma_commit();
        state.advance(stages);
        if (k_tile + 1 < k_end) bring();  // while the products run
        wgmma_wait<0>();
        if (lane_idx == 0) mbarrier_arrive(ring.empty(stage));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          wgmma_pin(acc[i]);
#pragma unroll
          for (int e = 0; e < kBlockM / 2; ++e) sum[i][e] += acc[i][e];
        }
      }
    } else {
      Fragments fragments[2];
      int previous = 0;
      const int k_first = k_begin + team_idx;
      if (team_idx > 0) state.advance(stages);
      for (int k_tile = k_first; k_tile < k_end; k_tile += kTeams) {
        mbarrier_wait(ring.full(state.stage), state.parity);
        const uint64_t tile_a = wgmma_descriptor_at(first_tile_a, state.stage * kStageBytes);
        const uint32_t box = tile_b_of(state.stage) + warp_idx * kBoxBytes;
#pragma unroll
        for (int k_step = 0; k_step < kSteps; ++k_step) {
          wgmma_wait<1>();  // the step that used these registers has read them
          if (k_step == 1 && k_tile > k_first && lane_idx == 0) mbarrier_arrive(ring.empty(previous));
          load(fragments[k_step % 2], box, k_step, lane_idx);
          wgmma_fence();
          multiply(acc, fragments[k_step % 2], tile_a, k_step, k_tile > k_first || k_step > 0);
          wgmma_commit();
        }
        previous = state.stage;
#pragma unroll
        for (int i = 0; i < kTeams; ++i) state.advance(stages);
      }
      wgmma_wait<0>();
      wgmma_pin(acc[0]);
      wgmma_pin(acc[1]);
    }

    named_barrier_sync(1, kConsumerThreads);   // all are done with the stages
    if (layers > 1) cluster_arrive_relaxed();  // others may send; who sends waits for this
    char* const own_slots = smem_generic + warp_idx * kSlots * kSlotBytes + 16 * lane_idx;
    const auto sum_of = [&](int slot) {
      const int at = slot / 2 * 4 + slot % 2;
      if constexpr (kSplit) return make_float4(sum[0][at], sum[0][at + 2], sum[1][at], sum[1][at + 2]);
      return make_float4(acc[0][at], acc[0][at + 2], acc[1][at], acc[1][at + 2]);
    };
    const auto of_this_team = [&](int slot) { return slot / part_slots % kTeams == team_idx; };
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (kTeams == 1 || !of_this_team(i)) *reinterpret_cast<float4*>(own_slots + i * kSlotBytes) = sum_of(i);
    }
    if constexpr (kTeams > 1) {
      named_barrier_sync(1, kConsumerThreads);
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        if (!of_this_team(i)) continue;
        float4& of_both = *reinterpret_cast<float4*>(own_slots + i * kSlotBytes);
        const float4 own = sum_of(i);
        of_both = make_float4(of_both.x + own.x, of_both.y + own.y, of_both.z + own.z, of_both.w + own.w);
      }
    }
    if (layers > 1) {
      exchange.send(smem + (warp_idx * kSlots + (lane_idx * kTeams + team_idx) * part_slots) * kSlotBytes, lane_idx);
      exchange.wait(0);
    }
    constexpr int kBatch = 4;
#pragma unroll 1
    for (int slot = slot_begin; slot < slot_end; slot += kBatch) {
      float4 residual[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        residual[i] = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
        const int64_t row = row_of(slot + i);
        if (p.residual != nullptr && slot + i < slot_end && row < p.m) {
          residual[i] = __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(p.residual) + y_offset + row * p.n + col));
        }
      }
      float v[kBatch][4] = {};
      float(&flat)[4 * kBatch] = reinterpret_cast<float(&)[4 * kBatch]>(v);
      exchange.add_up(flat, own_slots + slot * kSlotBytes, smem_generic, 16 * lane_idx + (slot - slot_begin) * kSlotBytes,
                      slot_end - slot, kSlotBytes);
      const auto finish = [&](float(&x)[4], const float4& r) {
        x[0] = p.alpha * x[0] + bias[0] + r.x;
        x[1] = p.alpha * x[1] + bias[1] + r.y;
        x[2] = p.alpha * x[2] + bias[2] + r.z;
        x[3] = p.alpha * x[3] + bias[3] + r.w;
      };
      const auto store = [&](int i, const float(&x)[4]) {
        const int64_t row = row_of(slot + i);
        if (row < p.m) *reinterpret_cast<float4*>(static_cast<float*>(p.y) + y_offset + row * p.n + col) = make_float4(x[0], x[1], x[2], x[3]);
      };
#pragma unroll
      for (int i = 0; i < kBatch; ++i) finish(v[i], residual[i]);
      if constexpr (kSplit) {
        if (p.activation != Activation::kNone) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if (slot + i < slot_end) *reinterpret_cast<float4*>(own_slots + (slot + i) * kSlotBytes) = make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
          }
#pragma unroll 1
          for (int i = 0; i < kBatch && slot + i < slot_end; ++i) {  // exact activations are long: their code stands once
            const float4 x = *reinterpret_cast<const float4*>(own_slots + (slot + i) * kSlotBytes);
            float values[4] = {x.x, x.y, x.z, x.w};
            activate_all<float>(values, p.activation);
            store(i, values);
          }
          continue;
        }
      } else {
        activate_all<__half>(flat, p.activation);  // 2^-21 off, which is lost in the roundings of tf32
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (slot + i < slot_end) store(i, v[i]);
      }
    }
    if (layers > 1) cluster_sync_relaxed();  // copies may still read this block's sums
  }
};

// One product in tf32 for products that fill the GPU: the blocks walk over the tiles. The producer brings those of the next
// while one is finished, out of registers.
struct Tf32Persistent : Tf32Gemm<false, 128, 1> {
  using Single = Tf32Gemm<false, 128, 1>;  // one tile for each block, or cluster of blocks

  // `first_row` is the thread's first row of y, `col` the first of its four columns.
  __device__ __forceinline__ static void finish(Accumulators& acc, const GemmParams& p, int64_t first_row, int64_t col, int64_t y_offset) {
    constexpr int kBatch = 8;  // slots: four columns of a row
    float bias[4] = {};
    if (p.bias != nullptr && col < p.n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) bias[e] = p.beta * static_cast<const float*>(p.bias)[(col + e) * p.bias_stride_n];
    }
#pragma unroll 1
    for (int slot = 0; slot < kSlots; slot += kBatch) {
      const auto row_of = [&](int i) { return first_row + (slot + i) / 2 * 8 + i % 2; };
      float v[kBatch][4] = {};
      if (p.residual != nullptr && col < p.n) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (row_of(i) >= p.m) continue;
          const float4 r = __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(p.residual) + y_offset + row_of(i) * p.n + col));
          v[i][0] = r.x;
          v[i][1] = r.y;
          v[i][2] = r.z;
          v[i][3] = r.w;
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = i / 2 * 4 + i % 2;
        v[i][0] = p.alpha * acc[0][at] + bias[0] + v[i][0];
        v[i][1] = p.alpha * acc[0][at + 2] + bias[1] + v[i][1];
        v[i][2] = p.alpha * acc[1][at] + bias[2] + v[i][2];
        v[i][3] = p.alpha * acc[1][at + 2] + bias[3] + v[i][3];
      }
      activate_all<__half>(reinterpret_cast<float(&)[4 * kBatch]>(v), p.activation);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (row_of(i) < p.m && col < p.n) {
          *reinterpret_cast<float4*>(static_cast<float*>(p.y) + y_offset + row_of(i) * p.n + col) = make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
        }
      }
      constexpr int kUsed = 2 * kBatch;  // registers of acc[i]; they have no run-time index, so that the others move up
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < kBlockM / 2 - kUsed; ++e) acc[i][e] = acc[i][e + kUsed];
      }
    }
  }

  __device__ __forceinline__ static void run(const GemmParams& p, const Tf32Args& args, char* smem_generic) {
    const uint32_t smem = smem_address(smem_generic);
    const int stages = args.stages;
    const Ring ring{smem + stages * kStageBytes, stages};
    const int thread_idx = static_cast<int>(threadIdx.x) % 128, group_idx = static_cast<int>(threadIdx.x) / 128 - 1;  // -1: producer
    ring.begin(threadIdx.x == 0, 4, args.a, args.b);
    const int tiles_m = static_cast<int>((p.m + kBlockM - 1) / kBlockM), tiles_n = static_cast<int>((p.n + kBlockN - 1) / kBlockN);
    const int total = tiles_m * tiles_n * static_cast<int>(p.batch), k_tiles = static_cast<int>((p.k + kBlockK - 1) / kBlockK);
    const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
    struct Work {
      int batch_idx, first_m, first_n;
    };
    const auto work = [&](int index) {
      const int batch_idx = index / (tiles_m * tiles_n);
      const TileIndex tile = grouped_tile(index - batch_idx * tiles_m * tiles_n, tiles_m, tiles_n);
      return Work{batch_idx, static_cast<int>(tile.m) * kBlockM, static_cast<int>(tile.n) * kBlockN};
    };

    RingState state;
    if (group_idx < 0) {
      registers_decrease<40>();
      if (thread_idx != 0) return;
      for (int index = first; index < total; index += step) {
        const Work at = work(index);
        const int matrix_a = args.a_batched ? at.batch_idx : 0, matrix_b = args.b_batched ? at.batch_idx : 0;
        for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
          mbarrier_wait(ring.empty(state.stage), state.parity ^ 1);
          const uint32_t barrier = ring.full(state.stage), tile_b = smem + state.stage * kStageBytes;
          mbarrier_arrive_expect(barrier, kTileABytes + kTileBBytes);
          const int k = k_tile * kBlockK;
          tma_load_3d(tile_b + kTileBBytes, &args.a, barrier, k, at.first_m, matrix_a);
#pragma unroll
          for (int i = 0; i < 4; ++i) tma_load_3d(tile_b + i * kBoxBytes, &args.b, barrier, at.first_n + 32 * i, k, matrix_b);
          state.advance(stages);
        }
      }
      return;
    }

    registers_increase<216>();
    const int lane_idx = thread_idx % 32, warp_idx = thread_idx / 32, g = lane_idx / 4, t = lane_idx % 4;
    const uint64_t first_tile_a = wgmma_descriptor(smem + kTileBBytes);
    for (int index = first; index < total; index += step) {
      const Work at = work(index);
      const int64_t col = at.first_n + 32 * warp_idx + 4 * (g % 2 * 4 + g / 2), first_row = at.first_m + 2 * t;
      const int64_t y_offset = at.batch_idx * p.m * p.n;
      Accumulators acc;
#pragma unroll
      for (int i = 0; i < kBlockM / 2; ++i) acc[0][i] = acc[1][i] = 0.0F;
      Fragments fragments[2];
      int previous = 0;
      for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        mbarrier_wait(ring.full(state.stage), state.parity);
        const uint64_t tile_a = wgmma_descriptor_at(first_tile_a, state.stage * kStageBytes);
        const uint32_t box = smem + state.stage * kStageBytes + warp_idx * kBoxBytes;
#pragma unroll
        for (int k_step = 0; k_step < kSteps; ++k_step) {
          wgmma_wait<1>();
          if (k_step == 1 && k_tile > 0 && lane_idx == 0) mbarrier_arrive(ring.empty(previous));
          load(fragments[k_step % 2], box, k_step, lane_idx);
          wgmma_fence();
          multiply(acc, fragments[k_step % 2], tile_a, k_step, k_tile > 0 || k_step > 0);
          wgmma_commit();
        }
        previous = state.stage;
        state.advance(stages);
      }
      wgmma_wait<0>();
      if (lane_idx == 0) mbarrier_arrive(ring.empty(previous));
      wgmma_pin(acc[0]);
      wgmma_pin(acc[1]);
      finish(acc, p, first_row, col, y_offset);
    }
  }
};

template <class Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, Gemm::kMostBlocks)
gemm_sm90a_tf32_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ Tf32Args args) {
  extern __shared__ __align__(1024) char smem[];
  Gemm::run(p, args, smem);
}

template <class Gemm>
Status encode_operands(const GemmParams& p, Tf32Args& args) {
  args.a_batched = p.batch_rank > 0 && p.a_batch_strides[0] != 0;
  args.b_batched = p.batch_rank > 0 && p.b_batch_strides[0] != 0;
  const auto encode = [&](CUtensorMap* map, const void* x, int64_t cols, int64_t rows, int64_t ld, int64_t matrices, int64_t stride, int box_rows) {
    const int64_t dims[3] = {cols, rows, matrices}, strides[3] = {1, ld, matrices == 1 ? ld * rows : stride};
    const int box[3] = {32, box_rows, 1};
    return encode_tensor_map(map, static_cast<const typename Gemm::Stored*>(x), 3, dims, strides, box);
  };
  ORTPLUGINS_RETURN_IF_ERROR(encode(&args.a, p.a, p.k, p.m, p.lda, args.a_batched ? p.batch : 1, p.a_batch_strides[0], Gemm::kBlockM));
  return encode(&args.b, p.b, p.n, p.k, p.ldb, args.b_batched ? p.batch : 1, p.b_batch_strides[0], kBlockK);
}

Status launch_persistent(const char* what, const GemmParams& p, const ExecContext& context, Tf32Args& args, int64_t tiles, int64_t k_tiles) {
  using Gemm = Tf32Persistent;
  static SmemLimit limit;
  const auto kernel = gemm_sm90a_tf32_kernel<Gemm>;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, 227 * 1024));
  const int sm_count = context.device->sm_count;
  const unsigned grid = grid_size(tiles, Gemm::kMostBlocks * sm_count);
  args.stages = choose_stages(grid, Gemm::kMostBlocks, sm_count, Gemm::kStageBytes, 0, k_tiles * ceil_div(tiles, grid), 1);
  return launch_with({1, true}, what, kernel, grid, Gemm::kThreads, args.stages * (Gemm::kStageBytes + 16), context, p, args);
}

template <class Gemm>
Status launch_tf32(const char* what, const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  Tf32Args args = {};
  ORTPLUGINS_RETURN_IF_ERROR(encode_operands<Gemm>(p, args));
  const int64_t tiles_m = ceil_div(p.m, Gemm::kBlockM), tiles_n = ceil_div(p.n, kBlockN), tiles = tiles_m * tiles_n * p.batch, k_tiles = ceil_div(p.k, kBlockK);
  // Blocks with three products for each tile are worth a second one on a multiprocessor sooner.
  const int sm_count = context.device->sm_count, layers = choose_layers(tiles, k_tiles, (Gemm::kSplits ? 2 : 1) * sm_count);
  if constexpr (std::is_same_v<Gemm, Tf32Persistent::Single>) {
    if (layers == 1) return launch_persistent(what, p, context, args, tiles, k_tiles);
  }
  static SmemLimit limit;
  const auto kernel = gemm_sm90a_tf32_kernel<Gemm>;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, 227 * 1024));
  args.grid = {layers, tiles_m, tiles_n, k_tiles};
  const int64_t grid = tiles * layers;
  args.stages = choose_stages(grid, Gemm::kMostBlocks, sm_count, Gemm::kStageBytes, Gemm::Exchange::kBarrierBytes, ceil_div(k_tiles, layers), Gemm::kLeastStages);
  if (Gemm::kTeams > 1) args.stages = args.stages / 2 * 2;  // so that a stage is always the same team's, and its parity tells
  const int smem_bytes = args.stages * (Gemm::kStageBytes + 16) + Gemm::Exchange::kBarrierBytes;
  const bool overlaps = grid <= 8 * sm_count;
  return launch_with({static_cast<unsigned>(layers), overlaps}, what, kernel, static_cast<unsigned>(grid), Gemm::kThreads, smem_bytes, context, p, args);
}

}  // namespace

Status launch_gemm_sm90a_tf32(const GemmParams& p, const ExecContext& context) {
  return launch_tf32<Tf32Persistent::Single>("gemm_sm90a_tf32", p, context);
}
Status launch_gemm_sm90a_tf32_pair(const GemmParams& p, const ExecContext& context) {
  return launch_tf32<Tf32Gemm<false, 128, 2>>("gemm_sm90a_tf32", p, context);
}
Status launch_gemm_sm90a_tf32x3(const GemmParams& p, const ExecContext& context) {
  return launch_tf32<Tf32Gemm<true, 64, 1>>("gemm_sm90a_tf32x3", p, context);
}

}  // namespace ortplugins
