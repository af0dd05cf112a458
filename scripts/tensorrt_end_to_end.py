#!/usr/bin/env python3
"""Run everything that needs a full TensorRT and a GPU, and write a record of it.

    scripts/tensorrt_end_to_end.py [--output FILE] [--model FILE.onnx] [-- PYTEST_ARGUMENT ...]

The tests are those of tests/test_tensorrt_engine.py: rewritten models as engines beside stock TensorRT, engines in new
processes, CUDA graphs, attention inside If, ONNX Runtime's TensorRT provider and trtexec. The record is JSON: what the
machine is, and for each test its outcome, the reason if it was skipped, and what it measured. The exit status is 0 when
no test failed and at least one ran.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from ortplugins.build_info import library_digest
from ortplugins.files import replace_atomically

ROOT = pathlib.Path(__file__).resolve().parent.parent


def gpu() -> dict[str, str] | None:
    """Name, driver and compute capability of the first GPU; None where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        line = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
    return dict(zip(("name", "driver", "compute_capability"), (part.strip() for part in line.split(",")), strict=True))


def version_of(module: str) -> str | None:
    """Version of an importable module, asked in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}; print({module}.__version__)"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None if done.returncode == 0 else None


def run_tests(model: pathlib.Path | None, arguments: list[str]) -> tuple[int, list[dict[str, Any]]]:
    """pytest's exit status, and name, outcome, reason and measurements of each test."""
    environment = dict(os.environ)
    if model is not None:
        environment["ORTPLUGINS_END_TO_END_MODEL"] = str(model.resolve())
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            str(ROOT / "tests/test_tensorrt_engine.py"),
            f"--junitxml={report}",
            *arguments,
        ]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if not report.exists():
            return status, []
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return status, [outcome_of(case) for case in cases]


def outcome_of(case: ElementTree.Element) -> dict[str, Any]:
    result: dict[str, Any] = {"test": case.get("name"), "seconds": float(case.get("time", "0")), "outcome": "passed"}
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            result |= {"outcome": "skipped" if kind == "skipped" else "failed", "reason": found.get("message", "")}
    result["measured"] = {p.get("name"): p.get("value") for p in case.iter("property")}
    return result


def show(results: list[dict[str, Any]]) -> None:
    table = Table(Column("test", overflow="fold"), "outcome", "measured or reason", title="TensorRT, end to end")
    for r in results:
        measured = "\n".join(f"{name}: {value}" for name, value in r["measured"].items())
        table.add_row(r["test"], r["outcome"], measured or r.get("reason", "")[:300])
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("tensorrt_end_to_end.json"), help="the record"
    )
    parser.add_argument("--model", type=pathlib.Path, help="an ONNX model to use instead of the demo's")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest")
    options = parser.parse_args()
    if options.model is not None and not options.model.is_file():
        parser.error(f"there is no model {options.model}")
    status, results = run_tests(options.model, options.pytest)
    record = {
        "kernel_digest": library_digest(),
        "environment": {
            "gpu": gpu(),
            "tensorrt": version_of("tensorrt"),
            "onnxruntime": version_of("onnxruntime"),
            "polygraphy": version_of("polygraphy"),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "command": " ".join(["scripts/tensorrt_end_to_end.py", *sys.argv[1:]]),
        },
        "results": results,
    }
    replace_atomically(options.output, json.dumps(record, indent=1) + "\n")
    show(results)
    print(f"wrote {options.output}")
    if status != 0:
        return 1
    if not any(r["outcome"] == "passed" for r in results):
        print("every test was skipped: this needs the module tensorrt and a GPU", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
