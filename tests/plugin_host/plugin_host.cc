// A host for TensorRT plugins: makes the calls that TensorRT makes on an IPluginV3, in the order in which it makes
// them, so that plugins can be tested where no TensorRT builder is. Python module `_plugin_host`.
//
// What is assumed about the order, and where it comes from (NvInferRuntime.h of TensorRT 10.14 where no other source is
// given):
//
//   building
//     1. The parser calls IPluginCreatorV3One::createPlugin in phase kBUILD with those attributes of the node that
//        getFieldNames lists (onnx-tensorrt, importFallbackPluginImporter), and adds the plugin to the network. That
//        works on a clone: the header leaves the deletion of the plugin to who created it.
//     2. getNbOutputs, getOutputDataTypes and getOutputShapes, when the shapes of the network are worked out.
//        Expressions live until getOutputShapes returns (IExprBuilder).
//     3. supportsFormatCombination for pos = 0, 1, ...; entries beyond pos are not valid, those before it hold what the
//        plugin agreed to.
//     4. For each profile: configurePlugin, where desc.dims is -1 in each dynamic dimension, and min, opt and max are
//        the profile's. Then getWorkspaceSize ("called after the plugin is configured"), getNbTactics and
//        getValidTactics ("guaranteed to be called after configurePlugin").
//     5. For each tactic, to time it: setTactic, onShapeChange with the opt shapes ("IBuilder will call this function
//        once per profile"), and enqueue. A plugin with one tactic may not be timed.
//     6. setTactic with the winner, and getFieldsToSerialize, on the plugin that was configured. NVIDIA's own plugins
//        rely on that: bertQKVToContextPlugin writes what configurePlugin found out.
//   running
//     7. createPlugin in phase kRUNTIME with the serialised fields, whose data may lie at any address. setTactic.
//     8. attachToContext for each execution context. Contexts run at the same time, each on a stream of its own.
//     9. onShapeChange before the first enqueue and after each change of shapes, then enqueue any number of times,
//        directly or while the stream is captured into a graph.
//
// The headers do not say how an input that is left out in the middle of the list looks to a plugin. It is shown here
// with rank -1, TensorRT's mark for Dims that are not valid. At the end of the list the input is simply missing.
#include <NvInfer.h>
#include <dlfcn.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#if ORTPLUGINS_WITH_CUDA
#include <cuda_runtime.h>
#endif

#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace py = pybind11;
using namespace nvinfer1;

namespace {

using Shape = std::vector<int64_t>;

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }
void check(bool ok, const char* what) {
  if (!ok) fail(what);
}

const std::map<std::string, DataType> kTypes = {
    {"float32", DataType::kFLOAT}, {"float16", DataType::kHALF}, {"bfloat16", DataType::kBF16},
    {"bool", DataType::kBOOL},     {"int64", DataType::kINT64},  {"int32", DataType::kINT32},
    {"int8", DataType::kINT8},     {"uint8", DataType::kUINT8},  {"fp8", DataType::kFP8}};

DataType type_named(const std::string& name) {
  const auto it = kTypes.find(name);
  check(it != kTypes.end(), "unknown type");
  return it->second;
}
std::string name_of(DataType type) {
  for (const auto& [name, t] : kTypes) {
    if (t == type) return name;
  }
  return "other";
}
int64_t size_of(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
    case DataType::kINT32:
      return 4;
    case DataType::kHALF:
    case DataType::kBF16:
      return 2;
    case DataType::kINT64:
      return 8;
    default:
      return 1;
  }
}
int64_t volume(const Shape& shape) {
  int64_t n = 1;
  for (const int64_t d : shape) n *= d;
  return n;
}

Dims dims_of(const Shape& shape) {
  check(shape.size() <= Dims::MAX_DIMS, "rank over 8");
  Dims dims{};
  dims.nbDims = static_cast<int32_t>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) dims.d[i] = shape[i];
  return dims;
}
Dims absent_dims() {
  Dims dims{};
  dims.nbDims = -1;
  return dims;
}

// --- Symbolic shapes ------------------------------------------------------------------------------------------------

// A size as an expression over the dynamic dimensions of the inputs, which are numbered.
class Expr final : public IDimensionExpr, public apiv::VDimensionExpr {
 public:
  enum class Kind { kConstant, kSymbol, kOperation };
  Expr(Kind kind, int64_t value, DimensionOperation op = DimensionOperation::kSUM, const Expr* first = nullptr,
       const Expr* second = nullptr)
      : kind_(kind), value_(value), op_(op), first_(first), second_(second) {
    mImpl = this;
  }
  bool isConstant() const override { return kind_ == Kind::kConstant; }
  int64_t getConstantValue() const override { return isConstant() ? value_ : std::numeric_limits<int64_t>::min(); }
  bool isSizeTensor() const override { return false; }

  int64_t evaluate(const Shape& symbols) const {
    switch (kind_) {
      case Kind::kConstant:
        return value_;
      case Kind::kSymbol:
        return symbols[static_cast<size_t>(value_)];
      case Kind::kOperation:
        break;
    }
    return apply(op_, first_->evaluate(symbols), second_->evaluate(symbols));
  }
  static int64_t apply(DimensionOperation op, int64_t a, int64_t b) {
    switch (op) {
      case DimensionOperation::kSUM:
        return a + b;
      case DimensionOperation::kPROD:
        return a * b;
      case DimensionOperation::kMAX:
        return std::max(a, b);
      case DimensionOperation::kMIN:
        return std::min(a, b);
      case DimensionOperation::kSUB:
        return a - b;
      case DimensionOperation::kEQUAL:
        return a == b ? 1 : 0;
      case DimensionOperation::kLESS:
        return a < b ? 1 : 0;
      case DimensionOperation::kFLOOR_DIV:
        return b == 0 ? 0 : a / b;
      case DimensionOperation::kCEIL_DIV:
        return b == 0 ? 0 : (a + b - 1) / b;
    }
    fail("unknown operation");
  }

 private:
  Kind kind_;
  int64_t value_;
  DimensionOperation op_;
  const Expr *first_, *second_;
};

class ExprBuilder final : public IExprBuilder, public apiv::VExprBuilder {
 public:
  ExprBuilder() { mImpl = this; }
  const Expr* symbol(int64_t number) { return &expressions_.emplace_back(Expr::Kind::kSymbol, number); }
  const IDimensionExpr* constant(int64_t value) override {
    return &expressions_.emplace_back(Expr::Kind::kConstant, value);
  }
  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& first,
                                  const IDimensionExpr& second) override {
    const auto& a = static_cast<const Expr&>(first);
    const auto& b = static_cast<const Expr&>(second);
    if (a.Expr::isConstant() && b.Expr::isConstant()) return constant(Expr::apply(op, a.evaluate({}), b.evaluate({})));
    return &expressions_.emplace_back(Expr::Kind::kOperation, 0, op, &a, &b);
  }
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&, const IDimensionExpr&) override {
    return nullptr;
  }

 private:
  std::deque<Expr> expressions_;
};

// --- Fields ---------------------------------------------------------------------------------------------------------

// name, PluginFieldType, bytes, number of entries
using FieldTuple = std::tuple<std::string, int, py::bytes, int>;

struct Fields {
  std::vector<std::string> names, data;
  std::vector<PluginField> fields;
  PluginFieldCollection collection{};

  explicit Fields(const std::vector<FieldTuple>& tuples) {
    names.reserve(tuples.size());
    data.reserve(tuples.size());
    for (const auto& [name, type, bytes, length] : tuples) {
      names.push_back(name);
      // One byte in front: what an engine gives back need not be aligned.
      data.push_back("\xff" + static_cast<std::string>(bytes));
      fields.emplace_back(names.back().c_str(), data.back().data() + 1, static_cast<PluginFieldType>(type), length);
    }
    collection = {static_cast<int32_t>(fields.size()), fields.data()};
  }
};

int64_t size_of(PluginFieldType type) {
  switch (type) {
    case PluginFieldType::kINT64:
    case PluginFieldType::kFLOAT64:
      return 8;
    case PluginFieldType::kFLOAT32:
    case PluginFieldType::kINT32:
      return 4;
    case PluginFieldType::kINT16:
    case PluginFieldType::kFLOAT16:
    case PluginFieldType::kBF16:
      return 2;
    default:
      return 1;
  }
}

std::vector<FieldTuple> copy_fields(const PluginFieldCollection* collection) {
  check(collection != nullptr, "getFieldsToSerialize returned null");
  std::vector<FieldTuple> tuples;
  for (int32_t i = 0; i < collection->nbFields; ++i) {
    const PluginField& f = collection->fields[i];
    tuples.emplace_back(f.name, static_cast<int>(f.type),
                        py::bytes(static_cast<const char*>(f.data), static_cast<size_t>(size_of(f.type) * f.length)),
                        f.length);
  }
  return tuples;
}

// --- Creators and plugins -------------------------------------------------------------------------------------------

IPluginCreatorV3One* creator_in_library(const std::string& path, const std::string& name) {
  void* library = dlopen(path.c_str(), RTLD_NOW);
  if (library == nullptr) fail(dlerror());
  using GetCreators = IPluginCreatorInterface* const* (*)(int32_t&);
  const auto get_creators = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"));
  check(get_creators != nullptr, "the library has no getCreators");
  int32_t count = 0;
  IPluginCreatorInterface* const* creators = get_creators(count);
  for (int32_t i = 0; i < count; ++i) {
    auto* const creator = static_cast<IPluginCreatorV3One*>(creators[i]);
    if (name == creator->getPluginName()) return creator;
  }
  fail("no creator of that name");
}

// From the registry of the TensorRT library at `path`, which is loaded already.
IPluginCreatorV3One* creator_in_registry(const std::string& path, const std::string& name, const std::string& version,
                                         const std::string& ns) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  check(library != nullptr, "that TensorRT library is not loaded");
  void* registry = reinterpret_cast<void* (*)()>(dlsym(library, "getPluginRegistry"))();
  const int major = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"))() / 10000;
  // Place of getCreator in the table of virtual functions: TensorRT 11 took out four functions in front of it.
  using GetCreator = IPluginCreatorInterface* (*)(void*, const char*, const char*, const char*);
  const auto get_creator = reinterpret_cast<GetCreator>((*static_cast<void***>(registry))[major == 10 ? 14 : 10]);
  IPluginCreatorInterface* creator = get_creator(registry, name.c_str(), version.c_str(), ns.c_str());
  check(creator != nullptr, "the registry has no such creator");
  check(std::string(creator->getInterfaceInfo().kind) == "PLUGIN CREATOR_V3ONE", "the creator is of another kind");
  return static_cast<IPluginCreatorV3One*>(creator);
}

using PluginPtr = std::unique_ptr<IPluginV3>;

template <class Capability>
Capability& capability(IPluginV3& plugin, PluginCapabilityType type) {
  IPluginCapability* interface = plugin.getCapabilityInterface(type);
  check(interface != nullptr, "a capability is missing");
  return static_cast<Capability&>(*interface);
}
IPluginV3OneBuild& build_of(IPluginV3& plugin) {
  return capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
}
IPluginV3OneRuntime& runtime_of(IPluginV3& plugin) {
  return capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

PluginPtr create(IPluginCreatorV3One& creator, const std::string& node, const std::vector<FieldTuple>& tuples,
                 TensorRTPhase phase) {
  const Fields fields(tuples);
  PluginPtr plugin(creator.createPlugin(node.c_str(), &fields.collection, phase));
  if (plugin == nullptr) return nullptr;
  const auto& core = capability<IPluginV3OneCore>(*plugin, PluginCapabilityType::kCORE);
  check(std::strcmp(core.getPluginName(), creator.getPluginName()) == 0 &&
            std::strcmp(core.getPluginVersion(), creator.getPluginVersion()) == 0 &&
            std::strcmp(core.getPluginNamespace(), creator.getPluginNamespace()) == 0,
        "the plugin and its creator disagree about their name");
  PluginPtr clone(plugin->clone());
  check(clone != nullptr, "clone returned null");
  return clone;  // the original goes
}

// --- Building -------------------------------------------------------------------------------------------------------

// Type and the shapes of a profile; None for an input that the node leaves out.
using InputTuple = std::optional<std::tuple<std::string, Shape, Shape, Shape>>;

struct Input {
  bool present = false;
  DataType type = DataType::kFLOAT;
  Shape min, opt, max;
};

std::vector<Input> inputs_of(const std::vector<InputTuple>& tuples) {
  std::vector<Input> inputs(tuples.size());
  for (size_t i = 0; i < tuples.size(); ++i) {
    if (!tuples[i]) continue;
    const auto& [type, min, opt, max] = *tuples[i];
    check(min.size() == opt.size() && opt.size() == max.size(), "the shapes of a profile differ in rank");
    inputs[i] = {true, type_named(type), min, opt, max};
  }
  return inputs;
}

DynamicPluginTensorDesc dynamic_desc(const Input& input) {
  DynamicPluginTensorDesc d{};
  d.desc.type = input.type;
  d.desc.format = TensorFormat::kLINEAR;
  d.desc.scale = -1.0F;
  if (!input.present) {
    d.desc.dims = d.min = d.opt = d.max = absent_dims();
    return d;
  }
  d.min = dims_of(input.min);
  d.opt = dims_of(input.opt);
  d.max = dims_of(input.max);
  d.desc.dims = d.min;
  for (int i = 0; i < d.min.nbDims; ++i) {
    if (input.min[i] != input.max[i]) d.desc.dims.d[i] = -1;
  }
  return d;
}

// What is in a description that TensorRT has not filled in yet.
DynamicPluginTensorDesc poisoned_desc() {
  DynamicPluginTensorDesc d;
  std::memset(static_cast<void*>(&d), 0xA5, sizeof d);
  return d;
}

class Builder {
 public:
  Builder(IPluginCreatorV3One& creator, const std::string& node, const std::vector<FieldTuple>& fields)
      : plugin_(create(creator, node, fields, TensorRTPhase::kBUILD)) {
    check(plugin_ != nullptr, "createPlugin returned null");
  }

  // Output types and, at the smallest, best-tuned and largest inputs, output shapes; the shapes in between follow
  // `dims`.
  py::dict shapes(const std::vector<InputTuple>& tuples) {
    const std::vector<Input> inputs = inputs_of(tuples);
    IPluginV3OneBuild& build = build_of(*plugin_);
    const int32_t nb_inputs = static_cast<int32_t>(inputs.size()), nb_outputs = build.getNbOutputs();
    check(nb_outputs >= 1, "getNbOutputs must be positive");

    std::vector<DataType> in_types, out_types(static_cast<size_t>(nb_outputs), static_cast<DataType>(-1));
    for (const Input& input : inputs) in_types.push_back(input.type);
    check(build.getOutputDataTypes(out_types.data(), nb_outputs, in_types.data(), nb_inputs) == 0,
          "getOutputDataTypes failed");

    ExprBuilder builder;
    std::vector<DimsExprs> in(inputs.size()), out(static_cast<size_t>(nb_outputs));
    Shape at_min, at_opt, at_max;
    for (size_t i = 0; i < inputs.size(); ++i) {
      in[i].nbDims = inputs[i].present ? static_cast<int32_t>(inputs[i].min.size()) : -1;
      for (size_t d = 0; d < inputs[i].min.size(); ++d) {
        if (inputs[i].min[d] == inputs[i].max[d]) {
          in[i].d[d] = builder.ExprBuilder::constant(inputs[i].min[d]);
          continue;
        }
        in[i].d[d] = builder.symbol(static_cast<int64_t>(at_min.size()));
        at_min.push_back(inputs[i].min[d]);
        at_opt.push_back(inputs[i].opt[d]);
        at_max.push_back(inputs[i].max[d]);
      }
    }
    for (DimsExprs& o : out) o.nbDims = -77;
    check(build.getOutputShapes(in.data(), nb_inputs, nullptr, 0, out.data(), nb_outputs, builder) == 0,
          "getOutputShapes failed");

    const auto evaluate = [&](const Shape& symbols) {
      std::vector<Shape> shapes;
      for (const DimsExprs& o : out) {
        check(o.nbDims >= 0 && o.nbDims <= Dims::MAX_DIMS, "an output has no rank");
        Shape shape;
        for (int32_t d = 0; d < o.nbDims; ++d) shape.push_back(static_cast<const Expr*>(o.d[d])->evaluate(symbols));
        shapes.push_back(shape);
      }
      return shapes;
    };
    std::vector<std::string> names;
    for (const DataType t : out_types) names.push_back(name_of(t));
    out_types_ = out_types;
    out_min_ = evaluate(at_min);
    out_opt_ = evaluate(at_opt);
    out_max_ = evaluate(at_max);
    py::dict result;
    result["types"] = names;
    result["min"] = out_min_;
    result["opt"] = out_opt_;
    result["max"] = out_max_;
    return result;
  }

  // The combinations that the plugin accepts, found position by position as TensorRT does: lists of (type, format
  // number).
  std::vector<std::vector<std::pair<std::string, int>>> combinations(const std::vector<InputTuple>& tuples) {
    const std::vector<Input> inputs = inputs_of(tuples);
    IPluginV3OneBuild& build = build_of(*plugin_);
    const int32_t nb_inputs = static_cast<int32_t>(inputs.size()), nb_outputs = build.getNbOutputs();
    std::vector<DynamicPluginTensorDesc> descs(static_cast<size_t>(nb_inputs + nb_outputs), poisoned_desc());
    std::vector<std::vector<std::pair<std::string, int>>> found;
    const auto visit = [&](auto&& self, int32_t pos) -> void {
      if (pos == nb_inputs + nb_outputs) {
        auto& combination = found.emplace_back();
        for (const DynamicPluginTensorDesc& d : descs)
          combination.emplace_back(name_of(d.desc.type), static_cast<int>(d.desc.format));
        return;
      }
      if (pos < nb_inputs && !inputs[pos].present) {
        descs[pos] = dynamic_desc(inputs[pos]);
        check(build.supportsFormatCombination(pos, descs.data(), nb_inputs, nb_outputs),
              "an input that is left out was refused");
        self(self, pos + 1);
      } else {
        for (const auto& [name, type] : kTypes) {
          for (int format = 0; format < EnumMax<TensorFormat>(); ++format) {
            descs[pos] = pos < nb_inputs ? dynamic_desc(inputs[pos]) : DynamicPluginTensorDesc{};
            descs[pos].desc.type = type;
            descs[pos].desc.format = static_cast<TensorFormat>(format);
            if (build.supportsFormatCombination(pos, descs.data(), nb_inputs, nb_outputs)) self(self, pos + 1);
          }
        }
      }
      descs[pos] = poisoned_desc();
    };
    visit(visit, 0);
    return found;
  }

  // Configures for a profile. Gives (workspace bytes, tactics).
  std::pair<int64_t, std::vector<int32_t>> configure(const std::vector<InputTuple>& tuples) {
    shapes(tuples);
    const std::vector<Input> inputs = inputs_of(tuples);
    IPluginV3OneBuild& build = build_of(*plugin_);
    std::vector<DynamicPluginTensorDesc> in, out;
    for (const Input& input : inputs) in.push_back(dynamic_desc(input));
    for (size_t i = 0; i < out_types_.size(); ++i)
      out.push_back(dynamic_desc({true, out_types_[i], out_min_[i], out_opt_[i], out_max_[i]}));
    for (size_t i = 0; i < in.size(); ++i) {  // the types of the network must be among those that the plugin accepts
      std::vector<DynamicPluginTensorDesc> descs(in.size() + out.size(), poisoned_desc());
      std::copy(in.begin(), in.begin() + static_cast<ptrdiff_t>(i) + 1, descs.begin());
      check(build.supportsFormatCombination(static_cast<int32_t>(i), descs.data(), static_cast<int32_t>(in.size()),
                                            static_cast<int32_t>(out.size())),
            "supportsFormatCombination refused the types");
    }
    const auto nb_in = static_cast<int32_t>(in.size()), nb_out = static_cast<int32_t>(out.size());
    check(build.configurePlugin(in.data(), nb_in, out.data(), nb_out) == 0, "configurePlugin failed");
    const size_t workspace = build.getWorkspaceSize(in.data(), nb_in, out.data(), nb_out);
    std::vector<int32_t> tactics(static_cast<size_t>(build.getNbTactics()));
    check(tactics.empty() || build.getValidTactics(tactics.data(), static_cast<int32_t>(tactics.size())) == 0,
          "getValidTactics failed");
    return {static_cast<int64_t>(workspace), tactics};
  }

  std::string timing_cache_id() {
    const char* id = build_of(*plugin_).getTimingCacheID();
    return id == nullptr ? "" : id;
  }
  void set_tactic(int32_t tactic) { check(runtime_of(*plugin_).setTactic(tactic) == 0, "setTactic failed"); }
  std::vector<FieldTuple> serialize() { return copy_fields(runtime_of(*plugin_).getFieldsToSerialize()); }
  std::vector<FieldTuple> serialize_clone() {
    const PluginPtr clone(plugin_->clone());
    check(clone != nullptr, "clone returned null");
    return copy_fields(runtime_of(*clone).getFieldsToSerialize());
  }

 private:
  PluginPtr plugin_;
  std::vector<DataType> out_types_;
  std::vector<Shape> out_min_, out_opt_, out_max_;
};

// --- Running --------------------------------------------------------------------------------------------------------

class ResourceContext final : public IPluginResourceContext {
 public:
  IGpuAllocator* getGpuAllocator() const noexcept override { return nullptr; }
  IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
};

class Engine {
 public:
  Engine(IPluginCreatorV3One& creator, const std::string& node, const std::vector<FieldTuple>& fields, int32_t tactic)
      : plugin_(create(creator, node, fields, TensorRTPhase::kRUNTIME)) {
    check(plugin_ != nullptr, "createPlugin returned null");
    check(runtime_of(*plugin_).setTactic(tactic) == 0, "setTactic failed");
  }
  PluginPtr attach(ResourceContext* context) {
    PluginPtr attached(runtime_of(*plugin_).attachToContext(context));
    check(attached != nullptr, "attachToContext returned null");
    return attached;
  }
  std::vector<FieldTuple> serialize() { return copy_fields(runtime_of(*plugin_).getFieldsToSerialize()); }

 private:
  PluginPtr plugin_;
};

using TensorTuple = std::optional<std::pair<std::string, Shape>>;

PluginTensorDesc desc_of(const TensorTuple& tensor) {
  PluginTensorDesc desc{};
  desc.format = TensorFormat::kLINEAR;
  desc.scale = -1.0F;
  desc.dims = absent_dims();
  if (tensor) {
    desc.type = type_named(tensor->first);
    desc.dims = dims_of(tensor->second);
  }
  return desc;
}

#if ORTPLUGINS_WITH_CUDA
void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(error));
}

// Device memory between two strips of known bytes, which nobody may touch.
class Buffer {
 public:
  static constexpr size_t kGuard = 4096;
  static constexpr int kPattern = 0xA5;

  explicit Buffer(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    check(cudaMalloc(&memory_, bytes_ + 2 * kGuard), "cudaMalloc");
    check(cudaMemset(memory_, kPattern, bytes_ + 2 * kGuard), "cudaMemset");
    // It is on its way only, and a non-blocking stream does not wait for it: it would overwrite inputs that come that way.
    check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { (void)cudaFree(memory_); }

  void* data() const { return static_cast<char*>(memory_) + kGuard; }
  size_t bytes() const { return bytes_; }
  bool intact() const {
    std::vector<unsigned char> strip(kGuard);
    for (const size_t at : {size_t{0}, kGuard + bytes_}) {
      check(cudaMemcpy(strip.data(), static_cast<char*>(memory_) + at, kGuard, cudaMemcpyDeviceToHost), "cudaMemcpy");
      for (const unsigned char c : strip) {
        if (c != kPattern) return false;
      }
    }
    return true;
  }

 private:
  void* memory_ = nullptr;
  size_t bytes_;
};

// An execution context: the attached plugin, a stream, and memory for one set of shapes.
class Context {
 public:
  explicit Context(Engine& engine) : plugin_(engine.attach(&resources_)) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() {
    drop_graph();
    (void)cudaStreamDestroy(stream_);
  }

  void bind(const std::vector<TensorTuple>& inputs, const std::vector<TensorTuple>& outputs, int64_t workspace_bytes) {
    drop_graph();
    in_descs_.clear();
    out_descs_.clear();
    in_.clear();
    out_.clear();
    for (const TensorTuple& t : inputs) in_descs_.push_back(desc_of(t));
    for (const TensorTuple& t : outputs) out_descs_.push_back(desc_of(t));
    for (size_t i = 0; i < inputs.size(); ++i) in_.push_back(buffer_for(inputs[i], in_descs_[i]));
    for (size_t i = 0; i < outputs.size(); ++i) out_.push_back(buffer_for(outputs[i], out_descs_[i]));
    workspace_ = std::make_unique<Buffer>(workspace_bytes);
    check(runtime_of(*plugin_).onShapeChange(in_descs_.data(), static_cast<int32_t>(in_descs_.size()),
                                             out_descs_.data(), static_cast<int32_t>(out_descs_.size())) == 0,
          "onShapeChange failed");
  }

  void write(size_t input, const py::bytes& bytes) {
    const std::string_view view = bytes;
    check(in_.at(input) != nullptr && view.size() == in_[input]->bytes(), "wrong number of bytes for this input");
    check(cudaMemcpyAsync(in_[input]->data(), view.data(), view.size(), cudaMemcpyHostToDevice, stream_),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  // Outputs and workspace hold bytes of all ones, NaN in every float type, before the plugin runs.
  void poison() {
    for (const auto& buffer : out_)
      check(cudaMemsetAsync(buffer->data(), 0xFF, buffer->bytes(), stream_), "cudaMemsetAsync");
    check(cudaMemsetAsync(workspace_->data(), 0xFF, workspace_->bytes(), stream_), "cudaMemsetAsync");
  }

  void enqueue() {
    std::vector<const void*> in;
    std::vector<void*> out;
    for (const auto& b : in_) in.push_back(b == nullptr ? nullptr : b->data());
    for (const auto& b : out_) out.push_back(b == nullptr ? nullptr : b->data());
    void* workspace = workspace_->bytes() == 0 ? nullptr : workspace_->data();
    check(runtime_of(*plugin_).enqueue(in_descs_.data(), out_descs_.data(), in.data(), out.data(), workspace,
                                       stream_) == 0,
          "enqueue failed");
  }

  // Captures one enqueue. Anything that is not allowed during a capture, on whatever stream, makes it fail.
  void capture() {
    drop_graph();
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    std::string error;
    try {
      enqueue();
    } catch (const std::exception& e) {
      error = e.what();
    }
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    if (!error.empty()) fail(error);
    const cudaError_t made = cudaGraphInstantiate(&graph_, graph, 0);
    size_t nodes = 0;
    (void)cudaGraphGetNodes(graph, nullptr, &nodes);
    (void)cudaGraphDestroy(graph);
    check(made, "cudaGraphInstantiate");
    check(nodes > 0, "nothing was captured");
  }
  void replay() {
    check(graph_ != nullptr, "nothing was captured");
    check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
  }
  void synchronize() {
    const py::gil_scoped_release release;
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  py::bytes read(size_t output) {
    synchronize();
    std::string bytes(out_.at(output)->bytes(), '\0');
    check(cudaMemcpy(bytes.data(), out_[output]->data(), bytes.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return py::bytes(bytes);
  }
  // Names of the buffers around which something was written.
  std::vector<std::string> damaged() {
    synchronize();
    std::vector<std::string> names;
    for (size_t i = 0; i < in_.size(); ++i) {
      if (in_[i] != nullptr && !in_[i]->intact()) names.push_back("input " + std::to_string(i));
    }
    for (size_t i = 0; i < out_.size(); ++i) {
      if (!out_[i]->intact()) names.push_back("output " + std::to_string(i));
    }
    if (!workspace_->intact()) names.emplace_back("workspace");
    return names;
  }

 private:
  static std::unique_ptr<Buffer> buffer_for(const TensorTuple& tensor, const PluginTensorDesc& desc) {
    return tensor ? std::make_unique<Buffer>(volume(tensor->second) * size_of(desc.type)) : nullptr;
  }
  void drop_graph() {
    if (graph_ != nullptr) (void)cudaGraphExecDestroy(graph_);
    graph_ = nullptr;
  }

  ResourceContext resources_;
  PluginPtr plugin_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
  std::vector<PluginTensorDesc> in_descs_, out_descs_;
  std::vector<std::unique_ptr<Buffer>> in_, out_;
  std::unique_ptr<Buffer> workspace_;
};
#endif

// Attaches twice and drops the engine's plugin first; what a context without a GPU can do.
void attach_twice(Engine& engine) {
  ResourceContext first, second;
  const PluginPtr a = engine.attach(&first), b = engine.attach(&second);
  check(a != b, "attachToContext gave the same plugin twice");
}

struct CreatorHandle {
  IPluginCreatorV3One* creator;
};

}  // namespace

PYBIND11_MODULE(_plugin_host, m) {
  m.doc() = "Drives TensorRT plugins through the calls that TensorRT makes.";
  m.attr("with_cuda") = static_cast<bool>(ORTPLUGINS_WITH_CUDA);

  py::class_<CreatorHandle>(m, "Creator")
      .def_static("in_library", [](const std::string& path,
                                   const std::string& name) { return CreatorHandle{creator_in_library(path, name)}; })
      .def_static("in_registry",
                  [](const std::string& path, const std::string& name, const std::string& version,
                     const std::string& ns) { return CreatorHandle{creator_in_registry(path, name, version, ns)}; })
      .def_property_readonly("name", [](const CreatorHandle& c) { return c.creator->getPluginName(); })
      .def_property_readonly("field_names", [](const CreatorHandle& c) {
        std::vector<std::pair<std::string, int>> names;
        const PluginFieldCollection* fields = c.creator->getFieldNames();
        for (int32_t i = 0; i < fields->nbFields; ++i)
          names.emplace_back(fields->fields[i].name, static_cast<int>(fields->fields[i].type));
        return names;
      });
  py::class_<Builder>(m, "Builder")
      .def(py::init([](const CreatorHandle& c, const std::string& node, const std::vector<FieldTuple>& fields) {
        return std::make_unique<Builder>(*c.creator, node, fields);
      }))
      .def("shapes", &Builder::shapes)
      .def("combinations", &Builder::combinations)
      .def("configure", &Builder::configure)
      .def("timing_cache_id", &Builder::timing_cache_id)
      .def("set_tactic", &Builder::set_tactic)
      .def("serialize", &Builder::serialize)
      .def("serialize_clone", &Builder::serialize_clone);
  py::class_<Engine>(m, "Engine")
      .def(py::init([](const CreatorHandle& c, const std::string& node, const std::vector<FieldTuple>& fields,
                       int32_t tactic) { return std::make_unique<Engine>(*c.creator, node, fields, tactic); }))
      .def("serialize", &Engine::serialize)
      .def("attach_twice", attach_twice);
#if ORTPLUGINS_WITH_CUDA
  py::class_<Context>(m, "Context")
      .def(py::init<Engine&>(), py::keep_alive<1, 2>())
      .def("bind", &Context::bind)
      .def("write", &Context::write)
      .def("poison", &Context::poison)
      .def("enqueue", &Context::enqueue)
      .def("capture", &Context::capture)
      .def("replay", &Context::replay)
      .def("synchronize", &Context::synchronize)
      .def("read", &Context::read)
      .def("damaged", &Context::damaged);
#endif
}
