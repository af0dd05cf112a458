"""Writing files so that a reader never meets half of one."""

from __future__ import annotations

import os
import tempfile

from .errors import OrtPluginsError


def replace_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path``; until it is complete the old file, if there is one, stays. OrtPluginsError on failure."""
    path = os.fspath(path)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=os.path.dirname(path) or ".", delete=False) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise OrtPluginsError(f"{path} cannot be written: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
