"""How the plugins come into TensorRT's registries: by loadLibrary and by plain opening, one after the other and twice.

Each test runs in a process of its own, with the registry of every TensorRT runtime that is installed. No GPU is needed.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest
from tensorrt_support import installed, library_path, output_of, run_child

from ortplugins import ops

RUNTIMES = installed("tensorrt", "tensorrt_lean", "tensorrt_dispatch", "tensorrt_rtx")
pytestmark = pytest.mark.skipif(
    not RUNTIMES, reason="no TensorRT is installed: pip install tensorrt-lean-cu13-libs tensorrt-lean-cu13-bindings"
)
EACH_RUNTIME = pytest.mark.parametrize("runtime", RUNTIMES)

NAMES = sorted(op.name for op in ops.OPS)

PRELUDE = """
import ctypes, importlib, sys
trt = importlib.import_module(sys.argv[1])
library, copy = sys.argv[2:4]

def names(registry=None):
    creators = (registry or trt.get_plugin_registry()).all_creators
    return sorted(c.name for c in creators if c.plugin_namespace == "ortplugins" and c.plugin_version == "1")

def load(path=library, registry=None):
    return (registry or trt.get_plugin_registry()).load_library(path) is not None
"""


def run(runtime: str, tmp_path: pathlib.Path, code: str) -> tuple[str, str]:
    """Output and errors of ``code``, after the prelude."""
    copy = tmp_path / "copy.so"
    shutil.copyfile(library_path(), copy)
    done = run_child(PRELUDE + code, runtime, library_path(), str(copy))
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


@EACH_RUNTIME
def test_load_library_registers_every_op(runtime: str, tmp_path: pathlib.Path):
    out, err = run(runtime, tmp_path, "assert names() == []\nassert load()\nprint(names())")
    assert out.strip() == str(NAMES)
    assert err == ""


@EACH_RUNTIME
def test_opening_registers_every_op(runtime: str, tmp_path: pathlib.Path):
    out, err = run(runtime, tmp_path, "ctypes.CDLL(library)\nprint(names())")
    assert out.strip() == str(NAMES)
    assert err == ""


@EACH_RUNTIME
def test_opening_twice_is_harmless(runtime: str, tmp_path: pathlib.Path):
    out, _ = run(runtime, tmp_path, "ctypes.CDLL(library)\nctypes.CDLL(library)\nctypes.CDLL(copy)\nprint(names())")
    assert out.strip() == str(NAMES)


@EACH_RUNTIME
def test_loading_twice_keeps_the_first(runtime: str, tmp_path: pathlib.Path):
    out, _ = run(runtime, tmp_path, "assert load()\nassert not load()\nassert not load(copy)\nprint(names())")
    assert out.strip() == str(NAMES)


@EACH_RUNTIME
def test_opening_after_loading_is_harmless(runtime: str, tmp_path: pathlib.Path):
    out, _ = run(runtime, tmp_path, "assert load()\nctypes.CDLL(library)\nctypes.CDLL(copy)\nprint(names())")
    assert out.strip() == str(NAMES)


@EACH_RUNTIME
def test_loading_after_opening_keeps_the_first_and_says_so(runtime: str, tmp_path: pathlib.Path):
    out, err = run(runtime, tmp_path, "ctypes.CDLL(library)\nassert not load()\nprint(names())")
    assert out.strip() == str(NAMES)
    assert "opened with dlopen before" in err and "can be used" in err


@EACH_RUNTIME
def test_loading_again_after_deregistering(runtime: str, tmp_path: pathlib.Path):
    out, _ = run(
        runtime,
        tmp_path,
        """
registry = trt.get_plugin_registry()
for _ in range(3):
    handle = registry.load_library(library)
    assert names()
    registry.deregister_library(handle)
    assert names() == []
print("done")
""",
    )
    assert out.strip() == "done"


@pytest.mark.skipif(
    "tensorrt_rtx_bindings" not in RUNTIMES, reason="needs tensorrt_rtx, whose runtime can be made without a GPU"
)
@pytest.mark.parametrize(
    "first", ["", "ctypes.CDLL(library)", "load()"], ids=["alone", "after_opening", "after_loading"]
)
def test_a_registry_of_a_runtime_has_its_own_plugins(first: str, tmp_path: pathlib.Path):
    """Engines that carry the library, and `trtexec --dynamicPlugins`, load it into the registry of a runtime."""
    out, _ = run(
        "tensorrt_rtx_bindings",
        tmp_path,
        f"""
{first}
before = names()
runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
for path in (library, copy):
    local = trt.Runtime(trt.Logger(trt.Logger.ERROR)).get_plugin_registry()
    assert local.load_library(path) is not None
    print(names(local))
    assert names() == before
""",
    )
    assert out.splitlines() == [str(NAMES)] * 2


def test_opening_without_tensorrt_is_harmless(tmp_path: pathlib.Path):
    copy = tmp_path / "lib.so"
    shutil.copyfile(library_path(), copy)
    assert output_of("import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('done')", str(copy)).strip() == "done"


@pytest.mark.skipif("tensorrt_rtx_bindings" not in RUNTIMES, reason="needs the full runtime of tensorrt_rtx")
def test_opening_before_tensorrt_is_imported(tmp_path: pathlib.Path):
    """Polygraphy opens plugin libraries first. The TensorRT that is installed beside the package is then brought in."""
    import tensorrt_rtx_libs

    site = tmp_path / "site"
    (site / "ortplugins/lib").mkdir(parents=True)
    shutil.copyfile(library_path(), site / "ortplugins/lib/lib.so")
    (site / "tensorrt_rtx_libs").symlink_to(pathlib.Path(tensorrt_rtx_libs.__file__).parent)
    out = output_of(
        """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
import tensorrt_rtx_bindings as trt
print(sorted(c.name for c in trt.get_plugin_registry().all_creators if c.plugin_namespace == "ortplugins"))
""",
        str(site / "ortplugins/lib/lib.so"),
    )
    assert out.strip() == str(NAMES)


def test_two_tensorrts_in_one_process(tmp_path: pathlib.Path):
    if not {"tensorrt_lean_bindings", "tensorrt_rtx_bindings"} <= set(RUNTIMES):
        pytest.skip("needs tensorrt_lean and tensorrt_rtx")
    out, _ = run(
        "tensorrt_lean_bindings",
        tmp_path,
        """
import tensorrt_rtx_bindings as rtx
ctypes.CDLL(library)
print(names())
print(names(rtx.get_plugin_registry()))
""",
    )
    assert out.splitlines() == [str(NAMES)] * 2


# --- The Python module ----------------------------------------------------------------------------------------------

REGISTER = """
import sys
import ortplugins.tensorrt as plugins
import importlib
trt = importlib.import_module(sys.argv[1])
def names():
    return sorted(c.name for c in trt.get_plugin_registry().all_creators if c.plugin_namespace == "ortplugins")
"""


@EACH_RUNTIME
@pytest.mark.parametrize(
    "first",
    [
        "",
        "trt.get_plugin_registry().load_library(plugins.get_library_path())",
        "import ctypes; ctypes.CDLL(plugins.get_library_path())",
    ],
    ids=["alone", "after_loading", "after_opening"],
)
def test_register_is_harmless_after_any_other_way(runtime: str, first: str):
    library_path()
    argument = "trt.get_plugin_registry()" if "rtx" in runtime else ""  # not one that register looks for
    out = output_of(
        f"{REGISTER}\n{first}\nplugins.register({argument})\nplugins.register({argument})\nprint(names())", runtime
    )
    assert out.strip() == str(NAMES)


def test_register_needs_a_registry():
    library_path()
    done = run_child("import ortplugins.tensorrt as plugins; plugins.register('no registry')")
    assert "TypeError: expected a TensorRT plugin registry, got str" in done.stderr


def test_register_without_tensorrt_says_what_to_install():
    library_path()
    done = run_child("""
import sys
for name in ("tensorrt", "tensorrt_lean", "tensorrt_dispatch"):
    sys.modules[name] = sys.modules[name + "_bindings"] = None
import ortplugins.tensorrt as plugins
plugins.register()
""")
    assert "RuntimeMismatchError" in done.stderr and "pip install tensorrt" in done.stderr


def test_register_refuses_an_old_tensorrt():
    library_path()
    done = run_child("""
import sys, types
sys.modules["tensorrt"] = types.ModuleType("tensorrt")
sys.modules["tensorrt"].__version__ = "8.6.1"
import ortplugins.tensorrt as plugins
plugins.register()
""")
    assert "ortplugins needs TensorRT 10 or newer, but tensorrt is TensorRT 8.6.1" in done.stderr


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    from ortplugins import tensorrt
    from ortplugins.errors import LibraryNotFoundError

    monkeypatch.setattr(tensorrt, "LIBRARY_FOLDER", tmp_path)
    with pytest.raises(LibraryNotFoundError, match="libortplugins_tensorrt.so"):
        tensorrt.get_library_path()


# --- The file -------------------------------------------------------------------------------------------------------


def test_exports_two_functions_and_links_no_tensorrt():
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library_path()], capture_output=True, text=True, check=True
    ).stdout
    assert sorted(line.split()[-1].split("@")[0] for line in symbols.splitlines()) == ["getCreators", "setLoggerFinder"]
    dynamic = subprocess.run(["readelf", "-d", library_path()], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert needed
    assert all(re.match(r"(libc|libm|libdl|librt|libpthread|ld-linux.*)\.so", name) for name in needed), needed
    assert "NODELETE" in dynamic
