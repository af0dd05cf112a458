// Attribute values: defaults, checks and look-up, shared by the adapters. Not for the hot path.
#pragma once

#include <string>
#include <string_view>

#include "core/op_spec.h"
#include "core/status.h"

namespace ortplugins {

// What one attribute of a node holds; an adapter fills in the member of the specification's kind.
struct RawAttr {
  bool is_set = false;
  int64_t i = 0;
  float f = 0.0F;
  std::string_view s;
};

// Checks `raw` (in specification order) against the specification and fills `values` with them or with the defaults.
Status parse_attrs(const OpSpec& spec, const RawAttr* raw, AttrValue* values);

// What `parse_attrs` found wrong with `raw`, with the allowed values of a string attribute.
std::string attr_message(const OpSpec& spec, const RawAttr* raw, const Status& status);

}  // namespace ortplugins
