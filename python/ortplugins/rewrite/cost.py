"""What sites cost, by the roofline model: a node takes its arithmetic or its traffic, whichever takes the device longer.

The model knows no caches and no kernels. It tells where time can be won and whether arithmetic or memory is the limit;
what is won is for ``ortplugins compare`` to measure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx import helper

from ..bench.graphs import graph
from ..ops import DOMAIN, PACKED_LAYOUTS
from ..session import make_session
from .facts import Facts, Shape, attr, op_of
from .symbolic import Dim, Size


@dataclass(frozen=True)
class Device:
    """Ceilings of a device. ``flops`` are per second, by precision of the product: ``ieee``, ``tf32x3``, ``tf32``,
    ``half``; everything that is not a product runs at ``ieee``. ``node_seconds`` is what a node costs whatever it does.
    """

    name: str
    source: str
    bytes_per_s: float
    flops: Mapping[str, float]
    node_seconds: float


H200 = Device(
    # Measured on an H200 SXM: copies of 64 MB and more; cuBLAS on products of 8192 cubed in float32, TF32 and float16
    # (its data sheet says 4.8e12 bytes, 67e12, 494e12 and 989e12). In tf32x3 three float16 products stand for one. A
    # kernel behind another on a stream starts about two microseconds after it.
    "NVIDIA H200",
    "measured",
    4.1e12,
    {"ieee": 52e12, "tf32x3": 770e12 / 3, "tf32": 356e12, "half": 770e12},
    2e-6,
)


def this_cpu() -> Device:
    """This machine's processor: the best of a few large copies in NumPy and products in ONNX Runtime, half a second in
    all. A node of ONNX Runtime costs about a microsecond.
    """
    source = np.ones(1 << 24, np.float32)  # 64 MB, larger than most last-level caches
    target = np.empty_like(source)
    copy = _best(lambda: np.copyto(target, source))
    n = 768
    a = np.ones((n, n), np.float32)
    product = helper.make_node("MatMul", ["a", "b"], ["y"])
    session = make_session(graph([product], {"a": a, "b": a}, "y", constants=["b"]))
    rate = 2 * n**3 / _best(lambda: session.run(None, {"a": a}))
    kinds = dict.fromkeys(("ieee", "tf32x3", "tf32", "half"), rate)  # all of them are float32 arithmetic here
    return Device("this CPU", "measured", 2 * source.nbytes / copy, kinds, 1e-6)


def _best(function: Callable[[], object]) -> float:
    times = []
    for _ in range(10):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


# -- what is kept of a node


@dataclass(frozen=True)
class Operand:
    shape: Shape | None
    itemsize: float


@dataclass(frozen=True)
class Work:
    """A node as far as its cost goes: shapes are symbolic, and sizes come later."""

    op: str
    inputs: tuple[Operand | None, ...]
    outputs: tuple[Operand | None, ...]
    attrs: Mapping[str, object]


_ATTRIBUTES = ("transA", "transB", "layout", "precision", "equation")


def work_of(node: ir.Node, facts: Facts) -> Work:
    def operand(value: ir.Value | None) -> Operand | None:
        if value is None:
            return None
        dtype = facts.dtype(value)
        return Operand(facts.shape(value), dtype.bitwidth / 8 if dtype is not None else 4.0)

    used = [v if v.uses() or v.is_graph_output() else None for v in node.outputs]
    used[:1] = node.outputs[:1]
    attrs = {k: attr(node, k) for k in _ATTRIBUTES if k in node.attributes}
    return Work(op_of(node), tuple(map(operand, node.inputs)), tuple(map(operand, used)), attrs)


# -- sizes


@dataclass
class SizeValues:
    """Numbers for symbolic sizes. ``symbol`` gives that of a named dimension, None if it has none."""

    symbol: Callable[[str], int | None]
    known: dict[str, int | None] = field(default_factory=dict)

    def of(self, size: Size) -> int | None:
        if not isinstance(size, Dim):
            return int(size)
        total = 0
        for monomial, coefficient in size.terms:
            for name in monomial:
                value = self._named(name)
                if value is None:
                    return None
                coefficient *= value
            total += coefficient
        return total

    def shape(self, shape: Shape | None) -> tuple[int, ...] | None:
        out = None if shape is None else [self.of(d) for d in shape]
        return None if out is None or None in out else tuple(out)  # type: ignore[arg-type]

    def _named(self, name: str) -> int | None:
        if name not in self.known:
            self.known[name] = self._evaluate(name)
        return self.known[name]

    def _evaluate(self, name: str) -> int | None:
        """A symbol, or one that stands for the smaller or the broadcast of two formulas."""
        value = self.symbol(name)
        if value is not None:
            return value
        for prefix, function in (("min(", min), ("broadcast(", max)):
            if name.startswith(prefix) and name.endswith(")"):
                parts = [self._formula(p) for p in _split(name[len(prefix) : -1], ",")]
                return None if None in parts else function(parts)  # type: ignore[arg-type, type-var]
        return None

    def _formula(self, text: str) -> int | None:
        total = 0
        for term in _split(text, "+"):
            product = 1
            for factor in _split(term, "*"):
                value = int(factor) if factor.lstrip("-").isdigit() else self._named(factor)
                if value is None:
                    return None
                product *= value
            total += product
        return total


def _split(text: str, separator: str) -> list[str]:
    """Splits at the separators that are not inside brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c == "(") - (c == ")")
        if c == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


# -- costs

_FREE = frozenset(
    {"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Constant", "Shape", "Size", "Dropout", "ConstantOfShape"}
)
_MATMULS = frozenset({"MatMul", "Gemm", f"{DOMAIN}::FusedGemm"})
_ATTENTIONS = frozenset({"Attention", f"{DOMAIN}::FusedAttention", "com.microsoft::MultiHeadAttention"})
_OPERATIONS = {  # for each element of the output; a division or an exponential counts as one
    "Softmax": 5,
    "LogSoftmax": 5,
    f"{DOMAIN}::FusedSoftmax": 5,
    "LayerNormalization": 8,
    "RMSNormalization": 5,
    f"{DOMAIN}::FusedLayerNorm": 8,
    "Transpose": 0,
    "Expand": 0,
    "Gather": 0,
    "Concat": 0,
    "Slice": 0,
    "Split": 0,
    "Cast": 0,
}


@dataclass(frozen=True)
class Cost:
    flops: float
    bytes: float
    seconds: float


def cost_of(work: Work, values: SizeValues, device: Device) -> Cost | None:
    """Cost of one node; None where a size is not known."""
    if work.op in _FREE:
        return Cost(0, 0, 0)
    inputs = [None if o is None else values.shape(o.shape) for o in work.inputs]
    outputs = [None if o is None else values.shape(o.shape) for o in work.outputs]
    if any(o is not None and s is None for o, s in zip((*work.inputs, *work.outputs), (*inputs, *outputs))):
        return None
    flops = _flops(work, inputs, outputs)
    moved = sum(
        math.prod(s) * o.itemsize
        for o, s in zip((*work.inputs, *work.outputs), (*inputs, *outputs))
        if o is not None and s is not None
    )
    if work.op == "Gather":
        moved = 2 * math.prod(outputs[0]) * work.outputs[0].itemsize  # type: ignore[arg-type, union-attr]
    kind = "ieee"
    if work.op in _MATMULS | _ATTENTIONS or work.op == "Einsum":
        half = work.inputs[0] is not None and work.inputs[0].itemsize == 2
        kind = "half" if half else str(work.attrs.get("precision", "ieee"))
    seconds = max(flops / device.flops[kind], moved / device.bytes_per_s) + device.node_seconds
    return Cost(flops, moved, seconds)


def _flops(work: Work, inputs: list[tuple[int, ...] | None], outputs: list[tuple[int, ...] | None]) -> float:
    y = math.prod(outputs[0] or ())
    if work.op in _MATMULS:
        a = inputs[0] or (1,)
        return 2.0 * y * (a[-2] if work.attrs.get("transA") else a[-1])
    if work.op in _ATTENTIONS:
        q, k = inputs[0] or (), inputs[1] or ()
        heads_first = work.attrs.get("layout") == "BNSH" or (work.op == "Attention" and len(k) == 4)
        keys = k[2 if heads_first else 1] if len(k) > 2 else 0
        past = inputs[4] if len(inputs) > 4 else None
        queries = math.prod(q) / (3 if work.attrs.get("layout") in PACKED_LAYOUTS else 1)
        return 2.0 * (queries + y) * (keys + (past[2] if past else 0))
    if work.op == "Einsum":
        letters: dict[str, int] = {}
        for term, shape in zip(str(work.attrs["equation"]).replace(" ", "").split("->")[0].split(","), inputs):
            letters.update(zip(term, shape or ()))
        return 2.0 * math.prod(letters.values())
    return float(y * _OPERATIONS.get(work.op, 1))


@dataclass(frozen=True)
class Estimate:
    """A site at given sizes: ``flops`` and ``bytes`` of the fused operator, or of the nodes of a site that stays.

    ``gain`` is the time of the nodes replaced over that of those that replace them, None for a site that stays.
    """

    flops: float
    bytes: float
    intensity: float
    bound: str
    seconds: float
    gain: float | None

    def to_dict(self) -> dict[str, object]:
        return {
            "flops": self.flops,
            "bytes": self.bytes,
            "flops_per_byte": round(self.intensity, 3),
            "bound": self.bound,
            "seconds": self.seconds,
            "gain": None if self.gain is None else round(self.gain, 3),
        }


def estimate(before: Iterable[Work], after: Iterable[Work], values: SizeValues, device: Device) -> Estimate | None:
    """The site whose nodes were ``before`` and became ``after``, which is empty for one that stays."""
    old = [cost_of(w, values, device) for w in before]
    after = list(after)
    new = [cost_of(w, values, device) for w in after]
    main = [c for w, c in zip(after, new) if w.op.startswith(f"{DOMAIN}::")] if after else old
    if not main or any(c is None for c in (*main, *old, *new)):
        return None
    flops, moved = sum(c.flops for c in main), sum(c.bytes for c in main)  # type: ignore[union-attr]
    # Arithmetic is the limit where the device would take longer for it than for the traffic.
    arithmetic = sum(c.seconds - device.node_seconds for c in main if c.bytes)  # type: ignore[union-attr]
    bound = "compute" if arithmetic > 1.0001 * moved / device.bytes_per_s else "memory"
    gain = None
    if after:
        gain = sum(c.seconds for c in old) / sum(c.seconds for c in new)  # type: ignore[union-attr]
    seconds = sum(c.seconds for c in main)  # type: ignore[union-attr]
    return Estimate(flops, moved, flops / moved if moved else 0.0, bound, seconds, gain)
