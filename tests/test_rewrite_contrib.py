"""ONNX Runtime's own attention operators, against its CPU kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rewrite_helpers import Graph, check, fused, ops, ours, refused, relative_error, sites

from ortplugins.rewrite import rewrite

B, N, D, S, L = 2, 3, 8, 5, 7
W = N * D
F = np.float32
RNG = np.random.default_rng(9)


def _values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(F)


def _graph() -> Graph:
    g = Graph()
    g.domains.append("com.microsoft")
    return g


def _outputs(g: Graph, names: Any, shape: list) -> None:
    names = [names] if isinstance(names, str) else names
    g.output(names[0], F, shape)
    for n in names[1:]:
        g.output(n, F, ["batch", N, "total", D])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mask", [None, "padding", "padding3", "added", "both"])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_multi_head_attention(bias: bool, mask: str | None, causal: int, scale: float | None) -> None:
    g = _graph()
    keys = S if causal else L
    q = g.input("q", F, ["batch", S, W])
    k, v = (g.input(n, F, ["batch", keys, W]) for n in "kv")
    feeds = {"q": _values(B, S, W), "k": _values(B, keys, W), "v": _values(B, keys, W)}
    inputs: list[Any] = [q, k, v, g.weight(3 * W) if bias else None, None, None]
    if mask in ("padding", "both"):
        inputs[4] = g.input("pad", np.int32, ["batch", keys])
        feeds["pad"] = np.array([[1] * keys, [1] * 3 + [0] * (keys - 3)], np.int32)
    if mask == "padding3":
        inputs[4] = g.input("pad", np.int32, ["batch", S, keys])
        feeds["pad"] = (RNG.random((B, S, keys)) < 0.7).astype(np.int32)
    if mask in ("added", "both"):
        inputs[5] = g.input("added", F, ["batch", N, S, keys])
        feeds["added"] = _values(B, N, S, keys)
    attrs = {} if scale is None else {"scale": scale}
    out = g.add("MultiHeadAttention", *inputs, domain="com.microsoft", num_heads=N, unidirectional=causal, **attrs)
    _outputs(g, out, ["batch", S, W])
    assert len(fused(check(g.model(), feeds).model, "FusedAttention")) == 1


def test_multi_head_attention_with_a_cache() -> None:
    g = _graph()
    q, k, v = (g.input(n, F, ["batch", "seq", W]) for n in "qkv")
    past = [g.input(n, F, ["batch", N, "past", D]) for n in ("past_k", "past_v")]
    out = g.add(
        "MultiHeadAttention",
        q,
        k,
        v,
        None,
        None,
        None,
        *past,
        domain="com.microsoft",
        num_heads=N,
        unidirectional=1,
        outputs=3,
    )
    _outputs(g, out, ["batch", "seq", W])
    feeds = {n: _values(B, 1, W) for n in "qkv"} | {n: _values(B, N, 4, D) for n in ("past_k", "past_v")}
    (node,) = fused(check(g.model(), feeds).model, "FusedAttention")
    assert node["inputs"][4:6] == ["past_k", "past_v"] and node["is_causal"] == 1


def test_multi_head_attention_over_keys_of_rank_4() -> None:
    g = _graph()
    q = g.input("q", F, ["batch", S, W])
    k, v = (g.input(n, F, ["batch", N, L, D]) for n in "kv")
    _outputs(g, g.add("MultiHeadAttention", q, k, v, domain="com.microsoft", num_heads=N), ["batch", S, W])
    result = check(g.model(), {"q": _values(B, S, W), "k": _values(B, N, L, D), "v": _values(B, N, L, D)})
    assert len(fused(result.model, "FusedAttention")) == 1


def _numpy_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, added: np.ndarray, causal: bool) -> np.ndarray:
    """Attention of (batch, sequence, heads, head_dim), heads merged in the result."""
    scores = np.einsum("bsnd,bknd->bnsk", q, k, dtype=np.float64) / np.sqrt(q.shape[-1]) + added
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    y = np.einsum("bnsk,bknd->bsnd", p / p.sum(axis=-1, keepdims=True), v)
    return y.reshape(*y.shape[:2], -1)


@pytest.mark.parametrize("separate_queries", [False, True])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("added", [False, True])
def test_packed_operands(separate_queries: bool, causal: int, added: bool) -> None:
    """ONNX Runtime has no CPU kernel for these, so the reference is NumPy."""
    g = _graph()
    keys = S if not separate_queries or causal else L
    packed = _values(B, keys, N, 2 if separate_queries else 3, D)
    feeds = {"kv": packed}
    inputs: list[Any] = [g.input("kv", F, ["batch", keys, *packed.shape[2:]])]
    query = packed[:, :, :, 0]
    if separate_queries:
        feeds["q"] = _values(B, S, W)
        query = feeds["q"].reshape(B, S, N, D)
        inputs = [g.input("q", F, ["batch", S, W]), *inputs]
    if added:
        feeds["m"] = _values(B, N, S, keys)
        inputs += [None] * (5 - len(inputs)) + [g.input("m", F, ["batch", N, S, keys])]
    out = g.add("MultiHeadAttention", *inputs, domain="com.microsoft", num_heads=N, unidirectional=causal)
    _outputs(g, out, ["batch", S, W])
    model = rewrite(g.model()).model
    assert len(fused(model, "FusedAttention")) == 1 and "MultiHeadAttention" not in ops(model)
    mask = feeds["m"] if added else np.zeros(())
    expected = _numpy_attention(query, packed[:, :, :, -2], packed[:, :, :, -1], mask, bool(causal))
    assert relative_error(ours(model)(feeds)[0], expected.astype(F)) <= 2e-6


def test_packed_operands_with_a_bias_are_refused() -> None:
    g = _graph()
    q = g.input("q", F, ["batch", S, N, 3, D])
    out = g.add("MultiHeadAttention", q, None, None, g.weight(3 * W), domain="com.microsoft", num_heads=N)
    _outputs(g, out, ["batch", S, W])
    (site,) = sites(rewrite(g.model()), "attention")
    assert site.status == "skipped" and "together with a bias" in site.reason


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("causal", [0, 1])
def test_projected_attention(mask: bool, causal: int) -> None:
    g = _graph()
    x = g.input("x", F, ["batch", S, W])
    feeds = {"x": _values(B, S, W)}
    pad = None
    if mask:
        pad = g.input("pad", np.int32, ["batch", S])
        feeds["pad"] = np.array([[1] * S, [1, 1, 0, 0, 0]], np.int32)
    out = g.add(
        "Attention",
        x,
        g.weight(W, 3 * W),
        g.weight(3 * W),
        pad,
        domain="com.microsoft",
        num_heads=N,
        unidirectional=causal,
    )
    _outputs(g, out, ["batch", S, W])
    result = check(g.model(), feeds)
    assert len(fused(result.model, "FusedGemm")) == 1  # the three parts of the packed weight are joined again
    assert len(fused(result.model, "FusedAttention")) == 1


def _group_query(
    g: Graph, past: bool, seq: int | str, lengths: str, total: str, added: str | None = None, **attrs: Any
) -> None:
    q = g.input("q", F, ["batch", seq, 4 * D])
    k, v = (g.input(n, F, ["batch", seq, 2 * D]) for n in "kv")
    cache = [g.input(n, F, ["batch", 2, "past", D]) if past else None for n in ("past_k", "past_v")]
    more = [] if added is None else [None, None, None, added]
    out = g.add(
        "GroupQueryAttention",
        *(q, k, v, *cache, lengths, total, *more),
        domain="com.microsoft",
        num_heads=4,
        kv_num_heads=2,
        outputs=3,
        **attrs,
    )
    g.output(out[0], F, ["batch", seq, 4 * D])
    for n in out[1:]:
        g.output(n, F, ["batch", 2, "total", D])


def _group_query_feeds(seq: int, past: int | None) -> dict[str, np.ndarray]:
    feeds = {"q": _values(B, seq, 4 * D), "k": _values(B, seq, 2 * D), "v": _values(B, seq, 2 * D)}
    if past is not None:
        feeds |= {n: _values(B, 2, past, D) for n in ("past_k", "past_v")}
    return feeds


def _lengths_from_sizes(g: Graph, past: bool, short: int = 0) -> tuple[str, str]:
    """Valid lengths, less one, and total length, from the sizes of the inputs; ``short`` tokens less."""
    one = g.add("Slice", g.add("Shape", "k"), np.array([1]), np.array([2]))
    if past:
        one = g.add("Add", one, g.add("Slice", g.add("Shape", "past_k"), np.array([2]), np.array([3])))
    batch = g.add("Slice", g.add("Shape", "k"), np.array([0]), np.array([1]))
    last = g.add("Expand", g.add("Sub", one, np.array([1 + short])), batch)
    return g.add("Cast", last, to=6), g.add("Cast", one, to=6)


@pytest.mark.parametrize("past", [None, 4])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_group_query_attention_with_lengths_from_sizes(past: int | None, softcap: float, scale: float | None) -> None:
    g = _graph()
    attrs = {"softcap": softcap} | ({} if scale is None else {"scale": scale})
    _group_query(g, past is not None, "seq", *_lengths_from_sizes(g, past is not None), **attrs)
    g.nodes.sort(key=lambda n: n.op_type == "GroupQueryAttention")
    result = check(g.model(), _group_query_feeds(S if past is None else 1, past))
    (node,) = fused(result.model, "FusedAttention")
    assert (node["num_heads"], node["kv_num_heads"], node["is_causal"]) == (4, 2, 1)
    assert ops(result.model) == ["FusedAttention"]


def test_group_query_attention_with_a_bias() -> None:
    g = _graph()
    added = g.input("added", F, ["batch", 1, "seq", "seq"])
    _group_query(g, False, "seq", *_lengths_from_sizes(g, False), added)
    g.nodes.sort(key=lambda n: n.op_type == "GroupQueryAttention")
    feeds = _group_query_feeds(S, None) | {"added": _values(B, 1, S, S)}
    assert ops(check(g.model(), feeds).model) == ["FusedAttention"]


def test_group_query_attention_with_constant_lengths() -> None:
    g = _graph()
    lengths, total = g.const(np.full(B, S - 1, np.int32)), g.const(np.array([S], np.int32))
    _group_query(g, False, S, lengths, total)
    assert ops(check(g.model(), _group_query_feeds(S, None)).model) == ["FusedAttention"]


@pytest.mark.parametrize("case", ["given", "short", "ragged"])
def test_group_query_attention_of_other_lengths_is_refused(case: str) -> None:
    g = _graph()
    feeds = _group_query_feeds(1, 4)
    if case == "given":
        lengths, total = g.input("lengths", np.int32, ["batch"]), g.input("total", np.int32, [1])
        feeds |= {"lengths": np.array([4, 4], np.int32), "total": np.array([5], np.int32)}
    elif case == "short":
        lengths, total = _lengths_from_sizes(g, True, short=1)
    else:
        lengths, total = g.const(np.array([4, 3], np.int32)), _lengths_from_sizes(g, True)[1]
    _group_query(g, True, 1, lengths, total)
    g.nodes.sort(key=lambda n: n.op_type == "GroupQueryAttention")
    refused(g.model(), "attention", "only known at run time", feeds)


@pytest.mark.parametrize(
    ("attrs", "reason"), [({"local_window_size": 3}, "a local window"), ({"smooth_softmax": 1}, "a sink")]
)
def test_group_query_attention_of_another_kind_is_refused(attrs: dict[str, int], reason: str) -> None:
    g = _graph()
    _group_query(g, False, "seq", *_lengths_from_sizes(g, False), **attrs)
    g.nodes.sort(key=lambda n: n.op_type == "GroupQueryAttention")
    refused(g.model(), "attention", reason, _group_query_feeds(S, None))
