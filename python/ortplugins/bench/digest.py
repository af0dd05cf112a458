"""The digest of the sources that end up in the kernel library: which code a benchmark record was made with.

Only the standard library is imported, since the build runs this file to write the digest beside the library:

    python digest.py SOURCE_TREE
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

_FOLDERS = ("plugins/core", "plugins/device", "plugins/kernels")
_SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".py"}
_TEACHING = "ladder"


def source_files(tree: Path) -> list[str]:
    """Paths, relative to ``tree``, of the kernel library's sources and of the op specification, in path order."""
    files = [p for folder in _FOLDERS for p in (tree / folder).rglob("*") if p.suffix in _SUFFIXES]
    names = [p.relative_to(tree) for p in (*files, tree / "python/ortplugins/ops.py")]
    return sorted(n.as_posix() for n in names if _TEACHING not in n.parts and "__pycache__" not in n.parts)


def is_source_tree(tree: Path) -> bool:
    """Whether ``tree`` is a checkout of the project."""
    return (tree / "plugins/kernels").is_dir() and (tree / "python/ortplugins/ops.py").is_file()


def kernel_digest(tree: Path) -> str:
    """SHA-256 over path and content of every source file."""
    digest = hashlib.sha256()
    for name in source_files(tree):
        content = (tree / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


if __name__ == "__main__":
    print(kernel_digest(Path(sys.argv[1])))
