// The Python adapter `ortplugins._native`: runs any op and any variant on raw pointers, for tests and benchmarks.
// ortplugins/native.py puts NumPy arrays in front of it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "core/attrs.h"
#include "core/infer.h"
#include "core/op.h"
#include "core/prepack.h"
#include "op_specs.h"

#if ORTPLUGINS_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace py = pybind11;

namespace ortplugins {
namespace {

// (address, ONNX type code, shape); None for an absent optional tensor
using TensorArg = std::optional<std::tuple<uintptr_t, int, std::vector<int64_t>>>;

[[noreturn]] void fail(const Op& op, const Status& status) {
  const std::string text = std::string(op.spec->name) + ": " + message(status);
  if (status.code == StatusCode::kInvalidArgument) throw py::value_error(text);
  if (status.code == StatusCode::kUnsupported) {
    PyErr_SetString(PyExc_NotImplementedError, text.c_str());
    throw py::error_already_set();
  }
  throw std::runtime_error(text);
}

void check(const Op& op, const Status& status) {
  if (!status.ok()) fail(op, status);
}

const Op& op_named(const std::string& name) {
  const Op* op = find_op(name.c_str());
  if (op == nullptr) throw py::key_error("there is no op " + name);
  return *op;
}

std::vector<AttrValue> attrs_of(const Op& op, const py::dict& given) {
  const OpSpec& spec = *op.spec;
  std::vector<RawAttr> raw(spec.attrs.size());
  std::vector<std::string> strings(spec.attrs.size());
  size_t used = 0;
  for (size_t a = 0; a < spec.attrs.size(); ++a) {
    const AttrSpec& attr = spec.attrs[a];
    if (!given.contains(attr.name)) continue;
    ++used;
    const py::object value = given[attr.name];
    raw[a].is_set = true;
    switch (attr.kind) {
      case AttrKind::kInt:
        raw[a].i = value.cast<int64_t>();
        break;
      case AttrKind::kFloat:
        raw[a].f = value.cast<float>();
        break;
      case AttrKind::kString:
        strings[a] = value.cast<std::string>();
        raw[a].s = strings[a];
        break;
    }
  }
  if (used != given.size()) throw py::value_error(std::string(spec.name) + ": an attribute is not in its specification");
  std::vector<AttrValue> values(spec.attrs.size());
  check(op, parse_attrs(spec, raw.data(), values.data()));
  return values;
}

std::vector<TensorRef> tensors_of(const std::vector<TensorArg>& given, size_t count, const char* what) {
  if (given.size() > count) throw py::value_error(std::string("too many ") + what);
  std::vector<TensorRef> tensors(count);
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i]) continue;
    const auto& [address, dtype, shape] = *given[i];
    if (shape.size() > kMaxRank) throw py::value_error(std::string("rank over 8 in ") + what);
    tensors[i].data = reinterpret_cast<void*>(address);
    tensors[i].dtype = static_cast<DType>(dtype);
    tensors[i].shape.rank = static_cast<int>(shape.size());
    for (size_t d = 0; d < shape.size(); ++d) tensors[i].shape.dims[d] = shape[d];
  }
  return tensors;
}

const DeviceInfo& device_named(const std::string& name, int ordinal) {
  if (name == "cpu") return cpu_device();
  if (name != "cuda") throw py::value_error("device must be 'cpu' or 'cuda', not '" + name + "'");
  const DeviceInfo* device = cuda_device(ordinal);
  if (device == nullptr) throw std::runtime_error("CUDA device " + std::to_string(ordinal) + " is not available");
  return *device;
}

int variant_named(const Op& op, const std::string& name) {
  if (name.empty()) return 0;
  for (const VariantInfo& info : op.variants) {
    if (name == info.name) return info.id;
  }
  throw py::value_error(std::string(op.spec->name) + " has no variant " + name);
}

// The types a runtime would check before it makes the kernel.
void check_types(const Op& op, const std::vector<TensorRef>& inputs) {
  const OpSpec& spec = *op.spec;
  const DType t = inputs[0].dtype;
  const auto allows = [](std::span<const DType> types, DType type) {
    for (const DType d : types) {
      if (d == type) return true;
    }
    return false;
  };
  if (!allows(spec.dtypes, t)) fail(op, Status::invalid(spec.inputs[0].name, "its type is not supported"));
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].present()) continue;
    const std::span<const DType> types = spec.inputs[i].dtypes;
    if (!allows(types, inputs[i].dtype) && !(allows(types, DType::kNone) && inputs[i].dtype == t)) {
      fail(op, Status::invalid(spec.inputs[i].name, "its type is not supported beside the type of the first input"));
    }
  }
}

// A call as Python gives it, bound to the kernel library's types.
struct Call {
  const Op& op;
  std::vector<AttrValue> attrs;
  std::vector<TensorRef> inputs, outputs;
  PackedInputs packed;
  const DeviceInfo& device;
  int variant_id;

  Call(const std::string& name, const py::dict& given_attrs, const std::vector<TensorArg>& given_inputs,
       const std::vector<TensorArg>& given_outputs, const std::string& device_name, int ordinal, const std::string& variant)
      : op(op_named(name)),
        attrs(attrs_of(op, given_attrs)),
        inputs(tensors_of(given_inputs, op.spec->inputs.size(), "inputs")),
        outputs(tensors_of(given_outputs, op.spec->outputs.size(), "outputs")),
        device(device_named(device_name, ordinal)),
        variant_id(variant_named(op, variant)) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].present() && !op.spec->inputs[i].optional) fail(op, Status::invalid(op.spec->inputs[i].name, "is missing"));
    }
    check_types(op, inputs);
    std::vector<Shape> shapes(outputs.size());
    check(op, infer_shapes(*op.spec, attrs.data(), inputs.data(), shapes.data()));
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].present() && !(outputs[i].shape == shapes[i])) {
        fail(op, Status::invalid(op.spec->outputs[i].name, "has another shape than the op gives"));
      }
      outputs[i].shape = shapes[i];
    }
  }
  OpArgs args() { return {inputs.data(), packed.pointers(), outputs.data(), attrs.data()}; }
};

// A pool of the call's own, so that tests see tasks run side by side as they do under a runtime.
struct ThreadPool {
  int threads;
  static void run(void* self, void (*body)(void*, size_t), size_t count, void* user) {
    std::atomic<size_t> next{0};
    const auto work = [&] {
      for (size_t i = next++; i < count; i = next++) body(user, i);
    };
    std::vector<std::thread> others;
    for (int t = 1; t < static_cast<ThreadPool*>(self)->threads; ++t) others.emplace_back(work);
    work();
    for (std::thread& t : others) t.join();
  }
};

void run(const std::string& name, const py::dict& attrs, const std::vector<TensorArg>& inputs, const std::vector<TensorArg>& outputs,
         const std::string& variant, const std::string& device, int ordinal, uintptr_t stream, uintptr_t workspace, int64_t workspace_bytes,
         int threads, bool prepack) {
  Call call(name, attrs, inputs, outputs, device, ordinal, variant);
  ThreadPool pool{threads};
  ExecContext context;
  context.device = &call.device;
  context.stream = reinterpret_cast<void*>(stream);
  if (threads > 1) context.pool = {ThreadPool::run, &pool};
  const py::gil_scoped_release release;
  if (prepack) call.packed.pack(call.op, call.args(), call.device);
  AlignedBuffer heap;
  context.workspace = reinterpret_cast<void*>(workspace);
  context.workspace_bytes = workspace_bytes;
  if (call.device.kind == DeviceKind::kCpu) {
    context.lender = {[](void* buffer, int64_t bytes) { return (*static_cast<AlignedBuffer*>(buffer) = allocate_aligned(bytes)).get(); }, &heap};
  }
  const Status status = call.op.run(call.args(), context, call.variant_id);
  if (!status.ok()) {
    const py::gil_scoped_acquire acquire;
    fail(call.op, status);
  }
}

#if ORTPLUGINS_WITH_CUDA
void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}
#endif

}  // namespace
}  // namespace ortplugins

PYBIND11_MODULE(_native, m) {
  using namespace ortplugins;
  m.doc() = "Direct access to the kernel library; use it through ortplugins.native.";
  m.attr("with_cuda") = static_cast<bool>(ORTPLUGINS_WITH_CUDA);

  m.def("variants", [](const std::string& name) {
    std::vector<std::tuple<int, std::string, std::string>> rows;
    for (const VariantInfo& info : op_named(name).variants) {
      rows.emplace_back(info.id, info.name, info.device == DeviceKind::kCpu ? "cpu" : "cuda");
    }
    return rows;
  });
  m.def("cpu_isa", [] {
    switch (cpu_device().isa) {
      case CpuIsa::kAvx512:
        return "avx512";
      case CpuIsa::kAvx2:
        return "avx2";
      case CpuIsa::kGeneric:
        break;
    }
    return "generic";
  });
  m.def("cuda_device", [](int ordinal) -> py::object {
    const DeviceInfo* d = cuda_device(ordinal);
    if (d == nullptr) return py::none();
    py::dict info;
    info["sm"] = d->sm;
    info["sm_count"] = d->sm_count;
    info["max_smem_per_block"] = d->max_smem_per_block;
    info["max_smem_per_sm"] = d->max_smem_per_sm;
    info["l2_bytes"] = d->l2_bytes;
    return info;
  });
  m.def("infer_shapes", [](const std::string& name, const py::dict& attrs, const std::vector<TensorArg>& inputs) {
    Call call(name, attrs, inputs, {}, "cpu", 0, "");
    std::vector<std::vector<int64_t>> shapes;
    for (const TensorRef& t : call.outputs) shapes.emplace_back(t.shape.dims, t.shape.dims + t.shape.rank);
    return shapes;
  });
  m.def("choose", [](const std::string& name, const py::dict& attrs, const std::vector<TensorArg>& inputs,
                     const std::vector<TensorArg>& outputs, const std::string& device, int ordinal) {
    Call call(name, attrs, inputs, outputs, device, ordinal, "");
    int id = 0;
    check(call.op, call.op.choose(call.args(), call.device, &id));
    for (const VariantInfo& info : call.op.variants) {
      if (info.id == id) return std::string(info.name);
    }
    return std::string();
  });
  m.def("workspace_bytes", [](const std::string& name, const py::dict& attrs, const std::vector<TensorArg>& inputs,
                              const std::vector<TensorArg>& outputs, const std::string& variant, const std::string& device, int ordinal) {
    Call call(name, attrs, inputs, outputs, device, ordinal, variant);
    int64_t bytes = 0;
    check(call.op, call.op.workspace_bytes(call.args(), call.device, call.variant_id, &bytes));
    return bytes;
  });
  m.def("run", run);

#if ORTPLUGINS_WITH_CUDA
  m.def("cuda_versions", [] {
    int driver = 0, runtime = 0;
    (void)cudaDriverGetVersion(&driver);
    (void)cudaRuntimeGetVersion(&runtime);
    return std::make_pair(driver, runtime);
  });
  m.def("cuda_malloc", [](int64_t bytes) {
    void* p = nullptr;
    check_cuda(cudaMalloc(&p, static_cast<size_t>(bytes > 0 ? bytes : 1)), "cudaMalloc");
    return reinterpret_cast<uintptr_t>(p);
  });
  m.def("cuda_free", [](uintptr_t p) { check_cuda(cudaFree(reinterpret_cast<void*>(p)), "cudaFree"); });
  m.def("cuda_copy", [](uintptr_t to, uintptr_t from, int64_t bytes) {
    check_cuda(cudaMemcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), static_cast<size_t>(bytes), cudaMemcpyDefault), "cudaMemcpy");
  });
  m.def("cuda_synchronize", [] { check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); });
#endif
}
