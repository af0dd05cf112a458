"""Registering the library: once, twice, beside others, in old and new ONNX Runtimes, and when something is missing."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import ortplugins
from ort_models import fused_node, make_model, value_info
from ort_versions import OLDEST, TOO_OLD, run_python, site_of
from ortplugins import ops
from ortplugins.errors import LibraryNotFoundError, OrtPluginsError, RuntimeMismatchError
from ortplugins.session import check_domain, make_session

registration = importlib.import_module("ortplugins.register")  # the package's attribute of that name is the function
X = np.array([[1.0, 2.0, 4.0], [0.0, -1.0, 0.5]], np.float32)
EXPECTED = np.exp(X.astype(np.float64)) / np.exp(X.astype(np.float64)).sum(axis=1, keepdims=True)


def softmax_model(domain_version: int = 1) -> onnx.ModelProto:
    return make_model(
        [fused_node("FusedSoftmax", ["x"], ["y"], name="soft")],
        [value_info("x", np.float32, X.shape)],
        [value_info("y", np.float32, None)],
        domain_version=domain_version,
    )


def run_with(options: onnxruntime.SessionOptions) -> None:
    session = onnxruntime.InferenceSession(softmax_model().SerializeToString(), options)
    assert np.max(np.abs(session.run(None, {"x": X})[0] - EXPECTED)) <= 1e-6


def by_helper(options: onnxruntime.SessionOptions) -> None:
    ortplugins.register(options)


def by_hand(options: onnxruntime.SessionOptions) -> None:
    options.register_custom_ops_library(ortplugins.get_library_path())


@pytest.mark.parametrize(
    "steps",
    [
        (by_helper,),
        (by_hand,),
        (by_helper, by_helper),
        (by_helper, by_hand),
        (by_hand, by_helper),
        (by_hand, by_hand, by_helper),
    ],
    ids=lambda steps: "+".join(s.__name__ for s in steps),
)
def test_registering_again_is_harmless(steps):
    options = onnxruntime.SessionOptions()
    for step in steps:
        step(options)
    run_with(options)


def test_several_options_and_sessions_in_one_process():
    first, second = onnxruntime.SessionOptions(), onnxruntime.SessionOptions()
    for options in (first, second, first):
        ortplugins.register(options)
    for options in (first, second, first):
        run_with(options)


ONE_PROCESS = """
import numpy as np, onnxruntime as ort, ortplugins
from test_register import by_hand, by_helper, run_with
print(ort.__version__)
for steps in ((by_helper,), (by_hand,), (by_helper, by_hand), (by_hand, by_helper), (by_helper, by_helper)):
    options = ort.SessionOptions()
    for step in steps:
        step(options)
    run_with(options)
"""


@pytest.mark.network
def test_oldest_onnxruntime():
    result = run_python(ONE_PROCESS, site_of(f"onnxruntime=={OLDEST}"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [OLDEST]


@pytest.mark.network
@pytest.mark.parametrize(
    "way", ["ortplugins.register(options)", "options.register_custom_ops_library(ortplugins.get_library_path())"]
)
def test_too_old_onnxruntime_is_told_both_versions(way):
    code = f"import onnxruntime, ortplugins; options = onnxruntime.SessionOptions(); {way}"
    result = run_python(code, site_of(f"onnxruntime=={TOO_OLD}"))
    assert result.returncode == 1, "an exception, not a crash"
    message = result.stderr.strip().splitlines()[-1]
    assert TOO_OLD in message and "1.21" in message


@pytest.mark.parametrize("version", ["1.20.1", "1.9.0", "0.5", "unknown"])
def test_version_check_refuses(version):
    with pytest.raises(
        RuntimeMismatchError, match=rf"needs ONNX Runtime 1\.21 or newer, but this is ONNX Runtime {version}"
    ):
        registration.check_onnxruntime_version(version)


@pytest.mark.parametrize("version", ["1.21.0", "1.32.0", "1.100.0", "2.0.0", "1.33.0.dev20260101"])
def test_version_check_accepts(version):
    registration.check_onnxruntime_version(version)


def test_without_onnxruntime_the_advice_is_to_install_one():
    code = """
import sys
sys.modules["onnxruntime"] = None
import ortplugins
print(ortplugins.get_library_path())
ortplugins.register(object())
"""
    result = run_python(code)
    assert result.stdout.strip().endswith("libortplugins_onnxruntime.so")
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("ortplugins.errors.RuntimeMismatchError") and "pip install onnxruntime" in message


def test_missing_library(monkeypatch, tmp_path):
    monkeypatch.setattr(registration, "LIBRARY_FOLDER", tmp_path)
    with pytest.raises(LibraryNotFoundError, match=re.escape(str(tmp_path))):
        ortplugins.get_library_path()


def test_wrong_library(tmp_path):
    options = onnxruntime.SessionOptions()
    with pytest.raises(LibraryNotFoundError, match="nowhere"):
        ortplugins.register(options, library=tmp_path / "nowhere.so")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(OrtPluginsError, match="broken.so"):
        ortplugins.register(options, library=broken)


def test_argument_of_another_type():
    with pytest.raises(TypeError, match="SessionOptions, got dict"):
        ortplugins.register({})


def test_model_run_without_registering_names_domain_and_op():
    with pytest.raises(Exception, match="ortplugins:FusedSoftmax"):
        onnxruntime.InferenceSession(softmax_model().SerializeToString())
    make_session(softmax_model()).run(None, {"x": X})  # the package's own sessions need no call


def test_op_in_the_default_domain():
    model = softmax_model()
    model.graph.node[0].domain = ""
    with pytest.raises(
        OrtPluginsError,
        match=r"node 'soft': FusedSoftmax is looked up in domain 'ai.onnx' version 17.*'ortplugins' version 1",
    ):
        make_session(model)


def test_domain_version_that_the_library_lacks():
    with pytest.raises(OrtPluginsError, match="version 7 of domain ortplugins; this library offers version 1"):
        make_session(softmax_model(domain_version=7))
    check_domain(softmax_model())


def test_rewriter_writes_domain_and_version():
    softmax = helper.make_node("Softmax", ["x"], ["y"], axis=-1, name="soft")
    graph = helper.make_graph(
        [softmax], "g", [value_info("x", np.float32, X.shape)], [value_info("y", np.float32, X.shape)]
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    rewritten = ortplugins.rewrite(model).model
    assert [(n.op_type, n.domain) for n in rewritten.graph.node] == [("FusedSoftmax", "ortplugins")]
    assert {o.domain: o.version for o in rewritten.opset_import} == {"": 17, "ortplugins": 1}


def libraries() -> list[Path]:
    return sorted(Path(ortplugins.get_library_path()).parent.glob("*.so"))


def exported(library: Path) -> set[str]:
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    text = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1].split("@")[0] for line in text.splitlines() if line.split()[-2] not in ("A", "a")}


def test_onnxruntime_library_exports_one_symbol():
    assert exported(Path(ortplugins.get_library_path())) == {"RegisterCustomOps"}


def test_tensorrt_library_exports_its_entry_points_only():
    library = Path(ortplugins.get_library_path()).with_name("libortplugins_tensorrt.so")
    if not library.is_file():
        pytest.skip("this build has no TensorRT plugin library")
    assert exported(library) == {"getCreators", "setLoggerFinder"}


@pytest.mark.parametrize("library", libraries(), ids=lambda p: p.name)
def test_library_needs_no_runtime_and_no_driver(library):
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    text = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", text)
    assert needed, "the C library at least"
    assert not [n for n in needed if re.search(r"onnxruntime|nvinfer|libcuda|cudart|stdc\+\+", n)]
    assert not re.search(r"RPATH|RUNPATH", text)


@pytest.mark.network
def test_beside_another_custom_op_library():
    code = """
import numpy as np, onnx, onnxruntime as ort, onnxruntime_extensions as extensions, ortplugins
from onnx import helper
from ort_models import fused_node, value_info
from test_register import EXPECTED, X
upper = helper.make_node("StringUpper", ["s"], ["u"], domain="ai.onnx.contrib")
inputs = [value_info("x", np.float32, X.shape), value_info("s", onnx.TensorProto.STRING, [1])]
graph = helper.make_graph([upper, fused_node("FusedSoftmax", ["x"], ["y"])], "g", inputs,
                          [value_info("y", np.float32, X.shape), value_info("u", onnx.TensorProto.STRING, [1])])
imports = [helper.make_opsetid("", 17), helper.make_opsetid("ortplugins", 1), helper.make_opsetid("ai.onnx.contrib", 1)]
model = helper.make_model(graph, ir_version=8, opset_imports=imports)
for ours_first in (True, False):
    options = ort.SessionOptions()
    steps = [lambda: ortplugins.register(options),
             lambda: options.register_custom_ops_library(extensions.get_library_path())]
    for step in steps if ours_first else reversed(steps):
        step()
    y, u = ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": X, "s": np.array(["a"])})
    assert np.max(np.abs(y - EXPECTED)) <= 1e-6 and u.tolist() == ["A"]
print("both")
"""
    result = run_python(code, site_of("onnxruntime-extensions==0.15.2"))
    assert result.stdout.strip() == "both", result.stderr


def test_first_example_of_the_readme_runs(tmp_path, monkeypatch):
    readme = Path(__file__).parents[1] / "README.md"
    example = re.search(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)[1]
    assert "ortplugins.register(options)" in example
    softmax = helper.make_node("Softmax", ["x"], ["y"], axis=-1)
    graph = helper.make_graph(
        [softmax], "g", [value_info("x", np.float32, ["rows", 3])], [value_info("y", np.float32, ["rows", 3])]
    )
    monkeypatch.chdir(tmp_path)
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), "model.onnx")
    scope: dict = {}
    exec(example, scope)  # noqa: S102
    assert np.max(np.abs(scope["session"].run(None, {"x": X})[0] - EXPECTED)) <= 1e-6


def test_readme_lists_every_operator():
    listed = re.findall(r"^\| `(Fused\w+)` \|", (Path(__file__).parents[1] / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(op.name for op in ops.OPS)


def test_public_names():
    assert set(ortplugins.__all__) >= {"get_library_path", "register", "rewrite", "compare", "__version__"}
    for name in ortplugins.__all__:
        assert getattr(ortplugins, name) is not None
    assert sys.modules["ortplugins.rewrite"].rewrite is ortplugins.rewrite
