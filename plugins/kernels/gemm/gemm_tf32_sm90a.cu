// Gemm of float32 by wgmma in tf32, one product or three of them (tf32x3), in one launch.
//
// wgmma takes tf32 tiles in shared memory only along k, and b is stored across it. So a block computes the transposed
// product: the fragments of b^T come from shared memory into registers, where any layout will do, and a, which is stored
// along k, stays in shared memory. A warpgroup (consumer) computes kBlockM rows of 128 columns of y; another brings
// tiles of a and b, 32 deep along k, by TMA (producer). Two blocks share a multiprocessor: one multiplies while the other
// waits or finishes.
//
// Which column of y a row of the transposed product is may be chosen: lane (g, t) reads 16 bytes of row t of b, four
// columns side by side, chunk 4 (g % 2) + g / 2 of 128 bytes, so that eight lanes find eight different chunks whatever the
// swizzle. These columns go to four fragment rows, and in the end the thread holds four neighbouring columns of y.
//
// The blocks of a cluster split k (gemm_layers.h); each adds up and finishes its part of the rows from the shared memory of all,
// in the order of k.
//
// tf32x3: x = hi + lo; sums of hi hi + hi lo + lo hi leave the tensor cores, which truncate when they add, every 128 of k.
#include "device/dependent_launch.h"
#include "device/mma.h"
#include "device/sm90.h"
#include "device/sm90_tf32.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/gemm_layers.h"

namespace ortplugins {
namespace {

constexpr int kBlockN = 128, kBlockK = 32;
constexpr int kPromoteTiles = 128 / kBlockK;  // tf32x3: after so many, sums leave the tensor cores
constexpr int kRowBytes = 128;                  // 32 elements of k (a) or of n (b)
constexpr int kBoxBytes = kBlockK * kRowBytes;  // 32 columns of b
constexpr int kConsumerThreads = 128, kThreads = 2 * kConsumerThreads;

struct Tf32Args {
  CUtensorMap a, b;  // (contiguous, rows, matrix)
  bool a_batched, b_batched;
  int stages;
};

template <bool kSplit, int kBlockMValue>
struct Tf32Gemm {
  static constexpr bool kSplits = kSplit;
  static constexpr int kBlockM = kBlockMValue;
  static constexpr int kTileBBytes = 4 * kBoxBytes, kTileABytes = kBlockM * kRowBytes;
  static constexpr int kStageBytes = kTileBBytes + kTileABytes * (kSplit ? 2 : 1);  // b, a (hi), a (lo)
  static constexpr int kSlots = kBlockM / 4;  // of four columns of y in one row, for each thread
  static constexpr int kSlotBytes = 16 * kConsumerThreads;
  static constexpr int kLeastStages = (kSlots * kSlotBytes + kStageBytes - 1) / kStageBytes;  // the stages become the tile of y
  static constexpr int kSteps = kBlockK / 8;
  using Stored = std::conditional_t<kSplit, float, RoundedFloat>;
  using Product = WgmmaTf32Registers<kBlockM>;
  using Accumulators = float[2][kBlockM / 2];

  // Four columns of two rows of k: fragment rows g and g + 8 of two products.
  struct Fragments {
    uint32_t r[2][4];
    __device__ __forceinline__ void put(const uint4& v, int half) {
      r[0][2 * half] = v.x;
      r[0][2 * half + 1] = v.y;
      r[1][2 * half] = v.z;
      r[1][2 * half + 1] = v.w;
    }
  };
  // tf32x3. Where x is infinite or NaN, `finite` is 1 with its sign: what is not finite enters one product with each element
  // of the other side, and the finite number that the others add changes nothing.
  struct SplitFragments {
    Fragments hi, finite, lo;
  };

  __device__ __forceinline__ static uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
  }
  __device__ __forceinline__ static void store_shared(uint32_t address, const uint4& v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  }

  struct Parts {
    uint32_t hi, finite, lo;
  };
  __device__ __forceinline__ static Parts split(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffffU;
    const uint32_t hi = (bits + (magnitude < 0x7f7ff000U ? 0x1000U : 0U)) & 0xffffe000U;
    const float lo = __uint_as_float(bits) - __uint_as_float(hi);
    if (magnitude < 0x7f800000U) return {hi, hi, __float_as_uint(lo) + 0x1000U};  // the unit ignores the 13 lowest bits
    return {bits, (bits & 0x80000000U) | 0x3f800000U, 0U};
  }

  // Reads step `k_step` of the warp's 32 columns. `box` is theirs.
  __device__ __forceinline__ static void load(Fragments& f, uint32_t box, int k_step, int lane_idx) {
    const int g = lane_idx / 4, t = lane_idx % 4, chunk = g % 2 * 4 + g / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 4 * half + t;  // its low three bits: the swizzle
      f.put(load_shared(box + (8 * k_step + row) * kRowBytes + ((chunk ^ row) << 4)), half);
    }
  }
  __device__ __forceinline__ static void load(SplitFragments& f, uint32_t box, int k_step, int lane_idx) {
    Fragments whole;
    load(whole, box, k_step, lane_idx);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Parts parts = split(whole.r[i][e]);
        f.hi.r[i][e] = parts.hi;
        f.finite.r[i][e] = parts.finite;
        f.lo.r[i][e] = parts.lo;
      }
    }
  }

  __device__ __forceinline__ static void multiply(Accumulators& acc, const Fragments& f, uint32_t tile_a, int k_step, bool accumulate) {
#pragma unroll
    for (int i = 0; i < 2; ++i) Product::run(acc[i], f.r[i], wgmma_descriptor(tile_a + 32 * k_step), accumulate);
  }
  __device__ __forceinline__ static void multiply(Accumulators& acc, const SplitFragments& f, uint32_t tile_a, int k_step, bool accumulate) {
    multiply(acc, f.finite, tile_a + kTileABytes, k_step, accumulate);  // a (lo): whole where a is not finite
    multiply(acc, f.lo, tile_a, k_step, true);
    multiply(acc, f.hi, tile_a, k_step, true);
  }

  // The tile of a becomes hi, and lo behind it.
  __device__ __forceinline__ static void split_tile_a(uint32_t tile_a, int thread_idx) {
#pragma unroll
    for (int i = 0; i < kTileABytes / 16 / kConsumerThreads; ++i) {
      const uint32_t at = tile_a + 16 * (thread_idx + i * kConsumerThreads);
      const uint4 v = load_shared(at);
      const Parts x = split(v.x), y = split(v.y), z = split(v.z), w = split(v.w);
      store_shared(at, make_uint4(x.finite, y.finite, z.finite, w.finite));
      // Where a is not finite lo is 0 so far; there a itself belongs.
      const auto lo = [](const Parts& p) { return p.hi == p.finite ? p.lo : p.hi; };
      store_shared(at + kTileABytes, make_uint4(lo(x), lo(y), lo(z), lo(w)));
    }
    fence_async_proxy();
    named_barrier_sync(1, kConsumerThreads);
  }

  __device__ __forceinline__ static void run(const GemmParams& p, const Tf32Args& args, char* smem_generic) {
    const uint32_t smem = smem_address(smem_generic);
    const int stages = args.stages;
    const auto full = [&](int stage) { return smem + stages * kStageBytes + 8 * stage; };
    const auto empty = [&](int stage) { return smem + stages * kStageBytes + 8 * (stages + stage); };
    const int thread_idx = static_cast<int>(threadIdx.x), lane_idx = thread_idx % 32, warp_idx = thread_idx / 32;
    const int layers = blocks_in_cluster();
    const LayerPlace place(rank_in_cluster(), layers, p.m, p.n, p.k, kBlockM, kBlockN, kBlockK);
    const int first_m = place.tile_m * kBlockM, first_n = place.tile_n * kBlockN, batch_idx = place.batch_idx, layer = place.layer;
    const int k_begin = place.k_begin, k_end = place.k_end;
    if (thread_idx == kConsumerThreads) {
      for (int stage = 0; stage < stages; ++stage) {
        mbarrier_init(full(stage), 1);
        mbarrier_init(empty(stage), 4);
      }
      fence_barrier_init();
      tma_prefetch(&args.a);
      tma_prefetch(&args.b);
    }
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();

    RingState state;
    if (thread_idx >= kConsumerThreads) {
      registers_decrease<40>();
      if (thread_idx == kConsumerThreads) {
        const int matrix_a = args.a_batched ? batch_idx : 0, matrix_b = args.b_batched ? batch_idx : 0;
        for (int k_tile = k_begin; k_tile < k_end; ++k_tile) {
          mbarrier_wait(empty(state.stage), state.parity ^ 1);
          const uint32_t barrier = full(state.stage), tile_b = smem + state.stage * kStageBytes;
          mbarrier_arrive_expect(barrier, kTileABytes + kTileBBytes);
          const int k = k_tile * kBlockK;
          tma_load_3d(tile_b + kTileBBytes, &args.a, barrier, k, first_m, matrix_a);
#pragma unroll
          for (int i = 0; i < 4; ++i) tma_load_3d(tile_b + i * kBoxBytes, &args.b, barrier, first_n + 32 * i, k, matrix_b);
          state.advance(stages);
        }
      }
      __syncwarp();
      if (layers > 1) {
        cluster_sync();
        cluster_sync_relaxed();
      }
      return;
    }

    registers_increase<216>();
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
    const int slot_begin = kSlots * layer / layers, slot_end = col < p.n ? kSlots * (layer + 1) / layers : 0;
    if (p.residual != nullptr && g == 0) {
      for (int slot = slot_begin; slot < slot_end; ++slot) {
        if (row_of(slot) < p.m) prefetch_l2(static_cast<const float*>(p.residual) + y_offset + row_of(slot) * p.n + col);
      }
    }

    Accumulators acc = {};
    float sum[2][kSplit ? kBlockM / 2 : 1] = {};
    constexpr int kBuffers = kSplit ? 1 : 2;  // three parts of two steps would not fit in registers; the other block fills the gap
    std::conditional_t<kSplit, SplitFragments, Fragments> fragments[kBuffers];
    int previous = 0;
    bool accumulate = false;
    for (int k_tile = k_begin; k_tile < k_end; ++k_tile) {
      mbarrier_wait(full(state.stage), state.parity);
      const uint32_t tile_b = smem + state.stage * kStageBytes, tile_a = tile_b + kTileBBytes;
      if constexpr (kSplit) split_tile_a(tile_a, thread_idx);
#pragma unroll
      for (int k_step = 0; k_step < kSteps; ++k_step) {
        wgmma_wait<kBuffers - 1>();  // the step that used these registers has read them
        if (k_step == 1 && k_tile > k_begin && lane_idx == 0) mbarrier_arrive(empty(previous));
        load(fragments[k_step % kBuffers], tile_b + warp_idx * kBoxBytes, k_step, lane_idx);
        wgmma_fence();
        multiply(acc, fragments[k_step % kBuffers], tile_a, k_step, accumulate || k_step > 0);
        wgmma_commit();
      }
      accumulate = true;
      if constexpr (kSplit) {
        if ((k_tile - k_begin) % kPromoteTiles == kPromoteTiles - 1 || k_tile + 1 == k_end) {
          wgmma_wait<0>();
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            wgmma_pin(acc[i]);
#pragma unroll
            for (int e = 0; e < kBlockM / 2; ++e) sum[i][e] += acc[i][e];
          }
          accumulate = false;
        }
      }
      previous = state.stage;
      state.advance(stages);
    }
    wgmma_wait<0>();
    wgmma_pin(acc[0]);
    wgmma_pin(acc[1]);

    // Epilogue: the stages become this thread's slots.
    named_barrier_sync(1, kConsumerThreads);
    const uint32_t slots = smem + 16 * thread_idx;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int at = i / 2 * 4 + i % 2;
      float4 v;
      if constexpr (kSplit) {
        v = make_float4(sum[0][at], sum[0][at + 2], sum[1][at], sum[1][at + 2]);
      } else {
        v = make_float4(acc[0][at], acc[0][at + 2], acc[1][at], acc[1][at + 2]);
      }
      *reinterpret_cast<float4*>(smem_generic + i * kSlotBytes + 16 * thread_idx) = v;
    }
    if (layers > 1) cluster_sync();
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
      for (int other = 0; other < layers; ++other) {
        const uint32_t at = cluster_address(slots, other);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (slot + i >= slot_end) continue;
          const float4 part = other == layer ? *reinterpret_cast<const float4*>(smem_generic + (slot + i) * kSlotBytes + 16 * thread_idx)
                                             : load_cluster(at + (slot + i) * kSlotBytes);
          v[i][0] += part.x;
          v[i][1] += part.y;
          v[i][2] += part.z;
          v[i][3] += part.w;
        }
      }
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
            if (slot + i < slot_end) *reinterpret_cast<float4*>(smem_generic + (slot + i) * kSlotBytes + 16 * thread_idx) = make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
          }
#pragma unroll 1
          for (int i = 0; i < kBatch && slot + i < slot_end; ++i) {  // exact activations are long: their code stands once
            const float4 x = *reinterpret_cast<const float4*>(smem_generic + (slot + i) * kSlotBytes + 16 * thread_idx);
            float values[4] = {x.x, x.y, x.z, x.w};
            activate_all<float>(values, p.activation);
            store(i, values);
          }
          continue;
        }
      } else {
        activate_all<__half>(reinterpret_cast<float(&)[4 * kBatch]>(v), p.activation);  // 2^-21 off, which is lost in the roundings of tf32
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (slot + i < slot_end) store(i, v[i]);
      }
    }
    cluster_sync_relaxed();  // the other blocks may still read this one's slots or arrive at its barriers
  }
};

template <class Gemm>
__global__ void __launch_bounds__(kThreads, 2) gemm_sm90a_tf32_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ Tf32Args args) {
  extern __shared__ __align__(1024) char smem[];
  Gemm::run(p, args, smem);
}

template <class Gemm>
Status launch_tf32(const char* what, const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  Tf32Args args = {};
  args.a_batched = p.batch_rank > 0 && p.a_batch_strides[0] != 0;
  args.b_batched = p.batch_rank > 0 && p.b_batch_strides[0] != 0;
  const int64_t tiles = ceil_div(p.m, Gemm::kBlockM) * ceil_div(p.n, kBlockN) * p.batch, k_tiles = ceil_div(p.k, kBlockK);
  // Blocks with three products for each tile are worth a second one on a multiprocessor sooner.
  const int layers = choose_layers(tiles, k_tiles, (Gemm::kSplits ? 2 : 1) * context.device->sm_count);
  const auto encode = [&](CUtensorMap* map, const void* x, int64_t cols, int64_t rows, int64_t ld, int64_t matrices, int64_t stride, int box_rows) {
    const int64_t dims[3] = {cols, rows, matrices}, strides[3] = {1, ld, matrices == 1 ? ld * rows : stride};
    const int box[3] = {32, box_rows, 1};
    return encode_tensor_map(map, static_cast<const typename Gemm::Stored*>(x), 3, dims, strides, box);
  };
  ORTPLUGINS_RETURN_IF_ERROR(encode(&args.a, p.a, p.k, p.m, p.lda, args.a_batched ? p.batch : 1, p.a_batch_strides[0], Gemm::kBlockM));
  ORTPLUGINS_RETURN_IF_ERROR(encode(&args.b, p.b, p.n, p.k, p.ldb, args.b_batched ? p.batch : 1, p.b_batch_strides[0], kBlockK));
  static SmemLimit limit;
  const auto kernel = gemm_sm90a_tf32_kernel<Gemm>;
  ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, 227 * 1024));
  const int64_t grid = tiles * layers;
  constexpr int kMostBlocks = 2;
  args.stages = choose_stages(grid, kMostBlocks, context.device->sm_count, Gemm::kStageBytes, 0, ceil_div(k_tiles, layers), Gemm::kLeastStages);
  const int smem_bytes = args.stages * (Gemm::kStageBytes + 16);
  const bool overlaps = grid <= 8 * context.device->sm_count;
  return launch_with({static_cast<unsigned>(layers), overlaps}, what, kernel, static_cast<unsigned>(grid), kThreads, smem_bytes, context, p, args);
}

}  // namespace

Status launch_gemm_sm90a_tf32(const GemmParams& p, const ExecContext& context) {
  return launch_tf32<Tf32Gemm<false, 128>>("gemm_sm90a_tf32", p, context);
}
Status launch_gemm_sm90a_tf32x3(const GemmParams& p, const ExecContext& context) {
  return launch_tf32<Tf32Gemm<true, 64>>("gemm_sm90a_tf32x3", p, context);
}

}  // namespace ortplugins
