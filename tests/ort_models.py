"""Models of one op of ours, and sessions that run them: what the adapter tests build on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from ortplugins import get_library_path, ops

ONNX_TYPES = {np.dtype(ml_dtypes.bfloat16): TensorProto.BFLOAT16} | {
    np.dtype(name): code for name, code in ops.ONNX_TYPE_CODES.items() if name != "bfloat16"
}
IR_VERSION, OPSET = 8, 17
"""Old enough for every ONNX Runtime that is supported."""


def value_info(name: str, dtype: Any, shape: Sequence[int | str] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype if isinstance(dtype, int) else ONNX_TYPES[np.dtype(dtype)], shape)


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = OPSET,
    domain_version: int = ops.OPSET_VERSION,
) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), list(initializers))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(ops.DOMAIN, domain_version)]
    return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=imports)


def fused_node(op: str, inputs: Sequence[str], outputs: Sequence[str], name: str = "", **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), name=name, domain=ops.DOMAIN, **attrs)


def session_options(**entries: str) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


def make_session(
    model: onnx.ModelProto,
    provider: str = "CPUExecutionProvider",
    options: onnxruntime.SessionOptions | None = None,
    provider_options: Mapping[str, Any] | None = None,
) -> onnxruntime.InferenceSession:
    options = options or session_options()
    options.register_custom_ops_library(get_library_path())
    providers = [(provider, dict(provider_options or {}))]
    if provider != "CPUExecutionProvider":
        providers.append(("CPUExecutionProvider", {}))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)


def one_op_model(
    op: str,
    inputs: Sequence[np.ndarray | None],
    attrs: Mapping[str, Any] | None = None,
    *,
    output_count: int = 1,
    constants: Sequence[int] = (),
) -> onnx.ModelProto:
    """A model of one ``op``; inputs whose index is in ``constants`` are initializers, None leaves a name empty."""
    spec = ops.find(op)
    names = [spec.inputs[i].name if t is not None else "" for i, t in enumerate(inputs)]
    outputs = [t.name for t in spec.outputs[:output_count]]
    infos = [value_info(n, t.dtype, t.shape) for i, (n, t) in enumerate(zip(names, inputs)) if t is not None and i not in constants]
    initializers = [
        helper.make_tensor(names[i], ONNX_TYPES[inputs[i].dtype], inputs[i].shape, inputs[i].tobytes(), raw=True) for i in constants
    ]
    return make_model(
        [fused_node(op, names, outputs, name="node", **dict(attrs or {}))],
        infos,
        [value_info(n, inputs[0].dtype, None) for n in outputs],
        initializers,
    )


def run_model(session: onnxruntime.InferenceSession, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of ``session``. Types that NumPy does not have (bfloat16) go through OrtValue."""
    values = {}
    for name, array in feeds.items():
        if array.dtype == ml_dtypes.bfloat16:
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
        else:
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
    results = []
    for output, value in zip(session.get_outputs(), session.run_with_ort_values(None, values)):
        if output.type == "tensor(bfloat16)":
            results.append(_bfloat16_array(value))
        else:
            results.append(value.numpy())
    return results


def _bfloat16_array(value: onnxruntime.OrtValue) -> np.ndarray:
    shape = tuple(value.shape())
    out = np.empty(shape, ml_dtypes.bfloat16)
    if out.size:
        import ctypes

        ctypes.memmove(out.ctypes.data, value.data_ptr(), out.nbytes)
    return out


def run_op(
    op: str,
    inputs: Sequence[np.ndarray | None],
    attrs: Mapping[str, Any] | None = None,
    *,
    provider: str = "CPUExecutionProvider",
    output_count: int = 1,
    constants: Sequence[int] = (),
) -> list[np.ndarray]:
    """Run one op of ours in an ONNX Runtime session."""
    spec = ops.find(op)
    session = make_session(one_op_model(op, inputs, attrs, output_count=output_count, constants=constants), provider)
    feeds = {spec.inputs[i].name: t for i, t in enumerate(inputs) if t is not None and i not in constants}
    return run_model(session, feeds)
