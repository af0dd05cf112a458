"""What a rewrite did, site by site."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..inputs import Symbols
from .cost import Device, Estimate, SizeValues, Work, estimate


@dataclass
class Site:
    """A place in the graph where a fused operator could stand.

    ``nodes`` are the names of the original nodes of the site, in graph order. ``op`` is the fused operator. ``reason``
    is None for a fused site; for a skipped one it is the first condition that failed, and ``fault`` the node that
    failed it. ``estimate`` is there after `Report.estimate`, where the sizes are known.
    """

    kind: str
    nodes: list[str]
    status: Literal["fused", "skipped"]
    op: str
    reason: str | None = None
    fault: str | None = None
    graph: str = ""
    estimate: Estimate | None = None
    work: tuple[list[Work], list[Work]] = field(default_factory=lambda: ([], []), repr=False)
    """The nodes of the site, and those that replace them."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "nodes": list(self.nodes),
            "status": self.status,
            "op": self.op,
            "reason": self.reason,
            "fault": self.fault,
            "graph": self.graph,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
        }


@dataclass
class Report:
    """Every candidate site of a model, and figures of the run."""

    sites: list[Site] = field(default_factory=list)
    nodes_before: int = 0
    nodes_after: int = 0
    packed: int = 0
    """Attention sites that read queries, keys and values in one tensor; projections were joined for it where they
    were three."""
    seconds: float = 0.0
    peak_memory: int = 0
    """Largest resident size of the process so far, in bytes."""
    symbols: dict[str, int] = field(default_factory=dict)
    """Symbolic dimensions of the graph's inputs, and the axis on which each stands first."""
    device: Device | None = None
    """That of the estimates."""

    def select(self, kind: str | None = None, status: str | None = None) -> list[Site]:
        """Sites of the given kind and status; None stands for any."""
        return [s for s in self.sites if kind in (None, s.kind) and status in (None, s.status)]

    def counts(self) -> dict[str, dict[str, int]]:
        """``{kind: {"fused": n, "skipped": m}}``."""
        tally = Counter((s.kind, s.status) for s in self.sites)
        kinds: Iterable[str] = dict.fromkeys(s.kind for s in self.sites)
        return {k: {"fused": tally[k, "fused"], "skipped": tally[k, "skipped"]} for k in kinds}

    def estimate(
        self, device: Device, sizes: Mapping[str, int] | None = None, *, batch: int = 1, length: int = 128
    ) -> None:
        """Estimates every site on a device. Each symbolic dimension has its size in ``sizes``, else ``batch`` or
        ``length``, by its name. Raises OrtPluginsError for a name in ``sizes`` that no input has."""
        symbols = Symbols(self.symbols, sizes or {}, batch, length)
        values = SizeValues(lambda name: symbols.size(name, self.symbols[name]) if name in self.symbols else None)
        for site in self.sites:
            site.estimate = estimate(*site.work, values, device)
        self.device = device

    def to_dict(self) -> dict[str, Any]:
        return {
            "sites": [s.to_dict() for s in self.sites],
            "counts": self.counts(),
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "packed": self.packed,
            "seconds": round(self.seconds, 3),
            "peak_memory": self.peak_memory,
            "device": None if self.device is None else f"{self.device.name} ({self.device.source})",
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)


class Refused(Exception):
    """A site that looks right but must stay: the first condition that failed, and the node at fault."""

    def __init__(self, reason: str, node: object = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node
