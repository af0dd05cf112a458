// Hopper's own instructions (sm_90a): bulk tensor copies (TMA), warpgroup matrix products and register
// reallocation. Only *_sm90a.cu files include this.
//
// wgmma, m64nNk16 for 16-bit elements or m64nNk8 for tf32, is issued by a warpgroup: four warps from a warp index divisible
// by four. Accumulator layout, with w = warp % 4, g = lane / 4, t = lane % 4: register 4 j + e of a thread is row
// 16 w + g + 8 (e / 2), column 8 j + 2 t + e % 2.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/bulk_copy.h"
#include "device/cluster.h"
#include "device/cp_async.h"

namespace ortplugins {

// --- Rings --------------------------------------------------------------------------------------------------------------

// A ring of kStages buffers: where it stands, and the parity to wait for there.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// --- Bulk tensor copies ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}
// A box whose first element is (x, y, z), x the contiguous coordinate, to 128-byte aligned shared memory. Elements outside
// the tensor become zeros and count as brought. One thread.
__device__ __forceinline__ void tma_load_3d(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];\n" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// How L2 keeps what nobody reads again: it makes room first.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}
// As tma_load_3d, of what nobody reads again.
__device__ __forceinline__ void tma_load_3d_once(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;\n" ::"r"(
          smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(evict_first_policy())
      : "memory");
}
// Asks L2 for a box.
__device__ __forceinline__ void tma_prefetch_l2_3d(const CUtensorMap* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];\n" ::"l"(map), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ __forceinline__ void tma_prefetch_l2_4d(const CUtensorMap* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];\n" ::"l"(map), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
__device__ __forceinline__ void tma_load_4d(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(
          smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d_once(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], "
      "%7;\n" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(evict_first_policy())
      : "memory");
}
// The same, to the same place in each block of the cluster whose bit is set in `mask`; completes on the barrier at the same
// place there.
__device__ __forceinline__ void tma_load_3d_multicast(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int x, int y, int z,
                                                      uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], "
      "%6;\n" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(mask)
      : "memory");
}
// Shared memory to a box of the tensor; what lies outside it is not written.
__device__ __forceinline__ void tma_store_3d(const CUtensorMap* map, uint32_t smem, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\n" ::"l"(map), "r"(smem), "r"(x),
               "r"(y), "r"(z)
               : "memory");
}
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, uint32_t smem, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(map), "r"(smem), "r"(x),
               "r"(y), "r"(z), "r"(w)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Until at most kPending groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}
// Until all groups have been written to memory.
__device__ __forceinline__ void tma_store_wait_all() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }
// Makes this thread's ordinary writes to shared memory visible to the copy engine and the tensor cores. Then a barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// --- Clusters: blocks that run at the same time and reach each other's shared memory -------------------------------------

// A barrier of all threads of all blocks of the cluster, without order of memory, which costs a membar.gpu: after
// fence_barrier_init, and before a block ends.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;\n" ::: "memory");
}
// Arrives at a barrier of a block of the cluster, by its address there. No scope is named: .release.cluster would cost a
// membar.gpu, and what must be ordered before, reads by wgmma, is so by waiting for them.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t cluster_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(cluster_barrier) : "memory");
}

// --- Warp roles -----------------------------------------------------------------------------------------------------------

// Gives registers back, or takes them; a multiple of 8, by all warps of a warpgroup.
template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
// Barrier `id` (1 to 15; 0 is __syncthreads) for `threads` threads, whole warps.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Counts this thread in at barrier `id`, for others to wait there.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// --- wgmma ------------------------------------------------------------------------------------------------------------------

// Operand tiles in shared memory, as TMA writes them with the 128-byte swizzle: rows of 128 bytes, 1024-byte aligned.
//   along k: row = m or n, 128 bytes of k; `stride` 1024 bytes lie between groups of eight rows. The next step of k
//            (32 bytes) starts 32 bytes later.
//   along m or n (16-bit elements only): row = k, 64 elements of m or n; 1024 bytes between groups of eight k, and
//            `leading` bytes between blocks of 64 of m or n. The next step of k (16 rows) starts 2048 bytes later.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t smem, int leading_bytes = 16, int stride_bytes = 1024) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | (static_cast<uint64_t>(stride_bytes >> 4) << 32) | (static_cast<uint64_t>(leading_bytes >> 4) << 16) |
         ((smem & 0x3ffff) >> 4);
}
// The descriptor of a tile `bytes` behind. Sums of descriptors are cheap where the compiler sees that they are the same in all lanes, as
// it does of stages and of warpgroups whose index went through a shuffle: then they stay in uniform registers, which wgmma takes.
__device__ __forceinline__ uint64_t wgmma_descriptor_at(uint64_t descriptor, int bytes) {
  return (descriptor & 0xffffffff00000000ULL) | (static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes >> 4));
}

// Before the first wgmma, and whenever registers that one reads or adds to were written otherwise.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// Until at most kPending groups are unfinished; until then their accumulators and operands must not be touched.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of accumulators across a wait.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// acc (64 x kN) = a b + (accumulate ? acc : 0), operands by descriptor. kTransA, kTransB: stored along m or n.
template <class Element, int kN, bool kTransA, bool kTransB>
struct Wgmma;

struct Tf32 {};  // element of m64nNk8 products: float in memory, 13 bits ignored

// Operand lists: the accumulators are %0 to %(kN / 2 - 1).
#define ORTPLUGINS_REGS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ORTPLUGINS_REGS_64 ORTPLUGINS_REGS_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ORTPLUGINS_REGS_96 ORTPLUGINS_REGS_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define ORTPLUGINS_REGS_128 ORTPLUGINS_REGS_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
  "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, " \
  "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, " \
  "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define ORTPLUGINS_ACC_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ORTPLUGINS_ACC_16(d, i) ORTPLUGINS_ACC_4(d, i), ORTPLUGINS_ACC_4(d, i + 4), ORTPLUGINS_ACC_4(d, i + 8), ORTPLUGINS_ACC_4(d, i + 12)
#define ORTPLUGINS_ACC_32(d, i) ORTPLUGINS_ACC_16(d, i), ORTPLUGINS_ACC_16(d, i + 16)
#define ORTPLUGINS_ACC_64(d, i) ORTPLUGINS_ACC_32(d, i), ORTPLUGINS_ACC_32(d, i + 32)
#define ORTPLUGINS_ACC_96(d, i) ORTPLUGINS_ACC_64(d, i), ORTPLUGINS_ACC_32(d, i + 64)
#define ORTPLUGINS_ACC_128(d, i) ORTPLUGINS_ACC_64(d, i), ORTPLUGINS_ACC_64(d, i + 64)

// count: kN / 2 accumulators; a, b, p: their operand numbers.
#define ORTPLUGINS_WGMMA_HALF(Element, type, n, count, a, b, p, ta, tb)                                                         \
  template <bool kTransA, bool kTransB>                                                                                 \
  struct Wgmma<Element, n, kTransA, kTransB> {                                                                          \
    static constexpr int kK = 16;                                                                                       \
    __device__ __forceinline__ static void run(float (&acc)[count], uint64_t desc_a, uint64_t desc_b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                 \
                   "k16.f32." type "." type " {" ORTPLUGINS_REGS_##count "}, %" #a ", %" #b ", p, 1, 1, %" #ta ", %" #tb ";\n}\n" \
                   : ORTPLUGINS_ACC_##count(acc, 0)                                                                     \
                   : "l"(desc_a), "l"(desc_b), "r"(accumulate), "n"(kTransA), "n"(kTransB));                            \
    }                                                                                                                   \
  };
#define ORTPLUGINS_WGMMA_TF32(n, count, a, b, p)                                                                        \
  template <>                                                                                                           \
  struct Wgmma<Tf32, n, false, false> {                                                                                 \
    static constexpr int kK = 8;                                                                                        \
    __device__ __forceinline__ static void run(float (&acc)[count], uint64_t desc_a, uint64_t desc_b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                 \
                   "k8.f32.tf32.tf32 {" ORTPLUGINS_REGS_##count "}, %" #a ", %" #b ", p, 1, 1;\n}\n"                    \
                   : ORTPLUGINS_ACC_##count(acc, 0)                                                                     \
                   : "l"(desc_a), "l"(desc_b), "r"(accumulate));                                                        \
    }                                                                                                                   \
  };

ORTPLUGINS_WGMMA_HALF(__half, "f16", 64, 32, 32, 33, 34, 35, 36)
ORTPLUGINS_WGMMA_HALF(__nv_bfloat16, "bf16", 64, 32, 32, 33, 34, 35, 36)
ORTPLUGINS_WGMMA_TF32(64, 32, 32, 33, 34)
ORTPLUGINS_WGMMA_HALF(__half, "f16", 128, 64, 64, 65, 66, 67, 68)
ORTPLUGINS_WGMMA_HALF(__nv_bfloat16, "bf16", 128, 64, 64, 65, 66, 67, 68)
ORTPLUGINS_WGMMA_TF32(128, 64, 64, 65, 66)
ORTPLUGINS_WGMMA_HALF(__half, "f16", 192, 96, 96, 97, 98, 99, 100)
ORTPLUGINS_WGMMA_HALF(__nv_bfloat16, "bf16", 192, 96, 96, 97, 98, 99, 100)
ORTPLUGINS_WGMMA_HALF(__half, "f16", 256, 128, 128, 129, 130, 131, 132)
ORTPLUGINS_WGMMA_HALF(__nv_bfloat16, "bf16", 256, 128, 128, 129, 130, 131, 132)
ORTPLUGINS_WGMMA_TF32(256, 128, 128, 129, 130)
#undef ORTPLUGINS_WGMMA_HALF
#undef ORTPLUGINS_WGMMA_TF32

}  // namespace ortplugins
