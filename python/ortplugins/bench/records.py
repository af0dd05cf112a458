"""The record of a benchmark run, as written to JSON; documents and plots are rendered from such files."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..build_info import build_info, library_digest
from ..files import replace_atomically
from ..timing import Timing


MODEL = "model"
"""What records of whole models have in place of an operator."""

IN_SESSION = "in_session"
"""Name, among contenders, of our op inside an ONNX Runtime session."""

SESSION_BASELINES = frozenset({"ort_mha"})
"""Rivals that run as nodes of an ONNX Runtime session, and are compared with our op as such."""


@dataclass
class Record:
    """One op on one problem. ``error`` is the largest against float64 (for GEMM relative to |A||B|).

    ``in_session_us`` is the time of our op as a node of an ONNX Runtime session, where a rival is measured like that.
    """

    op: str
    shape: dict[str, Any]
    dtype: str
    precision: str | None
    variant: str
    median_us: float
    spread_us: tuple[float, float]
    error: float
    baselines: dict[str, dict[str, Any]] = field(default_factory=dict)
    in_session_us: float | None = None

    def add_baseline(self, name: str, timing: Timing) -> None:
        """Adds a rival that was measured in alternation."""
        self.baselines[name] = {"median_us": timing.median_us, "spread_us": timing.spread_us}

    def ratio(self, baseline: str) -> float:
        """How many times as fast as ``baseline``."""
        return ratio(asdict(self), baseline)


def ratio(record: Mapping[str, Any], baseline: str) -> float:
    """How many times as fast as ``baseline`` ours is, in a record as it is written."""
    in_session = record.get("in_session_us") if baseline in SESSION_BASELINES else None
    return record["baselines"][baseline]["median_us"] / (in_session or record["median_us"])


def best_row(record: Mapping[str, Any]) -> tuple[str, float]:
    """The fastest row of the variant table for the problem of a ``ChoiceRecord`` as it is written, and which share of the
    chosen row's time it takes."""
    times = {name: row["median_us"] for name, row in record["rows"].items()} | {record["variant"]: record["median_us"]}
    name = min(times, key=lambda n: times[n])
    return name, times[name] / record["median_us"]


@dataclass
class LadderRecord(Record):
    """A stage of the ladder. ``ladder`` holds its name, ``stage``, its ``idea`` in a few words, and ``profile``: what Nsight
    Compute said, or None."""

    ladder: dict[str, Any] = field(default_factory=dict)


@dataclass
class ChoiceRecord(Record):
    """The row of the variant table that is chosen for a problem; ``rows`` are the other rows that take it, by name, with
    their times. Rows that take three times as long are left out."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)


def environment(device: str, command: str, **more: Any) -> dict[str, Any]:
    """What a figure depends on besides the code."""
    from ..register import import_onnxruntime

    return {
        "device": device,
        "cuda": build_info().get("cuda"),
        "onnxruntime": import_onnxruntime().__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command,
        **more,
    }


def write_records(path: str | os.PathLike[str], environment: dict[str, Any], records: Sequence[Record]) -> None:
    """Writes the file, complete or not at all."""
    digests = {"kernel_digest": library_digest()}
    if any(isinstance(r, LadderRecord) for r in records):
        digests["ladder_digest"] = library_digest("ladder_digest")
    rows = [asdict(r) for r in records]
    for row in rows:
        if row["in_session_us"] is None:
            del row["in_session_us"]
    document = {**digests, "environment": environment, "records": rows}
    replace_atomically(path, json.dumps(document, indent=1) + "\n")


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
