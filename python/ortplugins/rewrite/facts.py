"""What is known of the values of a graph before anything runs: element type, symbolic shape, contents of small tensors.

TorchScript files carry no shapes at all and dynamo files only some, and a rule that moves a head axis must know that
the ``Reshape`` in front of it, whose target is computed at run time, splits exactly heads from the last axis. So shapes
are inferred here symbolically, together with the contents of the small integer and float tensors that shape arithmetic
works on. Nothing is assumed: what cannot be derived is unknown, and a rule that needs it refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir

from .symbolic import Dim, Size, exact_div, product

Shape = tuple[Size, ...]

_DATA_LIMIT = 64  # elements; shape arithmetic is on tensors of the rank's size

_NUMPY_FLOAT = {
    ir.DataType.FLOAT: np.float32,
    ir.DataType.DOUBLE: np.float64,
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.BFLOAT16: ml_dtypes.bfloat16,
}
_INTEGERS = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.INT16, ir.DataType.INT8, ir.DataType.UINT8})

STANDARD_DOMAINS = ("", "ai.onnx")


def op_of(node: ir.Node | None) -> str:
    """Op type of a node of the standard domain, ``domain::op`` of another, "" of none."""
    if node is None:
        return ""
    return node.op_type if node.domain in STANDARD_DOMAINS else f"{node.domain}::{node.op_type}"


def attr(node: ir.Node, name: str, default: object = None) -> object:
    """Value of an attribute; ``default`` when absent. A reference to a function's attribute is `REFERENCE`."""
    a = node.attributes.get(name)
    if a is None:
        return default
    return REFERENCE if a.is_ref() else a.value


class _Reference:
    def __repr__(self) -> str:
        return "<reference to a function attribute>"


REFERENCE = _Reference()


def tensor_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The constant behind a value: an initialiser that no caller can override, or the output of Constant.

    Also behind Identity: PyTorch's exporter writes equal initialisers, such as the biases of an untrained model, once.
    """
    if value is None:
        return None
    while value.const_value is None and op_of(value.producer()) == "Identity":
        value = value.producer().inputs[0]
    if value.const_value is not None:
        return None if value.is_graph_input() else value.const_value
    node = value.producer()
    if op_of(node) != "Constant":
        return None
    (a,) = node.attributes.values()
    if a.is_ref():
        return None
    if a.type == ir.AttributeType.TENSOR:
        return a.value
    if a.name in ("value_int", "value_ints"):
        return ir.tensor(np.array(a.value, np.int64))
    if a.name in ("value_float", "value_floats"):
        return ir.tensor(np.array(a.value, np.float32))
    return None


def broadcast_dim(a: Size, b: Size) -> Size:
    """Size of a broadcast axis, given that the graph is valid."""
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if isinstance(a, int):
        return a
    if isinstance(b, int):
        return b
    # A minimum never exceeds its arguments, so with one of them it can only be equal, or 1.
    if _minimum_of(a, b):
        return b
    if _minimum_of(b, a):
        return a
    first, second = sorted((str(a), str(b)))
    return Dim.symbol(f"broadcast({first},{second})")


def _minimum_of(a: Size, b: Size) -> bool:
    text = str(a)
    return text.startswith("min(") and text.endswith(")") and str(b) in text[4:-1].split(",")


def _minimum(a: Size, b: Size) -> Size:
    if a == b:
        return a
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    first, second = sorted((str(a), str(b)))
    return Dim.symbol(f"min({first},{second})")


def broadcast(*shapes: Shape | None) -> Shape | None:
    if any(s is None for s in shapes):
        return None
    rank = max(map(len, shapes))
    out: list[Size] = [1] * rank
    for s in shapes:
        for i, d in enumerate(s, rank - len(s)):
            out[i] = broadcast_dim(out[i], d)
    return tuple(out)


class Facts:
    """Types, shapes and small contents of the values of one graph or function, subgraphs included."""

    def __init__(self, root: ir.Graph | ir.Function) -> None:
        opsets = root.opset_imports
        self.opset = opsets.get("", opsets.get("ai.onnx", 1))
        self._root = root
        self.size_sources: dict[str, tuple[ir.Value, int]] = {}
        """For each symbol that is a size of an input of the graph: the input, and the axis."""
        self._shapes: dict[ir.Value, Shape | None] = {}
        self._dtypes: dict[ir.Value, ir.DataType | None] = {}
        self._data: dict[ir.Value, np.ndarray | None] = {}

    # -- reading

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Symbolic shape; None when not even the rank is known."""
        if value is None:
            return None
        if value not in self._shapes:
            self._enter(value)
        return self._shapes[value]

    def rank(self, value: ir.Value | None) -> int | None:
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        if value is None:
            return None
        if value not in self._dtypes:
            self._enter(value)
        return self._dtypes[value]

    def data(self, value: ir.Value | None) -> np.ndarray | None:
        """Contents of a small tensor as an object array of int, `Dim`, bool or NumPy float scalars; None if unknown."""
        if value is None:
            return None
        if value not in self._data:
            self._data[value] = self._constant_data(value)
        return self._data[value]

    def ints(self, value: ir.Value | None) -> list[Size] | None:
        """Contents of a tensor of integers, flattened; entries may be symbolic."""
        data = self.data(value)
        return None if data is None or data.dtype != object else list(data.reshape(-1))

    def scalar(self, value: ir.Value | None) -> float | None:
        """The number that every element of the tensor has, where it is known and the same for all."""
        data = self.data(value)
        if data is None or data.size == 0:
            tensor = tensor_of(value)
            if tensor is None or tensor.size == 0 or self.dtype(value) not in _NUMPY_FLOAT:
                return None
            data = tensor.numpy().reshape(-1)
            if not (data == data[0]).all():
                return None
        flat = data.reshape(-1)
        first = flat[0]
        if isinstance(first, Dim) or not all(x == first for x in flat[1:]):
            return None
        return float(first)

    def constant(self, value: ir.Value | None) -> ir.TensorProtocol | None:
        return tensor_of(value)

    # -- entering

    def set(self, value: ir.Value, shape: Shape | None, dtype: ir.DataType | None) -> None:
        """Enters what is known of a value that a rule made."""
        self._shapes[value] = shape
        self._dtypes[value] = dtype

    def copy(self, old: ir.Value, new: ir.Value) -> None:
        self.set(new, self.shape(old), self.dtype(old))

    def _enter(self, value: ir.Value) -> None:
        self._dtypes.setdefault(value, value.dtype)
        self._shapes.setdefault(value, self._declared(value))

    def _declared(self, value: ir.Value) -> Shape | None:
        tensor = tensor_of(value)
        if tensor is not None:
            return tuple(int(d) for d in tensor.shape)
        if value.shape is None:
            return None
        return tuple(self._declared_dim(value, i, d) for i, d in enumerate(value.shape))

    def _declared_dim(self, value: ir.Value, axis: int, d: object) -> Size:
        if isinstance(d, int):
            return d
        name = d.value
        # A body's input may be another size each time round, whatever it is called.
        if name is None or (value.is_graph_input() and value.graph is not self._root):
            return Dim.symbol(f"{value.name}[{axis}]")
        return Dim.symbol(str(name))

    def _constant_data(self, value: ir.Value) -> np.ndarray | None:
        tensor = tensor_of(value)
        if tensor is None or tensor.size > _DATA_LIMIT or tensor.dtype == ir.DataType.STRING:
            return None
        array = tensor.numpy()
        if tensor.dtype in _NUMPY_FLOAT:
            out = np.empty(array.shape, object)
            out.reshape(-1)[:] = list(array.reshape(-1)) if out.size else []
            return out
        return array.astype(object)

    def assume(self, calls: Sequence[Sequence[tuple[Shape | None, ir.DataType | None]]]) -> None:
        """What all calls say about a function's inputs: a type that they agree on, sizes that are equal in each."""
        symbols: dict[tuple[Size, ...], Size] = {}
        for i, value in enumerate(self._root.inputs):
            given = [call[i] if i < len(call) else (None, None) for call in calls]
            dtypes = {dtype for _, dtype in given}
            shapes = [shape for shape, _ in given]
            shape = None
            if shapes and None not in shapes and len({len(s) for s in shapes}) == 1:
                shape = tuple(
                    symbols.setdefault(
                        sizes,
                        sizes[0]
                        if isinstance(sizes[0], int) and len(set(sizes)) == 1
                        else Dim.symbol(f"{value.name}[{axis}]"),
                    )
                    for axis, sizes in enumerate(zip(*shapes))
                )
            self.set(value, shape, dtypes.pop() if len(dtypes) == 1 else None)

    def learn(self) -> None:
        """Infers everything about the sorted graph and the graphs inside it, in one pass."""
        for value in self._root.inputs:
            for axis, d in enumerate(self.shape(value) or ()):
                if isinstance(d, Dim):
                    self.size_sources.setdefault(str(d), (value, axis))
        self._learn(self._root)

    def _learn(self, graph: ir.Graph | ir.Function) -> None:
        for node in graph:
            self.infer(node)

    # -- uses

    def is_size_read(self, node: ir.Node) -> bool:
        """The node asks for a shape that can be computed from the inputs of the graph."""
        if op_of(node) != "Shape":
            return False
        data = self._data.get(node.outputs[0])
        return data is not None and not node.outputs[0].is_graph_output() and all(self.is_derivable(d) for d in data)

    def is_question(self, node: ir.Node, value: ir.Value) -> bool:
        """The node only asks for the shape or the type of the value, and the answer is known without it."""
        if op_of(node) == "CastLike":
            return node.inputs[0] is not value and self.dtype(value) is not None
        return self.is_size_read(node)

    def is_derivable(self, size: Size) -> bool:
        """The size is a formula over the sizes of the graph's inputs."""
        return not isinstance(size, Dim) or all(s in self.size_sources for m, _ in size.terms for s in m)

    def readers(self, value: ir.Value) -> list[ir.Node]:
        """The nodes that need the elements of a value, in order, each once."""
        return [n for n in dict.fromkeys(u.node for u in value.uses()) if not self.is_question(n, value)]

    def only_reader(self, value: ir.Value) -> ir.Node | None:
        """The node that is the only one to need a value's elements, once; None if the value leaves the graph."""
        if value.is_graph_output():
            return None
        uses = [u for u in value.uses() if not self.is_question(u.node, value)]
        return uses[0].node if len(uses) == 1 else None

    def infer(self, node: ir.Node) -> None:
        for a in node.attributes.values():
            if a.is_ref():
                continue
            if a.type == ir.AttributeType.GRAPH:
                self._learn(a.value)
            elif a.type == ir.AttributeType.GRAPHS:
                for g in a.value:
                    self._learn(g)
        handler = _HANDLERS.get(op_of(node))
        shapes: Sequence[Shape | None] = ()
        dtypes: Sequence[ir.DataType | None] = ()
        data = None
        if handler is not None:
            result = handler(self, node)
            if isinstance(result, _Result):
                shapes, dtypes, data = result.shapes, result.dtypes, result.data
        for i, out in enumerate(node.outputs):
            shape = shapes[i] if i < len(shapes) else None
            dtype = dtypes[i] if i < len(dtypes) else None
            self._shapes[out] = self._merge(out, shape)
            self._dtypes[out] = dtype if dtype is not None else out.dtype
            if i == 0 and data is not None and data.size <= _DATA_LIMIT:
                self._data[out] = data

    def _merge(self, value: ir.Value, shape: Shape | None) -> Shape | None:
        """The inferred shape, with what the file declares where inference found nothing."""
        declared = self._declared(value) if value.shape is not None else None
        if shape is None:
            return declared
        if declared is None or len(declared) != len(shape):
            return shape
        return tuple(
            d if isinstance(d, int) and not isinstance(s, int) and _opaque(s) else s for s, d in zip(shape, declared)
        )


def _opaque(size: Size) -> bool:
    text = str(size)
    return "[" in text or "(" in text


class _Result:
    __slots__ = ("data", "dtypes", "shapes")

    def __init__(
        self, shapes: Sequence[Shape | None], dtypes: Sequence[ir.DataType | None], data: np.ndarray | None = None
    ) -> None:
        self.shapes, self.dtypes, self.data = shapes, dtypes, data


def _one(shape: Shape | None, dtype: ir.DataType | None, data: np.ndarray | None = None) -> _Result:
    if data is not None:
        shape = tuple(data.shape)
    return _Result((shape,), (dtype,), data)


def _unknown(node: ir.Node, axis: int) -> Dim:
    return Dim.symbol(f"{node.outputs[0].name}[{axis}]")


def _axes(facts: Facts, node: ir.Node, position: int) -> list[int] | None:
    """An ``axes`` list that is an attribute or an input, depending on the opset."""
    if "axes" in node.attributes:
        axes = attr(node, "axes")
        return None if axes is REFERENCE else [int(a) for a in axes]
    if len(node.inputs) > position and node.inputs[position] is not None:
        data = facts.ints(node.inputs[position])
        return None if data is None or any(isinstance(a, Dim) for a in data) else [int(a) for a in data]
    return []


Handler = Callable[[Facts, ir.Node], "_Result | None"]
_HANDLERS: dict[str, Handler] = {}


def _handles(*ops: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for op in ops:
            _HANDLERS[op] = handler
        return handler

    return register


def _input(node: ir.Node, i: int) -> ir.Value | None:
    return node.inputs[i] if i < len(node.inputs) else None


@_handles("Constant")
def _constant(facts: Facts, node: ir.Node) -> _Result | None:
    out = node.outputs[0]
    tensor = tensor_of(out)
    if tensor is None:
        return None
    return _Result((tuple(int(d) for d in tensor.shape),), (tensor.dtype,), facts.data(out))


@_handles(
    "Identity",
    "Relu",
    "Gelu",
    "Erf",
    "Tanh",
    "Sigmoid",
    "Softmax",
    "LogSoftmax",
    "Neg",
    "Abs",
    "Exp",
    "Log",
    "Sin",
    "Cos",
    "Clip",
    "Ceil",
    "Floor",
    "Round",
    "Sign",
    "Softplus",
    "LeakyRelu",
    "Elu",
    "HardSigmoid",
    "HardSwish",
    "Swish",
    "Trilu",
    "CumSum",
    "LayerNormalization",
    "RMSNormalization",
    "GroupNormalization",
    "InstanceNormalization",
    "BatchNormalization",
    "RotaryEmbedding",
    "LpNormalization",
    "Not",
    "BitwiseNot",
    "Dropout",
    "ScatterND",
    "ScatterElements",
    "ortplugins::FusedSoftmax",
    "com.microsoft::FastGelu",
    "com.microsoft::Gelu",
    "com.microsoft::QuickGelu",
    "com.microsoft::BiasGelu",
    "SimplifiedLayerNormalization",
    "com.microsoft::SimplifiedLayerNormalization",
    "com.microsoft::RotaryEmbedding",
)
def _same(facts: Facts, node: ir.Node) -> _Result:
    x = node.inputs[0]
    data = facts.data(x) if op_of(node) == "Identity" else None
    if op_of(node) == "Not" and facts.data(x) is not None:
        data = np.frompyfunc(lambda b: not b, 1, 1)(facts.data(x))
        data = np.asarray(data, object)
    return _one(facts.shape(x), facts.dtype(x), data)


@_handles("Reciprocal", "Sqrt")
def _unary_float(facts: Facts, node: ir.Node) -> _Result:
    x = node.inputs[0]
    data, dtype = facts.data(x), facts.dtype(x)
    if data is not None and dtype in _NUMPY_FLOAT and not any(isinstance(v, Dim) for v in data.reshape(-1)):
        kind = _NUMPY_FLOAT[dtype]
        with np.errstate(all="ignore"):
            computed = np.sqrt(data.astype(kind)) if op_of(node) == "Sqrt" else kind(1) / data.astype(kind)
        return _one(None, dtype, _objects(computed))
    return _one(facts.shape(x), dtype)


def _objects(array: np.ndarray) -> np.ndarray:
    out = np.empty(array.shape, object)
    out.reshape(-1)[:] = list(array.reshape(-1))
    return out


@_handles("IsNaN", "IsInf")
def _predicate(facts: Facts, node: ir.Node) -> _Result:
    return _one(facts.shape(node.inputs[0]), ir.DataType.BOOL)


@_handles("Cast", "CastLike")
def _cast(facts: Facts, node: ir.Node) -> _Result:
    x = node.inputs[0]
    if op_of(node) == "CastLike":
        to = facts.dtype(_input(node, 1))
    else:
        to = attr(node, "to")
        to = None if to is REFERENCE else ir.DataType(to)
    data = facts.data(x)
    if data is not None:
        flat = data.reshape(-1)
        symbolic = any(isinstance(v, Dim) for v in flat)
        if to in _NUMPY_FLOAT and not symbolic:
            data = _objects(data.astype(_NUMPY_FLOAT[to]))
        elif to in _INTEGERS and not symbolic:
            data = np.array([int(v) if math.isfinite(v) else 0 for v in flat], object).reshape(data.shape)
        elif to == ir.DataType.BOOL and not symbolic:
            data = np.array([bool(v) for v in flat], object).reshape(data.shape)
        elif to not in _INTEGERS:
            data = None
    return _one(facts.shape(x), to, data)


_BINARY = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
}


def _divide(a: object, b: object) -> object:
    if isinstance(a, (int, Dim)) and isinstance(b, (int, Dim)) and not isinstance(a, bool):
        if b == 0:
            return None
        if isinstance(a, int) and isinstance(b, int):
            return int(math.trunc(a / b)) if abs(a) < 2**52 else a // b
        exact = exact_div(a, b)
        return Dim.symbol(f"({a})//({b})") if exact is None else exact
    return a / b


def _modulo(a: object, b: object) -> object:
    """Mod of non-negative integers, where its two definitions agree."""
    whole = isinstance(a, int) and isinstance(b, int) and a >= 0 and b > 0
    return a % b if whole else None


def _smaller(a: object, b: object) -> object:
    return _minimum(a, b) if isinstance(a, Dim) or isinstance(b, Dim) else min(a, b)


def _larger(a: object, b: object) -> object:
    if a == b:
        return a
    if isinstance(a, Dim) or isinstance(b, Dim):
        return Dim.symbol("max({},{})".format(*sorted((str(a), str(b)))))
    return max(a, b)


@_handles(
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Pow",
    "Mod",
    "Min",
    "Max",
    "PRelu",
    "And",
    "Or",
    "Xor",
    "BitwiseAnd",
    "BitwiseOr",
    "Sum",
    "Mean",
)
def _elementwise(facts: Facts, node: ir.Node) -> _Result:
    inputs = list(node.inputs)
    op = op_of(node)
    dtype = next((d for d in map(facts.dtype, inputs) if d is not None), None)
    data = None
    if len(inputs) == 2:
        a, b = facts.data(inputs[0]), facts.data(inputs[1])
        function = {
            **_BINARY,
            "Div": _divide,
            "Min": _smaller,
            "Max": _larger,
            "Mod": _modulo,
            "And": lambda x, y: bool(x and y),
            "Or": lambda x, y: bool(x or y),
        }.get(op)
        if a is not None and b is not None and function is not None:
            with np.errstate(all="ignore"):
                try:
                    data = np.asarray(np.frompyfunc(function, 2, 1)(a, b), object)
                except (TypeError, ValueError, ZeroDivisionError):
                    data = None
            if data is not None and any(v is None for v in data.reshape(-1)):
                data = None
    return _one(broadcast(*map(facts.shape, inputs)), dtype, data)


def _compare(op: str, a: object, b: object) -> bool | None:
    if isinstance(a, Dim) or isinstance(b, Dim):
        difference = a - b
        if op == "Equal":
            if a == b:
                return True
            if isinstance(difference, Dim) and (difference.positive or (-1 * difference).positive):
                return False
        return None
    return {"Equal": a == b, "Less": a < b, "LessOrEqual": a <= b, "Greater": a > b, "GreaterOrEqual": a >= b}[op]


@_handles("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
def _comparison(facts: Facts, node: ir.Node) -> _Result:
    a, b = node.inputs
    data = None
    da, db = facts.data(a), facts.data(b)
    if da is not None and db is not None:
        data = np.asarray(np.frompyfunc(lambda x, y: _compare(node.op_type, x, y), 2, 1)(da, db), object)
        if any(v is None for v in data.reshape(-1)):
            data = None
    return _one(broadcast(facts.shape(a), facts.shape(b)), ir.DataType.BOOL, data)


@_handles("Where")
def _where(facts: Facts, node: ir.Node) -> _Result:
    c, x, y = node.inputs
    dc, dx, dy = facts.data(c), facts.data(x), facts.data(y)
    data = None
    if dc is not None and dx is not None and dy is not None:
        data = np.asarray(np.frompyfunc(lambda k, p, q: p if k else q, 3, 1)(dc, dx, dy), object)
    dtype = facts.dtype(x) if facts.dtype(x) is not None else facts.dtype(y)
    return _one(broadcast(facts.shape(c), facts.shape(x), facts.shape(y)), dtype, data)


@_handles("Shape")
def _shape(facts: Facts, node: ir.Node) -> _Result:
    shape = facts.shape(node.inputs[0])
    if shape is None:
        return _one((_unknown(node, 0),), ir.DataType.INT64)
    dims = shape[slice(attr(node, "start", 0), attr(node, "end", None))]
    return _one((len(dims),), ir.DataType.INT64, np.array(dims, object))


@_handles("Size")
def _size(facts: Facts, node: ir.Node) -> _Result:
    shape = facts.shape(node.inputs[0])
    if shape is None:
        return _one((), ir.DataType.INT64)
    data = np.empty((), object)
    data[()] = product(shape)
    return _one((), ir.DataType.INT64, data)


@_handles("Gather")
def _gather(facts: Facts, node: ir.Node) -> _Result:
    x, indices = node.inputs
    sx, si = facts.shape(x), facts.shape(indices)
    axis = attr(node, "axis", 0)
    data = None
    dx, di = facts.data(x), facts.data(indices)
    if (
        dx is not None
        and di is not None
        and axis is not REFERENCE
        and not any(isinstance(i, Dim) for i in di.reshape(-1))
    ):
        try:
            data = np.asarray(np.take(dx, di.astype(np.int64), axis=axis), object)
        except IndexError:
            data = None
    if sx is None or si is None or axis is REFERENCE:
        return _one(None, facts.dtype(x), data)
    axis %= len(sx)
    return _one(sx[:axis] + si + sx[axis + 1 :], facts.dtype(x), data)


@_handles("GatherElements")
def _gather_elements(facts: Facts, node: ir.Node) -> _Result:
    return _one(facts.shape(node.inputs[1]), facts.dtype(node.inputs[0]))


@_handles("GatherND")
def _gather_nd(facts: Facts, node: ir.Node) -> _Result:
    x, indices = node.inputs
    sx, si = facts.shape(x), facts.shape(indices)
    b = attr(node, "batch_dims", 0)
    if sx is None or si is None or not isinstance(si[-1], int):
        return _one(None, facts.dtype(x))
    return _one(si[:-1] + sx[b + si[-1] :], facts.dtype(x))


@_handles("Unsqueeze")
def _unsqueeze(facts: Facts, node: ir.Node) -> _Result:
    x = node.inputs[0]
    shape, axes = facts.shape(x), _axes(facts, node, 1)
    if shape is None or axes is None:
        return _one(None, facts.dtype(x))
    rank = len(shape) + len(axes)
    inserted = {a % rank for a in axes}
    rest = iter(shape)
    out = tuple(1 if i in inserted else next(rest) for i in range(rank))
    data = facts.data(x)
    return _one(out, facts.dtype(x), None if data is None else data.reshape(out))


@_handles("Squeeze")
def _squeeze(facts: Facts, node: ir.Node) -> _Result:
    x = node.inputs[0]
    shape, axes = facts.shape(x), _axes(facts, node, 1)
    if shape is None or axes is None:
        return _one(None, facts.dtype(x))
    if axes:
        dropped = {a % len(shape) for a in axes}
    elif all(isinstance(d, int) for d in shape):
        dropped = {i for i, d in enumerate(shape) if d == 1}
    else:
        return _one(None, facts.dtype(x))
    out = tuple(d for i, d in enumerate(shape) if i not in dropped)
    data = facts.data(x)
    return _one(out, facts.dtype(x), None if data is None else data.reshape(out))


@_handles("Concat")
def _concat(facts: Facts, node: ir.Node) -> _Result:
    shapes = [facts.shape(v) for v in node.inputs]
    dtype = next((d for d in map(facts.dtype, node.inputs) if d is not None), None)
    axis = attr(node, "axis")
    known = [s for s in shapes if s is not None]
    if not known or axis is REFERENCE:
        return _one(None, dtype)
    rank = len(known[0])
    axis %= rank
    total: Size = 0
    for s in shapes:
        total = total + (s[axis] if s is not None else _unknown(node, axis))
    if len(known) < len(shapes):
        total = _unknown(node, axis)
    out = list(known[0])
    for i in range(rank):
        # Equal by the operator's rule, so the best known one counts.
        out[i] = next((s[i] for s in known if isinstance(s[i], int)), known[0][i])
    out[axis] = total
    data = [facts.data(v) for v in node.inputs]
    joined = np.concatenate(data, axis=axis) if rank and all(d is not None for d in data) else None
    return _one(tuple(out), dtype, joined)


@_handles("Slice")
def _slice(facts: Facts, node: ir.Node) -> _Result:
    x = node.inputs[0]
    shape, dtype = facts.shape(x), facts.dtype(x)
    if "starts" in node.attributes:
        starts, ends = list(attr(node, "starts")), list(attr(node, "ends"))
        axes, steps = attr(node, "axes"), None
    else:
        starts, ends = facts.ints(node.inputs[1]), facts.ints(node.inputs[2])
        axes, steps = facts.ints(_input(node, 3)), facts.ints(_input(node, 4))
        if _input(node, 3) is not None and axes is None:
            return _one(tuple(_unknown(node, i) for i in range(len(shape))) if shape is not None else None, dtype)
    if shape is None:
        return _one(None, dtype)
    count = len(starts) if starts is not None else len(ends) if ends is not None else facts_len(facts, node.inputs[1])
    if axes is None:
        axes = list(range(count if count is not None else 0))
    out = list(shape)
    exact: list[tuple[int, slice]] | None = []
    for i, axis in enumerate(axes):
        axis = int(axis) % len(shape)
        size = shape[axis]
        start = starts[i] if starts is not None else None
        end = ends[i] if ends is not None else None
        step = 1 if steps is None and _input(node, 4) is None else (steps[i] if steps is not None else None)
        out[axis] = _sliced(size, start, end, step, _unknown(node, axis))
        if exact is not None and all(isinstance(v, int) for v in (start, end, step)):
            exact.append((axis, slice(start, None if end <= -(2**62) else end, step)))
        else:
            exact = None
    data = facts.data(x)
    if data is not None and exact is not None:
        index: list[slice] = [slice(None)] * data.ndim
        for axis, s in exact:
            index[axis] = s
        return _one(tuple(out), dtype, data[tuple(index)])
    return _one(tuple(out), dtype)


def facts_len(facts: Facts, value: ir.Value | None) -> int | None:
    shape = facts.shape(value)
    return shape[0] if shape is not None and len(shape) == 1 and isinstance(shape[0], int) else None


def _sliced(size: Size, start: object, end: object, step: object, unknown: Size) -> Size:
    """Length of [start:end:step] of an axis of the given size."""
    if start is None or end is None or step is None:
        return unknown
    if all(isinstance(v, int) for v in (size, start, end, step)):
        return len(range(*slice(start, None if end <= -(2**62) else end, step).indices(size)))
    if step != 1:
        return unknown

    def place(v: Size) -> Size | None:
        """The position that an index means: clamped to [0, size]."""
        if isinstance(v, int):
            if v < 0:
                return size + v if isinstance(size, Dim) else max(0, size + v)
            if isinstance(size, Dim) and v > 0:
                return size if v >= 2**31 - 1 else _minimum(v, size)
            return min(v, size) if isinstance(size, int) else v
        if v == size:
            return size
        difference = size - v
        if (isinstance(difference, int) and difference >= 0) or (
            isinstance(difference, Dim) and difference.nonnegative
        ):
            # v is at most size, and at least 0 when it is a sum of sizes.
            return v if v.nonnegative else None
        if v.nonnegative:
            return _minimum(v, size)
        return None

    # A negative start reaches before a short axis, and the slice is then shorter than the difference says.
    if isinstance(start, int) and start < 0 and isinstance(size, Dim):
        if end == size or (isinstance(end, int) and end >= 2**31 - 1):
            return _minimum(-start, size)
        return unknown
    if isinstance(end, int) and end < 0 and isinstance(size, Dim) and not (size + end).nonnegative:
        return unknown  # before the axis, when that is short
    first, last = place(start), place(end)
    if first is None or last is None:
        return unknown
    length = last - first
    if isinstance(length, int):
        return max(0, length)
    return length if first == 0 or length.nonnegative else unknown


@_handles("Reshape")
def _reshape(facts: Facts, node: ir.Node) -> _Result:
    x = node.inputs[0]
    shape, dtype = facts.shape(x), facts.dtype(x)
    target = facts.ints(_input(node, 1)) if "shape" not in node.attributes else list(attr(node, "shape"))
    if target is None:
        count = facts_len(facts, _input(node, 1))
        return _one(None if count is None else tuple(_unknown(node, i) for i in range(count)), dtype)
    out: list[Size] = []
    for i, d in enumerate(target):
        if isinstance(d, int) and d == 0 and not attr(node, "allowzero", 0):
            d = shape[i] if shape is not None and i < len(shape) else _unknown(node, i)
        out.append(d)
    for i, d in enumerate(out):
        if isinstance(d, int) and d == -1:
            rest = product(out[:i] + out[i + 1 :])
            quotient = None
            if shape is not None and 0 not in shape:
                quotient = exact_div(product(shape), rest)
            out[i] = quotient if quotient is not None else _unknown(node, i)
            break
    data = facts.data(x)
    moved = None
    if data is not None and all(isinstance(d, int) for d in out) and product(out) == data.size:
        moved = data.reshape(out)
    return _one(tuple(out), dtype, moved)


@_handles("Flatten")
def _flatten(facts: Facts, node: ir.Node) -> _Result:
    x = node.inputs[0]
    shape = facts.shape(x)
    axis = attr(node, "axis", 1)
    if shape is None or axis is REFERENCE:
        return _one((_unknown(node, 0), _unknown(node, 1)), facts.dtype(x))
    axis = axis % len(shape) if axis < 0 else axis
    return _one((product(shape[:axis]), product(shape[axis:])), facts.dtype(x))


@_handles("Transpose")
def _transpose(facts: Facts, node: ir.Node) -> _Result:
    x = node.inputs[0]
    shape = facts.shape(x)
    perm = attr(node, "perm")
    if shape is None:
        return _one(
            None if perm in (None, REFERENCE) else tuple(_unknown(node, i) for i in range(len(perm))), facts.dtype(x)
        )
    perm = list(reversed(range(len(shape)))) if perm is None else perm
    if perm is REFERENCE:
        return _one(tuple(_unknown(node, i) for i in range(len(shape))), facts.dtype(x))
    data = facts.data(x)
    return _one(tuple(shape[p] for p in perm), facts.dtype(x), None if data is None else data.transpose(perm))


@_handles("Expand")
def _expand(facts: Facts, node: ir.Node) -> _Result:
    x, target = node.inputs
    sizes = facts.ints(target)
    shape = facts.shape(x)
    if sizes is None:
        count = facts_len(facts, target)
        if count is None or shape is None:
            return _one(None, facts.dtype(x))
        rank = max(count, len(shape))
        return _one(tuple(_unknown(node, i) for i in range(rank)), facts.dtype(x))
    return _one(broadcast(shape, tuple(sizes)), facts.dtype(x))


@_handles("Tile")
def _tile(facts: Facts, node: ir.Node) -> _Result:
    x, repeats = node.inputs
    shape, counts = facts.shape(x), facts.ints(repeats)
    if shape is None:
        return _one(None, facts.dtype(x))
    if counts is None:
        return _one(tuple(_unknown(node, i) for i in range(len(shape))), facts.dtype(x))
    return _one(tuple(d * c for d, c in zip(shape, counts)), facts.dtype(x))


@_handles("Range")
def _range(facts: Facts, node: ir.Node) -> _Result:
    start, limit, delta = (facts.ints(v) for v in node.inputs)
    dtype = facts.dtype(node.inputs[0])
    if dtype not in _INTEGERS or start is None or limit is None or delta is None:
        return _one((_unknown(node, 0),), dtype)
    if all(isinstance(v[0], int) for v in (start, limit, delta)):
        values = list(range(start[0], limit[0], delta[0]))
        data = np.array(values, object) if len(values) <= _DATA_LIMIT else None
        return _Result(((len(values),),), (dtype,), data)
    length = limit[0] - start[0]
    if delta[0] != 1 or not (isinstance(length, int) or length.nonnegative):
        return _one((_unknown(node, 0),), dtype)
    return _one((length,), dtype)


@_handles("ConstantOfShape")
def _constant_of_shape(facts: Facts, node: ir.Node) -> _Result:
    fill = attr(node, "value")
    dtype = ir.DataType.FLOAT if fill is None else fill.dtype
    sizes = facts.ints(node.inputs[0])
    if sizes is None:
        count = facts_len(facts, node.inputs[0])
        return _one(None if count is None else tuple(_unknown(node, i) for i in range(count)), dtype)
    data = None
    if all(isinstance(d, int) for d in sizes) and product(sizes) <= _DATA_LIMIT:
        value = np.float32(0) if fill is None else fill.numpy().reshape(-1)[0]
        data = np.empty(tuple(sizes), object)
        data.reshape(-1)[:] = [int(value) if dtype in _INTEGERS else value] * data.size
    return _Result((tuple(sizes),), (dtype,), data)


@_handles("MatMul", "MatMulInteger")
def _matmul(facts: Facts, node: ir.Node) -> _Result:
    a, b = node.inputs[:2]
    sa, sb = facts.shape(a), facts.shape(b)
    dtype = facts.dtype(a) if facts.dtype(a) is not None else facts.dtype(b)
    if op_of(node) == "MatMulInteger":
        dtype = ir.DataType.INT32
    if sa is None or sb is None or not sa or not sb:
        return _one(None, dtype)
    batch = broadcast(sa[:-2], sb[:-2])
    rows = (sa[-2],) if len(sa) > 1 else ()
    columns = (sb[-1],) if len(sb) > 1 else ()
    return _one(batch + rows + columns, dtype)


@_handles("Gemm")
def _gemm(facts: Facts, node: ir.Node) -> _Result:
    a, b = node.inputs[:2]
    sa, sb = facts.shape(a), facts.shape(b)
    dtype = facts.dtype(a) if facts.dtype(a) is not None else facts.dtype(b)
    m = sa[1 if attr(node, "transA", 0) else 0] if sa is not None else _unknown(node, 0)
    n = sb[0 if attr(node, "transB", 0) else 1] if sb is not None else _unknown(node, 1)
    return _one((m, n), dtype)


@_handles("Einsum")
def _einsum(facts: Facts, node: ir.Node) -> _Result:
    equation = attr(node, "equation")
    dtype = next((d for d in map(facts.dtype, node.inputs) if d is not None), None)
    if equation is REFERENCE or "." in equation:
        return _one(None, dtype)
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not right and "->" not in equation:
        letters = left.replace(",", "")
        right = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    sizes: dict[str, Size] = {}
    for term, value in zip(terms, node.inputs):
        shape = facts.shape(value)
        if shape is not None and len(shape) == len(term):
            for c, d in zip(term, shape):
                sizes[c] = broadcast_dim(sizes.get(c, 1), d)
    return _one(tuple(sizes.get(c, _unknown(node, i)) for i, c in enumerate(right)), dtype)


@_handles("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceL1", "ReduceProd", "ReduceSumSquare")
def _reduce(facts: Facts, node: ir.Node) -> _Result:
    x = node.inputs[0]
    shape, axes = facts.shape(x), _axes(facts, node, 1)
    if shape is None or axes is None:
        return _one(None, facts.dtype(x))
    if not axes and attr(node, "noop_with_empty_axes", 0):
        return _one(shape, facts.dtype(x))
    reduced = {a % len(shape) for a in axes} if axes else set(range(len(shape)))
    if attr(node, "keepdims", 1):
        return _one(tuple(1 if i in reduced else d for i, d in enumerate(shape)), facts.dtype(x))
    return _one(tuple(d for i, d in enumerate(shape) if i not in reduced), facts.dtype(x))


@_handles("ArgMax", "ArgMin")
def _arg(facts: Facts, node: ir.Node) -> _Result:
    shape = facts.shape(node.inputs[0])
    axis = attr(node, "axis", 0)
    if shape is None or axis is REFERENCE:
        return _one(None, ir.DataType.INT64)
    axis %= len(shape)
    keep = (1,) if attr(node, "keepdims", 1) else ()
    return _one(shape[:axis] + keep + shape[axis + 1 :], ir.DataType.INT64)


@_handles("Split")
def _split(facts: Facts, node: ir.Node) -> _Result:
    x = node.inputs[0]
    shape, count = facts.shape(x), len(node.outputs)
    dtypes = [facts.dtype(x)] * count
    axis = attr(node, "axis", 0)
    if shape is None or axis is REFERENCE:
        return _Result([None] * count, dtypes)
    axis %= len(shape)
    sizes: Iterable[Size] | None = attr(node, "split")
    if sizes is None and _input(node, 1) is not None:
        sizes = facts.ints(node.inputs[1])
        if sizes is None:
            sizes = [Dim.symbol(f"{o.name}[{axis}]") for o in node.outputs]
    if sizes is None:
        each = exact_div(shape[axis], count)
        if each is None and isinstance(shape[axis], int):
            chunk = -(-shape[axis] // count)
            sizes = [chunk] * (count - 1) + [shape[axis] - chunk * (count - 1)]
        else:
            sizes = [each if each is not None else Dim.symbol(f"{o.name}[{axis}]") for o in node.outputs]
    return _Result([shape[:axis] + (s,) + shape[axis + 1 :] for s in sizes], dtypes)


@_handles("Pad")
def _pad(facts: Facts, node: ir.Node) -> _Result:
    x = node.inputs[0]
    shape = facts.shape(x)
    if shape is None:
        return _one(None, facts.dtype(x))
    pads = list(attr(node, "pads")) if "pads" in node.attributes else facts.ints(_input(node, 1))
    axes = facts.ints(_input(node, 3))
    if pads is None or (_input(node, 3) is not None and axes is None):
        return _one(tuple(_unknown(node, i) for i in range(len(shape))), facts.dtype(x))
    axes = list(range(len(shape))) if axes is None else [int(a) % len(shape) for a in axes]
    out = list(shape)
    for i, axis in enumerate(axes):
        out[axis] = out[axis] + pads[i] + pads[i + len(axes)]
    return _one(tuple(out), facts.dtype(x))


@_handles("Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize")
def _spatial(facts: Facts, node: ir.Node) -> _Result:
    x = node.inputs[0]
    shape = facts.shape(x)
    if shape is None:
        return _one(None, facts.dtype(x))
    op = op_of(node)
    if op == "Resize":
        return _one(_resized(facts, node, shape), facts.dtype(x))
    channels = shape[1]
    if op == "Conv":
        weight = facts.shape(node.inputs[1])
        channels = weight[0] if weight is not None else _unknown(node, 1)
        if (
            weight is not None
            and all(isinstance(d, int) for d in (*shape[2:], *weight[2:]))
            and attr(node, "auto_pad", "NOTSET") == "NOTSET"
        ):
            rank = len(shape) - 2
            strides, dilations = attr(node, "strides", [1] * rank), attr(node, "dilations", [1] * rank)
            pads = attr(node, "pads", [0] * 2 * rank)
            spatial = tuple(
                (shape[2 + i] + pads[i] + pads[i + rank] - dilations[i] * (weight[2 + i] - 1) - 1) // strides[i] + 1
                for i in range(rank)
            )
            return _one((shape[0], channels, *spatial), facts.dtype(x))
    elif op == "ConvTranspose":
        channels = _unknown(node, 1)
    spatial = tuple(1 if op == "GlobalAveragePool" else _unknown(node, i) for i in range(2, len(shape)))
    return _one((shape[0], channels, *spatial), facts.dtype(x))


def _resized(facts: Facts, node: ir.Node, shape: Shape) -> Shape:
    sizes = facts.ints(_input(node, 3))
    if (
        sizes is not None
        and len(sizes) == len(shape)
        and "axes" not in node.attributes
        and attr(node, "keep_aspect_ratio_policy", "stretch") == "stretch"
    ):
        return tuple(sizes)
    scales = facts.data(_input(node, 2))
    if scales is not None and scales.size == len(shape) and "axes" not in node.attributes:
        return tuple(
            d if s == 1 else int(math.floor(d * float(s))) if isinstance(d, int) else _unknown(node, i)
            for i, (d, s) in enumerate(zip(shape, scales.reshape(-1)))
        )
    return tuple(_unknown(node, i) for i in range(len(shape)))


def at_most(a: Size, b: Size) -> bool:
    """Whether a is known not to exceed b."""
    return a == b or _minimum_of(a, b) or (isinstance(a, int) and isinstance(b, int) and a <= b)


@_handles("If", "Loop", "Scan")
def _control(facts: Facts, node: ir.Node) -> _Result:
    """Types of the results; shapes where both branches of an If give the same."""
    bodies = [a.value for a in node.attributes.values() if not a.is_ref() and a.type == ir.AttributeType.GRAPH]
    skip = 1 if op_of(node) == "Loop" else 0
    outputs = [list(body.outputs)[skip:] for body in bodies]
    dtypes = [facts.dtype(v) for v in outputs[0]] if outputs else []
    shapes: list[Shape | None] = [None] * len(dtypes)
    if op_of(node) == "If" and len(outputs) == 2:
        pairs = [(facts.shape(a), facts.shape(b)) for a, b in zip(*outputs)]
        shapes = [a if a == b else None for a, b in pairs]
    return _Result(shapes, dtypes)


@_handles("Attention")
def _attention(facts: Facts, node: ir.Node) -> _Result:
    q, _k, v = (facts.shape(x) for x in node.inputs[:3])
    dtype = facts.dtype(node.inputs[0])
    dtypes = [dtype] * len(node.outputs)
    if q is None or v is None:
        return _Result([None], dtypes)
    if len(q) == 4:
        return _Result([(*q[:3], v[3])], dtypes)
    heads, kv_heads = attr(node, "q_num_heads"), attr(node, "kv_num_heads")
    per_head = exact_div(v[2], kv_heads) if isinstance(kv_heads, int) else None
    width = heads * per_head if per_head is not None else Dim.symbol(f"{node.outputs[0].name}[2]")
    return _Result([(q[0], q[1], width)], dtypes)


@_handles("com.microsoft::MultiHeadAttention", "com.microsoft::Attention", "com.microsoft::GroupQueryAttention")
def _microsoft_attention(facts: Facts, node: ir.Node) -> _Result:
    return _Result([], [facts.dtype(node.inputs[0])] * len(node.outputs))


@_handles("DequantizeLinear")
def _dequantize(facts: Facts, node: ir.Node) -> _Result:
    return _one(facts.shape(node.inputs[0]), facts.dtype(node.inputs[1]))


@_handles("QuantizeLinear")
def _quantize(facts: Facts, node: ir.Node) -> _Result:
    zero = _input(node, 2)
    return _one(facts.shape(node.inputs[0]), ir.DataType.UINT8 if zero is None else facts.dtype(zero))


@_handles("NonZero")
def _non_zero(facts: Facts, node: ir.Node) -> _Result:
    rank = facts.rank(node.inputs[0])
    return _one(None if rank is None else (rank, _unknown(node, 1)), ir.DataType.INT64)


@_handles("ortplugins::FusedGemm")
def _fused_gemm(facts: Facts, node: ir.Node) -> _Result:
    a, b = (facts.shape(v) for v in node.inputs[:2])
    if a is None or b is None:
        return _one(None, facts.dtype(node.inputs[0]))
    m = a[-1] if attr(node, "transA", 0) else a[-2]
    n = b[-2] if attr(node, "transB", 0) else b[-1]
    return _one((*broadcast(a[:-2], b[:-2]), m, n), facts.dtype(node.inputs[0]))


@_handles("ortplugins::FusedLayerNorm")
def _fused_layer_norm(facts: Facts, node: ir.Node) -> _Result:
    shape, dtype = facts.shape(node.inputs[0]), facts.dtype(node.inputs[0])
    return _Result([shape] * len(node.outputs), [dtype] * len(node.outputs))


@_handles("com.microsoft::SkipLayerNormalization", "com.microsoft::SkipSimplifiedLayerNormalization")
def _skip_layer_norm(facts: Facts, node: ir.Node) -> _Result:
    shape, dtype = facts.shape(node.inputs[0]), facts.dtype(node.inputs[0])
    return _Result([shape, None, None, shape], [dtype, None, None, dtype])


@_handles("ortplugins::FusedAttention")
def _fused_attention(facts: Facts, node: ir.Node) -> _Result:
    q, v = facts.shape(node.inputs[0]), facts.shape(node.inputs[2])
    dtype = facts.dtype(node.inputs[0])
    if q is None or v is None:
        return _Result([None], [dtype] * len(node.outputs))
    if len(q) == 4:
        return _Result([(*q[:3], v[3])], [dtype] * len(node.outputs))
    if len(q) == 5:  # packed
        heads_axis = 3 if attr(node, "layout") == "BS3NH" else 2
        return _Result([(q[0], q[1], q[heads_axis] * v[4])], [dtype] * len(node.outputs))
    heads = attr(node, "num_heads", 0)
    dim = exact_div(v[2], attr(node, "kv_num_heads", 0) or heads)
    return _Result(
        [(q[0], q[1], heads * dim if dim is not None else Dim.symbol(f"{node.outputs[0].name}[2]"))],
        [dtype] * len(node.outputs),
    )
