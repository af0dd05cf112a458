"""What is derived about shapes: symbolic arithmetic, the algebra of axes, and shape inference through shape arithmetic."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from rewrite_helpers import Graph

from ortplugins.rewrite.facts import Facts, broadcast_dim
from ortplugins.rewrite.layout import Factor, flat, regroup, same
from ortplugins.rewrite.symbolic import Dim, exact_div

A, B = Dim.symbol("a"), Dim.symbol("b")


def test_sizes_are_equal_when_their_formulas_are() -> None:
    assert A + B == B + A and A * (B + 1) == A * B + A
    assert A - A == 0 and (A + 3) - A == 3
    assert A != B and A != A + 1 and A * 2 != A
    assert hash(A * B) == hash(B * A)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (12, 4, 3), (12, 5, None), (12, 0, None), (A * 12, 4, A * 3), (A * B, A, B), (A, A, 1), (A, B, None),
        (A * 6 + 3, 3, A * 2 + 1), (A * B + A, A, B + 1), (A * B + A, B + 1, A), (A + 1, A, None), (A * 3, 2, None),
    ],
)  # fmt: skip
def test_exact_division(a: object, b: object, expected: object) -> None:
    assert exact_div(a, b) == expected


def test_known_signs() -> None:
    assert A.nonnegative and not A.positive and (A + 1).positive
    assert not (A - 1).nonnegative


def test_broadcast_sizes() -> None:
    assert broadcast_dim(1, A) == A and broadcast_dim(A, A) == A and broadcast_dim(A, 5) == 5
    assert broadcast_dim(A, B) not in (A, B), "either may be 1"


def test_regroup_splits_and_joins() -> None:
    rows, d = Factor("x", A * 12), Factor("d", 64)
    split = regroup([[rows], [d]], (A, 12, 64))
    assert [len(axis) for axis in split] == [1, 1, 1]
    assert [f.size for f in flat(split)] == [A, 12, 64]
    assert same(regroup(split, (A * 12, 64)), [[rows], [d]])


def test_regroup_refuses_what_it_does_not_know() -> None:
    assert regroup([[Factor("x", A)], [Factor("d", 64)]], (B, 64)) is None
    assert regroup([[Factor("x", 10)], [Factor("d", 64)]], (4, 160)) is None


def _facts(g: Graph) -> tuple[Facts, dict[str, ir.Value]]:
    model = ir.from_proto(g.model())
    facts = Facts(model.graph)
    facts.learn()
    return facts, {v.name: v for n in model.graph for v in n.outputs}


def test_reshape_by_shape_arithmetic() -> None:
    """Heads split by a target that is put together at run time, as the classic exporter does it for each layer."""
    g = Graph()
    x = g.input("x", np.float32, ["batch", "seq", 48])
    sizes = [g.add("Unsqueeze", g.add("Gather", g.add("Shape", x), np.array(i)), np.array([0])) for i in range(2)]
    target = g.add("Concat", *sizes, np.array([4]), g.add("Div", np.array([48]), np.array([4])), axis=0)
    y = g.add("Reshape", x, target)
    g.output(y, np.float32, ["batch", "seq", 4, 12])
    facts, values = _facts(g)
    assert facts.shape(values[y]) == (Dim.symbol("batch"), Dim.symbol("seq"), 4, 12)


def test_slices() -> None:
    g = Graph()
    x = g.input("x", np.float32, ["batch", "seq"])
    length = g.add("Gather", g.add("Shape", x), np.array([1]))
    cases = {
        g.add("Slice", np.zeros((1, 64), np.float32), np.array([0]), length, np.array([1])): (
            1,
            Dim.symbol("min(64,seq)"),
        ),
        g.add("Slice", x, np.array([0]), length, np.array([1])): (Dim.symbol("batch"), Dim.symbol("seq")),
        g.add("Slice", x, np.array([2]), np.array([2**63 - 1]), np.array([1])): None,
        g.add("Slice", x, np.array([-1]), np.array([2**63 - 1]), np.array([0])): None,
    }
    g.output(g.add("Identity", x), np.float32, ["batch", "seq"])
    facts, values = _facts(g)
    for name, expected in cases.items():
        shape = facts.shape(values[name])
        if expected is None:
            assert shape != (Dim.symbol("batch"), Dim.symbol("seq")), "the axis may be shorter than the slice"
        else:
            assert shape == expected
