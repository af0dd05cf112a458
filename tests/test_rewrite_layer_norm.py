"""The norm rule: every spelling of LayerNorm and RMSNorm, the sums in front, and near misses with their reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from rewrite_helpers import CORPUS, Graph, check, corpus, fused, ops, refused, sites

from ortplugins.rewrite import rewrite

C = 12
F = np.float32
H = np.float16
RNG = np.random.default_rng(5)
X = RNG.standard_normal((2, 5, C)).astype(F) + 0.5
R = RNG.standard_normal((2, 5, C)).astype(F)
GAMMA = (1 + 0.2 * RNG.standard_normal(C)).astype(F)
BETA = RNG.standard_normal(C).astype(F)
SHAPE = ["batch", "seq", C]
MS = "com.microsoft"


def mean(g: Graph, x: str, axes: tuple[int, ...] = (-1,), keepdims: int = 1) -> str:
    return g.add("ReduceMean", x, axes=list(axes), keepdims=keepdims)


def norm(
    g: Graph,
    x: str,
    rms: bool = False,
    square: str = "Pow",
    divide: str = "Div",
    axes: tuple[int, ...] = (-1,),
    epsilon: float = 1e-5,
    subs: int = 1,
    dtype: Any = F,
) -> str:
    """The norm without factor and offset."""
    centred = [x if rms else g.add("Sub", x, mean(g, x, axes)) for _ in range(subs)]
    squared = g.add("Pow", centred[0], dtype(2)) if square == "Pow" else g.add("Mul", centred[0], centred[0])
    inner = g.add("Add", mean(g, squared, axes), dtype(epsilon))
    if divide == "Pow":
        return g.add("Mul", centred[-1], g.add("Pow", inner, dtype(-0.5)))
    root = g.add("Pow", inner, dtype(0.5)) if divide == "Pow and Div" else g.add("Sqrt", inner)
    if divide == "Reciprocal":
        return g.add("Mul", g.add("Reciprocal", root), centred[-1])
    if divide == "1 / root":
        return g.add("Mul", centred[-1], g.add("Div", dtype(1), root))
    return g.add("Div", centred[-1], root)


def affine(g: Graph, y: str, beta: bool = True) -> str:
    y = g.add("Mul", y, GAMMA)
    return g.add("Add", y, BETA) if beta else y


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("square", ["Pow", "Mul"])
@pytest.mark.parametrize("divide", ["Div", "Reciprocal", "1 / root", "Pow", "Pow and Div"])
def test_written_out(rms: bool, square: str, divide: str) -> None:
    g = Graph()
    g.output(affine(g, norm(g, g.input("x", F, SHAPE), rms, square, divide, epsilon=1e-3)))
    result = check(g.model(), {"x": X})
    assert ops(result.model) == ["FusedLayerNorm"]
    (node,) = fused(result.model, "FusedLayerNorm")
    assert node.get("norm", "layer_norm") == ("rms_norm" if rms else "layer_norm")
    assert node["epsilon"] == pytest.approx(1e-3)
    assert len([i for i in node["inputs"] if i]) == 3


def test_two_subtractions() -> None:
    g = Graph()
    g.output(affine(g, norm(g, g.input("x", F, SHAPE), subs=2)))
    assert ops(check(g.model(), {"x": X}).model) == ["FusedLayerNorm"]


def test_axes_that_are_not_one() -> None:
    g = Graph()
    y = norm(g, g.input("x", F, ["batch", 5, C]), axes=(1, 2))
    g.output(g.add("Mul", y, RNG.standard_normal((5, C)).astype(F)))
    (node,) = fused(check(g.model(), {"x": X}).model, "FusedLayerNorm")
    assert node["axis"] == -2


@pytest.mark.parametrize("shape", [(), (1,), (1, C), (1, 1, C), (1, 1, 1)])
def test_constant_factors_are_given_the_shape_of_the_columns(shape: tuple[int, ...]) -> None:
    g = Graph()
    y = norm(g, g.input("x", F, SHAPE))
    g.output(g.add("Add", g.add("Mul", y, np.full(shape, 1.5, F)), RNG.standard_normal(shape).astype(F)))
    assert ops(check(g.model(), {"x": X}).model) == ["FusedLayerNorm"]


def test_factor_for_each_row_stays_outside() -> None:
    g = Graph()
    y = norm(g, g.input("x", F, SHAPE))
    g.output(g.add("Mul", y, g.input("scale", F, ["batch", 1, C])))
    result = check(g.model(), {"x": X, "scale": R[:, :1]})
    assert ops(result.model) == ["FusedLayerNorm", "Mul"]


def test_factor_that_is_computed() -> None:
    g = Graph()
    y = norm(g, g.input("x", F, SHAPE), rms=True)
    g.output(g.add("Mul", y, g.add("Add", g.input("w", F, [C]), F(1))))
    assert ops(check(g.model(), {"x": X, "w": GAMMA}).model) == ["Add", "FusedLayerNorm"]


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("axis", [-1, 2, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_normalization(opset: int, axis: int, bias: bool) -> None:
    g = Graph(opset=opset, ir_version=8)
    x = g.input("x", F, ["batch", 5, C])
    shape = X.shape[axis:]
    operands = [RNG.standard_normal(shape).astype(F) for _ in range(1 + bias)]
    g.output(g.add("LayerNormalization", x, *operands, axis=axis, epsilon=1e-4))
    assert ops(check(g.model(), {"x": X}).model) == ["FusedLayerNorm"]


def test_rms_normalization() -> None:
    g = Graph(opset=23, ir_version=10)
    g.output(g.add("RMSNormalization", g.input("x", F, SHAPE), GAMMA, epsilon=1e-4))
    (node,) = fused(check(g.model(), {"x": X}).model, "FusedLayerNorm")
    assert node["norm"] == "rms_norm"


def test_neutral_operands_are_dropped() -> None:
    g = Graph()
    g.output(g.add("LayerNormalization", g.input("x", F, SHAPE), np.ones(C, F), np.zeros(C, F)))
    (node,) = fused(check(g.model(), {"x": X}).model, "FusedLayerNorm")
    assert node["inputs"] == ["x"]


def test_unknown_rank() -> None:
    g = Graph()
    g.output(g.add("LayerNormalization", g.input("x", F, None), GAMMA, BETA))
    assert ops(check(g.model(), {"x": X}).model) == ["FusedLayerNorm"]


# -- sums in front


@pytest.mark.parametrize("shape", [(2, 5, C), (1, 5, C), (5, C), (1, 1, C), (C,)])
@pytest.mark.parametrize("swapped", [False, True])
def test_residual(shape: tuple[int, ...], swapped: bool) -> None:
    g = Graph()
    x, r = g.input("x", F, [2, 5, C]), g.input("r", F, shape)
    g.output(g.add("LayerNormalization", g.add("Add", *((r, x) if swapped else (x, r))), GAMMA, BETA))
    result = check(g.model(), {"x": X, "r": RNG.standard_normal(shape).astype(F)})
    assert ops(result.model) == ["FusedLayerNorm"]
    assert len(fused(result.model, "FusedLayerNorm")[0]["outputs"]) == 1


@pytest.mark.parametrize("as_output", [False, True])
def test_sum_that_is_used_elsewhere_is_an_output(as_output: bool) -> None:
    g = Graph()
    x, r = g.input("x", F, SHAPE), g.input("r", F, SHAPE)
    s = g.add("Add", x, r)
    early = g.add("Tanh", s)
    y = g.add("LayerNormalization", s, GAMMA, BETA)
    g.output(g.add("Add", early, y))
    if as_output:
        g.output(s)
    result = check(g.model(), {"x": X, "r": R})
    assert sorted(ops(result.model)) == ["Add", "FusedLayerNorm", "Tanh"]
    (node,) = fused(result.model, "FusedLayerNorm")
    assert len(node["outputs"]) == 2 and node["plugin_outputs"] == 2


def test_shape_of_the_sum_is_asked_in_front() -> None:
    """The shape is computed from the graph's inputs, and the sum needs no second output for it."""
    g = Graph()
    x, r = g.input("x", F, SHAPE), g.input("r", F, SHAPE)
    s = g.add("Add", x, r)
    shape = g.add("Shape", s)
    g.output(g.add("Reshape", g.add("LayerNormalization", s, GAMMA, BETA), shape), shape=SHAPE)
    result = check(g.model(), {"x": X, "r": R})
    (node,) = fused(result.model, "FusedLayerNorm")
    assert node["inputs"][:2] == ["x", "r"] and len(node["outputs"]) == 1


@pytest.mark.parametrize("first", ["bias", "residual"])
def test_bias_and_residual(first: str) -> None:
    g = Graph()
    x, r = g.input("x", F, SHAPE), g.input("r", F, SHAPE)
    s = g.add("Add", g.add("Add", x, BETA), r) if first == "bias" else g.add("Add", g.add("Add", x, r), BETA)
    g.output(g.add("LayerNormalization", s, GAMMA, BETA))
    result = check(g.model(), {"x": X, "r": R})
    assert ops(result.model) == ["FusedLayerNorm"]
    (node,) = fused(result.model, "FusedLayerNorm")
    assert node["inputs"][1] == "r" and node["inputs"][4]


def test_product_takes_the_residual_first() -> None:
    g = Graph()
    x = g.input("x", F, SHAPE)
    s = g.add("Add", g.add("Add", g.add("MatMul", x, g.weight(C, C)), BETA), x)
    g.output(g.add("LayerNormalization", s, GAMMA, BETA))
    result = check(g.model(), {"x": X})
    assert ops(result.model) == ["FusedGemm", "FusedLayerNorm"]
    assert fused(result.model, "FusedGemm")[0]["inputs"][3] == "x"
    assert fused(result.model, "FusedLayerNorm")[0]["inputs"][1] == ""
    result = rewrite(g.model(), skip="linear")
    assert fused(result.model, "FusedLayerNorm")[0]["inputs"][1] == "x"


def test_sum_that_enlarges_stays_outside() -> None:
    g = Graph()
    x, r = g.input("x", F, [1, 5, C]), g.input("r", F, [2, 1, 1])
    g.output(g.add("LayerNormalization", g.add("Add", x, r), GAMMA, BETA))
    result = check(g.model(), {"x": X[:1], "r": R[:, :1, :1]})
    assert ops(result.model) == ["Add", "FusedLayerNorm"]


def test_factor_that_depends_on_the_sum() -> None:
    """An operator with two outputs would have to stand in front of what it reads."""
    g = Graph()
    s = g.add("Add", g.input("x", F, ["batch", C]), g.input("r", F, ["batch", C]))
    gamma = g.add("ReduceMax", s, axes=[0], keepdims=0)
    g.output(g.add("LayerNormalization", s, gamma))
    result = check(g.model(), {"x": X[:, 0], "r": R[:, 0]})
    assert ops(result.model) == ["Add", "ReduceMax", "FusedLayerNorm"]


def _branches(g: Graph, read: str, write: Callable[[Graph, str], str]) -> str:
    """An If whose branches compute from a value of the outer graph."""
    bodies = []
    for name in ("then", "else"):
        inner = Graph()
        inner._count = 1000 if name == "then" else 2000
        y = write(inner, read)
        value = helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, SHAPE)
        bodies.append(helper.make_graph(inner.nodes, name, [], [value], inner.initializers))
    return g.add("If", g.input("c", bool, []), then_branch=bodies[0], else_branch=bodies[1])


def test_norm_in_branches_reads_a_sum_outside() -> None:
    """The sum stays in the outer graph, the norms go where they are."""
    g = Graph()
    s = g.add("Add", g.input("x", F, SHAPE), g.input("r", F, SHAPE))
    g.output(_branches(g, s, lambda inner, x: affine(inner, norm(inner, x))), shape=SHAPE)
    result = check(g.model(), {"x": X, "r": R, "c": np.array(True)}, {"x": X, "r": R, "c": np.array(False)})
    assert [s.status for s in sites(result, "layer_norm")] == ["fused", "fused"]
    assert ops(result.model) == ["Add", "If"]


def test_sum_that_a_branch_reads_is_an_output() -> None:
    g = Graph()
    s = g.add("Add", g.input("x", F, SHAPE), g.input("r", F, SHAPE))
    y = g.add("LayerNormalization", s, GAMMA, BETA)
    g.output(g.add("Add", y, _branches(g, s, lambda inner, x: inner.add("Tanh", x))), shape=SHAPE)
    result = check(g.model(), {"x": X, "r": R, "c": np.array(True)})
    (node,) = fused(result.model, "FusedLayerNorm")
    assert len(node["outputs"]) == 2 and ops(result.model) == ["FusedLayerNorm", "If", "Add"]


# -- ONNX Runtime's operators


@pytest.mark.parametrize("simplified", [False, True])
def test_epsilon_of_the_skip_operators_when_it_is_left_out(simplified: bool) -> None:
    g = Graph()
    g.domains = [MS]
    x, r = g.input("x", F, SHAPE), g.input("r", F, SHAPE)
    op = "SkipSimplifiedLayerNormalization" if simplified else "SkipLayerNormalization"
    g.output(g.add(op, x, r, GAMMA, domain=MS), shape=SHAPE)
    tiny = np.float32(1e-4)  # a variance near the usual epsilons
    check(g.model(), {"x": tiny * X, "r": tiny * R}, bound=1e-5)


@pytest.mark.parametrize("simplified", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wants_sum", [False, True])
def test_skip_operators(simplified: bool, bias: bool, wants_sum: bool) -> None:
    g = Graph()
    g.domains = [MS]
    x, r = g.input("x", F, SHAPE), g.input("r", F, SHAPE)
    operands = [x, r, GAMMA, *([] if simplified else [BETA]), *([GAMMA] if bias else [])]
    op = "SkipSimplifiedLayerNormalization" if simplified else "SkipLayerNormalization"
    y, _, _, s = g.add(op, *operands, outputs=4, domain=MS, epsilon=1e-4)
    g.nodes[-1].output[1:3] = ["", ""]
    g.output(y, shape=SHAPE)
    if wants_sum:
        g.output(s, shape=SHAPE)
    else:
        g.nodes[-1].output.pop()
    result = check(g.model(), {"x": X, "r": R})
    assert ops(result.model) == ["FusedLayerNorm"]
    (node,) = fused(result.model, "FusedLayerNorm")
    assert node["inputs"][:2] == ["x", "r"] and len(node["outputs"]) == 1 + wants_sum
    assert (len(node["inputs"]) > 4) == bias


def test_simplified_operator() -> None:
    g = Graph()
    g.output(g.add("SimplifiedLayerNormalization", g.input("x", F, SHAPE), GAMMA, axis=-1, epsilon=1e-4), shape=SHAPE)
    model = g.model()
    result = rewrite(model)
    (node,) = fused(result.model, "FusedLayerNorm")
    assert node["norm"] == "rms_norm" and ops(result.model) == ["FusedLayerNorm"]


# -- half precision


def half_norm(g: Graph, x: str, gamma: np.ndarray, cast_first: bool) -> str:
    """RMSNorm of Llama (`cast_first`: back to half, then the factor) and of Gemma (the factor in float32)."""
    y = norm(g, g.add("Cast", x, to=onnx.TensorProto.FLOAT), rms=True, divide="Reciprocal")
    if cast_first:
        return g.add("Mul", g.const(gamma.astype(H)), g.add("Cast", y, to=onnx.TensorProto.FLOAT16))
    return g.add("Cast", g.add("Mul", y, gamma), to=onnx.TensorProto.FLOAT16)


@pytest.mark.parametrize("cast_first", [True, False])
def test_statistics_in_float32_of_a_half_type(cast_first: bool) -> None:
    g = Graph()
    g.output(half_norm(g, g.input("x", H, SHAPE), GAMMA.astype(H).astype(F), cast_first), H)
    result = check(g.model(), {"x": X.astype(H)}, bound=4e-3)
    assert ops(result.model) == ["FusedLayerNorm"]


def test_factor_that_the_half_type_does_not_hold() -> None:
    g = Graph()
    g.output(half_norm(g, g.input("x", H, SHAPE), GAMMA, False), H)
    result = check(g.model(), {"x": X.astype(H)}, bound=1e-6)
    assert ops(result.model) == ["Cast", "FusedLayerNorm", "Cast"]


def test_result_that_stays_float32() -> None:
    g = Graph()
    g.output(norm(g, g.add("Cast", g.input("x", H, SHAPE), to=onnx.TensorProto.FLOAT)))
    result = check(g.model(), {"x": X.astype(H)})
    assert ops(result.model) == ["Cast", "FusedLayerNorm"]


def test_half_operator() -> None:
    g = Graph()
    g.output(g.add("LayerNormalization", g.input("x", H, SHAPE), GAMMA.astype(H), BETA.astype(H)), H)
    check(g.model(), {"x": X.astype(H)}, bound=4e-3)


# -- near misses


def _epsilon_outside(g: Graph, x: str) -> str:
    d = g.add("Sub", x, mean(g, x))
    return g.add("Div", d, g.add("Add", g.add("Sqrt", mean(g, g.add("Mul", d, d))), F(1e-5)))


def _uncentred(g: Graph, x: str) -> str:
    d = g.add("Sub", x, mean(g, x))
    return g.add("Div", x, g.add("Sqrt", g.add("Add", mean(g, g.add("Mul", d, d)), F(1e-5))))


def _two_axes(g: Graph, x: str) -> str:
    d = g.add("Sub", x, mean(g, x, (1, 2)))
    return g.add("Div", d, g.add("Sqrt", g.add("Add", mean(g, g.add("Mul", d, d)), F(1e-5))))


def _root_twice(g: Graph, x: str) -> str:
    root = g.add("Sqrt", g.add("Add", mean(g, g.add("Mul", x, x)), F(1e-5)))
    return g.add("Add", g.add("Div", x, root), root)


def _deviation(g: Graph, x: str) -> str:
    d = g.add("Sub", x, mean(g, x))
    return g.add("Tanh", g.add("Sqrt", g.add("Add", mean(g, g.add("Mul", d, d)), F(1e-5))))


def _epsilon_computed(g: Graph, x: str) -> str:
    e = g.add("Abs", g.add("ReduceMax", x, keepdims=0))
    return g.add("Div", x, g.add("Sqrt", g.add("Add", mean(g, g.add("Mul", x, x)), e)))


def _mean_used(g: Graph, x: str) -> str:
    m = mean(g, x)
    d = g.add("Sub", x, m)
    y = g.add("Div", d, g.add("Sqrt", g.add("Add", mean(g, g.add("Mul", d, d)), F(1e-5))))
    return g.add("Add", y, m)


WRITTEN_OUT: dict[str, tuple[Callable[[Graph, str], str], str]] = {
    "not the last axes": (lambda g, x: norm(g, x, axes=(1,)), "the axes that are averaged are not the last"),
    "epsilon outside the root": (_epsilon_outside, "the epsilon is added to the root"),
    "epsilon computed": (_epsilon_computed, "the epsilon is computed"),
    "numerator not centred": (_uncentred, "what is divided by the root is not what was squared"),
    "two sets of axes": (_two_axes, "over different axes"),
    "root used twice": (_root_twice, "the root is used otherwise than to divide once"),
    "standard deviation only": (_deviation, "the root is used otherwise than to divide"),
    "mean used": (_mean_used, "inside the site, is used elsewhere"),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_near_misses(name: str) -> None:
    write, reason = WRITTEN_OUT[name]
    g = Graph()
    g.output(write(g, g.input("x", F, SHAPE)))
    site = refused(g.model(), "layer_norm", reason, {"x": X})
    assert site.fault


OPERATOR: dict[str, tuple[dict[str, Any], tuple[Any, ...], str]] = {
    "factor for each row": ({}, (R[0],), "does not hold one element for each normalised element"),
    "statistics in double": ({"stash_type": 11}, (GAMMA,), "stash_type asks for statistics in another type"),
}


@pytest.mark.parametrize("name", OPERATOR)
def test_operator_near_misses(name: str) -> None:
    attrs, operands, reason = OPERATOR[name]
    g = Graph()
    g.output(g.add("LayerNormalization", g.input("x", F, [2, 5, C]), *operands, **attrs), shape=[2, 5, C])
    model = g.model()
    (site,) = sites(rewrite(model), "layer_norm")
    assert site.status == "skipped" and reason in site.reason


def test_statistic_that_is_used_is_refused() -> None:
    g = Graph()
    y, m = g.add("LayerNormalization", g.input("x", F, SHAPE), GAMMA, BETA, outputs=2)
    g.output(y)
    g.output(m)
    refused(g.model(), "layer_norm", "its statistic", {"x": X})


def test_double_is_refused() -> None:
    g = Graph()
    g.output(norm(g, g.input("x", np.float64, SHAPE), dtype=np.float64), np.float64)
    refused(g.model(), "layer_norm", "DOUBLE", {"x": X.astype(np.float64)})


def test_attribute_of_the_function_is_refused() -> None:
    node = helper.make_node("LayerNormalization", ["x", "w"], ["y"])
    reference = helper.make_attribute("epsilon", 0.0)
    reference.Clear()
    reference.name, reference.ref_attr_name, reference.type = "epsilon", "eps", onnx.AttributeProto.FLOAT
    node.attribute.append(reference)
    g = Graph()
    g.functions.append(
        helper.make_function("local", "Norm", ["x", "w"], ["y"], [node], [helper.make_opsetid("", 17)], ["eps"])
    )
    g.domains = ["local"]
    x = g.input("x", F, SHAPE)
    g.output(g.add("Norm", x, GAMMA, domain="local", eps=0.5), shape=SHAPE)
    refused(g.model(), "layer_norm", "attribute of the function", {"x": X})


@pytest.mark.parametrize("name", corpus())
def test_corpus_norms(name: str) -> None:
    """All norms that the index counts, as one operator or written out."""
    entry = corpus()[name]
    result = rewrite(CORPUS / name)
    found = sites(result, "layer_norm")
    assert len(found) == entry["layernorm_sites"]["total"] + entry["rmsnorm_sites"]["total"]
    assert all(s.status == "fused" for s in found)
    assert not {"ReduceMean", "LayerNormalization", "RMSNormalization"} & set(ops(result.model))
