"""Other versions of ONNX Runtime, each in a folder of its own, and child processes that use them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import ortplugins

OLDEST = "1.21.1"
TOO_OLD = "1.20.1"
PACKAGE_FOLDER = Path(ortplugins.__file__).parents[1]
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ortplugins-tests"


@functools.cache
def site_of(requirement: str) -> Path:
    """A folder that holds ``requirement`` without its dependencies; the test is skipped if pip cannot fetch it."""
    target = _CACHE / f"{requirement.replace('==', '-')}-cp{sys.version_info.major}{sys.version_info.minor}"
    if not target.is_dir():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
            part = Path(scratch) / "site"
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-deps",
                "--only-binary=:all:",
                "--target",
                str(part),
                requirement,
            ]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                pytest.skip(
                    f"pip cannot fetch {requirement} for this Python: {result.stderr.strip().rpartition(chr(10))[2]}"
                )
            if not target.is_dir():  # another process may have been faster
                os.rename(part, target)
    return target


def run_python(code: str, *sites: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a new process that finds packages in ``sites`` first."""
    path = os.pathsep.join(map(str, (*sites, PACKAGE_FOLDER, Path(__file__).parent)))
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path, **env},
    )
