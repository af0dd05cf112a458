// 16-byte packs of elements, and conversions between storage types and float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ortplugins {

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// Two floats as one 32-bit register of 16-bit elements, `lo` at the lower address.
template <class T>
__device__ __forceinline__ uint32_t pack_half2(float lo, float hi);
template <>
__device__ __forceinline__ uint32_t pack_half2<__half>(float lo, float hi) {
  const __half2 v = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&v);
}
template <>
__device__ __forceinline__ uint32_t pack_half2<__nv_bfloat16>(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// The inverse of pack_half2.
template <class T>
__device__ __forceinline__ float2 unpack_half2(uint32_t v);
template <>
__device__ __forceinline__ float2 unpack_half2<__half>(uint32_t v) { return __half22float2(*reinterpret_cast<const __half2*>(&v)); }
template <>
__device__ __forceinline__ float2 unpack_half2<__nv_bfloat16>(uint32_t v) { return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v)); }

// Two floats as sums of two float16 each, hi + lo, in 32-bit registers as pack_half2's: 22 bits, down to 2^-25.
__device__ __forceinline__ void split_half2(float x, float y, uint32_t* hi, uint32_t* lo) {
  *hi = pack_half2<__half>(x, y);
  const float2 rounded = unpack_half2<__half>(*hi);
  *lo = pack_half2<__half>(x - rounded.x, y - rounded.y);
}

constexpr int kPackBytes = 16;
template <class T>
constexpr int kPackSize = kPackBytes / static_cast<int>(sizeof(T));  // elements in a pack: 4 or 8

template <class T>
struct alignas(kPackBytes) Pack {
  T v[kPackSize<T>];
};

// One 128-bit access; `p` must be 16-byte aligned.
template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* p) {
  Pack<T> pack;
  *reinterpret_cast<uint4*>(&pack) = *reinterpret_cast<const uint4*>(p);
  return pack;
}
template <class T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T>& pack) {
  *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(&pack);
}
// To global memory, whatever else the code does: where a branch beside it stores element by element, the compiler may join
// the two and store elements in both.
template <class T>
__device__ __forceinline__ void store_pack_global(T* p, const Pack<T>& pack) {
  const uint4 v = *reinterpret_cast<const uint4*>(&pack);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// For memory that nobody writes while the kernel runs: such loads may move past stores.
template <class T>
__device__ __forceinline__ Pack<T> load_pack_readonly(const T* p) {
  Pack<T> pack;
  *reinterpret_cast<uint4*>(&pack) = __ldg(reinterpret_cast<const uint4*>(p));
  return pack;
}

// A pack as floats, and floats rounded to a pack; 16-bit elements two at a time.
__device__ __forceinline__ void unpack(const Pack<float>& pack, float (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = pack.v[i];
}
__device__ __forceinline__ void unpack(const Pack<__half>& pack, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2*>(&pack)[i]);
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void unpack(const Pack<__nv_bfloat16>& pack, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = reinterpret_cast<const uint32_t*>(&pack)[i];
    v[2 * i] = __uint_as_float(pair << 16);
    v[2 * i + 1] = __uint_as_float(pair & 0xffff0000U);
  }
}
template <class T>
__device__ __forceinline__ Pack<T> pack_floats(const float (&v)[kPackSize<T>]) {
  Pack<T> pack;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) pack.v[i] = v[i];
  } else {
    uint32_t* const words = reinterpret_cast<uint32_t*>(&pack);
#pragma unroll
    for (int i = 0; i < kPackSize<T> / 2; ++i) words[i] = pack_half2<T>(v[2 * i], v[2 * i + 1]);
  }
  return pack;
}

template <class T>
__device__ __forceinline__ Pack<T> filled_pack(T value) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < kPackSize<T>; ++i) pack.v[i] = value;
  return pack;
}

// Both packs taken apart into a `Part` each time, f of these.
template <class Part, class T, class Function>
__device__ __forceinline__ Pack<T> pack_each(const Pack<T>& a, const Pack<T>& b, const Function& f) {
  Pack<T> r;
#pragma unroll
  for (int i = 0; i < kPackBytes / static_cast<int>(sizeof(Part)); ++i) {
    reinterpret_cast<Part*>(&r)[i] = f(reinterpret_cast<const Part*>(&a)[i], reinterpret_cast<const Part*>(&b)[i]);
  }
  return r;
}
// Element by element, 16-bit ones two at a time. A NaN loses against a number.
__device__ __forceinline__ Pack<float> pack_max(const Pack<float>& a, const Pack<float>& b) {
  return pack_each<float>(a, b, [](float x, float y) { return fmaxf(x, y); });
}
__device__ __forceinline__ Pack<__half> pack_max(const Pack<__half>& a, const Pack<__half>& b) {
  return pack_each<__half2>(a, b, [](__half2 x, __half2 y) { return __hmax2(x, y); });
}
__device__ __forceinline__ Pack<__nv_bfloat16> pack_max(const Pack<__nv_bfloat16>& a, const Pack<__nv_bfloat16>& b) {
  return pack_each<__nv_bfloat162>(a, b, [](__nv_bfloat162 x, __nv_bfloat162 y) { return __hmax2(x, y); });
}
// The largest element.
__device__ __forceinline__ float largest(const Pack<float>& p) {
  return fmaxf(fmaxf(p.v[0], p.v[1]), fmaxf(p.v[2], p.v[3]));
}
template <class Pair, class T>
__device__ __forceinline__ float largest_of_pairs(const Pack<T>& p) {
  const Pair* const pairs = reinterpret_cast<const Pair*>(&p);
  const Pair top = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return fmaxf(to_float(top.x), to_float(top.y));
}
__device__ __forceinline__ float largest(const Pack<__half>& p) { return largest_of_pairs<__half2>(p); }
__device__ __forceinline__ float largest(const Pack<__nv_bfloat16>& p) { return largest_of_pairs<__nv_bfloat162>(p); }

// Sums, rounded to T once: in 16 bits, too, float32 in between would change nothing.
__device__ __forceinline__ Pack<float> pack_add(const Pack<float>& a, const Pack<float>& b) {
  return pack_each<float>(a, b, [](float x, float y) { return x + y; });
}
__device__ __forceinline__ Pack<__half> pack_add(const Pack<__half>& a, const Pack<__half>& b) {
  return pack_each<__half2>(a, b, [](__half2 x, __half2 y) { return __hadd2_rn(x, y); });
}
__device__ __forceinline__ Pack<__nv_bfloat16> pack_add(const Pack<__nv_bfloat16>& a, const Pack<__nv_bfloat16>& b) {
  return pack_each<__nv_bfloat162>(a, b, [](__nv_bfloat162 x, __nv_bfloat162 y) { return __hadd2_rn(x, y); });
}

// Makes the compiler convert the elements anew instead of keeping them as floats, too; of use in 16 bits.
template <class T>
__device__ __forceinline__ void forget(Pack<T>& pack) {
  uint32_t* const words = reinterpret_cast<uint32_t*>(&pack);
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(words[i]));
}

// All elements with the other sign.
template <class T>
__device__ __forceinline__ void negate(Pack<T>& pack) {
  uint32_t* const words = reinterpret_cast<uint32_t*>(&pack);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] ^= sizeof(T) == 4 ? 0x80000000U : 0x80008000U;
}

// Elements [begin, end) of a pack at `p`, of any alignment; the others of a loaded pack are `fill`.
template <class T>
__device__ __forceinline__ Pack<T> load_pack_guarded(const T* p, int begin, int end, T fill) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < kPackSize<T>; ++i) pack.v[i] = i >= begin && i < end ? p[i] : fill;
  return pack;
}
template <class T>
__device__ __forceinline__ void store_pack_guarded(T* p, const Pack<T>& pack, int begin, int end) {
#pragma unroll
  for (int i = 0; i < kPackSize<T>; ++i) {
    if (i >= begin && i < end) p[i] = pack.v[i];
  }
}

// Elements by which `p` lies past a 16-byte boundary, 0 to kPackSize - 1. A row that starts there is walked in packs
// from the boundary on: the first and the last pack are guarded, all others are aligned, whatever the row's own
// alignment.
template <class T>
__host__ __device__ __forceinline__ int pack_shift(const T* p) {
  return static_cast<int>((reinterpret_cast<uintptr_t>(p) & (kPackBytes - 1)) / sizeof(T));
}

inline bool is_aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace ortplugins
