"""What is benchmarked: for each op its problems, inputs, stock nodes and float64 reference.

A problem is the ``shape`` of a record, for instance ``{"rows": 4096, "cols": 1024}``; everything else follows from it.
The tables of problems are at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ..ops import FUSED_ATTENTION, FUSED_GEMM, FUSED_LAYER_NORM, FUSED_SOFTMAX, OpSpec
from .graphs import graph, one_op_model

Problem = Mapping[str, Any]
Arrays = list[np.ndarray | None]


@dataclass(frozen=True)
class Workload:
    """How to benchmark one op.

    ``inputs(problem, rng)`` are float32 inputs in the order of the specification, ``attrs(problem)`` the node's
    attributes, ``stock(problem, inputs)`` a model of standard nodes for the same, and ``reference(problem, inputs)``
    the result in float64. ``constants`` are inputs that are weights. ``error_scale(problem, inputs)`` is what errors
    are divided by. ``flops`` and ``bytes`` (for elements of ``size`` bytes) are the least work a problem takes.
    """

    spec: OpSpec
    inputs: Callable[[Problem, np.random.Generator], Arrays]
    stock: Callable[[Problem, Arrays], onnx.ModelProto]
    reference: Callable[[Problem, Arrays], np.ndarray]
    flops: Callable[[Problem], float]
    bytes: Callable[[Problem, int], float]
    attrs: Callable[[Problem], dict[str, Any]] = lambda problem: {}
    constants: tuple[int, ...] = ()
    error_scale: Callable[[Problem, Arrays], np.ndarray | float] = lambda problem, inputs: 1.0
    cpu: Sequence[Problem] = field(default_factory=tuple)

    def model(self, problem: Problem, inputs: Arrays) -> onnx.ModelProto:
        """The model of one node of ours."""
        return one_op_model(self.spec.name, inputs, self.attrs(problem), constants=self.constants)

    def feeds(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """The inputs that are not weights, by name."""
        return {
            t.name: v
            for i, (t, v) in enumerate(zip(self.spec.inputs, inputs))
            if v is not None and i not in self.constants
        }

    def error(self, problem: Problem, inputs: Arrays, result: np.ndarray) -> float:
        """Largest error of ``result`` against float64; NaN if there is one."""
        difference = np.abs(result.astype(np.float64) - self.reference(problem, inputs))
        return float(np.max(difference / self.error_scale(problem, inputs)))


def _softmax_inputs(p: Problem, rng: np.random.Generator) -> Arrays:
    return [rng.standard_normal((p["rows"], p["cols"]), np.float32)]


def _softmax_stock(p: Problem, inputs: Arrays) -> onnx.ModelProto:
    return graph([helper.make_node("Softmax", ["x"], ["y"], axis=-1)], {"x": inputs[0]}, "y")


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _softmax_reference(p: Problem, inputs: Arrays) -> np.ndarray:
    return _softmax(inputs[0].astype(np.float64))


SOFTMAX = Workload(
    FUSED_SOFTMAX,
    _softmax_inputs,
    _softmax_stock,
    _softmax_reference,
    flops=lambda p: 5.0 * p["rows"] * p["cols"],
    bytes=lambda p, size: 2.0 * size * p["rows"] * p["cols"],
    cpu=[{"rows": r, "cols": c} for r, c in ((4096, 128), (4096, 1024), (1024, 4096), (64, 131072))],
)


def _gemm_inputs(p: Problem, rng: np.random.Generator) -> Arrays:
    b = rng.standard_normal((p["k"], p["n"]), np.float32) / math.sqrt(p["k"])
    return [
        rng.standard_normal((p["m"], p["k"]), np.float32),
        b.astype(np.float32),
        rng.standard_normal(p["n"], np.float32),
    ]


def _gemm_stock(p: Problem, inputs: Arrays) -> onnx.ModelProto:
    """MatMul, Add and the erf form of GELU, as torch exports a linear layer with its activation."""
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["t"]),
        helper.make_node("Div", ["t", "sqrt2"], ["scaled"]),
        helper.make_node("Erf", ["scaled"], ["erf"]),
        helper.make_node("Add", ["erf", "one"], ["shifted"]),
        helper.make_node("Mul", ["t", "shifted"], ["twice"]),
        helper.make_node("Mul", ["twice", "half"], ["y"]),
    ]
    scalars = {
        name: np.asarray(value, inputs[0].dtype)
        for name, value in (("sqrt2", math.sqrt(2)), ("one", 1.0), ("half", 0.5))
    }
    return graph(nodes, dict(zip("a b bias".split(), inputs)), "y", constants=["b", "bias"], extra=scalars)


def _gemm_reference(p: Problem, inputs: Arrays) -> np.ndarray:
    a, b, bias = (v.astype(np.float64) for v in inputs)
    t = a @ b + bias
    return 0.5 * t * (1.0 + np.vectorize(math.erf)(t / math.sqrt(2)))


GEMM = Workload(
    FUSED_GEMM,
    _gemm_inputs,
    _gemm_stock,
    _gemm_reference,
    flops=lambda p: 2.0 * p.get("batch", 1) * p["m"] * p["n"] * p["k"],
    bytes=lambda p, size: float(size) * p.get("batch", 1) * (p["m"] * p["k"] + p["k"] * p["n"] + p["m"] * p["n"]),
    attrs=lambda p: {"activation": "gelu"},
    constants=(1, 2),
    error_scale=lambda p, inputs: np.abs(inputs[0].astype(np.float64)) @ np.abs(inputs[1].astype(np.float64)),
    cpu=[{"m": m, "n": n, "k": k} for m, n, k in ((128, 1536, 384), (1024, 1536, 384), (512, 3072, 768))],
)


def _attention_inputs(p: Problem, rng: np.random.Generator) -> Arrays:
    q = rng.standard_normal((p["batch"], p["heads"], p["q_len"], p["head_dim"]), np.float32)
    k, v = (rng.standard_normal((p["batch"], p["kv_heads"], p["kv_len"], p["head_dim"]), np.float32) for _ in range(2))
    if _attention_layout(p) == "BSNH":
        q, k, v = (np.ascontiguousarray(t.transpose(0, 2, 1, 3)) for t in (q, k, v))
    return [q, k, v]


def _attention_layout(p: Problem) -> str:
    return p.get("layout", "BNSH")


def _attention_stock(p: Problem, inputs: Arrays) -> onnx.ModelProto:
    """The decomposed graph.

    In the layout BNSH, its best, without transposes but that of the keys, which ONNX Runtime fuses; in BSNH, in which
    the projections leave their results, with the transposes of exported graphs.
    """
    exported = _attention_layout(p) == "BSNH"
    nodes = []
    q, v = ("q_heads", "v_heads") if exported else ("q", "v")
    if exported:
        nodes += [helper.make_node("Transpose", [t], [f"{t}_heads"], perm=[0, 2, 1, 3]) for t in "qv"]
    nodes += [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 3, 1] if exported else [0, 1, 3, 2]),
        helper.make_node("MatMul", [q, "kt"], ["scores"]),
        helper.make_node("Mul", ["scores", "scale"], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", v], ["y_heads" if exported else "y"]),
    ]
    if exported:
        nodes.append(helper.make_node("Transpose", ["y_heads"], ["y"], perm=[0, 2, 1, 3]))
    scale = np.asarray(1.0 / math.sqrt(p["head_dim"]), inputs[0].dtype)
    return graph(nodes, dict(zip("q k v".split(), inputs)), "y", extra={"scale": scale})


def _attention_reference(p: Problem, inputs: Arrays) -> np.ndarray:
    q, k, v = (t.astype(np.float64) for t in inputs)
    exported = _attention_layout(p) == "BSNH"
    if exported:
        q, k, v = (t.transpose(0, 2, 1, 3) for t in (q, k, v))
    groups = p["heads"] // p["kv_heads"]
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    out = np.empty(q.shape[:-1] + v.shape[-1:])
    for b, h in np.ndindex(q.shape[:2]):  # one score matrix at a time
        out[b, h] = _softmax(q[b, h] @ k[b, h].T / math.sqrt(p["head_dim"])) @ v[b, h]
    return out.transpose(0, 2, 1, 3) if exported else out


def _self_attention(batch: int, heads: int, length: int, head_dim: int) -> dict[str, Any]:
    return {
        "batch": batch,
        "heads": heads,
        "kv_heads": heads,
        "q_len": length,
        "kv_len": length,
        "head_dim": head_dim,
        "is_causal": False,
        "mask": "none",
    }


def key_lengths(p: Problem) -> list[int]:
    """Keys of each sequence that its mask leaves: under ``padding`` from half of them to all."""
    lengths = np.linspace(p["kv_len"] // 2 if p["mask"] == "padding" else p["kv_len"], p["kv_len"], p["batch"])
    return lengths.astype(int).tolist()


def _scores(p: Problem, keys: int) -> float:
    """Scores of one head of a sequence with so many keys that no mask excludes."""
    rows = min(p["q_len"], keys) if p["is_causal"] else 0  # from the first one on, until a row sees all keys
    return rows * rows / 2 + (p["q_len"] - rows) * keys


def _attention_flops(p: Problem) -> float:
    return 4.0 * p["heads"] * p["head_dim"] * sum(_scores(p, keys) for keys in key_lengths(p))


def _attention_bytes(p: Problem, size: int) -> float:
    queries, keys = p["batch"] * p["heads"] * p["q_len"], p["kv_heads"] * sum(key_lengths(p))
    mask = {
        "none": 0.0,
        "padding": p["batch"] * p["kv_len"],
        "bias": size * p["heads"] * _scores(p, p["kv_len"]),
    }
    return 2.0 * size * p["head_dim"] * (queries + keys) + mask[p["mask"]]


ATTENTION = Workload(
    FUSED_ATTENTION,
    _attention_inputs,
    _attention_stock,
    _attention_reference,
    flops=_attention_flops,
    bytes=_attention_bytes,
    attrs=lambda p: {"layout": _attention_layout(p)},
    cpu=[
        {**_self_attention(*s), "layout": layout}
        for layout in ("BSNH", "BNSH")
        for s in ((8, 12, 128, 32), (1, 12, 512, 64), (1, 12, 2048, 64))
    ],
)


def _layer_norm_inputs(p: Problem, rng: np.random.Generator) -> Arrays:
    shape = (p["rows"], p["cols"])
    gamma, beta = (rng.standard_normal(p["cols"], np.float32) for _ in range(2))
    residual = rng.standard_normal(shape, np.float32) if p.get("residual") else None
    return [rng.standard_normal(shape, np.float32), residual, gamma, beta]


def _layer_norm_stock(p: Problem, inputs: Arrays) -> onnx.ModelProto:
    feeds = {name: value for name, value in zip(("x", "residual", "gamma", "beta"), inputs) if value is not None}
    if p.get("residual"):
        node = helper.make_node("SkipLayerNormalization", list(feeds), ["y"], domain="com.microsoft", epsilon=1e-5)
    else:
        node = helper.make_node("LayerNormalization", list(feeds), ["y"], axis=-1, epsilon=1e-5)
    return graph([node], feeds, "y", constants=["gamma", "beta"])


def _layer_norm_reference(p: Problem, inputs: Arrays) -> np.ndarray:
    x, residual, gamma, beta = (None if v is None else v.astype(np.float64) for v in inputs)
    s = x if residual is None else x + residual
    s = s - s.mean(axis=-1, keepdims=True)
    return s / np.sqrt(np.mean(s * s, axis=-1, keepdims=True) + 1e-5) * gamma + beta


LAYER_NORM = Workload(
    FUSED_LAYER_NORM,
    _layer_norm_inputs,
    _layer_norm_stock,
    _layer_norm_reference,
    flops=lambda p: 8.0 * p["rows"] * p["cols"],
    bytes=lambda p, size: (3.0 if p.get("residual") else 2.0) * size * p["rows"] * p["cols"],
    constants=(2, 3),
    cpu=[
        {"rows": r, "cols": c, **extra}
        for extra in ({}, {"residual": True})
        for r, c in ((128, 384), (1024, 768), (4096, 768))
    ],
)

WORKLOADS: dict[str, Workload] = {w.spec.kernel: w for w in (SOFTMAX, GEMM, ATTENTION, LAYER_NORM)}
"""Every workload by its kernel's name, as on the command line."""
