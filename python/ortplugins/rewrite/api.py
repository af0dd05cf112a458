"""`rewrite`: the entry point."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from ..errors import OrtPluginsError
from ..ops import OPS, PRECISIONS
from .engine import RULES, Progress, Rewriter
from .report import Report
from .rules import Options
from .storage import fits_inline, load_weights, save

KINDS = tuple(rule.kind for rule in RULES)


@dataclass
class RewriteResult:
    """The rewritten model and what was done to it."""

    ir_model: ir.Model
    report: Report
    path: Path | None = None

    @property
    def model(self) -> onnx.ModelProto:
        """The model as a protobuf, weights included; external ones stay where they are if they are too large."""
        proto = ir.to_proto(self.ir_model)
        if fits_inline(self.ir_model):
            load_weights(proto, self.ir_model)
        return proto


def rewrite(
    model_or_path: onnx.ModelProto | ir.Model | str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] = (),
    keep: Iterable[str] = (),
    precision: str | Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> RewriteResult:
    """Replaces attention, linear chains, norms and Softmax by the operators of the domain ``ortplugins``.

    Args:
        model_or_path: The model, which is not changed, or the file that holds it.
        output: File to write. It is replaced only when the new one is complete. Weights go to ``<output>.data`` beside
            it when the source keeps them in external files or the model is larger than a protobuf can be.
        only: Kinds of site to rewrite: ``attention``, ``linear``, ``layer_norm``, ``softmax``. All when absent.
        skip: Kinds of site to leave alone.
        keep: Names of nodes that must not be replaced; a site that has one is skipped. A node without a name goes by
            that of its first output.
        precision: Arithmetic of float32 products on CUDA, ``ieee`` (the default), ``tf32x3`` or ``tf32``; for all
            operators, or by operator, as ``{"FusedGemm": "tf32x3"}`` or ``{"gemm": "tf32x3"}``.
        progress: Called with (done, total) while the file is written.

    Returns:
        The result: ``.model`` and ``.report``, which lists every candidate site.

    Raises:
        ValueError: an argument names a kind, a precision or an operator that does not exist.
        FileNotFoundError: there is no such file.
        OrtPluginsError: the file holds no ONNX model, or ``keep`` names a node that it does not have.
    """
    start = time.perf_counter()
    options = Options(_precisions(precision))
    only_kinds = None if only is None else _kinds(only, "only")
    skip_kinds = _kinds(skip, "skip")
    if isinstance(model_or_path, onnx.ModelProto):
        copy = onnx.ModelProto()
        copy.CopyFrom(model_or_path)
        model = ir.from_proto(copy)
    elif isinstance(model_or_path, ir.Model):
        model = model_or_path.clone()
    else:
        path = Path(model_or_path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        model = _load(path)
    rewriter = Rewriter(model, only=only_kinds, skip=skip_kinds, keep=keep, options=options)
    with _no_collection():
        report = rewriter.run()
    result = RewriteResult(model, report)
    if output is not None:
        result.path = Path(output)
        save(model, result.path, progress)
    report.seconds = time.perf_counter() - start
    report.peak_memory = _peak_memory()
    return result


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage collection walks the whole graph again and again and finds nothing: a quarter of the time for 20,000
    nodes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    # getrusage would count the process that started this one: Linux carries its peak over an exec.
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _load(path: Path) -> ir.Model:
    try:
        model = ir.load(path)
    except Exception as error:
        raise OrtPluginsError(f"{path} cannot be read as an ONNX model: {error}") from error
    if not model.graph.outputs:
        raise OrtPluginsError(f"{path} is not an ONNX model: it holds no graph with outputs")
    return model


def _kinds(wanted: str | Iterable[str], argument: str) -> tuple[str, ...]:
    kinds = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"{argument}={kind!r}: expected one of {', '.join(KINDS)}")
    return kinds


def _precisions(precision: str | Mapping[str, str] | None) -> dict[str, str]:
    takes = {op.kernel: op.name for op in OPS if any(a.name == "precision" for a in op.attrs)}
    if precision is None:
        return {}
    given = dict.fromkeys(takes, precision) if isinstance(precision, str) else dict(precision)
    chosen = {takes.get(op, op): value for op, value in given.items()}
    for op, value in chosen.items():
        if op not in takes.values():
            raise ValueError(f"precision: {op!r} takes none; expected one of {', '.join(takes)}")
        if value not in PRECISIONS:
            raise ValueError(f"precision={value!r}: expected one of {', '.join(PRECISIONS)}")
    return chosen
