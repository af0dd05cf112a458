// Facts of the CUDA devices, queried once for each.
#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "core/device.h"

namespace ortplugins {

const DeviceInfo* cuda_device(int ordinal) {
  constexpr int kMaxDevices = 64;
  static std::mutex mutex;
  static std::array<DeviceInfo, kMaxDevices> devices;
  static std::array<bool, kMaxDevices> known{};
  if (ordinal < 0 || ordinal >= kMaxDevices) return nullptr;
  const std::lock_guard lock(mutex);
  if (known[ordinal]) return &devices[ordinal];
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || ordinal >= count) {
    (void)cudaGetLastError();  // "no device" is an answer here, not an error to leave behind
    return nullptr;
  }
  const auto attribute = [ordinal](cudaDeviceAttr attr) {
    int value = 0;
    (void)cudaDeviceGetAttribute(&value, attr, ordinal);
    return value;
  };
  DeviceInfo& info = devices[ordinal];
  info.kind = DeviceKind::kCuda;
  info.ordinal = ordinal;
  info.sm = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  info.sm_count = attribute(cudaDevAttrMultiProcessorCount);
  info.max_smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  info.max_smem_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  info.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  known[ordinal] = true;
  return &info;
}

}  // namespace ortplugins
