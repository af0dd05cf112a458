"""End to end with a full TensorRT: rewritten models as engines, by Polygraphy, ONNX Runtime and trtexec.

Everything here needs the module ``tensorrt`` and a GPU. ``scripts/tensorrt_end_to_end.py`` runs it and writes a record.
``ORTPLUGINS_END_TO_END_MODEL`` names another model than the demo's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import pathlib
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tensorrt_support import ROOT, library_path, run_child

import ortplugins
from ortplugins import demo, ops
from ortplugins import tensorrt as plugins
from ortplugins.errors import OrtPluginsError
from ortplugins.inputs import make_inputs
from ortplugins.reference import Float64Model

Feeds = dict[str, np.ndarray]
Property = Callable[[str, object], None]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("tensorrt") is None, reason="needs TensorRT: pip install tensorrt"),
]

PROFILE = ((1, 8), (4, 64), (8, 128))
"""(batch, length) of the smallest, best-tuned and largest inputs."""

RUNS = ((1, 8), (2, 33), (4, 64), (8, 128))


@pytest.fixture(scope="module")
def trt() -> Any:
    library_path()
    import tensorrt

    plugins.register()
    return tensorrt


def demo_model() -> pathlib.Path:
    if "ORTPLUGINS_END_TO_END_MODEL" in os.environ:
        return pathlib.Path(os.environ["ORTPLUGINS_END_TO_END_MODEL"])
    try:
        return demo.find_model()
    except OrtPluginsError as error:
        pytest.skip(str(error))


def corpus_model(name: str) -> pathlib.Path:
    return ROOT / "models/corpus" / name


MODELS = [
    pytest.param(demo_model, id="encoder_float32"),
    pytest.param(lambda: corpus_model("bert.dyn18.eager.fp32.onnx"), id="bert_float32"),
    pytest.param(lambda: corpus_model("bert.dyn23.sdpa.fp16.onnx"), id="bert_float16"),
]


class Engine:
    """An engine of the model in ``path``, built by Polygraphy for ``PROFILE``. With ``carry_plugins`` it holds the plugin
    library."""

    def __init__(self, path: pathlib.Path, inputs: Callable[[int, int], Feeds], carry_plugins: bool = False):
        from polygraphy.backend import trt as backend

        points = [inputs(*size) for size in PROFILE]
        profile = backend.Profile()
        for name, value in points[0].items():
            profile.add(name, value.shape, points[1][name].shape, points[2][name].shape)
        network = backend.network_from_onnx_path(str(path), strongly_typed=True)
        self.plugin_layers = sum(network[1].get_layer(i).type.name == "PLUGIN_V3" for i in range(network[1].num_layers))
        config = backend.CreateConfig(profiles=[profile], version_compatible=carry_plugins)
        if carry_plugins:
            config = backend.PostprocessConfig(config, func=_carry_plugins)
        self.bytes = backend.engine_bytes_from_network(network, config)
        self.engine = backend.engine_from_bytes(self.bytes)

    def runner(self) -> Any:
        from polygraphy.backend.trt import TrtRunner

        return TrtRunner(self.engine)


def _carry_plugins(_builder: Any, _network: Any, config: Any) -> None:
    config.plugins_to_serialize = [library_path()]


def error_of(outputs: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> float:
    """Largest error of any output, relative to the largest value of that output."""
    errors = []
    for name, expected in exact.items():
        actual = np.asarray(outputs[name]).astype(np.float64)
        assert actual.shape == expected.shape
        assert np.isfinite(actual).all()
        errors.append(np.abs(actual - expected).max() / np.abs(expected).max())
    return float(max(errors))


def our_nodes(model: onnx.ModelProto) -> int:
    return sum(node.domain == ops.DOMAIN for node in model.graph.node)


@pytest.mark.parametrize("find", MODELS)
def test_rewritten_model_beside_stock_tensorrt(
    trt: Any, find: Callable[[], pathlib.Path], tmp_path: pathlib.Path, record_property: Property
):
    """Dynamic shapes: at most twice the error of stock TensorRT on the original, against float64."""
    stock_model = onnx.load(find())
    fused = ortplugins.rewrite(stock_model, output=tmp_path / "fused.onnx").model
    onnx.save(stock_model, tmp_path / "stock.onnx")

    def inputs(batch: int, length: int) -> Feeds:
        return make_inputs(stock_model, batch=batch, length=length)

    ours = Engine(tmp_path / "fused.onnx", inputs)
    stock = Engine(tmp_path / "stock.onnx", inputs)
    assert our_nodes(fused) > 0
    assert ours.plugin_layers == our_nodes(fused)
    assert stock.plugin_layers == 0
    exact_model = Float64Model(stock_model)
    epsilon = 2.0**-10 if "float16" in {d.name for d in output_types(stock_model)} else 2.0**-23
    with ours.runner() as fast, stock.runner() as plain:
        for size in RUNS:
            feeds = inputs(*size)
            exact = exact_model(feeds)
            ours_error, stock_error = error_of(fast.infer(feeds), exact), error_of(plain.infer(feeds), exact)
            record_property(f"error {size[0]}x{size[1]}", f"ours {ours_error:.3g}, stock TensorRT {stock_error:.3g}")
            assert ours_error <= 2 * stock_error + 8 * epsilon
        times: dict[str, list[float]] = {"ours": [], "stock": []}
        for _ in range(200):  # in alternation, so that clocks and temperature are the same for both
            for name, runner in (("ours", fast), ("stock", plain)):
                runner.infer(feeds)
                times[name].append(runner.last_inference_time() * 1e6)
        for name, values in times.items():
            record_property(
                f"{name} {RUNS[-1][0]}x{RUNS[-1][1]} median", f"{statistics.median(values):.1f} us, with copies"
            )


def output_types(model: onnx.ModelProto) -> set[np.dtype]:
    return {helper.tensor_dtype_to_np_dtype(o.type.tensor_type.elem_type) for o in model.graph.output}


# --- Engines in other processes --------------------------------------------------------------------------------------

RUN_ENGINE = """
import sys
import numpy as np
import tensorrt as trt
logger = trt.Logger(trt.Logger.ERROR)
runtime = trt.Runtime(logger)
engine_bytes = open(sys.argv[1], "rb").read()
if sys.argv[4] == "unregistered":
    assert runtime.deserialize_cuda_engine(engine_bytes) is None
    print("refused")
    sys.exit()
if sys.argv[4] == "register":
    import ortplugins.tensorrt
    ortplugins.tensorrt.register()
else:
    runtime.engine_host_code_allowed = True
engine = runtime.deserialize_cuda_engine(engine_bytes)
assert engine is not None
from polygraphy.backend.trt import TrtRunner
feeds = dict(np.load(sys.argv[2]))
with TrtRunner(engine) as runner:
    np.savez(sys.argv[3], **{k: np.asarray(v) for k, v in runner.infer(feeds).items()})
print("done")
"""


@pytest.fixture(scope="module")
def encoder(
    trt: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[pathlib.Path, Feeds, Callable[[int, int], Feeds]]]:
    """The rewritten demo model, inputs for it, and how to make more."""
    model = onnx.load(demo_model())
    path = tmp_path_factory.mktemp("encoder") / "fused.onnx"
    ortplugins.rewrite(model, output=path)

    def inputs(batch: int, length: int) -> Feeds:
        return make_inputs(model, batch=batch, length=length)

    yield path, inputs(2, 33), inputs


@pytest.mark.parametrize("how", ["register", "in_the_engine"])
def test_engine_in_a_new_process(encoder: Any, tmp_path: pathlib.Path, how: str):
    path, feeds, inputs = encoder
    engine = Engine(path, inputs, carry_plugins=how == "in_the_engine")
    (tmp_path / "encoder.engine").write_bytes(bytes(engine.bytes))
    np.savez(tmp_path / "feeds.npz", **feeds)
    arguments = [str(tmp_path / n) for n in ("encoder.engine", "feeds.npz", "outputs.npz")]
    if how == "register":
        refused = run_child(RUN_ENGINE, *arguments, "unregistered")
        assert refused.stdout.strip() == "refused", refused.stderr
        assert "Cannot find plugin" in refused.stderr or "not found in Plugin Registry" in refused.stderr
    done = run_child(RUN_ENGINE, *arguments, how)
    assert done.stdout.strip().endswith("done"), done.stderr
    with engine.runner() as runner:
        here = runner.infer(feeds)
        for name, value in np.load(tmp_path / "outputs.npz").items():
            np.testing.assert_array_equal(value, here[name])


def test_cuda_graph_of_an_engine(encoder: Any):
    from polygraphy import cuda

    path, feeds, inputs = encoder
    engine = Engine(path, inputs).engine
    context = engine.create_execution_context()
    cudart = cuda.wrapper().handle
    stream = cuda.Stream()
    pointer = ctypes.c_void_p

    def check(status: int) -> None:
        assert status == 0, f"CUDA error {status}"

    buffers = {}
    for name, value in feeds.items():
        buffers[name] = cuda.DeviceArray(value.shape, value.dtype)
        context.set_input_shape(name, value.shape)
        context.set_tensor_address(name, buffers[name].ptr)
    outputs = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    outputs = [n for n in outputs if n not in feeds]
    for name in outputs:
        buffers[name] = cuda.DeviceArray(tuple(context.get_tensor_shape(name)), np.dtype(np.float32))
        context.set_tensor_address(name, buffers[name].ptr)

    def fill(values: Feeds) -> None:
        for name, value in values.items():
            buffers[name].copy_from(np.ascontiguousarray(value), stream)

    fill(feeds)
    assert context.execute_async_v3(stream.ptr)
    stream.synchronize()
    check(cudart.cudaStreamBeginCapture(pointer(stream.ptr), ctypes.c_int(0)))
    assert context.execute_async_v3(stream.ptr)
    graph, executable = pointer(), pointer()
    check(cudart.cudaStreamEndCapture(pointer(stream.ptr), ctypes.byref(graph)))
    check(cudart.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
    other = {name: np.roll(value, 1, axis=-1) for name, value in feeds.items()}
    for values in (other, feeds):
        fill(values)
        check(cudart.cudaGraphLaunch(executable, pointer(stream.ptr)))
        stream.synchronize()
        replayed = {name: buffers[name].numpy() for name in outputs}
        assert context.execute_async_v3(stream.ptr)
        stream.synchronize()
        for name in outputs:
            np.testing.assert_array_equal(replayed[name], buffers[name].numpy())


# --- Control flow ----------------------------------------------------------------------------------------------------


def branch_model() -> onnx.ModelProto:
    """`If(flag): attention with causal mask, else: without`."""
    shape = ["batch", "length", 4, 64]

    def branch(name: str, causal: int) -> onnx.GraphProto:
        node = helper.make_node(
            "FusedAttention",
            ["q", "k", "v"],
            [f"{name}_y"],
            name=name,
            domain=ops.DOMAIN,
            is_causal=causal,
            plugin_version=str(ops.OPSET_VERSION),
            plugin_namespace=ops.DOMAIN,
        )
        return helper.make_graph(
            [node], name, [], [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, shape)]
        )

    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch("causal", 1), else_branch=branch("full", 0))
    graph_inputs = [helper.make_tensor_value_info("flag", TensorProto.BOOL, [])]
    graph_inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in "qkv"]
    graph = helper.make_graph(
        [node], "graph", graph_inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)]
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ops.DOMAIN, ops.OPSET_VERSION)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


def test_attention_inside_if(trt: Any, tmp_path: pathlib.Path):
    from reference import attention_reference

    onnx.save(branch_model(), tmp_path / "if.onnx")

    def inputs(batch: int, length: int) -> Feeds:
        rng = np.random.default_rng(batch)
        tensors = {n: rng.standard_normal((batch, length, 4, 64)).astype(np.float32) for n in "qkv"}
        return {"flag": np.array(True), **tensors}

    engine = Engine(tmp_path / "if.onnx", inputs)
    assert engine.plugin_layers == 2
    with engine.runner() as runner:
        for flag in (True, False):
            feeds = {**inputs(2, 33), "flag": np.array(flag)}
            exact = attention_reference([feeds["q"], feeds["k"], feeds["v"]], {"is_causal": int(flag)}).y
            assert np.abs(runner.infer(feeds)["y"] - exact).max() <= 1e-5


# --- ONNX Runtime ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_plugins", [True, False], ids=["with_plugins", "without"])
def test_onnxruntime_s_tensorrt_provider(encoder: Any, tmp_path: pathlib.Path, with_plugins: bool):
    """With the plugin library TensorRT takes our nodes too; without it they go to the next provider."""
    import onnxruntime

    if "TensorrtExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has no TensorRT provider: pip install onnxruntime-gpu")
    path, feeds, _ = encoder
    # The provider reads the plugin libraries once for a process.
    code = """
import json, sys
import numpy as np, onnxruntime, ortplugins
import ortplugins.tensorrt
options = onnxruntime.SessionOptions()
options.enable_profiling = True
options.profile_file_prefix = sys.argv[4]
ortplugins.register(options)
extra = {"trt_extra_plugin_lib_paths": ortplugins.tensorrt.get_library_path()} if sys.argv[5] == "with" else {}
providers = [("TensorrtExecutionProvider", extra), "CUDAExecutionProvider", "CPUExecutionProvider"]
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=providers)
names = [o.name for o in session.get_outputs()]
np.savez(sys.argv[3], **dict(zip(names, session.run(names, dict(np.load(sys.argv[2]))))))
events = json.load(open(session.end_profiling()))
nodes = [e["args"] for e in events if "provider" in e.get("args", {})]
print(json.dumps(sorted({(n["op_name"], n["provider"]) for n in nodes})))
"""
    np.savez(tmp_path / "feeds.npz", **feeds)
    arguments = [str(path), str(tmp_path / "feeds.npz"), str(tmp_path / "outputs.npz"), str(tmp_path / "profile")]
    done = run_child(code, *arguments, "with" if with_plugins else "without")
    assert done.returncode == 0, done.stderr
    placed = json.loads(done.stdout.splitlines()[-1])
    assert any(provider == "TensorrtExecutionProvider" for _, provider in placed)
    ours_elsewhere = [
        op for op, provider in placed if op in {o.name for o in ops.OPS} and provider != "TensorrtExecutionProvider"
    ]
    assert bool(ours_elsewhere) is not with_plugins
    exact = Float64Model(onnx.load(demo_model()))(feeds)
    assert error_of(dict(np.load(tmp_path / "outputs.npz")), exact) <= 2e-3  # the provider may use TF32


# --- trtexec ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--staticPlugins", "--dynamicPlugins"])
def test_trtexec(encoder: Any, tmp_path: pathlib.Path, option: str):
    trtexec = shutil.which("trtexec") or shutil.which("trtexec", path="/usr/src/tensorrt/bin:/opt/tensorrt/bin")
    if trtexec is None:
        pytest.skip("trtexec is not in PATH")
    path, _, inputs = encoder
    shapes = [
        ",".join(f"{name}:{'x'.join(map(str, value.shape))}" for name, value in inputs(*size).items())
        for size in PROFILE
    ]
    engine = tmp_path / "encoder.engine"
    command = [
        trtexec,
        f"--onnx={path}",
        f"{option}={library_path()}",
        f"--saveEngine={engine}",
        "--useCudaGraph",
        *(f"--{which}Shapes={shape}" for which, shape in zip(("min", "opt", "max"), shapes)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    loaded = subprocess.run(
        [trtexec, f"--loadEngine={engine}", f"{option}={library_path()}", f"--shapes={shapes[2]}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert loaded.returncode == 0, loaded.stdout[-3000:]
