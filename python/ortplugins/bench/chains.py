"""Attention in an ONNX Runtime session on CUDA: our op and the stock MultiHeadAttention, many nodes in one session.

Each node's result is the next one's query, so that the nodes run one after the other. The run is a replay of the
session's CUDA graph where ONNX Runtime can capture it. Its time, divided by the nodes, is what a node costs in a model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import helper

from ..errors import OrtPluginsError
from ..ops import DOMAIN, FUSED_ATTENTION
from ..session import GraphCall, make_session
from .graphs import graph

_RUN_SECONDS = 2e-3  # against this, the tens of microseconds that starting a run takes are small
_MAX_NODES = 96


class Chain:
    """``seconds()`` is the time of one node."""

    def __init__(self, op: str, attrs: Mapping[str, Any], feeds: dict[str, np.ndarray], nodes: int):
        domain = DOMAIN if op == FUSED_ATTENTION.name else "com.microsoft"
        chain = [
            helper.make_node(op, [f"y{i}" if i else "q", "k", "v"], [f"y{i + 1}"], domain=domain, **attrs)
            for i in range(nodes)
        ]
        model, y = graph(chain, feeds, f"y{nodes}"), {f"y{nodes}": feeds["q"].shape}
        try:
            session = make_session(model, provider="cuda", provider_options={"enable_cuda_graph": "1"})
            self._call = GraphCall(session, feeds, y, feeds["q"].dtype.name, 1)
            self._call()
        except Exception as error:
            raise OrtPluginsError(f"{op} does not run in a captured session: {error}") from error
        self._nodes = nodes
        for _ in range(3):
            self._call()

    def result(self) -> np.ndarray:
        """The last node's result."""
        return next(iter(self._call.outputs.values())).numpy()

    def seconds(self) -> float:
        start = time.perf_counter()
        self._call()
        return (time.perf_counter() - start) / self._nodes


def chains(problem: Mapping[str, Any], dtype: str, precision: str | None, node_seconds: float) -> dict[str, Chain]:
    """Ours and ``ort_mha`` for a problem of self-attention without a mask; only what runs. About 2 ms a run."""
    batch, length, heads, dim = (problem[key] for key in ("batch", "q_len", "heads", "head_dim"))
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((batch, length, heads * dim), np.float32).astype(dtype) for n in "qkv"}
    nodes = max(2, min(_MAX_NODES, math.ceil(_RUN_SECONDS / node_seconds)))
    causal = int(problem["is_causal"])
    ours = {"num_heads": heads, "is_causal": causal} | ({"precision": precision} if precision else {})
    made = {"ours": Chain(FUSED_ATTENTION.name, ours, feeds, nodes)}
    try:
        stock = Chain("MultiHeadAttention", {"num_heads": heads, "unidirectional": causal}, feeds, nodes)
    except OrtPluginsError:  # no kernel of ONNX Runtime takes this type or head size
        return made
    return made | {"ort_mha": stock}
