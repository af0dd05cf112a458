"""Comparing a model with its rewritten form: the same inputs, errors against float64, latency in alternation.

Both models run in ONNX Runtime through Polygraphy's runners; Polygraphy's comparator gives the verdict for every
output.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from . import timing
from .errors import OrtPluginsError
from .files import replace_atomically
from .inputs import Feeds, make_inputs
from .reference import Float64Model, NoReferenceError
from .register import import_onnxruntime
from .rewrite import rewrite
from .session import DeviceCall, describe, load_model, make_session, one_line

Model = onnx.ModelProto | str | os.PathLike[str]
Progress = Callable[[str, float], None]
"""Told what is being done and which fraction of the whole is done."""

STATED_BOUND = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference from the original allowed where there is no float64 reference, relative to the output's largest
value, by the output's dtype."""

# A float64 reference that the original itself misses by this many times the stated bound is no reference: the evaluator
# reads the graph differently, or the graph turns a rounding into a step (relative-position buckets).
IMPLAUSIBLE = 50.0

# Errors are maxima over few elements, so that one side may be exact by luck: this many units in the last place of the
# largest value are granted in any case.
FLOOR_ULPS = 8.0


@dataclass
class OutputComparison:
    """One output on one set of inputs. Errors are largest absolute differences; None where there is nothing to compare.

    ``error_original`` and ``error_rewritten`` are against ``reference`` (``float64``, or None when there is none), and
    ``difference`` is between the two models. ``bound`` limits ``error_rewritten``, or ``difference`` without a
    reference.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    difference: float | None
    error_original: float | None
    error_rewritten: float | None
    reference: str | None
    bound: float
    passed: bool
    reason: str | None = None


@dataclass
class CaseComparison:
    """All outputs on one set of inputs, with the inputs' shapes."""

    inputs: dict[str, tuple[int, ...]]
    outputs: list[OutputComparison]
    no_reference: str | None = None


@dataclass
class Latency:
    """Latency of both models, in alternation, on the inputs of the last case."""

    inputs: dict[str, tuple[int, ...]]
    original: timing.Timing
    rewritten: timing.Timing
    ratio: float
    verdict: str
    measured: str


@dataclass
class Comparison:
    """What :func:`compare` found. ``passed`` is the verdict on the outputs; latency does not enter it."""

    original: str
    rewritten: str
    provider: str
    onnxruntime: str
    cases: list[CaseComparison] = field(default_factory=list)
    layers: list[OutputComparison] = field(default_factory=list)
    latency: Latency | None = None
    rewrite_report: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        """Whether every output of every case is within its bound."""
        return bool(self.cases) and all(o.passed for case in self.cases for o in case.outputs)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {"passed": self.passed, **asdict(self)}


def compare(
    original: Model,
    rewritten: Model | None = None,
    *,
    provider: str = "cpu",
    inputs: Feeds | Sequence[Feeds] | None = None,
    sizes: Mapping[str, int] | None = None,
    batch: int | None = None,
    length: int | None = None,
    atol: float | None = None,
    layers: bool = False,
    latency: bool = True,
    min_seconds: float = 2.0,
    threads: int | None = None,
    library: str | os.PathLike[str] | None = None,
    report: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Run ``original`` and ``rewritten`` on the same inputs and compare outputs and latency.

    Args:
        original: a model or its path.
        rewritten: its rewritten form; made with :func:`ortplugins.rewrite` when it is None.
        provider: ``cpu`` or ``cuda``; both models run on it (TF32 off).
        inputs: one set of inputs by name, or several. By default they are made from the graph: token ids inside the
            vocabulary, padded masks (see :func:`ortplugins.inputs.make_inputs`).
        sizes, batch, length: sizes of symbolic dimensions, when inputs are made. Without any, two shapes are tried.
        atol: largest absolute difference allowed between the two models. By default the bound comes from float64: the
            rewritten model may have at most twice the original's error plus eight units in the last place of the
            output's largest value. Where the graph has no float64 reference, ``STATED_BOUND`` limits the difference.
        layers: also compare every intermediate tensor that both graphs have (``Comparison.layers``).
        latency: also measure both models, in alternation, for at least ``min_seconds``.
        threads: threads of the CPU provider; ONNX Runtime's default when None.
        library: another build of the custom-op library.
        report: a file for the result as JSON.
        seed: of the inputs made.
        progress: told what is being done.

    Outputs with NaN never pass: what cannot be compared is not equal.

    Raises OrtPluginsError when a model cannot be read or run, or the two do not have the same inputs and outputs.
    """
    say = progress or (lambda what, fraction: None)
    with tempfile.TemporaryDirectory(prefix="ortplugins-") as scratch:
        rewrite_report = None
        if rewritten is None:
            say("rewriting", 0.0)
            rewritten = Path(scratch) / f"{Path(describe(original)).stem}.rewritten.onnx"
            rewrite_report = rewrite(original, output=rewritten).report.to_dict()
        comparison = _compare(
            original,
            rewritten,
            provider=provider,
            inputs=inputs,
            sizes=sizes,
            batch=batch,
            length=length,
            atol=atol,
            layers=layers,
            latency=latency,
            min_seconds=min_seconds,
            threads=threads,
            library=library,
            seed=seed,
            say=say,
        )
    comparison.rewrite_report = rewrite_report
    if rewrite_report is not None:
        comparison.rewritten = "its rewritten form"
    if report is not None:
        replace_atomically(report, json.dumps(comparison.to_dict(), indent=2) + "\n")
    return comparison


def _compare(
    original: Model,
    rewritten: Model,
    *,
    provider: str,
    inputs: Feeds | Sequence[Feeds] | None,
    sizes: Mapping[str, int] | None,
    batch: int | None,
    length: int | None,
    atol: float | None,
    layers: bool,
    latency: bool,
    min_seconds: float,
    threads: int | None,
    library: str | os.PathLike[str] | None,
    seed: int,
    say: Progress,
) -> Comparison:
    say("reading models", 0.05)
    stock_proto, ours_proto = (load_model(m, load_external_data=False) for m in (original, rewritten))
    _check_interfaces(stock_proto, ours_proto)
    feeds = _input_sets(stock_proto, inputs, sizes, batch, length, seed)

    say("creating sessions", 0.1)
    stock = make_session(original, provider=provider, threads=threads)
    ours = make_session(rewritten, provider=provider, threads=threads, library=library)
    comparison = Comparison(describe(original), describe(rewritten), provider, import_onnxruntime().__version__)
    reference = _Reference(original)
    for i, case in enumerate(feeds):
        say(f"comparing outputs, inputs {i + 1} of {len(feeds)}", 0.2 + 0.3 * i / len(feeds))
        comparison.cases.append(_compare_case(stock, ours, case, reference, atol))
    if layers:
        say("comparing layers", 0.5)
        comparison.layers = _compare_layers(
            load_model(original), load_model(rewritten), feeds[-1], provider, threads, library, atol
        )
    if latency:
        comparison.latency = _measure(
            stock, ours, feeds[-1], provider, min_seconds, lambda f: say("measuring latency", 0.6 + 0.4 * f)
        )
    say("done", 1.0)
    return comparison


def _check_interfaces(stock: onnx.ModelProto, ours: onnx.ModelProto) -> None:
    initializers = {t.name for t in (*stock.graph.initializer, *ours.graph.initializer)}
    for what in ("input", "output"):
        a, b = (
            {v.name: v.type.tensor_type.elem_type for v in getattr(m.graph, what) if v.name not in initializers}
            for m in (stock, ours)
        )
        if a != b:
            differing = sorted(n for n in a.keys() | b.keys() if a.get(n) != b.get(n))
            raise OrtPluginsError(
                f"the models are not two forms of one: their {what}s differ in {', '.join(differing)}"
            )


def _input_sets(
    model: onnx.ModelProto,
    inputs: Feeds | Sequence[Feeds] | None,
    sizes: Mapping[str, int] | None,
    batch: int | None,
    length: int | None,
    seed: int,
) -> list[Feeds]:
    if inputs is not None:
        sets = [inputs] if isinstance(inputs, Mapping) else list(inputs)
        if not sets:
            raise OrtPluginsError("no inputs were given to compare on")
        return sets
    if sizes or batch is not None or length is not None:
        return [make_inputs(model, sizes, batch=batch or 2, length=length or 32, seed=seed)]
    return [make_inputs(model, batch=1, length=16, seed=seed), make_inputs(model, batch=2, length=32, seed=seed + 1)]


class _Reference:
    """The original in float64, or the reason why there is none."""

    def __init__(self, model: Model, outputs: Sequence[str] | None = None):
        self._model: Float64Model | None = None
        self.reason: str | None = None
        try:
            self._model = Float64Model(model, outputs)
        except NoReferenceError as error:
            self.reason = str(error)

    def __call__(self, feeds: Feeds) -> dict[str, np.ndarray]:
        if self._model is None:
            return {}
        try:
            return self._model(feeds)
        except NoReferenceError as error:
            self._model, self.reason = None, str(error)
            return {}


def _compare_case(stock: Any, ours: Any, feeds: Feeds, reference: _Reference, atol: float | None) -> CaseComparison:
    shapes = {name: tuple(value.shape) for name, value in feeds.items()}
    results = _run(stock, ours, feeds)
    exact = {} if atol is not None else reference(feeds)
    outputs = _judge(results, exact, atol)
    reason = None if atol is not None else reference.reason
    if exact and not any(o.reference for o in outputs) and not any(o.reason for o in outputs):
        reason = "the float64 run takes other steps than the original, which turns roundings into jumps"
    return CaseComparison(shapes, outputs, reason)


def _run(stock: Any, ours: Any, feeds: Feeds) -> Any:
    """Polygraphy's RunResults of both sessions on ``feeds``."""
    from polygraphy.backend.onnxrt import OnnxrtRunner
    from polygraphy.comparator import Comparator, RunResults
    from polygraphy.logger import G_LOGGER

    results = RunResults()
    with G_LOGGER.verbosity():
        for name, session in (("original", stock), ("rewritten", ours)):
            try:
                results.extend(Comparator.run([OnnxrtRunner(session, name=name)], data_loader=[OrderedDict(feeds)]))
            except Exception as error:
                shapes = ", ".join(f"{n} {'x'.join(map(str, v.shape))}" for n, v in feeds.items())
                raise OrtPluginsError(
                    f"the {name} model does not run on the inputs {shapes}: {one_line(error)}"
                ) from error
    return results


def _judge(results: Any, exact: Mapping[str, np.ndarray], atol: float | None) -> list[OutputComparison]:
    """Measures every output, sets its bound, and asks Polygraphy's comparator for the verdict."""
    from polygraphy.comparator import Comparator, IterationResult, RunResults, SimpleCompareFunc
    from polygraphy.logger import G_LOGGER

    stock, ours = dict(results["original"][0].items()), dict(results["rewritten"][0].items())
    comparisons = [_measure_output(name, stock[name], ours.get(name), exact.get(name), atol) for name in stock]
    # Polygraphy knows no empty arrays, and no differences of bfloat16 or bool: those go as float64.
    checked = [c for c in comparisons if c.passed and stock[c.name].size]
    if not checked:
        return comparisons
    # One side is the rewritten model, the other what its bound is about.
    sides = {
        "rewritten": {c.name: ours[c.name] for c in checked},
        "expected": {c.name: exact[c.name] if c.reference else stock[c.name] for c in checked},
    }
    runs = RunResults()
    for name, outputs in sides.items():
        doubles = OrderedDict((n, v.astype(np.float64)) for n, v in outputs.items())
        runs.append((name, [IterationResult(doubles, runner_name=name)]))
    check = SimpleCompareFunc(
        atol={c.name: c.bound for c in checked}, rtol=0.0, check_error_stat="max", infinities_compare_equal=True
    )
    with G_LOGGER.verbosity(), np.errstate(all="ignore"):
        (verdicts,) = Comparator.compare_accuracy(runs, compare_func=check)[0].values()
    for c in checked:
        c.passed = bool(verdicts[0][c.name])
        if not c.passed:
            c.reason = (
                f"error {c.error_rewritten if c.reference else c.difference:.3g} is above the bound {c.bound:.3g}"
            )
    return comparisons


def _measure_output(
    name: str, stock: np.ndarray, ours: np.ndarray | None, exact: np.ndarray | None, atol: float | None
) -> OutputComparison:
    result = OutputComparison(name, stock.dtype.name, tuple(stock.shape), None, None, None, None, 0.0, True)
    if ours is None:
        result.reason = "the rewritten model has no such output"
    elif ours.shape != stock.shape or ours.dtype != stock.dtype:
        result.reason = f"the rewritten model gives {ours.dtype.name} {ours.shape}"
    if result.reason is not None:
        result.passed = False
        return result
    stock64, ours64 = stock.astype(np.float64), ours.astype(np.float64)
    nan_stock, nan_ours = int(np.isnan(stock64).sum()), int(np.isnan(ours64).sum())
    if nan_stock or nan_ours:
        result.reason = (
            f"NaN cannot be compared: {nan_stock} in the original, {nan_ours} in the rewritten model, of {stock.size}"
        )
        result.passed = False
        return result
    result.difference = _distance(ours64, stock64)
    largest = _largest(stock64)
    relative = STATED_BOUND.get(stock.dtype.name)
    if atol is not None:
        result.bound = atol
    elif relative is None:
        result.bound = 0.0  # integers and booleans
    else:
        result.bound = relative * largest
        if exact is not None and exact.shape == stock.shape:
            error = _distance(stock64, exact.astype(np.float64))
            if error <= IMPLAUSIBLE * relative * largest:
                result.reference = "float64"
                result.error_original = error
                result.error_rewritten = _distance(ours64, exact.astype(np.float64))
                result.bound = 2.0 * error + FLOOR_ULPS * float(ml_dtypes.finfo(stock.dtype).eps) * largest
    return result


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.max(np.where(a == b, 0.0, np.abs(a - b)), initial=0.0))


def _largest(a: np.ndarray) -> float:
    return float(np.max(np.abs(a[np.isfinite(a)]), initial=0.0))


def _compare_layers(
    stock: onnx.ModelProto,
    ours: onnx.ModelProto,
    feeds: Feeds,
    provider: str,
    threads: int | None,
    library: str | os.PathLike[str] | None,
    atol: float | None,
) -> list[OutputComparison]:
    """Compares every tensor of the top-level graphs that both have, in graph order."""
    from polygraphy.backend.onnx import ModifyOutputs
    from polygraphy.logger import G_LOGGER

    def produced(model: onnx.ModelProto) -> list[str]:
        return [name for node in model.graph.node if node.op_type != "Constant" for name in node.output if name]

    in_ours = set(produced(ours))
    names = [name for name in produced(stock) if name in in_ours]
    with G_LOGGER.verbosity():
        marked = [ModifyOutputs(m, outputs=names, copy=True)() for m in (stock, ours)]
    sessions = [
        make_session(marked[0], provider=provider, threads=threads),
        make_session(marked[1], provider=provider, threads=threads, library=library),
    ]
    exact = {} if atol is not None else _Reference(stock, names)(feeds)
    return _judge(_run(*sessions, feeds), exact, atol)


def _measure(
    stock: Any, ours: Any, feeds: Feeds, provider: str, min_seconds: float, progress: Callable[[float], None]
) -> Latency:
    calls = [DeviceCall(session, feeds, provider) for session in (stock, ours)]
    rounds = timing.alternate(calls, min_seconds=min_seconds, progress=progress)
    shapes = {name: tuple(value.shape) for name, value in feeds.items()}
    return Latency(shapes, rounds.timing(0), rounds.timing(1), rounds.ratio(), rounds.verdict(), DeviceCall.MEASURED)
