"""ONNX Runtime's own attention operators, against its CPU kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rewrite_helpers import Graph, check, fused, refused

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


def test_packed_operands_are_refused() -> None:
    g = _graph()
    q = g.input("q", F, ["batch", S, N, 3, D])
    _outputs(g, g.add("MultiHeadAttention", q, domain="com.microsoft", num_heads=N), ["batch", S, W])
    refused(g.model(), "attention", "packed into one tensor")


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
    assert len(fused(result.model, "FusedGemm")) == 3
    assert len(fused(result.model, "FusedAttention")) == 1


def test_group_query_attention_is_refused() -> None:
    g = _graph()
    q = g.input("q", F, ["batch", 1, 4 * D])
    k, v = (g.input(n, F, ["batch", 1, 2 * D]) for n in "kv")
    past = [g.input(n, F, ["batch", 2, "past", D]) for n in ("past_k", "past_v")]
    lengths, total = g.input("lengths", np.int32, ["batch"]), g.input("total", np.int32, [1])
    out = g.add(
        "GroupQueryAttention",
        q,
        k,
        v,
        *past,
        lengths,
        total,
        domain="com.microsoft",
        num_heads=4,
        kv_num_heads=2,
        outputs=3,
    )
    g.output(out[0], F, ["batch", 1, 4 * D])
    for n in out[1:]:
        g.output(n, F, ["batch", 2, "total", D])
    feeds = {
        "q": _values(B, 1, 4 * D),
        "k": _values(B, 1, 2 * D),
        "v": _values(B, 1, 2 * D),
        "past_k": _values(B, 2, 4, D),
        "past_v": _values(B, 2, 4, D),
        "lengths": np.array([4, 4], np.int32),
        "total": np.array([5], np.int32),
    }
    refused(g.model(), "attention", "only known at run time", feeds)
