"""Finding the custom-op library and registering it with ONNX Runtime."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import LibraryNotFoundError, OrtPluginsError, RuntimeMismatchError

if TYPE_CHECKING:
    from types import ModuleType

    import onnxruntime

MINIMUM_ONNXRUNTIME = (1, 21)
"""Oldest ONNX Runtime that offers the C API the library is built with."""

LIBRARY_FOLDER = Path(__file__).parent / "lib"

_INSTALL_ADVICE = (
    "install one of `pip install onnxruntime` (CPU) and `pip install onnxruntime-gpu` (NVIDIA GPUs), not both"
)


def get_library_path() -> str:
    """Path of the ONNX Runtime custom-op library, for ``SessionOptions.register_custom_ops_library``.

    Raises LibraryNotFoundError if the package was installed without its compiled part.
    """
    path = LIBRARY_FOLDER / "libortplugins_onnxruntime.so"
    if not path.is_file():
        raise LibraryNotFoundError(
            f"the custom-op library is missing at {path}; install the package again: pip install --force-reinstall ."
        )
    return str(path)


def import_onnxruntime() -> ModuleType:
    """The module ``onnxruntime``, if it is installed and new enough; RuntimeMismatchError with advice otherwise."""
    try:
        import onnxruntime
    except ImportError as error:
        raise RuntimeMismatchError(f"ONNX Runtime cannot be imported ({error}); {_INSTALL_ADVICE}") from error
    check_onnxruntime_version(getattr(onnxruntime, "__version__", "of unknown version"))
    return onnxruntime


def check_onnxruntime_version(version: str) -> None:
    """Raises RuntimeMismatchError if ``version`` is older than the library needs."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < MINIMUM_ONNXRUNTIME:
        from . import __version__

        oldest = ".".join(map(str, MINIMUM_ONNXRUNTIME))
        raise RuntimeMismatchError(
            f"ortplugins {__version__} needs ONNX Runtime {oldest} or newer, but this is ONNX Runtime {version}"
        )


def register(session_options: onnxruntime.SessionOptions, *, library: str | os.PathLike[str] | None = None) -> None:
    """Makes the ops of domain ``ortplugins`` known to sessions created with ``session_options``.

    Harmless when called twice on the same options, or beside ``register_custom_ops_library(get_library_path())``: the
    library itself ignores every registration after the first. ``library`` names another build of it.

    Raises RuntimeMismatchError when ONNX Runtime is too old, LibraryNotFoundError when the library is missing and
    OrtPluginsError when it cannot be loaded.

        options = onnxruntime.SessionOptions()
        ortplugins.register(options)
        session = onnxruntime.InferenceSession("model.ortplugins.onnx", options)
    """
    import_onnxruntime()
    if library is None:
        path = get_library_path()
    else:
        path = os.fspath(library)
        if not os.path.isfile(path):
            raise LibraryNotFoundError(f"there is no custom-op library at {path}")
    try:
        session_options.register_custom_ops_library(path)
    except AttributeError:
        raise TypeError(f"expected an onnxruntime.SessionOptions, got {type(session_options).__name__}") from None
    except Exception as error:
        raise OrtPluginsError(f"ONNX Runtime could not load {path}: {error}") from error
