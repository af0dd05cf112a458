"""Small graphs for benchmarks: one op of ours, and the stock nodes that compute the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ..ops import DOMAIN, ONNX_TYPE_CODES, OPSET_VERSION, find

IR_VERSION, OPSET = 8, 17
"""Old enough for every ONNX Runtime that is supported."""


def one_op_model(
    op: str,
    inputs: Sequence[np.ndarray | None],
    attrs: Mapping[str, Any] | None = None,
    *,
    constants: Sequence[int] = (),
) -> onnx.ModelProto:
    """A model of one node of ``op``, its inputs named as in the specification; those in ``constants`` are weights."""
    spec = find(op)
    feeds = {t.name: value for t, value in zip(spec.inputs, inputs) if value is not None}
    names = [t.name if value is not None else "" for t, value in zip(spec.inputs, inputs)]
    node = helper.make_node(op, names, [spec.outputs[0].name], name="node", domain=DOMAIN, **dict(attrs or {}))
    return graph([node], feeds, spec.outputs[0].name, constants=[spec.inputs[i].name for i in constants])


def graph(
    nodes: Sequence[onnx.NodeProto],
    feeds: Mapping[str, np.ndarray],
    output: str,
    *,
    constants: Sequence[str] = (),
    extra: Mapping[str, np.ndarray] | None = None,
    opset: int = OPSET,
) -> onnx.ModelProto:
    """A model of ``nodes`` whose inputs are ``feeds``, except those in ``constants`` and ``extra``, which are weights.

    The output has the type of the first input.
    """
    types = {name: ONNX_TYPE_CODES[value.dtype.name] for name, value in feeds.items()}
    inputs = [helper.make_tensor_value_info(n, types[n], v.shape) for n, v in feeds.items() if n not in constants]
    weights = {**{n: feeds[n] for n in constants}, **(extra or {})}
    initializers = [
        helper.make_tensor(n, ONNX_TYPE_CODES[v.dtype.name], v.shape, v.tobytes(), raw=True) for n, v in weights.items()
    ]
    out = helper.make_tensor_value_info(output, next(iter(types.values())), None)
    body = helper.make_graph(list(nodes), "benchmark", inputs, [out], initializers)
    imports = [helper.make_opsetid("", opset)]
    if any(node.domain == "com.microsoft" for node in nodes):
        imports.append(helper.make_opsetid("com.microsoft", 1))
    if any(node.domain == DOMAIN for node in nodes):
        imports.append(helper.make_opsetid(DOMAIN, OPSET_VERSION))
    return helper.make_model(body, ir_version=IR_VERSION, opset_imports=imports)
