// Output shapes from input shapes, read off the axes of the specification. One function serves every op and every kind of
// dimension: int64_t at run time, symbolic dimensions in ONNX Runtime and TensorRT.
//
// `Algebra` provides, for its type Dim:
//   Dim constant(int64_t); Dim product(Dim, Dim); Dim sum(Dim, Dim); Dim quotient(Dim, int64_t);  // exact
//   bool known(Dim, int64_t*);       // the value, if it is known
//   bool same(Dim, Dim);             // certainly equal
//   Dim broadcast(Dim, Dim, bool*);  // NumPy broadcast; sets false if impossible
#pragma once

#include <cstdint>

#include "core/op_spec.h"
#include "core/shape.h"
#include "core/status.h"

namespace ortplugins {

template <class Dim>
struct DimsOf {
  bool present = false;
  int rank = 0;
  Dim dims[kMaxRank] = {};
};

namespace infer_detail {

inline const AxesCase* axes_case(const TensorSpec& tensor, const AttrValue* attrs, int rank) {
  for (const AxesCase& c : tensor.axes) {
    if (c.attr >= 0 && attrs[c.attr].i != c.value) continue;
    if (c.rank != 0 && c.rank != rank) continue;
    return &c;
  }
  return nullptr;
}

}  // namespace infer_detail

template <class Algebra, class Dim = typename Algebra::Dim>
Status infer_dims(const OpSpec& spec, const AttrValue* attrs, const DimsOf<Dim>* inputs, DimsOf<Dim>* outputs,
                  Algebra algebra = {}) {
  using infer_detail::axes_case;
  Dim symbol[kMaxSymbols] = {};
  bool bound[kMaxSymbols] = {};
  DimsOf<Dim> leading;  // what ... stands for

  const auto factor_value = [&](AxisTerm::Factor f) {
    if (f.is_attr) return algebra.constant(attrs[f.index].i);
    return bound[f.index] ? symbol[f.index] : algebra.constant(0);
  };

  for (size_t t = 0; t < spec.inputs.size(); ++t) {
    const TensorSpec& tensor = spec.inputs[t];
    const DimsOf<Dim>& in = inputs[t];
    if (!in.present || tensor.broadcast) continue;
    const AxesCase* axes = axes_case(tensor, attrs, in.rank);
    if (axes == nullptr) return Status::invalid(tensor.name, "rank {} is not supported", {in.rank});
    const bool has_leading = axes->terms[0].kind == AxisTerm::Kind::kEllipsis;
    const int named = static_cast<int>(axes->terms.size()) - (has_leading ? 1 : 0);
    if (has_leading ? in.rank < named : in.rank != named) {
      return Status::invalid(tensor.name, has_leading ? "expected a rank of at least {}, got {}" : "expected rank {}, got {}", {named, in.rank});
    }
    const int leading_rank = in.rank - named;
    if (has_leading) {
      DimsOf<Dim> merged;
      merged.present = true;
      merged.rank = leading.present && leading.rank > leading_rank ? leading.rank : leading_rank;
      for (int i = 1; i <= merged.rank; ++i) {
        const bool here = i <= leading_rank;
        const bool before = leading.present && i <= leading.rank;
        bool possible = true;
        merged.dims[merged.rank - i] = here && before ? algebra.broadcast(leading.dims[leading.rank - i], in.dims[leading_rank - i], &possible)
                                       : here         ? in.dims[leading_rank - i]
                                                      : leading.dims[leading.rank - i];
        if (!possible) return Status::invalid(tensor.name, "dimension {} does not broadcast with those of the inputs before it", {leading_rank - i});
      }
      leading = merged;
    }
    for (int i = 0; i < named; ++i) {
      const AxisTerm& term = axes->terms[i + (has_leading ? 1 : 0)];
      const int axis = leading_rank + i;
      Dim dim = in.dims[axis];
      AxisTerm::Factor factor = term.first;
      if (term.kind == AxisTerm::Kind::kProduct) {  // attribute * symbol
        const int64_t divisor = attrs[term.first.index].i;
        if (divisor <= 0) return Status::invalid(tensor.name, "rank {} needs the attribute that gives its number of heads", {in.rank});
        int64_t value = 0;
        if (algebra.known(dim, &value) && value % divisor != 0) {
          return Status::invalid(tensor.name, "dimension {} is {}, not a multiple of {}", {axis, value, divisor});
        }
        dim = algebra.quotient(dim, divisor);
        factor = term.second;
      }
      if (!bound[factor.index]) {
        symbol[factor.index] = dim;
        bound[factor.index] = true;
        continue;
      }
      int64_t expected = 0, got = 0;
      if (algebra.known(symbol[factor.index], &expected) && algebra.known(dim, &got)) {
        if (expected != got) return Status::invalid(tensor.name, "dimension {} is {}, expected {}", {axis, got, expected});
      } else if (algebra.known(dim, &got)) {
        symbol[factor.index] = dim;  // a known size says more than a symbol
      }
    }
  }

  for (size_t t = 0; t < spec.outputs.size(); ++t) {
    const TensorSpec& tensor = spec.outputs[t];
    DimsOf<Dim>& out = outputs[t];
    // Where the rank matters, an output has that of the first input.
    const AxesCase* axes = axes_case(tensor, attrs, inputs[0].rank);
    if (axes == nullptr) return Status::invalid(tensor.name, "no axes for rank {}", {inputs[0].rank});
    const bool has_leading = axes->terms[0].kind == AxisTerm::Kind::kEllipsis;
    out.present = true;
    out.rank = 0;
    if (has_leading) {
      for (int i = 0; i < leading.rank; ++i) out.dims[out.rank++] = leading.dims[i];
    }
    if (out.rank + static_cast<int>(axes->terms.size()) - (has_leading ? 1 : 0) > kMaxRank) {
      return Status::unsupported(tensor.name, "its rank is over {}", {kMaxRank});
    }
    for (size_t i = has_leading ? 1 : 0; i < axes->terms.size(); ++i) {
      const AxisTerm& term = axes->terms[i];
      Dim dim = factor_value(term.first);
      if (term.kind == AxisTerm::Kind::kProduct) dim = algebra.product(dim, factor_value(term.second));
      if (term.kind == AxisTerm::Kind::kSum) dim = algebra.sum(dim, factor_value(term.second));
      out.dims[out.rank++] = dim;
    }
  }
  return {};
}

// The run-time case: input shapes to output shapes. Checks ranks and sizes that must agree, not broadcasting inputs.
Status infer_shapes(const OpSpec& spec, const AttrValue* attrs, const TensorRef* inputs, Shape* outputs);

}  // namespace ortplugins
