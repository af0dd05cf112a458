"""softmax(scale * q k^T + mask) v, however an exporter wrote it, as one FusedAttention.

The centre is a Softmax between two products of computed tensors (attention_decomposed.py), or an operator that is a
whole attention (attention_operators.py). Both say what is computed as a `Problem`; here the layout is chosen that
moves the least data, the cache goes into the operator, and the node is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ..facts import REFERENCE, Facts, attr, op_of
from ..layout import Arrangement, Factor, flat, resolve, same, sizes
from ..operands import Level, downstream, upstream
from ..report import Refused
from ..symbolic import Size
from ..tape import Tape, flat_solid
from . import TYPES, Match, Options, Replacement, masks
from .attention_decomposed import decomposed, paths_back, product_after
from .attention_operators import OPERATORS
from .attention_problem import Problem, show, size_of
from .masks import Term


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


class AttentionRule:
    kind = "attention"
    op = "FusedAttention"

    def pattern(self, node: ir.Node, facts: Facts) -> Match | None:
        if op_of(node) in OPERATORS:
            return Match(node, [node])
        if op_of(node) != "Softmax":
            return None
        after = product_after(node.outputs[0])
        if after is None:
            return None
        paths = paths_back(node.inputs[0])
        if not paths:
            return None
        return Match(node, [*(n for n, _ in reversed(paths[0])), node, after], paths)

    def check(self, match: Match, facts: Facts, options: Options) -> Plan:
        whole = OPERATORS.get(op_of(match.centre))
        if whole is not None:
            return _choose_layout(facts, whole(facts, match.centre))
        first: Refused | None = None
        for path in match.found:
            try:
                return _choose_layout(facts, decomposed(facts, path, match.centre))
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
        heads, kv_heads = (int(size_of(h)) if plan.rank == 3 else 0 for h in (plan.heads_q, plan.heads_kv))
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
        node = tape.fused(
            "FusedAttention",
            inputs,
            {
                "layout": plan.layout,
                "num_heads": heads,
                "kv_num_heads": 0 if kv_heads == heads else kv_heads,
                "scale": float(plan.scale),
                "is_causal": int(plan.masks.is_causal),
                "softcap": float(problem.softcap),
                "window": plan.masks.window,
                "window_right": plan.masks.window_right,
                "precision": options.precision.get(self.op, "ieee"),
            },
            outputs=3 if presents else 1,
        )
        y = tape.arrange(node.outputs[0], target_y, plan.out.arrangement)
        olds = (problem.present_k, problem.present_v) if presents else ()
        return Replacement(
            [(plan.out.value, y), *((old, new) for old, new in zip(olds, node.outputs[1:]) if old is not None)]
        )


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
    if dtype not in TYPES:
        raise Refused(
            f"the element type is {dtype.name}, the operator takes float32, float16 and bfloat16", problem.nodes[0]
        )
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
        group = [f for f in heads[len(kv_heads) :] if f.size != 1]
        if group and (not all(_lacks(level, group) for level in (k_levels[-1], v_levels[-1]))):
            continue
        for (layout, rank), target in _forms(problem, heads, problem.sq, problem.d).items():
            if rank == 3 and not (isinstance(size_of(heads), int) and isinstance(size_of(kv_heads), int)):
                continue
            targets_k = _forms(problem, kv_heads, problem.kv, problem.d)[layout, rank]
            targets_v = _forms(problem, kv_heads, problem.kv, problem.dv)[layout, rank]
            targets_y = _forms(problem, heads, problem.sq, problem.dv)[layout, rank]
            picked = [
                _cheapest(levels, t) for levels, t in ((q_levels, target), (k_levels, targets_k), (v_levels, targets_v))
            ]
            if any(p is None for p in picked):
                continue
            out_cost, out = min(
                ((_conversion(targets_y, level.arrangement) or 0.0) + _left(out_levels, level), i)
                for i, level in enumerate(out_levels)
                if _conversion(targets_y, level.arrangement) is not None
            )
            cost = out_cost + sum(p[0] for p in picked)
            plan = Plan(
                problem, layout, rank, *(p[1] for p in picked), out_levels[out], heads, list(kv_heads), [], reduced
            )
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
    if (
        op_of(node) != "Concat"
        or len(node.inputs) != 2
        or len(level.arrangement) != 4
        or node.graph is not problem.nodes[-1].graph
    ):
        return None
    axis = attr(node, "axis")
    if axis is REFERENCE or axis % 4 != 2:
        return None
    if not any(
        same(level.arrangement, [batch, heads[:i], problem.sk.leaves(), dim.leaves()]) for i in range(len(heads) + 1)
    ):
        return None
    past, new = node.inputs
    if (
        past is None
        or new is None
        or facts.rank(past) != 4
        or facts.rank(new) != 4
        or facts.dtype(past) != problem.dtype
    ):
        return None
    # Somebody who reads the joined keys in front of the attention would wait for it.
    if any(
        n not in (problem.nodes[0], problem.nodes[-1], *(x for lv in levels for x in lv.nodes))
        for n in facts.readers(level.value)
    ):
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
    """Cost of bringing one arrangement into the other by Reshape and Transpose; None if they hold different factors."""
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
    return sum(op_of(n) == "Transpose" for n in levels[-1].nodes[len(level.nodes) :])


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
        raise Refused(f"the mask {show(shape)} has more axes than the scores", term.node)
    for size, axis in zip(shape[: -1 if term.whole else None], term.arrangement[len(term.arrangement) - len(shape) :]):
        if isinstance(size, int) and size != 1 and isinstance(size_of(axis), int) and size != size_of(axis):
            raise Refused(
                f"the mask {show(shape)} does not broadcast to the scores {show(sizes(term.arrangement))}", term.node
            )


def _reduce_masks(facts: Facts, problem: Problem, offset: Size) -> masks.Masks:
    """The masks with causality and windows taken out; those that stay must be of a type that the operator takes."""
    lines = [
        not t.whole and t.make is None and same(t.arrangement[-2:], [problem.sq.leaves(), problem.sk.leaves()])
        for t in problem.terms
    ]
    reduced = masks.reduce_masks(facts, problem.terms, offset, lines)
    for step in reduced.steps:
        if isinstance(step, masks.Choice) and not masks.fits(step.fill, problem.dtype):
            raise Refused(
                f"masked scores become {step.fill:g}, which {problem.dtype.name} does not hold", step.term.node
            )
        if isinstance(step, Term) and step.make is None and facts.dtype(step.value) != problem.dtype:
            dtype = facts.dtype(step.value)
            name = "unknown" if dtype is None else dtype.name
            raise Refused(f"the mask is of type {name}, the operator takes {problem.dtype.name} and BOOL", step.node)
    reduced.is_causal |= problem.is_causal
    if problem.window >= 0:
        reduced.window = problem.window if reduced.window < 0 else min(problem.window, reduced.window)
    if problem.window_right >= 0:
        reduced.window_right = (
            problem.window_right if reduced.window_right < 0 else min(problem.window_right, reduced.window_right)
        )
    return reduced
