"""The rewrite rules. Each looks at one node and knows nothing of the others.

A rule has three seams: ``pattern`` says whether a node is the centre of a candidate site, and which nodes belong to it;
``check`` derives everything the replacement needs, or raises `Refused` with the first condition that fails; ``rewrite``
only writes what the plan says. Rules keep no state: what ``check`` found travels in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import onnx_ir as ir

from ...ops import FLOAT_TYPES, ONNX_TYPE_CODES
from ..facts import Facts
from ..tape import Tape


TYPES = tuple(ir.DataType(ONNX_TYPE_CODES[name]) for name in FLOAT_TYPES)
"""Element types of the operators."""


@dataclass(frozen=True)
class Options:
    """What the caller of `rewrite` asked for. ``precision`` is that of float32 products, by op type."""

    precision: dict[str, str] = field(default_factory=dict)


@dataclass
class Match:
    """A candidate site: the centre and, as far as the pattern saw them, its other nodes."""

    centre: ir.Node
    nodes: Sequence[ir.Node]
    found: Any = None


@dataclass
class Replacement:
    """What `rewrite` wrote: old value and the new value that stands for it."""

    values: list[tuple[ir.Value, ir.Value]]


class Rule(Protocol):
    kind: str
    op: str

    def pattern(self, node: ir.Node, facts: Facts) -> Match | None: ...

    def check(self, match: Match, facts: Facts, options: Options) -> Any:
        """The plan, which has ``nodes`` (those replaced). Raises `Refused`."""

    def rewrite(self, plan: Any, tape: Tape, options: Options) -> Replacement: ...
