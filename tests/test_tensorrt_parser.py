"""TensorRT's ONNX parser takes our nodes for our plugins.

The parser used is that of ``tensorrt_rtx``, which is small, needs no GPU and chooses importers as TensorRT's does. That
runtime has no plugin layers: it ends the process as soon as a plugin was made for it. So every model is parsed in a
process of its own, and its verbose log, which names the importer of each node, is read.
"""

from __future__ import annotations

import functools
import json
import pathlib

import onnx
import pytest
from onnx import TensorProto, helper
from tensorrt_support import ROOT, installed, library_path, run_child
from test_tensorrt_host import CASES, Case

from ortplugins import ops, rewrite

PARSERS = installed("tensorrt_rtx")
pytestmark = pytest.mark.skipif(
    not PARSERS, reason="no tensorrt_rtx: pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings"
)

CORPUS = sorted((ROOT / "models/corpus").glob("*.onnx"))
OP_NAMES = {op.name for op in ops.OPS}

# One process loads TensorRT and forks for each model.
CHILD = """
import importlib, json, os, sys
trt = importlib.import_module(sys.argv[1])
if sys.argv[2]:
    assert trt.get_plugin_registry().load_library(sys.argv[2]) is not None
logs = []
for path in sys.argv[4:]:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        log = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        logger = trt.Logger(trt.Logger.VERBOSE)
        builder = trt.Builder(logger)
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, logger)
        parser.parse_from_file(path)
        os._exit(0)
    os.waitpid(pid, 0)
    logs.append(open(sys.argv[3], errors="replace").read())
print(json.dumps(logs))
"""


def parse(tmp_path: pathlib.Path, *models: onnx.ModelProto | pathlib.Path, library: str | None = None) -> list[str]:
    """The parser's log of each model."""
    paths = []
    for i, model in enumerate(models):
        if isinstance(model, onnx.ModelProto):
            path = tmp_path / f"{i}.onnx"
            onnx.save(model, path)
            paths.append(str(path))
        else:
            paths.append(str(model))
    done = run_child(CHILD, PARSERS[0], library_path() if library is None else library, str(tmp_path / "log"), *paths)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_plugin(log: str, op: str) -> None:
    assert f"Found registered plugin: {op}. Importing this node as a plugin." in log, log
    assert f"Successfully created plugin: {op}" in log, log
    assert "[E]" not in log, log


def onnx_type(name: str) -> int:
    return ops.ONNX_TYPE_CODES[name]


def model_of(case: Case, dtype: str, *, plugin_attributes: bool = True) -> onnx.ModelProto:
    """A model with the node of ``case``, as the rewriter writes it."""
    graph_inputs, names = [], []
    for tensor, given in zip(ops.find(case.op).inputs, case.inputs):
        names.append("" if given is None else tensor.name)
        if given is not None:
            kind = dtype if given[0] == "T" else given[0]
            shape = [s.replace("+", "_plus_") if isinstance(s, str) else s for s in given[1]]
            graph_inputs.append(helper.make_tensor_value_info(tensor.name, onnx_type(kind), shape))
    outputs = [t.name for t in ops.find(case.op).outputs][: case.outputs]
    attrs = dict(case.attrs)
    if plugin_attributes:
        attrs |= {"plugin_version": str(ops.OPSET_VERSION), "plugin_namespace": ops.DOMAIN}
    if case.outputs > 1:
        attrs["plugin_outputs"] = case.outputs
    node = helper.make_node(case.op, names, outputs, name="node", domain=ops.DOMAIN, **attrs)
    graph = helper.make_graph(
        [node], "graph", graph_inputs, [helper.make_tensor_value_info(o, onnx_type(dtype), None) for o in outputs]
    )
    return helper.make_model(
        graph,
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(ops.DOMAIN, ops.OPSET_VERSION)],
    )


@pytest.mark.parametrize("dtype", ops.FLOAT_TYPES)
def test_every_kind_of_node_becomes_our_plugin(tmp_path: pathlib.Path, dtype: str):
    logs = parse(tmp_path, *(model_of(case, dtype) for case in CASES))
    for case, log in zip(CASES, logs):
        assert_plugin(log, case.op)


def test_without_plugin_attributes_the_domain_is_the_namespace(tmp_path: pathlib.Path):
    cases = [next(c for c in CASES if c.op == op.name) for op in ops.OPS]
    for case, log in zip(cases, parse(tmp_path, *(model_of(c, "float32", plugin_attributes=False) for c in cases))):
        assert f"Successfully created plugin: {case.op}" in log
        assert "domain namespace" in log


def test_without_the_library_the_parser_says_what_is_missing(tmp_path: pathlib.Path):
    [log] = parse(tmp_path, model_of(CASES[0], "float32"), library="")
    assert "Plugin not found, are the plugin name, version, and namespace correct?" in log
    assert "Successfully created plugin" not in log


def test_bad_attribute_is_the_parser_s_error(tmp_path: pathlib.Path):
    model = model_of(CASES[0], "float32")
    model.graph.node[0].attribute.append(helper.make_attribute("log", 7))
    [log] = parse(tmp_path, model)
    assert "[ortplugins] FusedSoftmax node 'node': attribute log: 7 is not in [0, 1]" in log
    assert "Could not create the plugin" in log


# --- Rewritten models -----------------------------------------------------------------------------------------------


def nodes_of(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Nodes of our domain, those in branches and loops included."""
    found = []
    for node in graph.node:
        if node.domain == ops.DOMAIN:
            found.append(node)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += nodes_of(attribute.g)
    return found


def signature(node: onnx.NodeProto) -> tuple[object, ...]:
    return (
        node.op_type,
        tuple(bool(i) for i in node.input),
        len(node.output),
        tuple(sorted(a.name for a in node.attribute)),
    )


def alone(node: onnx.NodeProto, rank: int) -> onnx.ModelProto:
    """A model with nothing but ``node``, with inputs of ``rank``; the parser looks no deeper."""
    spec = ops.find(node.op_type)
    graph_inputs: dict[str, onnx.ValueInfoProto] = {}
    for tensor, name in zip(spec.inputs, node.input):
        if name:
            kind = TensorProto.FLOAT if tensor.dtypes[0] == "T" else onnx_type(tensor.dtypes[0])
            graph_inputs.setdefault(
                name, helper.make_tensor_value_info(name, kind, [None] * (1 if kind == TensorProto.INT64 else rank))
            )
    outputs = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in node.output]
    graph = helper.make_graph([node], "graph", list(graph_inputs.values()), outputs)
    return helper.make_model(
        graph,
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(ops.DOMAIN, ops.OPSET_VERSION)],
    )


@functools.cache
def rewritten(path: pathlib.Path) -> onnx.ModelProto:
    return rewrite(onnx.load(path)).model


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.stem)
def test_rewritten_model_reaches_our_plugin(tmp_path: pathlib.Path, path: pathlib.Path):
    model = rewritten(path)
    ours = nodes_of(model.graph)
    if not ours:
        pytest.skip("the rewriter replaces nothing in this model")
    for node in ours:
        texts = {a.name: a.s.decode() for a in node.attribute if a.type == onnx.AttributeProto.STRING}
        assert texts["plugin_version"] == str(ops.OPSET_VERSION) and texts["plugin_namespace"] == ops.DOMAIN
        assert node.op_type in OP_NAMES
    [log] = parse(tmp_path, model)
    first = next(
        n
        for n in model.graph.node
        if n.domain == ops.DOMAIN or any(nodes_of(a.g) for a in n.attribute if a.type == onnx.AttributeProto.GRAPH)
    )
    if first.domain == ops.DOMAIN:
        assert_plugin(log, first.op_type)


@pytest.mark.skipif(not CORPUS, reason="there is no models/corpus")
def test_every_kind_of_node_that_the_rewriter_writes(tmp_path: pathlib.Path):
    kinds = {signature(node): node for path in CORPUS for node in nodes_of(rewritten(path).graph)}
    assert kinds and {s[0] for s in kinds} <= OP_NAMES
    logs = parse(tmp_path, *(alone(node, 4) for node in kinds.values()))
    for (op, *_), log in zip(kinds, logs):
        assert_plugin(log, str(op))
