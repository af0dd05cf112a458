"""The documents made from recorded runs: ``python -m ortplugins.bench.render [--check]``.

The performance page with its roofline plots, and the tables in the ladder's README. Every figure comes from a file under
``plugins/perf``. A run made with other kernel sources than the tree's is shown as stale.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import console
from ..errors import OrtPluginsError
from ..files import replace_atomically
from . import roofline
from .digest import kernel_digest, ladder_digest
from .records import MODEL, best_row, ratio
from .workloads import WORKLOADS

PAGE = Path("docs/performance.md")
LADDER = Path("plugins/ladder/README.md")
RECORDS = Path("plugins/perf")

Run = Mapping[str, Any]

_INTRODUCTION = """\
# Performance

Rendered by `python -m ortplugins.bench.render` from the recorded runs under `plugins/perf`; not written by hand. Times are
medians; each rival was measured in the same run by the same method, in alternation. "2.0x" beside a rival means that
ours takes half its time. `copy` is a copy of the same tensor on the device, the bound for an op that reads and writes it
once. `error` is the largest against float64 (for GEMM divided by |A||B|). `ort` is ONNX Runtime with stock nodes;
`ort_mha` its MultiHeadAttention as a node of a session, compared with ours "in a session". Whole models: `ort_optimizer`
is the model that ONNX Runtime's transformers optimizer makes, and `ort_no_graph`, in rows with a CUDA graph, the stock
model without one. `ceiling` is the share of what the device could
do at best, by the ceilings measured on it in the same run: its copy rate for the bytes that must move, or the best rate
of cuBLAS for the arithmetic, whichever takes longer.

The way from a naive kernel to these, stage by stage: [the ladder](../plugins/ladder/README.md).
"""


def _runs(tree: Path, ladder: bool) -> Iterable[tuple[str, Run]]:
    """Path and content of the recorded runs, of the ladder or of the ops."""
    for path in sorted((tree / RECORDS).rglob("*.json")):
        run = json.loads(path.read_text())
        if ("ladder_digest" in run) == ladder:
            yield path.relative_to(tree).as_posix(), run


def _markdown_table(header: list[str], rows: Iterable[list[str]]) -> Iterable[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _kind(record: Mapping[str, Any]) -> str:
    return record["dtype"] if not record["precision"] else f"{record['dtype']} {record['precision']}"


def _table(records: list[Mapping[str, Any]], ceilings: Mapping[str, float]) -> Iterable[str]:
    rivals = list(dict.fromkeys(name for r in records for name in r["baselines"]))
    shares = [roofline.share(r, ceilings) for r in records]
    known = any(shares)
    in_session = any("in_session_us" in r for r in records)
    rows = []
    for r, share in zip(records, shares):
        cells = [
            console.problem(r["shape"]),
            _kind(r),
            f"`{r['variant']}`",
            console.error(r["error"]),
            console.microseconds(r["median_us"]),
        ]
        cells += [share] if known else []
        cells += [console.microseconds(r["in_session_us"]) if "in_session_us" in r else ""] if in_session else []
        for name in rivals:
            rival = r["baselines"].get(name)
            cells.append("" if rival is None else f"{console.microseconds(rival['median_us'])} ({ratio(r, name):.2f}x)")
        rows.append(cells)
    more = [*(["ceiling"] if known else []), *(["in a session"] if in_session else [])]
    return _markdown_table(["problem", "type", "variant", "error", "time", *more, *rivals], rows)


NEAR = 0.95
"""A choice is good where the fastest row takes this share of its time or more."""


def _choices(records: list[Mapping[str, Any]]) -> Iterable[str]:
    """How good the choice of rows is: where it is not the fastest, by how much."""
    best = [best_row(r) for r in records]
    good = sum(share >= NEAR for _, share in best)
    yield f"Every kernel that takes a problem, in one run: the chosen one is within 5 % of the fastest in {good} of {len(records)} problems."
    yield "Those where another is faster:"
    yield ""
    rows = [
        [
            console.problem(r["shape"]),
            _kind(r),
            f"`{r['variant']}`",
            console.microseconds(r["median_us"]),
            f"`{name}`",
            f"{console.microseconds(share * r['median_us'])} ({100.0 * share:.0f} %)",
        ]
        for r, (name, share) in zip(records, best)
        if name != r["variant"]
    ]
    yield from _markdown_table(["problem", "type", "chosen", "time", "fastest", "time"], rows)


def _heading(path: str, run: Run, stale: bool, device: str = "") -> Iterable[str]:
    environment = run["environment"]
    versions = ", ".join(
        f"{name} {environment[key]}"
        for name, key in (("driver", "driver"), ("CUDA", "cuda"), ("ONNX Runtime", "onnxruntime"), ("PyTorch", "torch"))
        if environment.get(key)
    )
    yield f"{device}`{environment['command']}`, {environment['date']}, {versions} (`{path}`)"
    yield ""
    if stale:
        yield "**Stale**: the kernel sources have changed since this run."
        yield ""
    if not device and (ceilings := environment.get("ceilings")):
        yield (
            "Ceilings measured on this device: "
            + ", ".join(f"{k.replace('_per_', '/').replace('_', ' ')} {v:.3g}" for k, v in ceilings.items())
            + "."
        )
        yield ""


def plot_path(kernel: str) -> Path:
    return PAGE.parent / f"roofline-{kernel}.svg"


def plots(tree: Path) -> dict[Path, roofline.Plot]:
    """The roofline plot of each op, by the first device in path order that has its ceilings measured."""
    found: dict[Path, roofline.Plot] = {}
    for _, run in _runs(tree, ladder=False):
        if any("rows" in r for r in run["records"]):  # measured for their choice of kernels
            continue
        for kernel in WORKLOADS:
            environment = run["environment"]
            plot = roofline.plot_of(kernel, environment["device"], environment.get("ceilings", {}), run["records"])
            if plot is not None:
                found.setdefault(plot_path(kernel), plot)
    return found


def _run(path: str, run: Run, digest: str) -> Iterable[str]:
    environment = run["environment"]
    ceilings = environment.get("ceilings", {})
    yield f"## {environment['device']}: {Path(path).stem}"
    yield ""
    yield from _heading(path, run, run["kernel_digest"] != digest)
    for op in dict.fromkeys(r["op"] for r in run["records"]):
        records = [r for r in run["records"] if r["op"] == op]
        yield f"### {op}"
        yield ""
        if "rows" in records[0]:
            yield from _choices(records)
            yield ""
            continue
        kernel = None if op == MODEL else roofline.kernel_of(records[0])
        if kernel and roofline.plot_of(kernel, environment["device"], ceilings, records) is not None:
            yield f"![Roofline: TFLOP/s over FLOP/byte]({plot_path(kernel).name})"
            yield ""
        yield from _table(records, ceilings)
        yield ""


def render(tree: Path) -> str:
    """The performance page for the records and kernel sources of ``tree``."""
    digest = kernel_digest(tree)
    lines = [_INTRODUCTION]
    for path, run in _runs(tree, ladder=False):
        lines += _run(path, run, digest)
    return "\n".join(lines).rstrip() + "\n"


# --- The ladder -------------------------------------------------------------------------------------------------------


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} %"


def _gemm_ladder(records: list[Mapping[str, Any]]) -> Iterable[str]:
    rows = []
    for r in records:
        flops, _ = roofline.work(r)
        rival = r["baselines"].get("cublas") or r["baselines"]["cublas_fp32"]
        profile = r["ladder"]["profile"] or {}
        rows.append([
            f"`{r['ladder']['stage']}`", r["ladder"]["idea"], _kind(r), console.microseconds(r["median_us"]), f"{flops / r['median_us'] * 1e-6:.3g}",
            _percent(100.0 * rival["median_us"] / r["median_us"]) + ("" if "cublas" in r["baselines"] else " (FP32)"), console.error(r["error"]),
            *_resources(profile),
        ])  # fmt: skip
    yield f"{console.problem(records[0]['shape'])}:"
    yield ""
    yield from _markdown_table(
        ["stage", "idea", "type", "time", "TFLOP/s", "of cuBLAS", "error", "registers", "spills"], rows
    )
    yield ""
    yield from _profiles(records)


def _softmax_ladder(records: list[Mapping[str, Any]]) -> Iterable[str]:
    problems = list(dict.fromkeys(tuple(r["shape"].items()) for r in records))
    stages = {r["ladder"]["stage"]: r["ladder"]["idea"] for r in records}
    measured = {(r["ladder"]["stage"], tuple(r["shape"].items())): r for r in records}

    def cell(stage: str, problem: tuple[tuple[str, Any], ...]) -> str:
        r = measured.get((stage, problem))
        if r is None:
            return "-"
        return f"{console.microseconds(r['median_us'])} ({_percent(100.0 * r['baselines']['copy']['median_us'] / r['median_us'])})"

    yield "Time, and the speed of a copy that is reached:"
    yield ""
    rows = [[f"`{stage}`", idea, *(cell(stage, p) for p in problems)] for stage, idea in stages.items()]
    yield from _markdown_table(["stage", "idea", *(console.problem(dict(p)) for p in problems)], rows)
    yield ""
    for p in problems:
        of_problem = [r for r in records if tuple(r["shape"].items()) == p]
        if any(r["ladder"]["profile"] for r in of_problem):
            yield f"{console.problem(dict(p))}:"
            yield ""
            yield from _profiles(of_problem, resources=True)
            yield ""


def _resources(profile: Mapping[str, Any]) -> list[str]:
    if "registers" not in profile:
        return ["", ""]
    local = profile.get("local_loads", 0.0) + profile.get("local_stores", 0.0)
    return [f"{profile['registers']:.0f}", "none" if local == 0.0 else "yes"]


def _profiles(records: list[Mapping[str, Any]], resources: bool = False) -> Iterable[str]:
    """What Nsight Compute says of each stage."""
    rows = []
    for r in records:
        profile = r["ladder"]["profile"]
        if profile is None:
            continue
        wavefronts = profile.get("shared_wavefronts")
        conflicts = profile.get("bank_conflicts", 0.0) / wavefronts if wavefronts else None
        stalls = ", ".join(
            f"{name.replace('_', ' ')} {warps:.1f}" for name, warps in profile["stalls"].items() if warps >= 0.05
        )
        loads = profile.get("sectors_per_load")
        rows.append([
            f"`{r['ladder']['stage']}`", *(_resources(profile) if resources else []), *(_percent(profile.get(key)) for key in
            ("occupancy_pct", "issue_pct", "dram_pct", "l2_pct", "l1_pct")), f"{loads:.1f}" if loads else "",
            "" if conflicts is None else _percent(100.0 * conflicts), stalls,
        ])  # fmt: skip
    if rows:
        numbers = ["occupancy", "issue", "DRAM", "L2", "L1", "sectors/load", "bank conflicts", "stalls"]
        yield from _markdown_table(["stage", *(["registers", "spills"] if resources else []), *numbers], rows)


def _errors(records: list[Mapping[str, Any]]) -> Iterable[str]:
    """Errors and biases of products, a row for each kernel and a column for each kind of inputs and depth."""

    def cell(error: float, bias: float) -> str:
        return f"{console.error(error)} ({bias:+.0e})"

    columns = list(dict.fromkeys((r["ladder"]["inputs"], r["shape"]["k"]) for r in records))
    rows: dict[str, dict[tuple[str, int], str]] = {"cuBLAS, FP32": {}}
    for r in records:
        column, rival = (r["ladder"]["inputs"], r["shape"]["k"]), r["baselines"]["cublas_fp32"]
        rows["cuBLAS, FP32"][column] = cell(rival["error"], rival["bias"])
        # What is chosen for plain float32 may change with the depth.
        name = r["ladder"]["idea"] if r["precision"] == "ieee" else f"`{r['variant']}`: {r['ladder']['idea']}"
        rows.setdefault(name, {})[column] = cell(r["error"], r["ladder"]["bias"])
    yield from _markdown_table(
        ["kernel", *(f"{inputs}, k {depth}" for inputs, depth in columns)],
        [[name, *(cells.get(c, "") for c in columns)] for name, cells in rows.items()],
    )
    yield ""


_LADDERS: dict[str, Callable[[list[Mapping[str, Any]]], Iterable[str]]] = {
    "gemm": _gemm_ladder,
    "softmax": _softmax_ladder,
    "errors": _errors,
}


def _place_of(record: Mapping[str, Any]) -> str:
    """The table of the ladder's README that a record belongs to."""
    return record["ladder"].get("table") or roofline.kernel_of(record)


_PLACE = re.compile(r"(<!-- rendered: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def render_ladder(tree: Path) -> str:
    """The ladder's README with what stands between its marks rendered from the records; the rest is written by hand."""
    digest = ladder_digest(tree)

    def fill(place: re.Match[str]) -> str:
        lines: list[str] = []
        for path, run in _runs(tree, ladder=True):
            records = [r for r in run["records"] if _place_of(r) == place[2]]
            if records:
                lines += _heading(path, run, run["ladder_digest"] != digest, device=f"{run['environment']['device']}, ")
                lines += [*_LADDERS[place[2]](records), ""]
        text = "\n".join(lines).strip() or "Not recorded yet."
        return f"{place[1]}\n{text}\n\n{place[3]}"

    return _PLACE.sub(fill, (tree / LADDER).read_text())


# --- All of it --------------------------------------------------------------------------------------------------------


def pages(tree: Path) -> dict[Path, str]:
    """Path and text of every rendered page."""
    texts = {PAGE: render(tree)}
    if (tree / LADDER).is_file():
        texts[LADDER] = render_ladder(tree)
    return texts


def main() -> None:
    """Writes the documents, or with ``--check`` says whether they are what the records give."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, nargs="?", default=Path.cwd())
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if a document is not up to date"
    )
    args = parser.parse_args()
    old_pages = {path: text for path, text in pages(args.tree).items() if not _is(args.tree / path, text)}
    old_plots = {path: plot for path, plot in plots(args.tree).items() if not roofline.is_drawn(plot, args.tree / path)}
    if args.check:
        old = ", ".join(map(str, (*old_pages, *old_plots)))
        sys.exit(f"{old}: not what {RECORDS} gives; render again" if old else 0)
    try:
        texts = {**old_pages, **{path: roofline.draw(plot) for path, plot in old_plots.items()}}
    except OrtPluginsError as error:
        sys.exit(str(error))
    for path, text in texts.items():
        (args.tree / path).parent.mkdir(exist_ok=True)
        replace_atomically(args.tree / path, text)


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    main()
