"""A text recogniser as PaddlePaddle exports it, with trained weights: opset 12, packed projections, Swish, norms written
out. The package rapidocr-onnxruntime brings the file; what it depends on is not needed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from ort_versions import site_of
from rewrite_helpers import ours, relative_error, sites, stock

from ortplugins.rewrite import rewrite


pytestmark = pytest.mark.network


@pytest.fixture(scope="module")
def recogniser() -> onnx.ModelProto:
    (path,) = site_of("rapidocr-onnxruntime==1.4.4").rglob("*rec_infer.onnx")
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
