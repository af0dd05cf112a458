"""The demo on the model with trained weights, and what makes it fail."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from ortplugins import demo
from ortplugins.errors import OrtPluginsError
from test_cli import run


@pytest.fixture(scope="module")
def model():
    try:
        return demo.find_model()
    except OrtPluginsError as error:
        pytest.skip(str(error))


def test_all_sites_fused_and_outputs_equal(model):
    result = demo.run_demo(model=model, shapes=[(1, 128), (3, 37)], min_seconds=0.05)
    assert result.problems == [] and result.fused == demo.ATTENTION_SITES
    for shape in result.shapes:
        assert shape.max_error <= demo.MAX_ERROR and shape.min_cosine >= 1 - 1e-6
        assert shape.stock.median_us > 0 and shape.ours.median_us > 0


def test_command_ends_with_its_table(model, tmp_path, monkeypatch):
    monkeypatch.setattr(demo.run_demo, "__kwdefaults__", demo.run_demo.__kwdefaults__ | {"shapes": [(2, 16)]})
    out = tmp_path / "fused.onnx"
    status, output = run("demo", "--seconds", 0.1, "--output", out)
    assert status == 0 and "3 of 3" in output and "2 x 16" in output and "all 3 attention sites fused" in output
    assert "ortplugins" in {o.domain for o in onnx.load(out).opset_import}


def test_command_fails_when_a_site_is_not_fused(model, monkeypatch):
    monkeypatch.setattr(demo, "ATTENTION_SITES", 4)
    monkeypatch.setattr(demo.run_demo, "__kwdefaults__", demo.run_demo.__kwdefaults__ | {"shapes": [(1, 8)]})
    status, output = run("demo", "--seconds", 0.1)
    assert status == 1 and "3 of 4 attention sites are fused" in output


@pytest.mark.parametrize("error, problems", [(0.0, 0), (1e-5, 0), (1.1e-5, 1), (float("nan"), 1), (float("inf"), 1)])
def test_large_errors_and_nan_are_problems(error, problems):
    sites = [{"kind": "attention", "status": "fused"}] * demo.ATTENTION_SITES
    shape = demo.ShapeResult(1, 8, error, 1.0, stock=None, ours=None, ratio=1.0, verdict="same")
    assert len(demo.DemoResult("m", "torch", "1.32", sites, [shape]).problems) == problems


def test_sentence_embeddings_are_the_float_matrix():
    outputs = [np.zeros((2, 3), np.int64), np.zeros((2, 3, 4), np.float32), np.ones((2, 4), np.float32)]
    assert demo.sentence_embeddings(outputs) is outputs[2]


def test_missing_model_says_what_to_install(monkeypatch):
    monkeypatch.setattr(demo, "MODEL_DISTRIBUTION", "no-such-distribution")
    with pytest.raises(OrtPluginsError, match="pip install no-such-distribution"):
        demo.find_model()
