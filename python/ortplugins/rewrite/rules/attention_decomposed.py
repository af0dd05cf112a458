"""Attention written as two products and a Softmax, followed as factors of axes.

The scores are followed from the first product to the second, so that a scale, a mask and a head axis are known by what
they do to the numbers: a scale is a factor that is the same for every score, a mask is a term or a choice that
broadcasts to the scores, a head is an axis that both products treat as a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ..facts import REFERENCE, Facts, at_most, attr, op_of, tensor_of
from ..layout import Arrangement, Factor, flat, resolve, same, sizes
from ..operands import Level, is_no_op, scalar_operand, step_forward
from ..report import Refused
from ..symbolic import Size
from ..tape import flat_solid
from . import TYPES
from .attention_problem import Problem, show, size_of
from .guards import nan_guard
from .masks import Term

# Which inputs of an op may carry the scores from the first product to Softmax.
_CARRIERS: dict[str, tuple[int, ...]] = {
    "Add": (0, 1),
    "Sub": (0,),
    "Mul": (0, 1),
    "Div": (0,),
    "Where": (1, 2),
    "Reshape": (0,),
    "Unsqueeze": (0,),
    "Squeeze": (0,),
    "Transpose": (0,),
    "Cast": (0,),
    "Identity": (0,),
    "Dropout": (0,),
    "Tanh": (0,),
    "Slice": (0,),
    "Expand": (0,),
    "Max": (0, 1),
    "Min": (0, 1),
    "Clip": (0,),
    "QuantizeLinear": (0,),
    "DequantizeLinear": (0,),
}
_PATH_LIMIT = 20
_PATHS = 6


def contraction(facts: Facts, node: ir.Node) -> tuple[str, str, str] | None:
    """Axis letters of a product of two tensors: of a, of b, of the result. None if the node is not one."""
    op = op_of(node)
    if op == "MatMul":
        ra, rb = facts.rank(node.inputs[0]), facts.rank(node.inputs[1])
        if ra is None or rb is None or ra < 2 or rb < 2:
            return None
        batch = "abcdefgh"[: max(ra, rb) - 2]
        return batch[len(batch) - ra + 2 :] + "mk", batch[len(batch) - rb + 2 :] + "kn", batch + "mn"
    if op == "Einsum" and len(node.inputs) == 2:
        equation = attr(node, "equation")
        if equation is REFERENCE or "." in equation or "->" not in equation:
            return None
        left, _, out = equation.replace(" ", "").partition("->")
        a, b = left.split(",")
        if any(len(set(t)) != len(t) for t in (a, b, out)) or not set(out) <= set(a) | set(b):
            return None
        return a, b, out
    return None


def _is_product(node: ir.Node | None) -> bool:
    """A product of two tensors, neither of which is a plain weight."""
    if op_of(node) not in ("MatMul", "Einsum") or len(node.inputs) != 2:
        return False
    for v in node.inputs:
        tensor = tensor_of(v)
        if tensor is not None and len(tensor.shape) <= 2:
            return False
    return True


def paths_back(value: ir.Value) -> list[list[tuple[ir.Node, int]]]:
    """Ways back to a product, nearest first: lists of (node, index of the input that carries the scores)."""
    found: list[list[tuple[ir.Node, int]]] = []
    pending: list[tuple[ir.Value, list[tuple[ir.Node, int]]]] = [(value, [])]
    while pending and len(found) < _PATHS:
        v, path = pending.pop(0)
        node = v.producer()
        if node is None or len(path) > _PATH_LIMIT:
            continue
        if _is_product(node):
            found.append([*path, (node, -1)])
            continue
        for i in _CARRIERS.get(op_of(node), ()):
            if i < len(node.inputs) and node.inputs[i] is not None and len(pending) < 32:
                pending.append((node.inputs[i], [*path, (node, i)]))
    return found


def product_after(value: ir.Value) -> ir.Node | None:
    """The nearest product that probabilities go into."""
    pending = [(value, 0)]
    seen: set[ir.Node] = set()
    while pending:
        v, depth = pending.pop(0)
        for node in v.consumers():
            if node in seen or depth > 8:
                continue
            seen.add(node)
            if _is_product(node):
                return node
            if op_of(node) in _CARRIERS:
                pending.append((node.outputs[0], depth + 1))
    return None


@dataclass
class _Scores:
    """The first product: one factor for each letter of the contraction, and what its operands and result are made of."""

    product: ir.Node
    a: str
    b: str
    out: str
    factors: dict[str, Factor]
    operands: list[Arrangement]
    arrangement: Arrangement

    @property
    def contracted(self) -> str:
        (letter,) = (set(self.a) & set(self.b)) - set(self.out)
        return letter


@dataclass
class _Values:
    """The second product: its values, and what they and its result are made of."""

    product: ir.Node
    value: ir.Value
    dim: Factor
    arrangement: Arrangement
    out: Arrangement


def decomposed(facts: Facts, path: Sequence[tuple[ir.Node, int]], softmax: ir.Node) -> Problem:
    """The attention around a Softmax: what comes to it along `path`, and what is done with its probabilities."""
    scores = _first_product(facts, path[-1][0])
    steps = _Steps(facts, scores.arrangement)
    nodes, sk = _to_softmax(facts, path, softmax, steps)
    value, arrangement, more = _probabilities(facts, softmax, resolve(steps.arrangement), steps.terms)
    values = _second_product(facts, softmax, value, arrangement, sk)
    nodes += [*more, values.product]
    return _problem(facts, softmax, scores, steps, values, arrangement, sk, nodes)


def _first_product(facts: Facts, qk: ir.Node) -> _Scores:
    letters = contraction(facts, qk)
    if letters is None:
        raise Refused("the ranks of the operands of the product are not known", qk)
    _not_quantised(qk)
    a, b, out = letters
    if len((set(a) & set(b)) - set(out)) != 1:
        raise Refused("the product does not contract exactly one axis", qk)
    # An operand whose axis is of size 1 where the other's is not is repeated along it.
    shapes = [facts.shape(v) for v in qk.inputs]
    size: dict[str, Size] = {}
    for axes, shape in zip((a, b), shapes):
        for c, s in zip(axes, shape):
            if size.get(c, 1) == 1:
                size[c] = s
            elif s != 1 and s != size[c]:
                raise Refused(f"axes of size {size[c]} and {s} of the two operands are not known to be equal", qk)
    factors = {c: Factor(c, s) for c, s in size.items()}
    operands = [
        [[factors[c]] if s == size[c] else [] for c, s in zip(axes, shape)] for axes, shape in zip((a, b), shapes)
    ]
    return _Scores(qk, a, b, out, factors, operands, [[factors[c]] for c in out])


def _to_softmax(
    facts: Facts, path: Sequence[tuple[ir.Node, int]], softmax: ir.Node, steps: _Steps
) -> tuple[list[ir.Node], Factor]:
    """Takes the steps from the first product to Softmax: the nodes, and the factor that Softmax runs along."""
    qk = path[-1][0]
    value = qk.outputs[0]
    nodes: list[ir.Node] = [qk]
    for node, index in reversed(path[:-1]):
        _require_private(facts, value, [node])
        steps.apply(node, node.inputs[index])
        nodes.append(node)
        value = node.outputs[0]
    _require_private(facts, value, [softmax])
    nodes.append(softmax)
    axis = attr(softmax, "axis", -1 if facts.opset >= 13 else 1)
    rank = len(steps.arrangement)
    if axis is REFERENCE:
        raise Refused("the axis of Softmax is an attribute of the function", softmax)
    axis %= rank
    if facts.opset < 13 and axis != rank - 1:
        raise Refused("Softmax before opset 13 normalises over several axes together", softmax)
    arrangement = resolve(steps.arrangement)
    normalised = flat_solid([arrangement[axis]]) or arrangement[axis]
    if len(normalised) != 1:
        raise Refused("Softmax does not run along one axis of the product", softmax)
    sk = normalised[0]
    steps.finish(softmax)
    for node, shape, axis in steps.unproven:
        # Along the keys the second product, which has as many values as there are keys, shows that nothing grew.
        if flat_solid(resolve([axis])) != [sk]:
            raise Refused(
                f"the mask {show(shape)} is not known to broadcast to the scores {show(sizes(arrangement))}", node
            )
    return nodes, sk


def _second_product(
    facts: Facts, softmax: ir.Node, probabilities: ir.Value, arrangement: Arrangement, sk: Factor
) -> _Values:
    pv = facts.only_reader(probabilities)
    if pv is None:
        raise Refused("the probabilities are used by other nodes than the second product", softmax)
    if not _is_product(pv):
        raise Refused(f"{op_of(pv)} between Softmax and the second product is not understood", pv)
    _not_quantised(pv)
    letters = contraction(facts, pv)
    if letters is None:
        raise Refused("the ranks of the operands of the product are not known", pv)
    if pv.inputs[0] is pv.inputs[1]:
        raise Refused("the second product multiplies the probabilities with themselves", pv)
    p_at = 0 if pv.inputs[0] is probabilities else 1
    p_letters, v_letters, y_letters = letters[p_at], letters[1 - p_at], letters[2]
    value = pv.inputs[1 - p_at]
    shape = facts.shape(value)
    of: dict[str, list[Factor]] = dict(zip(p_letters, arrangement))
    own = [c for c in v_letters if c not in p_letters]
    if len(own) != 1:
        raise Refused("the second product does not have one axis of its own for the values", pv)
    dim = Factor("v", shape[v_letters.index(own[0])])
    of[own[0]] = [dim]
    contracted = (set(p_letters) & set(v_letters)) - set(y_letters)
    if (
        len(contracted) != 1
        or flat_solid([of[next(iter(contracted))]]) not in ([sk], [])
        or sk not in of[next(iter(contracted))]
    ):
        raise Refused("the second product does not sum over the axis that Softmax normalises", pv)
    v_arrangement: Arrangement = []
    for c, s in zip(v_letters, shape):
        want = size_of(of[c])
        if s == want:
            v_arrangement.append(of[c])
        elif s == 1:
            v_arrangement.append([])
        else:
            raise Refused(f"axes of size {want} and {s} of the two operands are not known to be equal", pv)
    if any(c not in v_letters and c not in y_letters for c in p_letters):
        raise Refused("the second product sums over an axis that only the probabilities have", pv)
    return _Values(pv, value, dim, v_arrangement, [of[c] for c in y_letters])


def _problem(
    facts: Facts,
    softmax: ir.Node,
    scores: _Scores,
    steps: _Steps,
    values: _Values,
    arrangement: Arrangement,
    sk: Factor,
    nodes: list[ir.Node],
) -> Problem:
    """Says which operand of the first product holds the keys, and which of its letters are batch and heads."""
    qk, factors, operands = scores.product, scores.factors, (scores.a, scores.b)
    sk_letter = next((c for c, f in factors.items() if sk in f.leaves()), None)
    only_a = [c for c in scores.out if c in scores.a and c not in scores.b]
    only_b = [c for c in scores.out if c in scores.b and c not in scores.a]
    k_at = 0 if sk_letter in only_a else 1 if sk_letter in only_b else None
    if k_at is None or factors[sk_letter].leaves() != [sk]:
        raise Refused("Softmax runs along an axis that both operands of the first product have", softmax)
    q_at = 1 - k_at
    mine, other = (only_a, only_b) if k_at == 0 else (only_b, only_a)
    # Batch axes that the other operand lacks: the keys are shared by several query heads.
    extra = [c for c in other if c not in operands[q_at][-2:]] if op_of(qk) == "MatMul" else []
    rows = [c for c in other if c not in extra]
    if len(mine) != 1 or len(rows) != 1:
        raise Refused("the first product does not have one query axis and one key axis", qk)
    shared = [c for c in scores.out if c not in (sk_letter, rows[0])]
    order = _shared_order(arrangement, factors, shared)
    problem = Problem(
        q=Level(qk.inputs[q_at], scores.operands[q_at]),
        k=Level(qk.inputs[k_at], scores.operands[k_at]),
        v=Level(values.value, values.arrangement),
        out=Level(values.product.outputs[0], values.out),
        batch=[factors[c] for c in order[:-1]],
        heads=[factors[c] for c in order[-1:]],
        sq=factors[rows[0]],
        sk=sk,
        d=factors[scores.contracted],
        dv=values.dim,
        scale=steps.scale,
        softcap=steps.softcap,
        terms=steps.terms,
        q_factors=steps.q_factors,
        nodes=nodes,
    )
    while len(problem.batch) > 0 and problem.heads and not _in_any(problem.heads[0], scores.operands[k_at]):
        problem.heads.insert(0, problem.batch.pop())
    if problem.q_factors:
        _move_factors_to_q(facts, problem, qk, scores.out)
    return problem


def _shared_order(arrangement: Arrangement, factors: dict[str, Factor], shared: list[str]) -> list[str]:
    """The batch letters in the order in which the probabilities have them: the head axis is the innermost."""
    leaves = flat(arrangement)
    position = {
        c: min((leaves.index(leaf) for leaf in factors[c].leaves() if leaf in leaves), default=-1) for c in shared
    }
    return sorted(shared, key=lambda c: position[c])


def _not_quantised(node: ir.Node) -> None:
    for value in node.inputs:
        if op_of(value.producer()) == "DequantizeLinear":
            raise Refused("an operand is dequantised: the product belongs to a quantised graph", value.producer())


def _in_any(factor: Factor, arrangement: Arrangement) -> bool:
    return any(f is factor for axis in arrangement for f in axis)


def _require_private(facts: Facts, value: ir.Value, allowed: Sequence[ir.Node]) -> None:
    if value.is_graph_output():
        raise Refused(f"{value.name} is an output of the graph", value.producer())
    for node in facts.readers(value):
        if node not in allowed:
            raise Refused(f"{value.name} is also used by {node.name or op_of(node)}", node)


class _Steps:
    """The scores on their way to Softmax: arrangement, scale, soft cap and masks so far."""

    def __init__(self, facts: Facts, arrangement: Arrangement) -> None:
        self.facts = facts
        self.arrangement = arrangement
        self.scale = 1.0
        self.softcap = 0.0
        self.terms: list[Term] = []
        self.q_factors: list[Term] = []
        self.unproven: list[tuple[ir.Node, Sequence[Size], list[Factor]]] = []  # broadcasts that may enlarge an axis
        self._capped: ir.Node | None = None  # a Tanh whose factor has not come yet

    def apply(self, node: ir.Node, value: ir.Value) -> None:
        op = op_of(node)
        if op in ("Mul", "Div"):
            self._multiply(node, value)
        elif self._capped is not None:
            raise Refused("Tanh on the scores is not followed by its factor", self._capped)
        elif op in ("Add", "Sub"):
            other = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
            self._require_same_shape(node, value)
            if other is value:
                raise Refused("the scores are added to themselves", node)
            self.terms.append(Term(other, resolve(self.arrangement), node, -1.0 if op == "Sub" else 1.0))
        elif op == "Where":
            self._choose(node, value)
        elif op == "Tanh":
            if self.terms or self.softcap or self.q_factors:
                raise Refused("Tanh comes after a mask", node)
            self._capped = node
        elif op in ("Cast", "CastLike") and not is_no_op(self.facts, node):
            if (
                self.facts.dtype(node.outputs[0]) != ir.DataType.FLOAT
                and self.facts.dtype(node.outputs[0]) not in TYPES
            ):
                raise Refused(f"the scores are cast to {self.facts.dtype(node.outputs[0])}", node)
        else:
            after = step_forward(self.facts, node, resolve(self.arrangement))
            if after is None:
                raise Refused(f"{op} on the scores is not understood", node)
            self.arrangement = after

    def finish(self, softmax: ir.Node) -> None:
        if self._capped is not None:
            raise Refused("Tanh on the scores is not followed by its factor", self._capped)
        for term in self.terms:
            term.arrangement = resolve(term.arrangement)

    def _require_same_shape(self, node: ir.Node, value: ir.Value) -> None:
        """The other operand must not make the scores larger."""
        shape = self.facts.shape(_other(node, value))
        arrangement = resolve(self.arrangement)
        if shape is None or len(shape) > len(arrangement):
            raise Refused(
                f"the mask {show(shape)} is not known to broadcast to the scores {show(sizes(arrangement))}", node
            )
        for size, axis in zip(shape, arrangement[len(arrangement) - len(shape) :]):
            if size != 1 and not at_most(size, size_of(axis)):
                self.unproven.append((node, shape, axis))

    def _multiply(self, node: ir.Node, value: ir.Value) -> None:
        factor = scalar_operand(self.facts, node, value)
        if self._capped is not None:
            # softcap * tanh(score / softcap): both factors must be the same number.
            if factor is None or factor <= 0:
                raise Refused("Tanh on the scores is not followed by a positive number", node)
            self.softcap = factor
            self.scale *= factor
            self._capped = None
            return
        if factor is None:
            other = _other(node, value)
            if op_of(node) != "Mul" or other is value or self.terms or self.softcap:
                raise Refused("the scores are multiplied by something that is not one number", node)
            self._require_same_shape(node, value)
            self.q_factors.append(Term(other, resolve(self.arrangement), node))
            return
        if (
            self.softcap
            or any(t.fill is not None and not math.isinf(t.fill) for t in self.terms)
            or (self.terms and factor <= 0)
        ):
            raise Refused("the scores are multiplied after the mask or the soft cap", node)
        self.scale *= factor
        for term in self.terms:
            term.factor *= factor

    def _choose(self, node: ir.Node, value: ir.Value) -> None:
        self._require_same_shape(node, value)
        condition, x, y = node.inputs
        kept = x is value
        fill = self.facts.scalar(y if kept else x)
        if fill is None or x is y:
            raise Refused("the scores are replaced by something that is not one number", node)
        if fill > -1e30:
            # exp of it is zero beside an ordinary score, but a row where everything is replaced has equal weights in
            # this graph, and no additive mask gives them.
            raise Refused(f"masked scores become {fill:g}, and a fully masked row with that fill cannot be kept", node)
        if self.facts.dtype(value) == ir.DataType.FLOAT16 and not math.isinf(fill):
            raise Refused("masked float16 scores become a finite number", node)
        self.terms.append(Term(condition, resolve(self.arrangement), node, fill=fill, keep=kept))


def _other(node: ir.Node, value: ir.Value) -> ir.Value:
    if op_of(node) == "Where":
        return node.inputs[0]
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def _probabilities(
    facts: Facts, softmax: ir.Node, arrangement: Arrangement, terms: Sequence[Term]
) -> tuple[ir.Value, Arrangement, list[ir.Node]]:
    """Follows the probabilities through guards, casts and reshapes to the second product."""
    value = softmax.outputs[0]
    nodes: list[ir.Node] = []
    while True:
        if value.is_graph_output():
            raise Refused("the probabilities are an output of the graph", value.producer())
        users = facts.readers(value)
        guard = nan_guard(facts, value, users)
        if guard is not None:
            nodes += guard
            value = guard[-1].outputs[0]
            continue
        if len(users) != 1:
            raise Refused("the probabilities are used by other nodes than the second product", value.producer())
        node = users[0]
        if _is_product(node):
            return value, resolve(arrangement), nodes
        if op_of(node) in ("Cast", "CastLike") and facts.dtype(node.outputs[0]) in TYPES:
            after: Arrangement | None = arrangement
        elif _masked_row_guard(facts, value, node, terms):
            after = arrangement
        elif node.inputs[0] is value:
            after = step_forward(facts, node, resolve(arrangement))
        else:
            after = None
        if after is None:
            raise Refused(f"{op_of(node)} between Softmax and the second product is not understood", node)
        arrangement = after
        nodes.append(node)
        value = node.outputs[0]


def _masked_row_guard(facts: Facts, value: ir.Value, node: ir.Node, terms: Sequence[Term]) -> bool:
    """Where that gives zeros to rows whose added mask has no element above -inf: what the operator does anyway."""
    if op_of(node) != "Where" or node.inputs[2] is not value or facts.scalar(node.inputs[1]) != 0.0:
        return False
    test = node.inputs[0].producer()
    if op_of(test) != "Equal":
        return False
    for most, lowest in (test.inputs, reversed(test.inputs)):
        largest = most.producer()
        if facts.scalar(lowest) != -math.inf or op_of(largest) != "ReduceMax" or attr(largest, "keepdims", 1) != 1:
            continue
        axes = (
            attr(largest, "axes")
            if "axes" in largest.attributes
            else facts.ints(largest.inputs[1])
            if len(largest.inputs) > 1
            else None
        )
        rank = facts.rank(largest.inputs[0])
        if axes is None or rank is None or [int(a) % rank for a in axes] != [rank - 1]:
            continue
        return any(t.fill is None and t.factor == 1.0 and t.value is largest.inputs[0] for t in terms)
    return False


def _move_factors_to_q(facts: Facts, problem: Problem, qk: ir.Node, out_letters: str) -> None:
    """Factors that differ by head or query go onto q: they must not depend on the key."""
    if op_of(qk) != "MatMul" or problem.q.value is not qk.inputs[0]:
        raise Refused("the scores are multiplied by something that is not one number", problem.q_factors[0].node)
    rank = facts.rank(problem.q.value)
    for term in problem.q_factors:
        shape = facts.shape(term.value)
        direct = same(term.arrangement, [[f] for f in _letters_factors(problem, out_letters, qk, facts)])
        if shape is None or not direct or (len(shape) > 0 and shape[-1] != 1) or len(shape) > rank:
            raise Refused("the scores are multiplied by something that varies with the key", term.node)


def _letters_factors(problem: Problem, out_letters: str, qk: ir.Node, facts: Facts) -> list[Factor]:
    return [*problem.batch, *problem.heads, problem.sq, problem.sk]
