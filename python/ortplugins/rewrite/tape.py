"""New nodes of one replacement: made in order, named, and with facts of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ..ops import DOMAIN, OPSET_VERSION, find
from .facts import Facts, Shape, tensor_of
from .layout import Arrangement, Factor, flat, parts_between, resolve, same, sizes
from .report import Refused
from .symbolic import Dim, Size


class Names:
    """Names that are free everywhere in a model."""

    def __init__(self, used: set[str]) -> None:
        self._used = used

    def free(self, wanted: str) -> str:
        name, i = wanted, 0
        while name in self._used:
            i += 1
            name = f"{wanted}_{i}"
        self._used.add(name)
        return name


class Tape:
    """Records the nodes that replace a site. `base` is the name that new nodes and values are derived from.

    `vector` gives sizes that are formulas over those of the graph's inputs as a value.
    """

    def __init__(
        self,
        facts: Facts,
        names: Names,
        base: str,
        vector: Callable[[Shape], ir.Value] | None = None,
        memo: Mapping[object, ir.Value] | None = None,
    ) -> None:
        self._vector = vector
        self._memo = memo or {}
        self.memorised: dict[object, ir.Value] = {}
        """What later sites of the same graph may use again, by what it was made from."""
        self.facts = facts
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self._names = names
        self._base = base
        self._constants: dict[tuple[object, ...], ir.Value] = {}

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, object] | None = None,
        *,
        domain: str = "",
        outputs: int = 1,
    ) -> ir.Value:
        """Adds a node; returns its first output."""
        stem = f"{self._base}/{op_type}"
        node = ir.Node(
            domain,
            op_type,
            list(inputs),
            ir.convenience.convert_attributes({k: v for k, v in (attributes or {}).items() if v is not None}),
            num_outputs=outputs,
            name=self._names.free(stem),
        )
        for i, out in enumerate(node.outputs):
            out.name = self._names.free(f"{stem}:{i}")
        self.nodes.append(node)
        self.facts.infer(node)
        for out in node.outputs:
            dtype = self.facts.dtype(out)
            if dtype is not None:
                out.dtype = dtype
        return node.outputs[0]

    def fused(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, object], outputs: int = 1
    ) -> ir.Node:
        """Adds a node of the package's own domain; attributes equal to their defaults are left out."""
        spec = find(op_type)
        kept = {k: v for k, v in attributes.items() if v is not None and v != spec.attr(k).default}
        while inputs and inputs[-1] is None:
            inputs = inputs[:-1]
        kept["plugin_version"] = str(OPSET_VERSION)
        kept["plugin_namespace"] = DOMAIN
        if outputs > sum(not o.optional for o in spec.outputs):
            kept["plugin_outputs"] = outputs  # a TensorRT plugin cannot see how many outputs its node has
        self.op(op_type, inputs, kept, domain=DOMAIN, outputs=outputs)
        return self.nodes[-1]

    def constant(self, array: np.ndarray) -> ir.Value:
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            out = self.op("Constant", [], {"value": ir.tensor(array)})
            self._constants[key] = out
        return self._constants[key]

    def ints(self, values: Sequence[int]) -> ir.Value:
        return self.constant(np.array(values, np.int64))

    def shared(self, key: object, make: Callable[[], ir.Value]) -> ir.Value:
        """A value that sites have in common: made by the first one that needs it."""
        if key in self._memo:
            return self._memo[key]
        self.memorised[key] = make()
        return self.memorised[key]

    def folded(
        self, value: ir.Value, function: Callable[[np.ndarray], np.ndarray], dtype: ir.DataType | None = None
    ) -> ir.Value:
        """A constant computed from a constant, in another type if one is given.

        The work is done when the model is written, not before.
        """
        tensor = tensor_of(value)
        assert tensor is not None
        kind = tensor.dtype if dtype is None else dtype
        shape = function(np.broadcast_to(np.zeros((), np.int8), tuple(tensor.shape))).shape
        return self.computed(value, lambda arrays: function(arrays[0]), [value], shape, kind)

    def computed(
        self,
        named_after: ir.Value,
        function: Callable[[list[np.ndarray]], np.ndarray],
        operands: Sequence[ir.Value | np.ndarray],
        shape: Sequence[int],
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """A constant of the given shape computed from constants, when the model is written; of the type of
        ``named_after`` if none is given."""
        tensors = [x if isinstance(x, np.ndarray) else tensor_of(x) for x in operands]
        kind = tensor_of(named_after).dtype if dtype is None else dtype
        name = self._names.free(f"{named_after.name}/{self._base}")

        def evaluate() -> ir.TensorProtocol:
            arrays = [t if isinstance(t, np.ndarray) else t.numpy() for t in tensors]
            return ir.tensor(np.ascontiguousarray(function(arrays)).astype(kind.numpy()), dtype=kind)

        lazy = ir.LazyTensor(evaluate, dtype=kind, shape=ir.Shape(shape), name=name)
        out = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind), const_value=lazy)
        self.initializers.append(out)
        return out

    def transposed(self, value: ir.Value) -> ir.Value:
        """The transpose of a constant matrix, as a constant of its own."""
        return self.folded(value, np.transpose)

    def reshape(self, value: ir.Value, source: Arrangement, target: Arrangement) -> ir.Value:
        """Reshape between groupings of the same sequence of factors."""
        if same(source, target):
            return value
        entries: list[int | None] = []
        for i, size in enumerate(sizes(target)):
            if isinstance(size, int):
                entries.append(size)
            elif i < len(source) and same([source[i]], [target[i]]):
                entries.append(0)
            else:
                entries.append(None)
        unknown = [i for i, e in enumerate(entries) if e is None]
        if len(unknown) <= 1 and 0 not in [s for s in sizes(target) if isinstance(s, int)]:
            shape = self.ints([-1 if e is None else e for e in entries])
        elif self._vector is not None and all(map(self.facts.is_derivable, sizes(target))):
            shape = self._vector(sizes(target))
        else:
            shape = self._runtime_shape(value, source, target, entries)
        return self.op("Reshape", [value, shape])

    def _runtime_shape(
        self, value: ir.Value, source: Arrangement, target: Arrangement, entries: Sequence[int | None]
    ) -> ir.Value:
        all_sizes = None
        pieces: list[ir.Value] = []
        inferred = False
        for axis, entry in zip(target, entries):
            if entry is not None and entry != 0:
                pieces.append(self.ints([entry]))
                continue
            at = next((j for j, s in enumerate(source) if same([s], [axis])), None)
            if at is not None:
                if all_sizes is None:
                    all_sizes = self.op("Shape", [value])
                pieces.append(self.op("Gather", [all_sizes, self.ints([at])], {"axis": 0}))
            elif not inferred:
                inferred = True
                pieces.append(self.ints([-1]))
            else:
                raise Refused(
                    f"the size {sizes([axis])[0]} of an axis is not known before the graph runs", value.producer()
                )
        return self.op("Concat", pieces, {"axis": 0})

    def expand(self, value: ir.Value, repeats: Shape) -> ir.Value:
        """Expand by sizes, 1 where the value keeps its own. Raises `Refused` when one is not known."""
        if all(isinstance(r, int) for r in repeats):
            return self.op("Expand", [value, self.ints([int(r) for r in repeats])])
        if self._vector is None or not all(map(self.facts.is_derivable, repeats)):
            raise Refused(
                f"a size of ({', '.join(map(str, repeats))}) is not known before the graph runs", value.producer()
            )
        return self.op("Expand", [value, self._vector(repeats)])

    def arrange(self, value: ir.Value, source: Arrangement, target: Arrangement) -> ir.Value:
        """The value with its axes as in `target`, by as few Reshape and Transpose nodes as it takes."""
        source, target = resolve(source), resolve(target)
        if same(source, target):
            return value
        parts = parts_between(source, target)
        wanted = [run for axis in target for run in _runs(axis, parts)]
        # Factors of size 1 may sit anywhere; where one side does not have them they come in by Reshape.
        common = [p for p in parts if any(p is w for w in wanted)]
        if [id(p) for p in common] == [id(w) for w in wanted] or flat_solid(source) == flat_solid(target):
            return self.reshape(value, source, target)
        value = self.reshape(value, source, common)
        perm = [next(i for i, p in enumerate(common) if p is w) for w in wanted]
        value = self.op("Transpose", [value], {"perm": perm})
        return self.reshape(value, wanted, target)


def flat_solid(arrangement: Arrangement) -> list[Factor]:
    return [f for f in flat(arrangement) if f.size != 1]


def _runs(axis: Sequence[Factor], parts: Sequence[list[Factor]]) -> list[list[Factor]]:
    heads = {p[0]: p for p in parts}
    out = []
    i = 0
    while i < len(axis):
        run = heads.get(axis[i])
        if run is None:
            i += 1  # a factor of size 1 that the source does not have
            continue
        out.append(run)
        i += len(run)
    return out


Emit = Callable[[Tape], ir.Value]
SizeLike = Size | Dim
