"""Inputs that a Transformer graph can be run on: token ids inside the vocabulary, padded masks, one size per symbol."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

import numpy as np
import onnx

from .errors import OrtPluginsError

Feeds = dict[str, np.ndarray]

_SAME_VALUES = {
    "Cast",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Identity",
    "Expand",
    "Flatten",
    "Transpose",
    "Slice",
    "Tile",
}


def make_inputs(
    model: onnx.ModelProto, sizes: Mapping[str, int] | None = None, *, batch: int = 2, length: int = 32, seed: int = 0
) -> Feeds:
    """Random inputs for every graph input of ``model`` that is not an initializer.

    Each symbolic dimension gets one size: the one in ``sizes`` if it is named there, ``batch`` for a symbol whose name
    says batch or which is the first dimension, and ``length`` otherwise. Integer inputs that index a constant table
    stay inside it; inputs named as masks are ones for the first part of each row and zeros for its padding; other
    floats are standard normal.

    Raises OrtPluginsError for a name in ``sizes`` that no input has, and for input types with no NumPy type.
    """
    initializers = {t.name for t in model.graph.initializer}
    values = [v for v in model.graph.input if v.name not in initializers]
    known = {d.dim_param for v in values for d in v.type.tensor_type.shape.dim if d.dim_param}
    symbols = Symbols(known, sizes or {}, batch, length)
    limits = _index_limits(model.graph)
    rng = np.random.default_rng(seed)
    return {v.name: _random(v, _shape(v, symbols), limits.get(v.name), rng) for v in values}


def _shape(value: onnx.ValueInfoProto, symbols: Symbols) -> tuple[int, ...]:
    dims = value.type.tensor_type.shape.dim
    return tuple(
        d.dim_value if d.HasField("dim_value") else symbols.size(d.dim_param, axis) for axis, d in enumerate(dims)
    )


class Symbols:
    """Sizes of the symbolic dimensions ``known``, of which ``sizes`` names some. ``past + seq``, ``past_plus_seq`` and
    ``past + 1`` are the sums of their terms, and a total length is past plus new tokens where the model has a past.

    Raises OrtPluginsError for a name in ``sizes`` that is not known.
    """

    def __init__(self, known: Iterable[str], sizes: Mapping[str, int], batch: int, length: int):
        self.sizes, self.batch, self.length = sizes, batch, length
        self.known = set(known)
        if unknown := set(sizes) - self.known:
            raise OrtPluginsError(
                f"no input has a dimension named {', '.join(sorted(unknown))}; the symbolic dimensions are: "
                f"{', '.join(sorted(self.known)) or 'none'}"
            )

    def size(self, symbol: str, axis: int) -> int:
        """Size of the symbol, which is that of dimension ``axis`` of an input."""
        if symbol in self.sizes:
            return self.sizes[symbol]
        terms = [t.strip() for t in re.split(r"\+|_plus_", symbol)]
        if len(terms) == 1 and "total" in symbol.lower():
            past = [s for s in self.known if _is_past(s) and s != symbol]
            new = [s for s in self.known if re.search(r"seq|len", s.lower()) and not _is_past(s) and s != symbol]
            terms = past[:1] + new[:1] if past and new else terms
        return sum(int(t) if t.isdigit() else self._term(t, axis) for t in terms)

    def _term(self, symbol: str, axis: int) -> int:
        if symbol in self.sizes:
            return self.sizes[symbol]
        name = symbol.lower()
        if "batch" in name or (axis == 0 and not re.search(r"seq|len|past", name)):
            return self.batch
        return (self.length + 1) // 2 if _is_past(symbol) else self.length


def _is_past(symbol: str) -> bool:
    return "past" in symbol.lower() or "cache" in symbol.lower()


def _index_limits(graph: onnx.GraphProto) -> dict[str, int]:
    """For each graph input that reaches the index of a lookup in a constant table: the length of the shortest table."""
    tables = {t.name: tuple(t.dims) for t in graph.initializer}
    consumers: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            tables[node.output[0]] = tuple(node.attribute[0].t.dims)
        for i, name in enumerate(node.input):
            consumers[name].append((node, i))
    limits: dict[str, int] = {}
    for value in graph.input:
        queue, seen = deque([value.name]), {value.name}
        while queue:
            for node, i in consumers[queue.popleft()]:
                if node.op_type == "Gather" and i == 1 and node.input[0] in tables:
                    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
                    shape = tables[node.input[0]]
                    if shape:
                        limits[value.name] = min(limits.get(value.name, shape[axis]), shape[axis])
                elif node.op_type in _SAME_VALUES and i == 0 and node.output[0] not in seen:
                    seen.add(node.output[0])
                    queue.append(node.output[0])
    return limits


def _random(
    value: onnx.ValueInfoProto, shape: tuple[int, ...], limit: int | None, rng: np.random.Generator
) -> np.ndarray:
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    except KeyError:
        raise OrtPluginsError(
            f"input {value.name} is not a tensor of numbers; give its value with an .npz file"
        ) from None
    if "mask" in value.name.lower():
        mask = _padded_mask(shape, dtype, rng)
        # torch's key_padding_mask marks the padding.
        return ~mask if dtype == np.bool_ and "padding" in value.name.lower() else mask
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, limit if limit is not None else 2, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def _padded_mask(shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Ones for at least half of each row, then zeros; the first row of a batch is not padded."""
    rows, cols = int(np.prod(shape[:-1])) if shape else 1, shape[-1] if shape else 1
    lengths = rng.integers((cols + 1) // 2, cols + 1, rows)
    lengths[:1] = cols
    return (np.arange(cols) < lengths[:, None]).reshape(shape).astype(dtype)
