"""How the installed library was built: the file that the build leaves beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from .bench.digest import is_source_tree, kernel_digest, ladder_digest
from .errors import OrtPluginsError
from .register import LIBRARY_FOLDER

SOURCE_TREE = Path(__file__).resolve().parents[2]
"""The checkout this package runs from, when it does (see ``is_source_tree``)."""


def build_info() -> dict[str, Any]:
    """``kernel_digest``, ``ladder_digest``, ``compiler``, ``cuda`` (toolkit version or None) and ``cuda_architectures``.

    Empty where the library was not installed by the build, as in a source tree.
    """
    path = LIBRARY_FOLDER / "build_info.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def library_digest(of: Literal["kernel_digest", "ladder_digest"] = "kernel_digest") -> str:
    """Digest of the sources of the library in use, or of the ladder's. OrtPluginsError if nothing tells."""
    digest = build_info().get(of)
    if digest:
        return digest
    if is_source_tree(SOURCE_TREE):
        return {"kernel_digest": kernel_digest, "ladder_digest": ladder_digest}[of](SOURCE_TREE)
    raise OrtPluginsError(
        f"{LIBRARY_FOLDER} holds no build_info.json, and there is no source tree to take the digest of"
    )
