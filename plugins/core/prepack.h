// Host memory for kernels: aligned buffers, and constant inputs in the layout that the device's kernels like best.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "core/op.h"

namespace ortplugins {

inline constexpr size_t kWorkspaceAlignment = 256;

struct FreeAligned {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t{kWorkspaceAlignment}); }
};
using AlignedBuffer = std::unique_ptr<void, FreeAligned>;

inline AlignedBuffer allocate_aligned(int64_t bytes) {
  return AlignedBuffer(::operator new(static_cast<size_t>(bytes), std::align_val_t{kWorkspaceAlignment}));
}

// The packed constants of one node.
class PackedInputs {
 public:
  // Packs those of the present inputs that the op packs for this device; the others are used as they are.
  void pack(const Op& op, const OpArgs& args, const DeviceInfo& device) {
    if (op.prepack_bytes == nullptr || device.kind != DeviceKind::kCpu) return;  // what is packed here lies in host memory
    for (size_t i = 0; i < op.spec->inputs.size(); ++i) {
      if (!args.inputs[i].present()) continue;
      const int64_t bytes = op.prepack_bytes(args, static_cast<int>(i), device);
      if (bytes <= 0) continue;
      buffers_[i] = allocate_aligned(bytes);
      op.prepack(args, static_cast<int>(i), device, buffers_[i].get());
      pointers_[i] = buffers_[i].get();
    }
  }

  // For OpArgs::packed.
  const void* const* pointers() const { return pointers_.data(); }

 private:
  std::array<AlignedBuffer, kMaxInputs> buffers_;
  std::array<const void*, kMaxInputs> pointers_{};
};

}  // namespace ortplugins
