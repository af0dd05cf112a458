"""Softmax and LogSoftmax on any axis as FusedSoftmax, with the scale, the mask and the NaN guard around it.

Before opset 13 Softmax flattens: everything from the axis on is one row. Where that is more than one axis of more than
one element, the tensor is reshaped around the operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import onnx_ir as ir

from ..facts import REFERENCE, Facts, attr, broadcast, op_of
from ..operands import scalar_operand
from ..report import Refused
from ..tape import Tape
from . import TYPES, Match, Options, Replacement
from .guards import nan_guard


@dataclass
class Plan:
    x: ir.Value
    y: ir.Value
    axis: int
    log: bool
    flatten: bool  # everything from `axis` on is one row
    scale: float = 1.0
    mask: ir.Value | None = None
    reference: ir.Attr | None = None  # the axis, where it is an attribute of the function
    negate: bool = False  # a boolean mask that is true where the element has no weight
    nodes: list[ir.Node] = field(default_factory=list)


class SoftmaxRule:
    kind = "softmax"
    op = "FusedSoftmax"

    def pattern(self, node: ir.Node, facts: Facts) -> Match | None:
        return Match(node, [node]) if op_of(node) in ("Softmax", "LogSoftmax") else None

    def check(self, match: Match, facts: Facts, options: Options) -> Plan:
        node = match.centre
        x, y = node.inputs[0], node.outputs[0]
        quantised = next(
            (n for n in (x.producer(), *y.consumers()) if op_of(n) in ("DequantizeLinear", "QuantizeLinear")), None
        )
        if quantised is not None:
            raise Refused("the input or the output is quantised: the node belongs to a quantised graph", quantised)
        axis = attr(node, "axis", -1 if facts.opset >= 13 else 1)
        reference = node.attributes["axis"] if axis is REFERENCE else None
        if reference is not None:
            if facts.opset < 13:
                raise Refused("the axis is an attribute of the function, and what it flattens is not known", node)
            axis = -1  # what an absent one means, for both operators
        dtype = facts.dtype(x)
        if dtype is None:
            raise Refused(f"the element type of {x.name} is not known", node)
        if dtype not in TYPES:
            raise Refused(f"the element type is {dtype.name}, the operator takes float32, float16 and bfloat16", node)
        flatten = False
        rank = facts.rank(x)
        if facts.opset < 13:
            if rank is not None:
                axis %= rank
                flatten = any(d != 1 for d in facts.shape(x)[axis + 1 :])
            elif axis < -1:
                raise Refused("the rank is not known, so the axes that are flattened are not", node)
            else:
                flatten = axis != -1
        if rank == 0:
            raise Refused("the input is a scalar", node)
        plan = Plan(x, y, axis, op_of(node) == "LogSoftmax", flatten, reference=reference, nodes=[node])
        if not flatten:
            self._absorb_before(plan, facts)
        if not plan.log:
            guard = nan_guard(facts, y, facts.readers(y)) if not y.is_graph_output() else None
            if guard is not None:
                plan.nodes += guard
                plan.y = guard[-1].outputs[0]
        return plan

    def _absorb_before(self, plan: Plan, facts: Facts) -> None:
        """Takes in one mask and then one scale, where they are computed for this node alone."""
        node = plan.x.producer()
        shape = facts.shape(plan.x)
        if node is None or shape is None or facts.only_reader(plan.x) is not plan.nodes[0]:
            return
        if op_of(node) == "Add" and node.inputs[0] is not node.inputs[1]:
            for x, mask in (node.inputs, reversed(node.inputs)):
                if (
                    facts.shape(x) == shape
                    and _fits(facts, mask, shape)
                    and facts.dtype(mask) == facts.dtype(x)
                    and _scaled(facts, x)
                ):
                    self._take(plan, node, x)
                    plan.mask = mask
                    break
            else:
                for x, mask in (node.inputs, reversed(node.inputs)):
                    if facts.shape(x) == shape and _fits(facts, mask, shape) and facts.dtype(mask) == facts.dtype(x):
                        self._take(plan, node, x)
                        plan.mask = mask
                        break
        elif op_of(node) == "Where":
            condition, x, y = node.inputs
            for kept, other, negate in ((x, y, False), (y, x, True)):
                if facts.scalar(other) == -math.inf and facts.shape(kept) == shape and _fits(facts, condition, shape):
                    self._take(plan, node, kept)
                    plan.mask, plan.negate = condition, negate
                    break
        scaled = plan.x.producer()
        if scaled is not None and facts.only_reader(plan.x) is plan.nodes[0] and op_of(scaled) in ("Mul", "Div"):
            for x in scaled.inputs:
                factor = scalar_operand(facts, scaled, x)
                if factor is not None:
                    self._take(plan, scaled, x)
                    plan.scale = factor
                    break

    @staticmethod
    def _take(plan: Plan, node: ir.Node, x: ir.Value) -> None:
        plan.nodes.insert(0, node)
        plan.x = x

    def rewrite(self, plan: Plan, tape: Tape, options: Options) -> Replacement:
        x = plan.x
        if plan.flatten:
            x = tape.op("Reshape", [x, tape.ints([0] * plan.axis + [-1])])
        mask = plan.mask
        if mask is not None and plan.negate:
            mask = tape.op("Not", [mask])
        axis = -1 if plan.flatten or tape.facts.rank(x) == plan.axis + 1 else plan.axis
        node = tape.fused("FusedSoftmax", [x, mask], {"axis": axis, "scale": float(plan.scale), "log": int(plan.log)})
        if plan.reference is not None:
            node.attributes.add(ir.RefAttr("axis", plan.reference.ref_attr_name, ir.AttributeType.INT))
        y = node.outputs[0]
        if plan.flatten:
            y = tape.op("Reshape", [y, tape.op("Shape", [plan.x])])
        return Replacement([(plan.y, y)])


def _fits(facts: Facts, mask: ir.Value, shape: tuple) -> bool:
    own = facts.shape(mask)
    return (
        own is not None
        and broadcast(own, shape) == shape
        and all(d == 1 or d == s for d, s in zip(reversed(own), reversed(shape)))
    )


def _scaled(facts: Facts, value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and any(scalar_operand(facts, node, x) is not None for x in node.inputs if x is not None)
