"""Fused Transformer kernels as ONNX Runtime custom ops, and the tools around them.

    import onnxruntime, ortplugins

    result = ortplugins.rewrite("model.onnx", output="model.ortplugins.onnx")
    options = onnxruntime.SessionOptions()
    ortplugins.register(options)
    session = onnxruntime.InferenceSession("model.ortplugins.onnx", options)

ONNX Runtime is imported only by what needs it: `rewrite` and `get_library_path` work without it.
"""

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("ortplugins")
except _metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0+unknown"

from .errors import LibraryNotFoundError, OrtPluginsError, RuntimeMismatchError
from .register import get_library_path, register

__all__ = [
    "LibraryNotFoundError",
    "OrtPluginsError",
    "RuntimeMismatchError",
    "__version__",
    "get_library_path",
    "register",
]
