"""What the rewriter's tests share: small graphs, the corpus and its inputs, running and comparing."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from reference_ops import OPERATORS

from ortplugins.rewrite import RewriteResult, Site, rewrite

CORPUS = Path(__file__).parents[1] / "models" / "corpus"

TYPES = {
    np.dtype("float32"): 1,
    np.dtype("int64"): 7,
    np.dtype("bool"): 9,
    np.dtype("float16"): 10,
    np.dtype("float64"): 11,
    np.dtype("int32"): 6,
}


class Graph:
    """A model under construction. Values are names; an array becomes an initializer.

    >>> g = Graph(opset=17)
    >>> x = g.input("x", np.float32, ["batch", "seq", 32])
    >>> g.output(g.add("Softmax", x, axis=-1))
    """

    def __init__(self, opset: int = 17, ir_version: int = 8) -> None:
        self.opset, self.ir_version = opset, ir_version
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.domains: list[str] = []
        self._count = 0

    def input(self, name: str, dtype: Any, shape: Sequence[int | str | None] | None) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, TYPES[np.dtype(dtype)], shape))
        return name

    def const(self, array: Any, dtype: Any = None, name: str | None = None) -> str:
        self._count += 1
        name = name or f"c{self._count}"
        self.initializers.append(
            numpy_helper.from_array(np.ascontiguousarray(np.array(array, dtype)).reshape(np.shape(array)), name)
        )
        return name

    def weight(self, *shape: int, scale: float = 0.3, seed: int | None = None) -> str:
        rng = np.random.default_rng(self._count if seed is None else seed)
        return self.const((rng.standard_normal(shape) * scale).astype(np.float32))

    def add(
        self, op: str, *inputs: Any, outputs: int = 1, name: str | None = None, domain: str = "", **attrs: Any
    ) -> Any:
        """Adds a node; returns the name of its output, or the names."""
        self._count += 1
        names = [f"v{self._count}_{i}" if outputs > 1 else f"v{self._count}" for i in range(outputs)]
        values = ["" if i is None else i if isinstance(i, str) else self.const(i) for i in inputs]
        self.nodes.append(
            helper.make_node(op, values, names, name=name or f"{op}_{self._count}", domain=domain, **attrs)
        )
        return names[0] if outputs == 1 else names

    def output(self, value: str, dtype: Any = np.float32, shape: Sequence[Any] | None = None) -> None:
        self.outputs.append(helper.make_tensor_value_info(value, TYPES[np.dtype(dtype)], shape))

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "graph", self.inputs, self.outputs, self.initializers)
        imports = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(d, 1) for d in self.domains)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=self.ir_version, functions=self.functions)
        inferred = {o.name: o for o in onnx.shape_inference.infer_shapes(model).graph.output}
        for output in model.graph.output:
            if not output.type.tensor_type.HasField("shape"):
                output.CopyFrom(inferred[output.name])
        return model

    # -- pieces of attention, as exporters write them

    def heads(self, x: str, heads: int, dim: int, perm: Sequence[int] = (0, 2, 1, 3)) -> str:
        """(batch, sequence, heads * dim) to the order of `perm`."""
        return self.add("Transpose", self.add("Reshape", x, np.array([0, 0, heads, dim])), perm=list(perm))

    def merge(self, x: str, width: int) -> str:
        return self.add("Reshape", self.add("Transpose", x, perm=[0, 2, 1, 3]), np.array([0, 0, width]))


def sites(result: RewriteResult, kind: str) -> list[Site]:
    return result.report.select(kind)


def ops(model: onnx.ModelProto) -> list[str]:
    """Op types of the graph, those of the package with their names alone."""
    return [n.op_type for n in model.graph.node]


def fused(model: onnx.ModelProto, op: str) -> list[dict[str, Any]]:
    """Attributes of every node of a fused operator, its inputs under ``inputs``."""
    out = []
    for node in model.graph.node:
        if node.op_type == op:
            attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            attrs = {k: v.decode() if isinstance(v, bytes) else v for k, v in attrs.items()}
            out.append({**attrs, "inputs": list(node.input), "outputs": list(node.output)})
    return out


def session(model: onnx.ModelProto | Path, ours: bool = False) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if ours:
        from ortplugins import get_library_path

        options.register_custom_ops_library(get_library_path())
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


Run = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]


def stock(model: onnx.ModelProto) -> Run:
    return functools.partial(session(model).run, None)


def ours(model: onnx.ModelProto) -> Run:
    return functools.partial(session(model, ours=True).run, None)


def in_numpy(model: onnx.ModelProto) -> Run:
    evaluator = ReferenceEvaluator(model, new_ops=OPERATORS)
    return lambda feeds: evaluator.run(None, dict(feeds))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest error over the largest value. NaN where NaN is not expected gives NaN, so that no bound accepts it."""
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(actual, expected) else float("nan")
    keep = ~np.isnan(expected)
    a, e = actual[keep].astype(np.float64), expected[keep].astype(np.float64)
    infinite = np.isinf(e)
    assert np.array_equal(a[infinite], e[infinite])
    a, e = a[~infinite], e[~infinite]
    if not e.size:
        return 0.0
    return float(np.max(np.abs(a - e)) / max(float(np.max(np.abs(e))), 1e-30))


def check(
    model: onnx.ModelProto, *feeds: Mapping[str, np.ndarray], bound: float = 2e-5, infer: bool = True, **options: Any
) -> RewriteResult:
    """Rewrites, checks the result with the ONNX checker, compares it with the original on the feeds, and rewrites it
    again.

    `infer` False leaves out the checker's shape inference.
    """
    before = model.SerializeToString()
    result = rewrite(model, **options)
    assert model.SerializeToString() == before, "the source was changed"
    if all(
        v.type.tensor_type.HasField("shape") for v in (*model.graph.input, *model.graph.output)
    ):  # else the checker refuses both
        onnx.checker.check_model(result.model, full_check=infer)
    run, run_ours = stock(model), ours(result.model)
    for feed in feeds:
        for actual, expected in zip(run_ours(feed), run(feed), strict=True):
            error = relative_error(actual, expected)
            assert error <= bound, f"relative error {error:.2e}"
    again = rewrite(result.model)
    assert not again.report.select(status="fused"), "rewriting the result changes it"
    assert again.model.SerializeToString() == result.model.SerializeToString()
    return result


def refused(model: onnx.ModelProto, kind: str, reason: str, *feeds: Mapping[str, np.ndarray]) -> Site:
    """The only site of this kind is skipped, for a reason that contains `reason`, and the outputs stay the same."""
    result = check(model, *feeds)
    (site,) = sites(result, kind)
    assert site.status == "skipped", site
    assert reason in (site.reason or ""), site.reason
    return site


# -- the corpus


@functools.cache
def corpus() -> dict[str, dict[str, Any]]:
    index = json.loads((CORPUS / "index.json").read_text())
    return {entry["file"]: entry for entry in index["files"]}


def _size(entry: int | str, dims: Mapping[str, int]) -> int:
    if isinstance(entry, int):
        return entry
    return sum(int(part) if part.isdigit() else dims[part] for part in entry.split("+"))


def corpus_inputs(
    entry: Mapping[str, Any], dims: Mapping[str, int], fully_masked: bool = False, seed: int = 1234
) -> dict[str, np.ndarray]:
    """Inputs of a corpus file as its index describes them."""
    rng = np.random.Generator(np.random.PCG64(seed))
    feeds: dict[str, np.ndarray] = {}
    for item in entry["inputs"]:
        shape = [_size(s, dims) for s in item["shape"]]
        kind = item["kind"]
        if kind == "token_ids":
            array = rng.integers(item.get("low", 0), item["high"], size=shape)
        elif kind == "normal":
            array = rng.standard_normal(size=shape) * item.get("std", 1)
        elif kind == "timestep":
            array = rng.integers(0, 1000, size=shape)
        elif kind == "ones":
            array = np.ones(shape)
        elif kind == "arange":
            start = item.get("start")
            array = np.broadcast_to(np.arange(shape[-1]) + (dims[start] if start else 0), shape)
        elif kind == "causal_additive":
            array = np.where(np.tril(np.ones(shape)), 0.0, -np.inf)
        else:
            length = shape[-1]
            rows = int(np.prod(shape[:-1]))
            keep = np.zeros((rows, length), bool)
            for row in range(rows):
                count = length if row == 0 else 1 + (5 * row + 2) % length
                keep[row, : 0 if fully_masked and row == 1 else count] = True
            if item.get("left"):
                keep = keep[:, ::-1]
            array = (~keep if kind == "pad_bool" else keep).reshape(shape)
        feeds[item["name"]] = np.ascontiguousarray(array).astype(item["dtype"])
    return feeds
