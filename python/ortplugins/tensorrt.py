"""Finding the TensorRT plugin library and registering its plugins.

Every op of the package is a plugin in namespace ``ortplugins``. A model that :func:`ortplugins.rewrite` wrote names
them on its nodes, so that TensorRT's ONNX parser finds them as soon as they are registered::

    import tensorrt as trt
    import ortplugins.tensorrt

    ortplugins.tensorrt.register()
    parser = trt.OnnxParser(network, logger)
    parser.parse_from_file("model.ortplugins.onnx")

The module works with ``tensorrt``, ``tensorrt_lean`` and ``tensorrt_dispatch`` from version 10 on, and imports none of
them unless it is asked to register.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from . import ops
from .errors import LibraryNotFoundError, OrtPluginsError, RuntimeMismatchError
from .register import LIBRARY_FOLDER

if TYPE_CHECKING:
    from types import ModuleType

MINIMUM_TENSORRT = 10
"""Oldest major version of TensorRT that has the plugin interface in use here."""

_MODULES = ("tensorrt", "tensorrt_lean", "tensorrt_dispatch")


def get_library_path() -> str:
    """Path of the TensorRT plugin library, for ``IPluginRegistry.load_library``, ``trtexec --dynamicPlugins`` (or
    ``--staticPlugins``), Polygraphy's ``--plugins`` and ONNX Runtime's ``trt_extra_plugin_lib_paths``.

    Raises LibraryNotFoundError if the package was built without it.
    """
    path = LIBRARY_FOLDER / "libortplugins_tensorrt.so"
    if not path.is_file():
        raise LibraryNotFoundError(
            f"the TensorRT plugin library is missing at {path}; it is built together with the CUDA kernels, where a "
            "CUDA compiler is found"
        )
    return str(path)


def _names() -> set[tuple[str, str, str]]:
    return {(op.name, str(ops.OPSET_VERSION), ops.DOMAIN) for op in ops.OPS}


def _import_tensorrt() -> ModuleType:
    """A TensorRT module: one that the program has imported already, else the first that is installed."""
    # The wheels with the libraries can also be imported by a name of their own.
    candidates = [*_MODULES, *(f"{name}_bindings" for name in _MODULES)]
    for name in (*(c for c in candidates if c in sys.modules), *candidates):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        version = str(getattr(module, "__version__", ""))
        if not version.split(".")[0].isdecimal() or int(version.split(".")[0]) < MINIMUM_TENSORRT:
            raise RuntimeMismatchError(
                f"ortplugins needs TensorRT {MINIMUM_TENSORRT} or newer, but {name} is TensorRT "
                f"{version or 'of unknown version'}"
            )
        return module
    raise RuntimeMismatchError(
        f"none of {', '.join(_MODULES)} can be imported; install TensorRT with `pip install tensorrt`"
    )


def _registered(registry: Any) -> set[tuple[str, str, str]]:
    # Early releases of TensorRT 10 cannot list what a registry sees in its parent.
    creators = getattr(registry, "all_creators_recursive", None) or registry.all_creators
    return {
        (c.name, c.plugin_version, c.plugin_namespace)
        for c in creators
        if getattr(c, "plugin_namespace", "") == ops.DOMAIN  # creators of other generations lack it
    }


def register(registry: Any = None) -> None:
    """Makes the plugins known to TensorRT, for parsing models and for loading engines that contain them.

    ``registry`` is a ``trt.IPluginRegistry``, for instance a runtime's ``get_plugin_registry()``; None stands for the
    global one, of the TensorRT module that is imported already or else of the first that is installed.

    Harmless when the plugins are registered already, in whichever way the library was loaded.

    Raises RuntimeMismatchError when there is no TensorRT or one too old, LibraryNotFoundError when the library is
    missing and OrtPluginsError when TensorRT does not load it.
    """
    path = get_library_path()
    if registry is None:
        registry = _import_tensorrt().get_plugin_registry()
    elif not hasattr(registry, "load_library"):
        raise TypeError(f"expected a TensorRT plugin registry, got {type(registry).__name__}")
    wanted = _names()
    present = _registered(registry)
    if wanted <= present:
        return
    if present & wanted:
        names = ", ".join(sorted(name for name, _, _ in present & wanted))
        raise OrtPluginsError(
            f"TensorRT's registry has {names} from another version of ortplugins; load one version only"
        )
    handle = registry.load_library(path)
    if handle is None or not wanted <= _registered(registry):
        raise OrtPluginsError(f"TensorRT could not load {path}; its log says why")
