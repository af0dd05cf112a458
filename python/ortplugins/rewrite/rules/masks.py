"""Masks: what they keep, and the cheapest inputs of the operator that say the same.

A mask is a conjunction of conditions on the batch, the query index i and the key index j. Conditions that compare index
arithmetic are understood as such, whatever ops they are made of: those that always hold are dropped, ``j <= i + c`` is
causality, ``j >= i - c`` a window. What is left usually is the padding mask alone, of shape (batch, 1, 1, keys),
instead of a matrix for each sequence.

What a row gets whose keys are all masked must stay what it was. With a fill of -inf such a row gives zeros however the
mask is passed. With a finite fill it gives an average over all keys, also those that causality hides, so causality is
only taken out of a mask where it is the only condition: then every row sees a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..facts import REFERENCE, Facts, attr, broadcast, op_of, tensor_of
from ..layout import Arrangement, Factor, flat, same, sizes
from ..operands import is_no_op
from ..report import Refused
from ..symbolic import Dim, Size
from ..tape import Tape

_DEPTH = 24
_LARGEST_CONSTANT = 1 << 24  # elements of a constant mask that is looked at


@dataclass
class Term:
    """One step that masks the scores. `arrangement` is that of the scores it broadcasts to, on the right."""

    value: ir.Value
    arrangement: Arrangement
    node: ir.Node
    factor: float = 1.0
    fill: float | None = None  # None: added; else a choice: where it is not kept, the score becomes this
    keep: bool = True  # the value is true where the score is kept
    whole: bool = False  # passed to the operator as it is
    make: Callable[[Tape], ir.Value] | None = None  # writes the nodes that compute what is added from `value`


@dataclass
class Condition:
    """``j <= i + right`` and ``j >= i - left`` (None: no bound), and booleans: (value, what it must be)."""

    right: Size | None = None
    left: Size | None = None
    rest: list[tuple[ir.Value, bool]] = field(default_factory=list)

    @property
    def bounded(self) -> bool:
        return self.right is not None or self.left is not None


@dataclass
class Choice:
    """A masking term as a condition and the number that stands where it does not hold. `term` is where it came from."""

    condition: Condition
    fill: float
    term: Term


@dataclass
class Masks:
    """The masks of one attention: bounds for the operator's attributes, and what is passed as a tensor.

    `steps` are in the order in which the graph applies them. Choices with a fill of -inf become a boolean mask.
    """

    is_causal: bool = False
    window: int = -1
    window_right: int = -1
    steps: list[Term | Choice] = field(default_factory=list)


# -- index arithmetic


@dataclass(frozen=True)
class Affine:
    """An integer tensor that is a sum of indices and a size: (axis counted from the right, factor), and the size."""

    indices: tuple[tuple[int, Size], ...]
    constant: Size

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        total = dict(self.indices)
        for axis, c in other.indices:
            total[axis] = total.get(axis, 0) + sign * c
        return Affine(_in_order(total), self.constant + sign * other.constant)

    def times(self, factor: Size) -> Affine:
        return Affine(_in_order({a: c * factor for a, c in self.indices}), self.constant * factor)


def _in_order(indices: Mapping[int, Size]) -> tuple[tuple[int, Size], ...]:
    return tuple((axis, indices[axis]) for axis in sorted(indices) if indices[axis] != 0)


def affine(facts: Facts, value: ir.Value, depth: int = 0) -> Affine | None:
    """The tensor as index arithmetic; None if it is something else."""
    data = facts.data(value)
    if data is not None and data.size == 1 and isinstance(data.reshape(-1)[0], (int, Dim)):
        return Affine((), data.reshape(-1)[0])
    node = value.producer()
    if node is None:
        return _constant_indices(value)
    if depth > _DEPTH:
        return None
    op = op_of(node)
    if op == "Range":
        start, step = facts.ints(node.inputs[0]), facts.ints(node.inputs[2])
        whole = start is not None and isinstance(start[0], (int, Dim)) and step == [1]
        return Affine(((0, 1),), start[0]) if whole else None
    if op in ("Add", "Sub"):
        a, b = (affine(facts, v, depth + 1) for v in node.inputs)
        return None if a is None or b is None else a.plus(b, 1 if op == "Add" else -1)
    if op == "Mul":
        a, b = (affine(facts, v, depth + 1) for v in node.inputs)
        if a is None or b is None or (a.indices and b.indices):
            return None
        return a.times(b.constant) if a.indices else b.times(a.constant)
    if op == "Expand" or (op == "Cast" and _integer(facts, value)) or is_no_op(facts, node):
        return affine(facts, node.inputs[0], depth + 1)
    if op in ("Unsqueeze", "Squeeze", "Reshape"):
        inner = affine(facts, node.inputs[0], depth + 1)
        before, after = facts.shape(node.inputs[0]), facts.shape(value)
        return None if inner is None or before is None or after is None else _moved(inner, before, after)
    if op == "Constant":
        return _constant_indices(value)
    return None


def _constant_indices(value: ir.Value) -> Affine | None:
    """A constant 0, 1, 2, ... along its only axis that is not of size 1."""
    tensor = tensor_of(value)
    if tensor is None or tensor.dtype not in (ir.DataType.INT64, ir.DataType.INT32) or not 1 < tensor.size <= 1 << 16:
        return None
    array = tensor.numpy()
    long = [array.ndim - 1 - i for i, d in enumerate(array.shape) if d != 1]
    flat = array.reshape(-1)
    if len(long) != 1 or not np.array_equal(flat - flat[0], np.arange(flat.size)):
        return None
    return Affine(((long[0], 1),), int(flat[0]))


def _integer(facts: Facts, value: ir.Value) -> bool:
    return facts.dtype(value) in (ir.DataType.INT64, ir.DataType.INT32)


def _moved(value: Affine, before: Sequence[Size], after: Sequence[Size]) -> Affine | None:
    """Index arithmetic behind a Reshape that only puts in or takes out axes of size 1."""
    old = [i for i, d in enumerate(reversed(before)) if d != 1]
    new = [i for i, d in enumerate(reversed(after)) if d != 1]
    if [before[len(before) - 1 - i] for i in old] != [after[len(after) - 1 - i] for i in new]:
        return None
    place = dict(zip(old, new))
    if any(axis not in place for axis, _ in value.indices):
        return None
    return Affine(_in_order({place[a]: c for a, c in value.indices}), value.constant)


# -- conditions


_OPPOSITE = {"LessOrEqual": "Greater", "Less": "GreaterOrEqual", "Greater": "LessOrEqual", "GreaterOrEqual": "Less"}


def condition(facts: Facts, value: ir.Value, wanted: bool = True, depth: int = 0) -> Condition:
    """What holds where a boolean tensor that lies as (..., query, key) is `wanted`."""
    leaf = Condition(rest=[(value, wanted)])
    data = facts.data(value)
    if data is not None and data.size and all(not isinstance(x, Dim) and bool(x) is wanted for x in data.reshape(-1)):
        return Condition()
    node = value.producer()
    if node is None or op_of(node) == "Constant":
        return _constant(value, wanted) or leaf
    if depth > _DEPTH:
        return leaf
    op = op_of(node)
    x = node.inputs[0] if node.inputs else None
    if op == "Not":
        return condition(facts, x, not wanted, depth + 1)
    if (op == "And" and wanted) or (op == "Or" and not wanted):
        return _both(*(condition(facts, v, wanted, depth + 1) for v in node.inputs)) or leaf
    if op in ("Identity", "Expand") or (op == "Cast" and facts.dtype(x) == ir.DataType.BOOL) or is_no_op(facts, node):
        return condition(facts, x, wanted, depth + 1)
    if op == "ConstantOfShape":
        fill = attr(node, "value")
        return Condition() if fill not in (None, REFERENCE) and bool(fill.numpy().reshape(-1)[0]) is wanted else leaf
    if op == "Trilu":
        return _triangle(facts, node, wanted, depth) or leaf
    if op == "Slice":
        return _sliced(facts, node, wanted, depth) or leaf
    if op in ("Unsqueeze", "Reshape", "Squeeze"):
        before, after = facts.shape(x), facts.shape(value)
        if before is not None and after is not None and _leading_ones_differ(before, after):
            return condition(facts, x, wanted, depth + 1)
        return leaf
    return _bound(facts, node, wanted) or leaf


def _leading_ones_differ(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """The shapes are equal but for axes of size 1 in front."""
    short, long = sorted((tuple(a), tuple(b)), key=len)
    extra = len(long) - len(short)
    return long[extra:] == short and all(d == 1 for d in long[:extra])


def _both(a: Condition, b: Condition) -> Condition | None:
    """Both conditions; None where their bounds cannot be joined."""
    out = Condition(rest=[*a.rest, *(r for r in b.rest if r not in a.rest)])
    for side in ("right", "left"):
        x, y = getattr(a, side), getattr(b, side)
        if x is not None and y is not None and x != y:
            if not (isinstance(x, int) and isinstance(y, int)):
                return None
            x = min(x, y)
        setattr(out, side, x if x is not None else y)
    return out


def _triangle(facts: Facts, node: ir.Node, wanted: bool, depth: int) -> Condition | None:
    """Trilu of a matrix that is true everywhere: what it zeroes is false."""
    offset = facts.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else [0]
    inside = condition(facts, node.inputs[0], True, depth + 1)
    if offset is None or inside.bounded or inside.rest:
        return None
    upper = attr(node, "upper", 1)
    if upper is REFERENCE:
        return None
    if upper and not wanted:
        return Condition(right=offset[0] - 1)  # not j >= i + k
    if not upper and wanted:
        return Condition(right=offset[0])
    if upper and wanted:
        return Condition(left=-offset[0])
    return None


def _sliced(facts: Facts, node: ir.Node, wanted: bool, depth: int) -> Condition | None:
    """A window of a matrix: where it starts moves the bounds."""
    rank = facts.rank(node.inputs[0])
    if rank is None or len(node.inputs) < 4:
        return None
    starts, axes = facts.ints(node.inputs[1]), facts.ints(node.inputs[3])
    steps = facts.ints(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else None
    if (
        starts is None
        or axes is None
        or (len(node.inputs) > 4 and node.inputs[4] is not None and (steps is None or any(s != 1 for s in steps)))
    ):
        return None
    inside = condition(facts, node.inputs[0], wanted, depth + 1)
    if inside.rest:
        return None
    shift: Size = 0  # of the query index, less that of the key index
    for start, axis in zip(starts, axes):
        if not (start >= 0 if isinstance(start, int) else start.nonnegative):
            return None
        place = rank - 1 - int(axis) % rank
        if place == 1:
            shift = shift + start
        elif place == 0:
            shift = shift - start
    return Condition(
        right=None if inside.right is None else inside.right + shift,
        left=None if inside.left is None else inside.left - shift,
    )


def _bound(facts: Facts, node: ir.Node, wanted: bool) -> Condition | None:
    """A comparison of index arithmetic."""
    op = op_of(node)
    if op not in _OPPOSITE:
        return None
    a, b = (affine(facts, v) for v in node.inputs)
    if a is None or b is None:
        return None
    if not wanted:
        op = _OPPOSITE[op]
    # The condition is: difference >= 0.
    difference = b.plus(a, -1) if op in ("Less", "LessOrEqual") else a.plus(b, -1)
    if op in ("Less", "Greater"):
        difference = difference.plus(Affine((), 1), -1)
    c = difference.constant
    if all(isinstance(f, int) and f > 0 for _, f in difference.indices) and (c >= 0 if isinstance(c, int) else c.nonnegative):
        return Condition()  # indices are at least 0
    if difference.indices == ((0, -1), (1, 1)):
        return Condition(right=c)
    if difference.indices == ((0, 1), (1, -1)):
        return Condition(left=c)
    return None


def _constant(value: ir.Value, wanted: bool) -> Condition | None:
    """A constant matrix that is `wanted` everywhere, or on and below a diagonal."""
    tensor = tensor_of(value)
    if tensor is None or tensor.dtype != ir.DataType.BOOL or not 0 < tensor.size <= _LARGEST_CONSTANT:
        return None
    return _pattern(tensor.numpy() == wanted)


def _pattern(kept: np.ndarray) -> Condition | None:
    if kept.all():
        return Condition()
    if kept.ndim < 2 or kept.size != kept.shape[-1] * kept.shape[-2]:
        return None
    matrix = kept.reshape(kept.shape[-2:])
    first = int(matrix[0].sum()) - 1
    return Condition(right=first) if np.array_equal(matrix, np.tril(np.ones(matrix.shape, bool), first)) else None


# -- terms


def wins(fill: float, dtype: ir.DataType | None) -> bool:
    """A score plus the fill is the fill: it is -inf, or so low that float32 loses any score in its rounding."""
    return fill == -math.inf or (fill <= -1e30 and dtype in (ir.DataType.FLOAT, ir.DataType.BFLOAT16))


def as_choice(facts: Facts, term: Term) -> Choice | None:
    """The term as a condition and a fill; None if it is a plain addition."""
    if term.fill is not None:
        return Choice(condition(facts, term.value, term.keep), term.fill, term)
    if term.factor <= 0:
        return None
    value = term.value
    node = value.producer()
    while node is not None and (
        op_of(node) in ("Identity", "Expand") or is_no_op(facts, node) or _only_front(facts, node)
    ):
        value = node.inputs[0]
        node = value.producer()
    dtype = facts.dtype(value)
    if op_of(node) == "Where":
        test, x, y = node.inputs
        for zero, other, wanted in ((x, y, True), (y, x, False)):
            fill = facts.scalar(other)
            if facts.scalar(zero) == 0.0 and fill is not None and wins(fill, dtype):
                shape, own = facts.shape(test), facts.shape(value)
                return (
                    Choice(condition(facts, test, wanted), fill, term) if shape is not None and shape == own else None
                )
    if op_of(node) == "Trilu" and attr(node, "upper", 1) == 1:
        fill = facts.scalar(node.inputs[0])
        if fill is None and op_of(node.inputs[0].producer()) in ("Expand", "ConstantOfShape"):
            fill = _uniform(facts, node.inputs[0])
        offset = facts.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else [0]
        if fill is not None and wins(fill, dtype) and offset is not None:
            return Choice(Condition(right=offset[0] - 1), fill, term)
    tensor = tensor_of(value)
    if (
        tensor is not None
        and 0 < tensor.size <= _LARGEST_CONSTANT
        and tensor.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    ):
        array = tensor.numpy()
        low = float(array.min())
        found = _pattern(array == 0) if wins(low, dtype) and np.all((array == 0) | (array == low)) else None
        if found is not None:
            return Choice(found, low, term)
    return None


def _only_front(facts: Facts, node: ir.Node) -> bool:
    if op_of(node) not in ("Unsqueeze", "Reshape", "Squeeze"):
        return False
    before, after = facts.shape(node.inputs[0]), facts.shape(node.outputs[0])
    return before is not None and after is not None and _leading_ones_differ(before, after)


def _uniform(facts: Facts, value: ir.Value) -> float | None:
    node = value.producer()
    if op_of(node) == "ConstantOfShape":
        fill = attr(node, "value")
        return None if fill in (None, REFERENCE) else float(fill.numpy().reshape(-1)[0])
    return facts.scalar(node.inputs[0])


def reduce_masks(facts: Facts, terms: Sequence[Term], offset: Size, aligned: Sequence[bool]) -> Masks:
    """The masks in the order in which they are applied, with what the operator's attributes can say taken out.

    `offset` is the operator's: the length of the cache that it is given. `aligned` says for each term whether its last
    two axes are the queries and the keys.
    """
    out = Masks()
    for i, (term, in_line) in enumerate(zip(terms, aligned)):
        choice = as_choice(facts, term) if in_line else None
        if choice is None:
            out.steps.append(
                term if term.fill is None else Choice(Condition(rest=[(term.value, term.keep)]), term.fill, term)
            )
            continue
        # A finite number that replaces scores later also replaces -inf, so the condition must stay in its place.
        replaced = any(t.fill is not None and math.isfinite(t.fill) for t in terms[i + 1 :])
        hard = choice.fill == -math.inf and not replaced
        alone = len(terms) == 1 and not choice.condition.rest
        found = choice.condition
        if found.bounded:
            if not ((hard or alone) and _take_bounds(out, found, offset, hard)):
                out.steps.append(
                    term if term.fill is None else Choice(Condition(rest=[(term.value, term.keep)]), term.fill, term)
                )
                continue
        elif term.fill is None and choice.fill != -math.inf and _covers(facts, found, term.value):
            out.steps.append(term)  # nothing to gain
            continue
        if found.rest:
            out.steps.append(Choice(Condition(rest=found.rest), choice.fill, term))
    return out


def fits(fill: float, dtype: ir.DataType) -> bool:
    """The fill stays finite, or -inf, in the type of the attention."""
    with np.errstate(over="ignore"):
        return bool(np.isinf(np.array(fill, dtype.numpy()))) == math.isinf(fill)


def _covers(facts: Facts, found: Condition, value: ir.Value) -> bool:
    """The conditions together are as large as the mask made of them."""
    shape = facts.shape(value)
    together = broadcast((1,), *(facts.shape(v) for v, _ in found.rest)) if found.rest else (1,)
    return together is None or shape is None or together[-len(shape) :] == shape


def _take_bounds(out: Masks, found: Condition, offset: Size, hard: bool) -> bool:
    """Moves bounds into attributes; False where an attribute cannot say them."""
    causal, window_right, window = out.is_causal, out.window_right, out.window
    if found.right is not None:
        beyond = found.right - offset
        if not isinstance(beyond, int) or beyond < 0:
            return False
        if beyond == 0:
            causal = True
        else:
            window_right = beyond if window_right < 0 else min(window_right, beyond)
    if found.left is not None:
        behind = found.left + offset
        if not isinstance(behind, int) or behind < 0 or not hard:  # not hard: a row could be left without a key
            return False
        window = behind if window < 0 else min(window, behind)
    out.is_causal, out.window_right, out.window = causal, window_right, window
    return True


# -- the operator's mask input


def emit(masks: Masks, canonical: Arrangement, dtype: ir.DataType, tape: Tape) -> ir.Value | None:
    """All masks as one tensor that broadcasts to (batch, heads, query, key); None if there is none."""
    if not masks.steps:
        return None
    key = (
        "mask",
        dtype,
        *(_key(step) for step in masks.steps),
        tuple(tuple(f.size for f in axis) for axis in canonical),
    )
    return tape.shared(key, lambda: _emit(masks, canonical, dtype, tape))


def _key(step: Term | Choice) -> tuple[object, ...]:
    term = step if isinstance(step, Term) else step.term
    places = tuple(tuple(f.size for f in axis) for axis in term.arrangement)
    if isinstance(step, Term):
        return (step.value, step.factor, places)
    return (*step.condition.rest, step.fill, term.fill is None, places)


def _emit(masks: Masks, canonical: Arrangement, dtype: ir.DataType, tape: Tape) -> ir.Value:
    def number(x: float) -> ir.Value:
        with np.errstate(over="ignore"):
            return tape.constant(np.array(x, dtype.numpy()))

    added: ir.Value | None = None
    kept: ir.Value | None = None
    for step in masks.steps:
        if isinstance(step, Term):
            value = to_canonical(step.value, step, canonical, tape) if step.make is None else step.make(tape)
            if step.factor != 1.0:
                value = tape.op("Mul", [value, number(step.factor)])
            added = value if added is None else tape.op("Add", [added, value])
            continue
        test: ir.Value | None = None
        for value, wanted in step.condition.rest:
            value = to_canonical(value, step.term, canonical, tape)
            if not wanted:
                value = tape.op("Not", [value])
            test = value if test is None else tape.op("And", [test, value])
        assert test is not None
        if step.fill == -math.inf:
            kept = test if kept is None else tape.op("And", [kept, test])
        elif step.term.fill is None:
            value = tape.op("Where", [test, number(0.0), number(step.fill)])
            added = value if added is None else tape.op("Add", [added, value])
        else:
            if kept is not None:
                added = tape.op("Where", [kept, number(0.0) if added is None else added, number(-math.inf)])
                kept = None
            added = tape.op("Where", [test, number(0.0) if added is None else added, number(step.fill)])
    if added is None:
        assert kept is not None
        return kept
    return added if kept is None else tape.op("Where", [kept, added, number(-math.inf)])


def to_canonical(value: ir.Value, term: Term, target: Arrangement, tape: Tape) -> ir.Value:
    """A tensor that broadcasts to the scores, as one that broadcasts to (batch, heads, query, key)."""
    value = _without_gather(_without_expand(tape.facts, value), tape)
    shape = tape.facts.shape(value)
    have_rank = min(len(shape), len(term.arrangement))
    behind = term.arrangement[len(term.arrangement) - have_rank :]
    if len(shape) > have_rank:  # axes of size 1 in front
        shape = shape[len(shape) - have_rank :]
    have: Arrangement = [axis if size != 1 else [] for axis, size in zip(behind, shape)]
    rank = tape.facts.rank(value)
    # A rank of at most 4 whose axes lie as the operator wants them needs nothing.
    lined = target[len(target) - rank :] if rank == have_rank and rank <= 4 else []
    if lined and all(not axis or same([axis], [want]) for axis, want in zip(have, lined)):
        return value
    unsure = next((size for axis, size in zip(behind, shape) if size not in (1, *sizes([axis]))), None)
    if unsure is not None:
        raise Refused(f"the size {unsure} of the mask {value.name} is not known to be that of the scores", term.node)
    have = [[] for _ in range(rank - have_rank)] + have
    # Batch or head axes that hold some of their factors are written out; axes that hold none stay 1.
    present = {id(f) for f in flat(have)}
    wanted = [list(axis) if any(id(f) in present for f in axis) else [] for axis in target]
    missing = [f for axis in wanted for f in axis if id(f) not in present and f.size != 1]
    if not missing:
        return tape.arrange(value, have, wanted)
    split: Arrangement = [[f] if id(f) in present else [] for f in flat(wanted)]
    value = tape.arrange(value, have, split)
    value = tape.expand(value, tuple(1 if id(f) in present else f.size for f in flat(wanted)))
    return tape.arrange(value, [[f] for f in flat(wanted)], wanted)


def _without_expand(facts: Facts, value: ir.Value) -> ir.Value:
    """The mask in front of Expand and no-ops: the operator broadcasts by itself."""
    while True:
        node = value.producer()
        if node is None or not (op_of(node) == "Expand" or is_no_op(facts, node)):
            return value
        x = node.inputs[0]
        before, after = facts.shape(x), facts.shape(value)
        if (
            before is None
            or after is None
            or len(before) != len(after)
            or any(b not in (1, a) for b, a in zip(before, after))
        ):
            return value
        value = x


_RESHAPES = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Flatten"})


def _behind_reshapes(facts: Facts, value: ir.Value) -> ir.Value:
    """The value whose elements, in the same order, these are."""
    while op_of(value.producer()) in _RESHAPES or (value.producer() is not None and is_no_op(facts, value.producer())):
        value = value.producer().inputs[0]
    return value


def _without_gather(value: ir.Value, tape: Tape) -> ir.Value:
    """The tensor itself, with axes of size 1 put in, where the value holds all its elements in their order.

    PyTorch writes a padding mask as `mask[batch_index, key_index]` with ranges for indices, which is exported as a dozen
    small nodes, some of them on the host.
    """
    facts = tape.facts
    gather = _behind_reshapes(facts, value).producer()
    x = {"Gather": _gathered, "GatherND": _gathered_nd}.get(op_of(gather), lambda facts, node: None)(facts, gather)
    own, shape = facts.shape(x), facts.shape(value)
    if own is None or shape is None or _solid(own) != _solid(shape):
        return value
    factors = [Factor(x.name, d) for d in _solid(own)]
    rest = iter(factors)
    source: Arrangement = [[] if d == 1 else [next(rest)] for d in own]
    rest = iter(factors)
    return tape.arrange(x, source, [[] if d == 1 else [next(rest)] for d in shape])


def _gathered(facts: Facts, gather: ir.Node) -> ir.Value | None:
    """The tensor that a Gather reads in order, at the flat positions `i * columns + j` (TorchScript's export)."""
    data, index = gather.inputs[:2]
    x, position = _behind_reshapes(facts, data), affine(facts, index)
    flat, own, grid = map(facts.shape, (data, x, index))
    if attr(gather, "axis", 0) != 0 or position is None or flat is None or own is None or grid is None:
        return None
    strides: list[Size] = [1]
    for d in _solid(own)[:0:-1]:
        strides.append(strides[-1] * d)
    places = [i for i, d in enumerate(reversed(grid)) if d != 1]
    in_order = position == Affine(tuple(zip(places, strides)), 0)
    return x if in_order and _solid(grid) == _solid(own) and all(d == 1 for d in flat[1:]) else None


def _gathered_nd(facts: Facts, gather: ir.Node) -> ir.Value | None:
    """The tensor that a GatherND reads in order, at ranges that are its indices (the export by torch.export)."""
    x, index = gather.inputs[:2]
    concat, own, grid = index.producer(), facts.shape(x), facts.shape(index)
    if attr(gather, "batch_dims", 0) != 0 or op_of(concat) != "Concat" or own is None or grid is None:
        return None
    if attr(concat, "axis") not in (-1, len(grid) - 1) or len(concat.inputs) != len(own) or 1 in own:
        return None
    places = [i for i, d in enumerate(reversed(grid[:-1]), 1) if d != 1]  # 0 is the axis of the Concat
    wanted = [Affine(((place, 1),), 0) for place in reversed(places)]
    in_order = [affine(facts, part) for part in concat.inputs] == wanted
    return x if in_order and _solid(grid[:-1]) == list(own) else None


def _solid(shape: Sequence[Size]) -> list[Size]:
    return [d for d in shape if d != 1]
