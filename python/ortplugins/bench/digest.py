"""The digest of the sources that end up in the kernel library: which code a benchmark record was made with.

Only the standard library is imported, since the build runs this file to write the digest, and how the library was
built, into the file build_info.json beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

_FOLDERS = ("plugins/core", "plugins/device", "plugins/kernels")
_SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".py"}
_LADDER = "plugins/ladder"


def source_files(tree: Path, folders: Sequence[str] = _FOLDERS) -> list[str]:
    """Paths, relative to ``tree``, of the kernel library's sources and of the op specification, in path order."""
    files = [p for folder in folders for p in (tree / folder).rglob("*") if p.suffix in _SUFFIXES]
    names = [p.relative_to(tree) for p in (*files, tree / "python/ortplugins/ops.py")]
    return sorted(n.as_posix() for n in names if "__pycache__" not in n.parts)


def is_source_tree(tree: Path) -> bool:
    """Whether ``tree`` is a checkout of the project."""
    return (tree / "plugins/kernels").is_dir() and (tree / "python/ortplugins/ops.py").is_file()


def kernel_digest(tree: Path, folders: Sequence[str] = _FOLDERS) -> str:
    """SHA-256 over path and content of every source file."""
    digest = hashlib.sha256()
    for name in source_files(tree, folders):
        content = (tree / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def ladder_digest(tree: Path) -> str:
    """As :func:`kernel_digest`, of the ladder too."""
    return kernel_digest(tree, (*_FOLDERS, _LADDER))


def main() -> None:
    """Prints the digest of a tree, or writes it with facts of the build to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--build-info", type=Path, help="the file to write")
    parser.add_argument("--compiler")
    parser.add_argument("--cuda", help="version of the CUDA toolkit")
    parser.add_argument("--architectures", nargs="*", default=[], help="CUDA architectures as CMake names them")
    args = parser.parse_args()
    digest = kernel_digest(args.tree)
    if args.build_info is None:
        print(digest)
        return
    facts = {
        "kernel_digest": digest,
        "ladder_digest": ladder_digest(args.tree),
        "compiler": args.compiler,
        "cuda": args.cuda,
        "cuda_architectures": args.architectures,
    }
    text = json.dumps(facts, indent=1) + "\n"
    if not args.build_info.is_file() or args.build_info.read_text() != text:
        args.build_info.write_text(text)


if __name__ == "__main__":
    main()
