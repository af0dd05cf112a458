#include <algorithm>
#include <cmath>
#include <string>
#include <thread>

#include "core/attrs.h"
#include "core/device.h"
#include "core/infer.h"
#include "core/op.h"

namespace ortplugins {

std::string message(const Status& status) {
  std::string text;
  if (status.tensor[0] != '\0') text.append(status.tensor).append(": ");
  size_t next = 0;
  for (const char* p = status.format; *p != '\0'; ++p) {
    if (p[0] == '{' && p[1] == '}' && next < status.args.size()) {
      text += std::to_string(status.args[next++]);
      ++p;
    } else {
      text += *p;
    }
  }
  return text;
}

namespace {

struct Int64Algebra {
  using Dim = int64_t;
  Dim constant(int64_t v) const { return v; }
  Dim product(Dim a, Dim b) const { return a * b; }
  Dim sum(Dim a, Dim b) const { return a + b; }
  Dim quotient(Dim a, int64_t b) const { return a / b; }
  bool known(Dim a, int64_t* value) const {
    *value = a;
    return true;
  }
  Dim broadcast(Dim a, Dim b, bool* possible) const {
    *possible = a == b || a == 1 || b == 1;
    return a == 1 ? b : a;
  }
};

CpuIsa detect_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return CpuIsa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return CpuIsa::kAvx2;
#endif
  return CpuIsa::kGeneric;
}

}  // namespace

Status infer_shapes(const OpSpec& spec, const AttrValue* attrs, const TensorRef* inputs, Shape* outputs) {
  DimsOf<int64_t> in[kMaxInputs];
  DimsOf<int64_t> out[kMaxOutputs];
  for (size_t i = 0; i < spec.inputs.size(); ++i) {
    in[i].present = inputs[i].present();
    in[i].rank = inputs[i].shape.rank;
    for (int d = 0; d < in[i].rank; ++d) in[i].dims[d] = inputs[i].shape.dims[d];
  }
  ORTPLUGINS_RETURN_IF_ERROR(infer_dims<Int64Algebra>(spec, attrs, in, out));
  for (size_t i = 0; i < spec.outputs.size(); ++i) {
    outputs[i].rank = out[i].rank;
    for (int d = 0; d < out[i].rank; ++d) outputs[i].dims[d] = out[i].dims[d];
  }
  return {};
}

Status parse_attrs(const OpSpec& spec, const RawAttr* raw, AttrValue* values) {
  for (size_t a = 0; a < spec.attrs.size(); ++a) {
    const AttrSpec& attr = spec.attrs[a];
    AttrValue& value = values[a];
    value = {raw[a].is_set || attr.has_default, attr.default_int, attr.default_float};
    if (!raw[a].is_set) continue;
    switch (attr.kind) {
      case AttrKind::kInt:
        value.i = raw[a].i;
        if (value.i < attr.minimum || value.i > attr.maximum) {
          return Status::invalid(attr.name, "{} is not in [{}, {}]", {value.i, attr.minimum, attr.maximum});
        }
        break;
      case AttrKind::kFloat:
        value.f = raw[a].f;
        if (!std::isfinite(value.f)) return Status::invalid(attr.name, "is not a finite number");
        break;
      case AttrKind::kString: {
        size_t c = 0;
        while (c < attr.choices.size() && raw[a].s != attr.choices[c]) ++c;
        if (c == attr.choices.size()) return Status::invalid(attr.name, "is not one of the values that the op knows");
        value.i = static_cast<int64_t>(c);
        break;
      }
    }
  }
  for (size_t a = 0; a < spec.attrs.size(); ++a) {
    if (spec.attrs[a].zero_means >= 0 && values[a].i == 0) values[a].i = values[spec.attrs[a].zero_means].i;
  }
  return {};
}

std::string attr_message(const OpSpec& spec, const RawAttr* raw, const Status& status) {
  for (size_t a = 0; a < spec.attrs.size(); ++a) {
    const AttrSpec& attr = spec.attrs[a];
    if (attr.kind != AttrKind::kString || std::string_view(status.tensor) != attr.name) continue;
    std::string text = std::string("attribute ") + attr.name + ": '" + std::string(raw[a].s) + "' is not one of";
    for (const char* choice : attr.choices) text.append(" ").append(choice);
    return text;
  }
  return "attribute " + message(status);
}

const Op* find_op(const char* name) {
  for (const Op* op : all_ops()) {
    if (std::string_view(op->spec->name) == name) return op;
  }
  return nullptr;
}

const DeviceInfo& cpu_device() {
  static const DeviceInfo info = [] {
    DeviceInfo device;
    device.kind = DeviceKind::kCpu;
    device.isa = detect_isa();
    device.cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    return device;
  }();
  return info;
}

#if !ORTPLUGINS_WITH_CUDA
const DeviceInfo* cuda_device(int) { return nullptr; }
#endif

}  // namespace ortplugins
