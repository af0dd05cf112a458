// From a run-time request to a launched kernel: element type to C++ type, shared-memory opt-in, checked launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/device.h"
#include "core/dispatch.h"
#include "core/dtype.h"
#include "core/status.h"

namespace ortplugins {

// Calls body(TypeTag<Element>{}) with the C++ type of a floating-point dtype.
template <class Body>
Status dispatch(DType dtype, const Body& body) {
  return dispatch_as<float, __half, __nv_bfloat16>(dtype, body);
}

// As `dispatch`, for kernels of 16-bit elements only.
template <class Body>
Status dispatch_half(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(TypeTag<__half>{});
    case DType::kBFloat16:
      return body(TypeTag<__nv_bfloat16>{});
    default:
      return Status::unsupported("dtype", "has the ONNX type code {}, not a 16-bit floating-point type",
                                 {static_cast<int64_t>(dtype)});
  }
}

inline Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // reported here; the next caller shall not find it
  return Status::cuda(what, static_cast<int>(error));
}

// Raises the dynamic shared-memory limit of one kernel above 48 KB, once for each device. Keep it `static` beside the
// launch: after the first call it costs one relaxed load. `bytes` is the most the kernel ever asks for.
class SmemLimit {
 public:
  template <class... KernelArgs>
  Status raise(void (*kernel)(KernelArgs...), const DeviceInfo& device, int bytes) {
    const uint64_t bit = uint64_t{1} << (device.ordinal & 63);
    if ((raised_.load(std::memory_order_relaxed) & bit) != 0) return {};
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) raised_.fetch_or(bit, std::memory_order_relaxed);
    return status_of(error, "cudaFuncSetAttribute");
  }

 private:
  std::atomic<uint64_t> raised_{0};  // bit i: device i; two threads that race do the same thing twice
};

// How many clusters of a kernel a device runs at once, with one block on a multiprocessor; asked once for each device
// and cluster size (up to 8). Keep it `static` beside the launch, as SmemLimit.
class ClusterLimit {
 public:
  // For blocks of so many threads and bytes that no two of them share a multiprocessor.
  template <class... KernelArgs>
  int get(void (*kernel)(KernelArgs...), const DeviceInfo& device, int cluster, int threads, int smem_bytes) {
    if (cluster == 1) return device.sm_count;
    std::atomic<int>& count = known_[device.ordinal & 63][cluster];
    if (const int n = count.load(std::memory_order_relaxed); n > 0) return n;
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(cluster);
    config.blockDim = static_cast<unsigned>(threads);
    config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.attrs = &attribute;
    config.numAttrs = 1;
    int n = 0;
    if (cudaOccupancyMaxActiveClusters(&n, kernel, &config) != cudaSuccess) (void)cudaGetLastError();
    n = n > 0 ? n : 1;
    count.store(n, std::memory_order_relaxed);
    return n;
  }

 private:
  std::atomic<int> known_[64][9] = {};  // two threads that race do the same thing twice
};

struct LaunchOptions {
  unsigned cluster = 1;   // neighbouring blocks of grid.x that form a cluster (sm_90)
  bool overlaps = false;  // may start early: the kernel calls wait_for_previous_kernel() (device/dependent_launch.h)
};

// Launches kernel(args...) on the caller's stream. `what` names the kernel in an error.
template <class... KernelArgs, class... Args>
Status launch_with(const LaunchOptions& options, const char* what, void (*kernel)(KernelArgs...), dim3 grid, dim3 block,
                   size_t smem_bytes, const ExecContext& context, Args&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(context.stream);
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (options.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {options.cluster, 1, 1};
  }
  if (options.overlaps && context.device->sm >= 90) {
    cudaLaunchAttribute& overlaps = attributes[config.numAttrs++];
    overlaps.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlaps.val.programmaticStreamSerializationAllowed = 1;
  }
  return status_of(cudaLaunchKernelEx(&config, kernel, static_cast<KernelArgs>(args)...), what);
}

template <class... KernelArgs, class... Args>
Status launch(const char* what, void (*kernel)(KernelArgs...), dim3 grid, dim3 block, size_t smem_bytes,
              const ExecContext& context, Args&&... args) {
  return launch_with({}, what, kernel, grid, block, smem_bytes, context, std::forward<Args>(args)...);
}

// As `launch`, with `cluster` (up to 8) neighbouring blocks of x in a cluster.
template <class... KernelArgs, class... Args>
Status launch_cluster(const char* what, void (*kernel)(KernelArgs...), dim3 grid, dim3 block, size_t smem_bytes,
                      unsigned cluster, const ExecContext& context, Args&&... args) {
  return launch_with({cluster}, what, kernel, grid, block, smem_bytes, context, std::forward<Args>(args)...);
}

// A grid dimension for `count` work items that a kernel walks with a grid-stride loop.
inline unsigned grid_size(int64_t count, int64_t limit = 0x7fffffff) {
  return static_cast<unsigned>(count < limit ? count : limit);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace ortplugins
