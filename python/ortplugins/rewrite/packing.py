"""Queries, keys and values in one tensor, which FusedAttention reads in place.

Exporters split the result of one projection in three, and models that have three projections of one input take three
products where one would do. After the rules have run, the operands of every FusedAttention are traced back:

- parts of one tensor (Split, or Gather of an axis of three): the operator reads the tensor itself, and the copies go;
- three FusedGemm of one input with constant weights: they become one, three times as wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..ops import DOMAIN, find
from .facts import REFERENCE, Facts, attr, op_of, tensor_of
from .layout import unpermute
from .symbolic import Size
from .tape import Tape

_GEMM = f"{DOMAIN}::FusedGemm"
_ATTENTION = f"{DOMAIN}::FusedAttention"
_SAME_IN_ALL = ("alpha", "beta", "transA", "transB", "precision")
_MIN_RANK_OF_PARTS = 5


@dataclass
class Packed:
    """One tensor that holds the operands: (batch, sequence, 3, heads, head_dim), or with the 3 behind the heads."""

    value: ir.Value
    layout: str
    gone: list[ir.Node]
    """Nodes that may have lost their readers."""


@dataclass
class _Part:
    """A value as part `index` of an axis of `source`; `axes` are those of the source: b, s, n, d, and 3 for the parts."""

    source: ir.Value
    index: int
    axes: list[str]


def is_attention(node: ir.Node) -> bool:
    return op_of(node) == _ATTENTION


def pack(node: ir.Node, facts: Facts, tape: Tape) -> tuple[list[tuple[ir.Value, ir.Value]], list[ir.Node]] | None:
    """Writes a FusedAttention that reads packed operands, if those of ``node`` are or can be packed.

    Returns the old and new values, and the nodes that may have lost their readers; None if nothing is to be done.
    """
    q, k, v = node.inputs[:3]
    layout = attr(node, "layout", "BSNH")
    shapes = [facts.shape(x) for x in (q, k, v)]
    if layout not in ("BSNH", "BNSH") or any(s is None for s in shapes) or not shapes[0] == shapes[1] == shapes[2]:
        return None
    shape = shapes[0]
    if len(shape) == 3:
        heads = attr(node, "num_heads", 0)
        if attr(node, "kv_num_heads", 0) not in (0, heads) or not isinstance(shape[2], int) or not heads:
            return None
        dim: Size = shape[2] // heads
    else:
        heads, dim = shape[2 if layout == "BSNH" else 1], shape[3]
        if not isinstance(heads, int) or not isinstance(dim, int):
            return None
    result = _result(facts, node, layout, (shape[0], shape[1 if len(shape) == 3 or layout == "BSNH" else 2], heads * dim))
    flattening = _flattening(facts, node, layout) if result is None else None
    if result is None and flattening is None:
        return None
    packed = (
        _split(facts, node, heads, dim, tape) or _slices(facts, node, layout) or _joined(facts, node, heads, dim, tape)
    )
    if packed is None:
        return None
    attributes = _attributes(node, "layout", "num_heads", "kv_num_heads")
    fused = tape.fused(
        "FusedAttention",
        [packed.value] * 3 + list(node.inputs[3:]),
        {**attributes, "layout": packed.layout},
        outputs=len(node.outputs),
    )
    fused.name = node.name
    fused.metadata_props.update(node.metadata_props)
    fused.doc_string = node.doc_string
    presents = list(zip(node.outputs[1:], fused.outputs[1:]))
    if result is None:
        flattening.replace_input_with(0, fused.outputs[0])
        return presents, [node, *packed.gone]
    y, behind = result
    return [(y, fused.outputs[0]), *presents], [node, *behind, *packed.gone]


def _result(
    facts: Facts, node: ir.Node, layout: str, wanted: Sequence[Size]
) -> tuple[ir.Value, list[ir.Node]] | None:
    """The value that is the attention's result as (batch, sequence, heads * head_dim), if the graph has one, and the nodes
    that lead to it."""
    y, nodes = node.outputs[0], []
    if facts.rank(y) == 3:
        return y, nodes
    for expected in ("Transpose", "Reshape") if layout == "BNSH" else ("Reshape",):
        reader = facts.only_reader(y)
        if reader is None or op_of(reader) != expected or reader.inputs[0] is not y or reader.graph is not node.graph:
            return None
        if expected == "Transpose" and list(attr(reader, "perm") or ()) != [0, 2, 1, 3]:
            return None
        y = reader.outputs[0]
        nodes.append(reader)
    return (y, nodes) if facts.shape(y) == tuple(wanted) else None


def _flattening(facts: Facts, node: ir.Node, layout: str) -> ir.Node | None:
    """The Reshape that alone reads the result, and gives the same whether the heads are apart or not."""
    reader = facts.only_reader(node.outputs[0])
    if layout != "BSNH" or op_of(reader) != "Reshape" or reader.graph is not node.graph:
        return None
    target = tensor_of(reader.inputs[1])
    return reader if target is not None and reader.inputs[0] is node.outputs[0] and np.all(target.numpy() != 0) else None


def _split(facts: Facts, node: ir.Node, heads: int, dim: int, tape: Tape) -> Packed | None:
    """The three outputs of a Split along the last axis, in order, perhaps with their heads apart already."""
    source: ir.Node | None = None
    for i, value in enumerate(node.inputs[:3]):
        producer = value.producer()
        if op_of(producer) == "Reshape" and facts.rank(producer.inputs[0]) == 3:
            if attr(node, "layout", "BSNH") != "BSNH" or facts.rank(value) != 4:
                return None
            if facts.shape(producer.inputs[0])[:2] != facts.shape(value)[:2]:
                return None
            value = producer.inputs[0]
            producer = value.producer()
        if op_of(producer) != "Split" or value.index() != i or (source is not None and producer is not source):
            return None
        source = producer
    assert source is not None
    x = source.inputs[0]
    axis = attr(source, "axis", 0)
    if facts.rank(x) != 3 or axis is REFERENCE or axis % 3 != 2 or len(source.outputs) != 3:
        return None
    if any(facts.shape(o) is None or facts.shape(o)[2] != heads * dim for o in source.outputs):
        return None
    value = tape.op("Reshape", [x, tape.ints([0, 0, 3, heads, dim])])
    return Packed(value, "BS3NH", [p for v in node.inputs[:3] if (p := v.producer()) is not None])


def _slices(facts: Facts, node: ir.Node, layout: str) -> Packed | None:
    """Three parts of an axis of one tensor of rank 5."""
    labels = list("bsnd" if layout == "BSNH" else "bnsd")
    if facts.rank(node.inputs[0]) != 4:
        return None
    parts = [_trace(facts, value, labels) for value in node.inputs[:3]]
    if any(p is None or p.index != i or p.source is not parts[0].source for i, p in enumerate(parts)):
        return None
    first = parts[0]
    order = "".join(first.axes)
    shape = facts.shape(first.source)
    if order not in ("bs3nd", "bsn3d") or shape is None or shape[order.index("3")] != 3:
        return None
    return Packed(first.source, order.upper().replace("D", "H"), [v.producer() for v in node.inputs[:3]])


def _trace(facts: Facts, value: ir.Value, labels: Sequence[str]) -> _Part | None:
    """Back to the tensor that `value` is a part of, over one Gather (or Split and Squeeze) and Transposes."""
    axes, index = list(labels), -1
    while (producer := value.producer()) is not None:
        op, rank = op_of(producer), facts.rank(producer.inputs[0])
        if op == "Transpose" and producer.outputs[0] is value:
            perm = attr(producer, "perm")
            if perm is REFERENCE:
                return None
            axes = unpermute(axes, list(reversed(range(len(axes)))) if perm is None else perm)
        elif op == "Gather" and index < 0 and rank == _MIN_RANK_OF_PARTS:
            at = tensor_of(producer.inputs[1])
            axis = attr(producer, "axis", 0)
            if at is None or len(at.shape) != 0 or axis is REFERENCE:
                return None
            index = int(at.numpy()) % 3
            axes.insert(axis % rank, "3")
        elif op == "Squeeze" and index < 0 and rank == _MIN_RANK_OF_PARTS:
            split = producer.inputs[0].producer()
            if op_of(split) != "Split" or len(split.outputs) != 3 or facts.shape(value) is None:
                return None
            axis = attr(split, "axis", 0)
            whole = facts.shape(producer.inputs[0])
            if axis is REFERENCE or whole is None:
                return None
            axis %= rank
            if whole[axis] != 1 or (*whole[:axis], *whole[axis + 1 :]) != facts.shape(value):
                return None
            index = producer.inputs[0].index()
            axes.insert(axis, "3")
            producer = split
        else:
            break
        value = producer.inputs[0]
    return _Part(value, index, axes) if index >= 0 else None


def _joined(facts: Facts, node: ir.Node, heads: int, dim: int, tape: Tape) -> Packed | None:
    """Three FusedGemm of one input, that nothing else reads: one with the weights side by side."""
    values = list(node.inputs[:3])
    gemms = [v.producer() for v in values]
    if facts.rank(values[0]) != 3 or len({id(v) for v in values}) != 3:
        return None
    for value, gemm in zip(values, gemms):
        if op_of(gemm) != _GEMM or facts.only_reader(value) is not node or gemm.graph is not node.graph:
            return None
        if attr(gemm, "activation", "none") != "none" or attr(gemm, "transA", 0) or _operand(gemm, 3) is not None:
            return None
        if gemm.inputs[0] is not gemms[0].inputs[0]:
            return None
        if any(attr(gemm, name) != attr(gemms[0], name) for name in _SAME_IN_ALL):
            return None
    weights = [g.inputs[1] for g in gemms]
    biases = [_operand(g, 2) for g in gemms]
    width = heads * dim
    side = 0 if attr(gemms[0], "transB", 0) else 1
    if not all(tensor_of(w) is not None and len(tensor_of(w).shape) == 2 for w in weights):
        return None
    if any(tuple(tensor_of(w).shape) != tuple(tensor_of(weights[0]).shape) for w in weights):
        return None
    if tensor_of(weights[0]).shape[side] != width:
        return None
    bias = None
    if any(b is not None for b in biases):
        if not all(b is None or tensor_of(b) is not None for b in biases):
            return None
        if not all(b is None or tuple(tensor_of(b).shape) in ((width,), (1, width)) for b in biases):
            return None
        dtype = tensor_of(weights[0]).dtype
        bias = tape.computed(
            next(b for b in biases if b is not None),
            lambda arrays: np.concatenate([a.reshape(-1) for a in arrays]),
            [b if b is not None else (np.zeros(width, dtype.numpy())) for b in biases],
            (3 * width,),
        )
    shape = list(tensor_of(weights[0]).shape)
    shape[side] = 3 * width
    weight = tape.computed(weights[0], lambda arrays: np.concatenate(arrays, axis=side), weights, tuple(shape))
    joined = tape.fused("FusedGemm", [gemms[0].inputs[0], weight, bias], _attributes(gemms[0]))
    joined.metadata_props.update(gemms[0].metadata_props)
    value = tape.op("Reshape", [joined.outputs[0], tape.ints([0, 0, 3, heads, dim])])
    return Packed(value, "BS3NH", list(gemms))


def _attributes(node: ir.Node, *without: str) -> dict[str, object]:
    """The attributes of a fused node that its operator has, but for those in ``without``."""
    own = {a.name for a in find(node.op_type).attrs}
    return {name: a.value for name, a in node.attributes.items() if name in own and name not in without}


def _operand(node: ir.Node, i: int) -> ir.Value | None:
    return node.inputs[i] if len(node.inputs) > i else None
