// Asynchronous copies from global to shared memory that bypass registers (sm_80).
#pragma once

#include <cstdint>

namespace ortplugins {

// The 32-bit shared-window address that PTX instructions take.
__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Asks for the line of p in L2, where a later load finds it.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(p)); }

// Copies `bytes` (0 to 16) from 16-byte aligned `gmem` and fills the rest of the 16 bytes with zeros; with 0 bytes
// nothing is read, so a pointer outside the tensor does no harm. Goes through L2 only.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* gmem, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(smem), "l"(gmem), "r"(bytes) : "memory");
}
// As cp_async_16, for 4 bytes of that alignment.
__device__ __forceinline__ void cp_async_4(uint32_t smem, const void* gmem, int bytes = 4) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(smem), "l"(gmem), "r"(bytes) : "memory");
}

// The same for whole 16 and 4 bytes, by a predicated instruction: nothing happens where `condition` is false.
__device__ __forceinline__ void cp_async_16_if(bool condition, uint32_t smem, const void* gmem) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n}\n" ::"r"(smem), "l"(gmem), "r"(static_cast<int>(condition)) : "memory");
}
__device__ __forceinline__ void cp_async_4_if(bool condition, uint32_t smem, const void* gmem) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.ca.shared.global [%0], [%1], 4;\n}\n" ::"r"(smem), "l"(gmem), "r"(static_cast<int>(condition)) : "memory");
}

// Closes the group of copies that this thread has issued since the last commit; an empty group is allowed.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups are unfinished. A barrier must follow before other threads
// read what was copied.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// As cp_async_wait, for a number known only at run time; waits for more than asked if `pending` is over 8.
__device__ __forceinline__ void cp_async_wait_at_most(int pending) {
  switch (pending) {
    case 0: return cp_async_wait<0>();
    case 1: return cp_async_wait<1>();
    case 2: return cp_async_wait<2>();
    case 3: return cp_async_wait<3>();
    case 4: return cp_async_wait<4>();
    case 5: return cp_async_wait<5>();
    case 6: return cp_async_wait<6>();
    case 7: return cp_async_wait<7>();
    default: return cp_async_wait<8>();
  }
}

}  // namespace ortplugins
