// The ONNX Runtime adapter: registers every op of the specification, for CPU and CUDA, and translates the runtime's
// tensors and attributes for the kernel library. It knows no op by name.
//
// The library links no ONNX Runtime: it is handed the OrtApiBase, asks it for API 21 (ONNX Runtime 1.21) and uses nothing
// newer, so that one binary serves all later versions.
#include <onnxruntime_c_api.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "core/attrs.h"
#include "core/infer.h"
#include "core/op.h"
#include "core/prepack.h"
#include "op_specs.h"

namespace ortplugins {
namespace {

constexpr uint32_t kApiVersion = 21;

const OrtApi* g_api = nullptr;  // set by RegisterCustomOps before anything else can run
int g_minor_version = 0;        // 24 for ONNX Runtime 1.24.4

OrtStatus* error(const std::string& text, OrtErrorCode code = ORT_INVALID_ARGUMENT) {
  return g_api->CreateStatus(code, text.c_str());
}

// The runtime's own error, with the node in front of it where the runtime cannot know it.
#define ORTPLUGINS_RETURN_IF_ORT_ERROR(expression)                           \
  do {                                                                       \
    if (OrtStatus* ort_status_ = (expression); ort_status_ != nullptr) return ort_status_; \
  } while (false)

ONNXTensorElementDataType ort_type(DType dtype) { return static_cast<ONNXTensorElementDataType>(dtype); }

// True if `status` is null; releases it otherwise. For calls whose failure is an answer.
bool succeeded(OrtStatus* status) {
  if (status == nullptr) return true;
  g_api->ReleaseStatus(status);
  return false;
}

// --- Registration rows ------------------------------------------------------------------------------------------------

// One op with one choice of types on one execution provider.
struct Registration : OrtCustomOp {
  const Op* op = nullptr;
  const char* provider = nullptr;  // null: CPU
  std::array<DType, kMaxInputs> input_types{};
  std::array<DType, kMaxOutputs> output_types{};

  DeviceKind device() const { return provider == nullptr ? DeviceKind::kCpu : DeviceKind::kCuda; }
};

const Registration& self(const OrtCustomOp* op) { return *static_cast<const Registration*>(op); }

// --- A kernel: one node of a session ------------------------------------------------------------------------------------

struct Kernel {
  const Op* op = nullptr;
  const DeviceInfo* device = nullptr;
  std::array<AttrValue, kMaxAttrs> attrs{};
  std::array<DType, kMaxInputs> input_types{};
  std::array<DType, kMaxOutputs> output_types{};
  PackedInputs packed;
  OrtAllocator* allocator = nullptr;        // of the CUDA provider; null on CPU
  const OrtMemoryInfo* memory = nullptr;    // owned by `allocator`
  std::string node;

  ~Kernel() {
    if (allocator != nullptr) g_api->ReleaseAllocator(allocator);
  }

  std::string describe(const std::string& what) const {
    return std::string(op->spec->name) + (node.empty() ? "" : " node '" + node + "'") + ": " + what;
  }
  OrtStatus* fail(const Status& status) const {
    const OrtErrorCode code = status.code == StatusCode::kInvalidArgument ? ORT_INVALID_ARGUMENT
                              : status.code == StatusCode::kUnsupported   ? ORT_NOT_IMPLEMENTED
                                                                          : ORT_EP_FAIL;
    return error(describe(message(status)), code);
  }
};

std::string node_name(const OrtKernelInfo* info) {
  size_t size = 0;
  if (!succeeded(g_api->KernelInfo_GetNodeName(info, nullptr, &size)) || size == 0) return {};
  std::string name(size, '\0');
  if (!succeeded(g_api->KernelInfo_GetNodeName(info, name.data(), &size))) return {};
  name.resize(size - 1);
  return name;
}

// Whether `status` says that the node has no such attribute, rather than one of another type. Releases it.
bool is_missing_attribute(OrtStatus* status) {
  const std::string text = g_api->GetErrorMessage(status);
  g_api->ReleaseStatus(status);
  return text.find("No attribute with") != std::string::npos || text.find("does not exist") != std::string::npos;
}

OrtStatus* read_attrs(const OrtKernelInfo* info, Kernel* kernel) {
  const OpSpec& spec = *kernel->op->spec;
  std::array<RawAttr, kMaxAttrs> raw{};
  std::array<std::string, kMaxAttrs> strings;
  for (size_t a = 0; a < spec.attrs.size(); ++a) {
    const AttrSpec& attr = spec.attrs[a];
    OrtStatus* status = nullptr;
    const char* kind = "";
    switch (attr.kind) {
      case AttrKind::kInt:
        kind = "an integer";
        status = g_api->KernelInfoGetAttribute_int64(info, attr.name, &raw[a].i);
        break;
      case AttrKind::kFloat:
        kind = "a float";
        status = g_api->KernelInfoGetAttribute_float(info, attr.name, &raw[a].f);
        break;
      case AttrKind::kString: {
        kind = "a string";
        size_t size = 0;
        status = g_api->KernelInfoGetAttribute_string(info, attr.name, nullptr, &size);
        if (status == nullptr) {
          strings[a].resize(size);
          status = g_api->KernelInfoGetAttribute_string(info, attr.name, strings[a].data(), &size);
          if (size > 0) strings[a].resize(size - 1);
          raw[a].s = strings[a];
        }
        break;
      }
    }
    if (status == nullptr) {
      raw[a].is_set = true;
    } else if (!is_missing_attribute(status)) {
      return error(kernel->describe(std::string("attribute ") + attr.name + " must be " + kind));
    }
  }
  if (const Status parsed = parse_attrs(spec, raw.data(), kernel->attrs.data()); !parsed.ok()) {
    return error(kernel->describe(attr_message(spec, raw.data(), parsed)));
  }
  return nullptr;
}

OrtStatus* tensor_ref(const OrtValue* value, DType dtype, TensorRef* tensor) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->GetTensorTypeAndShape(value, &info));
  size_t rank = 0;
  OrtStatus* status = g_api->GetDimensionsCount(info, &rank);
  if (status == nullptr && rank > kMaxRank) status = error("a tensor of rank " + std::to_string(rank) + " is not supported");
  if (status == nullptr) status = g_api->GetDimensions(info, tensor->shape.dims, rank);
  g_api->ReleaseTensorTypeAndShapeInfo(info);
  if (status != nullptr) return status;
  tensor->shape.rank = static_cast<int>(rank);
  tensor->dtype = dtype;
  return g_api->GetTensorMutableData(const_cast<OrtValue*>(value), &tensor->data);  // inputs are only read
}

// Brings constant inputs into the layout that the device's kernels like best.
OrtStatus* prepack_constants(const OrtKernelInfo* info, Kernel* kernel) {
  if (kernel->op->prepack_bytes == nullptr || kernel->device->kind != DeviceKind::kCpu) return nullptr;
  std::array<TensorRef, kMaxInputs> inputs{};
  const OpArgs args{inputs.data(), nullptr, nullptr, kernel->attrs.data()};
  size_t count = 0;
  ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->KernelInfo_GetInputCount(info, &count));
  for (size_t i = 0; i < count && i < kernel->op->spec->inputs.size(); ++i) {
    int is_constant = 0;
    const OrtValue* value = nullptr;
    if (!succeeded(g_api->KernelInfoGetConstantInput_tensor(info, i, &is_constant, &value)) || is_constant == 0) continue;
    ORTPLUGINS_RETURN_IF_ORT_ERROR(tensor_ref(value, kernel->input_types[i], &inputs[i]));
  }
  kernel->packed.pack(*kernel->op, args, *kernel->device);
  return nullptr;
}

OrtStatus* find_device(const OrtKernelInfo* info, DeviceKind kind, Kernel* kernel) {
  if (kind == DeviceKind::kCpu) {
    kernel->device = &cpu_device();
    return nullptr;
  }
  ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->KernelInfoGetAllocator(info, OrtMemTypeDefault, &kernel->allocator));
  ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->AllocatorGetInfo(kernel->allocator, &kernel->memory));
  int ordinal = 0;
  ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->MemoryInfoGetId(kernel->memory, &ordinal));
  kernel->device = cuda_device(ordinal);
  if (kernel->device == nullptr) return error(kernel->describe("the CUDA runtime does not see device " + std::to_string(ordinal)), ORT_EP_FAIL);
  return nullptr;
}

OrtStatus* ORT_API_CALL create_kernel(const OrtCustomOp* op, const OrtApi* /*api*/, const OrtKernelInfo* info, void** out) noexcept {
  try {
    const Registration& registration = self(op);
    auto kernel = std::make_unique<Kernel>();
    kernel->op = registration.op;
    kernel->input_types = registration.input_types;
    kernel->output_types = registration.output_types;
    kernel->node = node_name(info);
    ORTPLUGINS_RETURN_IF_ORT_ERROR(read_attrs(info, kernel.get()));
    ORTPLUGINS_RETURN_IF_ORT_ERROR(find_device(info, registration.device(), kernel.get()));
    ORTPLUGINS_RETURN_IF_ORT_ERROR(prepack_constants(info, kernel.get()));
    *out = kernel.release();
    return nullptr;
  } catch (const std::exception& e) {
    return error(std::string(self(op).op->spec->name) + ": " + e.what(), ORT_FAIL);
  }
}

// --- One call -----------------------------------------------------------------------------------------------------------

// Scratch memory of one call. On CUDA it comes from the provider's arena, tagged with the stream, and goes back to it when
// the launches are queued: the arena gives it to another stream only after this one has passed.
class Workspace {
 public:
  Workspace(const Kernel& kernel, const OrtKernelContext* context) : kernel_(kernel), context_(context) {}
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() {
    if (scratch_ != nullptr) (void)succeeded(g_api->AllocatorFree(kernel_.allocator, scratch_));
  }

  WorkspaceLender lender() {
    return {[](void* self, int64_t bytes) { return static_cast<Workspace*>(self)->reserve(bytes); }, this};
  }

 private:
  void* reserve(int64_t bytes) {
    if (kernel_.device->kind == DeviceKind::kCpu) {
      heap_ = allocate_aligned(bytes);
      return heap_.get();
    }
    return succeeded(g_api->KernelContext_GetScratchBuffer(context_, kernel_.memory, static_cast<size_t>(bytes), &scratch_)) ? scratch_ : nullptr;
  }

  const Kernel& kernel_;
  const OrtKernelContext* context_;
  AlignedBuffer heap_;
  void* scratch_ = nullptr;
};

void run_on_ort_pool(void* pool, void (*body)(void*, size_t), size_t count, void* user) {
  if (!succeeded(g_api->KernelContext_ParallelFor(static_cast<OrtKernelContext*>(pool), body, count, 0, user))) {
    for (size_t i = 0; i < count; ++i) body(user, i);
  }
}

OrtStatus* compute(const Kernel& kernel, OrtKernelContext* context) {
  const OpSpec& spec = *kernel.op->spec;
  std::array<TensorRef, kMaxInputs> inputs{};
  std::array<TensorRef, kMaxOutputs> outputs{};
  std::array<Shape, kMaxOutputs> shapes{};

  size_t input_count = 0, output_count = 0;
  ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->KernelContext_GetInputCount(context, &input_count));
  ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->KernelContext_GetOutputCount(context, &output_count));
  for (size_t i = 0; i < input_count && i < spec.inputs.size(); ++i) {
    const OrtValue* value = nullptr;
    ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->KernelContext_GetInput(context, i, &value));
    if (value != nullptr) ORTPLUGINS_RETURN_IF_ORT_ERROR(tensor_ref(value, kernel.input_types[i], &inputs[i]));
  }
  if (const Status status = infer_shapes(spec, kernel.attrs.data(), inputs.data(), shapes.data()); !status.ok()) return kernel.fail(status);
  for (size_t i = 0; i < output_count && i < spec.outputs.size(); ++i) {
    OrtValue* value = nullptr;
    ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->KernelContext_GetOutput(context, i, shapes[i].dims, static_cast<size_t>(shapes[i].rank), &value));
    if (value == nullptr) continue;  // an optional output that the graph does not use
    outputs[i].shape = shapes[i];
    outputs[i].dtype = kernel.output_types[i];
    ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->GetTensorMutableData(value, &outputs[i].data));
  }

  ExecContext exec;
  exec.device = kernel.device;
  if (kernel.device->kind == DeviceKind::kCuda) {
    ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->KernelContext_GetGPUComputeStream(context, &exec.stream));
  } else {
    exec.pool = {run_on_ort_pool, context};
  }
  Workspace workspace(kernel, context);
  exec.lender = workspace.lender();
  const OpArgs args{inputs.data(), kernel.packed.pointers(), outputs.data(), kernel.attrs.data()};
  if (const Status status = kernel.op->run(args, exec, 0); !status.ok()) return kernel.fail(status);
  return nullptr;
}

OrtStatus* ORT_API_CALL compute_kernel(void* kernel, OrtKernelContext* context) noexcept {
  try {
    return compute(*static_cast<const Kernel*>(kernel), context);
  } catch (const std::exception& e) {
    return error(static_cast<const Kernel*>(kernel)->describe(e.what()), ORT_FAIL);
  }
}

void ORT_API_CALL destroy_kernel(void* kernel) noexcept { delete static_cast<Kernel*>(kernel); }

// --- Shape inference ----------------------------------------------------------------------------------------------------

struct SymbolicDim {
  enum class Kind : uint8_t { kUnknown, kValue, kSymbol } kind = Kind::kUnknown;
  int64_t value = 0;
  std::string symbol;
};

// Symbols combine to expressions: equal expressions of equal symbols are equal sizes.
struct SymbolicAlgebra {
  using Dim = SymbolicDim;
  static Dim unknown() { return {}; }
  static std::string text(const Dim& d) { return d.kind == Dim::Kind::kValue ? std::to_string(d.value) : d.symbol; }
  static Dim symbol(std::string s) { return {Dim::Kind::kSymbol, 0, std::move(s)}; }
  static bool is(const Dim& d, int64_t v) { return d.kind == Dim::Kind::kValue && d.value == v; }

  Dim constant(int64_t v) const { return {Dim::Kind::kValue, v, {}}; }
  Dim product(const Dim& a, const Dim& b) const {
    if (a.kind == Dim::Kind::kUnknown || b.kind == Dim::Kind::kUnknown) return unknown();
    if (a.kind == Dim::Kind::kValue && b.kind == Dim::Kind::kValue) return constant(a.value * b.value);
    if (is(a, 1)) return b;
    if (is(b, 1)) return a;
    return symbol("(" + text(a) + ")*(" + text(b) + ")");
  }
  Dim sum(const Dim& a, const Dim& b) const {
    if (a.kind == Dim::Kind::kUnknown || b.kind == Dim::Kind::kUnknown) return unknown();
    if (a.kind == Dim::Kind::kValue && b.kind == Dim::Kind::kValue) return constant(a.value + b.value);
    if (is(a, 0)) return b;
    if (is(b, 0)) return a;
    return symbol(text(a) + " + " + text(b));
  }
  Dim quotient(const Dim& a, int64_t b) const {
    if (a.kind == Dim::Kind::kValue) return constant(a.value / b);
    if (a.kind == Dim::Kind::kUnknown || b == 1) return a;
    return symbol("(" + text(a) + ")/" + std::to_string(b));
  }
  bool known(const Dim& a, int64_t* value) const {
    *value = a.value;
    return a.kind == Dim::Kind::kValue;
  }
  Dim broadcast(const Dim& a, const Dim& b, bool* possible) const {
    *possible = true;
    if (is(a, 1)) return b;
    if (is(b, 1)) return a;
    if (a.kind == Dim::Kind::kValue && b.kind == Dim::Kind::kValue) *possible = a.value == b.value;
    if (a.kind == Dim::Kind::kValue) return a;
    if (b.kind == Dim::Kind::kValue) return b;
    return a.kind == Dim::Kind::kSymbol && b.kind == Dim::Kind::kSymbol && a.symbol == b.symbol ? a : unknown();
  }
};

bool read_attr(const OrtShapeInferContext* context, const AttrSpec& attr, RawAttr* raw, std::string* storage) {
  const OrtOpAttr* handle = nullptr;
  if (!succeeded(g_api->ShapeInferContext_GetAttribute(context, attr.name, &handle)) || handle == nullptr) return false;
  size_t size = 0;
  switch (attr.kind) {
    case AttrKind::kInt:
      return succeeded(g_api->ReadOpAttr(handle, ORT_OP_ATTR_INT, &raw->i, sizeof raw->i, &size));
    case AttrKind::kFloat:
      return succeeded(g_api->ReadOpAttr(handle, ORT_OP_ATTR_FLOAT, &raw->f, sizeof raw->f, &size));
    case AttrKind::kString: {
      char buffer[256] = {};
      if (!succeeded(g_api->ReadOpAttr(handle, ORT_OP_ATTR_STRING, buffer, sizeof buffer, &size))) return false;
      *storage = buffer;
      raw->s = *storage;
      return true;
    }
  }
  return false;
}

// The runtime ignores errors from here, so what cannot be known is left open and judged when the node runs.
OrtStatus* infer(const Registration& registration, OrtShapeInferContext* context) {
  const OpSpec& spec = *registration.op->spec;
  std::array<RawAttr, kMaxAttrs> raw{};
  std::array<std::string, kMaxAttrs> storage;
  std::array<AttrValue, kMaxAttrs> attrs{};
  for (size_t a = 0; a < spec.attrs.size(); ++a) raw[a].is_set = read_attr(context, spec.attrs[a], &raw[a], &storage[a]);
  if (!parse_attrs(spec, raw.data(), attrs.data()).ok()) return nullptr;

  std::array<DimsOf<SymbolicDim>, kMaxInputs> inputs;
  std::array<DimsOf<SymbolicDim>, kMaxOutputs> outputs;
  size_t count = 0;
  ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->ShapeInferContext_GetInputCount(context, &count));
  ONNXTensorElementDataType shared_type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;  // T
  for (size_t i = 0; i < count && i < spec.inputs.size(); ++i) {
    OrtTensorTypeAndShapeInfo* info = nullptr;  // owned by the context
    if (!succeeded(g_api->ShapeInferContext_GetInputTypeShape(context, i, &info)) || info == nullptr) continue;
    if (i == 0) ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->GetTensorElementType(info, &shared_type));
    size_t rank = 0;
    ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->GetDimensionsCount(info, &rank));
    if (rank > kMaxRank) return nullptr;
    if (rank == 0) {  // a scalar and a tensor of unknown shape look alike
      if (!spec.inputs[i].broadcast && !spec.inputs[i].optional) return nullptr;
      continue;
    }
    std::array<int64_t, kMaxRank> values{};
    std::array<const char*, kMaxRank> symbols{};
    ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->GetDimensions(info, values.data(), rank));
    ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->GetSymbolicDimensions(info, symbols.data(), rank));
    inputs[i].present = true;
    inputs[i].rank = static_cast<int>(rank);
    for (size_t d = 0; d < rank; ++d) {
      if (values[d] >= 0) {
        inputs[i].dims[d] = SymbolicAlgebra{}.constant(values[d]);
      } else if (symbols[d] != nullptr && symbols[d][0] != '\0') {
        inputs[i].dims[d] = SymbolicAlgebra::symbol(symbols[d]);
      }
    }
  }
  if (!infer_dims<SymbolicAlgebra>(spec, attrs.data(), inputs.data(), outputs.data()).ok()) return nullptr;

  static std::atomic<uint64_t> unknown_count{0};  // every unknown size needs a name of its own
  for (size_t i = 0; i < spec.outputs.size(); ++i) {
    std::vector<int64_t> values;
    std::vector<std::string> names;
    for (int d = 0; d < outputs[i].rank; ++d) {
      const SymbolicDim& dim = outputs[i].dims[d];
      const bool is_value = dim.kind == SymbolicDim::Kind::kValue;
      values.push_back(is_value ? dim.value : -1);
      names.push_back(is_value                                     ? std::string()
                      : dim.kind == SymbolicDim::Kind::kSymbol ? dim.symbol
                                                                   : "ortplugins_dim_" + std::to_string(unknown_count++));
    }
    std::vector<const char*> name_pointers;
    for (const std::string& name : names) name_pointers.push_back(name.c_str());
    OrtTensorTypeAndShapeInfo* info = nullptr;
    ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->CreateTensorTypeAndShapeInfo(&info));
    const auto release = [](OrtTensorTypeAndShapeInfo* p) { g_api->ReleaseTensorTypeAndShapeInfo(p); };
    const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(release)> owner(info, release);
    const DType type = spec.outputs[i].dtypes[0];
    ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->SetTensorElementType(info, type == DType::kNone ? shared_type : ort_type(type)));
    ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->SetDimensions(info, values.data(), values.size()));
    ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->SetSymbolicDimensions(info, name_pointers.data(), name_pointers.size()));
    // Fails for an optional output that the node does not have; those come last.
    if (!succeeded(g_api->ShapeInferContext_SetOutputTypeShape(context, i, info))) break;
  }
  return nullptr;
}

OrtStatus* ORT_API_CALL infer_output_shape(const OrtCustomOp* op, OrtShapeInferContext* context) noexcept {
  try {
    return infer(self(op), context);
  } catch (const std::exception& e) {
    return error(e.what(), ORT_FAIL);
  }
}

// --- The domain ---------------------------------------------------------------------------------------------------------

OrtCustomOpInputOutputCharacteristic characteristic(const TensorSpec& tensor) {
  return tensor.optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
}

// Before 1.24 ONNX Runtime reads a null type when a node leaves out an input in the middle of its list and the op has a
// shape-inference function. An op whose nodes can look like that goes without one there.
bool can_infer_shapes(const OpSpec& spec) {
  int optional = 0;
  for (const TensorSpec& input : spec.inputs) optional += input.optional ? 1 : 0;
  return g_minor_version >= 24 || optional <= 1;
}

Registration make_registration(const Op* op, const char* provider) {
  Registration r{};
  r.op = op;
  r.provider = provider;
  r.version = kApiVersion;
  r.GetName = [](const OrtCustomOp* o) { return self(o).op->spec->name; };
  r.GetExecutionProviderType = [](const OrtCustomOp* o) { return self(o).provider; };
  r.GetInputType = [](const OrtCustomOp* o, size_t i) { return ort_type(self(o).input_types[i]); };
  r.GetInputTypeCount = [](const OrtCustomOp* o) { return self(o).op->spec->inputs.size(); };
  r.GetOutputType = [](const OrtCustomOp* o, size_t i) { return ort_type(self(o).output_types[i]); };
  r.GetOutputTypeCount = [](const OrtCustomOp* o) { return self(o).op->spec->outputs.size(); };
  r.GetInputCharacteristic = [](const OrtCustomOp* o, size_t i) { return characteristic(self(o).op->spec->inputs[i]); };
  r.GetOutputCharacteristic = [](const OrtCustomOp* o, size_t i) { return characteristic(self(o).op->spec->outputs[i]); };
  r.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  r.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  r.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  r.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  r.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  r.CreateKernelV2 = create_kernel;
  r.KernelComputeV2 = compute_kernel;
  r.KernelDestroy = destroy_kernel;
  if (can_infer_shapes(*op->spec)) r.InferOutputShapeFn = infer_output_shape;
  r.GetStartVersion = [](const OrtCustomOp*) { return kOpsetVersion; };
  r.GetEndVersion = [](const OrtCustomOp*) { return kOpsetVersion; };
  return r;
}

// Adds a row for every T and every choice of the inputs that may have several types.
void add_registrations(const Op* op, const char* provider, std::list<Registration>* rows) {
  const OpSpec& spec = *op->spec;
  for (const DType t : spec.dtypes) {
    size_t combinations = 1;
    for (const TensorSpec& input : spec.inputs) combinations *= input.dtypes.size();
    for (size_t c = 0; c < combinations; ++c) {
      Registration row = make_registration(op, provider);
      size_t rest = c;
      for (size_t i = 0; i < spec.inputs.size(); ++i) {
        const std::span<const DType> types = spec.inputs[i].dtypes;
        const DType type = types[rest % types.size()];
        rest /= types.size();
        row.input_types[i] = type == DType::kNone ? t : type;
      }
      for (size_t i = 0; i < spec.outputs.size(); ++i) {
        const DType type = spec.outputs[i].dtypes[0];
        row.output_types[i] = type == DType::kNone ? t : type;
      }
      rows->push_back(row);
    }
  }
}

// The rows live as long as the process: sessions keep pointers to them.
const std::list<Registration>& registrations() {
  static const std::list<Registration>* const rows = [] {
    auto* list = new std::list<Registration>;
    for (const Op* op : all_ops()) {
      add_registrations(op, nullptr, list);
#if ORTPLUGINS_WITH_CUDA
      // The CUDA provider also exists as a plugin provider with a name of its own.
      for (const char* provider : {"CUDAExecutionProvider", "CudaPluginExecutionProvider"}) add_registrations(op, provider, list);
#endif
    }
    return list;
  }();
  return *rows;
}

OrtStatus* register_domain(OrtSessionOptions* options) {
  // A second registration on the same options would make the session fail later, so it does nothing.
  static constexpr const char* kMark = "ortplugins.registered";
  int registered = 0;
  ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->HasSessionConfigEntry(options, kMark, &registered));
  if (registered != 0) return nullptr;

  static OrtCustomOpDomain* domain = nullptr;
  static OrtStatus* const failure = [] {
    OrtStatus* status = g_api->CreateCustomOpDomain(kDomain, &domain);
    for (const Registration& row : registrations()) {
      if (status != nullptr) break;
      status = g_api->CustomOpDomain_Add(domain, &row);
    }
    return status;
  }();
  if (failure != nullptr) return error(g_api->GetErrorMessage(failure), ORT_FAIL);
  ORTPLUGINS_RETURN_IF_ORT_ERROR(g_api->AddCustomOpDomain(options, domain));
  return g_api->AddSessionConfigEntry(options, kMark, "1");
}

}  // namespace
}  // namespace ortplugins

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace ortplugins;
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    // CreateStatus is the first function of every version's table.
    const std::string text = "ortplugins needs ONNX Runtime 1." + std::to_string(kApiVersion) + " or newer; this is ONNX Runtime " + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_FAIL, text.c_str());
  }
  g_api = api;
  try {
    int major = 0;
    (void)std::sscanf(base->GetVersionString(), "%d.%d", &major, &g_minor_version);
    return register_domain(options);
  } catch (const std::exception& e) {
    return error(e.what(), ORT_FAIL);
  }
}
