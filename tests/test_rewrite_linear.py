"""The linear rule: biases, residuals and every spelling of the activations; near misses with their reasons."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from rewrite_helpers import Graph, check, fused, ops, refused, sites

M, K, N = 6, 16, 10
RNG = np.random.default_rng(11)
X = {"x": RNG.standard_normal((2, M, K)).astype(np.float32)}
F = np.float32

Spelling = Callable[[Graph, str], str]


def _erf(g: Graph, x: str, divide: bool = True) -> str:
    inner = g.add("Div", x, F(math.sqrt(2))) if divide else g.add("Mul", x, F(math.sqrt(0.5)))
    return g.add("Add", g.add("Erf", inner), F(1))


def _tanh(g: Graph, x: str, cube: str) -> str:
    inner = g.add("Mul", F(math.sqrt(2 / math.pi)), g.add("Add", x, g.add("Mul", F(0.044715), cube)))
    return g.add("Add", F(1), g.add("Tanh", inner))


SPELLINGS: dict[str, tuple[str, Spelling]] = {
    "relu": ("relu", lambda g, x: g.add("Relu", x)),
    "max": ("relu", lambda g, x: g.add("Max", x, F(0))),
    "erf x*(erf+1)*0.5": ("gelu", lambda g, x: g.add("Mul", g.add("Mul", x, _erf(g, x)), F(0.5))),
    "erf x*(0.5*(erf+1))": ("gelu", lambda g, x: g.add("Mul", x, g.add("Mul", F(0.5), _erf(g, x)))),
    "erf (0.5*x)*(erf+1)": ("gelu", lambda g, x: g.add("Mul", g.add("Mul", x, F(0.5)), _erf(g, x, False))),
    "erf /2": ("gelu", lambda g, x: g.add("Div", g.add("Mul", x, _erf(g, x, False)), F(2))),
    "tanh pow": ("gelu_tanh", lambda g, x: g.add("Mul", g.add("Mul", F(0.5), x), _tanh(g, x, g.add("Pow", x, F(3))))),
    "tanh x*x*x": (
        "gelu_tanh",
        lambda g, x: g.add("Mul", F(0.5), g.add("Mul", x, _tanh(g, x, g.add("Mul", x, g.add("Mul", x, x))))),
    ),
    "sigmoid": ("silu", lambda g, x: g.add("Mul", x, g.add("Sigmoid", x))),
    "sigmoid by exp": ("silu", lambda g, x: g.add("Div", x, g.add("Add", F(1), g.add("Exp", g.add("Neg", x))))),
    "quick": ("quick_gelu", lambda g, x: g.add("Mul", x, g.add("Sigmoid", g.add("Mul", x, F(1.702))))),
    "quick, other order": ("quick_gelu", lambda g, x: g.add("Mul", g.add("Sigmoid", g.add("Mul", F(1.702), x)), x)),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SPELLINGS)
def test_activation(name: str, bias: bool) -> None:
    activation, spell = SPELLINGS[name]
    g = Graph()
    y = g.add("MatMul", g.input("x", F, ["batch", "rows", K]), g.weight(K, N))
    if bias:
        y = g.add("Add", g.weight(N), y)
    g.output(spell(g, y))
    result = check(g.model(), X)
    assert [n["activation"] for n in fused(result.model, "FusedGemm")] == [activation]
    assert ops(result.model) == ["FusedGemm"]


def test_weight_and_bias_behind_identity() -> None:
    """PyTorch's exporter writes one of several equal initialisers, and Identity for the others."""
    g = Graph()
    weight, bias = (g.add("Identity", g.add("Identity", w)) for w in (g.weight(K, N), g.weight(N)))
    g.output(g.add("Relu", g.add("Add", g.add("MatMul", g.input("x", F, ["batch", "rows", K]), weight), bias)))
    (node,) = fused(check(g.model(), X).model, "FusedGemm")
    assert node["activation"] == "relu" and len(node["inputs"]) == 3


@pytest.mark.parametrize(("approximate", "activation"), [("none", "gelu"), ("tanh", "gelu_tanh")])
def test_gelu_operator(approximate: str, activation: str) -> None:
    g = Graph(opset=20, ir_version=9)
    y = g.add("Add", g.add("MatMul", g.input("x", F, ["batch", "rows", K]), g.weight(K, N)), g.weight(N))
    g.output(g.add("Gelu", y, approximate=approximate))
    assert [n["activation"] for n in fused(check(g.model(), X).model, "FusedGemm")] == [activation]


NEAR: dict[str, Spelling] = {
    "erf without the half": lambda g, x: g.add("Mul", x, _erf(g, x)),
    "another slope": lambda g, x: g.add("Mul", x, g.add("Sigmoid", g.add("Mul", x, F(1.6)))),
    "another cube": lambda g, x: g.add("Mul", g.add("Mul", F(0.5), x), _tanh(g, x, g.add("Pow", x, F(2)))),
    "leaky": lambda g, x: g.add("LeakyRelu", x, alpha=0.1),
    "relu6": lambda g, x: g.add("Clip", x, F(0), F(6)),
    "tanh": lambda g, x: g.add("Tanh", x),
    "gated": lambda g, x: g.add("Mul", x, g.add("Sigmoid", g.add("Mul", x, np.linspace(0.5, 2, N, dtype=F)))),
}


@pytest.mark.parametrize("name", NEAR)
def test_other_functions_are_left(name: str) -> None:
    g = Graph()
    y = g.add("Add", g.add("MatMul", g.input("x", F, ["batch", "rows", K]), g.weight(K, N)), g.weight(N))
    g.output(NEAR[name](g, y))
    result = check(g.model(), X)
    (node,) = fused(result.model, "FusedGemm")
    assert "activation" not in node
    assert len(node["inputs"]) == 3, "the bias is still taken in"


def test_intermediate_that_is_used_elsewhere_stops_the_chain() -> None:
    g = Graph()
    y = g.add("Add", g.add("MatMul", g.input("x", F, ["batch", "rows", K]), g.weight(K, N)), g.weight(N))
    s = g.add("Sigmoid", y)
    g.output(g.add("Mul", y, s))
    g.output(s)
    (node,) = fused(check(g.model(), X).model, "FusedGemm")
    assert "activation" not in node


def test_residual_and_activation() -> None:
    g = Graph()
    x = g.input("x", F, ["batch", "rows", K])
    y = g.add("Add", g.add("MatMul", x, g.weight(K, K)), g.weight(K))
    g.output(g.add("Relu", g.add("Add", x, y)))
    result = check(g.model(), X)
    (node,) = fused(result.model, "FusedGemm")
    assert node["inputs"][3] == "x" and node["activation"] == "relu"
    assert ops(result.model) == ["FusedGemm"]


def test_activation_before_the_residual_keeps_the_add() -> None:
    g = Graph()
    x = g.input("x", F, ["batch", "rows", K])
    g.output(g.add("Add", x, g.add("Relu", g.add("MatMul", x, g.weight(K, K)))))
    assert ops(check(g.model(), X).model) == ["FusedGemm", "Add"]


def test_residual_that_broadcasts_is_left() -> None:
    g = Graph()
    x = g.input("x", F, ["batch", "rows", K])
    r = g.input("r", F, ["rows", K])
    g.output(g.add("Add", g.add("MatMul", x, g.weight(K, K)), r))
    assert ops(check(g.model(), {**X, "r": RNG.standard_normal((M, K)).astype(F)}).model) == ["FusedGemm", "Add"]


def test_two_products_added() -> None:
    g = Graph()
    x = g.input("x", F, ["batch", "rows", K])
    g.output(g.add("Add", g.add("MatMul", x, g.weight(K, N)), g.add("MatMul", x, g.weight(K, N))))
    assert ops(check(g.model(), X).model) == ["FusedGemm", "FusedGemm"]


def test_factors_are_folded() -> None:
    """2 * (x w + b), as for queries scaled inside the projection."""
    g = Graph()
    y = g.add("Add", g.add("MatMul", g.input("x", F, ["batch", "rows", K]), g.weight(K, N)), g.weight(N))
    g.output(g.add("Mul", y, F(2)))
    (node,) = fused(check(g.model(), X).model, "FusedGemm")
    assert node["alpha"] == node["beta"] == 2.0


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("bias", [None, (N,), (1, N), (M, 1), (M, N), ()])
def test_gemm(trans_a: int, trans_b: int, bias: tuple[int, ...] | None) -> None:
    g = Graph()
    x = g.input("x", F, [K, M] if trans_a else [M, K])
    w = g.weight(*((N, K) if trans_b else (K, N)))
    inputs = [x, w] if bias is None else [x, w, g.const(RNG.standard_normal(bias), F)]
    g.output(g.add("Gemm", *inputs, transA=trans_a, transB=trans_b, alpha=0.5, beta=0.25))
    result = check(g.model(), {"x": RNG.standard_normal((K, M) if trans_a else (M, K)).astype(F)})
    (node,) = fused(result.model, "FusedGemm")
    assert "transB" not in node, "a weight of its own is transposed once, at rewriting"


def test_gemm_between_reshapes() -> None:
    g = Graph()
    x = g.input("x", F, ["batch", "rows", K])
    flat = g.add("Reshape", x, np.array([-1, K]))
    y = g.add("Gemm", flat, g.weight(K, N), g.weight(N))
    sizes = g.add("Shape", x)
    target = g.add("Concat", g.add("Slice", sizes, np.array([0]), np.array([2])), np.array([N]), axis=0)
    g.output(g.add("Relu", g.add("Reshape", y, target)))
    result = check(g.model(), X)
    assert ops(result.model) == ["FusedGemm"]


def test_gemm_reshaped_to_something_else_keeps_its_reshapes() -> None:
    g = Graph()
    x = g.input("x", F, ["batch", "rows", K])
    y = g.add("Gemm", g.add("Reshape", x, np.array([-1, K])), g.weight(K, N), g.weight(N))
    g.output(g.add("Reshape", y, np.array([-1, 2, N // 2])))
    assert ops(check(g.model(), X).model) == ["Reshape", "FusedGemm", "Reshape"]


def test_shared_weight_is_transposed_by_the_operator() -> None:
    """A tied embedding is not doubled: the product reads it transposed."""
    g = Graph()
    ids = g.input("ids", np.int64, ["batch", "rows"])
    table = g.weight(N, K)
    h = g.add("Gather", table, ids)
    g.output(g.add("MatMul", h, g.add("Transpose", table, perm=[1, 0])))
    result = check(g.model(), {"ids": RNG.integers(0, N, (2, M))})
    (node,) = fused(result.model, "FusedGemm")
    assert node["transB"] == 1
    assert len(result.model.graph.initializer) == 1


def test_weight_shared_by_products() -> None:
    g = Graph()
    x = g.input("x", F, ["batch", "rows", K])
    w = g.weight(K, K)
    g.output(g.add("MatMul", g.add("Relu", g.add("MatMul", x, w)), w))
    result = check(g.model(), X)
    first, second = fused(result.model, "FusedGemm")
    assert first["inputs"][1] == second["inputs"][1]
    assert len(result.model.graph.initializer) == 1


def test_weight_that_callers_may_override_is_refused() -> None:
    g = Graph(ir_version=8)
    x = g.input("x", F, ["batch", "rows", K])
    w = g.weight(K, N)
    g.input(w, F, [K, N])
    g.output(g.add("MatMul", x, w))
    result = check(g.model(), X)
    assert not sites(result, "linear")


def test_computed_weight_is_refused() -> None:
    g = Graph()
    x = g.input("x", F, [M, K])
    w = g.add("Relu", g.input("w", F, [K, N]))
    g.output(g.add("Gemm", x, w))
    refused(g.model(), "linear", "computed in the graph", {"x": X["x"][0], "w": RNG.standard_normal((K, N)).astype(F)})


def test_quantised_product_is_refused() -> None:
    g = Graph()
    x = g.input("x", F, [M, K])
    q = g.add("QuantizeLinear", x, F(0.05), np.array(3, np.uint8))
    a = g.add("DequantizeLinear", q, F(0.05), np.array(3, np.uint8))
    w = g.add("DequantizeLinear", g.const(RNG.integers(-100, 100, (K, N)), np.int8), F(0.02), np.array(0, np.int8))
    g.output(g.add("MatMul", a, w))
    site = refused(g.model(), "linear", "quantised graph", {"x": X["x"][0]})
    assert site.fault is not None


def test_double_precision_is_refused() -> None:
    g = Graph()
    x = g.input("x", np.float64, [M, K])
    g.output(g.add("MatMul", x, g.const(RNG.standard_normal((K, N)), np.float64)), np.float64)
    refused(g.model(), "linear", "DOUBLE", {"x": X["x"][0].astype(np.float64)})


def test_vector_on_the_left_is_refused() -> None:
    g = Graph()
    g.output(g.add("MatMul", g.input("x", F, [K]), g.weight(K, N)))
    refused(g.model(), "linear", "a vector", {"x": X["x"][0, 0]})


def test_unknown_rank_is_refused() -> None:
    g = Graph()
    g.output(g.add("MatMul", g.input("x", F, None), g.weight(K, N)))
    refused(g.model(), "linear", "rank of x is not known", X)


def test_half_precision() -> None:
    g = Graph()
    x = g.input("x", np.float16, ["batch", "rows", K])
    w = g.const(RNG.standard_normal((K, N)) * 0.3, np.float16)
    y = g.add("Add", g.add("MatMul", x, w), g.const(RNG.standard_normal(N), np.float16))
    g.output(g.add("Mul", y, g.add("Sigmoid", y)), np.float16)
    result = check(g.model(), {"x": X["x"].astype(np.float16)}, bound=4e-3)
    assert ops(result.model) == ["FusedGemm"]


@pytest.mark.parametrize("shape", [(0, M, K), (2, 0, K)])
def test_empty_batches(shape: tuple[int, ...]) -> None:
    g = Graph()
    y = g.add("Add", g.add("MatMul", g.input("x", F, ["batch", "rows", K]), g.weight(K, N)), g.weight(N))
    g.output(g.add("Relu", y))
    check(g.model(), {"x": np.zeros(shape, F)})
