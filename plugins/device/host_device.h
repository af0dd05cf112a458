// Marks functions that both compilers see. Always inlined on the host: CPU kernel files are compiled for several
// instruction sets, and the linker would keep one copy of an inline function, whichever it was compiled for.
#pragma once

#if defined(__CUDACC__)
#define ORTPLUGINS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ORTPLUGINS_HOST_DEVICE __attribute__((always_inline)) inline
#endif
