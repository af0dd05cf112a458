// Thread block clusters: blocks that run side by side and see each other's shared memory (sm_90). Elsewhere, and in a
// launch without clusters, a block is a cluster of its own.
#pragma once

#include <cstdint>

#include "device/cp_async.h"

namespace ortplugins {

__device__ __forceinline__ int rank_in_cluster() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}
__device__ __forceinline__ int blocks_in_cluster() {
  uint32_t size = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;\n" : "=r"(size));
#endif
  return static_cast<int>(size);
}

// A barrier of all threads of the cluster in two halves; what was written before the one is seen after the other.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}

// `cluster_arrive` without the order of memory, which costs a membar.gpu: enough for new mbarriers, after
// fence_barrier_init.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
#endif
}

// The address in block `rank` of what lies at `smem` here, and four floats from such an address. The block must have started
// and must not have ended.
__device__ __forceinline__ uint32_t cluster_address(uint32_t smem, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(smem) : "r"(smem), "r"(rank));
#endif
  return smem;
}
__device__ __forceinline__ float4 load_cluster(uint32_t address) {
  float4 v = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
#endif
  return v;
}

// Writes two floats to where `p` lies in the shared memory of the block of that rank, which must have started and must
// not have ended.
__device__ __forceinline__ void store_to_block(float* p, int rank, float a, float b) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nst.shared::cluster.v2.f32 [remote], {%2, "
      "%3};\n}\n" ::"r"(smem_address(p)),
      "r"(rank), "f"(a), "f"(b)
      : "memory");
#endif
}

// The same, as 8 bytes that complete on the mbarrier that lies there at `barrier`: who waits for that sees them, without
// a barrier of the cluster.
__device__ __forceinline__ void send_to_block(float* p, uint32_t barrier, int rank, float a, float b) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 remote, done;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\nmapa.shared::cluster.u32 done, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [remote], {%3, %4}, [done];\n}\n" ::"r"(
          smem_address(p)),
      "r"(barrier), "r"(rank), "f"(a), "f"(b)
      : "memory");
#endif
}

}  // namespace ortplugins
