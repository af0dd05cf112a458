"""Every file of models/corpus: all attention sites are found, and the outputs are those of the exported file."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from rewrite_helpers import CORPUS, corpus, corpus_inputs, in_numpy, ours, relative_error, sites, stock

from ortplugins.rewrite import rewrite

EXPLAINED = {"torch_mha.dyn18.eager.fp32.onnx": "the probabilities are used by other nodes than the second product"}
"""Sites that cannot be fused, and why: this one gives its probabilities out."""

BOUNDS = {"fp32": 2e-5, "fp16": 4e-3}


@pytest.mark.parametrize("name", corpus())
def test_all_sites_are_found(name: str) -> None:
    entry = corpus()[name]
    result = rewrite(CORPUS / name)
    found = sites(result, "attention")
    assert len(found) == entry["attention_sites"]
    for site in found:
        if name in EXPLAINED:
            assert (site.status, site.reason) == ("skipped", EXPLAINED[name])
        else:
            assert (site.status, site.reason) == ("fused", None)
    assert all(s.status == "fused" for s in sites(result, "linear")), "every product with a constant weight"
    assert not {n.op_type for n in result.model.graph.node} & {"Softmax", "Attention"}


@pytest.mark.parametrize("name", corpus())
def test_outputs_are_kept(name: str) -> None:
    entry = corpus()[name]
    source = onnx.load(CORPUS / name)
    result = rewrite(source)
    onnx.checker.check_model(result.model, full_check=True)
    # One file is refused by ONNX Runtime's CPU provider, so its original runs in NumPy.
    expected_of = stock(source) if entry["reference"] == "onnxruntime CPU" else in_numpy(source)
    run = ours(result.model)
    for dims in (*entry["dims"].values(), *_more_sizes(entry)):
        for fully_masked in (False, True):
            feeds = corpus_inputs(entry, dims, fully_masked)
            for actual, expected in zip(run(feeds), expected_of(feeds), strict=True):
                error = relative_error(actual, expected)
                assert error <= BOUNDS[entry["dtype"]], f"{dims}: relative error {error:.2e}"


def _more_sizes(entry: dict) -> list[dict[str, int]]:
    """A batch of one, and one token."""
    if entry.get("limit"):
        return []
    size = entry["dims"]["size_a"]
    return [{**size, "batch": 1}, {**size, "seq": 1, "enc": 1}]


@pytest.mark.parametrize("name", corpus())
def test_rewriting_the_result_changes_nothing(name: str) -> None:
    once = rewrite(CORPUS / name).model
    again = rewrite(once)
    assert not again.report.select(status="fused")
    assert again.model.SerializeToString() == once.SerializeToString()


@pytest.mark.parametrize("name", corpus())
def test_the_frame_is_kept(name: str) -> None:
    source = onnx.load(CORPUS / name)
    model = rewrite(source).model
    assert model.ir_version == source.ir_version
    assert [(o.domain, o.version) for o in model.opset_import] == [
        *((o.domain, o.version) for o in source.opset_import),
        ("ortplugins", 1),
    ]
    assert model.graph.name == source.graph.name
    assert list(model.graph.input) == list(source.graph.input)
    assert list(model.graph.output) == list(source.graph.output)
    left = {v for n in model.graph.node for v in n.output}
    kept = {v.name: v for v in model.graph.value_info}
    for info in source.graph.value_info:
        if info.name in left:
            assert kept[info.name].type == info.type
    for node in model.graph.node:
        if node.domain == "ortplugins":
            attrs = {a.name: a.s for a in node.attribute if a.type == onnx.AttributeProto.STRING}
            assert attrs["plugin_version"] == b"1"
            assert attrs["plugin_namespace"] == b"ortplugins"


def test_comparison_rejects_a_wrong_scale() -> None:
    """The corpus is sharp enough: a scale that is off by a tenth is seen."""
    name = "bert.ts17.sdpa.fp32.onnx"
    model = rewrite(CORPUS / name).model
    for node in model.graph.node:
        for a in node.attribute:
            if node.op_type == "FusedAttention" and a.name == "scale":
                a.f *= 1.1
    entry = corpus()[name]
    feeds = corpus_inputs(entry, entry["dims"]["size_a"])
    expected = stock(onnx.load(CORPUS / name))(feeds)
    errors = [relative_error(a, e) for a, e in zip(ours(model)(feeds), expected)]
    assert max(errors) > 1e-3
    assert not np.isnan(errors).any()


def _unused(model: onnx.ModelProto) -> set[str]:
    used = {o.name for o in model.graph.output} | {i for n in model.graph.node for i in n.input}
    return {n.name for n in model.graph.node if not any(o in used for o in n.output)}


@pytest.mark.parametrize("name", corpus())
def test_nothing_unused_is_left(name: str) -> None:
    source = onnx.load(CORPUS / name)
    model = rewrite(source).model
    assert _unused(model) <= _unused(source)
    read = {i for n in model.graph.node for i in n.input}
    assert {t.name for t in model.graph.initializer} <= read


PAST = [n for n in corpus() if "past" in n]


@pytest.mark.parametrize("name", PAST)
def test_the_cache_goes_into_the_operator(name: str) -> None:
    model = rewrite(CORPUS / name).model
    nodes = [n for n in model.graph.node if n.op_type == "FusedAttention"]
    outputs = {o.name for o in model.graph.output}
    for node in nodes:
        assert node.input[4] and node.input[5]
        assert set(node.output[1:]) <= outputs
