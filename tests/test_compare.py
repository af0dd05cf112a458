"""Comparing models: what passes, what must not, how inputs are made, and how latency is measured."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortplugins
from ortplugins.compare import STATED_BOUND
from ortplugins.errors import OrtPluginsError
from ortplugins.files import replace_atomically
from ortplugins.inputs import make_inputs
from ortplugins.reference import Float64Model, NoReferenceError, to_float64
from ortplugins.timing import Rounds, alternate


def value(name, shape, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def model_of(nodes, inputs, outputs, weights=None, opset=17):
    initializers = [numpy_helper.from_array(w, n) for n, w in (weights or {}).items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)])


def small_encoder(seed=0, width=16, vocabulary=29, dtype=np.float32):
    """Embedding, attention with a padding mask, and a linear layer with GELU."""
    rng = np.random.default_rng(seed)
    shapes = {
        "table": (vocabulary, width),
        "wq": (width, width),
        "wk": (width, width),
        "wv": (width, width),
        "w1": (width, 2 * width),
    }
    weights = {n: rng.standard_normal(s).astype(dtype) / 2 for n, s in shapes.items()}
    weights |= {
        "b1": rng.standard_normal(2 * width).astype(dtype),
        "scale": np.array(width**-0.5, dtype),
        "one": np.array(1, dtype),
        "half": np.array(0.5, dtype),
        "root": np.array(2**0.5, dtype),
        "big": np.array(-1e4, dtype),
        "axes": np.array([1]),
    }
    onnx_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"], name="embed"),
        helper.make_node("Cast", ["attention_mask"], ["m"], to=onnx_type),
        helper.make_node("Sub", ["one", "m"], ["masked"]),
        helper.make_node("Mul", ["masked", "big"], ["flat_bias"]),
        helper.make_node("Unsqueeze", ["flat_bias", "axes"], ["bias"]),
        *(helper.make_node("MatMul", ["x", f"w{c}"], [c], name=f"project_{c}") for c in "qkv"),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["raw"], name="scores"),
        helper.make_node("Mul", ["raw", "scale"], ["scaled"]),
        helper.make_node("Add", ["scaled", "bias"], ["biased"]),
        helper.make_node("Softmax", ["biased"], ["p"], axis=-1, name="softmax"),
        helper.make_node("MatMul", ["p", "v"], ["context"], name="context"),
        helper.make_node("MatMul", ["context", "w1"], ["h"], name="linear"),
        helper.make_node("Add", ["h", "b1"], ["t"]),
        helper.make_node("Div", ["t", "root"], ["t1"]),
        helper.make_node("Erf", ["t1"], ["t2"]),
        helper.make_node("Add", ["t2", "one"], ["t3"]),
        helper.make_node("Mul", ["t", "t3"], ["t4"]),
        helper.make_node("Mul", ["t4", "half"], ["hidden"]),
    ]
    dims = ["batch", "sequence"]
    return model_of(
        nodes,
        [value("input_ids", dims, TensorProto.INT64), value("attention_mask", dims, TensorProto.INT64)],
        [value("hidden", [*dims, 2 * width], onnx_type)],
        weights,
    )


def edited(model, **weights):
    """A copy of ``model`` in which each named weight is what the given function makes of it."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.name in weights:
            old = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name](old).astype(old.dtype), tensor.name))
    return copy


def test_rewritten_model_passes_against_float64():
    result = ortplugins.compare(small_encoder(), latency=False)
    assert result.passed
    assert [s["status"] for s in result.rewrite_report["sites"]].count("fused") >= 2
    assert len(result.cases) == 2
    for case in result.cases:
        (output,) = case.outputs
        assert output.reference == "float64" and case.no_reference is None
        assert output.error_rewritten <= output.bound < 1e-5


@pytest.mark.parametrize("dtype", [np.float16])
def test_half_precision_passes(dtype):
    result = ortplugins.compare(small_encoder(dtype=dtype), latency=False)
    assert result.passed and result.cases[0].outputs[0].dtype == "float16"
    assert result.cases[0].outputs[0].reference == "float64"


def test_small_error_is_out_of_the_bound_from_float64():
    """Two parts in 100,000 of one weight: within a usual tolerance of 1e-3, but not an error of float32 arithmetic."""
    stock = small_encoder()
    result = ortplugins.compare(stock, edited(stock, wv=lambda w: w * (1 + 2e-5)), latency=False)
    assert not result.passed
    output = result.cases[0].outputs[0]
    assert output.error_rewritten > output.bound and "above the bound" in output.reason
    assert ortplugins.compare(stock, edited(stock, wv=lambda w: w * (1 + 2e-5)), latency=False, atol=1e-2).passed


def test_atol_limits_the_difference():
    stock = small_encoder()
    changed = edited(stock, b1=lambda b: b + 0.01)
    assert not ortplugins.compare(stock, changed, atol=1e-3, latency=False).passed
    assert ortplugins.compare(stock, changed, atol=0.1, latency=False).passed


def test_nan_on_both_sides_does_not_pass():
    model = model_of([helper.make_node("Log", ["x"], ["y"])], [value("x", ["n"])], [value("y", ["n"])])
    result = ortplugins.compare(model, model, inputs={"x": np.array([1, -1, 2], np.float32)}, latency=False)
    assert not result.passed
    assert "1 in the original, 1 in the rewritten model, of 3" in result.cases[0].outputs[0].reason
    assert ortplugins.compare(model, model, inputs={"x": np.array([1, 2, 3], np.float32)}, latency=False).passed


def test_nan_on_one_side_does_not_pass():
    stock = small_encoder()
    result = ortplugins.compare(
        stock, edited(stock, b1=lambda b: np.where(np.arange(b.size) == 3, np.nan, b)), latency=False
    )
    assert not result.passed and "0 in the original" in result.cases[0].outputs[0].reason


@pytest.mark.parametrize("other, passes", [(np.inf, True), (-np.inf, False), (1e38, False)])
def test_infinities_are_equal_only_to_themselves(other, passes):
    def constant(x):
        node = helper.make_node("Mul", ["x", "c"], ["y"])
        return model_of([node], [value("x", [2])], [value("y", [2])], {"c": np.array([x, 1], np.float32)})

    inputs = {"x": np.ones(2, np.float32)}
    assert ortplugins.compare(constant(np.inf), constant(other), inputs=inputs, latency=False).passed is passes


def test_integers_must_be_equal():
    def shifted(by):
        node = helper.make_node("Add", ["x", "c"], ["y"])
        return model_of(
            [node], [value("x", ["n"], TensorProto.INT64)], [value("y", ["n"], TensorProto.INT64)], {"c": np.array(by)}
        )

    assert ortplugins.compare(shifted(1), shifted(1), latency=False).passed
    assert not ortplugins.compare(shifted(1), shifted(2), latency=False).passed


def test_booleans_must_be_equal():
    def compared(op):
        node = helper.make_node(op, ["x", "c"], ["y"])
        return model_of(
            [node], [value("x", ["n"])], [value("y", ["n"], TensorProto.BOOL)], {"c": np.array(0, np.float32)}
        )

    assert ortplugins.compare(compared("Less"), compared("Less"), latency=False).passed
    assert not ortplugins.compare(compared("Less"), compared("Greater"), latency=False).passed


def test_empty_outputs_pass_and_their_shapes_are_compared():
    def sliced(end):
        weights = {"start": np.array([0]), "end": np.array([end])}
        return model_of(
            [helper.make_node("Slice", ["x", "start", "end"], ["y"])], [value("x", ["n"])], [value("y", ["m"])], weights
        )

    assert ortplugins.compare(sliced(0), sliced(0), latency=False).passed
    result = ortplugins.compare(sliced(0), sliced(1), latency=False)
    assert not result.passed and "gives float32 (1,)" in result.cases[0].outputs[0].reason


def test_graph_without_float64_reference_falls_back_to_the_stated_bound():
    node = helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    model = model_of([node], [value("x", ["n", 8])], [value("y", ["n", 8])])
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    result = ortplugins.compare(model, model, latency=False)
    output = result.cases[0].outputs[0]
    assert result.passed and result.cases[0].no_reference and output.reference is None
    assert output.bound <= STATED_BOUND["float32"] * 5


def test_reference_that_takes_another_step_is_not_used():
    """0.1 + 0.2 rounds below or above a step depending on the precision, so that float64 says nothing about float32."""
    weights = {"a": np.array([0.1], np.float32), "steps": np.array(1e8, np.float32)}
    nodes = [
        helper.make_node("Add", ["x", "a"], ["s"]),
        helper.make_node("Mul", ["s", "steps"], ["t"]),
        helper.make_node("Floor", ["t"], ["f"]),
        helper.make_node("Mod", ["f", "two"], ["y"], fmod=1),
    ]
    model = model_of(nodes, [value("x", [1])], [value("y", [1])], weights | {"two": np.array(7, np.float32)})
    result = ortplugins.compare(model, model, inputs={"x": np.array([0.2], np.float32)}, latency=False)
    assert result.passed and result.cases[0].outputs[0].reference is None
    assert "jumps" in result.cases[0].no_reference


def test_models_with_other_interfaces_are_refused():
    stock = small_encoder()
    other = onnx.ModelProto()
    other.CopyFrom(stock)
    other.graph.output[0].name = "t4"
    with pytest.raises(OrtPluginsError, match="outputs differ in hidden, t4"):
        ortplugins.compare(stock, other)


def test_inputs_that_do_not_fit_name_the_model():
    inputs = {"input_ids": np.full((1, 4), 1000), "attention_mask": np.ones((1, 4), np.int64)}
    with pytest.raises(OrtPluginsError, match="the original model does not run on the inputs input_ids 1x4"):
        ortplugins.compare(small_encoder(), inputs=inputs, latency=False)


def test_wrong_library_fails(tmp_path):
    with pytest.raises(OrtPluginsError, match="nowhere.so"):
        ortplugins.compare(small_encoder(), library=tmp_path / "nowhere.so", latency=False)


def test_layers_locate_a_difference():
    stock = small_encoder()
    assert all(o.passed for o in ortplugins.compare(stock, layers=True, latency=False).layers)
    result = ortplugins.compare(stock, edited(stock, wv=lambda w: w + 1), layers=True, latency=False)
    by_name = {o.name: o.passed for o in result.layers}
    assert by_name["q"] and by_name["p"] and not by_name["v"] and not by_name["context"]


def test_external_data_is_found_from_any_folder(tmp_path, monkeypatch):
    folder = tmp_path / "models"
    folder.mkdir()
    onnx.save(small_encoder(), folder / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=64)
    monkeypatch.chdir(tmp_path)
    result = ortplugins.compare("models/m.onnx", latency=False, layers=True)
    assert result.passed and result.cases[0].outputs[0].reference == "float64"


def test_report_and_latency(tmp_path):
    path = tmp_path / "report.json"
    result = ortplugins.compare(small_encoder(), sizes={"batch": 3, "sequence": 5}, min_seconds=0.05, report=path)
    document = json.loads(path.read_text())
    assert document["passed"] is result.passed is True
    assert document["cases"][0]["inputs"] == {"input_ids": [3, 5], "attention_mask": [3, 5]}
    latency = document["latency"]
    for side in ("original", "rewritten"):
        low, high = latency[side]["spread_us"]
        assert 0 < low <= latency[side]["median_us"] <= high
    assert latency["ratio"] == pytest.approx(latency["original"]["median_us"] / latency["rewritten"]["median_us"])


def test_token_ids_stay_in_the_vocabulary_and_masks_are_padded():
    feeds = make_inputs(small_encoder(vocabulary=5), batch=64, length=33)
    ids, mask = feeds["input_ids"], feeds["attention_mask"]
    assert ids.shape == mask.shape == (64, 33) and set(np.unique(ids)) == set(range(5))
    lengths = mask.sum(axis=1)
    assert lengths[0] == 33 and lengths.min() >= 17 and len(set(lengths)) > 5
    assert np.array_equal(mask, np.arange(33) < lengths[:, None])


def test_sizes_of_a_model_with_a_past():
    dims = {
        "input_ids": ["batch", "seq"],
        "position_ids": ["batch", "seq"],
        "attention_mask": ["batch", "past_plus_seq"],
        "past_key": ["batch", 2, "past", 4],
        "total": ["batch", "past_len + 1"],
    }
    model = model_of([], [value(n, d) for n, d in dims.items()], [])
    shapes = {n: v.shape for n, v in make_inputs(model, batch=2, length=8).items()}
    assert shapes == {
        "input_ids": (2, 8),
        "position_ids": (2, 8),
        "attention_mask": (2, 12),
        "past_key": (2, 2, 4, 4),
        "total": (2, 5),
    }
    assert make_inputs(model, {"past": 3, "seq": 1})["attention_mask"].shape == (2, 4)


def test_unknown_dimension_lists_the_known_ones():
    with pytest.raises(OrtPluginsError, match="named sequense; the symbolic dimensions are: batch, sequence"):
        make_inputs(small_encoder(), {"sequense": 4})


def test_inputs_are_reproducible():
    first, second, other = (make_inputs(small_encoder(), seed=s) for s in (1, 1, 2))
    assert np.array_equal(first["input_ids"], second["input_ids"]) and not np.array_equal(
        first["input_ids"], other["input_ids"]
    )


def test_float64_model_has_float64_accuracy():
    model, feeds = small_encoder(), make_inputs(small_encoder())
    assert all(t.data_type != TensorProto.FLOAT for t in to_float64(model).graph.initializer)
    got = Float64Model(model)(feeds)["hidden"]
    weights = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer if t.name != "axes"}
    x = weights["table"][feeds["input_ids"]]
    scores = (x @ weights["wq"]) @ (x @ weights["wk"]).swapaxes(1, 2) * weights["scale"] + (
        1 - feeds["attention_mask"]
    )[:, None] * -1e4
    p = np.exp(scores - scores.max(-1, keepdims=True))
    t = p / p.sum(-1, keepdims=True) @ (x @ weights["wv"]) @ weights["w1"] + weights["b1"]
    from math import erf

    expected = 0.5 * t * (1 + np.vectorize(erf)(t / weights["root"]))
    assert np.max(np.abs(got - expected)) <= 1e-12


def test_no_reference_says_why():
    node = helper.make_node("Nonsense", ["x"], ["y"], domain="nobody")
    model = model_of([node], [value("x", [1])], [value("y", [1])])
    with pytest.raises(NoReferenceError, match="Nonsense|nobody"):
        Float64Model(model)({"x": np.zeros(1, np.float32)})


def test_weights_beyond_the_limit_are_not_even_read(tmp_path):
    """A model whose data file would take 8 GiB, and is not there."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 31], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="missing.bin")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "g", [value("x", [1])], [value("y", [1 << 31])], [weight]
    )
    path = tmp_path / "large.onnx"
    path.write_bytes(helper.make_model(graph, ir_version=8).SerializeToString())
    with pytest.raises(NoReferenceError, match="16.0 GiB in float64"):
        Float64Model(path)


def test_bfloat16_is_converted():
    weight = helper.make_tensor(
        "c", TensorProto.BFLOAT16, [2], np.array([0.1, 3], ml_dtypes.bfloat16).tobytes(), raw=True
    )
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "c"], ["y"])],
        "g",
        [value("x", [2], TensorProto.BFLOAT16)],
        [value("y", [2], TensorProto.BFLOAT16)],
        [weight],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    y = Float64Model(model)({"x": np.array([1, 2], ml_dtypes.bfloat16)})["y"]
    assert y.dtype == np.float64 and y.tolist() == [float(ml_dtypes.bfloat16(0.1)), 6.0]


def test_alternation_takes_turns_and_reverses():
    calls = []
    rounds = alternate(
        [lambda: calls.append("a"), lambda: calls.append("b")], min_rounds=4, max_rounds=4, min_seconds=0, warmup=1
    )
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"
    assert rounds.timing(0).samples == rounds.timing(1).samples == 4


@pytest.mark.parametrize(
    "ours, expected", [([1.0] * 8, "faster"), ([3.0] * 8, "slower"), ([1.99] * 8, "same"), ([1.0, 3.0] * 4, "same")]
)
def test_verdict_needs_both_wins_and_distance(ours, expected):
    assert Rounds([[2.0] * 8, ours]).verdict() == expected


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.json"
    replace_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_atomically(path, "new \ud800")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["report.json"]
    with pytest.raises(OrtPluginsError, match="missing.*cannot be written"):
        replace_atomically(tmp_path / "missing" / "report.json", "text")
