// A variant is one row of an op's table: a way to compute it that some device and some problems allow. The same row is a
// dispatch candidate, a test parameter, a benchmark line and a TensorRT tactic.
#pragma once

#include <cstdint>

#include "core/device.h"
#include "core/status.h"

namespace ortplugins {

// Rows are ordered best first within a device kind; the first that supports the problem and suits it is taken. The last row
// of a kind accepts everything that `bind` lets through. An `id` never changes meaning; 0 is never used.
template <class Params>
struct Variant {
  int id;
  const char* name;
  DeviceKind device;
  bool (*supports)(const Params& params, const DeviceInfo& device);
  Status (*launch)(const Params& params, const ExecContext& context);
  int64_t (*workspace_bytes)(const Params& params, const DeviceInfo& device) = nullptr;  // null: none
  // Of a problem that it supports: whether this row is expected to be the fastest of those that follow. A row that is forced
  // need not suit. Null: always.
  bool (*suits)(const Params& params, const DeviceInfo& device) = nullptr;
};

// For rows of CPU kernels: what the processor must have.
template <class Params, CpuIsa kIsa>
bool supports_isa(const Params&, const DeviceInfo& device) {
  return device.isa >= kIsa;
}

}  // namespace ortplugins
