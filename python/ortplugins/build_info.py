"""How the installed library was built: the file that the build leaves beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .bench.digest import is_source_tree, kernel_digest
from .errors import OrtPluginsError
from .register import LIBRARY_FOLDER

SOURCE_TREE = Path(__file__).resolve().parents[2]
"""The checkout this package runs from, when it does (see ``is_source_tree``)."""


def build_info() -> dict[str, Any]:
    """``kernel_digest``, ``compiler``, ``cuda`` (toolkit version or None) and ``cuda_architectures``.

    Empty where the library was not installed by the build, as in a source tree.
    """
    path = LIBRARY_FOLDER / "build_info.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def library_digest() -> str:
    """Digest of the sources of the library in use. OrtPluginsError if nothing tells."""
    digest = build_info().get("kernel_digest")
    if digest:
        return digest
    if is_source_tree(SOURCE_TREE):
        return kernel_digest(SOURCE_TREE)
    raise OrtPluginsError(
        f"{LIBRARY_FOLDER} holds no build_info.json, and there is no source tree to take the digest of"
    )
