"""Benchmarks on the CPU: a session of one op of ours against a session of stock nodes, in alternation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import native, timing
from ..session import DeviceCall, make_session
from .records import Record, cpu_name, environment
from .workloads import WORKLOADS

BASELINE = "ort"
MIN_SECONDS = 2.0


def run(
    names: Sequence[str],
    *,
    threads: int = 2,
    min_seconds: float = MIN_SECONDS,
    command: str = "",
    progress: Callable[[str, float], None] = lambda what, fraction: None,
) -> tuple[dict[str, Any], list[Record]]:
    """Measures every CPU problem of the workloads ``names`` and returns the environment and the records.

    Both sides run in ONNX Runtime with the same number of threads, their weights constant, inputs and outputs bound.
    """
    jobs = [(WORKLOADS[name], problem) for name in names for problem in WORKLOADS[name].cpu]
    records = []
    for i, (workload, problem) in enumerate(jobs):
        what = f"{workload.spec.name} {' '.join(str(v) for v in problem.values())}"
        progress(what, i / len(jobs))
        inputs = workload.inputs(problem, np.random.default_rng(0))
        attrs, feeds = workload.attrs(problem), workload.feeds(inputs)
        ours = make_session(workload.model(problem, inputs), threads=threads)
        stock = make_session(workload.stock(problem, inputs), threads=threads)
        error = workload.error(problem, inputs, ours.run(None, feeds)[0])
        rounds = timing.alternate(
            [DeviceCall(s, feeds, "cpu") for s in (stock, ours)],
            min_seconds=min_seconds,
            progress=lambda f, i=i, what=what: progress(what, (i + f) / len(jobs)),
        )
        measured = rounds.timing(1)
        record = Record(
            workload.spec.name,
            dict(problem),
            "float32",
            None,
            native.choose(workload.spec.name, inputs, attrs),
            measured.median_us,
            measured.spread_us,
            error,
        )
        record.add_baseline(BASELINE, rounds.timing(0))
        records.append(record)
    return environment(cpu_name(), command, threads=threads, cpu_isa=native.cpu_isa()), records
