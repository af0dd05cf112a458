// The TensorRT adapter: every op of the specification as an IPluginV3, with its fields, shapes, types and tactics read
// off the specification and the variant table. It knows no op by name. loading.cc says how the creators get into a
// registry.
//
// The interfaces used here are versioned and the same in TensorRT 10 and 11, so that one binary serves both.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/attrs.h"
#include "core/infer.h"
#include "core/op.h"
#include "op_specs.h"
#include "tensorrt/runtime.h"

namespace ortplugins {
namespace {

using namespace nvinfer1;
using Severity = ILogger::Severity;

constexpr char kVersion[] = {static_cast<char>('0' + kOpsetVersion), '\0'};
static_assert(kOpsetVersion < 10);

// A TensorRT layer has a fixed number of outputs, known before its inputs are. A node with optional outputs says by
// this attribute how many it has, counted from the first; without it there are the required ones only.
constexpr const char* kOutputsField = "plugin_outputs";
// Only serialised: see `Profile`.
constexpr const char* kProfilesField = "profiles";

constexpr int32_t kFailed = 1;  // any non-zero value

DType dtype_of(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
      return DType::kFloat32;
    case DataType::kHALF:
      return DType::kFloat16;
    case DataType::kBF16:
      return DType::kBFloat16;
    case DataType::kBOOL:
      return DType::kBool;
    case DataType::kINT64:
      return DType::kInt64;
    case DataType::kINT32:
      return DType::kInt32;
    case DataType::kUINT8:
      return DType::kUInt8;
    default:
      return DType::kNone;
  }
}

DataType tensorrt_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return DataType::kHALF;
    case DType::kBFloat16:
      return DataType::kBF16;
    case DType::kBool:
      return DataType::kBOOL;
    case DType::kInt64:
      return DataType::kINT64;
    case DType::kInt32:
      return DataType::kINT32;
    case DType::kUInt8:
      return DataType::kUINT8;
    default:
      return DataType::kFLOAT;
  }
}

bool contains(std::span<const DType> types, DType type) {
  return std::find(types.begin(), types.end(), type) != types.end();
}

// Whether `type` may stand at `tensor` where T is `shared`.
bool allows(const TensorSpec& tensor, DType shared, DType type) {
  return type != DType::kNone &&
         (contains(tensor.dtypes, type) || (contains(tensor.dtypes, DType::kNone) && type == shared));
}

std::string mixed_types(const TensorSpec& tensor, DType shared, DType type) {
  return std::string(tensor.name) + ": is " + name_of(type) + " where the first input is " + name_of(shared) +
         ", which the op does not mix";
}

// An input that the node leaves out reaches the plugin, if at all, as a tensor of negative rank.
bool is_absent(const Dims& dims) { return dims.nbDims < 0; }

bool is_dynamic(const Dims& dims) {
  return std::any_of(dims.d, dims.d + std::max(dims.nbDims, 0), [](int64_t d) { return d < 0; });
}

bool to_shape(const Dims& dims, Shape* shape) {
  if (dims.nbDims < 0 || dims.nbDims > kMaxRank) return false;
  shape->rank = dims.nbDims;
  std::copy(dims.d, dims.d + dims.nbDims, shape->dims);
  return std::all_of(shape->dims, shape->dims + shape->rank, [](int64_t d) { return d >= 0; });
}

// Sizes as TensorRT's expressions.
struct ExprAlgebra {
  using Dim = const IDimensionExpr*;
  IExprBuilder* builder = nullptr;

  Dim operation(DimensionOperation op, Dim a, Dim b) const { return builder->operation(op, *a, *b); }
  Dim constant(int64_t v) const { return builder->constant(v); }
  Dim product(Dim a, Dim b) const { return operation(DimensionOperation::kPROD, a, b); }
  Dim sum(Dim a, Dim b) const { return operation(DimensionOperation::kSUM, a, b); }
  Dim quotient(Dim a, int64_t b) const {
    return b == 1 ? a : operation(DimensionOperation::kFLOOR_DIV, a, constant(b));
  }
  bool known(Dim a, int64_t* value) const {
    if (!a->isConstant()) return false;
    *value = a->getConstantValue();
    return true;
  }
  Dim broadcast(Dim a, Dim b, bool* possible) const {
    int64_t va = 0, vb = 0;
    const bool knows_a = known(a, &va), knows_b = known(b, &vb);
    *possible = !knows_a || !knows_b || va == vb || va == 1 || vb == 1;
    if (a == b || (knows_b && vb == 1)) return a;
    if (knows_a && va == 1) return b;
    if (knows_a) return a;
    if (knows_b) return b;
    // a == 1 ? b : a. The larger of the two would be wrong for 0 and 1.
    const Dim a_is_one = operation(DimensionOperation::kEQUAL, a, constant(1));
    return sum(a, product(a_is_one, operation(DimensionOperation::kSUB, b, a)));
  }
};

// What `configurePlugin` saw of one optimisation profile: the smallest and largest inputs, and the workspace that
// TensorRT was asked for. TensorRT does not tell `enqueue` how much workspace there is; the profiles that contain the
// shapes do.
struct Profile {
  DType type = DType::kNone;  // T
  int inputs = 0;
  std::array<Shape, kMaxInputs> min{}, max{};  // rank -1: absent
  int64_t workspace_bytes = 0;

  bool same_shapes(const Profile& other) const {
    return type == other.type && inputs == other.inputs && min == other.min && max == other.max;
  }
  bool contains(const TensorRef* tensors, size_t count) const {
    if (tensors[0].dtype != type) return false;
    for (size_t i = 0; i < count; ++i) {
      const bool given = static_cast<int>(i) < inputs && min[i].rank >= 0;
      if (given != tensors[i].present()) return false;
      if (!given) continue;
      if (tensors[i].shape.rank != min[i].rank) return false;
      for (int d = 0; d < min[i].rank; ++d) {
        if (tensors[i].shape.dims[d] < min[i].dims[d] || tensors[i].shape.dims[d] > max[i].dims[d]) return false;
      }
    }
    return true;
  }
  void append_to(std::vector<int64_t>* out) const {
    out->insert(out->end(), {static_cast<int64_t>(type), inputs, workspace_bytes});
    for (int i = 0; i < inputs; ++i) {
      out->push_back(min[i].rank);
      for (int d = 0; d < min[i].rank; ++d) out->insert(out->end(), {min[i].dims[d], max[i].dims[d]});
    }
  }
  // Reads what `append_to` wrote; false if it is something else.
  bool read_from(std::span<const int64_t>* in) {
    const auto next = [in](int64_t* v) {
      if (in->empty()) return false;
      *v = in->front();
      *in = in->subspan(1);
      return true;
    };
    int64_t t = 0, n = 0, rank = 0;
    if (!next(&t) || !next(&n) || !next(&workspace_bytes) || n < 0 || n > kMaxInputs || workspace_bytes < 0)
      return false;
    type = static_cast<DType>(t);
    inputs = static_cast<int>(n);
    for (int i = 0; i < inputs; ++i) {
      if (!next(&rank) || rank < -1 || rank > kMaxRank) return false;
      min[i].rank = max[i].rank = static_cast<int>(rank);
      for (int d = 0; d < min[i].rank; ++d) {
        if (!next(&min[i].dims[d]) || !next(&max[i].dims[d])) return false;
      }
    }
    return true;
  }
};

// One call's tensors, in the order of the specification.
struct Arguments {
  std::array<TensorRef, kMaxInputs> inputs{};
  std::array<TensorRef, kMaxOutputs> outputs{};

  OpArgs bind(const AttrValue* attrs) { return {inputs.data(), nullptr, outputs.data(), attrs}; }
};

const DeviceInfo* current_device() {
#if ORTPLUGINS_WITH_CUDA
  int ordinal = 0;
  return cudaGetDevice(&ordinal) == cudaSuccess ? cuda_device(ordinal) : nullptr;
#else
  return nullptr;
#endif
}

// --- The plugin -----------------------------------------------------------------------------------------------------

// One node. Nothing in it is shared with its clones, of which TensorRT makes one for each execution context.
class Plugin final : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
 public:
  Plugin(const Op& op, std::string node)
      : op_(op), spec_(*op.spec), node_(std::move(node)), output_count_(required_outputs()) {}

  // Takes the fields that TensorRT's parser read from the node, or that `getFieldsToSerialize` gave. False after an
  // error, which is logged.
  bool read_fields(const PluginFieldCollection* fields, TensorRTPhase phase);

  // IPluginV3
  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override;
  IPluginV3* clone() noexcept override;

  // IPluginV3OneCore
  const char* getPluginName() const noexcept override { return spec_.name; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kDomain; }

  // IPluginV3OneBuild
  int32_t getNbOutputs() const noexcept override { return output_count_; }
  int32_t getOutputDataTypes(DataType* outputs, int32_t nb_outputs, const DataType* inputs,
                             int32_t nb_inputs) const noexcept override;
  int32_t getOutputShapes(const DimsExprs* inputs, int32_t nb_inputs, const DimsExprs* shape_inputs,
                          int32_t nb_shape_inputs, DimsExprs* outputs, int32_t nb_outputs,
                          IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t pos, const DynamicPluginTensorDesc* in_out, int32_t nb_inputs,
                                 int32_t nb_outputs) noexcept override;
  int32_t configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t nb_inputs,
                          const DynamicPluginTensorDesc* outputs, int32_t nb_outputs) noexcept override;
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t nb_inputs,
                          const DynamicPluginTensorDesc* outputs, int32_t nb_outputs) const noexcept override;
  int32_t getNbTactics() noexcept override { return static_cast<int32_t>(tactics_.size()); }
  int32_t getValidTactics(int32_t* tactics, int32_t nb_tactics) noexcept override;
  const char* getTimingCacheID() noexcept override { return description_.c_str(); }
  const char* getMetadataString() noexcept override { return description_.c_str(); }

  // IPluginV3OneRuntime
  int32_t setTactic(int32_t tactic) noexcept override;
  int32_t onShapeChange(const PluginTensorDesc* inputs, int32_t nb_inputs, const PluginTensorDesc* outputs,
                        int32_t nb_outputs) noexcept override;
  int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs, const void* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
  IPluginV3* attachToContext(IPluginResourceContext* context) noexcept override;
  const PluginFieldCollection* getFieldsToSerialize() noexcept override;

 private:
  int required_outputs() const {
    return static_cast<int>(
        std::count_if(spec_.outputs.begin(), spec_.outputs.end(), [](const TensorSpec& t) { return !t.optional; }));
  }
  int32_t fail(const std::string& what) const noexcept {
    try {
      log(Severity::kERROR, std::string(spec_.name) + (node_.empty() ? "" : " node '" + node_ + "'") + ": " + what);
    } catch (...) {
    }
    return kFailed;
  }
  int32_t fail(const Status& status) const { return fail(message(status)); }

  Status read_attr(const PluginField& field, const AttrSpec& attr, RawAttr* raw) const;
  std::string describe() const;
  Status check_count(int32_t nb_inputs, int32_t nb_outputs) const;
  Status check_types(const DType* types, size_t count) const;
  // Fills in what the descriptions say; pointers stay null. The outputs get the shapes that the specification gives.
  Status translate(const PluginTensorDesc* inputs, int32_t nb_inputs, Arguments* arguments) const;
  // The same, and whether the op can be run on such tensors.
  Status check_shapes(const PluginTensorDesc* inputs, int32_t nb_inputs, Arguments* arguments) const;
  // Calls `visit` for shapes from the smallest to the largest of a profile, the best-tuned one included.
  template <class Visit>
  void for_each_shape(const DynamicPluginTensorDesc* inputs, int32_t nb_inputs, const Visit& visit) const;
  int64_t largest_workspace(const DynamicPluginTensorDesc* inputs, int32_t nb_inputs, const DeviceInfo& device) const;
  int64_t workspace_limit(const Arguments& arguments) const;
  // The variant to run: the tactic, else the first choice, else the first that needs no more workspace than there is.
  Status pick_variant(const OpArgs& args, const DeviceInfo& device, int64_t limit, int* variant_id) const;

  const Op& op_;
  const OpSpec& spec_;
  std::string node_;
  std::array<AttrValue, kMaxAttrs> attrs_{};
  int output_count_ = 0;
  int tactic_ = 0;  // 0: the variant table's first choice
  int input_count_ = 0;
  const DeviceInfo* device_ = nullptr;
  std::vector<int32_t> tactics_;
  std::vector<Profile> profiles_;
  std::string description_;
  // What the last `getFieldsToSerialize` points to.
  std::vector<PluginField> fields_;
  std::array<int64_t, kMaxAttrs + 2> field_ints_{};
  std::vector<int64_t> field_profiles_;
  PluginFieldCollection collection_{};
};

// --- Fields ---------------------------------------------------------------------------------------------------------

const char* name_of(AttrKind kind) {
  return kind == AttrKind::kInt ? "an integer" : kind == AttrKind::kFloat ? "a float" : "a string";
}

// Parsers and users pass integers and floats in several widths.
bool read_int(const PluginField& field, int64_t* value) {
  if (field.data == nullptr || field.length != 1) return false;
  const auto read = [&]<class T>(T) {
    T v;
    std::memcpy(&v, field.data, sizeof v);
    *value = v;
    return true;
  };
  switch (field.type) {
    case PluginFieldType::kINT8:
      return read(int8_t{});
    case PluginFieldType::kINT16:
      return read(int16_t{});
    case PluginFieldType::kINT32:
      return read(int32_t{});
    case PluginFieldType::kINT64:
      return read(int64_t{});
    default:
      return false;
  }
}

bool read_float(const PluginField& field, float* value) {
  if (field.data == nullptr || field.length != 1) return false;
  if (field.type == PluginFieldType::kFLOAT32) {
    std::memcpy(value, field.data, sizeof *value);
    return true;
  }
  if (field.type == PluginFieldType::kFLOAT64) {
    double v = 0;
    std::memcpy(&v, field.data, sizeof v);
    *value = static_cast<float>(v);
    return true;
  }
  return false;
}

bool read_string(const PluginField& field, std::string_view* value) {
  if (field.type != PluginFieldType::kCHAR || field.length < 0 || (field.data == nullptr && field.length > 0))
    return false;
  const auto* chars = static_cast<const char*>(field.data);
  // With or without a final 0.
  *value = {chars, chars == nullptr ? 0 : strnlen(chars, static_cast<size_t>(field.length))};
  return true;
}

Status Plugin::read_attr(const PluginField& field, const AttrSpec& attr, RawAttr* raw) const {
  raw->is_set = attr.kind == AttrKind::kInt     ? read_int(field, &raw->i)
                : attr.kind == AttrKind::kFloat ? read_float(field, &raw->f)
                                                : read_string(field, &raw->s);
  return raw->is_set ? Status{} : Status::invalid(attr.name, "wrong type");
}

bool Plugin::read_fields(const PluginFieldCollection* fields, TensorRTPhase phase) {
  const int count = fields == nullptr ? 0 : fields->nbFields;
  if (count < 0 || (count > 0 && fields->fields == nullptr)) return fail("the field collection is broken"), false;
  std::array<RawAttr, kMaxAttrs> raw{};
  for (int i = 0; i < count; ++i) {
    const PluginField& field = fields->fields[i];
    if (field.name == nullptr) return fail("a field has no name"), false;
    const std::string_view name = field.name;
    const auto attr =
        std::find_if(spec_.attrs.begin(), spec_.attrs.end(), [&](const AttrSpec& a) { return name == a.name; });
    if (attr != spec_.attrs.end()) {
      if (!read_attr(field, *attr, &raw[attr - spec_.attrs.begin()]).ok()) {
        return fail("attribute " + std::string(name) + " must be " + name_of(attr->kind)), false;
      }
    } else if (name == kOutputsField) {
      int64_t outputs = 0;
      if (!read_int(field, &outputs) || outputs < required_outputs() ||
          outputs > static_cast<int64_t>(spec_.outputs.size())) {
        return fail("attribute " + std::string(name) + " must be an integer from " +
                    std::to_string(required_outputs()) + " to " + std::to_string(spec_.outputs.size())),
               false;
      }
      output_count_ = static_cast<int>(outputs);
    } else if (name == kProfilesField && phase == TensorRTPhase::kRUNTIME) {
      std::span<const int64_t> values;
      if (field.type == PluginFieldType::kINT64 && field.length >= 0 && (field.data != nullptr || field.length == 0)) {
        field_profiles_.resize(static_cast<size_t>(field.length));  // the engine may hold it unaligned
        if (field.length > 0) std::memcpy(field_profiles_.data(), field.data, field_profiles_.size() * sizeof(int64_t));
        values = field_profiles_;
      }
      while (!values.empty()) {
        if (!profiles_.emplace_back().read_from(&values))
          return fail("the engine was written by another version of this plugin"), false;
        input_count_ = profiles_.back().inputs;
      }
    } else {
      std::string text = "there is no attribute " + std::string(name) + "; the op has";
      for (const AttrSpec& a : spec_.attrs) text.append(" ").append(a.name);
      return fail(text), false;
    }
  }
  if (const Status status = parse_attrs(spec_, raw.data(), attrs_.data()); !status.ok()) {
    return fail(attr_message(spec_, raw.data(), status)), false;
  }
  description_ = describe();
  return true;
}

// Everything that decides how fast a variant runs, beside the tensors: the attributes, and which variants there are.
std::string Plugin::describe() const {
  std::string text = spec_.name;
  for (size_t a = 0; a < spec_.attrs.size(); ++a) {
    const AttrSpec& attr = spec_.attrs[a];
    const AttrValue& value = attrs_[a];
    if (!value.is_set) continue;
    text.append(" ").append(attr.name).append("=");
    char number[32];
    switch (attr.kind) {
      case AttrKind::kInt:
        text += std::to_string(value.i);
        break;
      case AttrKind::kFloat:
        (void)std::snprintf(number, sizeof number, "%.9g", static_cast<double>(value.f));
        text += number;
        break;
      case AttrKind::kString:
        text += attr.choices[static_cast<size_t>(value.i)];
        break;
    }
  }
  text.append(" outputs=").append(std::to_string(output_count_)).append(" variants=");
  for (const VariantInfo& variant : op_.variants) {
    if (variant.device == DeviceKind::kCuda) text.append(std::to_string(variant.id)).append(",");
  }
  return text;
}

const PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
  try {
    fields_.clear();
    for (size_t a = 0; a < spec_.attrs.size(); ++a) {
      const AttrSpec& attr = spec_.attrs[a];
      const AttrValue& value = attrs_[a];
      if (!value.is_set) continue;
      switch (attr.kind) {
        case AttrKind::kInt:
          field_ints_[a] = value.i;
          fields_.emplace_back(attr.name, &field_ints_[a], PluginFieldType::kINT64, 1);
          break;
        case AttrKind::kFloat:
          fields_.emplace_back(attr.name, &value.f, PluginFieldType::kFLOAT32, 1);
          break;
        case AttrKind::kString: {
          const char* text = attr.choices[static_cast<size_t>(value.i)];
          fields_.emplace_back(attr.name, text, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(text)) + 1);
          break;
        }
      }
    }
    field_ints_[kMaxAttrs] = output_count_;
    fields_.emplace_back(kOutputsField, &field_ints_[kMaxAttrs], PluginFieldType::kINT64, 1);
    field_profiles_.clear();
    for (const Profile& profile : profiles_) profile.append_to(&field_profiles_);
    if (!field_profiles_.empty()) {
      fields_.emplace_back(kProfilesField, field_profiles_.data(), PluginFieldType::kINT64,
                           static_cast<int32_t>(field_profiles_.size()));
    }
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    return &collection_;
  } catch (const std::exception& e) {
    fail(e.what());
    return nullptr;
  }
}

// --- Object ---------------------------------------------------------------------------------------------------------

IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
  switch (type) {
    case PluginCapabilityType::kCORE:
      return static_cast<IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD:
      return static_cast<IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME:
      return static_cast<IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

IPluginV3* Plugin::clone() noexcept {
  try {
    return new Plugin(*this);
  } catch (const std::exception& e) {
    fail(e.what());
    return nullptr;
  }
}

IPluginV3* Plugin::attachToContext(IPluginResourceContext* /*context*/) noexcept {
  auto* const plugin = static_cast<Plugin*>(clone());
  if (plugin != nullptr) plugin->device_ = current_device();
  return plugin;
}

// --- Types and shapes -----------------------------------------------------------------------------------------------

Status Plugin::check_count(int32_t nb_inputs, int32_t nb_outputs) const {
  const auto most = static_cast<int32_t>(spec_.inputs.size());
  if (nb_inputs < 1 || nb_inputs > most)
    return Status::invalid("inputs", "expected 1 to {} inputs, got {}", {most, nb_inputs});
  if (nb_outputs != output_count_)
    return Status::invalid("outputs", "expected {} outputs, got {}", {output_count_, nb_outputs});
  return {};
}

Status Plugin::check_types(const DType* types, size_t count) const {
  const DType shared = types[0];
  if (!contains(spec_.dtypes, shared))
    return Status::invalid(spec_.inputs[0].name, "its type is not one that the op takes");
  for (size_t i = 1; i < count; ++i) {
    if (types[i] != DType::kNone && !allows(spec_.inputs[i], shared, types[i])) {
      return Status::invalid(spec_.inputs[i].name,
                             "its type is not one that the op takes beside that of the first input");
    }
  }
  return {};
}

int32_t Plugin::getOutputDataTypes(DataType* outputs, int32_t nb_outputs, const DataType* inputs,
                                   int32_t nb_inputs) const noexcept {
  try {
    if (const Status status = check_count(nb_inputs, nb_outputs); !status.ok()) return fail(status);
    const DType shared = dtype_of(inputs[0]);
    if (!contains(spec_.dtypes, shared))
      return fail(Status::invalid(spec_.inputs[0].name, "its type is not one that the op takes"));
    for (int32_t i = 1; i < nb_inputs; ++i) {
      // The type of an input that is left out means nothing; its shape, which would tell, is not known here.
      if (!spec_.inputs[i].optional && !allows(spec_.inputs[i], shared, dtype_of(inputs[i]))) {
        return fail(mixed_types(spec_.inputs[i], shared, dtype_of(inputs[i])));
      }
    }
    for (int32_t i = 0; i < nb_outputs; ++i) {
      const DType type = spec_.outputs[i].dtypes[0];
      outputs[i] = tensorrt_type(type == DType::kNone ? shared : type);
    }
    return 0;
  } catch (const std::exception& e) {
    return fail(e.what());
  }
}

int32_t Plugin::getOutputShapes(const DimsExprs* inputs, int32_t nb_inputs, const DimsExprs* /*shape_inputs*/,
                                int32_t /*nb_shape_inputs*/, DimsExprs* outputs, int32_t nb_outputs,
                                IExprBuilder& builder) noexcept {
  try {
    if (const Status status = check_count(nb_inputs, nb_outputs); !status.ok()) return fail(status);
    std::array<DimsOf<const IDimensionExpr*>, kMaxInputs> in{};
    std::array<DimsOf<const IDimensionExpr*>, kMaxOutputs> out{};
    for (int32_t i = 0; i < nb_inputs; ++i) {
      in[i].present = inputs[i].nbDims >= 0;
      in[i].rank = std::max(inputs[i].nbDims, 0);
      std::copy(inputs[i].d, inputs[i].d + in[i].rank, in[i].dims);
    }
    if (const Status status = infer_dims(spec_, attrs_.data(), in.data(), out.data(), ExprAlgebra{&builder});
        !status.ok())
      return fail(status);
    for (int32_t i = 0; i < nb_outputs; ++i) {
      outputs[i].nbDims = out[i].rank;
      std::copy(out[i].dims, out[i].dims + out[i].rank, outputs[i].d);
    }
    return 0;
  } catch (const std::exception& e) {
    return fail(e.what());
  }
}

bool Plugin::supportsFormatCombination(int32_t pos, const DynamicPluginTensorDesc* in_out, int32_t nb_inputs,
                                       int32_t nb_outputs) noexcept {
  if (!check_count(nb_inputs, nb_outputs).ok() || pos < 0 || pos >= nb_inputs + nb_outputs) return false;
  const PluginTensorDesc& desc = in_out[pos].desc;
  if (pos < nb_inputs && spec_.inputs[pos].optional && is_absent(desc.dims)) return true;
  if (desc.format != TensorFormat::kLINEAR) return false;
  const DType type = dtype_of(desc.type);
  if (pos == 0) return contains(spec_.dtypes, type);
  const DType shared = dtype_of(in_out[0].desc.type);
  const TensorSpec& tensor = pos < nb_inputs ? spec_.inputs[pos] : spec_.outputs[pos - nb_inputs];
  if (allows(tensor, shared, type)) return true;
  // Where the network decides the types there is no other combination to try, and TensorRT's own message names none.
  if (pos < nb_inputs && types_are_given()) fail(mixed_types(tensor, shared, type));
  return false;
}

Status Plugin::translate(const PluginTensorDesc* inputs, int32_t nb_inputs, Arguments* arguments) const {
  std::array<DType, kMaxInputs> types{};
  for (size_t i = 0; i < spec_.inputs.size(); ++i) {
    const bool present = static_cast<int32_t>(i) < nb_inputs && !is_absent(inputs[i].dims);
    if (!present) {
      if (!spec_.inputs[i].optional) return Status::invalid(spec_.inputs[i].name, "is missing");
      continue;
    }
    if (!to_shape(inputs[i].dims, &arguments->inputs[i].shape))
      return Status::invalid(spec_.inputs[i].name, "its shape is not known");
    types[i] = arguments->inputs[i].dtype = dtype_of(inputs[i].type);
  }
  ORTPLUGINS_RETURN_IF_ERROR(check_types(types.data(), spec_.inputs.size()));
  std::array<Shape, kMaxOutputs> shapes{};
  ORTPLUGINS_RETURN_IF_ERROR(infer_shapes(spec_, attrs_.data(), arguments->inputs.data(), shapes.data()));
  for (int i = 0; i < output_count_; ++i) {
    const DType type = spec_.outputs[i].dtypes[0];
    arguments->outputs[i].dtype = type == DType::kNone ? types[0] : type;
    arguments->outputs[i].shape = shapes[i];
  }
  return {};
}

Status Plugin::check_shapes(const PluginTensorDesc* inputs, int32_t nb_inputs, Arguments* arguments) const {
  ORTPLUGINS_RETURN_IF_ERROR(translate(inputs, nb_inputs, arguments));
  // Where there is no GPU, the processor's variants stand in: it is the op that looks at the arguments.
  int variant_id = 0;
  return op_.choose(arguments->bind(attrs_.data()), device_ == nullptr ? cpu_device() : *device_, &variant_id);
}

// --- Building: profiles, workspace, tactics -------------------------------------------------------------------------

template <class Visit>
void Plugin::for_each_shape(const DynamicPluginTensorDesc* inputs, int32_t nb_inputs, const Visit& visit) const {
  // Between the smallest and the largest shape, since a kernel that splits its work may need most in between.
  constexpr int kSteps = 8;
  const bool dynamic = std::any_of(inputs, inputs + nb_inputs,
                                   [](const DynamicPluginTensorDesc& in) { return is_dynamic(in.desc.dims); });
  for (int step = 0; step <= (dynamic ? kSteps + 1 : 0); ++step) {
    std::array<PluginTensorDesc, kMaxInputs> descs{};
    for (int32_t i = 0; i < nb_inputs; ++i) {
      descs[i] = inputs[i].desc;
      if (!is_dynamic(inputs[i].desc.dims)) continue;
      descs[i].dims = inputs[i].opt;
      if (step > kSteps) continue;
      for (int d = 0; d < inputs[i].min.nbDims; ++d) {
        descs[i].dims.d[d] = inputs[i].min.d[d] + (inputs[i].max.d[d] - inputs[i].min.d[d]) * step / kSteps;
      }
    }
    Arguments arguments;
    // Sizes that add up, such as a mask's, may be off by one between the ends; such a step says nothing.
    const Status status = check_shapes(descs.data(), nb_inputs, &arguments);
    if (status.ok() || step == 0 || step >= kSteps) visit(status, arguments);
  }
}

int64_t Plugin::largest_workspace(const DynamicPluginTensorDesc* inputs, int32_t nb_inputs,
                                  const DeviceInfo& device) const {
  int64_t largest = 0;
  for_each_shape(inputs, nb_inputs, [&](const Status& status, Arguments& arguments) {
    if (!status.ok()) return;
    for (const VariantInfo& variant : op_.variants) {
      int64_t bytes = 0;
      if (variant.device != DeviceKind::kCuda) continue;
      if (op_.workspace_bytes(arguments.bind(attrs_.data()), device, variant.id, &bytes).ok())
        largest = std::max(largest, bytes);
    }
  });
  return largest;
}

int32_t Plugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t nb_inputs,
                                const DynamicPluginTensorDesc* /*outputs*/, int32_t nb_outputs) noexcept {
  try {
    if (const Status status = check_count(nb_inputs, nb_outputs); !status.ok()) return fail(status);
    device_ = current_device();
    input_count_ = nb_inputs;

    Status first_error;
    std::vector<int32_t> tactics;  // that support every shape tried
    for (const VariantInfo& variant : op_.variants) {
      if (variant.device == DeviceKind::kCuda && device_ != nullptr) tactics.push_back(variant.id);
    }
    for_each_shape(inputs, nb_inputs, [&](const Status& status, Arguments& arguments) {
      if (!status.ok()) {
        if (first_error.ok()) first_error = status;
        return;
      }
      std::erase_if(tactics, [&](int32_t id) {
        int64_t bytes = 0;
        return !op_.workspace_bytes(arguments.bind(attrs_.data()), *device_, id, &bytes).ok();
      });
    });
    if (!first_error.ok()) return fail(first_error);
    tactics_ = std::move(tactics);

    Profile profile;
    profile.type = dtype_of(inputs[0].desc.type);
    profile.inputs = nb_inputs;
    for (int32_t i = 0; i < nb_inputs; ++i) {
      const bool dynamic = is_dynamic(inputs[i].desc.dims);
      if (!to_shape(dynamic ? inputs[i].min : inputs[i].desc.dims, &profile.min[i])) profile.min[i].rank = -1;
      if (!to_shape(dynamic ? inputs[i].max : inputs[i].desc.dims, &profile.max[i])) profile.max[i].rank = -1;
    }
    profile.workspace_bytes = device_ == nullptr ? 0 : largest_workspace(inputs, nb_inputs, *device_);
    const auto known =
        std::find_if(profiles_.begin(), profiles_.end(), [&](const Profile& p) { return p.same_shapes(profile); });
    if (known == profiles_.end()) {
      profiles_.push_back(profile);
    } else {
      *known = profile;
    }
    return 0;
  } catch (const std::exception& e) {
    return fail(e.what());
  }
}

size_t Plugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t nb_inputs,
                                const DynamicPluginTensorDesc* /*outputs*/, int32_t nb_outputs) const noexcept {
  try {
    const DeviceInfo* device = device_ == nullptr ? current_device() : device_;
    if (device == nullptr || !check_count(nb_inputs, nb_outputs).ok()) return 0;
    return static_cast<size_t>(largest_workspace(inputs, nb_inputs, *device));
  } catch (const std::exception& e) {
    fail(e.what());
    return 0;
  }
}

int32_t Plugin::getValidTactics(int32_t* tactics, int32_t nb_tactics) noexcept {
  if (nb_tactics != getNbTactics()) return fail("was asked for another number of tactics than it has");
  std::copy(tactics_.begin(), tactics_.end(), tactics);
  return 0;
}

// --- Running --------------------------------------------------------------------------------------------------------

int32_t Plugin::setTactic(int32_t tactic) noexcept {
  const auto known =
      std::any_of(op_.variants.begin(), op_.variants.end(), [&](const VariantInfo& v) { return v.id == tactic; });
  if (tactic != 0 && !known) {
    try {
      log(Severity::kWARNING, std::string(spec_.name) + ": this build has no variant " + std::to_string(tactic) +
                                  ", which the engine was tuned for; the best of its own is taken");
    } catch (...) {
    }
  }
  tactic_ = known ? tactic : 0;
  return 0;
}

int32_t Plugin::onShapeChange(const PluginTensorDesc* inputs, int32_t nb_inputs, const PluginTensorDesc* /*outputs*/,
                              int32_t nb_outputs) noexcept {
  try {
    if (const Status status = check_count(nb_inputs, nb_outputs); !status.ok()) return fail(status);
    if (device_ == nullptr) device_ = current_device();
    input_count_ = nb_inputs;
    Arguments arguments;
    if (const Status status = check_shapes(inputs, nb_inputs, &arguments); !status.ok()) return fail(status);
    if (device_ == nullptr) return 0;  // `enqueue` says so, should it come to that
    int variant_id = 0;
    const Status status =
        pick_variant(arguments.bind(attrs_.data()), *device_, workspace_limit(arguments), &variant_id);
    return status.ok() ? 0 : fail(status);
  } catch (const std::exception& e) {
    return fail(e.what());
  }
}

int64_t Plugin::workspace_limit(const Arguments& arguments) const {
  int64_t limit = -1;
  for (const Profile& profile : profiles_) {
    if (!profile.contains(arguments.inputs.data(), spec_.inputs.size())) continue;
    limit = limit < 0 ? profile.workspace_bytes : std::min(limit, profile.workspace_bytes);
  }
  return std::max<int64_t>(limit, 0);
}

Status Plugin::pick_variant(const OpArgs& args, const DeviceInfo& device, int64_t limit, int* variant_id) const {
  int64_t bytes = 0;
  const auto fits = [&](int id) { return op_.workspace_bytes(args, device, id, &bytes).ok() && bytes <= limit; };
  *variant_id = tactic_;
  if (tactic_ != 0 && fits(tactic_)) return {};
  ORTPLUGINS_RETURN_IF_ERROR(op_.choose(args, device, variant_id));
  if (fits(*variant_id)) return {};
  for (const VariantInfo& variant : op_.variants) {
    *variant_id = variant.id;
    if (variant.device == device.kind && fits(variant.id)) return {};
  }
  return Status::unsupported("workspace", "every variant needs more than the {} bytes that the engine reserved",
                             {limit});
}

int32_t Plugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* /*output_descs*/,
                        const void* const* inputs, void* const* outputs, void* workspace,
                        cudaStream_t stream) noexcept {
  try {
    if (device_ == nullptr) device_ = current_device();
    if (device_ == nullptr)
      return fail(ORTPLUGINS_WITH_CUDA ? "there is no CUDA device" : "this library was built without CUDA kernels");
    Arguments arguments;
    if (const Status status = translate(input_descs, input_count_, &arguments); !status.ok()) return fail(status);
    for (int i = 0; i < input_count_; ++i) {
      TensorRef& input = arguments.inputs[i];
      input.data = const_cast<void*>(inputs[i]);  // only read
      if (inputs[i] == nullptr && spec_.inputs[i].optional && input.shape.size() != 0) input = {};
    }
    for (int i = 0; i < output_count_; ++i) arguments.outputs[i].data = outputs[i];

    ExecContext context;
    context.device = device_;
    context.stream = stream;
    context.workspace = workspace;
    context.workspace_bytes = workspace == nullptr ? 0 : workspace_limit(arguments);
    const OpArgs args = arguments.bind(attrs_.data());
    int variant_id = 0;
    Status status = pick_variant(args, *device_, context.workspace_bytes, &variant_id);
    if (status.ok()) status = op_.run(args, context, variant_id);
    return status.ok() ? 0 : fail(status);
  } catch (const std::exception& e) {
    return fail(e.what());
  }
}

// --- The creator ----------------------------------------------------------------------------------------------------

class Creator final : public IPluginCreatorV3One {
 public:
  explicit Creator(const Op& op) : op_(op) {
    for (const AttrSpec& attr : op.spec->attrs) {
      const PluginFieldType type = attr.kind == AttrKind::kInt     ? PluginFieldType::kINT64
                                   : attr.kind == AttrKind::kFloat ? PluginFieldType::kFLOAT32
                                                                   : PluginFieldType::kCHAR;
      fields_.emplace_back(attr.name, nullptr, type, 1);
    }
    const std::span<const TensorSpec> outputs = op.spec->outputs;
    if (std::any_of(outputs.begin(), outputs.end(), [](const TensorSpec& t) { return t.optional; })) {
      fields_.emplace_back(kOutputsField, nullptr, PluginFieldType::kINT64, 1);
    }
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }

  IPluginV3* createPlugin(const char* name, const PluginFieldCollection* fields,
                          TensorRTPhase phase) noexcept override {
    try {
      auto plugin = std::make_unique<Plugin>(op_, name == nullptr ? "" : name);
      return plugin->read_fields(fields, phase) ? plugin.release() : nullptr;
    } catch (const std::exception& e) {
      log(Severity::kERROR, e.what());
      return nullptr;
    }
  }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return op_.spec->name; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kDomain; }

 private:
  const Op& op_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

}  // namespace

std::span<IPluginCreatorInterface* const> plugin_creators() {
  static const std::vector<IPluginCreatorInterface*>* const creators = [] {
    auto* list = new std::vector<IPluginCreatorInterface*>;
    for (const Op* op : all_ops()) list->push_back(new Creator(*op));
    return list;
  }();
  return *creators;
}

}  // namespace ortplugins
