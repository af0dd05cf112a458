#!/usr/bin/env python3
"""The fusion page of the documentation, from the corpus and a run of the rewriter: ``render_fusion.py [--check]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ortplugins.files import replace_atomically
from ortplugins.rewrite import Report, rewrite

PAGE = Path("docs/fusion.md")
CORPUS = Path("models/corpus")

_INTRODUCTION = """\
# What is fused

Rendered by `python scripts/render_fusion.py` from `models/corpus`: the counts of this package are those of a run of its
rewriter, those of the other tools are in the corpus's index. Every file is a small Transformer as PyTorch exports it; the
name says family, exporter and opset, attention implementation, type. `sites` counts what a perfect rewriter would find.

- `ours`: attention sites that became FusedAttention. `tests/test_rewrite_corpus.py` runs every file before and after, at
  several sizes, padded and with a fully masked row, within 2e-5 (float16: 4e-3) of its largest output.
- `ORT`: `onnxruntime.transformers.optimizer` with the model type in brackets. `onnxscript`: its `ort_fusions`.
- `!`: the rewritten file is wrong by more than 1e-3 (float16: 5e-2) or does not load. `~`: it changes what a fully masked
  row gives.
- `linear` and `norm`: products with a constant weight, and LayerNorm and RMSNorm, of the file's own.
"""


def rivals_count(entry: Mapping[str, Any], tool: str) -> str:
    """Sites fused by another tool, with the mark of what is wrong with the file that it wrote."""
    baseline = entry["baseline"]
    allowed = 5e-2 if entry["dtype"] == "fp16" else 1e-3
    difference, masked = baseline[f"{tool}_max_abs_diff"], baseline[f"{tool}_full_mask_row_diff"]
    mark = ""
    if isinstance(difference, str) or (difference or 0) > allowed:
        mark = "!"
    elif isinstance(masked, float) and masked > allowed:
        mark = "~"
    return f"{baseline[tool]}{mark}"


def _fused(report: Report, kind: str) -> str:
    counts = report.counts().get(kind, {"fused": 0, "skipped": 0})
    total = sum(counts.values())
    return f"{counts['fused']} of {total}" if total else ""


def render(tree: Path) -> str:
    """The page. Takes some seconds: every file is rewritten."""
    entries = json.loads((tree / CORPUS / "index.json").read_text())["files"]
    reports = {e["file"]: rewrite(tree / CORPUS / e["file"]).report for e in entries}
    return "\n".join([_INTRODUCTION, *_table(entries, reports), "", *_left(reports)]) + "\n"


def _table(entries: list[Mapping[str, Any]], reports: Mapping[str, Report]) -> Iterable[str]:
    yield "| file | sites | ours | ORT | onnxscript | linear | norm |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    totals = dict.fromkeys(("sites", "ours", "ort_optimizer", "onnxscript"), 0)
    for entry in entries:
        report = reports[entry["file"]]
        ours = len(report.select("attention", "fused"))
        totals["sites"] += entry["attention_sites"]
        totals["ours"] += ours
        for tool in ("ort_optimizer", "onnxscript"):
            totals[tool] += entry["baseline"][tool]
        cells = [
            entry["file"].removesuffix(".onnx"),
            str(entry["attention_sites"]),
            str(ours),
            f"{rivals_count(entry, 'ort_optimizer')} ({entry['baseline']['ort_model_type']})",
            rivals_count(entry, "onnxscript"),
            _fused(report, "linear"),
            _fused(report, "layer_norm"),
        ]
        yield "| " + " | ".join(cells) + " |"
    sums = [str(n) for n in totals.values()]
    for kind in ("linear", "layer_norm"):
        counts = [r.counts().get(kind, {}) for r in reports.values()]
        fused = sum(c.get("fused", 0) for c in counts)
        sums.append(f"{fused} of {fused + sum(c.get('skipped', 0) for c in counts)}")
    yield "| **total** | " + " | ".join(f"**{s}**" for s in sums) + " |"


def _left(reports: Mapping[str, Report]) -> Iterable[str]:
    """Every site that stays, with the reason."""
    left = [(name, s) for name, report in reports.items() for s in report.select(status="skipped")]
    if not left:
        return
    yield "## What stays"
    yield ""
    for name, site in left:
        yield f"- `{name}`, {site.kind} at `{site.nodes[0]}`: {site.reason} (`{site.fault}`)."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is not up to date")
    arguments = parser.parse_args()
    tree = Path(__file__).parents[1]
    page = render(tree)
    if arguments.check:
        return int((tree / PAGE).read_text() != page)
    replace_atomically(tree / PAGE, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
