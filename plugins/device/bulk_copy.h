// Bulk copies: runs of memory that the copy engine (TMA) brings to shared memory, and the mbarriers that tell of their
// end (sm_90). Elsewhere these functions do nothing and kernels that need them must not run.
#pragma once

#include <cstdint>

#include "device/cluster.h"
#include "device/cp_async.h"

namespace ortplugins {

// `count` arrivals, and the bytes announced with them, complete a phase. One thread; then fence_barrier_init and a
// barrier of all who use it.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
#endif
}
__device__ __forceinline__ void fence_barrier_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
#endif
}
// Arrives and announces bytes that copies will bring.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
// Arrives once all cp.async copies that this thread has issued have landed; it is counted in from the start.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
#endif
}
// Waits for the end of the phase of this parity; a new barrier is in phase 0, and the phase before it counts as over.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (done == 0) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  }
#endif
}

// `bytes`, a multiple of 16, between 16-byte boundaries; they complete on `barrier`. One thread.
__device__ __forceinline__ void bulk_load(uint32_t smem, const void* gmem, int bytes, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(smem),
               "l"(gmem), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}

// From shared memory to where `target` lies in that of block `rank` of the cluster; completes on the barrier at the place of
// `barrier` there. Both blocks must last until then.
__device__ __forceinline__ void bulk_copy_to_block(uint32_t target, uint32_t source, int bytes, uint32_t barrier, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
                   cluster_address(target, rank)),
               "r"(source), "r"(bytes), "r"(cluster_address(barrier, rank))
               : "memory");
#endif
}

// A ring of buffers in shared memory that one warp fills and reads, on its own: no other warp waits for it. Buffers are
// read in the order in which they were filled.
struct WarpRing {
  uint32_t data, barriers;
  int slots, slot_bytes, lane_idx;
  int slot = 0;  // the one that `wait` waits for
  uint32_t parity = 0;

  // Bytes of shared memory for the rings of all warps of a block: the buffers of each, then their mbarriers.
  static constexpr __host__ __device__ int bytes(int warps, int slots, int slot_bytes) {
    return warps * slots * (slot_bytes + 8);
  }

  // `smem`: of the block, on a 16-byte boundary. `slot_bytes` are a multiple of 16, `slots` 32 or fewer. All lanes, as
  // in all that follows.
  __device__ __forceinline__ WarpRing(uint32_t smem, int slot_count, int bytes_of_slot)
      : slots(slot_count), slot_bytes(bytes_of_slot), lane_idx(static_cast<int>(threadIdx.x) % 32) {
    const int warp_idx = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
    data = smem + warp_idx * slots * slot_bytes;
    barriers = smem + warps * slots * slot_bytes + warp_idx * slots * 8;
    if (lane_idx < slots) mbarrier_init(barriers + 8 * lane_idx, 1);
    fence_barrier_init();
    __syncwarp();
  }

  // Starts to fill a slot that all lanes have read, or that is new.
  __device__ __forceinline__ void fill(int slot_idx, const void* from, int byte_count) const {
    if (lane_idx != 0) return;
    const uint32_t barrier = barriers + 8 * slot_idx;
    mbarrier_arrive_expect(barrier, byte_count);
    if (byte_count > 0) bulk_load(data + slot_idx * slot_bytes, from, byte_count, barrier);
  }
  // The same from two places; the second goes to `offset` in the slot.
  __device__ __forceinline__ void fill(int slot_idx, const void* from, const void* second, int offset,
                                       int byte_count) const {
    if (lane_idx != 0) return;
    const uint32_t barrier = barriers + 8 * slot_idx;
    mbarrier_arrive_expect(barrier, 2 * byte_count);
    if (byte_count == 0) return;
    bulk_load(data + slot_idx * slot_bytes, from, byte_count, barrier);
    bulk_load(data + slot_idx * slot_bytes + offset, second, byte_count, barrier);
  }
  // Until the slot in turn is full.
  __device__ __forceinline__ void wait() const { mbarrier_wait(barriers + 8 * slot, parity); }
  __device__ __forceinline__ void advance() {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace ortplugins
