"""softmax(scale * q k^T + mask) v, however an exporter wrote it, as one FusedAttention.

The centre is a Softmax between two products of computed tensors, or a standard Attention node. The scores are followed
from the first product to the second as factors of axes (layout.py), so that a scale, a mask and a head axis are known by
what they do to the numbers: a scale is a factor that is the same for every score, a mask is a term or a choice that
broadcasts to the scores, a head is an axis that both products treat as a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..facts import REFERENCE, Facts, at_most, attr, op_of, tensor_of
from ..layout import Arrangement, Factor, flat, resolve, same, sizes
from ..operands import Level, downstream, is_no_op, scalar_operand, step_forward, upstream
from ..report import Refused
from ..symbolic import Size, exact_div
from ..tape import Tape, flat_solid
from . import Match, Options, Replacement, masks
from .masks import Term

_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

# Which inputs of an op may carry the scores from the first product to Softmax.
_CARRIERS: dict[str, tuple[int, ...]] = {
    "Add": (0, 1), "Sub": (0,), "Mul": (0, 1), "Div": (0,), "Where": (1, 2), "Reshape": (0,), "Unsqueeze": (0,), "Squeeze": (0,),
    "Transpose": (0,), "Cast": (0,), "Identity": (0,), "Dropout": (0,), "Tanh": (0,), "Slice": (0,), "Expand": (0,),
    "Max": (0, 1), "Min": (0, 1), "Clip": (0,), "QuantizeLinear": (0,), "DequantizeLinear": (0,),
}
_PATH_LIMIT = 20
_PATHS = 6


@dataclass
class Problem:
    """Everything about one attention, before layouts are chosen."""

    q: Level
    k: Level
    v: Level
    out: Level
    batch: list[Factor]
    heads: list[Factor]
    sq: Factor
    sk: Factor
    d: Factor
    dv: Factor
    scale: float
    softcap: float = 0.0
    terms: list[Term] = field(default_factory=list)
    q_factors: list[Term] = field(default_factory=list)
    nodes: list[ir.Node] = field(default_factory=list)
    dtype: ir.DataType = ir.DataType.FLOAT
    is_causal: bool = False
    window: int = -1
    window_right: int = -1
    past_k: ir.Value | None = None
    past_v: ir.Value | None = None
    present_k: ir.Value | None = None  # what the graph has for past and new keys together, where it is used elsewhere
    present_v: ir.Value | None = None
    total_lengths: ir.Value | None = None
    own: Factor | None = None  # the sequence of k and v themselves; sk is the cache's as well

    @property
    def kv(self) -> Factor:
        return self.own or self.sk


@dataclass
class Plan:
    """A problem with its layout chosen."""

    problem: Problem
    layout: str  # "BSNH" or "BNSH"
    rank: int
    q: Level
    k: Level
    v: Level
    out: Level
    heads_q: list[Factor]
    heads_kv: list[Factor]
    nodes: list[ir.Node]
    masks: masks.Masks

    @property
    def scale(self) -> float:
        return self.problem.scale * self.q.scale * self.k.scale


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


def _paths(value: ir.Value) -> list[list[tuple[ir.Node, int]]]:
    """Ways from a value back to a product: lists of (node, index of the input that carries the scores), nearest first."""
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


def _product_after(value: ir.Value) -> ir.Node | None:
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


class AttentionRule:
    kind = "attention"
    op = "FusedAttention"

    def pattern(self, node: ir.Node, facts: Facts) -> Match | None:
        if op_of(node) in _WHOLE:
            return Match(node, [node])
        if op_of(node) != "Softmax":
            return None
        after = _product_after(node.outputs[0])
        if after is None:
            return None
        paths = _paths(node.inputs[0])
        if not paths:
            return None
        return Match(node, [*(n for n, _ in reversed(paths[0])), node, after], paths)

    def check(self, match: Match, facts: Facts, options: Options) -> Plan:
        whole = _WHOLE.get(op_of(match.centre))
        if whole is not None:
            return _choose_layout(facts, whole(facts, match.centre))
        first: Refused | None = None
        for path in match.found:
            try:
                return _choose_layout(facts, _decomposed(facts, path, match.centre))
            except Refused as refusal:
                first = first or refusal
        assert first is not None
        raise first

    def rewrite(self, plan: Plan, tape: Tape, options: Options) -> Replacement:
        problem = plan.problem
        target = _forms(problem, plan.heads_q, problem.sq, problem.d)[plan.layout, plan.rank]
        target_k = _forms(problem, plan.heads_kv, problem.kv, problem.d)[plan.layout, plan.rank]
        target_v = _forms(problem, plan.heads_kv, problem.kv, problem.dv)[plan.layout, plan.rank]
        target_y = _forms(problem, plan.heads_q, problem.sq, problem.dv)[plan.layout, plan.rank]
        q = plan.q.read(tape)
        for factor in problem.q_factors:
            q = tape.op("Mul", [q, factor.value])
        mask = masks.emit(plan.masks, _canonical(problem), problem.dtype, tape)
        heads, kv_heads = (int(_count(h)) if plan.rank == 3 else 0 for h in (plan.heads_q, plan.heads_kv))
        inputs = [
            tape.arrange(q, plan.q.arrangement, target),
            tape.arrange(plan.k.read(tape), plan.k.arrangement, target_k),
            tape.arrange(plan.v.read(tape), plan.v.arrangement, target_v),
            mask,
            problem.past_k,
            problem.past_v,
            problem.total_lengths,
        ]
        presents = problem.present_k is not None or problem.present_v is not None
        node = tape.fused("FusedAttention", inputs, {
            "layout": plan.layout,
            "num_heads": heads,
            "kv_num_heads": 0 if kv_heads == heads else kv_heads,
            "scale": float(plan.scale),
            "is_causal": int(plan.masks.is_causal),
            "softcap": float(problem.softcap),
            "window": plan.masks.window,
            "window_right": plan.masks.window_right,
            "precision": options.precision.get(self.op, "ieee"),
        }, outputs=3 if presents else 1)
        y = tape.arrange(node.outputs[0], target_y, plan.out.arrangement)
        olds = (problem.present_k, problem.present_v) if presents else ()
        return Replacement([(plan.out.value, y), *((old, new) for old, new in zip(olds, node.outputs[1:]) if old is not None)])


# -- what the graph computes


def _decomposed(facts: Facts, path: Sequence[tuple[ir.Node, int]], softmax: ir.Node) -> Problem:
    qk = path[-1][0]
    letters = contraction(facts, qk)
    if letters is None:
        raise Refused("the ranks of the operands of the product are not known", qk)
    _not_quantised(qk)
    a_letters, b_letters, out_letters = letters
    contracted = (set(a_letters) & set(b_letters)) - set(out_letters)
    if len(contracted) != 1:
        raise Refused("the product does not contract exactly one axis", qk)

    # One factor for each letter. An operand whose axis is of size 1 where the other's is not is repeated along it.
    factors: dict[str, Factor] = {}
    arrangements: list[Arrangement] = []
    shapes = [facts.shape(v) for v in qk.inputs]
    size: dict[str, Size] = {}
    for text, shape in zip((a_letters, b_letters), shapes):
        for c, s in zip(text, shape):
            if size.get(c, 1) == 1:
                size[c] = s
            elif s != 1 and s != size[c]:
                raise Refused(f"axes of size {size[c]} and {s} of the two operands are not known to be equal", qk)
    for c, s in size.items():
        factors[c] = Factor(c, s)
    for text, shape in zip((a_letters, b_letters), shapes):
        arrangements.append([[factors[c]] if s == size[c] else [] for c, s in zip(text, shape)])
    scores: Arrangement = [[factors[c]] for c in out_letters]

    # Forward from the product to Softmax.
    steps = _Steps(facts, scores)
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
            raise Refused(f"the mask {_text(shape)} is not known to broadcast to the scores {_text(sizes(arrangement))}", node)

    # From Softmax to the second product.
    value, arrangement, more = _probabilities(facts, softmax, arrangement, steps.terms)
    nodes += more
    pv = facts.only_reader(value)
    if pv is None:
        raise Refused("the probabilities are used by other nodes than the second product", softmax)
    if not _is_product(pv):
        raise Refused(f"{op_of(pv)} between Softmax and the second product is not understood", pv)
    nodes.append(pv)
    _not_quantised(pv)
    letters = contraction(facts, pv)
    if letters is None:
        raise Refused("the ranks of the operands of the product are not known", pv)
    p_at = 0 if pv.inputs[0] is value else 1
    if pv.inputs[0] is pv.inputs[1]:
        raise Refused("the second product multiplies the probabilities with themselves", pv)
    p_letters, v_letters, y_letters = letters[p_at], letters[1 - p_at], letters[2]
    v_value = pv.inputs[1 - p_at]
    v_shape = facts.shape(v_value)
    of: dict[str, list[Factor]] = dict(zip(p_letters, arrangement))
    own = [c for c in v_letters if c not in p_letters]
    if len(own) != 1:
        raise Refused("the second product does not have one axis of its own for the values", pv)
    dv = Factor("v", v_shape[v_letters.index(own[0])])
    of[own[0]] = [dv]
    contracted = (set(p_letters) & set(v_letters)) - set(y_letters)
    if len(contracted) != 1 or flat_solid([of[next(iter(contracted))]]) not in ([sk], []) or sk not in of[next(iter(contracted))]:
        raise Refused("the second product does not sum over the axis that Softmax normalises", pv)
    v_arrangement: Arrangement = []
    for c, s in zip(v_letters, v_shape):
        want = _size(of[c])
        if s == want:
            v_arrangement.append(of[c])
        elif s == 1:
            v_arrangement.append([])
        else:
            raise Refused(f"axes of size {want} and {s} of the two operands are not known to be equal", pv)
    missing = [c for c in p_letters if c not in v_letters and c not in y_letters]
    if missing:
        raise Refused("the second product sums over an axis that only the probabilities have", pv)
    out_arrangement = [of[c] for c in y_letters]

    # Which letter of the first product is what.
    sk_letter = next((c for c, f in factors.items() if sk in f.leaves()), None)
    only_a = [c for c in out_letters if c in a_letters and c not in b_letters]
    only_b = [c for c in out_letters if c in b_letters and c not in a_letters]
    k_at = 0 if sk_letter in only_a else 1 if sk_letter in only_b else None
    if k_at is None or factors[sk_letter].leaves() != [sk]:
        raise Refused("Softmax runs along an axis that both operands of the first product have", softmax)
    mine, other = (only_a, only_b) if k_at == 0 else (only_b, only_a)
    # Batch axes that the other operand lacks: the keys are shared by several query heads.
    extra = [c for c in other if c not in (a_letters, b_letters)[1 - k_at][-2:]] if op_of(qk) == "MatMul" else []
    rows = [c for c in other if c not in extra]
    if len(mine) != 1 or len(rows) != 1:
        raise Refused("the first product does not have one query axis and one key axis", qk)
    shared = [c for c in out_letters if c not in (sk_letter, rows[0])]
    (d_letter,) = (set(a_letters) & set(b_letters)) - set(out_letters)
    q_at = 1 - k_at
    order = _shared_order(arrangement, factors, shared)
    problem = Problem(
        q=Level(qk.inputs[q_at], arrangements[q_at]),
        k=Level(qk.inputs[k_at], arrangements[k_at]),
        v=Level(v_value, v_arrangement),
        out=Level(pv.outputs[0], out_arrangement),
        batch=[factors[c] for c in order[:-1]],
        heads=[factors[c] for c in order[-1:]],
        sq=factors[rows[0]], sk=sk, d=factors[d_letter], dv=dv,
        scale=steps.scale, softcap=steps.softcap, terms=steps.terms, q_factors=steps.q_factors,
        nodes=nodes,
    )
    while len(problem.batch) > 0 and problem.heads and not _in_any(problem.heads[0], arrangements[k_at]):
        problem.heads.insert(0, problem.batch.pop())
    if problem.q_factors:
        _move_factors_to_q(facts, problem, qk, out_letters)
    return problem


def _shared_order(arrangement: Arrangement, factors: dict[str, Factor], shared: list[str]) -> list[str]:
    """The batch letters in the order in which the probabilities have them: the head axis is the innermost."""
    leaves = flat(arrangement)
    position = {c: min((leaves.index(leaf) for leaf in factors[c].leaves() if leaf in leaves), default=-1) for c in shared}
    return sorted(shared, key=lambda c: position[c])


def _not_quantised(node: ir.Node) -> None:
    for value in node.inputs:
        if op_of(value.producer()) == "DequantizeLinear":
            raise Refused("an operand is dequantised: the product belongs to a quantised graph", value.producer())


def _in_any(factor: Factor, arrangement: Arrangement) -> bool:
    return any(f is factor for axis in arrangement for f in axis)


def _size(axis: Sequence[Factor]) -> Size:
    out: Size = 1
    for f in axis:
        out = out * f.size
    return out


def _count(axis: Sequence[Factor]) -> Size:
    return _size(axis)


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
            if self.facts.dtype(node.outputs[0]) != ir.DataType.FLOAT and self.facts.dtype(node.outputs[0]) not in _TYPES:
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
            raise Refused(f"the mask {_text(shape)} is not known to broadcast to the scores {_text(sizes(arrangement))}", node)
        for size, axis in zip(shape, arrangement[len(arrangement) - len(shape):]):
            if size != 1 and not at_most(size, _size(axis)):
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
        if self.softcap or any(t.fill is not None and not math.isinf(t.fill) for t in self.terms) or (self.terms and factor <= 0):
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
            # exp of it is zero beside an ordinary score, but a row where everything is replaced has equal weights in this
            # graph, and no additive mask gives them.
            raise Refused(f"masked scores become {fill:g}, and a fully masked row with that fill cannot be kept", node)
        if self.facts.dtype(value) == ir.DataType.FLOAT16 and not math.isinf(fill):
            raise Refused("masked float16 scores become a finite number", node)
        self.terms.append(Term(condition, resolve(self.arrangement), node, fill=fill, keep=kept))


def _other(node: ir.Node, value: ir.Value) -> ir.Value:
    if op_of(node) == "Where":
        return node.inputs[0]
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def _text(shape: Sequence[Size] | None) -> str:
    return "of unknown rank" if shape is None else "(" + ", ".join(map(str, shape)) + ")"


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
        guard = _nan_guard(facts, value, users)
        if guard is not None:
            nodes += guard
            value = guard[-1].outputs[0]
            continue
        if len(users) != 1:
            raise Refused("the probabilities are used by other nodes than the second product", value.producer())
        node = users[0]
        if _is_product(node):
            return value, resolve(arrangement), nodes
        if op_of(node) in ("Cast", "CastLike") and facts.dtype(node.outputs[0]) in _TYPES:
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


def _nan_guard(facts: Facts, value: ir.Value, users: Sequence[ir.Node]) -> list[ir.Node] | None:
    """IsNaN and Where that turn NaN into zero: what the fused operator does anyway."""
    tests = [n for n in users if op_of(n) == "IsNaN"]
    choices = [n for n in users if op_of(n) == "Where"]
    if len(users) != 2 or len(tests) != 1 or len(choices) != 1:
        return None
    test, choice = tests[0], choices[0]
    condition = test.outputs[0]
    if choice.inputs[0] is not condition or facts.only_reader(condition) is not choice or choice.inputs[2] is not value:
        return None
    if facts.scalar(choice.inputs[1]) != 0.0:
        return None
    return [test, choice]


def _masked_row_guard(facts: Facts, value: ir.Value, node: ir.Node, terms: Sequence[Term]) -> bool:
    """Where that gives zeros to rows in which the largest element of an added mask is -inf: what the operator does anyway."""
    if op_of(node) != "Where" or node.inputs[2] is not value or facts.scalar(node.inputs[1]) != 0.0:
        return False
    test = node.inputs[0].producer()
    if op_of(test) != "Equal":
        return False
    for most, lowest in (test.inputs, reversed(test.inputs)):
        largest = most.producer()
        if facts.scalar(lowest) != -math.inf or op_of(largest) != "ReduceMax" or attr(largest, "keepdims", 1) != 1:
            continue
        axes = attr(largest, "axes") if "axes" in largest.attributes else facts.ints(largest.inputs[1]) if len(largest.inputs) > 1 else None
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


def _standard(facts: Facts, node: ir.Node) -> Problem:
    """The ONNX Attention operator."""
    q, k, v, mask, past_k, past_v, lengths = [*node.inputs, *[None] * (7 - len(node.inputs))][:7]
    outputs = [*node.outputs, *[None] * (4 - len(node.outputs))]
    used = [o is not None and bool(o.uses() or o.is_graph_output()) for o in outputs]
    if used[3]:
        raise Refused("the node gives its scores out", node)
    if any(a.is_ref() for a in node.attributes.values()):
        raise Refused("an attribute of the node is an attribute of the function", node)
    unknown = set(node.attributes) - {
        "is_causal", "scale", "softcap", "q_num_heads", "kv_num_heads", "qk_matmul_output_mode", "softmax_precision",
        "left_window_size", "right_window_size"}
    if unknown:
        raise Refused(f"attribute {sorted(unknown)[0]} is not understood", node)
    if attr(node, "softmax_precision", 1) == ir.DataType.DOUBLE:
        raise Refused("Softmax is computed in double precision", node)
    shapes = [facts.shape(x) for x in (q, k, v)]
    if any(s is None for s in shapes):
        raise Refused("the rank of an input is not known", node)
    qs, ks, vs = shapes
    if len(qs) == 4:
        n, nkv = qs[1], ks[1]
    else:
        n, nkv = attr(node, "q_num_heads"), attr(node, "kv_num_heads")
    group = exact_div(n, nkv)
    if group is None:
        raise Refused(f"{n} query heads are not known to be a multiple of {nkv} key heads", node)
    b, s, own = Factor("b", qs[0]), Factor("s", qs[1] if len(qs) == 3 else qs[2]), Factor("k", ks[1] if len(ks) == 3 else ks[2])
    past = facts.shape(past_k) if past_k is not None else (0, 0, 0, 0)
    if past is None or (past_k is None) != (past_v is None):
        raise Refused("the cache is not known to be two tensors of rank 4", node)
    j = Factor("j", own.size + past[2]) if past_k is not None else own
    heads_kv, groups = Factor("n", nkv), Factor("g", group)
    if len(qs) == 4:
        d, dv = Factor("d", qs[3]), Factor("v", vs[3])
    else:
        d, dv = Factor("d", exact_div(qs[2], n)), Factor("v", exact_div(vs[2], nkv))
        if d.size is None or dv.size is None:
            raise Refused("the head size is not known", node)
    both = [heads_kv, groups] if group != 1 else [heads_kv]
    bnsh = len(qs) == 4

    def arranged(heads: list[Factor], seq: Factor, dim: Factor) -> Arrangement:
        return [[b], heads, [seq], [dim]] if bnsh else [[b], [seq], [*heads, dim]]

    terms = []
    if mask is not None:
        scores: Arrangement = [[b], both, [s], [j]]
        fill = -math.inf if facts.dtype(mask) == ir.DataType.BOOL else None
        shape = facts.shape(mask)
        if not shape:
            raise Refused(f"the rank of the mask {mask.name} is not known", node)
        # The mask may be shorter than the keys: the rest counts as -inf, here and there.
        short = shape[-1] not in (1, j.size)
        terms.append(Term(mask, scores, node, fill=fill, whole=short))
    scale = attr(node, "scale")
    if scale is None:
        if not isinstance(d.size, int):
            raise Refused("the head size is not known", node)
        scale = 1.0 / math.sqrt(d.size)
    return Problem(
        q=Level(q, arranged(both, s, d)), k=Level(k, arranged([heads_kv], own, d)), v=Level(v, arranged([heads_kv], own, dv)),
        out=Level(node.outputs[0], arranged(both, s, dv)),
        batch=[b], heads=both, sq=s, sk=j, d=d, dv=dv, scale=scale, softcap=float(attr(node, "softcap", 0.0)),
        terms=terms, nodes=[node], is_causal=bool(attr(node, "is_causal", 0)),
        window=attr(node, "left_window_size", -1), window_right=attr(node, "right_window_size", -1),
        past_k=past_k, past_v=past_v, total_lengths=lengths, own=own if past_k is not None else None,
        present_k=outputs[1] if used[1] else None, present_v=outputs[2] if used[2] else None,
    )


# -- com.microsoft


def _not_referring(node: ir.Node) -> None:
    if any(a.is_ref() for a in node.attributes.values()):
        raise Refused("an attribute of the node is an attribute of the function", node)


def _inputs(node: ir.Node, count: int) -> list[ir.Value | None]:
    return [*node.inputs, *[None] * (count - len(node.inputs))][:count]


def _padding(facts: Facts, node: ir.Node, mask: ir.Value, dtype: ir.DataType) -> Term:
    """A mask of 0 and 1, (batch, keys) or (batch, query, key): what is not above 0 gets a finite number added."""
    rank = facts.rank(mask)
    if rank not in (2, 3):
        raise Refused("the padding mask is not of rank 2 or 3", node)
    fill = float(attr(node, "mask_filter_value", -10000.0))

    def make(tape: Tape) -> ir.Value:
        value = tape.op("Reshape", [mask, tape.ints([0, 1, 1, -1])]) if rank == 2 else tape.op("Unsqueeze", [mask, tape.ints([1])])
        keep = tape.op("Greater", [value, tape.constant(np.array(0, facts.dtype(mask).numpy()))])
        return tape.op("Where", [keep, tape.constant(np.array(0, dtype.numpy())), tape.constant(np.array(fill, dtype.numpy()))])

    if rank == 3 and facts.opset < 13:
        raise Refused("a padding mask of rank 3 needs opset 13", node)
    return Term(mask, [], node, factor=1.0, make=make)


def _multi_head_attention(facts: Facts, node: ir.Node) -> Problem:
    """com.microsoft MultiHeadAttention with separate queries, keys and values."""
    _not_referring(node)
    q, k, v, bias, padding, added, past_k, past_v, *more = _inputs(node, 10)
    outputs = [*node.outputs, *[None] * (4 - len(node.outputs))]
    used = [o is not None and bool(o.uses() or o.is_graph_output()) for o in outputs]
    if k is None or v is None:
        raise Refused("queries, keys and values are packed into one tensor", node)
    if used[3]:
        raise Refused("the node gives its scores out", node)
    if any(x is not None for x in more):
        raise Refused("the cache is updated in place", node)
    shapes = [facts.shape(x) for x in (q, k, v)]
    n = attr(node, "num_heads")
    if any(s is None for s in shapes) or len(shapes[0]) != 3 or len(shapes[1]) != len(shapes[2]) or len(shapes[1]) not in (3, 4):
        raise Refused("the ranks of the inputs are not 3, or 4 for keys and values", node)
    qs, ks, vs = shapes
    bnsh = len(ks) == 4
    d = exact_div(qs[2], n)
    dv = vs[3] if bnsh else exact_div(vs[2], n)
    if not isinstance(d, int) or dv is None:
        raise Refused("the head size is not known", node)
    past = facts.shape(past_k) if past_k is not None else (0, 0, 0, 0)
    if past is None or (past_k is None) != (past_v is None):
        raise Refused("the cache is not known to be two tensors of rank 4", node)
    if bnsh and (past_k is not None or bias is not None):
        raise Refused("keys of rank 4 together with a cache or a bias", node)
    b, s, own = Factor("b", qs[0]), Factor("s", qs[1]), Factor("k", ks[2] if bnsh else ks[1])
    heads, dim, dim_v = Factor("n", n), Factor("d", d), Factor("v", dv)
    j = Factor("j", own.size + past[2]) if past_k is not None else own

    def kv(last: Factor) -> Arrangement:
        return [[b], [heads], [own], [last]] if bnsh else [[b], [own], [heads, last]]

    levels = [Level(q, [[b], [s], [heads, dim]]), Level(k, kv(dim)), Level(v, kv(dim_v))]
    if bias is not None:
        if tensor_of(bias) is None:
            raise Refused("the bias is computed in the graph", node)
        start = 0
        for level, width in zip(levels, (qs[2], ks[2], vs[2])):
            if not isinstance(width, int):
                raise Refused("the head size is not known", node)
            level.make = _with_bias(level.value, bias, start, start + width)
            start += width
    dtype = facts.dtype(q)
    terms = []
    if padding is not None:
        if dtype not in _TYPES:
            raise Refused("the element type is not known", node)
        terms.append(_padding(facts, node, padding, dtype))
    if added is not None:
        terms.append(Term(added, [[b], [heads], [s], [j]], node))
    scale = attr(node, "scale", 0.0)
    return Problem(
        q=levels[0], k=levels[1], v=levels[2], out=Level(node.outputs[0], [[b], [s], [heads, dim_v]]),
        batch=[b], heads=[heads], sq=s, sk=j, d=dim, dv=dim_v, scale=float(scale) or 1.0 / math.sqrt(d), terms=terms, nodes=[node],
        is_causal=bool(attr(node, "unidirectional", 0)), past_k=past_k, past_v=past_v, own=own if past_k is not None else None,
        present_k=outputs[1] if used[1] else None, present_v=outputs[2] if used[2] else None,
    )


def _with_bias(value: ir.Value, bias: ir.Value, start: int, stop: int) -> Callable[[Tape], ir.Value]:
    return lambda tape: tape.op("Add", [value, tape.folded(bias, lambda t: t[start:stop])])


def _projected_attention(facts: Facts, node: ir.Node) -> Problem:
    """com.microsoft Attention: one weight projects the input to queries, keys and values."""
    _not_referring(node)
    x, w, bias, mask, past, added, length = _inputs(node, 7)
    if past is not None or length is not None or any(o.uses() or o.is_graph_output() for o in node.outputs[1:]):
        raise Refused("the cache of both keys and values is one tensor", node)
    if attr(node, "do_rotary", 0):
        raise Refused("the node rotates queries and keys", node)
    weight, shape = tensor_of(w), facts.shape(x)
    if weight is None or not w.is_initializer() or (bias is not None and tensor_of(bias) is None):
        raise Refused("the weight or the bias is computed in the graph", node)
    if shape is None or len(shape) != 3:
        raise Refused("the rank of the input is not 3", node)
    dtype = facts.dtype(x)
    if dtype not in _TYPES:
        raise Refused("the element type is not one that the operator takes", node)
    n = attr(node, "num_heads")
    total = int(weight.shape[1])
    widths = [int(u) for u in attr(node, "qkv_hidden_sizes", [total // 3] * 3)]
    if any(u % n for u in widths) or sum(widths) != total:
        raise Refused("the projections are not whole heads", node)
    b, s = Factor("b", shape[0]), Factor("s", shape[1])
    own, heads = Factor("k", shape[1]), Factor("n", n)
    dim, dim_v = Factor("d", widths[0] // n), Factor("v", widths[2] // n)
    levels, start = [], 0
    for i, (width, last) in enumerate(zip(widths, (dim, dim, dim_v))):
        level = Level(x, [[b], [own if i else s], [heads, last]])
        level.make = _projection(x, w, bias, start, start + width)
        levels.append(level)
        start += width
    terms = []
    if mask is not None:
        terms.append(_padding(facts, node, mask, dtype))
    if added is not None:
        terms.append(Term(added, [[b], [heads], [s], [own]], node))
    scale = attr(node, "scale", 0.0)
    return Problem(
        q=levels[0], k=levels[1], v=levels[2], out=Level(node.outputs[0], [[b], [s], [heads, dim_v]]),
        batch=[b], heads=[heads], sq=s, sk=own, d=dim, dv=dim_v, scale=float(scale) or 1.0 / math.sqrt(widths[0] // n), terms=terms,
        nodes=[node], is_causal=bool(attr(node, "unidirectional", 0)),
    )


def _projection(x: ir.Value, w: ir.Value, bias: ir.Value | None, start: int, stop: int) -> Callable[[Tape], ir.Value]:
    def make(tape: Tape) -> ir.Value:
        inputs = [x, tape.folded(w, lambda t: t[:, start:stop]), None if bias is None else tape.folded(bias, lambda t: t[start:stop])]
        return tape.fused("FusedGemm", inputs, {}).outputs[0]

    return make


def _grouped_query_attention(facts: Facts, node: ir.Node) -> Problem:
    raise Refused("GroupQueryAttention writes new keys into its cache at positions that are only known at run time", node)


_WHOLE: dict[str, Callable[[Facts, ir.Node], Problem]] = {
    "Attention": _standard,
    "com.microsoft::MultiHeadAttention": _multi_head_attention,
    "com.microsoft::Attention": _projected_attention,
    "com.microsoft::GroupQueryAttention": _grouped_query_attention,
}
"""Operators that are a whole attention."""


# -- layouts


def _forms(problem: Problem, heads: Sequence[Factor], seq: Factor, dim: Factor) -> dict[tuple[str, int], Arrangement]:
    """The arrangements that the operator reads, by (layout, rank)."""
    batch = [leaf for f in problem.batch for leaf in f.leaves()]
    s, d = seq.leaves(), dim.leaves()
    return {
        ("BSNH", 3): [batch, s, [*heads, *d]],
        ("BSNH", 4): [batch, s, list(heads), d],
        ("BNSH", 4): [batch, list(heads), s, d],
    }


def _choose_layout(facts: Facts, problem: Problem) -> Plan:
    dtype = facts.dtype(problem.q.value)
    if dtype is None:
        raise Refused(f"the element type of {problem.q.value.name} is not known", problem.nodes[0])
    if dtype not in _TYPES:
        raise Refused(f"the element type is {dtype.name}, the operator takes float32, float16 and bfloat16", problem.nodes[0])
    for level in (problem.k, problem.v):
        if facts.dtype(level.value) != dtype:
            raise Refused(f"{level.value.name} is not of the element type of {problem.q.value.name}", problem.nodes[0])
    problem.dtype = dtype

    q_levels = _upstream_of_type(facts, problem.q, dtype) if not problem.q_factors else [problem.q]
    k_levels = _upstream_of_type(facts, problem.k, dtype)
    v_levels = [x for x in _upstream_of_type(facts, problem.v, dtype) if x.scale == 1.0]
    out_levels = list(downstream(facts, problem.out.value, resolve(problem.out.arrangement)))
    for level in (*q_levels, *k_levels, *v_levels, *out_levels):
        level.arrangement = resolve(level.arrangement)

    # One merged batch-and-heads axis that a Reshape further up takes apart.
    if not problem.batch and len(problem.heads) == 1:
        whole = problem.heads[0]
        problem.batch, problem.heads = ([whole.parts[0]], [whole.parts[1]]) if whole.parts else ([whole], [])
    heads = [leaf for f in problem.heads for leaf in f.leaves()]
    for term in problem.terms:
        term.arrangement = resolve(term.arrangement)
        _check_term(facts, problem, term)
    k_levels, v_levels = _take_cache(facts, problem, heads, k_levels, v_levels)
    reduced = _reduce_masks(facts, problem, 0 if problem.past_k is None else facts.shape(problem.past_k)[2])

    best: tuple[float, Plan] | None = None
    prefixes = [heads[:i] for i in range(len(heads) + 1)]
    for kv_heads in prefixes:
        group = [f for f in heads[len(kv_heads):] if f.size != 1]
        if group and (not all(_lacks(level, group) for level in (k_levels[-1], v_levels[-1]))):
            continue
        for (layout, rank), target in _forms(problem, heads, problem.sq, problem.d).items():
            if rank == 3 and not (isinstance(_count(heads), int) and isinstance(_count(kv_heads), int)):
                continue
            targets_k = _forms(problem, kv_heads, problem.kv, problem.d)[layout, rank]
            targets_v = _forms(problem, kv_heads, problem.kv, problem.dv)[layout, rank]
            targets_y = _forms(problem, heads, problem.sq, problem.dv)[layout, rank]
            picked = [_cheapest(levels, t) for levels, t in ((q_levels, target), (k_levels, targets_k), (v_levels, targets_v))]
            if any(p is None for p in picked):
                continue
            out_cost, out = min(((_conversion(targets_y, level.arrangement) or 0.0) + _left(out_levels, level), i)
                                for i, level in enumerate(out_levels) if _conversion(targets_y, level.arrangement) is not None)
            cost = out_cost + sum(p[0] for p in picked)
            plan = Plan(problem, layout, rank, *(p[1] for p in picked), out_levels[out], heads, list(kv_heads), [], reduced)
            if best is None or cost < best[0] - 1e-9:
                best = (cost, plan)
        if best is not None:
            break  # the fewest key heads
    if best is None:
        raise Refused("q, k, v and the result do not have a common order of batch and heads", problem.nodes[0])
    plan = best[1]
    plan.nodes = [*problem.nodes, *plan.out.nodes]
    return plan


def _take_cache(
    facts: Facts, problem: Problem, heads: list[Factor], k_levels: list[Level], v_levels: list[Level]
) -> tuple[list[Level], list[Level]]:
    """Gives the cache to the operator where k and v are a cache and new keys and values, joined along the sequence.

    Returns the levels of the new keys and values; the old ones where there is no cache, or one that cannot be given.
    """
    if problem.past_k is not None or problem.total_lengths is not None:
        return k_levels, v_levels
    found = []
    for levels, dim in ((k_levels, problem.d), (v_levels, problem.dv)):
        joined = _joined(facts, problem, heads, levels, dim)
        if joined is None:
            return k_levels, v_levels
        found.append(joined)
    (k_level, past_k, new_k), (v_level, past_v, new_v) = found
    shapes = [facts.shape(v) for v in (past_k, past_v, new_k, new_v)]
    if shapes[0][:3] != shapes[1][:3] or shapes[2][:3] != shapes[3][:3]:
        return k_levels, v_levels
    # Its shape can be had elsewhere, so only an output of the graph needs the joined tensor.
    presents = [level.value if level.value.is_graph_output() else None for level in (k_level, v_level)]
    problem.own = Factor("s", shapes[2][2])
    problem.past_k, problem.past_v = past_k, past_v
    problem.present_k, problem.present_v = presents
    out = []
    for level, new, dim in ((k_level, new_k, problem.d), (v_level, new_v, problem.dv)):
        axes = level.arrangement
        inner = upstream(facts, new, [axes[0], axes[1], [problem.own], axes[3]])
        # The cache holds keys without the factor that the new ones would lose.
        inner = [x for x in inner if x.scale == 1.0 and facts.dtype(x.value) == problem.dtype]
        for x in inner:
            x.arrangement = resolve(x.arrangement)
            x.scale = level.scale
        out.append(inner)
    return out[0], out[1]


def _joined(
    facts: Facts, problem: Problem, heads: list[Factor], levels: list[Level], dim: Factor
) -> tuple[Level, ir.Value, ir.Value] | None:
    """The level that is a Concat of a cache and something new, both (batch, heads, sequence, dim)."""
    batch = [leaf for f in problem.batch for leaf in f.leaves()]
    level = levels[-1]
    node = level.value.producer()
    if op_of(node) != "Concat" or len(node.inputs) != 2 or len(level.arrangement) != 4 or node.graph is not problem.nodes[-1].graph:
        return None
    axis = attr(node, "axis")
    if axis is REFERENCE or axis % 4 != 2:
        return None
    if not any(same(level.arrangement, [batch, heads[:i], problem.sk.leaves(), dim.leaves()]) for i in range(len(heads) + 1)):
        return None
    past, new = node.inputs
    if past is None or new is None or facts.rank(past) != 4 or facts.rank(new) != 4 or facts.dtype(past) != problem.dtype:
        return None
    # Somebody who reads the joined keys in front of the attention would wait for it.
    if any(n not in (problem.nodes[0], problem.nodes[-1], *(x for lv in levels for x in lv.nodes)) for n in facts.readers(level.value)):
        return None
    return level, past, new


def _upstream_of_type(facts: Facts, level: Level, dtype: ir.DataType) -> list[Level]:
    if level.make is not None:
        return [level]
    return [x for x in upstream(facts, level.value, resolve(level.arrangement)) if facts.dtype(x.value) == dtype]


def _lacks(level: Level, group: Sequence[Factor]) -> bool:
    leaves = flat(level.arrangement)
    return not any(f in leaves for f in group)


def _conversion(source: Arrangement, target: Arrangement) -> float | None:
    """Cost of bringing one arrangement into the other: 0, a Reshape, or a Transpose. None: they hold different factors."""
    a, b = flat_solid(source), flat_solid(target)
    if len(a) != len(b) or set(map(id, a)) != set(map(id, b)):
        return None
    if same(source, target):
        return 0.0
    reshape = 0.1 if len(source) != len(target) or [id(f) for f in a] == [id(f) for f in b] else 0.0
    return reshape if [id(f) for f in a] == [id(f) for f in b] else 1.0 + reshape


def _cheapest(levels: Sequence[Level], target: Arrangement) -> tuple[float, Level] | None:
    best: tuple[float, Level] | None = None
    for level in levels:
        cost = _conversion(level.arrangement, target)
        if cost is not None and (best is None or cost + level.kept_cost <= best[0]):
            best = (cost + level.kept_cost, level)
    return best


def _left(levels: Sequence[Level], level: Level) -> int:
    """Transposes behind a level of the result, which stay if the result is written there."""
    return sum(op_of(n) == "Transpose" for n in levels[-1].nodes[len(level.nodes):])


# -- masks


def _canonical(problem: Problem) -> Arrangement:
    batch = [leaf for f in problem.batch for leaf in f.leaves()]
    heads = [leaf for f in problem.heads for leaf in f.leaves()]
    return [batch, heads, problem.sq.leaves(), problem.sk.leaves()]


def _check_term(facts: Facts, problem: Problem, term: Term) -> None:
    if term.make is not None:
        return
    shape = facts.shape(term.value)
    if shape is None:
        raise Refused(f"the rank of the mask {term.value.name} is not known", term.node)
    if len(shape) > len(term.arrangement):
        raise Refused(f"the mask {_text(shape)} has more axes than the scores", term.node)
    for size, axis in zip(shape[: -1 if term.whole else None], term.arrangement[len(term.arrangement) - len(shape):]):
        if isinstance(size, int) and size != 1 and isinstance(_size(axis), int) and size != _size(axis):
            raise Refused(f"the mask {_text(shape)} does not broadcast to the scores {_text(sizes(term.arrangement))}", term.node)


def _reduce_masks(facts: Facts, problem: Problem, offset: Size) -> masks.Masks:
    """The masks with causality and windows taken out; those that stay must be of a type that the operator takes."""
    lines = [not t.whole and t.make is None and same(t.arrangement[-2:], [problem.sq.leaves(), problem.sk.leaves()]) for t in problem.terms]
    reduced = masks.reduce_masks(facts, problem.terms, offset, lines)
    for step in reduced.steps:
        if isinstance(step, masks.Choice) and not masks.fits(step.fill, problem.dtype):
            raise Refused(f"masked scores become {step.fill:g}, which {problem.dtype.name} does not hold", step.term.node)
        if isinstance(step, Term) and step.make is None and facts.dtype(step.value) != problem.dtype:
            dtype = facts.dtype(step.value)
            name = "unknown" if dtype is None else dtype.name
            raise Refused(f"the mask is of type {name}, the operator takes {problem.dtype.name} and BOOL", step.node)
    reduced.is_causal |= problem.is_causal
    if problem.window >= 0:
        reduced.window = problem.window if reduced.window < 0 else min(problem.window, reduced.window)
    if problem.window_right >= 0:
        reduced.window_right = problem.window_right if reduced.window_right < 0 else min(problem.window_right, reduced.window_right)
    return reduced
