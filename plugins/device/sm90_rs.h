// wgmma with A in registers, and the widths that attention tiles need beside those of sm90.h.
//
// Layout of A (64 x 16, 16-bit elements), with w = warp % 4, g = lane / 4, t = lane % 4: register 0 is row 16 w + g, columns
// 2t and 2t + 1; register 1 row + 8; registers 2 and 3 the same eight columns on. So accumulator registers 8 i to 8 i + 7,
// rounded to 16 bits in pairs, are as they stand the A operand of columns 16 i to 16 i + 15.
#pragma once

#include "device/sm90.h"

namespace ortplugins {

// acc (64 x kN) += a b with a in registers, and b (k x n) stored along n.
template <class Element, int kN>
struct WgmmaRegisters;

#define ORTPLUGINS_REGS_20 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19"
#define ORTPLUGINS_REGS_24 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define ORTPLUGINS_REGS_36 ORTPLUGINS_REGS_32 ", %32, %33, %34, %35"
#define ORTPLUGINS_REGS_40 ORTPLUGINS_REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define ORTPLUGINS_REGS_48 ORTPLUGINS_REGS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define ORTPLUGINS_REGS_80 \
  ORTPLUGINS_REGS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define ORTPLUGINS_ACC_8(d, i) ORTPLUGINS_ACC_4(d, i), ORTPLUGINS_ACC_4(d, i + 4)
#define ORTPLUGINS_ACC_20(d, i) ORTPLUGINS_ACC_16(d, i), ORTPLUGINS_ACC_4(d, i + 16)
#define ORTPLUGINS_ACC_24(d, i) ORTPLUGINS_ACC_16(d, i), ORTPLUGINS_ACC_8(d, i + 16)
#define ORTPLUGINS_ACC_36(d, i) ORTPLUGINS_ACC_32(d, i), ORTPLUGINS_ACC_4(d, i + 32)
#define ORTPLUGINS_ACC_40(d, i) ORTPLUGINS_ACC_32(d, i), ORTPLUGINS_ACC_8(d, i + 32)
#define ORTPLUGINS_ACC_48(d, i) ORTPLUGINS_ACC_32(d, i), ORTPLUGINS_ACC_16(d, i + 32)
#define ORTPLUGINS_ACC_80(d, i) ORTPLUGINS_ACC_64(d, i), ORTPLUGINS_ACC_16(d, i + 64)

// count: n / 2 accumulators; a0 to a3, b, p, t: operand numbers.
#define ORTPLUGINS_WGMMA_RS(Element, type, n, count, a0, a1, a2, a3, b, p, t)                                                   \
  template <>                                                                                                                 \
  struct WgmmaRegisters<Element, n> {                                                                                         \
    __device__ __forceinline__ static void run(float (&acc)[count], const uint32_t (&a)[4], uint64_t desc_b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type       \
                   "." type " {" ORTPLUGINS_REGS_##count "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b                  \
                   ", p, 1, 1, 1;\n}\n"                                                                                       \
                   : ORTPLUGINS_ACC_##count(acc, 0)                                                                           \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(accumulate));                               \
    }                                                                                                                         \
  };
#define ORTPLUGINS_WGMMA_SS(Element, type, n, count, a, b, p)                                                           \
  template <>                                                                                                           \
  struct Wgmma<Element, n, false, false> {                                                                              \
    static constexpr int kK = 16;                                                                                       \
    __device__ __forceinline__ static void run(float (&acc)[count], uint64_t desc_a, uint64_t desc_b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type \
                   "." type " {" ORTPLUGINS_REGS_##count "}, %" #a ", %" #b ", p, 1, 1, 0, 0;\n}\n"                     \
                   : ORTPLUGINS_ACC_##count(acc, 0)                                                                     \
                   : "l"(desc_a), "l"(desc_b), "r"(accumulate));                                                        \
    }                                                                                                                   \
  };
#define ORTPLUGINS_WGMMA_TYPES(F, ...) F(__half, "f16", __VA_ARGS__) F(__nv_bfloat16, "bf16", __VA_ARGS__)

ORTPLUGINS_WGMMA_TYPES(ORTPLUGINS_WGMMA_RS, 40, 20, 20, 21, 22, 23, 24, 25, 26)
ORTPLUGINS_WGMMA_TYPES(ORTPLUGINS_WGMMA_RS, 64, 32, 32, 33, 34, 35, 36, 37, 38)
ORTPLUGINS_WGMMA_TYPES(ORTPLUGINS_WGMMA_RS, 72, 36, 36, 37, 38, 39, 40, 41, 42)
ORTPLUGINS_WGMMA_TYPES(ORTPLUGINS_WGMMA_RS, 80, 40, 40, 41, 42, 43, 44, 45, 46)
ORTPLUGINS_WGMMA_TYPES(ORTPLUGINS_WGMMA_RS, 96, 48, 48, 49, 50, 51, 52, 53, 54)
ORTPLUGINS_WGMMA_TYPES(ORTPLUGINS_WGMMA_RS, 128, 64, 64, 65, 66, 67, 68, 69, 70)
ORTPLUGINS_WGMMA_TYPES(ORTPLUGINS_WGMMA_RS, 192, 96, 96, 97, 98, 99, 100, 101, 102)
ORTPLUGINS_WGMMA_TYPES(ORTPLUGINS_WGMMA_RS, 256, 128, 128, 129, 130, 131, 132, 133, 134)
ORTPLUGINS_WGMMA_TYPES(ORTPLUGINS_WGMMA_SS, 48, 24, 24, 25, 26)
ORTPLUGINS_WGMMA_TYPES(ORTPLUGINS_WGMMA_SS, 80, 40, 40, 41, 42)
ORTPLUGINS_WGMMA_TYPES(ORTPLUGINS_WGMMA_SS, 96, 48, 48, 49, 50)
#undef ORTPLUGINS_WGMMA_RS
#undef ORTPLUGINS_WGMMA_SS
#undef ORTPLUGINS_WGMMA_TYPES

}  // namespace ortplugins
