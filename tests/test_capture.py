"""Capture into CUDA graphs: every row of every op's table, workspaces in ONNX Runtime sessions, a whole rewritten model.

A stream that is being captured refuses whatever would spoil a hot path: cudaMalloc, synchronisation, the default stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnxruntime
import pytest
from kernel_harness import Row, table_params
from test_onnxruntime import demo_model

from ortplugins import native, ops
from ortplugins.bench.chains import chains
from ortplugins.bench.graphs import one_op_model
from ortplugins.rewrite import rewrite
from ortplugins.session import make_session

pytestmark = pytest.mark.gpu

Shapes = list[tuple[int, ...] | None]


def _softmax() -> Iterator[tuple[Shapes, dict[str, Any]]]:
    for rows, cols in ((3, 64), (3, 1000), (3, 8192), (2, 20000), (2, 40000), (2, 131072), (1, 400000)):
        yield [(rows, cols)], {}
    yield [(64, 30)], {"axis": 0}


def _layer_norm() -> Iterator[tuple[Shapes, dict[str, Any]]]:
    for cols in (64, 768, 5000, 20000, 70000):
        yield [(5, cols), (5, cols), (cols,), (cols,)], {}


def _gemm() -> Iterator[tuple[Shapes, dict[str, Any]]]:
    for m, n, k in ((4, 256, 256), (256, 256, 256), (129, 67, 35)):
        for precision in ops.PRECISIONS:
            yield [(m, k), (k, n), (n,)], {"precision": precision, "activation": "gelu"}


def _attention() -> Iterator[tuple[Shapes, dict[str, Any]]]:
    for queries, keys in ((96, 96), (77, 77), (1, 1024)):
        for dim in (40, 48, 64, 80, 96, 128, 192, 256):
            for precision in ops.PRECISIONS:
                q, kv = (2, queries, 4, dim), (2, keys, 2, dim)
                yield [q, kv, kv], {"is_causal": int(queries > 1), "precision": precision}


PROBLEMS = {
    "FusedSoftmax": _softmax,
    "FusedLayerNorm": _layer_norm,
    "FusedGemm": _gemm,
    "FusedAttention": _attention,
}


def _device_tensor(t: Any) -> native.DeviceTensor:
    return native.DeviceTensor(t.data_ptr(), str(t.dtype).removeprefix("torch."), tuple(t.shape))


def check_capture(torch: Any, op: str, variant: str, dtype: str, shapes: Shapes, attrs: dict[str, Any]) -> None:
    """Captures one launch, replays it on other contents, and compares with a launch outside of the graph."""
    kind = getattr(torch, dtype)
    inputs = [torch.randn(s, device="cuda", dtype=kind) for s in shapes]
    out = torch.empty(native.infer_shapes(op, [_device_tensor(t) for t in inputs], attrs)[0], device="cuda", dtype=kind)
    arguments, results = [_device_tensor(t) for t in inputs], [_device_tensor(out)]
    nbytes = native.workspace_bytes(op, arguments, results, attrs, variant=variant, device="cuda")
    workspace = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cuda")

    def launch() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        native.run(
            op,
            arguments,
            attrs,
            outputs=results,
            variant=variant,
            device="cuda",
            stream=stream,
            workspace=(workspace.data_ptr(), nbytes),
        )

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        launch()
    torch.cuda.synchronize()
    before = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        launch()
    for seed in (1, 2):
        torch.manual_seed(seed)
        for t in inputs:
            t.copy_(torch.randn_like(t))
        out.fill_(float("nan"))
        workspace.fill_(255)  # what one launch leaves there is nothing that the next may rely on
        graph.replay()
        torch.cuda.synchronize()
        replayed = out.clone()
        out.fill_(float("nan"))
        launch()
        torch.cuda.synchronize()
        assert torch.equal(replayed, out), f"{dtype} {shapes} {attrs}"
        assert not torch.equal(replayed, before)


@pytest.mark.parametrize(
    ("op", "variant"),
    [
        pytest.param(op, p.values[0], id=p.id, marks=p.marks)
        for op in PROBLEMS
        for p in table_params(op)
        if p.values[0].device == "cuda"
    ],
)
def test_row_is_captured(op: str, variant: Row) -> None:
    """In every dtype that the row takes, on the first problem that it takes."""
    torch = pytest.importorskip("torch", reason="captures streams with PyTorch")
    taken = []
    for dtype in ops.FLOAT_TYPES:
        for shapes, attrs in PROBLEMS[op]():
            try:
                check_capture(torch, op, variant.name, dtype, shapes, attrs)
            except NotImplementedError:
                continue
            taken.append(dtype)
            break
    assert taken, "no problem of the list is one for this row"


def _bound(session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray], shapes: list[tuple[int, ...]]) -> Any:
    """A binding to device memory that stays in place, its inputs and outputs."""
    binding = session.io_binding()
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(t, "cuda", 0) for n, t in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    outputs = []
    for info, shape in zip(session.get_outputs(), shapes, strict=True):
        dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}[info.type]
        outputs.append(onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, "cuda", 0))
        binding.bind_ortvalue_output(info.name, outputs[-1])
    return binding, values, outputs


def check_session_graph(model: Any, contents: list[dict[str, np.ndarray]], atol: float = 0.0) -> None:
    """A session that replays its CUDA graph gives on all contents what an ordinary one gives."""
    plain = make_session(model, provider="cuda")
    expected = [plain.run(None, feeds) for feeds in contents]
    captured = make_session(model, provider="cuda", provider_options={"enable_cuda_graph": "1"})
    binding, values, outputs = _bound(captured, contents[0], [e.shape for e in expected[0]])
    for _ in range(2):
        for feeds, wanted in zip(contents, expected):
            for name, value in values.items():
                value.update_inplace(feeds[name])
            binding.synchronize_inputs()
            captured.run_with_iobinding(binding)
            binding.synchronize_outputs()
            for value, e in zip(outputs, wanted):
                np.testing.assert_allclose(value.numpy(), e, rtol=0.0, atol=atol)


WITH_WORKSPACE = {
    "FusedSoftmax": ([(1, 400000)], "float32", {}),
    # b as it is stored needs none.
    "FusedGemm": ([(256, 256), (256, 256)], "float32", {"precision": "tf32x3", "transB": 1}),
    "FusedAttention": ([(1, 1, 8, 64), (1, 2048, 2, 64), (1, 2048, 2, 64)], "float16", {}),
}


@pytest.mark.parametrize("op", WITH_WORKSPACE)
def test_workspace_of_a_session_is_captured(op: str) -> None:
    """The workspace comes from the session's arena: with cudaMalloc the capture would fail."""
    shapes, dtype, attrs = WITH_WORKSPACE[op]
    rng = np.random.default_rng(0)
    sets = [[rng.standard_normal(s).astype(dtype) for s in shapes] for _ in range(3)]
    tensors = [native.DeviceTensor(0, dtype, s) for s in shapes]
    results = [native.DeviceTensor(0, dtype, native.infer_shapes(op, tensors, attrs)[0])]
    assert native.workspace_bytes(op, tensors, results, attrs, device="cuda") > 0
    names = [t.name for t in ops.find(op).inputs]
    check_session_graph(one_op_model(op, sets[0], attrs), [dict(zip(names, inputs)) for inputs in sets])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float16", 1e-2)])
def test_benchmarked_chains_compute_the_same(dtype: str, bound: float, causal: bool) -> None:
    """What `bench attention` compares inside of sessions: both sides start from the same tensors."""
    problem = {"batch": 2, "heads": 3, "q_len": 40, "head_dim": 64, "is_causal": causal}
    made = chains(problem, dtype, None, node_seconds=1.0)
    ours, stock = (made[name].result().astype(np.float64) for name in ("ours", "ort_mha"))
    assert np.abs(ours - stock).max() <= bound


STOCK_SUMS = 1e-6
"""The stock reductions behind the encoder add in any order."""


def _token_feeds(session: onnxruntime.InferenceSession, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, 1500, (4, 64))
    mask = (np.arange(64) < rng.integers(20, 65, (4, 1))).astype(np.int64)
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {i.name: feeds[i.name] for i in session.get_inputs()}


def test_rewritten_model_is_captured() -> None:
    model = rewrite(demo_model()).model
    session = make_session(model)
    check_session_graph(model, [_token_feeds(session, seed) for seed in range(3)], STOCK_SUMS)


def test_sessions_and_threads_share_the_library() -> None:
    """Two sessions, four threads each, on the same device: every result is that of a session by itself."""
    model = rewrite(demo_model()).model
    sessions = [make_session(model, provider="cuda") for _ in range(2)]
    contents = [_token_feeds(sessions[0], seed) for seed in range(8)]
    expected = [make_session(model, provider="cuda").run(None, feeds) for feeds in contents]

    def work(i: int) -> bool:
        for step in range(10):
            which = (i + step) % len(contents)
            actual = sessions[i % 2].run(None, contents[which])
            if not all(np.allclose(a, e, rtol=0.0, atol=STOCK_SUMS) for a, e in zip(actual, expected[which], strict=True)):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
