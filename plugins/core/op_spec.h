// The operator specification as data. The tables themselves are generated from python/ortplugins/ops.py into
// op_specs.h; this header says what they are made of.
#pragma once

#include <cstdint>
#include <span>

#include "core/dtype.h"

namespace ortplugins {

// One term of a tensor's axes: a symbol or attribute, alone or in a product or sum with another.
struct AxisTerm {
  enum class Kind : uint8_t { kEllipsis, kSingle, kProduct, kSum };
  struct Factor {
    bool is_attr = false;
    uint8_t index = 0;  // of the symbol or of the attribute
  };
  Kind kind = Kind::kSingle;
  Factor first, second;
};

// The axes of a tensor where attribute `attr` has the value `value` (attr < 0: always) and its rank is `rank` (0: any).
struct AxesCase {
  int8_t attr = -1;
  int64_t value = 0;
  int rank = 0;
  std::span<const AxisTerm> terms;
  const char* text = "";  // as written in ops.py
};

struct TensorSpec {
  const char* name;
  std::span<const DType> dtypes;  // kNone stands for T, the type that tensors share
  bool optional;
  bool broadcast;  // broadcasts to its axes instead of having them
  std::span<const AxesCase> axes;
};

enum class AttrKind : uint8_t { kInt, kFloat, kString };

struct AttrSpec {
  const char* name;
  AttrKind kind;
  bool has_default;
  int64_t default_int;  // for kString: index into choices
  float default_float;
  int8_t zero_means;  // attribute whose value stands for 0 here, or -1
  int64_t minimum, maximum;
  std::span<const char* const> choices;
};

// The value of an attribute, in the order of the specification. Strings are indices into the choices.
struct AttrValue {
  bool is_set = false;  // false: the node does not give it and the specification has no default
  int64_t i = 0;
  float f = 0.0F;
};

struct OpSpec {
  const char* name;
  std::span<const TensorSpec> inputs, outputs;
  std::span<const AttrSpec> attrs;
  std::span<const DType> dtypes;  // what T may be
  std::span<const char* const> symbols;
};

constexpr int kMaxInputs = 8;
constexpr int kMaxOutputs = 4;
constexpr int kMaxAttrs = 16;
constexpr int kMaxSymbols = 16;

}  // namespace ortplugins
