// The type-erased face of an op, as adapters see it. An adapter translates the runtime's tensors to OpArgs and calls the
// functions of Op; it knows no op by name. Kernel folders make their Op with `make_op` and register it in `all_ops`.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <span>

#include "core/device.h"
#include "core/op_spec.h"
#include "core/shape.h"
#include "core/status.h"
#include "core/variant.h"

namespace ortplugins {

// One call: tensors and attribute values in the order of the specification. `packed[i]` is what `prepack` wrote for
// input i, or null; `packed` itself may be null.
struct OpArgs {
  const TensorRef* inputs = nullptr;
  const void* const* packed = nullptr;
  TensorRef* outputs = nullptr;
  const AttrValue* attrs = nullptr;

  const void* packed_input(int i) const { return packed == nullptr ? nullptr : packed[i]; }
};

struct VariantInfo {
  int id;
  const char* name;
  DeviceKind device;
};

struct Op {
  const OpSpec* spec;
  std::span<const VariantInfo> variants;

  // Bytes of workspace that `run` needs for these arguments; data pointers are not looked at.
  Status (*workspace_bytes)(const OpArgs& args, const DeviceInfo& device, int variant_id, int64_t* bytes);

  // The variant that `run` would take; 0 in `variant_id` when there is none.
  Status (*choose)(const OpArgs& args, const DeviceInfo& device, int* variant_id);

  // Binds, chooses (or takes `variant_id`, if it is not 0), borrows workspace from the context's lender if more is needed than
  // was given, and launches. Output shapes must be those of `infer_shapes`.
  Status (*run)(const OpArgs& args, const ExecContext& context, int variant_id);

  // Constant inputs may be brought once into the layout that the device's kernels like best. `prepack_bytes` gives 0 for
  // an input that is used as it is. Null: the op packs nothing.
  int64_t (*prepack_bytes)(const OpArgs& args, int input, const DeviceInfo& device);
  void (*prepack)(const OpArgs& args, int input, const DeviceInfo& device, void* packed);
};

// Every op of the library, in the order of the specification.
std::span<const Op* const> all_ops();

// Null if there is none of that name.
const Op* find_op(const char* name);

template <class Params>
using Bind = Status (*)(const OpArgs& args, Params* params);

// First row that supports the problem and suits it, or the row with `variant_id`.
template <class Params>
Status choose_variant(std::span<const Variant<Params>> table, const Params& params, const DeviceInfo& device,
                      int variant_id, const Variant<Params>** chosen) {
  for (const Variant<Params>& row : table) {
    if (variant_id != 0 && row.id != variant_id) continue;
    if (row.device == device.kind && row.supports(params, device) && (variant_id != 0 || row.suits == nullptr || row.suits(params, device))) {
      *chosen = &row;
      return {};
    }
    if (variant_id != 0) return Status::unsupported("variant", "variant {} does not support this problem on this device", {variant_id});
  }
  if (variant_id != 0) return Status::invalid("variant", "there is no variant {}", {variant_id});
  return Status::unsupported("variant", device.kind == DeviceKind::kCuda ? "no CUDA kernel in this build runs on sm_{}" : "no CPU kernel", {device.sm});
}

// True if every output is absent or empty: there is nothing to launch.
inline bool writes_nothing(const OpArgs& args, size_t output_count) {
  for (size_t i = 0; i < output_count; ++i) {
    if (args.outputs[i].present() && args.outputs[i].shape.size() != 0) return false;
  }
  return true;
}

// Makes sure that the context has `bytes` of workspace.
inline Status borrow_workspace(int64_t bytes, ExecContext* context) {
  if (bytes <= context->workspace_bytes) return {};
  if (context->lender.reserve == nullptr) return Status::invalid("workspace", "{} bytes are needed, {} given", {bytes, context->workspace_bytes});
  context->workspace = context->lender.reserve(context->lender.lender, bytes);
  if (context->workspace == nullptr) return Status::unsupported("workspace", "{} bytes could not be allocated", {bytes});
  context->workspace_bytes = bytes;
  return {};
}

// Fills an Op from a bind function and a variant table with static storage.
template <class Params, const OpSpec& kSpec, Bind<Params> kBind, const auto& kTable>
struct OpFunctions {
  static constexpr std::span<const Variant<Params>> table() { return kTable; }

  static constexpr bool ids_differ() {
    for (size_t i = 0; i < std::size(kTable); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (kTable[i].id == kTable[j].id) return false;
      }
    }
    return true;
  }
  static_assert(ids_differ(), "two rows of the variant table have one id");

  static constexpr auto kInfos = [] {
    std::array<VariantInfo, std::size(kTable)> infos{};
    for (size_t i = 0; i < infos.size(); ++i) infos[i] = {kTable[i].id, kTable[i].name, kTable[i].device};
    return infos;
  }();

  static Status workspace_bytes(const OpArgs& args, const DeviceInfo& device, int variant_id, int64_t* bytes) {
    Params params;
    ORTPLUGINS_RETURN_IF_ERROR(kBind(args, &params));
    const Variant<Params>* row = nullptr;
    ORTPLUGINS_RETURN_IF_ERROR(choose_variant(table(), params, device, variant_id, &row));
    *bytes = row->workspace_bytes == nullptr ? 0 : row->workspace_bytes(params, device);
    return {};
  }

  static Status choose(const OpArgs& args, const DeviceInfo& device, int* variant_id) {
    *variant_id = 0;
    Params params;
    ORTPLUGINS_RETURN_IF_ERROR(kBind(args, &params));
    const Variant<Params>* row = nullptr;
    ORTPLUGINS_RETURN_IF_ERROR(choose_variant(table(), params, device, 0, &row));
    *variant_id = row->id;
    return {};
  }

  // The typed entry, for callers that have Params.
  static Status run(const Params& params, const ExecContext& given, int variant_id) {
    const Variant<Params>* row = nullptr;
    ORTPLUGINS_RETURN_IF_ERROR(choose_variant(table(), params, *given.device, variant_id, &row));
    if (row->workspace_bytes == nullptr) return row->launch(params, given);
    ExecContext context = given;
    ORTPLUGINS_RETURN_IF_ERROR(borrow_workspace(row->workspace_bytes(params, *context.device), &context));
    return row->launch(params, context);
  }

  static Status run(const OpArgs& args, const ExecContext& context, int variant_id) {
    Params params;
    ORTPLUGINS_RETURN_IF_ERROR(kBind(args, &params));
    if (writes_nothing(args, std::size(kSpec.outputs))) {  // but a forced variant that does not exist is an error
      const Variant<Params>* row = nullptr;
      return choose_variant(table(), params, *context.device, variant_id, &row);
    }
    return run(params, context, variant_id);
  }

  static constexpr Op make() {
    return {&kSpec, kInfos, workspace_bytes, choose, run, nullptr, nullptr};
  }
};

}  // namespace ortplugins
