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

from .compare import Comparison, compare
from .errors import LibraryNotFoundError, OrtPluginsError, RuntimeMismatchError
from .register import get_library_path, register
from .rewrite import RewriteResult, rewrite  # the function hides the package of its name, which `import` still finds

__all__ = [
    "Comparison",
    "LibraryNotFoundError",
    "OrtPluginsError",
    "RewriteResult",
    "RuntimeMismatchError",
    "__version__",
    "compare",
    "get_library_path",
    "register",
    "rewrite",
]
