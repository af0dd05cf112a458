"""LayerNorm and RMSNorm as FusedLayerNorm, as one operator or written out, with the sums in front of them.

Written out, the centre is the root: ``x / sqrt(mean(x^2) + epsilon)`` and, with ``x - mean(x)`` for x, LayerNorm. What
is squared, what is divided and which axes are averaged is followed through the graph, so that the spelling (Pow or Mul,
Div or Reciprocal, one Sub or two) does not matter.

A sum in front goes in as bias and residual where it is still there: the linear rule, which runs before, takes sums
into products. A sum that others need too becomes the operator's second output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..facts import REFERENCE, Facts, Shape, attr, op_of, tensor_of
from ..operands import is_no_op
from ..report import Refused
from ..tape import Tape
from . import TYPES, Match, Options, Replacement

_SKIPS = ("com.microsoft::SkipLayerNormalization", "com.microsoft::SkipSimplifiedLayerNormalization")
_RMS = frozenset({"RMSNormalization", "SimplifiedLayerNormalization", "com.microsoft::SimplifiedLayerNormalization"})
_OPERATORS = frozenset({"LayerNormalization", *_RMS, *_SKIPS})
_QUANTISERS = frozenset({"DequantizeLinear", "QuantizeLinear"})
_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


@dataclass
class Plan:
    x: ir.Value
    y: ir.Value
    axis: int
    epsilon: float
    rms: bool
    gamma: ir.Value | None = None
    beta: ir.Value | None = None
    bias: ir.Value | None = None
    residual: ir.Value | None = None
    total: ir.Value | None = None  # the sum, where others read it
    dims: Shape | None = None  # the normalised dimensions, where they are known
    nodes: list[ir.Node] = field(default_factory=list)


class _Mixed(Exception):
    """The site is computed in float32 and its result, or a factor, does not fit the half type that it starts from."""


class LayerNormRule:
    kind = "layer_norm"
    op = "FusedLayerNorm"

    def pattern(self, node: ir.Node, facts: Facts) -> Match | None:
        if op_of(node) in _OPERATORS:
            return Match(node, [node])
        if not _is_root(facts, node):
            return None
        added = node.inputs[0].producer()
        candidates = added.inputs if op_of(added) == "Add" else node.inputs[:1]
        for value in candidates:
            mean = value.producer() if value is not None else None
            if op_of(mean) == "ReduceMean" and _squared(facts, mean.inputs[0]) is not None:
                inner = [added] if op_of(added) == "Add" else []
                return Match(node, [mean.inputs[0].producer(), mean, *inner, node])
        return None

    def check(self, match: Match, facts: Facts, options: Options) -> Plan:
        node = match.centre
        if op_of(node) in _SKIPS:
            plan = self._skip_operator(node, facts)
        elif op_of(node) in _OPERATORS:
            plan = self._operator(node, facts)
        else:
            try:
                plan = _WrittenOut(match, facts, through_casts=True).plan()
            except _Mixed:
                plan = _WrittenOut(match, facts, through_casts=False).plan()
        dtype = facts.dtype(plan.x)
        if dtype is None:
            raise Refused(f"the element type of {plan.x.name} is not known", node)
        if dtype not in TYPES:
            raise Refused(f"the element type is {dtype.name}, the operator takes float32, float16 and bfloat16", node)
        quantised = next((n for n in (plan.x.producer(), *plan.y.consumers()) if op_of(n) in _QUANTISERS), None)
        if quantised is not None:
            raise Refused("the input or the output is quantised: the node belongs to a quantised graph", quantised)
        if plan.residual is None and plan.bias is None:
            _absorb_sum(plan, facts, node)
        return plan

    def _operator(self, node: ir.Node, facts: Facts) -> Plan:
        if any(a.is_ref() for a in node.attributes.values()):
            raise Refused("an attribute is an attribute of the function, given at each call", node)
        for statistic in node.outputs[1:]:
            if statistic.uses() or statistic.is_graph_output():
                raise Refused(f"its statistic {statistic.name} is used", node)
        x = node.inputs[0]
        stash = attr(node, "stash_type", 1)
        if stash not in (1, facts.dtype(x)):
            raise Refused("stash_type asks for statistics in another type than float32", node)
        axis = attr(node, "axis", -1)
        shape = facts.shape(x)
        if shape is not None and axis >= 0:
            axis -= len(shape)
        if axis >= 0 and axis != 0:
            raise Refused("the rank is not known, so the normalised dimensions are not", node)
        dims = None if shape is None or axis >= 0 else shape[axis:]
        plan = Plan(
            x, node.outputs[0], axis, float(attr(node, "epsilon", 1e-5)), op_of(node) in _RMS, dims=dims, nodes=[node]
        )
        rank = -axis if axis < 0 else None
        plan.gamma = self._operand(facts, node, 1, dims, rank)
        plan.beta = self._operand(facts, node, 2, dims, rank)
        return plan

    def _skip_operator(self, node: ir.Node, facts: Facts) -> Plan:
        simplified = op_of(node) == _SKIPS[1]
        for statistic in node.outputs[1:3]:
            if statistic.uses() or statistic.is_graph_output():
                raise Refused(f"its statistic {statistic.name} is used", node)
        x, skip = node.inputs[:2]
        shape, own = facts.shape(x), facts.shape(skip)
        if shape is None or own is None or not _is_tail(own, shape, 1):
            raise Refused("the shapes of the input and of what is added to it are not known to fit", node)
        plan = Plan(
            x, node.outputs[0], -1, float(attr(node, "epsilon", 1e-12)), simplified, dims=shape[-1:], nodes=[node]
        )
        plan.residual = skip
        plan.gamma = self._operand(facts, node, 2, plan.dims, 1)
        plan.beta = None if simplified else self._operand(facts, node, 3, plan.dims, 1)
        plan.bias = self._operand(facts, node, 3 if simplified else 4, plan.dims, 1)
        if len(node.outputs) > 3 and (node.outputs[3].uses() or node.outputs[3].is_graph_output()):
            plan.total = node.outputs[3]
        return plan

    @staticmethod
    def _operand(facts: Facts, node: ir.Node, i: int, dims: Shape | None, rank: int | None) -> ir.Value | None:
        """Input i of an operator, which may have any shape that broadcasts to that of the first."""
        value = node.inputs[i] if i < len(node.inputs) else None
        if value is None:
            return None
        if facts.dtype(value) != facts.dtype(node.inputs[0]):
            raise Refused(f"{value.name} has another element type than {node.inputs[0].name}", node)
        own = facts.shape(value)
        if own is None:
            raise Refused(f"the shape of {value.name} is not known", node)
        solid = own[next((j for j, d in enumerate(own) if d != 1), len(own)) :]
        # A size other than 1 is that of the dimension that it broadcasts to.
        if rank is not None and len(solid) == rank and all(isinstance(d, int) for d in solid) and 1 not in solid:
            return value
        if dims is None or not _fits_columns(facts, value, dims):
            raise Refused(f"{value.name} does not hold one element for each normalised element", node)
        return value

    def rewrite(self, plan: Plan, tape: Tape, options: Options) -> Replacement:
        dtype = tape.facts.dtype(plan.x)
        inputs = [
            plan.x,
            plan.residual,
            None if tape.facts.scalar(plan.gamma) == 1.0 else _columns(plan.gamma, plan.dims, dtype, tape),
            None if tape.facts.scalar(plan.beta) == 0.0 else _columns(plan.beta, plan.dims, dtype, tape),
            None if tape.facts.scalar(plan.bias) == 0.0 else _columns(plan.bias, plan.dims, dtype, tape),
        ]
        node = tape.fused(
            "FusedLayerNorm",
            inputs,
            {"norm": "rms_norm" if plan.rms else "layer_norm", "axis": plan.axis, "epsilon": plan.epsilon},
            outputs=1 if plan.total is None else 2,
        )
        values = [(plan.y, node.outputs[0])]
        if plan.total is not None:
            values.append((plan.total, node.outputs[1]))
        return Replacement(values)


class _WrittenOut:
    """One reading of a norm written out in single operators.

    In half precision files the arithmetic is often float32 between two Casts, as the operator does it inside. With
    `through_casts` the site reaches from before the first to behind the second; `_Mixed` says that it must not.
    """

    def __init__(self, match: Match, facts: Facts, through_casts: bool) -> None:
        self.facts = facts
        self.root = match.centre
        self.match = match
        self.through_casts = through_casts
        self.nodes: dict[ir.Node, None] = {}

    def plan(self) -> Plan:
        facts = self.facts
        mean, epsilon = self._mean_square()
        deviation = _squared(facts, mean.inputs[0])
        self._take(mean.inputs[0].producer(), mean)
        centred = self._centred(deviation)
        x = deviation if centred is None else centred[0]
        axis = self._axis(mean, x)
        if centred is not None and not self._same_axes(centred[1], mean):
            raise Refused("the mean and the variance are taken over different axes", centred[1])
        divided = self._divided()
        x, numerator = self._source(x), divided[0]
        if centred is not None:
            again = self._centred(numerator)
            if again is None or self._source(again[0]) is not x or not self._same_axes(again[1], mean):
                raise Refused("what is divided by the root is not what was squared", divided[1])
        elif self._source(numerator) is not x:
            raise Refused("what is divided by the root is not what was squared", divided[1])
        y = divided[1].outputs[0]
        if facts.shape(y) is None or facts.shape(y) != facts.shape(x):
            raise Refused("the shape of the input is not known", divided[1])
        plan = Plan(x, y, axis, epsilon, centred is None, dims=facts.shape(x)[axis:])
        self._extend(plan)
        self._drop_casts(x)
        self._closed(plan)
        plan.nodes = list(self.nodes)
        return plan

    def _take(self, *nodes: ir.Node) -> None:
        self.nodes.update(dict.fromkeys(nodes))

    def _mean_square(self) -> tuple[ir.Node, float]:
        facts, root = self.facts, self.root
        value = root.inputs[0]
        if op_of(value.producer()) != "Add":
            (reader, *_) = facts.readers(root.outputs[0]) or (root,)
            if op_of(reader) == "Add":
                raise Refused("the epsilon is added to the root, not to what the root is of", reader)
            self._take(root)
            return value.producer(), 0.0
        added = value.producer()
        a, b = added.inputs
        if op_of(a.producer()) != "ReduceMean":
            a, b = b, a
        epsilon = facts.scalar(b)
        if epsilon is None:
            raise Refused("the epsilon is computed in the graph", added)
        if facts.shape(value) != facts.shape(a):
            raise Refused("the epsilon changes the shape of the variance", added)
        self._take(added, root)
        return a.producer(), epsilon

    def _axis(self, mean: ir.Node, x: ir.Value) -> int:
        """First of the axes that are averaged, counted from the end."""
        facts = self.facts
        axes, rank = _mean_axes(facts, mean), facts.rank(x)
        if axes is None or rank is None:
            raise Refused("the axes or the rank are not known", mean)
        if attr(mean, "keepdims", 1) != 1:
            raise Refused("the mean drops its axes", mean)
        reduced = sorted({a % rank for a in axes}) or list(range(rank))
        if reduced != list(range(rank - len(reduced), rank)):
            raise Refused("the axes that are averaged are not the last", mean)
        return -len(reduced)

    def _same_axes(self, a: ir.Node, b: ir.Node) -> bool:
        rank = self.facts.rank(a.inputs[0])
        axes = [_mean_axes(self.facts, n) for n in (a, b)]
        if rank is None or None in axes or attr(a, "keepdims", 1) != 1:
            return False
        return len({tuple(sorted(i % rank for i in some)) for some in axes}) == 1

    def _source(self, value: ir.Value) -> ir.Value:
        """The tensor behind casts that change nothing or, `through_casts`, only widen."""
        while True:
            node = value.producer()
            if not (op_of(node) == "Cast" and (is_no_op(self.facts, node) or self._widens(node))):
                return value
            value = node.inputs[0]

    def _widens(self, node: ir.Node) -> bool:
        before, after = self.facts.dtype(node.inputs[0]), self.facts.dtype(node.outputs[0])
        return self.through_casts and before in _HALF and after == ir.DataType.FLOAT

    def _centred(self, value: ir.Value) -> tuple[ir.Value, ir.Node] | None:
        """For ``x - mean(x)``: x, and the node that takes the mean."""
        node = value.producer()
        if op_of(node) == "Cast" and is_no_op(self.facts, node):
            node = node.inputs[0].producer()
        if op_of(node) != "Sub":
            return None
        x, mean = node.inputs[0], node.inputs[1].producer()
        if op_of(mean) != "ReduceMean" or self._source(mean.inputs[0]) is not self._source(x):
            return None
        self._take(mean, node)
        if value.producer() is not node:
            self._take(value.producer())
        return x, mean

    def _divided(self) -> tuple[ir.Value, ir.Node]:
        """What is divided by the root, and the node that does it."""
        facts, root = self.facts, self.root
        value = root.outputs[0]
        inverse = op_of(root) == "Pow" and facts.scalar(root.inputs[1]) == -0.5
        while True:
            node = facts.only_reader(value)
            if node is None:
                raise Refused("the root is used otherwise than to divide once", root)
            if op_of(node) == "Cast" and is_no_op(facts, node):
                pass
            elif not inverse and op_of(node) == "Reciprocal":
                inverse = True
            elif not inverse and op_of(node) == "Div" and node.inputs[1] is value:
                if facts.scalar(node.inputs[0]) == 1.0 and facts.shape(node.outputs[0]) == facts.shape(value):
                    inverse = True
                else:
                    self._take(node)
                    return node.inputs[0], node
            elif inverse and op_of(node) == "Mul":
                self._take(node)
                return node.inputs[1 if node.inputs[0] is value else 0], node
            else:
                raise Refused("the root is used otherwise than to divide", node)
            self._take(node)
            value = node.outputs[0]

    def _extend(self, plan: Plan) -> None:
        """Takes in the factor, the offset and the Cast back to the type that the site starts from."""
        facts = self.facts
        wanted = facts.dtype(plan.x)
        while True:
            node = facts.only_reader(plan.y)
            if node is None or node.graph is not self.root.graph:
                break
            op = op_of(node)
            if op == "Cast" and (
                is_no_op(facts, node) or (facts.dtype(plan.y) != wanted and facts.dtype(node.outputs[0]) == wanted)
            ):
                pass
            elif op in ("Mul", "Add") and plan.beta is None and node.inputs[0] is not node.inputs[1]:
                other = node.inputs[1 if node.inputs[0] is plan.y else 0]
                if facts.shape(node.outputs[0]) != facts.shape(plan.y):
                    break
                if not _fits_columns(facts, other, plan.dims) or facts.dtype(other) != facts.dtype(plan.y):
                    break
                if op == "Mul" and plan.gamma is None:
                    plan.gamma = other
                elif op == "Add":
                    plan.beta = other
                else:
                    break
            else:
                break
            self._take(node)
            plan.y = node.outputs[0]
        if facts.dtype(plan.y) != wanted:
            raise _Mixed
        for value in (plan.gamma, plan.beta):
            if value is not None and facts.dtype(value) != wanted and not _exact_in(value, wanted):
                raise _Mixed

    def _drop_casts(self, x: ir.Value) -> None:
        """Casts of the input that only the site reads belong to it."""
        pending = [n for n in self.facts.readers(x) if op_of(n) == "Cast"]
        while pending:
            cast = pending.pop()
            readers = self.facts.readers(cast.outputs[0])
            pending += [n for n in readers if op_of(n) == "Cast" and n not in self.nodes]
            if not cast.outputs[0].is_graph_output() and all(n in self.nodes for n in readers):
                self._take(cast)

    def _closed(self, plan: Plan) -> None:
        """Nothing else reads what is between."""
        for node in self.nodes:
            for value in node.outputs:
                if value is plan.y:
                    continue
                stranger = next((n for n in self.facts.readers(value) if n not in self.nodes), None)
                if stranger is not None or value.is_graph_output():
                    raise Refused(f"{value.name}, inside the site, is used elsewhere", stranger or node)


def _is_root(facts: Facts, node: ir.Node) -> bool:
    op = op_of(node)
    return op == "Sqrt" or (op == "Pow" and facts.scalar(node.inputs[1]) in (0.5, -0.5))


def _squared(facts: Facts, value: ir.Value) -> ir.Value | None:
    """What a value is the square of."""
    node = value.producer()
    if op_of(node) == "Mul" and node.inputs[0] is node.inputs[1]:
        return node.inputs[0]
    if op_of(node) == "Pow" and facts.scalar(node.inputs[1]) == 2.0:
        return node.inputs[0] if facts.shape(node.inputs[0]) == facts.shape(value) else None
    return None


def _mean_axes(facts: Facts, node: ir.Node) -> list[int] | None:
    """Axes of a ReduceMean, empty for all; None where they are not known."""
    axes: object = attr(node, "axes")
    if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        axes = facts.ints(node.inputs[1])
        if axes is None:
            return None
    if axes is REFERENCE or (not axes and attr(node, "noop_with_empty_axes", 0)):
        return None
    out = list(axes or [])  # type: ignore[call-overload]
    return [int(a) for a in out] if all(isinstance(a, (int, np.integer)) for a in out) else None


def _is_tail(own: Shape, shape: Shape, columns: int) -> bool:
    """Whether a tensor that can be added to another without enlarging it has, leading ones aside, the last dimensions
    of that one, at least `columns` of them."""
    if not columns <= len(own) <= len(shape):
        return False
    first = next((j for j, d in enumerate(own) if d != 1), len(own))
    first = min(first, len(own) - columns)
    inner = own[first:]
    if len(inner) > columns:
        inner = inner[1:]  # the outermost is the other's or 1, and the operator takes both
    return inner == shape[len(shape) - len(inner) :]


def _fits_columns(facts: Facts, value: ir.Value | None, dims: Shape) -> bool:
    """Whether a tensor has, or being constant can be given, one element for each normalised element."""
    own = facts.shape(value)
    if own is None:
        return False
    rank = len(dims)
    if any(d != 1 for d in own[: max(len(own) - rank, 0)]):
        return False
    own = own[-rank:]
    if len(own) == rank and own == dims:
        return True
    return (
        tensor_of(value) is not None
        and all(isinstance(d, int) for d in dims)
        and all(a in (1, b) for a, b in zip(reversed(own), reversed(dims)))
    )


def _columns(value: ir.Value | None, dims: Shape | None, dtype: ir.DataType | None, tape: Tape) -> ir.Value | None:
    """The tensor in the shape of the normalised dimensions and in the type of the input."""
    if value is None:
        return None
    own = tape.facts.shape(value)
    same_type = tape.facts.dtype(value) == dtype
    if dims is None or (own is not None and same_type and own[-len(dims) :] == dims):
        return value
    if same_type and not all(isinstance(d, int) for d in dims):
        return value

    def shaped(t: np.ndarray) -> np.ndarray:
        return np.broadcast_to(t.reshape(t.shape[-len(dims) :]), dims)

    return tape.folded(value, shaped, dtype)


def _exact_in(value: ir.Value, dtype: ir.DataType | None) -> bool:
    """Whether a constant keeps its numbers in another type."""
    tensor = tensor_of(value)
    if tensor is None or dtype is None:
        return False
    array = tensor.numpy()
    with np.errstate(all="ignore"):
        return bool(np.array_equal(array, array.astype(dtype.numpy()).astype(array.dtype)))


def _absorb_sum(plan: Plan, facts: Facts, centre: ir.Node) -> None:
    """Takes in up to two sums in front: one with a constant for each column, one with another tensor."""
    if plan.dims is None:
        return
    reader: ir.Node | None = None
    while True:
        total = plan.x
        node, shape, dtype = total.producer(), facts.shape(total), facts.dtype(total)
        if op_of(node) != "Add" or node.graph is not centre.graph or node.inputs[0] is node.inputs[1]:
            return
        if reader is not None and facts.only_reader(total) is not reader:
            return
        others = reader is None and (total.is_graph_output() or any(n not in plan.nodes for n in facts.readers(total)))
        # The new node stands where the sum was: what it reads must not depend on readers of the sum.
        if others and any(v is not None and tensor_of(v) is None for v in (plan.gamma, plan.beta)):
            return
        for x, other in (node.inputs, reversed(node.inputs)):
            if facts.shape(x) != shape or facts.dtype(x) != dtype or facts.dtype(other) != dtype or tensor_of(x):
                continue
            own = facts.shape(other)
            if plan.bias is None and tensor_of(other) is not None and _fits_columns(facts, other, plan.dims):
                plan.bias = other
            elif plan.residual is None and own is not None and _is_tail(own, shape, len(plan.dims)):
                plan.residual = other
            else:
                continue
            plan.x = x
            break
        else:
            return
        if others:
            plan.total = total
        plan.nodes.insert(0, node)
        reader = node
