"""Writing files so that a reader never meets half of one."""

from __future__ import annotations

import os
import tempfile

from .errors import OrtPluginsError


def replace_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path``, or leave the old file as it was. OrtPluginsError when that is not possible."""
    path = os.fspath(path)
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=os.path.dirname(path) or ".", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise OrtPluginsError(f"{path} cannot be written: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
