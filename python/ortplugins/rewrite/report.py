"""What a rewrite did, site by site."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class Site:
    """A place in the graph where a fused operator could stand.

    ``nodes`` are the names of the original nodes of the site, in graph order. ``op`` is the fused operator. ``reason``
    is None for a fused site; for a skipped one it is the first condition that failed, and ``fault`` the node that
    failed it.
    """

    kind: str
    nodes: list[str]
    status: Literal["fused", "skipped"]
    op: str
    reason: str | None = None
    fault: str | None = None
    graph: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "nodes": list(self.nodes),
            "status": self.status,
            "op": self.op,
            "reason": self.reason,
            "fault": self.fault,
            "graph": self.graph,
        }


@dataclass
class Report:
    """Every candidate site of a model, and figures of the run."""

    sites: list[Site] = field(default_factory=list)
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: float = 0.0
    peak_memory: int = 0
    """Largest resident size of the process so far, in bytes."""

    def select(self, kind: str | None = None, status: str | None = None) -> list[Site]:
        """Sites of the given kind and status; None stands for any."""
        return [s for s in self.sites if kind in (None, s.kind) and status in (None, s.status)]

    def counts(self) -> dict[str, dict[str, int]]:
        """``{kind: {"fused": n, "skipped": m}}``."""
        tally = Counter((s.kind, s.status) for s in self.sites)
        kinds: Iterable[str] = dict.fromkeys(s.kind for s in self.sites)
        return {k: {"fused": tally[k, "fused"], "skipped": tally[k, "skipped"]} for k in kinds}

    def to_dict(self) -> dict[str, Any]:
        return {
            "sites": [s.to_dict() for s in self.sites],
            "counts": self.counts(),
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "seconds": round(self.seconds, 3),
            "peak_memory": self.peak_memory,
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)


class Refused(Exception):
    """A site that looks right but must stay: the first condition that failed, and the node at fault."""

    def __init__(self, reason: str, node: object = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node
