// Kernels that start while the kernel in front of them in the stream still runs (programmatic dependent launch, sm_90):
// the time to launch the one is hidden behind the end of the other, about 0.5 us. Launched otherwise, both functions do
// nothing; but each block waits about 1 us for them, so that they cost more than they save in grids of many thousand
// small blocks.
#pragma once

namespace ortplugins {

// Until all kernels in front have ended and their writes can be seen. Nothing they may write or still read may be
// touched earlier: no input is read and no output written.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// The next kernel may start as soon as all blocks have said this; a kernel of ours, it waits where it must.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

}  // namespace ortplugins
