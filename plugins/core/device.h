// Where a kernel runs: facts about the device, read once when a kernel is made, and what the caller lends for one call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ortplugins {

enum class DeviceKind : uint8_t { kCpu, kCuda };

enum class CpuIsa : uint8_t { kGeneric, kAvx2, kAvx512 };

struct DeviceInfo {
  DeviceKind kind = DeviceKind::kCpu;
  // CPU
  CpuIsa isa = CpuIsa::kGeneric;
  int cores = 1;  // that this process may use: no pool runs more tasks at once to any gain
  // CUDA
  int ordinal = 0;
  int sm = 0;  // compute capability, 10 * major + minor
  int sm_count = 0;
  int max_smem_per_block = 0;  // bytes, opt-in limit
  int max_smem_per_sm = 0;     // bytes
  int64_t l2_bytes = 0;
};

// Facts of this machine's processor. Cheap; never fails.
const DeviceInfo& cpu_device();

// Facts of CUDA device `ordinal`, queried at the first call for it and kept. Null if there is no such device, no driver,
// or the library was built without CUDA. Not for the hot path.
const DeviceInfo* cuda_device(int ordinal);

// The caller's thread pool. `run` calls body(user, i) for i in [0, count), in any order, and returns when all are done.
struct CpuPool {
  void (*run)(void* pool, void (*body)(void* user, size_t i), size_t count, void* user) = nullptr;  // null: run in line
  void* pool = nullptr;

  // Runs body(i) for i in [0, count). Make several tasks per thread: iterations are handed out one by one.
  template <class Body>
  void parallel_for(int64_t count, const Body& body) const {
    if (run == nullptr || count <= 1) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    run(
        pool, [](void* user, size_t i) { (*static_cast<const Body*>(user))(static_cast<int64_t>(i)); },
        static_cast<size_t>(count), const_cast<Body*>(&body));
  }
};

// The caller's memory for the time of one call. `reserve` is called once at most, with the bytes that the chosen variant
// needs; null is its failure.
struct WorkspaceLender {
  void* (*reserve)(void* lender, int64_t bytes) = nullptr;  // null: nothing to lend beyond ExecContext::workspace
  void* lender = nullptr;
};

// What one call runs on. The workspace lies where the device can reach it, 256-byte aligned, and is not initialised. A
// caller that does not know yet how much is needed lends it when `run` asks.
struct ExecContext {
  const DeviceInfo* device = nullptr;
  void* stream = nullptr;  // cudaStream_t
  CpuPool pool;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  WorkspaceLender lender;
};

}  // namespace ortplugins
