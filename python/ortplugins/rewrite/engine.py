"""Applies the rules to every graph of a model and cleans up after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import onnx_ir as ir

from ..errors import OrtPluginsError
from ..ops import DOMAIN, OPSET_VERSION
from .cost import work_of
from .facts import Facts, Shape, op_of
from .packing import is_attention, pack
from .report import Refused, Report, Site
from .rules import Match, Options, Rule
from .rules.attention import AttentionRule
from .rules.layer_norm import LayerNormRule
from .rules.linear import LinearRule
from .rules.softmax import SoftmaxRule
from .sizes import Sizes
from .tape import Names, Tape

RULES: tuple[Rule, ...] = (AttentionRule(), LinearRule(), LayerNormRule(), SoftmaxRule())
"""In the order in which they are tried: attention takes in a Softmax that would otherwise be a site of its own, and a
product takes in a residual that a norm behind it would otherwise add."""

Progress = Callable[[int, int], None]


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    for a in node.attributes.values():
        if a.is_ref():
            continue
        if a.type == ir.AttributeType.GRAPH:
            yield a.value
        elif a.type == ir.AttributeType.GRAPHS:
            yield from a.value


def graphs_of(graph: ir.Graph | ir.Function, label: str = "") -> Iterator[tuple[ir.Graph | ir.Function, str]]:
    """The graph and every graph inside it, with the path of nodes that leads there."""
    yield graph, label
    for node in graph:
        for inner in subgraphs(node):
            yield from graphs_of(inner, f"{label}/{node.name or node.op_type}".lstrip("/"))


class Rewriter:
    """One run over one model, which is changed in place."""

    def __init__(
        self,
        model: ir.Model,
        *,
        only: Sequence[str] | None,
        skip: Sequence[str],
        keep: Iterable[str],
        options: Options,
        rules: Sequence[Rule] = RULES,
    ) -> None:
        self.model = model
        self.report = Report()
        self._rules = rules
        self._only = only
        self._skip = frozenset(skip)
        self._keep = frozenset(keep)
        self._options = options
        self._calls: dict[object, list[list[tuple[Shape | None, ir.DataType | None]]]] = {}
        self._memo: dict[ir.Graph | ir.Function, dict[object, ir.Value]] = {}
        self._names = Names(set(_used_names(model)))

    def run(self) -> Report:
        self._require_kept()
        self.report.nodes_before = sum(1 for _ in self.model.graph.all_nodes())
        for graph in (self.model.graph, *self.model.functions.values()):
            for inner, _ in list(graphs_of(graph)):
                sort(inner)
        self._run_on(self.model.graph, self.model.graph.opset_imports, "")
        # A function is looked at after everything that calls it, for what the calls say about its inputs.
        for function in self._callers_first():
            self._run_on(function, function.opset_imports, f"{function.domain}::{function.name}")
            if DOMAIN in function.opset_imports:
                self.model.graph.opset_imports.setdefault(DOMAIN, OPSET_VERSION)
        self.report.nodes_after = sum(1 for _ in self.model.graph.all_nodes())
        return self.report

    def _require_kept(self) -> None:
        roots = (self.model.graph, *self.model.functions.values())
        if self._keep:
            missing = self._keep - {_name(n) for root in roots for g, _ in graphs_of(root) for n in g}
            if missing:
                raise OrtPluginsError(f"keep: the model has no node named {', '.join(sorted(missing))}")

    def _obstacle(self, root: ir.Graph | ir.Function, facts: Facts) -> str | None:
        """Why nothing may be replaced in a function.

        ONNX infers the results of a call from the function's body, and gives up at an operator that it does not know.
        In a graph the types of the results can be written down beside the call; in another function they cannot.
        """
        if not isinstance(root, ir.Function):
            return None
        for caller in self.model.functions.values():
            if any(n.op_identifier() == root.identifier() for g, _ in graphs_of(caller) for n in g):
                return (
                    f"the function is called by another, {caller.name}, which would not know the types of its results"
                )
        unknown = next((v for v in root.outputs if facts.dtype(v) is None), None)
        return None if unknown is None else f"the element type of the function's result {unknown.name} is not known"

    def _note_types(self, function: ir.Function, facts: Facts) -> None:
        """Writes down the types of the results of all calls of a function."""
        for graph, _ in graphs_of(self.model.graph):
            for node in graph:
                if node.op_identifier() != function.identifier():
                    continue
                for result, inner in zip(node.outputs, function.outputs):
                    shape = facts.shape(inner)
                    if result.type is None:
                        result.type = ir.TensorType(facts.dtype(inner))
                    if result.shape is None and shape is not None:
                        result.shape = ir.Shape([d if isinstance(d, int) else None for d in shape])

    def _callers_first(self) -> list[ir.Function]:
        functions = dict(self.model.functions)
        callees = {
            key: [n.op_identifier() for g, _ in graphs_of(f) for n in g if n.op_identifier() in functions]
            for key, f in functions.items()
        }
        out: list[ir.Function] = []
        seen: set[object] = set()

        def visit(key: object) -> None:
            if key in seen:
                return
            seen.add(key)
            for callee in callees[key]:
                visit(callee)
            out.append(functions[key])

        for key in functions:
            visit(key)
        return out[::-1]

    def _run_on(self, root: ir.Graph | ir.Function, opsets: dict[str, int], label: str) -> None:
        facts = Facts(root)
        if isinstance(root, ir.Function):
            facts.assume(self._calls.get(root.identifier(), []))
        facts.learn()
        for graph, _ in graphs_of(root):
            for node in graph:
                if node.op_identifier() in self.model.functions:
                    self._calls.setdefault(node.op_identifier(), []).append(
                        [(facts.shape(v), facts.dtype(v)) for v in node.inputs]
                    )
        if root is self.model.graph:
            self.report.symbols = {symbol: axis for symbol, (_, axis) in facts.size_sources.items()}
        sizes = Sizes(root, facts, self._names)
        obstacle = self._obstacle(root, facts)
        before = len(self.report.select(status="fused"))
        order = {node: i for i, node in enumerate(n for g, _ in graphs_of(root, label) for n in g)}
        sites: list[tuple[int, Site]] = []
        for rule in self._rules:
            for graph, path in list(graphs_of(root, label)):
                for node in list(graph):
                    if node.graph is None:
                        continue  # removed with an earlier site
                    match = rule.pattern(node, facts)
                    if match is not None:
                        sites.append(
                            (order.get(node, len(order)), self._apply(rule, match, facts, sizes, graph, path, obstacle))
                        )
        if isinstance(root, ir.Graph):  # a function has no initialisers
            self._pack(root, facts, sizes)
        made = list(sizes.nodes)
        sizes.nodes.clear()
        sweep(made, facts, sizes)
        sites.sort(key=lambda s: s[0])
        self.report.sites += [s for _, s in sites]
        if len(self.report.select(status="fused")) > before:
            opsets.setdefault(DOMAIN, OPSET_VERSION)
            if isinstance(root, ir.Function):
                self._note_types(root, facts)
            for graph, _ in graphs_of(root):
                sort(graph)

    def _pack(self, root: ir.Graph, facts: Facts, sizes: Sizes) -> None:
        """Has attention read packed operands where they are, or can be, in one tensor."""
        for graph, _ in list(graphs_of(root)):
            for node in [n for n in graph if is_attention(n)]:
                tape = Tape(facts, self._names, _name(node), sizes.vector)
                packed = pack(node, facts, tape)
                if packed is None:
                    continue
                values, gone = packed
                graph.insert_before(node, tape.nodes)
                for value in tape.initializers:
                    graph.initializers.add(value)
                for old, new in values:
                    self._take_place(old, new, facts)
                sweep(gone, facts, sizes)
                self.report.packed += 1

    def _apply(
        self,
        rule: Rule,
        match: Match,
        facts: Facts,
        sizes: Sizes,
        graph: ir.Graph | ir.Function,
        path: str,
        obstacle: str | None,
    ) -> Site:
        names = [_name(n) for n in match.nodes]

        def skipped(reason: str, fault: object = None) -> Site:
            blamed = _name(fault) if isinstance(fault, ir.Node) else None
            work = [work_of(n, facts) for n in match.nodes]
            return Site(rule.kind, names, "skipped", rule.op, reason, blamed, path, work=(work, []))

        if (self._only is not None and rule.kind not in self._only) or rule.kind in self._skip:
            return skipped("the rule is switched off")
        if obstacle is not None:
            return skipped(obstacle)
        tape = None
        try:
            plan = rule.check(match, facts, self._options)
            names = [_name(n) for n in plan.nodes]
            kept = next((n for n in (*match.nodes, *plan.nodes) if _name(n) in self._keep), None)
            if kept is not None:
                return skipped("the node is kept on request", kept)
            memo = self._memo.setdefault(graph, {})
            stranger = next((n for n in plan.nodes if n.graph is not match.centre.graph), None)
            if stranger is not None:
                return skipped("the nodes of the site lie in different graphs", stranger)
            tape = Tape(facts, self._names, _name(match.centre), sizes.vector, memo)
            replacement = rule.rewrite(plan, tape, self._options)
        except Refused as refusal:
            if tape is not None:
                for node in tape.nodes:
                    _detach(node)
            return skipped(refusal.reason, refusal.node)
        memo.update(tape.memorised)
        before = [(n, work_of(n, facts)) for n in plan.nodes]
        self._splice(graph, match.centre, plan.nodes, tape, replacement.values, facts, sizes)
        work = ([w for n, w in before if n.graph is None], [work_of(n, facts) for n in tape.nodes])
        return Site(rule.kind, names, "fused", rule.op, None, None, path, work=work)

    @staticmethod
    def _take_place(old: ir.Value, new: ir.Value, facts: Facts) -> None:
        """Gives a new value the readers, the name and all that is known of an old one."""
        new.type = old.type if old.type is not None else new.type
        new.shape = old.shape if old.shape is not None else new.shape
        new.doc_string = old.doc_string
        new.metadata_props.update(old.metadata_props)
        facts.copy(old, new)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name, old.name = old.name, new.name

    def _splice(
        self,
        graph: ir.Graph | ir.Function,
        centre: ir.Node,
        old_nodes: Sequence[ir.Node],
        tape: Tape,
        values: Sequence[tuple[ir.Value, ir.Value]],
        facts: Facts,
        sizes: Sizes,
    ) -> None:
        anchor = old_nodes[-1]
        for old, _ in values:
            producer = old.producer()
            if producer is not None and producer.graph is centre.graph:
                anchor = producer
        for value in tape.initializers:
            graph.initializers.add(value)
        graph.insert_before(anchor, tape.nodes)
        for node in tape.nodes:
            if node.domain == DOMAIN:
                node.metadata_props.update(centre.metadata_props)
                node.doc_string = node.doc_string or centre.doc_string
        for old, _ in values[1:]:
            # Who asks for the shape of a second result may stand in front of the new node.
            for reader in [n for n in old.consumers() if facts.is_size_read(n)]:
                sizes.answer(reader)
        for old, new in values:
            self._take_place(old, new, facts)
        sweep([*(old.producer() for old, _ in values), *old_nodes], facts, sizes)
        main = [node for node in tape.nodes if node.domain == DOMAIN][-1]
        if centre.graph is None and centre.name:
            main.name = centre.name


def _name(node: ir.Node) -> str:
    """The node's name, or that of its first output where it has none."""
    return node.name or (node.outputs[0].name if node.outputs else "") or node.op_type


def _detach(node: ir.Node) -> None:
    for i in range(len(node.inputs)):
        node.replace_input_with(i, None)


def sweep(nodes: Iterable[ir.Node], facts: Facts, sizes: Sizes) -> None:
    """Removes those of the nodes that nothing uses any more, and what only fed them: nodes and initialisers.

    Nodes that only ask a dead value for its shape or type get the answer from elsewhere.
    """
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node.graph is None or node in sizes.nodes or any(True for _ in subgraphs(node)):
            continue
        if any(o.is_graph_output() or facts.readers(o) for o in node.outputs):
            continue
        for reader in [n for o in node.outputs for n in o.consumers()]:
            sizes.answer(reader)
        inputs = [v for v in node.inputs if v is not None]
        node.graph.remove(node, safe=True)
        for value in inputs:
            producer = value.producer()
            if producer is not None:
                pending.append(producer)
            elif (
                value.is_initializer()
                and not value.uses()
                and not value.is_graph_output()
                and not value.is_graph_input()
            ):
                owner = value.graph
                if owner is not None:
                    owner.initializers.pop(value.name, None)


def sort(graph: ir.Graph | ir.Function) -> None:
    """Sorts the nodes of one graph if they are not sorted; a sorted graph keeps its order."""
    if not _sorted(graph):
        graph.sort()


def _sorted(graph: ir.Graph | ir.Function) -> bool:
    nodes = list(graph)
    position = {node: i for i, node in enumerate(nodes)}
    for i, node in enumerate(nodes):
        for value in _reads(node):
            producer = value.producer()
            if producer is not None and position.get(producer, -1) >= i:
                return False
    return True


def _reads(node: ir.Node) -> Iterator[ir.Value]:
    """Values that a node reads, the graphs inside it included."""
    for value in node.inputs:
        if value is not None:
            yield value
    for graph in subgraphs(node):
        yield from (v for v in graph.outputs if v is not None)
        for inner in graph:
            yield from _reads(inner)


def _used_names(model: ir.Model) -> Iterator[str]:
    for root in (model.graph, *model.functions.values()):
        for graph, _ in graphs_of(root):
            for value in graph.inputs:
                yield value.name or ""
            if isinstance(graph, ir.Graph):
                yield from graph.initializers
            for node in graph:
                yield node.name or ""
                for out in node.outputs:
                    yield out.name or ""


__all__ = ["RULES", "Rewriter", "graphs_of", "op_of", "sort", "sweep"]
