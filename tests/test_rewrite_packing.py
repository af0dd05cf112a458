"""Queries, keys and values in one tensor: where the rewriter finds or makes it, and where it must not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from rewrite_helpers import Graph, check, fused, ops

B, S, N, D = 2, 7, 3, 8
W = N * D


def _input(g: Graph, width: int = W) -> str:
    return g.input("x", np.float32, ["batch", "seq", width])


def _values(width: int = W, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal((B, S, width)).astype(np.float32)}


def _attend(g: Graph, q: str, k: str, v: str) -> str:
    """Of (batch, heads, sequence, dim) operands."""
    scores = g.add("Mul", g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2])), np.float32(0.3))
    return g.add("MatMul", g.add("Softmax", scores, axis=-1), v)


def _projections(g: Graph, x: str, *, bias: Callable[[int], bool] = lambda i: True) -> list[str]:
    out = []
    for i in range(3):
        y = g.add("MatMul", x, g.weight(W, W))
        out.append(g.add("Add", y, g.weight(W)) if bias(i) else y)
    return out


@pytest.mark.parametrize("biases", [(), (0, 1, 2), (0, 2)], ids=["no_bias", "bias", "bias_but_for_keys"])
def test_projections_of_one_input_are_joined(biases: tuple[int, ...]) -> None:
    g = Graph()
    x = _input(g)
    q, k, v = _projections(g, x, bias=lambda i: i in biases)
    g.output(g.merge(_attend(g, *(g.heads(t, N, D) for t in (q, k, v))), W))
    result = check(g.model(), _values())
    (gemm,) = fused(result.model, "FusedGemm")
    (attention,) = fused(result.model, "FusedAttention")
    weights = {t.name: tuple(t.dims) for t in result.model.graph.initializer}
    assert weights[gemm["inputs"][1]] == (W, 3 * W)
    assert (len(gemm["inputs"]) == 3) == bool(biases)
    assert attention["layout"] == "BS3NH" and len(set(attention["inputs"])) == 1
    assert ops(result.model) == ["FusedGemm", "Constant", "Reshape", "FusedAttention"]
    assert result.report.packed == 1
    assert [s.status for s in result.report.select("linear")] == ["fused"] * 3


@pytest.mark.parametrize("early", [False, True], ids=["asked_last", "asked_first"])
def test_result_whose_shape_is_asked_for(early: bool) -> None:
    """Who asks for the shape of what goes is none of its readers, wherever it stands among them."""
    g = Graph()
    x = g.add("Reshape", g.add("MatMul", _input(g), g.weight(W, 3 * W)), np.array([0, 0, 3, N, D]))
    parts = [g.add("Gather", g.add("Transpose", x, perm=[2, 0, 3, 1, 4]), np.array(i), axis=0) for i in range(3)]
    y = _attend(g, *parts)
    sizes = g.add("Shape", y) if early else None
    out = g.merge(y, W)
    g.output(out)
    g.output(g.add("Gather", sizes or g.add("Shape", y), np.array(2)), np.int64, [])
    result = check(g.model(), _values())
    assert fused(result.model, "FusedAttention")[0]["layout"] == "BS3NH"


def test_projections_that_something_else_reads_stay_apart() -> None:
    g = Graph()
    x = _input(g)
    q, k, v = _projections(g, x)
    g.output(g.merge(_attend(g, *(g.heads(t, N, D) for t in (q, k, v))), W))
    g.output(g.add("Relu", k), shape=["batch", "seq", W])
    result = check(g.model(), _values())
    assert len(fused(result.model, "FusedGemm")) == 3 and result.report.packed == 0


def test_projections_of_two_inputs_stay_apart() -> None:
    g = Graph()
    x = _input(g)
    memory = g.input("memory", np.float32, ["batch", "seq", W])
    q, k, v = (g.add("MatMul", t, g.weight(W, W)) for t in (x, memory, memory))
    g.output(g.merge(_attend(g, *(g.heads(t, N, D) for t in (q, k, v))), W))
    result = check(g.model(), {**_values(), "memory": _values(seed=1)["x"]})
    assert len(fused(result.model, "FusedGemm")) == 3 and result.report.packed == 0


def test_projections_with_different_factors_stay_apart() -> None:
    g = Graph()
    x = _input(g)
    q, k, v = (g.add("MatMul", x, g.weight(W, W)) for _ in range(3))
    v = g.add("Mul", v, np.float32(0.5))  # becomes alpha of this product alone
    g.output(g.merge(_attend(g, *(g.heads(t, N, D) for t in (q, k, v))), W))
    result = check(g.model(), _values())
    assert len(fused(result.model, "FusedGemm")) == 3 and result.report.packed == 0


@pytest.mark.parametrize("early", [False, True], ids=["split_first", "heads_first"])
def test_split_projection(early: bool) -> None:
    """GPT-2: one product, split along its columns."""
    g = Graph(opset=13)
    x = _input(g)
    parts = g.add("Split", g.add("MatMul", x, g.weight(W, 3 * W)), np.array([W] * 3), outputs=3, axis=2)
    if early:
        parts = [g.add("Reshape", p, np.array([0, 0, N, D])) for p in parts]
        heads = [g.add("Transpose", p, perm=[0, 2, 1, 3]) for p in parts]
    else:
        heads = [g.heads(p, N, D) for p in parts]
    g.output(g.merge(_attend(g, *heads), W))
    result = check(g.model(), _values())
    assert "Split" not in ops(result.model)
    assert fused(result.model, "FusedAttention")[0]["layout"] == "BS3NH"


def test_split_in_another_order_stays() -> None:
    g = Graph(opset=13)
    x = _input(g)
    k, q, v = g.add("Split", g.add("MatMul", x, g.weight(W, 3 * W)), np.array([W] * 3), outputs=3, axis=2)
    g.output(g.merge(_attend(g, *(g.heads(t, N, D) for t in (q, k, v))), W))
    result = check(g.model(), _values())
    assert "Split" in ops(result.model) and result.report.packed == 0


@pytest.mark.parametrize(
    ("shape", "axis", "layout"), [((3, N, D), 2, "BS3NH"), ((N, 3, D), 3, "BSN3H")], ids=["parts_first", "heads_first"]
)
def test_gathered_parts(shape: tuple[int, ...], axis: int, layout: str) -> None:
    """BLOOM keeps the three parts of a head together, others the heads of a part."""
    g = Graph()
    x = g.add("Reshape", g.add("MatMul", _input(g), g.weight(W, 3 * W)), np.array([0, 0, *shape]))
    parts = [g.add("Gather", x, np.array(i), axis=axis) for i in range(3)]
    g.output(g.merge(_attend(g, *(g.add("Transpose", p, perm=[0, 2, 1, 3]) for p in parts)), W))
    result = check(g.model(), _values())
    assert fused(result.model, "FusedAttention")[0]["layout"] == layout
    assert not {"Gather", "Transpose"} & set(ops(result.model))


@pytest.mark.parametrize("split", [False, True], ids=["gather", "split_and_squeeze"])
def test_parts_in_front(split: bool) -> None:
    """Vision transformers bring the three parts to the front and take them apart there."""
    g = Graph(opset=13)
    x = g.add("Reshape", g.add("MatMul", _input(g), g.weight(W, 3 * W)), np.array([0, 0, 3, N, D]))
    x = g.add("Transpose", x, perm=[2, 0, 3, 1, 4])
    if split:
        parts = [g.add("Squeeze", p, np.array([0])) for p in g.add("Split", x, np.array([1, 1, 1]), outputs=3, axis=0)]
    else:
        parts = [g.add("Gather", x, np.array(i), axis=0) for i in range(3)]
    g.output(g.merge(_attend(g, *parts), W))
    result = check(g.model(), _values())
    assert fused(result.model, "FusedAttention")[0]["layout"] == "BS3NH"
    assert not {"Gather", "Split", "Transpose"} & set(ops(result.model))


def test_parts_in_another_order_stay() -> None:
    g = Graph()
    x = g.add("Reshape", g.add("MatMul", _input(g), g.weight(W, 3 * W)), np.array([0, 0, 3, N, D]))
    parts = [g.add("Gather", x, np.array(i), axis=2) for i in (0, 2, 1)]
    g.output(g.merge(_attend(g, *(g.add("Transpose", p, perm=[0, 2, 1, 3]) for p in parts)), W))
    result = check(g.model(), _values())
    assert result.report.packed == 0
