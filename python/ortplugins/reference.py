"""The same graph in float64: what both the stock and the rewritten model are measured against.

The model is converted to double precision (weights keep the values they were rounded to) and evaluated by ONNX's
reference evaluator, which shares no code with ONNX Runtime or with this package.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, numpy_helper

from .session import load_model

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}

MAX_WEIGHT_BYTES = 3 << 30
"""Models with more float weights than this in float64 are not converted."""


class NoReferenceError(Exception):
    """The graph cannot be evaluated in float64; the message says why."""


def _custom_ops() -> list[type]:
    from onnx.reference.op_run import OpRun

    class Erf(OpRun):  # the evaluator's own rounds to float32
        op_domain = ""

        def _run(self, x):
            return (np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype) if x.size else x,)

    return [Erf]


class Float64Model:
    """A callable that evaluates ``model`` in float64. ``outputs`` are tensor names; all graph outputs by default.

    Raises NoReferenceError when the graph holds an operator that the evaluator does not know, or is too large.
    """

    def __init__(self, model: onnx.ModelProto | str | os.PathLike[str], outputs: Sequence[str] | None = None):
        from onnx.reference import ReferenceEvaluator

        graph = load_model(model, load_external_data=False).graph  # weights are read only if they are not too many
        bytes_needed = 8 * sum(math.prod(t.dims) for t in graph.initializer if t.data_type in _FLOATS)
        if bytes_needed > MAX_WEIGHT_BYTES:
            raise NoReferenceError(f"its weights take {bytes_needed / 2**30:.1f} GiB in float64")
        try:
            self._evaluator = ReferenceEvaluator(to_float64(load_model(model)), new_ops=_custom_ops())
        except Exception as error:
            raise NoReferenceError(_reason(error)) from error
        self._outputs = list(outputs) if outputs is not None else [o.name for o in graph.output]

    def __call__(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        doubles = {n: v.astype(np.float64) if _is_float(v) else v for n, v in feeds.items()}
        try:
            with np.errstate(all="ignore"):
                values = self._evaluator.run(self._outputs, doubles)
        except Exception as error:
            raise NoReferenceError(_reason(error)) from error
        return dict(zip(self._outputs, (np.asarray(v) for v in values)))


def to_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``model`` in which every float32, float16 and bfloat16 tensor is float64."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _convert_graph(copy.graph)
    for function in copy.functions:
        _convert_nodes(function.node)
    return copy


def _convert_graph(graph: onnx.GraphProto) -> None:
    del graph.value_info[:]
    for tensor in graph.initializer:
        _convert_tensor(tensor)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _FLOATS:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    _convert_nodes(graph.node)


def _convert_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        if node.op_type == "ConstantOfShape" and not node.attribute:
            zero = numpy_helper.from_array(np.zeros(1, np.float64))
            node.attribute.append(onnx.helper.make_attribute("value", zero))
        for attribute in list(node.attribute):
            if attribute.name == "softmax_precision":
                node.attribute.remove(attribute)
            elif attribute.name in ("to", "dtype") and attribute.i in _FLOATS:
                attribute.i = TensorProto.DOUBLE
            elif attribute.type == AttributeProto.TENSOR:
                _convert_tensor(attribute.t)
            elif attribute.type == AttributeProto.GRAPH:
                _convert_graph(attribute.g)
            elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                value = (
                    np.float64(attribute.f)
                    if attribute.name == "value_float"
                    else np.array(attribute.floats, np.float64)
                )
                attribute.CopyFrom(onnx.helper.make_attribute("value", numpy_helper.from_array(np.asarray(value))))


def _convert_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _FLOATS:
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), name))


def _is_float(value: Any) -> bool:
    # bfloat16 is not a NumPy floating type
    return np.issubdtype(value.dtype, np.floating) or value.dtype.name == "bfloat16"


def _reason(error: Exception) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
