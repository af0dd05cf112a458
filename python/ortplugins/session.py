"""Making ONNX Runtime sessions the way every tool of the package does."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx

from .errors import OrtPluginsError
from .ops import DOMAIN, OPS, OPSET_VERSION
from .register import import_onnxruntime, register

if TYPE_CHECKING:
    import onnxruntime

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""Provider names of the command line, and ONNX Runtime's."""


def load_model(model: onnx.ModelProto | str | os.PathLike[str], *, load_external_data: bool = True) -> onnx.ModelProto:
    """``model`` itself, or the model in the file of that name. OrtPluginsError if the file holds none."""
    if isinstance(model, onnx.ModelProto):
        return model
    path = os.fspath(model)
    try:
        proto = onnx.load(path, load_external_data=load_external_data)
    except FileNotFoundError as error:
        raise OrtPluginsError(f"there is no file {error.filename or path}") from error
    except Exception as error:
        raise OrtPluginsError(f"{path} cannot be read as an ONNX model: {error}") from error
    if not proto.HasField("graph"):
        raise OrtPluginsError(f"{path} is not an ONNX model: it holds no graph")
    return proto


def uses_plugins(model: onnx.ModelProto) -> bool:
    """Whether the model may hold ops of the package."""
    return any(opset.domain == DOMAIN for scope in (model, *model.functions) for opset in scope.opset_import)


def check_domain(model: onnx.ModelProto) -> None:
    """OrtPluginsError if the model names ops of the package in another domain, or a version that the library lacks."""
    for scope, nodes in ((model, model.graph.node), *((f, f.node) for f in model.functions)):
        versions = {opset.domain: opset.version for opset in scope.opset_import}
        if versions.get(DOMAIN, OPSET_VERSION) > OPSET_VERSION:
            raise OrtPluginsError(
                f"the model asks for version {versions[DOMAIN]} of domain {DOMAIN}; "
                f"this library offers version {OPSET_VERSION}"
            )
        for node in nodes:
            if node.op_type in _OP_TYPES and node.domain != DOMAIN:
                raise OrtPluginsError(
                    f"node {node.name!r}: {node.op_type} is looked up in domain {node.domain or 'ai.onnx'!r} "
                    f"version {versions.get(node.domain, 0)}; "
                    f"it is offered in domain {DOMAIN!r} version {OPSET_VERSION}"
                )


_OP_TYPES = frozenset(op.name for op in OPS)


def session_options(threads: int | None = None) -> onnxruntime.SessionOptions:
    """Options for timing two sessions in alternation.

    Idle threads of one session must not take the processor from the other, so they stop spinning when a run ends.
    """
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come back as exceptions, and once is enough
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def provider_list(provider: str, options: Mapping[str, str] | None = None) -> list[str | tuple[str, dict[str, str]]]:
    """The providers of a session on ``cpu`` or ``cuda``; OrtPluginsError if this ONNX Runtime lacks it.

    TF32 is off on CUDA unless ``options`` turn it on: a float32 model is compared with float32 arithmetic.
    """
    ort = import_onnxruntime()
    if provider not in PROVIDERS:
        raise OrtPluginsError(f"unknown provider {provider!r}; there are {', '.join(PROVIDERS)}")
    if PROVIDERS[provider] not in ort.get_available_providers():
        raise OrtPluginsError(
            f"this ONNX Runtime {ort.__version__} has no {PROVIDERS[provider]}; `ortplugins doctor` says more"
        )
    cpu = PROVIDERS["cpu"]
    return [cpu] if provider == "cpu" else [(PROVIDERS["cuda"], {"use_tf32": "0", **(options or {})}), cpu]


def make_session(
    model: onnx.ModelProto | str | os.PathLike[str],
    *,
    provider: str = "cpu",
    provider_options: Mapping[str, str] | None = None,
    threads: int | None = None,
    options: onnxruntime.SessionOptions | None = None,
    library: str | os.PathLike[str] | None = None,
) -> onnxruntime.InferenceSession:
    """A session of ``model`` on ``provider``, with the custom-op library registered if the model uses it.

    Models above protobuf's limit of 2 GB must be given as a path. OrtPluginsError when the model names our ops wrongly,
    ONNX Runtime refuses it, or does not use the provider.
    """
    ort = import_onnxruntime()
    providers = provider_list(provider, provider_options)
    options = options or session_options(threads)
    proto = load_model(model, load_external_data=False)
    check_domain(proto)
    if library is not None or uses_plugins(proto):
        register(options, library=library)
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else os.fspath(model)
    if provider == "cuda" and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    try:
        session = ort.InferenceSession(source, options, providers=providers)
    except Exception as error:
        raise OrtPluginsError(f"ONNX Runtime {ort.__version__} refuses {describe(model)}: {one_line(error)}") from error
    if PROVIDERS[provider] not in session.get_providers():
        raise OrtPluginsError(
            f"ONNX Runtime could not start {PROVIDERS[provider]} and fell back; `ortplugins doctor` says why"
        )
    return session


def describe(model: onnx.ModelProto | str | os.PathLike[str]) -> str:
    """The file name of a model, or the name of its graph."""
    return f"the model {model.graph.name!r}" if isinstance(model, onnx.ModelProto) else os.fspath(model)


def one_line(error: Exception) -> str:
    """The message of an error without its line breaks."""
    return " ".join(str(error).split())


class DeviceCall:
    """One run of a session, inputs and outputs bound to the provider's memory; returns when the device is done."""

    MEASURED = "one run with inputs and outputs in the provider's memory, no copies, until the device is done"

    def __init__(self, session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray], provider: str):
        ort = import_onnxruntime()
        self._session = session
        self._binding = session.io_binding()
        self._values = {name: ort.OrtValue.ortvalue_from_numpy(value, provider, 0) for name, value in feeds.items()}
        for name, value in self._values.items():
            self._binding.bind_ortvalue_input(name, value)
        for output in session.get_outputs():
            self._binding.bind_output(output.name, provider)
        self._is_device = provider != "cpu"

    def __call__(self) -> None:
        self._session.run_with_iobinding(self._binding)
        if self._is_device:
            self._binding.synchronize_outputs()


class GraphCall(DeviceCall):
    """A run of a CUDA session made with ``enable_cuda_graph``: a replay of its graph ``graph_id``, captured by the first
    run, or an ordinary run for -1. ``shapes`` are those of the outputs, which stay where they are, of type ``dtype``.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        feeds: dict[str, np.ndarray],
        shapes: Mapping[str, Sequence[int]],
        dtype: str,
        graph_id: int,
    ):
        super().__init__(session, feeds, "cuda")
        ort = import_onnxruntime()
        self.outputs = {
            name: ort.OrtValue.ortvalue_from_shape_and_type(list(shape), np.dtype(dtype).type, "cuda", 0)
            for name, shape in shapes.items()
        }
        for name, value in self.outputs.items():
            self._binding.bind_ortvalue_output(name, value)
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("gpu_graph_id", str(graph_id))

    def __call__(self) -> None:
        self._session.run_with_iobinding(self._binding, self._options)
        self._binding.synchronize_outputs()
