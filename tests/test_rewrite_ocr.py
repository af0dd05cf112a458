"""A text recogniser as PaddlePaddle exports it, with trained weights: opset 12, packed projections, Swish, norms written
out. `pip install --no-deps rapidocr-onnxruntime` brings the file."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
from rewrite_helpers import ours, relative_error, sites, stock

from ortplugins.rewrite import rewrite


@pytest.fixture(scope="module")
def recogniser() -> onnx.ModelProto:
    try:
        files = metadata.files("rapidocr-onnxruntime") or []
    except metadata.PackageNotFoundError:
        pytest.skip("rapidocr-onnxruntime is not installed")
    (path,) = (Path(str(f.locate())) for f in files if f.name.endswith("rec_infer.onnx"))
    return onnx.load(path)


def test_sites(recogniser: onnx.ModelProto) -> None:
    result = rewrite(recogniser)
    found = {kind: len(sites(result, kind)) for kind in ("attention", "linear", "layer_norm", "softmax")}
    assert found == {"attention": 2, "linear": 9, "layer_norm": 5, "softmax": 1}
    assert all(s.status == "fused" for s in result.report.sites)
    onnx.checker.check_model(result.model)
    left = {n.op_type for n in result.model.graph.node}
    assert not left & {"Softmax", "ReduceMean", "Sqrt", "MatMul"}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("width", [32, 200, 320])
def test_outputs(recogniser: onnx.ModelProto, batch: int, width: int) -> None:
    image = np.random.default_rng(batch).uniform(-1, 1, (batch, 3, 48, width)).astype(np.float32)
    feeds = {recogniser.graph.input[0].name: image}
    (expected,) = stock(recogniser)(feeds)
    (actual,) = ours(rewrite(recogniser).model)(feeds)
    assert relative_error(actual, expected) <= 2e-5
    assert np.array_equal(actual.argmax(axis=-1), expected.argmax(axis=-1)), "the same text"
