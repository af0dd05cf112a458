"""Write the C++ form of the operator specifications: ``generate_op_specs.py OPS_PY OUT_DIR``.

``op_enums.h`` has one enumeration for each string attribute (C++17, also for CUDA code);
``op_specs.h`` has, for each op, enumerations of its inputs, outputs and attributes, and its OpSpec;
``op_registry.cc`` lists the ops. Both are derived from ops.py alone.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys

INT64_MIN = "INT64_MIN"
INT64_MAX = "INT64_MAX"


def load(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location("ortplugins_ops", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def pascal(name: str) -> str:
    return "".join(p[:1].upper() + p[1:] for p in name.split("_"))


CPP_DTYPE = {"float32": "kFloat32", "float16": "kFloat16", "bfloat16": "kBFloat16", "bool": "kBool", "int64": "kInt64",
             "int32": "kInt32", "uint8": "kUInt8", "T": "kNone"}


class Emitter:
    def __init__(self, op):
        self.op = op
        self.symbols: list[str] = []
        self.lines: list[str] = []
        self.attr_index = {a.name: i for i, a in enumerate(op.attrs)}

    def factor(self, text: str) -> str:
        if text in self.attr_index:
            return f"{{true, {self.attr_index[text]}}}"
        if text not in self.symbols:
            self.symbols.append(text)
        return f"{{false, {self.symbols.index(text)}}}"

    def term(self, text: str, kind: str) -> str:
        if text == "...":
            return "{AxisTerm::Kind::kEllipsis, {}, {}}"
        for sign, term_kind in (("*", "kProduct"), ("+", "kSum")):
            if sign in text:
                left, right = text.split(sign)
                if sign == "*" and kind == "Input" and left not in self.attr_index:
                    raise ValueError(f"{self.op.name}: {text}: the first factor of an input's product must be an attribute")
                return f"{{AxisTerm::Kind::{term_kind}, {self.factor(left)}, {self.factor(right)}}}"
        return f"{{AxisTerm::Kind::kSingle, {self.factor(text)}, {{}}}}"

    def case(self, var: str, case, kind: str) -> str:
        if len(case.when) > 1:
            raise ValueError(f"{self.op.name}: an axes condition names one attribute at most")
        attr, value = -1, 0
        if case.when:
            name, wanted = case.when[0]
            attr = self.attr_index[name]
            spec = self.op.attrs[attr]
            value = spec.choices.index(wanted) if spec.kind == "string" else wanted
        terms = ", ".join(self.term(t, kind) for t in case.terms.split())
        self.lines.append(f"inline constexpr AxisTerm {var}[] = {{{terms}}};")
        return f'{{{attr}, {value}, {case.rank}, {var}, "{case.terms}"}}'

    def tensors(self, kind: str, tensors) -> None:
        rows = []
        for t in tensors:
            var = f"k{kind}{pascal(t.name)}"
            cases = ", ".join(self.case(f"{var}Terms{i}", c, kind) for i, c in enumerate(t.cases))
            self.lines.append(f"inline constexpr AxesCase {var}Axes[] = {{{cases}}};")
            types = ", ".join(f"DType::{CPP_DTYPE[d]}" for d in t.dtypes)
            self.lines.append(f"inline constexpr DType {var}Types[] = {{{types}}};")
            rows.append(f'{{"{t.name}", {var}Types, {str(t.optional).lower()}, {str(t.broadcast).lower()}, {var}Axes}}')
        self.lines.append(f"inline constexpr TensorSpec k{kind}s[] = {{{', '.join(rows)}}};")

    def attrs(self) -> None:
        rows = []
        for a in self.op.attrs:
            choices = "{}"
            if a.choices:
                values = ", ".join(f'"{c}"' for c in a.choices)
                self.lines.append(f"inline constexpr const char* k{pascal(a.name)}Choices[] = {{{values}}};")
                choices = f"k{pascal(a.name)}Choices"
            has = a.default is not None
            default_int = 0
            if has and a.kind == "int":
                default_int = a.default
            elif has and a.kind == "string":
                default_int = a.choices.index(a.default)
            default_float = float(a.default) if has and a.kind == "float" else 0.0
            zero_means = self.attr_index[a.zero_means] if a.zero_means else -1
            rows.append(
                f'{{"{a.name}", AttrKind::k{a.kind.capitalize()}, {str(has).lower()}, {default_int}, {default_float!r}F, '
                f"{zero_means}, {INT64_MIN if a.minimum is None else a.minimum}, "
                f"{INT64_MAX if a.maximum is None else a.maximum}, {choices}}}"
            )
        self.lines.append(f"inline constexpr AttrSpec kAttrs[] = {{{', '.join(rows)}}};")

    def emit(self) -> list[str]:
        op = self.op
        out = [f"namespace {op.kernel}_spec {{"]
        for kind, names in (("Input", op.inputs), ("Output", op.outputs), ("Attr", op.attrs)):
            values = ", ".join(f"k{pascal(n.name)}" for n in names)
            out.append(f"namespace {kind.lower()} {{ enum : int {{ {values} }}; }}")
        self.tensors("Input", op.inputs)
        self.tensors("Output", op.outputs)
        self.attrs()
        types = ", ".join(f"DType::{CPP_DTYPE[d]}" for d in op.dtypes)
        symbols = ", ".join(f'"{s}"' for s in self.symbols) or '""'
        out += self.lines
        out.append(f"inline constexpr DType kTypes[] = {{{types}}};")
        out.append(f"inline constexpr const char* kSymbols[] = {{{symbols}}};")
        out.append(f'inline constexpr OpSpec kSpec = {{"{op.name}", kInputs, kOutputs, kAttrs, kTypes, kSymbols}};')
        out.append(f"}}  // namespace {op.kernel}_spec\n")
        return out


def enumerations(ops) -> list[str]:
    """One C++ enumeration for each string attribute; ops that share a name must agree on the values."""
    seen: dict[str, tuple[str, ...]] = {}
    out = []
    for op in ops:
        for a in op.attrs:
            if a.kind != "string":
                continue
            if seen.setdefault(a.name, a.choices) != a.choices:
                raise ValueError(f"{op.name}: attribute {a.name} has other values than in an op before it")
    for name, choices in seen.items():
        values = ", ".join(f"k{pascal(c.lower()) if c.isupper() else pascal(c)}" for c in choices)
        out.append(f"enum class {pascal(name)} : int {{ {values} }};")
    return out


def write_if_changed(path: pathlib.Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main() -> None:
    source, out_dir = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    ops = load(source)
    out_dir.mkdir(parents=True, exist_ok=True)
    # Apart from the specifications, whose std::span is C++20: the headers of CUDA code are C++17.
    enums = ["// Generated from python/ortplugins/ops.py by generate_op_specs.py; do not edit.", "#pragma once", "",
             "namespace ortplugins {", "", *enumerations(ops.OPS), "", "}  // namespace ortplugins\n"]
    write_if_changed(out_dir / "op_enums.h", "\n".join(enums))

    lines = ["// Generated from python/ortplugins/ops.py by generate_op_specs.py; do not edit.", "#pragma once", "",
             "#include <cstdint>", '#include "core/op_spec.h"', '#include "op_enums.h"', "", "namespace ortplugins {", "",
             f'inline constexpr const char* kDomain = "{ops.DOMAIN}";', f"inline constexpr int kOpsetVersion = {ops.OPSET_VERSION};", ""]
    for op in ops.OPS:
        lines += Emitter(op).emit()
    lines.append("}  // namespace ortplugins\n")
    write_if_changed(out_dir / "op_specs.h", "\n".join(lines))

    registry = ["// Generated from python/ortplugins/ops.py by generate_op_specs.py; do not edit.", '#include "core/op.h"', "",
                "namespace ortplugins {", ""]
    registry += [f"const Op& {op.kernel}_op();" for op in ops.OPS]
    names = ", ".join(f"&{op.kernel}_op()" for op in ops.OPS)
    registry += ["", "std::span<const Op* const> all_ops() {", f"  static const Op* const ops[] = {{{names}}};", "  return ops;", "}", "",
                 "}  // namespace ortplugins\n"]
    write_if_changed(out_dir / "op_registry.cc", "\n".join(registry))


if __name__ == "__main__":
    main()
