// Marks functions that both compilers see.
#pragma once

#if defined(__CUDACC__)
#define ORTPLUGINS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ORTPLUGINS_HOST_DEVICE inline
#endif
