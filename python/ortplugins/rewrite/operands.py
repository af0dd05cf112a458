"""Operands behind layout ops: from the value that a product reads to the tensor it really is, and on for results.

`upstream` follows a value through Reshape, Transpose, Expand, no-op casts and slices, and constant factors, and gives a
`Level` for every tensor on the way. A rule takes the level that its operator can read with the least data movement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from .facts import REFERENCE, Facts, attr, op_of
from .layout import Arrangement, Factor, permute, regroup, resolve, unpermute
from .tape import Tape

_RESHAPES = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Flatten"})


@dataclass
class Level:
    """A tensor that holds an operand: `scale` times it, in this arrangement, is the operand.

    `kept_cost` counts the data-moving nodes between the deepest level and this one that stay alive if this one is read.
    `make` writes the nodes that compute the tensor from `value`, where it does not exist yet.
    """

    value: ir.Value
    arrangement: Arrangement
    scale: float = 1.0
    nodes: tuple[ir.Node, ...] = ()
    kept_cost: int = 0
    make: Callable[[Tape], ir.Value] | None = None

    def read(self, tape: Tape) -> ir.Value:
        return self.value if self.make is None else self.make(tape)


def scalar_operand(facts: Facts, node: ir.Node, value: ir.Value) -> float | None:
    """For a Mul or Div (numerator) of `value` by one known number: the factor. The shape must stay that of `value`."""
    op = op_of(node)
    if op not in ("Mul", "Div") or len(node.inputs) != 2:
        return None
    a, b = node.inputs
    if a is b:
        return None
    other = b if a is value else a
    if op == "Div" and a is not value:
        return None
    number = facts.scalar(other)
    if number is None or facts.shape(node.outputs[0]) != facts.shape(value):
        return None
    if op == "Div":
        return None if number == 0 else 1.0 / number
    return number


def is_no_op(facts: Facts, node: ir.Node) -> bool:
    """The node's first output is its first input, unchanged."""
    op = op_of(node)
    if op == "Identity":
        return True
    if not node.inputs or node.inputs[0] is None:
        return False
    x, y = node.inputs[0], node.outputs[0]
    if op in ("Cast", "CastLike"):
        return facts.dtype(x) is not None and facts.dtype(x) == facts.dtype(y)
    if op == "Slice":
        steps = facts.ints(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else [1]
        return (
            facts.shape(x) is not None
            and facts.shape(x) == facts.shape(y)
            and steps is not None
            and all(s == 1 for s in steps)
        )
    if op in ("Reshape", "Expand"):
        return facts.shape(x) is not None and facts.shape(x) == facts.shape(y)
    if op == "Dropout":
        training = facts.data(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
        unused_mask = len(node.outputs) < 2 or (not node.outputs[1].uses() and not node.outputs[1].is_graph_output())
        return unused_mask and (
            len(node.inputs) < 3 or node.inputs[2] is None or (training is not None and not training.any())
        )
    return False


def unexpand(arrangement: Arrangement, source: tuple[object, ...], target: tuple[object, ...]) -> Arrangement | None:
    """The arrangement in front of an Expand or a broadcast: axes that were of size 1 lose their factors."""
    extra = len(target) - len(source)
    out: Arrangement = []
    for axis, have, want in zip(arrangement[extra:], source, target[extra:]):
        if have == want:
            out.append(axis)
        elif have == 1:
            out.append([])
        else:
            return None
    return out


def step_back(
    facts: Facts, node: ir.Node, value: ir.Value, arrangement: Arrangement
) -> tuple[ir.Value, Arrangement, float] | None:
    """One layout op or constant factor back from its output; None when the node is something else or not understood."""
    op = op_of(node)
    x = node.inputs[0] if node.inputs else None
    if op in ("Mul", "Div"):
        for x in node.inputs[:2] if op == "Mul" else node.inputs[:1]:
            factor = scalar_operand(facts, node, x)
            if factor is not None:
                return x, arrangement, factor
        return None
    if x is None or node.outputs[0] is not value:
        return None
    if is_no_op(facts, node):
        return x, arrangement, 1.0
    shape = facts.shape(x)
    if shape is None:
        return None
    if op in _RESHAPES:
        before = regroup(arrangement, shape)
        return None if before is None else (x, before, 1.0)
    if op == "Transpose":
        perm = attr(node, "perm")
        if perm is REFERENCE:
            return None
        return x, unpermute(arrangement, list(reversed(range(len(shape)))) if perm is None else perm), 1.0
    if op == "Expand":
        after = facts.shape(value)
        before = None if after is None else unexpand(arrangement, shape, after)
        return None if before is None else (x, before, 1.0)
    return None


_MOVES_DATA = frozenset({"Transpose", "Expand", "Mul", "Div"})


def upstream(facts: Facts, value: ir.Value, arrangement: Arrangement) -> list[Level]:
    """All levels of an operand, the operand itself first."""
    levels = [Level(value, arrangement)]
    alive: list[bool] = []  # whether the node behind levels[i] lives on whatever the rule does
    shared = False
    while True:
        last = levels[-1]
        node = last.value.producer()
        if node is None:
            break
        step = step_back(facts, node, last.value, resolve(last.arrangement))
        if step is None:
            break
        x, before, factor = step
        if facts.only_reader(last.value) is None:
            shared = True
        alive.append(shared)
        levels.append(Level(x, before, last.scale * factor, (*last.nodes, node)))
    # A node is paid for by every level in front of it.
    cost = 0
    for i in range(len(levels) - 2, -1, -1):
        node = levels[i + 1].nodes[-1]
        if not alive[i] and op_of(node) in _MOVES_DATA and not is_no_op(facts, node):
            cost += 1
        levels[i].kept_cost = cost
    return levels


def downstream(facts: Facts, value: ir.Value, arrangement: Arrangement) -> Iterator[Level]:
    """Levels of a result: the result itself, then what single-use layout ops make of it."""
    nodes: tuple[ir.Node, ...] = ()
    while True:
        yield Level(value, arrangement, nodes=nodes)
        node = facts.only_reader(value)
        if node is None or not node.inputs or node.inputs[0] is not value:
            return
        step = step_forward(facts, node, arrangement)
        if step is None or node.outputs[0].graph is not value.graph:
            return
        arrangement, value = step, node.outputs[0]
        nodes = (*nodes, node)


def step_forward(facts: Facts, node: ir.Node, arrangement: Arrangement) -> Arrangement | None:
    """The arrangement behind a layout op, given the one in front of it; None when the node is not one."""
    if is_no_op(facts, node):
        return arrangement
    op = op_of(node)
    shape = facts.shape(node.outputs[0])
    if shape is None:
        return None
    if op in _RESHAPES:
        return regroup(arrangement, shape)
    if op == "Transpose":
        perm = attr(node, "perm")
        if perm is REFERENCE:
            return None
        return permute(arrangement, list(reversed(range(len(shape)))) if perm is None else perm)
    return None


__all__ = [
    "Arrangement",
    "Factor",
    "Level",
    "downstream",
    "is_no_op",
    "scalar_operand",
    "step_back",
    "step_forward",
    "upstream",
]
