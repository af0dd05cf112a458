"""The record of a benchmark run, as written to JSON; documents and plots are rendered from such files."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..build_info import build_info, library_digest
from ..files import replace_atomically
from ..timing import Timing


@dataclass
class Record:
    """One op on one problem. ``error`` is the largest against float64 (for GEMM relative to |A||B|)."""

    op: str
    shape: dict[str, Any]
    dtype: str
    precision: str | None
    variant: str
    median_us: float
    spread_us: tuple[float, float]
    error: float
    baselines: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add_baseline(self, name: str, timing: Timing) -> None:
        """Adds a rival that was measured in alternation."""
        self.baselines[name] = {"median_us": timing.median_us, "spread_us": timing.spread_us}

    def ratio(self, baseline: str) -> float:
        """How many times as fast as ``baseline``."""
        return self.baselines[baseline]["median_us"] / self.median_us


@dataclass
class LadderRecord(Record):
    """A stage of the ladder. ``ladder`` holds its name, ``stage``, and ``profile``: what Nsight Compute said, or None."""

    ladder: dict[str, Any] = field(default_factory=dict)


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
    document = {**digests, "environment": environment, "records": [asdict(r) for r in records]}
    replace_atomically(path, json.dumps(document, indent=1) + "\n")


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
