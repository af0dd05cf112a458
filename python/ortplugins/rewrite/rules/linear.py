"""Products with a constant weight, and the bias, residual and activation behind them, as one FusedGemm."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ..facts import Facts, attr, op_of, tensor_of
from ..operands import is_no_op, scalar_operand
from ..report import Refused
from ..symbolic import product
from ..tape import Tape
from . import TYPES, Match, Options, Replacement, activations

_LARGEST_TRANSPOSED = 1 << 29  # bytes: above, the copy would cost more memory than reading it transposed does time
_QUANTISED = frozenset({"DequantizeLinear", "com.microsoft::DequantizeLinear", "com.microsoft::MatMulNBits"})


@dataclass
class Plan:
    a: ir.Value
    b: ir.Value
    y: ir.Value
    alpha: float = 1.0
    beta: float = 1.0
    trans_a: bool = False
    trans_b: bool = False
    bias: ir.Value | None = None
    residual: ir.Value | None = None
    activation: str = "none"
    nodes: list[ir.Node] = field(default_factory=list)


class LinearRule:
    kind = "linear"
    op = "FusedGemm"

    def pattern(self, node: ir.Node, facts: Facts) -> Match | None:
        op = op_of(node)
        if op == "Gemm":
            return Match(node, [node])
        if op != "MatMul":
            return None
        weight = _weight(facts, node.inputs[1])
        if weight is not None or op_of(node.inputs[1].producer()) in _QUANTISED:
            return Match(node, [node])
        return None

    def check(self, match: Match, facts: Facts, options: Options) -> Plan:
        node = match.centre
        a, b = node.inputs[:2]
        for value in (a, b):
            if op_of(value.producer()) in _QUANTISED:
                raise Refused("an operand is dequantised: the product belongs to a quantised graph", value.producer())
        if any(v.is_ref() for v in node.attributes.values()):
            raise Refused("an attribute is an attribute of the function, given at each call", node)
        weight = _weight(facts, b)
        if weight is None:
            raise Refused("the weight is computed in the graph", b.producer() or node)
        dtype = facts.dtype(b)
        if dtype not in TYPES:
            raise Refused(f"the element type is {dtype.name}, the operator takes float32, float16 and bfloat16", node)
        value, transposed = weight
        plan = Plan(a, value, node.outputs[0], trans_b=transposed, nodes=[node])
        if op_of(node) == "Gemm":
            plan.alpha, plan.beta = float(attr(node, "alpha", 1.0)), float(attr(node, "beta", 1.0))
            plan.trans_a = bool(attr(node, "transA", 0))
            plan.trans_b ^= bool(attr(node, "transB", 0))
            if len(node.inputs) > 2 and node.inputs[2] is not None:
                plan.bias = node.inputs[2]
            self._drop_reshapes(plan, facts)
        else:
            rank = facts.rank(a)
            if rank is None:
                raise Refused(f"the rank of {a.name} is not known", node)
            if rank < 2:
                raise Refused("the left operand is a vector", node)
        self._extend(plan, facts)
        return plan

    def _drop_reshapes(self, plan: Plan, facts: Facts) -> None:
        """Gemm takes matrices only, so exporters reshape around it; the operator takes the batch as it is."""
        before, after = plan.a.producer(), facts.only_reader(plan.y)
        if (
            plan.trans_a
            or op_of(before) not in ("Reshape", "Flatten")
            or op_of(after) != "Reshape"
            or after.inputs[0] is not plan.y
        ):
            return
        x = before.inputs[0]
        xs, ys = facts.shape(x), facts.shape(after.outputs[0])
        rows = facts.shape(plan.a)
        n = facts.shape(plan.b)[0 if plan.trans_b else 1]
        bias = facts.shape(plan.bias) if plan.bias is not None else ()
        if xs is None or ys is None or rows is None or len(xs) < 2 or bias is None:
            return
        if len(xs) != len(ys) or xs[:-1] != ys[:-1] or ys[-1] != n or xs[-1] != rows[1] or product(xs[:-1]) != rows[0]:
            return
        if len(bias) == 2 and bias[0] != 1:
            return
        plan.a, plan.y = x, after.outputs[0]
        plan.nodes.append(after)
        if facts.only_reader(before.outputs[0]) is plan.nodes[0]:
            plan.nodes.insert(0, before)

    def _extend(self, plan: Plan, facts: Facts) -> None:
        """Takes in what follows, in the order in which the operator computes: factor, bias, residual, activation."""
        while True:
            node = facts.only_reader(plan.y)
            shape = facts.shape(plan.y)
            if plan.activation == "none" and shape is not None and facts.dtype(plan.b) in TYPES:
                found = activations.find(facts, plan.y)
                if found is not None:
                    plan.activation, plan.y = found.name, found.value
                    plan.nodes += found.nodes
                    return
            if node is None or shape is None or node.graph is not plan.y.graph:
                return
            op = op_of(node)
            if is_no_op(facts, node):
                plan.y = node.outputs[0]
                plan.nodes.append(node)
                continue
            if op == "Add" and node.inputs[0] is not node.inputs[1] and facts.shape(node.outputs[0]) == shape:
                other = node.inputs[1] if node.inputs[0] is plan.y else node.inputs[0]
                if plan.bias is None and plan.residual is None and self._is_bias(facts, other, shape):
                    plan.bias = other
                elif (
                    plan.residual is None
                    and facts.shape(other) == shape
                    and tensor_of(other) is None
                    and facts.dtype(other) == facts.dtype(plan.b)
                ):
                    plan.residual = other
                else:
                    return
            elif op in ("Mul", "Div") and plan.residual is None:
                factor = scalar_operand(facts, node, plan.y)
                if factor is None:
                    return
                plan.alpha *= factor
                plan.beta *= factor if plan.bias is not None else 1.0
            else:
                return
            plan.y = node.outputs[0]
            plan.nodes.append(node)

    @staticmethod
    def _is_bias(facts: Facts, value: ir.Value, shape: tuple) -> bool:
        """A constant row that is added to every row."""
        own = facts.shape(value)
        return (
            tensor_of(value) is not None
            and len(own) >= 1
            and own[-1] in (1, shape[-1])
            and all(d == 1 for d in own[:-1])
            and len(own) <= len(shape)
        )

    def rewrite(self, plan: Plan, tape: Tape, options: Options) -> Replacement:
        b, trans_b = plan.b, plan.trans_b
        own = all(n in plan.nodes or op_of(n) == "Transpose" for n in b.consumers())
        if trans_b and own and tensor_of(b).nbytes <= _LARGEST_TRANSPOSED and b.is_initializer():
            b, trans_b = tape.transposed(b), False
        bias = plan.bias
        if bias is not None and tape.facts.rank(bias) > 2:
            bias = tape.folded(bias, lambda t: t.reshape(-1))
        node = tape.fused(
            "FusedGemm",
            [plan.a, b, bias, plan.residual],
            {
                "alpha": plan.alpha,
                "beta": plan.beta,
                "transA": int(plan.trans_a),
                "transB": int(trans_b),
                "activation": plan.activation,
                "precision": options.precision.get(self.op, "ieee"),
            },
        )
        return Replacement([(plan.y, node.outputs[0])])


def _weight(facts: Facts, value: ir.Value | None) -> tuple[ir.Value, bool] | None:
    """The constant matrix behind an operand, and whether the operand is its transpose."""
    transposed = False
    while value is not None:
        tensor = tensor_of(value)
        if tensor is not None:
            return (value, transposed) if len(tensor.shape) == 2 else None
        node = value.producer()
        if op_of(node) == "Transpose" and facts.rank(value) == 2:
            perm = attr(node, "perm")
            if perm is None or list(perm) == [1, 0]:
                transposed = not transposed
        elif node is None or not is_no_op(facts, node):
            return None
        value = node.inputs[0]
    return None
