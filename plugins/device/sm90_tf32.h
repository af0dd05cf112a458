// tf32 on Hopper: wgmma with A in registers, and copies that round.
#pragma once

#include "device/sm90.h"
#include "device/tensor_map.h"

namespace ortplugins {

// A float that TMA rounds to tf32 on its way to shared memory.
struct RoundedFloat {
  float value;
};
template <>
constexpr CUtensorMapDataType tensor_map_type<RoundedFloat>() {
  return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
}

// acc (64 x kN) = a b + (accumulate ? acc : 0), m64nNk8. Register 0 of a is row 16 w + g, column t of the step; register 1 row
// + 8; registers 2 and 3 four columns on. b lies in shared memory along k.
template <int kN>
struct WgmmaTf32Registers;

#define ORTPLUGINS_WGMMA_TF32(n, count, a0, a1, a2, a3, b, p)                                                                  \
  template <>                                                                                                                 \
  struct WgmmaTf32Registers<n> {                                                                                              \
    __device__ __forceinline__ static void run(float (&acc)[count], const uint32_t (&a)[4], uint64_t desc_b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                       \
                   "k8.f32.tf32.tf32 {" ORTPLUGINS_REGS_##count "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b           \
                   ", p, 1, 1;\n}\n"                                                                                          \
                   : ORTPLUGINS_ACC_##count(acc, 0)                                                                           \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(accumulate));                               \
    }                                                                                                                         \
  };
ORTPLUGINS_WGMMA_TF32(64, 32, 32, 33, 34, 35, 36, 37)
ORTPLUGINS_WGMMA_TF32(128, 64, 64, 65, 66, 67, 68, 69)
#undef ORTPLUGINS_WGMMA_TF32

}  // namespace ortplugins
