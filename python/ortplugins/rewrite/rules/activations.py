"""Which activation a few element-wise nodes compute.

Exporters spell GELU in a dozen ways. Instead of a pattern for each, the nodes between a value and the place where its
uses meet again are evaluated as a function of one number, in float64, and compared with the activations that FusedGemm
has. The nodes that may take part are analytic, so agreement on the points below, which cover the bend and both tails,
is agreement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..facts import Facts, attr, op_of

_POINTS = np.concatenate([np.linspace(-8, 8, 97), [-1e4, -300.0, -60.0, -17.3, -1e-3, 1e-4, 12.7, 60.0, 300.0, 1e4]])

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x * _sigmoid(x),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
}

_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Relu": lambda x: np.maximum(x, 0.0),
    "Erf": _erf,
    "Tanh": np.tanh,
    "Sigmoid": _sigmoid,
    "Exp": np.exp,
    "Neg": np.negative,
    "Identity": lambda x: x,
    "Reciprocal": lambda x: 1.0 / x,
    "Sqrt": np.sqrt,
}
_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Max": np.maximum,
}
_MAX_NODES = 14


@dataclass
class Activation:
    name: str
    value: ir.Value
    nodes: list[ir.Node]


def _apply(facts: Facts, node: ir.Node, inputs: list[np.ndarray]) -> np.ndarray | None:
    op = op_of(node)
    if op in _UNARY:
        return _UNARY[op](inputs[0])
    if op in _BINARY and len(inputs) == 2:
        return _BINARY[op](*inputs)
    if op in ("Gelu", "com.microsoft::Gelu"):
        approximate = attr(node, "approximate", "none")
        return {"none": _gelu, "tanh": _gelu_tanh}[approximate](inputs[0]) if approximate in ("none", "tanh") else None
    if op == "com.microsoft::FastGelu" and len(inputs) == 1:
        return _gelu_tanh(inputs[0])
    if op in ("com.microsoft::QuickGelu", "Swish"):
        alpha = attr(node, "alpha", 1.702 if op == "com.microsoft::QuickGelu" else 1.0)
        return inputs[0] * _sigmoid(alpha * inputs[0]) if isinstance(alpha, float) else None
    if op == "Cast" and facts.dtype(node.inputs[0]) == facts.dtype(node.outputs[0]):
        return inputs[0]
    return None


def find(facts: Facts, value: ir.Value) -> Activation | None:
    """The activation that all users of `value` compute together; None if they compute something else."""
    known: dict[ir.Value, np.ndarray] = {value: _POINTS}
    nodes: list[ir.Node] = []
    inside: set[ir.Node] = set()
    live = {value}
    shape = facts.shape(value)
    with np.errstate(all="ignore"):
        while len(nodes) < _MAX_NODES:
            if any(v.is_graph_output() for v in live):
                return None
            ready = None
            for v in live:
                for node in facts.readers(v):
                    if node in inside:
                        continue
                    if node.graph is not value.graph:
                        return None
                    if all(i in known or facts.scalar(i) is not None for i in node.inputs):
                        ready = node
                        break
                if ready is not None:
                    break
            if ready is None:
                return None
            inputs = []
            for i in ready.inputs:
                if i in known:
                    inputs.append(known[i])
                else:
                    inputs.append(np.full_like(_POINTS, _exact(facts.scalar(i), facts.dtype(i) == ir.DataType.FLOAT16)))
            if facts.shape(ready.outputs[0]) != shape:
                return None
            result = _apply(facts, ready, inputs)
            if result is None:
                return None
            nodes.append(ready)
            inside.add(ready)
            out = ready.outputs[0]
            known[out] = result
            live.add(out)
            live = {
                v for v in live if v is out or any(n not in inside for n in facts.readers(v)) or v.is_graph_output()
            }
            if live == {out}:
                for name, function in ACTIVATIONS.items():
                    if _agree(result, function(_POINTS)):
                        return Activation(name, out, nodes)
    return None


# Numbers that activations are written with, to give a float32 (or float16) constant its exact meaning.
_MEANT = (
    0.5,
    1.0,
    2.0,
    3.0,
    math.sqrt(2.0),
    math.sqrt(0.5),
    math.sqrt(2.0 / math.pi),
    0.044715,
    1.702,
    math.sqrt(2.0 / math.pi) * 0.044715,
)


def _exact(number: float, half: bool) -> float:
    """The number that a constant was meant to be, before it was rounded to its type."""
    return next((m for m in _MEANT if abs(number - m) <= (6e-4 if half else 1e-6) * m), number)


def _agree(a: np.ndarray, b: np.ndarray) -> bool:
    # At 1e4 the cube inside tanh overflows nothing in float64, but exp does: both sides then have the same limit.
    return bool(np.all(np.isfinite(a)) and np.all(np.abs(a - b) <= 2e-7 * (1.0 + np.abs(b))))
