"""How close a measured op comes to what its device can do: the ceilings of a record, and the roofline plot.

Matplotlib (the extra ``bench``) is needed only to draw.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import OrtPluginsError
from ..ops import find
from .records import MODEL
from .workloads import WORKLOADS

Ceilings = Mapping[str, float]
RawRecord = Mapping[str, Any]

_PRODUCTS = ("gemm", "attention")


class Limit(NamedTuple):
    """The least time a problem can take on a device, and which ceiling sets it: ``memory`` or ``arithmetic``."""

    microseconds: float
    by: str


def kernel_of(record: RawRecord) -> str:
    """``gemm`` for ``FusedGemm``."""
    return find(record["op"]).kernel


def work(record: RawRecord) -> tuple[float, float]:
    """The least FLOP and bytes that the problem takes."""
    workload, size = WORKLOADS[kernel_of(record)], 4 if record["dtype"] == "float32" else 2
    return workload.flops(record["shape"]), workload.bytes(record["shape"], size)


def arithmetic(record: RawRecord) -> str:
    """The arithmetic of a record: ``FP32``, ``TF32``, ``FP16`` or ``FP16x3``. Only products use tensor cores."""
    if kernel_of(record) not in _PRODUCTS:
        return "FP32"
    if record["dtype"] != "float32":
        return "FP16"
    return {"tf32": "TF32", "tf32x3": "FP16x3"}.get(record["precision"], "FP32")


def arithmetic_ceiling(name: str, ceilings: Ceilings) -> float | None:
    """TFLOP/s of an arithmetic. A product as three of FP16 has a third of its rate."""
    if name == "FP16x3":
        fp16 = ceilings.get("fp16_TFLOP_per_s")
        return fp16 and fp16 / 3.0
    return ceilings.get(f"{name.lower()}_TFLOP_per_s")


def limit(record: RawRecord, ceilings: Ceilings) -> Limit | None:
    """None where the run's ceilings do not say."""
    if record["op"] == MODEL:
        return None
    copy, rate = ceilings.get("copy_TB_per_s"), arithmetic_ceiling(arithmetic(record), ceilings)
    if not copy or not rate:
        return None
    flops, nbytes = work(record)
    return max(Limit(nbytes / copy * 1e-6, "memory"), Limit(flops / rate * 1e-6, "arithmetic"))


def share(record: RawRecord, ceilings: Ceilings) -> str:
    """``93 % of memory``: how much of the ceiling is reached; empty where that is not known."""
    least = limit(record, ceilings)
    return "" if least is None else f"{100.0 * least.microseconds / record['median_us']:.0f} % of {least.by}"


# --- The plot ---------------------------------------------------------------------------------------------------------

_COLOURS = {"float32": "#1f77b4", "tf32x3": "#9467bd", "tf32": "#2ca02c", "float16": "#d62728", "bfloat16": "#ff7f0e"}
_DIGEST = re.compile(r"figures ([0-9a-f]{64}), Matplotlib ([\w.+-]+)")


def _series(record: RawRecord) -> str:
    precision = record["precision"]
    return record["dtype"] if precision in (None, "ieee") else precision


class Plot(NamedTuple):
    """What a plot shows: ``points`` are (series, FLOP per byte, TFLOP/s), ``roofs`` TFLOP/s by arithmetic."""

    title: str
    copy: float
    roofs: dict[str, float]
    points: list[tuple[str, float, float]]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()


def plot_of(kernel: str, device: str, ceilings: Ceilings, records: Sequence[RawRecord]) -> Plot | None:
    """The plot of an op's records on one device; None where there is nothing to draw."""
    records = [r for r in records if limit(r, ceilings) is not None and kernel_of(r) == kernel]
    if not records:
        return None
    names = sorted({arithmetic(r) for r in records})
    points = []
    for r in records:
        flops, nbytes = work(r)
        points.append((_series(r), flops / nbytes, flops / r["median_us"] * 1e-6))
    roofs = {name: float(arithmetic_ceiling(name, ceilings)) for name in names}
    return Plot(f"{find(records[0]['op']).name} on {device}", ceilings["copy_TB_per_s"], roofs, points)


def is_drawn(plot: Plot, path: Path) -> bool:
    """Whether the file shows these figures."""
    found = _DIGEST.search(path.read_text()) if path.is_file() else None
    return found is not None and found[1] == plot.digest


def drawn_by(path: Path) -> str | None:
    """The version of Matplotlib that drew the file."""
    found = _DIGEST.search(path.read_text())
    return found and found[2]


def draw(plot: Plot) -> str:
    """The plot as SVG; the same figures give the same text. OrtPluginsError without Matplotlib."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OrtPluginsError(f"plots need Matplotlib: pip install 'ortplugins[bench]' ({error})") from error

    style = {**matplotlib.rcParamsDefault, "svg.hashsalt": "ortplugins", "svg.fonttype": "none"}
    style.pop("backend")  # setting it would switch the caller's
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.0, 5.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        intensities = [x for _, x, _ in plot.points]
        left, right = min(intensities) / 2.0, max(2.0 * max(intensities), 2.0 * max(plot.roofs.values()) / plot.copy)
        for name, roof in plot.roofs.items():
            knee = roof / plot.copy
            xs, ys = (
                ([left, knee, right], [left * plot.copy, roof, roof]) if knee > left else ([left, right], [roof, roof])
            )
            axes.plot(xs, ys, color="0.35", linewidth=1.0)
            axes.annotate(
                f"{name} {roof:.3g} TFLOP/s", (right, roof), ha="right", va="bottom", fontsize=8, color="0.35"
            )
        beside = {"xytext": (8, -2), "textcoords": "offset points", "ha": "left", "va": "center"}
        axes.annotate(f"copy {plot.copy:.3g} TB/s", (left, left * plot.copy), **beside, fontsize=8, color="0.35")
        for series in dict.fromkeys(s for s, _, _ in plot.points):
            xs, ys = zip(*((x, y) for s, x, y in plot.points if s == series))
            marker = "+" if series == "bfloat16" else "o"  # it lies on float16
            axes.plot(xs, ys, marker, markersize=5, markerfacecolor="none", color=_COLOURS[series], label=series)
        axes.set(
            xscale="log", yscale="log", title=plot.title, xlabel="arithmetic intensity, FLOP/byte", ylabel="TFLOP/s"
        )
        axes.grid(True, which="major", color="0.9")
        axes.legend(loc="lower right", fontsize=8)
        buffer = io.StringIO()
        about = f"figures {plot.digest}, Matplotlib {matplotlib.__version__}"
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Description": about})
    return buffer.getvalue()
