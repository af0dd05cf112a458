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
__device__ __forceinline__ float from_float<float>(float v) { return v; }
template <>
__device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

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
// For memory that nobody writes while the kernel runs: such loads may move past stores.
template <class T>
__device__ __forceinline__ Pack<T> load_pack_readonly(const T* p) {
  Pack<T> pack;
  *reinterpret_cast<uint4*>(&pack) = __ldg(reinterpret_cast<const uint4*>(p));
  return pack;
}
// Evict-first: for data that is touched once, so that it does not push out what is used again.
template <class T>
__device__ __forceinline__ Pack<T> load_pack_streaming(const T* p) {
  Pack<T> pack;
  *reinterpret_cast<uint4*>(&pack) = __ldcs(reinterpret_cast<const uint4*>(p));
  return pack;
}
template <class T>
__device__ __forceinline__ void store_pack_streaming(T* p, const Pack<T>& pack) {
  __stcs(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(&pack));
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

// Elements by which `p` lies past a 16-byte boundary, 0 to kPackSize - 1. A row that starts there is walked in packs from
// the boundary on: the first and the last pack are guarded, all others are aligned, whatever the row's own alignment.
template <class T>
__host__ __device__ __forceinline__ int pack_shift(const T* p) {
  return static_cast<int>((reinterpret_cast<uintptr_t>(p) & (kPackBytes - 1)) / sizeof(T));
}

inline bool is_aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace ortplugins
