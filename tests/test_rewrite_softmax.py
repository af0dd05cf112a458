"""The softmax rule: any axis, both meanings of the axis, and what it takes in around it."""

from __future__ import annotations

import numpy as np
import pytest
from rewrite_helpers import Graph, check, fused, ops, refused

RNG = np.random.default_rng(3)
X = RNG.standard_normal((2, 3, 4, 5)).astype(np.float32)
F = np.float32


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1, -2, -4, None])
@pytest.mark.parametrize("opset", [11, 13, 17])
def test_axis(op: str, axis: int | None, opset: int) -> None:
    g = Graph(opset=opset, ir_version=6)
    x = g.input("x", F, ["a", "b", "c", 5])
    g.output(g.add(op, x, **({} if axis is None else {"axis": axis})))
    result = check(g.model(), {"x": X})
    (node,) = fused(result.model, "FusedSoftmax")
    assert node.get("log", 0) == (op == "LogSoftmax")
    flattened = opset < 13 and axis not in (3, -1)
    assert ("Reshape" in ops(result.model)) == flattened


def test_axis_after_a_transpose() -> None:
    g = Graph()
    x = g.input("x", F, ["a", "b", "c", "d"])
    g.output(g.add("Transpose", g.add("Softmax", g.add("Transpose", x, perm=[0, 3, 2, 1]), axis=1), perm=[0, 3, 2, 1]))
    check(g.model(), {"x": X})


def test_flattened_axes_of_size_one_are_one_axis() -> None:
    g = Graph(opset=11, ir_version=6)
    g.output(g.add("Softmax", g.input("x", F, ["a", "b", 1, 1])))
    result = check(g.model(), {"x": RNG.standard_normal((2, 7, 1, 1)).astype(F)})
    assert ops(result.model) == ["FusedSoftmax"]


def test_unknown_rank() -> None:
    """The last axis is the last axis whatever the rank; an axis counted from the front needs no rank either."""
    for axis in (-1, 1):
        g = Graph()
        g.output(g.add("Softmax", g.input("x", F, None), axis=axis))
        assert ops(check(g.model(), {"x": X}).model) == ["FusedSoftmax"]


def test_unknown_rank_before_opset_13() -> None:
    g = Graph(opset=11, ir_version=6)
    g.output(g.add("Softmax", g.input("x", F, None), axis=-2))
    refused(g.model(), "softmax", "rank is not known", {"x": X})


def test_scale_and_mask_go_in() -> None:
    g = Graph()
    x = g.input("x", F, ["a", "b", "c", "d"])
    m = g.input("m", F, ["c", "d"])
    g.output(g.add("Softmax", g.add("Add", g.add("Mul", x, F(0.3)), m), axis=-1))
    result = check(g.model(), {"x": X, "m": RNG.standard_normal((4, 5)).astype(F)})
    (node,) = fused(result.model, "FusedSoftmax")
    assert node["scale"] == pytest.approx(0.3) and node["inputs"] == ["x", "m"]
    assert ops(result.model) == ["FusedSoftmax"]


@pytest.mark.parametrize("drop", [False, True])
def test_boolean_mask_and_guard(drop: bool) -> None:
    g = Graph()
    x = g.input("x", F, ["a", "b", "c", "d"])
    m = g.input("m", bool, ["a", 1, 1, "d"])
    low = F(-np.inf)
    y = g.add("Softmax", g.add("Where", m, low, x) if drop else g.add("Where", m, x, low), axis=-1)
    g.output(g.add("Where", g.add("IsNaN", y), F(0), y))
    mask = RNG.random((2, 1, 1, 5)) < 0.5
    mask[1] = drop
    result = check(g.model(), {"x": X, "m": mask})
    assert len(fused(result.model, "FusedSoftmax")) == 1
    assert not {"Where", "IsNaN"} & set(ops(result.model))


def test_mask_that_makes_the_tensor_larger_stays_outside() -> None:
    g = Graph()
    x = g.input("x", F, ["b", "c", "d"])
    m = g.input("m", F, ["a", 1, 1, "d"])
    g.output(g.add("Softmax", g.add("Add", x, m), axis=-1))
    result = check(g.model(), {"x": X[0], "m": RNG.standard_normal((6, 1, 1, 5)).astype(F)})
    assert ops(result.model) == ["Add", "FusedSoftmax"]


def test_scaled_tensor_with_another_user_stays() -> None:
    g = Graph()
    s = g.add("Mul", g.input("x", F, ["a", "b", "c", "d"]), F(0.3))
    g.output(g.add("Softmax", s, axis=-1))
    g.output(s)
    assert ops(check(g.model(), {"x": X}).model) == ["Mul", "FusedSoftmax"]


def test_half_precision() -> None:
    g = Graph()
    g.output(g.add("Softmax", g.input("x", np.float16, ["a", "b", "c", "d"]), axis=2), np.float16)
    check(g.model(), {"x": X.astype(np.float16)}, bound=4e-3)


def test_double_precision_is_refused() -> None:
    g = Graph()
    g.output(g.add("Softmax", g.input("x", np.float64, ["a", "b"]), axis=1), np.float64)
    refused(g.model(), "softmax", "DOUBLE", {"x": X[0, 0].astype(np.float64)})
