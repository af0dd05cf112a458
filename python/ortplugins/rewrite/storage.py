"""Writes models: all or nothing, with large weights streamed into a file beside them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from .engine import Progress, graphs_of

# A protobuf message holds less than 2 GiB; beside the weights it holds nodes and names.
_INLINE_LIMIT = 2**31 - 2**26
_EXTERNAL_FROM = 1024  # bytes: smaller tensors stay in the model file


def _weights(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    for graph, _ in graphs_of(model.graph):
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value


def fits_inline(model: ir.Model) -> bool:
    """Whether the model can be one protobuf."""
    return sum(t.nbytes for t in _weights(model)) <= _INLINE_LIMIT


def load_weights(proto: onnx.ModelProto, model: ir.Model) -> None:
    """Puts the contents of external tensors into the protobuf of a model."""
    folders = {t.name: t.base_dir for t in _weights(model) if isinstance(t, ir.ExternalTensor)}
    for tensor in onnx.external_data_helper._get_all_tensors(proto) if folders else ():
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, os.fspath(folders.get(tensor.name, "")))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]


def save(model: ir.Model, path: Path, progress: Progress | None = None) -> None:
    """Writes a model to `path`, and its weights to `path` + ".data" where they must or used to lie outside.

    Both files are made in a folder beside the target and moved into place when complete, the weights first.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = list(_weights(model))
    external = any(isinstance(t, ir.ExternalTensor) for t in tensors) or sum(t.nbytes for t in tensors) > _INLINE_LIMIT
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        target = work / path.name
        if external:
            data = f"{path.name}.data"

            def report(tensor: ir.TensorProtocol, info: ir.external_data.CallbackInfo) -> None:
                if progress is not None:
                    progress(info.index + 1, info.total)

            ir.save(model, target, external_data=data, size_threshold_bytes=_EXTERNAL_FROM, callback=report)
            if (work / data).exists():
                os.replace(work / data, path.parent / data)
        else:
            ir.save(model, target)
        os.replace(target, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
