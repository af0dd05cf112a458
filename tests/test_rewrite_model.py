"""Models as files and as wholes: subgraphs, functions, order, notes, versions, external data, memory and time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from onnx import TensorProto, helper, numpy_helper
from rewrite_helpers import (
    CORPUS,
    Graph,
    check,
    corpus,
    corpus_inputs,
    fused,
    ops,
    relative_error,
    session,
    sites,
    stock,
)

from ortplugins.rewrite import rewrite

F = np.float32
RNG = np.random.default_rng(5)
N, D = 2, 4


def _attention_nodes(q: str, k: str, v: str, out: str) -> list[onnx.NodeProto]:
    """Over (batch, heads, sequence, dim) tensors."""
    return [
        helper.make_node("Transpose", [k], [f"{out}_kt"], perm=[0, 1, 3, 2], name=f"{out}_t"),
        helper.make_node("MatMul", [q, f"{out}_kt"], [f"{out}_s"], name=f"{out}_qk"),
        helper.make_node("Softmax", [f"{out}_s"], [f"{out}_p"], axis=-1, name=f"{out}_softmax"),
        helper.make_node("MatMul", [f"{out}_p", v], [out], name=f"{out}_pv"),
    ]


def _value(name: str, dims: list, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, dims)


HEADS = ["batch", N, "seq", D]


def _feeds(*names: str, batch: int = 2, seq: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {n: rng.standard_normal((batch, N, seq, D)).astype(F) for n in names}


def _model(
    nodes: list, inputs: list, outputs: list, initializers: list = [], functions: list = [], opset: int = 17
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    imports = [
        helper.make_opsetid("", opset),
        *({helper.make_opsetid(f.domain, 1).domain: helper.make_opsetid(f.domain, 1) for f in functions}).values(),
    ]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, functions=functions)


# -- subgraphs


def test_if_branches() -> None:
    """Softmax in one branch, attention over tensors of the outer graph in the other."""
    then = helper.make_graph(
        [helper.make_node("Softmax", ["x"], ["t"], axis=1, name="in_then")], "then", [], [_value("t", HEADS)]
    )
    other = helper.make_graph(_attention_nodes("x", "x", "x", "e"), "else", [], [_value("e", HEADS)])
    node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other, name="branch")
    model = _model([node], [_value("x", HEADS), _value("c", [], TensorProto.BOOL)], [_value("y", HEADS)])
    result = check(model, {**_feeds("x"), "c": np.array(True)}, {**_feeds("x"), "c": np.array(False)})
    assert {(s.kind, s.status, s.graph) for s in result.report.sites} == {
        ("softmax", "fused", "branch"),
        ("attention", "fused", "branch"),
    }


def test_loop_body_reads_the_outer_graph() -> None:
    body = helper.make_graph(
        [*_attention_nodes("h", "k", "v", "o"), helper.make_node("Identity", ["go"], ["again"])],
        "body",
        [_value("i", [], TensorProto.INT64), _value("go", [], TensorProto.BOOL), _value("h", HEADS)],
        [_value("again", [], TensorProto.BOOL), _value("o", HEADS)],
    )
    loop = helper.make_node("Loop", ["n", "yes", "q"], ["y"], body=body, name="loop")
    model = _model(
        [loop],
        [_value(n, HEADS) for n in "qkv"],
        [_value("y", HEADS)],
        [numpy_helper.from_array(np.array(3), "n"), numpy_helper.from_array(np.array(True), "yes")],
    )
    result = check(model, _feeds("q", "k", "v"))
    (site,) = sites(result, "attention")
    # What a body's input is called says nothing about its size: it may be another one each time round.
    assert site.status == "skipped" and "not known to be equal" in site.reason
    assert site.graph == "loop"


def test_loop_body_with_known_sizes() -> None:
    known = [2, N, 5, D]
    body = helper.make_graph(
        [*_attention_nodes("h", "k", "v", "o"), helper.make_node("Identity", ["go"], ["again"])],
        "body",
        [_value("i", [], TensorProto.INT64), _value("go", [], TensorProto.BOOL), _value("h", known)],
        [_value("again", [], TensorProto.BOOL), _value("o", known)],
    )
    loop = helper.make_node("Loop", ["n", "yes", "q"], ["y"], body=body, name="loop")
    model = _model(
        [loop],
        [_value(n, known) for n in "qkv"],
        [_value("y", known)],
        [numpy_helper.from_array(np.array(3), "n"), numpy_helper.from_array(np.array(True), "yes")],
    )
    result = check(model, _feeds("q", "k", "v"))
    assert [(s.status, s.graph) for s in sites(result, "attention")] == [("fused", "loop")]


def test_scan_body() -> None:
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["row", "w"], ["h"], name="linear"),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("Identity", ["s"], ["s2"]),
        ],
        "body",
        [_value("s", [1]), _value("row", [3, 4])],
        [_value("s2", [1]), _value("r", [3, 5])],
    )
    scan = helper.make_node("Scan", ["s0", "x"], ["s1", "y"], body=body, num_scan_inputs=1, name="scan")
    w = numpy_helper.from_array(RNG.standard_normal((4, 5)).astype(F), "w")
    model = _model(
        [scan], [_value("s0", [1]), _value("x", [6, 3, 4])], [_value("s1", [1]), _value("y", [6, 3, 5])], [w]
    )
    result = check(model, {"s0": np.zeros(1, F), "x": RNG.standard_normal((6, 3, 4)).astype(F)})
    assert [(s.kind, s.status, s.graph) for s in result.report.sites] == [("linear", "fused", "scan")]


# -- functions


def test_function_with_an_axis_of_its_own() -> None:
    """The axis is given at each call; the fused node refers to it as the original did."""
    node = helper.make_node("Softmax", ["a"], ["b"], name="inner")
    axis = onnx.AttributeProto(name="axis", ref_attr_name="axis", type=onnx.AttributeProto.INT)
    node.attribute.append(axis)
    function = helper.make_function(
        "local", "Normalise", ["a"], ["b"], [node], [helper.make_opsetid("", 17)], attributes=["axis"]
    )
    calls = [
        helper.make_node("Normalise", ["x"], ["m"], domain="local", axis=1),
        helper.make_node("Normalise", ["m"], ["y"], domain="local", axis=3),
    ]
    info = [_value("m", HEADS)]
    model = _model(calls, [_value("x", HEADS)], [_value("y", HEADS)], functions=[function])
    model.graph.value_info.extend(info)
    result = check(model, _feeds("x"))
    assert [(s.status, s.graph) for s in sites(result, "softmax")] == [("fused", "local::Normalise")]
    (inner,) = result.model.functions[0].node
    assert inner.op_type == "FusedSoftmax"
    assert [a.ref_attr_name for a in inner.attribute if a.name == "axis"] == ["axis"]
    assert {o.domain for o in result.model.functions[0].opset_import} == {"", "ortplugins"}


def test_nested_functions() -> None:
    inner = helper.make_function(
        "local", "Attend", ["q", "k", "v"], ["o"], _attention_nodes("q", "k", "v", "o"), [helper.make_opsetid("", 17)]
    )
    outer = helper.make_function(
        "local",
        "Twice",
        ["a"],
        ["c"],
        [helper.make_node("Attend", ["a", "a", "a"], ["b"], domain="local"), helper.make_node("Relu", ["b"], ["c"])],
        [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)],
    )
    model = _model(
        [helper.make_node("Twice", ["x"], ["y"], domain="local")],
        [_value("x", HEADS)],
        [_value("y", HEADS)],
        functions=[outer, inner],
    )
    result = check(model, _feeds("x"))
    (site,) = sites(result, "attention")
    assert site.status == "skipped" and "called by another, Twice" in site.reason


def test_function_whose_result_is_used() -> None:
    """The type of the call's result is written down, since nothing can infer it any more."""
    function = helper.make_function(
        "local", "Attend", ["q", "k", "v"], ["o"], _attention_nodes("q", "k", "v", "o"), [helper.make_opsetid("", 17)]
    )
    calls = [
        helper.make_node("Attend", ["x", "x", "x"], ["h"], domain="local"),
        helper.make_node("Attend", ["h", "x", "h"], ["i"], domain="local"),
        helper.make_node("Relu", ["i"], ["y"]),
    ]
    model = _model(calls, [_value("x", HEADS)], [_value("y", HEADS)], functions=[function])
    model.graph.value_info.append(_value("h", HEADS))
    result = check(model, _feeds("x"))
    (site,) = sites(result, "attention")
    assert (site.status, site.graph) == ("fused", "local::Attend")
    assert "i" in {v.name for v in result.model.graph.value_info}


def test_function_called_with_two_types_is_refused() -> None:
    function = helper.make_function(
        "local",
        "Normalise",
        ["a"],
        ["b"],
        [helper.make_node("Softmax", ["a"], ["b"], axis=-1)],
        [helper.make_opsetid("", 17)],
    )
    calls = [
        helper.make_node("Normalise", ["x"], ["y"], domain="local"),
        helper.make_node("Normalise", ["h"], ["z"], domain="local"),
    ]
    model = _model(
        calls,
        [_value("x", HEADS), _value("h", HEADS, TensorProto.DOUBLE)],
        [_value("y", HEADS), _value("z", HEADS, TensorProto.DOUBLE)],
        functions=[function],
    )
    feeds = {**_feeds("x"), "h": _feeds("h")["h"].astype(np.float64)}
    (site,) = sites(check(model, feeds), "softmax")
    assert site.status == "skipped" and "element type" in site.reason


# -- order, names, notes, versions


def test_nodes_in_reverse_order() -> None:
    model = onnx.load(CORPUS / "bert.ts17.sdpa.fp32.onnx")
    expected = rewrite(model)
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    result = rewrite(model)
    onnx.checker.check_model(result.model, full_check=True)
    assert result.report.counts() == expected.report.counts()
    assert sorted(ops(result.model)) == sorted(ops(expected.model))


def test_bodies_in_reverse_order() -> None:
    other = helper.make_graph(_attention_nodes("x", "x", "x", "e")[::-1], "else", [], [_value("e", HEADS)])
    then = helper.make_graph([helper.make_node("Identity", ["x"], ["t"])], "then", [], [_value("t", HEADS)])
    node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other, name="branch")
    last = helper.make_node("Relu", ["y"], ["z"])
    model = _model([last, node], [_value("x", HEADS), _value("c", [], TensorProto.BOOL)], [_value("z", HEADS)])
    result = rewrite(model)
    onnx.checker.check_model(result.model, full_check=True)
    assert [s.status for s in sites(result, "attention")] == ["fused"]


def _annotated(with_a_site: bool) -> onnx.ModelProto:
    g = Graph()
    x = g.input("x", F, ["batch", 4])
    h = g.add("Relu", x, name="first")
    g.output(g.add("Softmax", h, axis=-1, name="second") if with_a_site else g.add("Sigmoid", h, name="second"))
    model = g.model()
    model.producer_name, model.producer_version, model.domain, model.model_version, model.doc_string = (
        "maker",
        "1.2",
        "org.example",
        7,
        "about",
    )
    model.graph.doc_string = "graph"
    model.metadata_props.add(key="model", value="a")
    model.graph.metadata_props.add(key="graph", value="b")
    for node in model.graph.node:
        node.metadata_props.add(key="scope", value=node.name)
        node.doc_string = f"doc of {node.name}"
    model.graph.input[0].metadata_props.add(key="value", value="c")
    info = _value(h, ["batch", 4])
    info.metadata_props.add(key="value", value="d")
    info.doc_string = "middle"
    model.graph.value_info.append(info)
    return model


def _plain(message: Message) -> object:
    """A protobuf as data, in which an empty string is as good as none."""

    def strip(x: object) -> object:
        if isinstance(x, dict):
            return {k: strip(v) for k, v in x.items() if v not in ("", [], {})}
        return [strip(v) for v in x] if isinstance(x, list) else x

    return strip(MessageToDict(message))


def test_notes_are_kept_when_nothing_is_replaced() -> None:
    model = _annotated(with_a_site=False)
    assert _plain(rewrite(model).model) == _plain(model)


def test_notes_are_kept_around_a_replacement() -> None:
    model = _annotated(with_a_site=True)
    result = rewrite(model).model
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string", "ir_version"):
        assert getattr(result, name) == getattr(model, name)
    assert list(result.metadata_props) == list(model.metadata_props)
    assert result.graph.doc_string == "graph" and list(result.graph.metadata_props) == list(model.graph.metadata_props)
    assert result.graph.input[0] == model.graph.input[0]
    assert result.graph.value_info[0] == model.graph.value_info[0]
    first, second = result.graph.node
    assert _plain(first) == _plain(model.graph.node[0])
    assert (second.name, second.doc_string, list(second.metadata_props)) == (
        "second",
        "doc of second",
        list(model.graph.node[1].metadata_props),
    )


def test_versions_are_not_raised() -> None:
    model = onnx.load(CORPUS / "bert.ts14.eager.fp32.onnx")
    result = rewrite(model).model
    assert result.ir_version == model.ir_version == 7
    assert {o.domain: o.version for o in result.opset_import} == {"": 14, "ortplugins": 1}


def test_names_do_not_clash() -> None:
    """A model that already uses the names that a rewriter might think of."""
    g = Graph()
    x = g.input("x", F, ["batch", N, "seq", D])
    taken = g.add("Relu", x, name="softmax/Constant")
    kt = g.add("Transpose", taken, perm=[0, 1, 3, 2])
    p = g.add(
        "Softmax",
        g.add("Where", g.input("m", bool, ["batch", 1, 1, "seq"]), np.float32(np.finfo(F).min), g.add("MatMul", x, kt)),
        axis=-1,
        name="softmax",
    )
    g.output(g.add("MatMul", p, x))
    result = check(g.model(), {**_feeds("x"), "m": np.zeros((2, 1, 1, 5), bool)})
    names = [n.name for n in result.model.graph.node] + [o for n in result.model.graph.node for o in n.output]
    assert len(names) == len(set(names))


def test_report_is_plain_data() -> None:
    report = rewrite(CORPUS / "torch_mha.dyn18.eager.fp32.onnx").report
    document = json.loads(report.to_json())
    assert document == report.to_dict()
    assert set(document["sites"][0]) >= {"kind", "nodes", "status", "op", "reason"}
    kinds = {s["kind"]: s for s in document["sites"]}
    assert kinds["attention"]["status"] == "skipped" and kinds["attention"]["fault"] == "node_softmax"


# -- files


def _external(folder: Path, location: str = "weights.bin") -> Path:
    g = Graph()
    x = g.input("x", F, ["batch", "rows", 64])
    y = g.add("Add", g.add("MatMul", x, g.weight(64, 128)), g.weight(128))
    y = g.add("Relu", y)
    g.output(g.add("Softmax", g.add("MatMul", y, g.weight(128, 32)), axis=-1))
    path = folder / "model.onnx"
    onnx.save_model(
        g.model(), path, save_as_external_data=True, location=location, size_threshold=64, convert_attribute=False
    )
    return path


def _outputs(path: Path, feeds: dict[str, np.ndarray], ours: bool) -> list[np.ndarray]:
    return session(path, ours).run(None, feeds)


def test_external_weights_move_with_the_model(tmp_path: Path) -> None:
    """Several tensors share one file; the new model needs only its own folder."""
    (tmp_path / "a").mkdir()
    source = _external(tmp_path / "a")
    feeds = {"x": RNG.standard_normal((2, 3, 64)).astype(F)}
    expected = _outputs(source, feeds, ours=False)
    result = rewrite(source, output=tmp_path / "b" / "fused.onnx")
    in_memory = session(result.model, ours=True).run(None, feeds)
    shutil.rmtree(tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["fused.onnx", "fused.onnx.data"]
    for values in (_outputs(result.path, feeds, ours=True), in_memory):
        for actual, wanted in zip(values, expected, strict=True):
            error = relative_error(actual, wanted)
            assert error <= 2e-5


def test_output_in_place_of_the_input(tmp_path: Path) -> None:
    source = _external(tmp_path, location="model.onnx.data")
    feeds = {"x": RNG.standard_normal((2, 3, 64)).astype(F)}
    expected = _outputs(source, feeds, ours=False)
    result = rewrite(source, output=source)
    assert {s.status for s in result.report.sites} == {"fused"}
    for actual, wanted in zip(_outputs(source, feeds, ours=True), expected, strict=True):
        error = relative_error(actual, wanted)
        assert error <= 2e-5


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.onnx"
    target.write_bytes(b"old")

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnx_ir.save", fail)
    with pytest.raises(OSError, match="No space"):
        rewrite(CORPUS / "swin.dyn18.eager.fp32.onnx", output=target)
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]


def test_missing_file() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.onnx"):
        rewrite("nowhere.onnx")


def test_small_models_stay_one_file(tmp_path: Path) -> None:
    name = "vit.ts14.eager.fp32.onnx"
    result = rewrite(CORPUS / name, output=tmp_path / "vit.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["vit.onnx"]
    assert onnx.load(result.path) == result.model
    entry = corpus()[name]
    feeds = corpus_inputs(entry, entry["dims"]["size_a"])
    for actual, wanted in zip(_outputs(result.path, feeds, True), stock(onnx.load(CORPUS / name))(feeds), strict=True):
        error = relative_error(actual, wanted)
        assert error <= 2e-5


def test_weights_above_two_gigabytes_are_streamed(tmp_path: Path) -> None:
    """A 24 000 x 24 000 weight outside the model: rewritten with a small part of it in memory at a time."""
    rows, tail = 24_000, np.arange(24_000, dtype=F)
    size = rows * rows * 4
    if shutil.disk_usage(tmp_path).free < 3 * size:
        pytest.skip("needs 7 GB of disk")
    with open(tmp_path / "w.bin", "wb") as file:
        file.truncate(size)  # zeros without blocks on disk, but for the last row
        file.seek(size - tail.nbytes)
        file.write(tail.tobytes())
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[rows, rows], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(size))):
        weight.external_data.add(key=key, value=value)
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1), helper.make_node("Relu", ["y"], ["z"])]
    onnx.save(
        _model(nodes, [_value("x", ["batch", rows])], [_value("z", ["batch", rows])], [weight]), tmp_path / "in.onnx"
    )
    script = (
        "import sys; from ortplugins.rewrite import rewrite; r = rewrite(sys.argv[1], output=sys.argv[2]).report; "
        "print(r.peak_memory, r.counts())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")]
    peak, counts = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(maxsplit=1)
    assert counts.strip() == "{'linear': {'fused': 1, 'skipped': 0}}"
    assert int(peak) <= size / 3
    onnx.checker.check_model(tmp_path / "out.onnx", full_check=True)
    (tensor,) = onnx.load(tmp_path / "out.onnx", load_external_data=False).graph.initializer
    place = {e.key: e.value for e in tensor.external_data}
    written = np.memmap(tmp_path / place["location"], F, "r", int(place.get("offset", 0)), (rows, rows))
    assert np.array_equal(written[-1], tail)
    assert not written[: -1 : rows // 10].any()


# -- time


def layers(count: int, width: int = 32, shapes: bool = False) -> onnx.ModelProto:
    """`count` blocks of 21 nodes; 49 if `shapes`, where every Reshape asks for the sizes, as TorchScript files do."""
    g = Graph()
    x = g.input("x", F, ["batch", "seq", width])
    heads, dim = 4, width // 4
    scale = g.const(F(0.3))
    fixed: dict[tuple[int, ...], str] = {}

    def reshape(value: str, *last: int) -> str:
        if not shapes:
            if last not in fixed:
                fixed[last] = g.const([0, 0, *last])
            return g.add("Reshape", value, fixed[last])
        sizes = [g.add("Gather", g.add("Shape", value), np.int64(i), axis=0) for i in range(2)]
        parts = [g.add("Unsqueeze", s, np.array([0])) for s in sizes]
        return g.add("Reshape", value, g.add("Concat", *parts, np.array(last), axis=0))

    for _ in range(count):
        q, k, v = (
            g.add(
                "Transpose",
                reshape(g.add("Add", g.add("MatMul", x, g.weight(width, width)), g.weight(width)), heads, dim),
                perm=perm,
            )
            for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
        )
        p = g.add("Softmax", g.add("Mul", g.add("MatMul", q, k), scale), axis=-1)
        y = reshape(g.add("Transpose", g.add("MatMul", p, v), perm=[0, 2, 1, 3]), width)
        y = g.add("Add", g.add("MatMul", y, g.weight(width, width)), x)
        x = g.add("LayerNormalization", y, g.const(np.ones(width, F)), g.const(np.zeros(width, F)))
    g.output(x, F, ["batch", "seq", width])
    return g.model()


@pytest.mark.parametrize(("shapes", "nodes"), [(False, 21), (True, 49)])
def test_time_grows_with_the_number_of_nodes(shapes: bool, nodes: int) -> None:
    """Up to 20,000 nodes: ten times the nodes take at most 30 times the processor time of this busy or idle machine,
    where a square takes 100 times."""
    large = -(-20_000 // nodes // 10) * 10
    seconds = []
    for count in (large // 10, large):
        model = layers(count, shapes=shapes)
        start = time.process_time()
        report = rewrite(model).report
        seconds.append(time.process_time() - start)
        assert report.nodes_before == count * nodes
        assert report.counts()["attention"] == {"fused": count, "skipped": 0}
        assert report.counts()["linear"] == {"fused": 4 * count, "skipped": 0}
        assert report.nodes_after == 6 * count, "the sizes that were asked for are gone"
    assert seconds[1] <= 30 * seconds[0]
