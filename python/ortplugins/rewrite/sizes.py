"""Sizes read from the inputs of the graph instead of from tensors in the middle of it.

TorchScript graphs ask nearly every tensor for its shape, which would keep each of them alive. A shape that is known as
a formula over the sizes of the graph's inputs is computed from those, once, at the front of the graph.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .facts import Facts, Shape, op_of
from .symbolic import Dim, Size
from .tape import Names, Tape


class Sizes:
    """Shape vectors as values at the front of a graph. Which sizes can be had is for `Facts.is_derivable` to say."""

    def __init__(self, graph: ir.Graph | ir.Function, facts: Facts, names: Names) -> None:
        self._graph = graph
        self._facts = facts
        self._tape = Tape(facts, names, "sizes")
        self._last: ir.Node | None = None
        self.nodes: dict[ir.Node, None] = {}
        """What was made here. It stays until the end of the run, for the next site that asks."""
        self._shapes: dict[Shape, ir.Value] = {}
        self._vectors: dict[object, ir.Value] = {}

    def answer(self, reader: ir.Node) -> None:
        """Removes a node that asks for a shape or a type: its users get a vector made here, or a plain Cast."""
        if op_of(reader) == "CastLike":
            self._cast(reader)
        else:
            self._redirect(reader)
        reader.graph.remove(reader, safe=True)

    def _cast(self, reader: ir.Node) -> None:
        out = reader.outputs[0]
        dtype = self._facts.dtype(reader.inputs[1])
        node = ir.Node("", "Cast", [reader.inputs[0]], [ir.AttrInt64("to", int(dtype))], name=reader.name)
        reader.graph.insert_before(reader, node)
        new = node.outputs[0]
        new.name, out.name = out.name, None
        new.type, new.shape = out.type, out.shape
        self._facts.infer(node)
        out.replace_all_uses_with(new)

    def _redirect(self, reader: ir.Node) -> None:
        out = reader.outputs[0]
        data = self._facts.data(out)
        assert data is not None
        shape = tuple(data)
        out.replace_all_uses_with(self.vector(shape))

    def vector(self, shape: Shape) -> ir.Value:
        """The sizes, each of which is derivable, as a vector of int64."""
        if shape not in self._shapes:
            self._shapes[shape] = self._vector(shape)
            self._place()
        return self._shapes[shape]

    def _place(self) -> None:
        if not self._tape.nodes:
            return
        if self._last is None:
            self._graph.insert_before(self._graph[0], self._tape.nodes)
        else:
            self._graph.insert_after(self._last, self._tape.nodes)
        self._last = self._tape.nodes[-1]
        self.nodes.update(dict.fromkeys(self._tape.nodes))
        self._tape.nodes = []

    def _vector(self, shape: Shape) -> ir.Value:
        if all(isinstance(d, int) for d in shape):
            return self._tape.ints([int(d) for d in shape])
        pieces = [self._size(d) for d in shape]
        return pieces[0] if len(pieces) == 1 else self._tape.op("Concat", pieces, {"axis": 0})

    def _size(self, size: Size) -> ir.Value:
        """One size as a vector of one element."""
        if size in self._vectors:
            return self._vectors[size]
        if not isinstance(size, Dim):
            return self._tape.constant(np.array([size], np.int64))
        total: ir.Value | None = None
        for monomial, coefficient in size.terms:
            term: ir.Value | None = None if coefficient == 1 and monomial else self._tape.ints([coefficient])
            for symbol in monomial:
                value = self._symbol(symbol)
                term = value if term is None else self._tape.op("Mul", [term, value])
            assert term is not None
            total = term if total is None else self._tape.op("Add", [total, term])
        assert total is not None
        self._vectors[size] = total
        return total

    def _symbol(self, symbol: str) -> ir.Value:
        if symbol not in self._vectors:
            source, axis = self._facts.size_sources[symbol]
            if source not in self._vectors:
                self._vectors[source] = self._tape.op("Shape", [source])
            self._vectors[symbol] = self._tape.op(
                "Gather", [self._vectors[source], self._tape.ints([axis])], {"axis": 0}
            )
        return self._vectors[symbol]
