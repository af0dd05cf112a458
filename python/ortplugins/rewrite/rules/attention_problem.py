"""One attention, apart from how the graph writes it: what the parts of the attention rule say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from ..layout import Factor
from ..operands import Level
from ..symbolic import Size
from .masks import Term


@dataclass
class Problem:
    """Everything about one attention, before layouts are chosen."""

    q: Level
    k: Level
    v: Level
    out: Level
    batch: list[Factor]
    heads: list[Factor]
    sq: Factor
    sk: Factor
    d: Factor
    dv: Factor
    scale: float
    softcap: float = 0.0
    terms: list[Term] = field(default_factory=list)
    q_factors: list[Term] = field(default_factory=list)
    nodes: list[ir.Node] = field(default_factory=list)
    dtype: ir.DataType = ir.DataType.FLOAT
    is_causal: bool = False
    window: int = -1
    window_right: int = -1
    past_k: ir.Value | None = None
    past_v: ir.Value | None = None
    present_k: ir.Value | None = None  # what the graph has for past and new keys together, where it is used elsewhere
    present_v: ir.Value | None = None
    total_lengths: ir.Value | None = None
    own: Factor | None = None  # the sequence of k and v themselves; sk is the cache's as well

    @property
    def kv(self) -> Factor:
        return self.own or self.sk


def size_of(axis: Sequence[Factor]) -> Size:
    """Size of an axis that is made of these factors."""
    out: Size = 1
    for f in axis:
        out = out * f.size
    return out


def show(shape: Sequence[Size] | None) -> str:
    """A shape for a reader."""
    return "of unknown rank" if shape is None else "(" + ", ".join(map(str, shape)) + ")"
