"""The attention rule: where it fires, with what result, and each near miss with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rewrite_helpers import Graph, check, fused, ops, refused, sites

from ortplugins.rewrite import rewrite

B, N, D = 2, 3, 8
SQ, SK = 5, 7
MIN = np.finfo(np.float32).min
RNG = np.random.default_rng(7)


def feeds(sq: int = SQ, sk: int = SK, batch: int = B, **more: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((batch, sq, N * D)) * 2).astype(np.float32)
    y = (rng.standard_normal((batch, sk, N * D)) * 2).astype(np.float32)
    return {"x": x, "y": y, **more}


Step = Callable[[Graph, str], str]


def same(g: Graph, value: str) -> str:
    return value


def attention(
    g: Graph,
    *,
    on_q: Step = same,
    on_k: Step = same,
    on_scores: Step = same,
    on_probabilities: Step = same,
    axis: int = -1,
    self_attention: bool = False,
) -> tuple[str, str]:
    """Heads by Reshape and Transpose, both products, Softmax. Returns the result and the probabilities."""
    x = g.input("x", np.float32, ["batch", "queries", N * D])
    y = x if self_attention else g.input("y", np.float32, ["batch", "keys", N * D])
    q = on_q(g, g.heads(g.add("MatMul", x, g.weight(N * D, N * D)), N, D))
    k = on_k(g, g.heads(g.add("MatMul", y, g.weight(N * D, N * D)), N, D, perm=(0, 2, 3, 1)))
    v = g.heads(g.add("MatMul", y, g.weight(N * D, N * D)), N, D)
    p = on_probabilities(g, g.add("Softmax", on_scores(g, g.add("MatMul", q, k)), axis=axis, name="softmax"))
    return g.merge(g.add("MatMul", p, v, name="pv"), N * D), p


def scaled(factor: float, op: str = "Mul") -> Step:
    return lambda g, v: g.add(op, v, np.float32(factor if op == "Mul" else 1.0 / factor))


def chain(*steps: Step) -> Step:
    def run(g: Graph, value: str) -> str:
        for step in steps:
            value = step(g, value)
        return value

    return run


# -- scale


@pytest.mark.parametrize("place", ["none", "scores", "scores_div", "q", "k", "both", "all", "negative"])
def test_scale(place: str) -> None:
    s = 0.3
    where: dict[str, dict[str, Step]] = {
        "none": {},
        "scores": {"on_scores": scaled(s)},
        "scores_div": {"on_scores": scaled(s, "Div")},
        "q": {"on_q": scaled(s)},
        "k": {"on_k": scaled(s, "Div")},
        "both": {"on_q": scaled(math.sqrt(s)), "on_k": scaled(math.sqrt(s))},
        "all": {"on_q": scaled(0.5), "on_k": scaled(2.0), "on_scores": scaled(s)},
        "negative": {"on_scores": scaled(-s)},
    }
    g = Graph()
    g.output(attention(g, **where[place])[0])
    result = check(g.model(), feeds())
    (node,) = fused(result.model, "FusedAttention")
    expected = 1.0 if place == "none" else -s if place == "negative" else s
    assert node["scale"] == pytest.approx(expected, rel=1e-6)
    assert node["num_heads"] == N
    assert "Transpose" not in ops(result.model)
    assert "Reshape" not in ops(result.model)


def test_scale_computed_from_the_shape() -> None:
    """1 / sqrt(head_dim), as the classic exporter writes it when the scale is left out."""

    def by_shape(g: Graph, q: str) -> str:
        last = g.add("Slice", g.add("Shape", q), np.array([-1]), np.array([2**63 - 1]))
        root = g.add("Sqrt", g.add("Cast", last, to=1))
        return g.add("Mul", q, g.add("Sqrt", g.add("Div", np.array([1.0], np.float32), root)))

    g = Graph()
    g.output(attention(g, on_q=by_shape, on_k=lambda g, k: g.add("Mul", k, np.float32(8**-0.25)))[0])
    (node,) = fused(check(g.model(), feeds()).model, "FusedAttention")
    assert node["scale"] == pytest.approx(8**-0.5, rel=1e-6)


def test_scale_for_each_head_stays_on_the_queries() -> None:
    g = Graph()
    per_head = np.array([0.2, 0.5, 1.0], np.float32).reshape(N, 1, 1)
    g.output(attention(g, on_scores=lambda g, s: g.add("Mul", s, per_head))[0])
    result = check(g.model(), feeds())
    assert len(fused(result.model, "FusedAttention")) == 1
    assert "Softmax" not in ops(result.model)


def test_scale_that_varies_with_the_key_is_refused() -> None:
    g = Graph()
    g.output(attention(g, on_scores=lambda g, s: g.add("Mul", s, g.input("w", np.float32, ["keys"])))[0])
    refused(g.model(), "attention", "varies with the key", feeds(w=np.linspace(0, 1, SK, dtype=np.float32)))


def test_scale_after_the_mask_scales_the_mask() -> None:
    g = Graph()
    g.output(
        attention(
            g,
            on_scores=chain(lambda g, s: g.add("Add", s, g.input("m", np.float32, ["queries", "keys"])), scaled(0.25)),
        )[0]
    )
    mask = RNG.standard_normal((SQ, SK)).astype(np.float32)
    check(g.model(), feeds(m=mask))


# -- layouts


@pytest.mark.parametrize(
    "equations",
    [
        ("bind,bjnd->bnij", "bnij,bjnd->bind"),
        ("bind,bjnd->bnij", "bnij,bjnd->bnid"),
        ("bind,bjnd->nbij", "nbij,bjnd->bind"),
    ],
)
def test_einsum(equations: tuple[str, str]) -> None:
    first, second = equations
    g = Graph()
    x = g.input("x", np.float32, ["batch", "queries", N * D])
    y = g.input("y", np.float32, ["batch", "keys", N * D])
    q, k, v = (g.add("Reshape", z, np.array([0, 0, N, D])) for z in (x, y, y))
    g.output(
        g.add(
            "Einsum",
            g.add("Softmax", scaled(0.3)(g, g.add("Einsum", q, k, equation=first)), axis=-1),
            v,
            equation=second,
        )
    )
    result = check(g.model(), feeds())
    assert len(fused(result.model, "FusedAttention")) == 1, sites(result, "attention")


def test_batch_and_heads_merged() -> None:
    """(batch * heads, sequence, head_dim), with a mask over the merged axis."""
    g = Graph()
    x = g.input("x", np.float32, ["batch", SQ, N * D])
    m = g.input("m", np.float32, ["rows", SQ, SQ])

    def split(value: str) -> str:
        value = g.heads(value, N, D)
        return g.add("Reshape", value, np.array([-1, SQ, D]))

    q, k, v = (split(g.add("MatMul", x, g.weight(N * D, N * D))) for _ in range(3))
    scores = scaled(0.3)(g, g.add("MatMul", q, g.add("Transpose", k, perm=[0, 2, 1])))
    p = g.add("Softmax", g.add("Add", scores, m), axis=-1)
    out = g.add("Reshape", g.add("MatMul", p, v), np.array([-1, N, SQ, D]))
    g.output(g.merge(out, N * D))
    rng = np.random.default_rng(0)
    x_value = rng.standard_normal((B, SQ, N * D)).astype(np.float32)
    result = check(g.model(), {"x": x_value, "m": rng.standard_normal((B * N, SQ, SQ)).astype(np.float32)})
    (site,) = sites(result, "attention")
    # `rows` is not known to be batch * heads, and a mask that may be of size 1 there is another mask.
    assert site.status == "skipped" and "not known to broadcast" in site.reason


def test_batch_and_heads_merged_without_a_mask() -> None:
    g = Graph()
    x = g.input("x", np.float32, ["batch", "queries", N * D])
    sizes = g.add("Shape", x)
    rows = g.add("Mul", g.add("Gather", sizes, np.array([0])), np.array([N]))
    merged = g.add("Concat", rows, g.add("Gather", sizes, np.array([1])), np.array([D]), axis=0)
    q, k, v = (g.add("Reshape", g.heads(g.add("MatMul", x, g.weight(N * D, N * D)), N, D), merged) for _ in range(3))
    scores = scaled(0.3)(g, g.add("MatMul", q, g.add("Transpose", k, perm=[0, 2, 1])))
    out = g.add("MatMul", g.add("Softmax", scores, axis=-1), v)
    back = g.add("Concat", np.array([-1, N]), g.add("Gather", sizes, np.array([1])), np.array([D]), axis=0)
    g.output(g.merge(g.add("Reshape", out, back), N * D))
    result = check(g.model(), {"x": feeds()["x"]})
    (node,) = fused(result.model, "FusedAttention")
    assert node["layout"] == "BS3NH" and result.report.packed == 1
    assert "Transpose" not in ops(result.model)


def test_grouped_heads() -> None:
    g = Graph()
    x = g.input("x", np.float32, ["batch", "queries", 4 * D])
    q = g.heads(g.add("MatMul", x, g.weight(4 * D, 4 * D)), 4, D)

    def repeated() -> str:
        h = g.heads(g.add("MatMul", x, g.weight(4 * D, 2 * D)), 2, D)
        wide = g.add("Expand", g.add("Unsqueeze", h, np.array([2])), np.array([1, 1, 2, 1, 1]))
        sizes = g.add("Shape", x)
        target = g.add(
            "Concat",
            g.add("Gather", sizes, np.array([0])),
            np.array([4]),
            g.add("Gather", sizes, np.array([1])),
            np.array([D]),
            axis=0,
        )
        return g.add("Reshape", wide, target)

    k, v = repeated(), repeated()
    p = g.add("Softmax", scaled(0.3)(g, g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2]))), axis=-1)
    g.output(g.merge(g.add("MatMul", p, v), 4 * D))
    result = check(g.model(), {"x": RNG.standard_normal((B, SQ, 4 * D)).astype(np.float32)})
    (node,) = fused(result.model, "FusedAttention")
    assert (node["num_heads"], node["kv_num_heads"]) == (4, 2)
    assert "Expand" not in ops(result.model)


def test_heads_repeated_in_the_other_order_stay_repeated() -> None:
    """Tile puts the copies outside: query head h would read key head h % 2, which is not the operator's grouping."""
    g = Graph()
    x = g.input("x", np.float32, ["batch", "queries", 4 * D])
    q = g.heads(g.add("MatMul", x, g.weight(4 * D, 4 * D)), 4, D)
    k, v = (
        g.add("Tile", g.heads(g.add("MatMul", x, g.weight(4 * D, 2 * D)), 2, D), np.array([1, 2, 1, 1]))
        for _ in range(2)
    )
    p = g.add("Softmax", scaled(0.3)(g, g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2]))), axis=-1)
    g.output(g.merge(g.add("MatMul", p, v), 4 * D))
    result = check(g.model(), {"x": RNG.standard_normal((B, SQ, 4 * D)).astype(np.float32)})
    (node,) = fused(result.model, "FusedAttention")
    assert node.get("kv_num_heads", 0) == 0
    assert "Tile" in ops(result.model)


@pytest.mark.parametrize("how", ["split", "slice", "gather"])
def test_packed_projection(how: str) -> None:
    g = Graph()
    x = g.input("x", np.float32, ["batch", "queries", N * D])
    packed = g.add("Add", g.add("MatMul", x, g.weight(N * D, 3 * N * D)), g.weight(3 * N * D))
    if how == "split":
        parts = [g.heads(p, N, D) for p in g.add("Split", packed, np.array([N * D] * 3), outputs=3, axis=2)]
    elif how == "slice":
        parts = [
            g.heads(g.add("Slice", packed, np.array([i * N * D]), np.array([(i + 1) * N * D]), np.array([2])), N, D)
            for i in range(3)
        ]
    else:
        five = g.add("Transpose", g.add("Reshape", packed, np.array([0, 0, 3, N, D])), perm=[2, 0, 3, 1, 4])
        parts = [g.add("Gather", five, np.array(i), axis=0) for i in range(3)]
    q, k, v = parts
    p = g.add("Softmax", g.add("MatMul", scaled(0.3)(g, q), g.add("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    g.output(g.merge(g.add("MatMul", p, v), N * D))
    result = check(g.model(), {"x": feeds()["x"]})
    assert len(fused(result.model, "FusedAttention")) == 1


def test_one_head_without_an_axis_for_it() -> None:
    g = Graph()
    x = g.input("x", np.float32, ["batch", "queries", D])
    q, k, v = (g.add("MatMul", x, g.weight(D, D)) for _ in range(3))
    p = g.add("Softmax", scaled(0.3)(g, g.add("MatMul", q, g.add("Transpose", k, perm=[0, 2, 1]))), axis=-1)
    g.output(g.add("MatMul", p, v))
    result = check(g.model(), {"x": RNG.standard_normal((B, SQ, D)).astype(np.float32)})
    (node,) = fused(result.model, "FusedAttention")
    assert node["layout"] == "BS3NH"


def test_scores_transposed() -> None:
    """Keys times queries, Softmax over the first of the two axes, values on the left."""
    g = Graph()
    q = g.input("x", np.float32, ["batch", N, "queries", D])
    k = g.input("y", np.float32, ["batch", N, "keys", D])
    p = g.add("Softmax", g.add("MatMul", k, g.add("Transpose", q, perm=[0, 1, 3, 2])), axis=2)
    g.output(g.add("MatMul", g.add("Transpose", k, perm=[0, 1, 3, 2]), p))
    rng = np.random.default_rng(3)
    values = {
        "x": rng.standard_normal((B, N, SQ, D)).astype(np.float32),
        "y": rng.standard_normal((B, N, SK, D)).astype(np.float32),
    }
    assert len(fused(check(g.model(), values).model, "FusedAttention")) == 1


# -- masks


@pytest.mark.parametrize(
    "shape", [[SK], [SQ, SK], [1, 1, SQ, SK], [B, 1, 1, SK], [B, 1, SQ, SK], [1, N, SQ, SK], [B, N, SQ, SK]]
)
@pytest.mark.parametrize("kind", ["added", "chosen"])
def test_mask_shapes(shape: list[int], kind: str) -> None:
    g = Graph()
    names = {SK: "keys", SQ: "queries", B: "batch"}
    symbols = [names.get(d, d) for d in shape]
    if kind == "added":
        step: Step = lambda g, s: g.add("Add", s, g.input("m", np.float32, symbols))
        mask: Any = RNG.standard_normal(shape).astype(np.float32)
    else:
        step = lambda g, s: g.add("Where", g.input("m", bool, symbols), s, np.float32(-np.inf))
        mask = RNG.random(shape) < 0.7
        mask[..., 0] = True
    g.output(attention(g, on_scores=chain(scaled(0.3), step))[0])
    result = check(g.model(), feeds(m=mask))
    (node,) = fused(result.model, "FusedAttention")
    assert node["inputs"][3] == "m", "the mask goes in as it is"


def test_fully_masked_rows_are_zeros_for_minus_infinity_with_a_guard() -> None:
    def masked(g: Graph, s: str) -> str:
        keep = g.input("m", bool, ["batch", 1, 1, "keys"])
        return g.add("Add", s, g.add("Where", keep, np.float32(0), np.float32(-np.inf)))

    def guard(g: Graph, p: str) -> str:
        return g.add("Where", g.add("IsNaN", p), np.float32(0), p)

    g = Graph()
    g.output(attention(g, on_scores=chain(scaled(0.3), masked), on_probabilities=guard)[0])
    keep = np.ones((B, 1, 1, SK), bool)
    keep[1] = False
    result = check(g.model(), feeds(m=keep))
    (node,) = fused(result.model, "FusedAttention")
    assert node["inputs"][3] == "m", "a boolean mask again"
    assert not {"IsNaN", "Where"} & set(ops(result.model))


@pytest.mark.parametrize("fill", [MIN, -1e38, -10000.0])
def test_fully_masked_rows_average_for_a_finite_fill(fill: float) -> None:
    """An added finite mask stays an added mask."""

    def masked(g: Graph, s: str) -> str:
        keep = g.input("m", bool, ["batch", 1, 1, "keys"])
        return g.add("Add", s, g.add("Where", keep, np.float32(0), np.float32(fill)))

    g = Graph()
    g.output(attention(g, on_scores=chain(scaled(0.3), masked))[0])
    keep = np.ones((B, 1, 1, SK), bool)
    keep[0, ..., 3:] = False
    keep[1] = False
    assert len(fused(check(g.model(), feeds(m=keep)).model, "FusedAttention")) == 1


def test_scores_replaced_by_the_lowest_number() -> None:
    g = Graph()
    g.output(
        attention(
            g, on_scores=lambda g, s: g.add("Where", g.input("m", bool, ["batch", 1, 1, "keys"]), np.float32(MIN), s)
        )[0]
    )
    drop = np.zeros((B, 1, 1, SK), bool)
    drop[0, ..., 3:] = True
    drop[1] = True
    assert len(fused(check(g.model(), feeds(m=drop)).model, "FusedAttention")) == 1


def test_scores_replaced_by_an_ordinary_number_are_refused() -> None:
    """A fully masked row has equal weights then, which no additive mask gives."""
    g = Graph()
    g.output(
        attention(
            g, on_scores=lambda g, s: g.add("Where", g.input("m", bool, ["batch", 1, 1, "keys"]), s, np.float32(-10000))
        )[0]
    )
    keep = np.ones((B, 1, 1, SK), bool)
    keep[1] = False
    refused(g.model(), "attention", "fully masked row", feeds(m=keep))


@pytest.mark.parametrize("causal", [False, True])
def test_a_finite_fill_behind_minus_infinity_wins(causal: bool) -> None:
    """Keys that both masks drop have the finite fill: a row without any other key averages over them."""

    def masks(g: Graph, s: str) -> str:
        first = causal_by_range(g) if causal else g.input("m", bool, ["batch", 1, 1, "queries"])
        s = g.add("Where", first, s, np.float32(-np.inf))
        return g.add("Where", g.input("n", bool, ["batch", 1, 1, "queries"]), s, np.float32(MIN))

    g = Graph()
    g.output(attention(g, on_scores=masks, self_attention=True)[0])
    keep, other = np.ones((B, 1, 1, SQ), bool), np.ones((B, 1, 1, SQ), bool)
    keep[0, ..., :3] = False
    other[0, ..., 3:] = False
    other[1] = False
    values = {"x": feeds()["x"], "n": other, **({} if causal else {"m": keep})}
    assert len(fused(check(g.model(), values).model, "FusedAttention")) == 1


def _range(g: Graph, x: str, axis: int) -> str:
    length = g.add("Squeeze", g.add("Gather", g.add("Shape", x), np.array([axis])))
    return g.add("Range", np.array(0), length, np.array(1))


def causal_by_range(g: Graph, op: str = "LessOrEqual") -> str:
    rows = g.add("Unsqueeze", _range(g, "x", 1), np.array([1]))
    columns = g.add("Unsqueeze", _range(g, "x", 1), np.array([0]))
    return {
        "LessOrEqual": lambda: g.add("LessOrEqual", columns, rows),
        "GreaterOrEqual": lambda: g.add("GreaterOrEqual", rows, columns),
        "Less": lambda: g.add("Less", columns, g.add("Add", rows, np.array(1))),
        "Not": lambda: g.add("Not", g.add("Greater", columns, rows)),
    }[op]()


def causal_by_trilu(g: Graph) -> str:
    sizes = g.add("Shape", "x")
    length = g.add("Gather", sizes, np.array([1]))
    ones = g.add("Expand", np.array(True), g.add("Concat", length, length, axis=0))
    return g.add("Trilu", ones, upper=0)


def causal_by_slice(g: Graph) -> str:
    """The top-left corner of a constant triangle, as GPT-2 keeps one."""
    triangle = np.tril(np.ones((1, 1, 32, 32), bool))
    length = g.add("Gather", g.add("Shape", "x"), np.array([1]))
    rows = g.add("Slice", triangle, np.array([0]), length, np.array([2]), np.array([1]))
    return g.add("Slice", rows, np.array([0]), length, np.array([3]), np.array([1]))


CAUSAL: dict[str, Callable[[Graph], str]] = {
    **{op: (lambda g, op=op: causal_by_range(g, op)) for op in ("LessOrEqual", "GreaterOrEqual", "Less", "Not")},
    "Trilu": causal_by_trilu,
    "Slice": causal_by_slice,
}


@pytest.mark.parametrize("fill", [-np.inf, MIN])
@pytest.mark.parametrize("how", CAUSAL)
def test_causal_mask_becomes_an_attribute(how: str, fill: float) -> None:
    g = Graph()
    mask: Step = lambda g, s: g.add("Add", s, g.add("Where", CAUSAL[how](g), np.float32(0), np.float32(fill)))
    g.output(attention(g, on_scores=chain(scaled(0.3), mask), self_attention=True)[0])
    result = check(g.model(), {"x": feeds()["x"]}, {"x": feeds(sq=1)["x"]})
    (node,) = fused(result.model, "FusedAttention")
    assert node["is_causal"] == 1
    assert len(node["inputs"]) == 3, "no mask is left"
    assert not {"Where", "Range", "Trilu"} & set(ops(result.model))


def test_causal_mask_of_minus_infinity_above_the_diagonal() -> None:
    g = Graph()

    def mask(g: Graph, s: str) -> str:
        length = g.add("Gather", g.add("Shape", "x"), np.array([1]))
        return g.add(
            "Add",
            s,
            g.add(
                "Trilu",
                g.add("Expand", np.float32(-np.inf), g.add("Concat", length, length, axis=0)),
                np.array(1),
                upper=1,
            ),
        )

    g.output(attention(g, on_scores=chain(scaled(0.3), mask), self_attention=True)[0])
    (node,) = fused(check(g.model(), {"x": feeds()["x"]}).model, "FusedAttention")
    assert node["is_causal"] == 1 and len(node["inputs"]) == 3


@pytest.mark.parametrize("fill", [-np.inf, MIN])
def test_causal_and_padding(fill: float) -> None:
    """With -inf the padding mask alone is left. With a finite fill the mask stays whole: rows without a key average."""

    def mask(g: Graph, s: str) -> str:
        keep = g.add("And", causal_by_range(g), g.input("m", bool, ["batch", 1, 1, "queries"]))
        return g.add("Add", s, g.add("Where", keep, np.float32(0), np.float32(fill)))

    guard: Step = lambda g, p: g.add("Where", g.add("IsNaN", p), np.float32(0), p)
    g = Graph()
    g.output(attention(g, on_scores=chain(scaled(0.3), mask), on_probabilities=guard, self_attention=True)[0])
    left = np.ones((B, 1, 1, SQ), bool)
    left[1, ..., :3] = False
    result = check(g.model(), {"x": feeds()["x"], "m": left})
    (node,) = fused(result.model, "FusedAttention")
    if fill == -np.inf:
        assert node["is_causal"] == 1 and node["inputs"][3] == "m"
    else:
        assert "is_causal" not in node


def test_causal_from_another_corner_is_not_the_attribute() -> None:
    """j <= i + 1: one key of the future is visible."""

    def mask(g: Graph, s: str) -> str:
        rows = g.add("Unsqueeze", _range(g, "x", 1), np.array([1]))
        columns = g.add("Unsqueeze", _range(g, "x", 1), np.array([0]))
        keep = g.add("LessOrEqual", columns, g.add("Add", rows, np.array(1)))
        return g.add("Where", keep, s, np.float32(-np.inf))

    g = Graph()
    g.output(attention(g, on_scores=chain(scaled(0.3), mask), self_attention=True)[0])
    (node,) = fused(check(g.model(), {"x": feeds()["x"]}).model, "FusedAttention")
    assert node["window_right"] == 1 and "is_causal" not in node


def test_sliding_window() -> None:
    def mask(g: Graph, s: str) -> str:
        rows = g.add("Unsqueeze", _range(g, "x", 1), np.array([1]))
        columns = g.add("Unsqueeze", _range(g, "x", 1), np.array([0]))
        keep = g.add(
            "And", g.add("LessOrEqual", columns, rows), g.add("Greater", columns, g.add("Sub", rows, np.array(3)))
        )
        return g.add("Where", keep, s, np.float32(-np.inf))

    g = Graph()
    g.output(attention(g, on_scores=chain(scaled(0.3), mask), self_attention=True)[0])
    (node,) = fused(check(g.model(), {"x": feeds(sq=9)["x"]}).model, "FusedAttention")
    assert (node["is_causal"], node["window"]) == (1, 2)
    assert len(node["inputs"]) == 3


def test_a_condition_that_always_holds_is_dropped() -> None:
    """Queries of index at least 0, joined with padding: the mask is (batch, 1, 1, keys) again."""

    def mask(g: Graph, s: str) -> str:
        rows = g.add("Unsqueeze", _range(g, "x", 1), np.array([0, 1, 3]))
        keep = g.add("And", g.add("GreaterOrEqual", rows, np.array(0)), g.input("m", bool, ["batch", 1, 1, "keys"]))
        return g.add("Add", s, g.add("Where", keep, np.float32(0), np.float32(MIN)))

    g = Graph()
    g.output(attention(g, on_scores=chain(scaled(0.3), mask))[0])
    keep = np.ones((B, 1, 1, SK), bool)
    keep[0, ..., 2:] = False
    keep[1] = False
    result = check(g.model(), feeds(m=keep))
    assert "And" not in ops(result.model) and "Range" not in ops(result.model)


@pytest.mark.parametrize(("stride_axis", "understood"), [(1, True), (0, False)])
def test_a_mask_indexed_by_ranges_is_the_mask(stride_axis: int, understood: bool) -> None:
    """PyTorch's `mask[batch_index, key_index]`; with the size of another axis as the stride it is not that."""

    def mask(g: Graph, s: str) -> str:
        rows = g.add("Unsqueeze", _range(g, "x", 0), np.array([1, 2, 3]))
        columns = g.add("Unsqueeze", _range(g, "x", 1), np.array([0, 1, 2]))
        padding = g.input("m", bool, ["batch", "queries"])
        stride = g.add("Gather", g.add("Shape", padding), np.array(stride_axis))
        position = g.add("Add", columns, g.add("Mul", rows, stride))
        kept = g.add("Gather", g.add("Flatten", padding, axis=2), position)
        kept = g.add("Reshape", g.add("Reshape", kept, np.array([-1])), g.add("Shape", position))
        return g.add("Where", kept, s, np.float32(-np.inf))

    g = Graph()
    g.output(attention(g, on_scores=chain(scaled(0.3), mask), self_attention=True)[0])
    keep = np.ones((B, SQ), bool)
    keep[1, 2:] = False
    result = check(g.model(), {"x": feeds()["x"], "m": keep})
    (node,) = fused(result.model, "FusedAttention")
    assert len(node["inputs"]) == 4
    assert ({"Range", "Gather", "Mul"} & set(ops(result.model)) == set()) is understood


@pytest.mark.parametrize("swapped", [False, True])
def test_a_mask_gathered_by_ranges_is_the_mask(swapped: bool) -> None:
    """The same, as torch.export writes it. With the indices swapped it would be the transpose."""

    def mask(g: Graph, s: str) -> str:
        rows = g.add("Unsqueeze", _range(g, "x", 0), np.array([1, 2, 3]))
        columns = g.add("Unsqueeze", _range(g, "x", 1), np.array([0, 1, 2]))
        grid = g.add("Shape", g.add("Max", rows, columns))
        parts = [g.add("Unsqueeze", g.add("Expand", i, grid), np.array([-1])) for i in (rows, columns)]
        size = "queries" if not swapped else "batch"
        padding = g.input("m", bool, ["batch", size])
        indices = g.add("Concat", *(parts[::-1] if swapped else parts), axis=-1)
        return g.add("Where", g.add("GatherND", padding, indices), s, np.float32(-np.inf))

    g = Graph()
    g.output(attention(g, on_scores=chain(scaled(0.3), mask), self_attention=True)[0])
    keep = np.ones((B, B if swapped else SQ), bool)
    keep[1, 1:] = False
    x = feeds()["x"][:, : keep.shape[1]]
    result = check(g.model(), {"x": x, "m": keep})
    assert ({"Range", "GatherND", "Expand"} & set(ops(result.model)) == set()) is not swapped


def test_two_blocks_share_a_position_bias() -> None:
    """T5: no scale, one bias for both blocks, a padding mask on top in the second."""
    g = Graph()
    x = g.input("x", np.float32, ["batch", "queries", N * D])
    bias = g.input("bias", np.float32, [1, N, "queries", "queries"])
    pad = g.input("pad", np.float32, ["batch", 1, 1, "queries"])
    for extra in (False, True):
        q, v = (g.heads(g.add("MatMul", x, g.weight(N * D, N * D)), N, D) for _ in range(2))
        k = g.heads(g.add("MatMul", x, g.weight(N * D, N * D)), N, D, perm=(0, 2, 3, 1))
        scores = g.add("Add", g.add("MatMul", q, k), bias)
        if extra:
            scores = g.add("Add", scores, pad)
        x = g.merge(g.add("MatMul", g.add("Softmax", scores, axis=-1), v), N * D)
    g.output(x)
    rng = np.random.default_rng(2)
    pads = np.zeros((B, 1, 1, SQ), np.float32)
    pads[1, ..., 2:] = MIN
    result = check(
        g.model(), {"x": feeds()["x"], "bias": rng.standard_normal((1, N, SQ, SQ)).astype(np.float32), "pad": pads}
    )
    first, second = fused(result.model, "FusedAttention")
    assert first["scale"] == second["scale"] == 1.0
    assert first["inputs"][3] == "bias"


# -- soft cap


def test_soft_cap() -> None:
    cap = chain(scaled(0.3), lambda g, s: g.add("Div", s, np.float32(5)), lambda g, s: g.add("Tanh", s), scaled(5.0))
    mask: Step = lambda g, s: g.add("Add", s, g.input("m", np.float32, ["queries", "keys"]))
    g = Graph()
    g.output(attention(g, on_scores=chain(cap, mask))[0])
    values = np.where(np.arange(SK) % 2 == 0, 0.0, -np.inf).astype(np.float32) * np.ones((SQ, 1), np.float32)
    values = np.where(np.isnan(values), 0, values).astype(np.float32)
    (node,) = fused(check(g.model(), feeds(m=values)).model, "FusedAttention")
    assert node["softcap"] == pytest.approx(5.0)
    assert node["scale"] == pytest.approx(0.3, rel=1e-6)


def test_soft_cap_after_the_mask_is_refused() -> None:
    mask: Step = lambda g, s: g.add("Add", s, g.input("m", np.float32, ["queries", "keys"]))
    cap = chain(lambda g, s: g.add("Tanh", s), scaled(5.0))
    g = Graph()
    g.output(attention(g, on_scores=chain(mask, cap))[0])
    refused(
        g.model(), "attention", "Tanh comes after a mask", feeds(m=RNG.standard_normal((SQ, SK)).astype(np.float32))
    )


def test_tanh_without_its_factor_is_refused() -> None:
    g = Graph()
    g.output(attention(g, on_scores=lambda g, s: g.add("Tanh", s))[0])
    refused(g.model(), "attention", "not followed by its factor", feeds())


# -- near misses


def test_softmax_over_the_queries_is_refused() -> None:
    g = Graph()
    g.output(attention(g, axis=2)[0])
    refused(g.model(), "attention", "does not sum over the axis that Softmax normalises", feeds())


def test_softmax_over_the_heads_is_refused() -> None:
    g = Graph()
    g.output(attention(g, axis=1)[0])
    refused(g.model(), "attention", "Softmax", feeds())


def test_flattening_softmax_is_refused() -> None:
    g = Graph(opset=11, ir_version=6)
    x = g.input("x", np.float32, ["batch", "queries", D])
    p = g.add("Softmax", g.add("MatMul", x, g.add("Transpose", x, perm=[0, 2, 1])))
    g.output(g.add("MatMul", p, x))
    refused(
        g.model(),
        "attention",
        "normalises over several axes",
        {"x": RNG.standard_normal((B, SQ, D)).astype(np.float32)},
    )


def test_probabilities_that_are_an_output_are_refused() -> None:
    g = Graph()
    out, p = attention(g)
    g.output(out)
    g.output(p)
    refused(g.model(), "attention", "output of the graph", feeds())


def test_scores_with_another_user_are_refused() -> None:
    g = Graph()

    def watched(g: Graph, s: str) -> str:
        g.output(g.add("ReduceMax", s, keepdims=0))
        return s

    g.output(attention(g, on_scores=watched)[0])
    refused(g.model(), "attention", "is also used by", feeds())


def test_a_second_user_of_the_keys_keeps_them() -> None:
    g = Graph()

    def watched(g: Graph, k: str) -> str:
        g.output(k)
        return k

    g.output(attention(g, on_k=watched)[0])
    assert len(fused(check(g.model(), feeds()).model, "FusedAttention")) == 1


def test_mask_on_the_probabilities_is_refused() -> None:
    g = Graph()
    g.output(attention(g, on_probabilities=lambda g, p: g.add("Mul", p, g.input("m", np.float32, [N, 1, 1])))[0])
    refused(
        g.model(),
        "attention",
        "Mul between Softmax and the second product",
        feeds(m=RNG.random((N, 1, 1)).astype(np.float32)),
    )


def test_guard_with_another_value_is_refused() -> None:
    g = Graph()
    g.output(attention(g, on_probabilities=lambda g, p: g.add("Where", g.add("IsNaN", p), np.float32(1), p))[0])
    refused(g.model(), "attention", "the probabilities are used by other nodes", feeds())


def test_mask_that_enlarges_the_scores_is_refused() -> None:
    g = Graph()
    q = g.input("x", np.float32, [1, N, "queries", D])
    k = g.input("y", np.float32, [1, N, "keys", D])
    m = g.input("m", np.float32, ["batch", 1, "queries", "keys"])
    p = g.add("Softmax", g.add("Add", g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2])), m), axis=-1)
    g.output(g.add("MatMul", p, k))
    rng = np.random.default_rng(3)
    values = {
        "x": rng.standard_normal((1, N, SQ, D)),
        "y": rng.standard_normal((1, N, SK, D)),
        "m": rng.standard_normal((4, 1, SQ, SK)),
    }
    refused(g.model(), "attention", "not known to broadcast", {n: v.astype(np.float32) for n, v in values.items()})


def test_double_precision_is_refused() -> None:
    g = Graph()
    x = g.input("x", np.float64, ["batch", N, "queries", D])
    p = g.add("Softmax", g.add("MatMul", x, g.add("Transpose", x, perm=[0, 1, 3, 2])), axis=-1)
    g.output(g.add("MatMul", p, x), np.float64)
    refused(g.model(), "attention", "DOUBLE", {"x": RNG.standard_normal((B, N, SQ, D))})


def test_unknown_rank_is_refused() -> None:
    g = Graph()
    x = g.input("x", np.float32, None)
    p = g.add("Softmax", g.add("MatMul", x, g.add("Transpose", x, perm=[0, 1, 3, 2])), axis=-1)
    g.output(g.add("MatMul", p, x))
    refused(g.model(), "attention", "not known", {"x": RNG.standard_normal((B, N, SQ, D)).astype(np.float32)})


def test_sizes_without_names_are_enough_where_nothing_depends_on_them() -> None:
    """Each unnamed size is a symbol of its own; q, k and v of one tensor still agree."""
    g = Graph()
    x = g.input("x", np.float32, [None, N, None, D])
    p = g.add("Softmax", g.add("MatMul", x, g.add("Transpose", x, perm=[0, 1, 3, 2])), axis=-1)
    g.output(g.add("MatMul", p, x))
    assert (
        len(
            fused(
                check(g.model(), {"x": RNG.standard_normal((B, N, SQ, D)).astype(np.float32)}).model, "FusedAttention"
            )
        )
        == 1
    )


@pytest.mark.parametrize(("batch", "reason"), [("b", "not known to be equal"), (1, "common order of batch and heads")])
def test_keys_of_another_batch_are_refused(batch: str | int, reason: str) -> None:
    g = Graph()
    q = g.input("x", np.float32, ["a", N, "queries", D])
    k = g.input("y", np.float32, [batch, N, "keys", D])
    p = g.add("Softmax", g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    g.output(g.add("MatMul", p, k))
    rng = np.random.default_rng(3)
    values = {
        "x": rng.standard_normal((4, N, SQ, D)).astype(np.float32),
        "y": rng.standard_normal((1, N, SK, D)).astype(np.float32),
    }
    refused(g.model(), "attention", reason, values)


def test_keys_of_one_head_serve_all_queries() -> None:
    g = Graph()
    q = g.input("x", np.float32, ["a", N, "queries", D])
    k = g.input("y", np.float32, ["a", 1, "keys", D])
    p = g.add("Softmax", g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    g.output(g.add("MatMul", p, k))
    rng = np.random.default_rng(3)
    values = {
        "x": rng.standard_normal((B, N, SQ, D)).astype(np.float32),
        "y": rng.standard_normal((B, 1, SK, D)).astype(np.float32),
    }
    assert len(fused(check(g.model(), values).model, "FusedAttention")) == 1


def test_classifier_head_is_not_attention() -> None:
    g = Graph()
    x = g.input("x", np.float32, ["batch", 16])
    g.output(g.add("Softmax", g.add("MatMul", x, g.weight(16, 4)), axis=-1))
    result = check(g.model(), {"x": RNG.standard_normal((3, 16)).astype(np.float32)})
    assert not sites(result, "attention")
    assert [s.status for s in sites(result, "softmax")] == ["fused"]


def test_a_half_match_leaves_no_helper_behind() -> None:
    """The first product matches, the second does not: only known domains are in the result."""
    g = Graph()
    q = g.input("x", np.float32, ["a", N, "queries", D])
    k = g.input("y", np.float32, ["a", N, "keys", D])
    p = g.add("Softmax", g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    g.output(g.add("MatMul", g.add("ReduceMean", p, axes=[2], keepdims=1), k))
    rng = np.random.default_rng(3)
    values = {
        "x": rng.standard_normal((B, N, SQ, D)).astype(np.float32),
        "y": rng.standard_normal((B, N, SK, D)).astype(np.float32),
    }
    result = check(g.model(), values)
    assert {n.domain for n in result.model.graph.node} <= {"", "ortplugins"}
    assert all(s.status == "skipped" for s in sites(result, "attention"))


# -- cache


def _cached(extra: bool) -> Graph:
    g = Graph()
    x = g.input("x", np.float32, ["batch", "queries", N * D])
    past_k = g.input("past_k", np.float32, ["batch", N, "past", D])
    past_v = g.input("past_v", np.float32, ["batch", N, "past", D])
    q, k, v = (g.heads(g.add("MatMul", x, g.weight(N * D, N * D)), N, D) for _ in range(3))
    k, v = g.add("Concat", past_k, k, axis=2), g.add("Concat", past_v, v, axis=-2)
    if extra:
        g.output(g.add("ReduceSum", k, keepdims=0))
    p = g.add("Softmax", scaled(0.3)(g, g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2]))), axis=-1)
    g.output(g.merge(g.add("MatMul", p, v), N * D))
    g.output(k)
    g.output(v)
    return g


@pytest.mark.parametrize("past", [0, 4])
def test_cache(past: int) -> None:
    g = _cached(extra=False)
    rng = np.random.default_rng(5)
    cache = {n: rng.standard_normal((B, N, past, D)).astype(np.float32) for n in ("past_k", "past_v")}
    result = check(g.model(), {"x": feeds()["x"], **cache}, {"x": feeds(sq=1)["x"], **cache})
    (node,) = fused(result.model, "FusedAttention")
    assert node["inputs"][4:6] == ["past_k", "past_v"]
    assert "Concat" not in ops(result.model)


def test_cache_that_is_read_elsewhere_stays_outside() -> None:
    g = _cached(extra=True)
    rng = np.random.default_rng(5)
    cache = {n: rng.standard_normal((B, N, 4, D)).astype(np.float32) for n in ("past_k", "past_v")}
    result = check(g.model(), {"x": feeds()["x"], **cache})
    (node,) = fused(result.model, "FusedAttention")
    assert len(node["inputs"]) == 3
    assert ops(result.model).count("Concat") == 2


# -- options


def test_node_kept_on_request() -> None:
    g = Graph()
    g.output(attention(g)[0])
    result = rewrite(g.model(), keep=["pv"])
    (site,) = sites(result, "attention")
    assert (site.status, site.reason, site.fault) == ("skipped", "the node is kept on request", "pv")
    assert "pv" in [n.name for n in result.model.graph.node]


def test_kinds_and_precision() -> None:
    g = Graph()
    g.output(attention(g)[0])
    model = g.model()
    only = rewrite(model, only="attention", precision="tf32x3")
    assert {s.status for s in sites(only, "linear")} == {"skipped"}
    assert fused(only.model, "FusedAttention")[0]["precision"] == "tf32x3"
    skipped = rewrite(model, skip=["attention"], precision={"FusedGemm": "tf32"})
    assert {s.reason for s in sites(skipped, "attention")} == {"the rule is switched off"}
    assert {n["precision"] for n in fused(skipped.model, "FusedGemm")} == {"tf32"}
    with pytest.raises(ValueError, match="expected one of attention, linear, layer_norm, softmax"):
        rewrite(model, only="attentoin")
    with pytest.raises(ValueError, match="expected one of ieee"):
        rewrite(model, precision="tf33")


# -- quantised graphs, half precision


def _quantised(g: Graph, value: str) -> str:
    q = g.add("QuantizeLinear", value, np.float32(0.02), np.array(128, np.uint8))
    return g.add("DequantizeLinear", q, np.float32(0.02), np.array(128, np.uint8))


def test_quantised_operands_are_refused() -> None:
    g = Graph()
    g.output(attention(g, on_q=_quantised)[0])
    site = refused(g.model(), "attention", "quantised graph", feeds())
    assert site.fault is not None


def test_quantised_scores_are_refused() -> None:
    g = Graph()
    g.output(attention(g, on_scores=_quantised, on_probabilities=_quantised)[0])
    model = g.model()
    refused(model, "attention", "QuantizeLinear", feeds())
    assert [s.status for s in sites(rewrite(model), "softmax")] == ["skipped"]


def test_site_across_two_graphs_is_refused() -> None:
    """The scores are computed outside a branch, the rest inside."""
    from onnx import TensorProto, helper

    heads = ["batch", N, "seq", D]
    inside = helper.make_graph(
        [helper.make_node("Softmax", ["s"], ["p"], axis=-1), helper.make_node("MatMul", ["p", "x"], ["o"])],
        "then",
        [],
        [helper.make_tensor_value_info("o", TensorProto.FLOAT, heads)],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["e"])],
        "else",
        [],
        [helper.make_tensor_value_info("e", TensorProto.FLOAT, heads)],
    )
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["x", "t"], ["s"]),
        helper.make_node("If", ["c"], ["y"], then_branch=inside, else_branch=other),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, heads),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, heads)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = RNG.standard_normal((B, N, SQ, D)).astype(np.float32)
    refused(model, "attention", "different graphs", {"x": x, "c": np.array(True)})


def _half(g: Graph, mask: Callable[[Graph, str], str]) -> str:
    x = g.input("x", np.float16, ["batch", N, "seq", D])
    scores = g.add("Mul", g.add("MatMul", x, g.add("Transpose", x, perm=[0, 1, 3, 2])), np.float16(0.3))
    p = g.add("Softmax", g.add("Cast", mask(g, scores), to=1), axis=-1)
    return g.add("MatMul", g.add("Cast", p, to=10), x)


def test_half_precision_with_softmax_in_single() -> None:
    g = Graph()
    keep: Step = lambda g, s: g.add("Where", g.input("m", bool, ["batch", 1, 1, "seq"]), s, np.float16(-np.inf))
    g.output(_half(g, keep), np.float16)
    mask = RNG.random((B, 1, 1, SQ)) < 0.7
    mask[..., 0] = True
    result = check(g.model(), {"x": RNG.standard_normal((B, N, SQ, D)).astype(np.float16), "m": mask}, bound=4e-3)
    assert len(fused(result.model, "FusedAttention")) == 1


def test_finite_fill_that_half_precision_does_not_hold_is_refused() -> None:
    def masked(g: Graph, s: str) -> str:
        added = g.add("Where", g.input("m", bool, ["batch", 1, 1, "seq"]), np.float32(0), np.float32(MIN))
        return g.add("Add", g.add("Cast", s, to=1), added)

    g = Graph()
    g.output(_half(g, masked), np.float16)
    result = rewrite(g.model())
    (site,) = sites(result, "attention")
    assert site.status == "skipped" and "FLOAT" in site.reason
