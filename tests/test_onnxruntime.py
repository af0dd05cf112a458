"""The ONNX Runtime adapter: types, optional inputs, attributes, shape inference, messages, empty tensors, placement."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from kernel_harness import PROVIDERS, assert_close
from onnx import TensorProto, helper
from ort_models import fused_node, make_model, make_session, one_op_model, run_model, run_op, session_options, value_info
from reference import attention_reference, plain

from ortplugins import ops, rewrite

ALL_PROVIDERS = [pytest.param(PROVIDERS["cpu"], id="cpu"), pytest.param(PROVIDERS["cuda"], id="cuda", marks=pytest.mark.gpu)]
MINOR = int(onnxruntime.__version__.split(".")[1])


def random(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def sample_inputs(op: str, dtype: Any = np.float32) -> list[np.ndarray]:
    """The required inputs of ``op``, small."""
    if op == "FusedAttention":
        return [random(2, 5, 2, 8, dtype=dtype, seed=i) for i in range(3)]
    if op == "FusedGemm":
        return [random(3, 8, dtype=dtype), random(8, 5, dtype=dtype)]
    return [random(3, 8, dtype=dtype)]


OP_NAMES = [op.name for op in ops.OPS]


# --- types and optional inputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ALL_PROVIDERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("op", OP_NAMES)
def test_every_type_runs(op: str, dtype: Any, provider: str) -> None:
    inputs = sample_inputs(op, dtype)
    exact = run_op(op, [t.astype(np.float32) for t in inputs])[0]
    y, = run_op(op, inputs, provider=provider)
    assert y.dtype == np.dtype(dtype)
    assert_close(y, exact.astype(np.float64), 0.1 * np.abs(exact).max())


@pytest.mark.parametrize("dtype", [TensorProto.DOUBLE, TensorProto.INT32], ids=["double", "int32"])
@pytest.mark.parametrize("op", OP_NAMES)
def test_other_types_are_refused_when_the_session_is_made(op: str, dtype: int) -> None:
    names = [t.name for t in ops.find(op).inputs if not t.optional]
    model = make_model([fused_node(op, names, ["y"])], [value_info(n, dtype, t.shape) for n, t in zip(names, sample_inputs(op))],
                       [value_info("y", dtype, None)])
    with pytest.raises(Exception, match=op):
        make_session(model)


@pytest.mark.parametrize("provider", ALL_PROVIDERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["absent", "empty_at_end", "empty_in_the_middle", "boolean", "additive"])
def test_optional_mask(form: str, dtype: Any, provider: str) -> None:
    q, k, v = sample_inputs("FusedAttention", dtype)
    past_k, past_v = random(2, 2, 3, 8, dtype=dtype, seed=7), random(2, 2, 3, 8, dtype=dtype, seed=8)
    rng = np.random.default_rng(3)
    mask = {"boolean": rng.random((2, 1, 5, 8)) < 0.7, "additive": random(2, 2, 5, 8, dtype=dtype, seed=4)}.get(form)
    inputs = {"absent": [q, k, v], "empty_at_end": [q, k, v, None]}.get(form, [q, k, v, mask, past_k, past_v])
    outputs = run_op("FusedAttention", inputs, provider=provider, output_count=3 if len(inputs) == 6 else 1)
    inputs = inputs + [None] * (7 - len(inputs))
    expected = attention_reference(inputs, {})
    error_of_plain = np.abs(attention_reference(inputs, {}, plain(np.dtype(dtype))).y - expected.y).max()
    assert_close(outputs[0], expected.y, 2 * error_of_plain + 1e-6)
    if len(outputs) == 3:
        for present, past, new in ((outputs[1], past_k, k), (outputs[2], past_v, v)):
            np.testing.assert_array_equal(present, np.concatenate([past, new.transpose(0, 2, 1, 3)], axis=2))


# --- attributes and messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "attrs", "message"),
    [
        ("FusedSoftmax", {"axis": 1.5}, "FusedSoftmax node 'node': attribute axis must be an integer"),
        ("FusedSoftmax", {"log": 2}, "FusedSoftmax node 'node': attribute log: 2 is not in \\[0, 1\\]"),
        ("FusedSoftmax", {"scale": float("nan")}, "FusedSoftmax node 'node': attribute scale: is not a finite number"),
        ("FusedGemm", {"activation": "swish"}, "FusedGemm node 'node': attribute activation: 'swish' is not one of none relu gelu"),
        ("FusedAttention", {"layout": "SBNH"}, "FusedAttention node 'node': attribute layout: 'SBNH' is not one of BSNH BNSH BS3NH BSN3H"),
        ("FusedAttention", {"precision": 3}, "FusedAttention node 'node': attribute precision must be a string"),
    ],
)
def test_bad_attribute_names_node_and_attribute(op: str, attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        make_session(one_op_model(op, sample_inputs(op), attrs))


@pytest.mark.parametrize(
    ("op", "shapes", "attrs", "message"),
    [
        ("FusedSoftmax", [(2, 3), (4, 3)], {}, "FusedSoftmax node 'node': mask: does not broadcast"),
        ("FusedSoftmax", [(2, 3)], {"axis": 2}, "FusedSoftmax node 'node': axis: 2 is not in \\[-2, 1\\]"),
        ("FusedGemm", [(2, 3), (4, 5)], {}, "FusedGemm node 'node': b: dimension 0 is 4, expected 3"),
        ("FusedGemm", [(2, 3), (3, 5), (4,)], {}, "FusedGemm node 'node': bias: does not broadcast to \\(2, 5\\)"),
        ("FusedGemm", [(2, 3), (3, 5), None, (1, 5)], {}, "FusedGemm node 'node': residual"),
        ("FusedAttention", [(1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)], {}, "FusedAttention node 'node': q: has 3 heads"),
        ("FusedAttention", [(1, 4, 24)] * 3, {}, "FusedAttention node 'node': q: rank 3 needs the attribute"),
        ("FusedAttention", [(1, 4, 2, 8), (1, 4, 2, 6), (1, 4, 2, 8)], {}, "FusedAttention node 'node': k: dimension 3 is 6, expected 8"),
    ],
)
def test_bad_shape_names_node_and_tensor(op: str, shapes: list[Any], attrs: dict[str, Any], message: str) -> None:
    inputs = [None if s is None else random(*s) for s in shapes]
    model = one_op_model(op, inputs, attrs)
    for info in model.graph.input:  # sizes that only the run can know
        for i, dim in enumerate(info.type.tensor_type.shape.dim):
            dim.dim_param = f"{info.name}_{i}"
    session = make_session(model)
    names = [t.name for t in ops.find(op).inputs]
    with pytest.raises(Exception, match=message):
        session.run(None, {names[i]: t for i, t in enumerate(inputs) if t is not None})


def test_node_attributes_for_tensorrt_are_ignored() -> None:
    x, = sample_inputs("FusedSoftmax")
    y, = run_op("FusedSoftmax", [x], {"plugin_version": "1", "plugin_namespace": ops.DOMAIN})
    np.testing.assert_array_equal(y, run_op("FusedSoftmax", [x])[0])


@pytest.mark.parametrize(("domain", "version", "message"), [("", 1, "FusedSoftmax"), (ops.DOMAIN, 2, "FusedSoftmax|ortplugins")])
def test_wrong_domain_or_version_is_named(domain: str, version: int, message: str) -> None:
    node = helper.make_node("FusedSoftmax", ["x"], ["y"], domain=domain)
    model = make_model([node], [value_info("x", np.float32, (2, 3))], [value_info("y", np.float32, None)], domain_version=version)
    if domain == ops.DOMAIN:
        # ONNX Runtime takes the newest schema that is not newer than the import: a version above ours still runs.
        assert make_session(model).get_outputs()[0].shape == [2, 3]
        return
    with pytest.raises(Exception, match=message):
        make_session(model)


# --- shape inference ------------------------------------------------------------------------------------------------------


def output_shapes(node: onnx.NodeProto, inputs: dict[str, list[int | str]]) -> list[list[int | str]]:
    model = make_model([node], [value_info(n, np.float32, s) for n, s in inputs.items()], [value_info(n, np.float32, None) for n in node.output])
    return [o.shape for o in make_session(model).get_outputs()]


needs_full_inference = pytest.mark.skipif(MINOR < 24, reason="before 1.24, ops with several optional inputs go without inference")


def test_softmax_keeps_the_shape() -> None:
    assert output_shapes(fused_node("FusedSoftmax", ["x"], ["y"]), {"x": ["batch", 7, "length"]}) == [["batch", 7, "length"]]


@needs_full_inference
@pytest.mark.parametrize(
    ("node", "inputs", "expected"),
    [
        (fused_node("FusedGemm", ["a", "b"], ["y"], transB=1), {"a": ["B", "S", 8], "b": [5, 8]}, [["B", "S", 5]]),
        (fused_node("FusedGemm", ["a", "b"], ["y"], transA=1), {"a": ["B", 8, "S"], "b": [1, 8, 5]}, [["B", "S", 5]]),
        (fused_node("FusedGemm", ["a", "b", "", "r"], ["y"]), {"a": ["S", 8], "b": [8, 5], "r": ["S", 5]}, [["S", 5]]),
        (fused_node("FusedAttention", ["q", "k", "v"], ["y"]), {"q": ["B", "S", 8, 64], "k": ["B", "T", 2, 64], "v": ["B", "T", 2, 32]},
         [["B", "S", 8, 32]]),
        (fused_node("FusedAttention", ["q", "k", "v"], ["y"], num_heads=12),
         {"q": ["B", "S", 768], "k": ["B", "T", 768], "v": ["B", "T", 384]}, [["B", "S", 384]]),
        (fused_node("FusedAttention", ["q", "k", "v", "", "past_k", "past_v"], ["y", "present_k", "present_v"], layout="BNSH"),
         {"q": ["B", 8, "S", 64], "k": ["B", 2, "S", 64], "v": ["B", 2, "S", 64], "past_k": ["B", 2, "P", 64], "past_v": ["B", 2, "P", 64]},
         [["B", 8, "S", 64], ["B", 2, "P + S", 64], ["B", 2, "P + S", 64]]),
    ],
    ids=["gemm", "gemm_batched", "gemm_no_bias", "attention", "attention_3d", "attention_cache"],
)
def test_symbolic_shapes(node: onnx.NodeProto, inputs: dict[str, list[int | str]], expected: list[list[int | str]]) -> None:
    assert output_shapes(node, inputs) == expected


@needs_full_inference
def test_shapes_are_known_behind_our_op() -> None:
    """Reshape by Shape and MatMul after an op of ours: the runtime knows rank and sizes to the end."""
    nodes = [
        fused_node("FusedGemm", ["x", "w"], ["h"]),
        helper.make_node("Shape", ["h"], ["s"], start=0, end=2),
        helper.make_node("Concat", ["s", "tail"], ["target"], axis=0),
        helper.make_node("Reshape", ["h", "target"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["y"]),
    ]
    constants = [helper.make_tensor("tail", TensorProto.INT64, [2], [2, 4])]
    model = make_model(nodes, [value_info("x", np.float32, ["batch", "length", 6]), value_info("w", np.float32, [6, 8]),
                               value_info("w2", np.float32, [4, 3])],
                       [value_info("y", np.float32, None), value_info("h", np.float32, None)], constants)
    y, h = make_session(model).get_outputs()
    assert h.shape == ["batch", "length", 8]
    assert (len(y.shape), y.shape[-1]) == (4, 3)


def test_unknown_rank_is_left_open() -> None:
    model = make_model([helper.make_node("Reshape", ["x", "s"], ["r"]), fused_node("FusedSoftmax", ["r"], ["y"])],
                       [value_info("x", np.float32, ["B", 8]), value_info("s", np.int64, ["k"])], [value_info("y", np.float32, None)])
    y, = make_session(model).run(None, {"x": np.zeros((2, 8), np.float32), "s": np.array([2, 2, 4])})
    np.testing.assert_array_equal(y, np.full((2, 2, 4), 0.25, np.float32))


# --- empty tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ALL_PROVIDERS)
@pytest.mark.parametrize(
    ("op", "shapes", "expected"),
    [
        ("FusedGemm", [(0, 4), (4, 3)], (0, 3)),
        ("FusedGemm", [(2, 4), (4, 0)], (2, 0)),
        ("FusedSoftmax", [(0, 8)], (0, 8)),
        ("FusedSoftmax", [(8, 0)], (8, 0)),
        ("FusedAttention", [(2, 0, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8)], (2, 0, 2, 8)),
        ("FusedAttention", [(0, 3, 2, 8), (0, 5, 2, 8), (0, 5, 2, 8)], (0, 3, 2, 8)),
    ],
)
def test_empty_outputs(op: str, shapes: list[tuple[int, ...]], expected: tuple[int, ...], provider: str) -> None:
    y, = run_op(op, [random(*s) for s in shapes], provider=provider)
    assert y.shape == expected


@pytest.mark.parametrize("provider", ALL_PROVIDERS)
def test_empty_sums(provider: str) -> None:
    """K = 0 leaves bias or zeros; no keys leave zeros."""
    bias = random(3)
    np.testing.assert_array_equal(run_op("FusedGemm", [random(2, 0), random(0, 3)], provider=provider)[0], np.zeros((2, 3), np.float32))
    np.testing.assert_array_equal(run_op("FusedGemm", [random(2, 0), random(0, 3), bias], provider=provider)[0], np.tile(bias, (2, 1)))
    y, = run_op("FusedAttention", [random(2, 3, 2, 8), random(2, 0, 2, 8), random(2, 0, 2, 8)], provider=provider)
    np.testing.assert_array_equal(y, np.zeros((2, 3, 2, 8), np.float32))


# --- sessions and providers -----------------------------------------------------------------------------------------------


def test_one_model_with_every_op_loads_in_one_session() -> None:
    nodes = [
        fused_node("FusedGemm", ["x", "w"], ["h"], activation="gelu"),
        fused_node("FusedAttention", ["h", "h", "h"], ["a"], num_heads=2),
        fused_node("FusedSoftmax", ["a"], ["y"]),
    ]
    model = make_model(nodes, [value_info("x", np.float32, ["B", "S", 6]), value_info("w", np.float32, [6, 8])], [value_info("y", np.float32, None)])
    y, = make_session(model).run(None, {"x": random(2, 5, 6), "w": random(6, 8)})
    np.testing.assert_allclose(y.sum(-1), 1.0, rtol=1e-5)


def test_two_sessions_and_threads_share_the_library() -> None:
    from concurrent.futures import ThreadPoolExecutor

    inputs = [random(2, 64, 4, 16, seed=i) for i in range(3)]
    feeds = dict(zip("qkv", inputs))
    sessions = [make_session(one_op_model("FusedAttention", inputs)) for _ in range(2)]
    expected, = sessions[0].run(None, feeds)
    with ThreadPoolExecutor(4) as pool:
        for y, in pool.map(lambda i: sessions[i % 2].run(None, feeds), range(40)):
            np.testing.assert_array_equal(y, expected)


def profiled_providers(session: onnxruntime.InferenceSession) -> dict[str, set[str]]:
    """Op types that each provider ran, from the session's profile."""
    ran: dict[str, set[str]] = {}
    for event in json.loads(pathlib.Path(session.end_profiling()).read_text()):
        args = event.get("args", {})
        if event.get("cat") == "Node" and "provider" in args:
            ran.setdefault(args["provider"], set()).add(args["op_name"])
    return ran


@pytest.mark.gpu
@pytest.mark.parametrize("op", OP_NAMES)
def test_op_runs_on_the_cuda_provider_without_copies(op: str, tmp_path: pathlib.Path) -> None:
    inputs = sample_inputs(op)
    options = session_options()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = make_session(one_op_model(op, inputs), PROVIDERS["cuda"], options)
    run_model(session, dict(zip([t.name for t in ops.find(op).inputs], inputs)))
    assert profiled_providers(session) == {"CUDAExecutionProvider": {op}}


@pytest.mark.gpu
@pytest.mark.parametrize("op", OP_NAMES)
def test_cuda_graph_replays_follow_new_contents(op: str) -> None:
    """Capture after warm-up, fixed buffers, contents changed in place."""
    inputs = sample_inputs(op)
    session = make_session(one_op_model(op, inputs), PROVIDERS["cuda"], provider_options={"enable_cuda_graph": "1"})
    reference = make_session(one_op_model(op, inputs), PROVIDERS["cuda"])
    names = [t.name for t in ops.find(op).inputs]
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(t, "cuda", 0) for n, t in zip(names, inputs)}
    binding = session.io_binding()
    for n, v in values.items():
        binding.bind_ortvalue_input(n, v)
    shape = reference.run(None, dict(zip(names, inputs)))[0].shape
    y = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, "cuda", 0)
    binding.bind_ortvalue_output("y", y)
    for step in range(6):
        new = [random(*t.shape, seed=100 * step + i) for i, t in enumerate(inputs)]
        for n, t in zip(names, new):
            values[n].update_inplace(t)
        binding.synchronize_inputs()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        np.testing.assert_array_equal(y.numpy(), reference.run(None, dict(zip(names, new)))[0])


@pytest.mark.gpu
@pytest.mark.parametrize("op", OP_NAMES)
def test_results_follow_the_stream(op: str) -> None:
    """A large product in front, our op, a reduction behind, inputs changing: each result is its own."""
    n = 2048 if op != "FusedAttention" else 512
    ours = {
        "FusedAttention": fused_node(op, ["h", "h", "h"], ["z"], num_heads=8),
        "FusedGemm": fused_node(op, ["h", "w"], ["z"]),
    }.get(op, fused_node(op, ["h"], ["z"]))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), ours, helper.make_node("Mul", ["z", "r"], ["p"]),
             helper.make_node("ReduceSum", ["p"], ["y"], keepdims=0)]
    w, r = random(n, n, seed=1) / np.sqrt(n).astype(np.float32), random(n, seed=2)
    model = make_model(nodes, [value_info("x", np.float32, [1, n, n])], [value_info("y", np.float32, None)],
                       [onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(r, "r")])
    session = make_session(model, PROVIDERS["cuda"], provider_options={"use_tf32": "0"})
    xs = [random(1, n, n, seed=i) for i in range(3)]
    expected = [session.run(None, {"x": x})[0] for x in xs]
    assert np.abs(np.diff(np.sort(np.ravel(expected)))).min() > 1e-3 * np.abs(expected).max()
    for i in range(120):
        actual, = session.run(None, {"x": xs[i % len(xs)]})
        # The stock ReduceSum adds in any order.
        np.testing.assert_allclose(actual, expected[i % len(xs)], rtol=0, atol=1e-4 * np.abs(expected).max())


def demo_model() -> pathlib.Path:
    """The demo's model; a machine that cannot install it names a file with its graph."""
    from ortplugins import demo
    from ortplugins.errors import OrtPluginsError

    if given := os.environ.get("ORTPLUGINS_DEMO_MODEL"):
        return pathlib.Path(given)
    try:
        return pathlib.Path(demo.find_model())
    except OrtPluginsError as error:
        pytest.skip(str(error))


@pytest.mark.gpu
def test_rewritten_model_stays_on_the_gpu(tmp_path: pathlib.Path) -> None:
    """A real encoder: every op of ours on the CUDA provider, no copy node, outputs as the original's."""
    original = demo_model()
    rewritten = rewrite(original).model
    ours = {node.op_type for node in rewritten.graph.node if node.domain == ops.DOMAIN}
    assert {"FusedAttention", "FusedGemm"} <= ours
    options = session_options()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = make_session(rewritten, PROVIDERS["cuda"], options, provider_options={"use_tf32": "0"})
    ids = np.random.default_rng(0).integers(5, 1500, (4, 64))
    mask = np.ones_like(ids)
    mask[1, 40:] = 0
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    feeds = {i.name: feeds[i.name] for i in session.get_inputs()}
    actual = session.run(None, feeds)
    expected = onnxruntime.InferenceSession(str(original), providers=[PROVIDERS["cpu"]]).run(None, feeds)
    for a, e in zip(actual, expected, strict=True):
        assert np.abs(a - e).max() <= 1e-5
    ran = profiled_providers(session)
    assert ours <= ran["CUDAExecutionProvider"]
    assert not ours & ran.get("CPUExecutionProvider", set())
    assert not {op for ops_ran in ran.values() for op in ops_ran if op.startswith("Memcpy")}
