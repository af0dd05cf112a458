"""What the TensorRT tests share: where things are, running code in a process of its own, and the plugins' fields."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

from ortplugins import ops
from ortplugins import tensorrt as plugins
from ortplugins.errors import LibraryNotFoundError

ROOT = pathlib.Path(__file__).resolve().parent.parent

INT64, FLOAT32, CHAR = 10, 1, 6
"""Values of ``PluginFieldType``."""

FieldTuple = tuple[str, int, bytes, int]


def library_path() -> str:
    """The plugin library; skips the test where it was not built."""
    try:
        return plugins.get_library_path()
    except LibraryNotFoundError as error:
        pytest.skip(str(error))


def installed(*names: str) -> list[str]:
    """Those of the TensorRT modules ``names`` that are installed; they can also be imported as ``NAME_bindings``."""
    found = []
    for name in names:
        for candidate in (name, f"{name}_bindings"):
            if importlib.util.find_spec(candidate) is not None:
                found.append(candidate)
                break
    return found


def run_child(code: str, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python ``code`` in a process of its own: TensorRT's registry is one per process, and what is loaded stays."""
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False,
                          env={**os.environ, "PYTHONPATH": path, **(environment or {})})


def output_of(code: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a child that must end well."""
    done = run_child(code, *arguments, environment=environment)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def plugin_host() -> ModuleType:
    """The module ``_plugin_host``; skips where it was not built. ``ORTPLUGINS_BUILD`` names the build tree it lies in."""
    folders = [os.environ["ORTPLUGINS_BUILD"]] if "ORTPLUGINS_BUILD" in os.environ else []
    folders += [str(p.parent) for p in ROOT.glob("build/*/_plugin_host*.so")]
    for folder in folders:
        if folder not in sys.path:
            sys.path.append(folder)
    try:
        return importlib.import_module("_plugin_host")
    except ImportError:
        pytest.skip("the plugin host is not built: install with ORTPLUGINS_TESTS=ON, or set ORTPLUGINS_BUILD to a build tree")


def fields(op: str, attrs: Mapping[str, Any], outputs: int = 1) -> list[FieldTuple]:
    """Attributes as TensorRT's parser hands them over."""
    kinds = {a.name: a.kind for a in ops.find(op).attrs}
    tuples: list[FieldTuple] = []
    for name, value in attrs.items():
        if kinds[name] == "int":
            tuples.append((name, INT64, struct.pack("<q", value), 1))
        elif kinds[name] == "float":
            tuples.append((name, FLOAT32, struct.pack("<f", value), 1))
        else:
            tuples.append((name, CHAR, value.encode(), len(value)))
    if outputs > 1:
        tuples.append(("plugin_outputs", INT64, struct.pack("<q", outputs), 1))
    return tuples


def full_attributes(op: str) -> dict[str, Any]:
    """A value for every attribute of ``op``, none of them the default."""
    values: dict[str, Any] = {}
    for a in ops.find(op).attrs:
        if a.kind == "int":
            low = 0 if a.minimum is None else a.minimum
            high = low + 3 if a.maximum is None else a.maximum
            values[a.name] = next(v for v in range(high, low - 1, -1) if v != a.default)
        elif a.kind == "float":
            values[a.name] = 0.15625 if a.default != 0.15625 else 0.25  # exact in float32
        else:
            values[a.name] = next(c for c in reversed(a.choices) if c != a.default)
    return values


def names_of_fields(tuples: Sequence[FieldTuple]) -> list[str]:
    return [name for name, *_ in tuples]
