"""Whole models: the graph as exported, ONNX Runtime's own transformers optimizer, and ours, in sessions.

On CUDA the model is BERT-base with random weights, exported by PyTorch (which needs PyTorch and transformers) and
converted to float16 by ONNX Runtime's tool; on the CPU it is the demo's. Every session has all of ONNX Runtime's own graph optimisations. A run is
timed with inputs and outputs bound to the provider's memory, from the call until the device is done, all contenders
in alternation; with CUDA graphs the same run is a replay. The rows of a batch are padded to different lengths.

Outputs are checked before anything is timed: against float64, ours may have at most twice the error of the stock
graph (and eight units in the last place of the largest value).
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from .. import demo, native, timing
from ..compare import FLOOR_ULPS, IMPLAUSIBLE, STATED_BOUND
from ..doctor import driver_version
from ..errors import OrtPluginsError
from ..inputs import Feeds, make_inputs
from ..ops import DOMAIN
from ..reference import Float64Model
from ..register import import_onnxruntime
from ..rewrite import rewrite
from ..session import DeviceCall, GraphCall, load_model, make_session
from .records import MODEL, Record, cpu_name, environment

MIN_SECONDS = 0.5
SHAPES = ((1, 128), (8, 128), (8, 512), (32, 512))
"""(batch, sequence) on CUDA."""

_LAYERS, _HEADS, _HIDDEN, _VOCABULARY = 12, 12, 768, 30522
_INPUTS = ["input_ids", "attention_mask", "token_type_ids"]
_OUTPUTS = ["last_hidden_state", "pooler_output"]

Progress = Callable[[str, float], None]


@dataclass
class Contender:
    """A model in a session. ``baseline`` is its name in records, None for ours; ``precision`` is that of ours."""

    session: Any
    baseline: str | None
    precision: str | None = None
    model: onnx.ModelProto | None = None
    can_capture: bool = False
    errors: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The model's ops of ours, and how many nodes it has in all that do more than name a constant."""
        nodes = [n for n in self.model.graph.node if n.op_type not in ("Constant", "Identity")]
        ours = Counter(n.op_type for n in nodes if n.domain == DOMAIN)
        return ", ".join(f"{count} {op}" for op, count in sorted(ours.items())) + f" of {len(nodes)} nodes"


class Bert:
    """BERT-base with random weights, its exports, and its outputs in float64. ``layers`` fewer make a quick check."""

    def __init__(self, layers: int = _LAYERS):
        try:
            import torch
            from transformers import BertConfig, BertModel
        except ImportError as error:
            raise OrtPluginsError(f"the end-to-end benchmark exports its model with PyTorch: {error}") from error
        torch.manual_seed(0)
        config = BertConfig(
            num_hidden_layers=layers,
            num_attention_heads=_HEADS,
            hidden_size=_HIDDEN,
            vocab_size=_VOCABULARY,
            attn_implementation="sdpa",
        )
        self._torch = torch
        self._model = BertModel(config).eval()
        for name, weight in self._model.named_parameters():  # as a trained model has them: no two equal, no zeros
            if weight.dim() == 1:
                torch.nn.init.normal_(weight, mean=float(name.endswith("LayerNorm.weight")), std=0.1)

    def export(self, path: Path, attention: str) -> None:
        """Writes the model in float32 with dynamic batch and sequence; ``attention`` is torch's implementation."""
        torch, model = self._torch, self._model
        model.set_attn_implementation(attention)
        ids = torch.randint(5, _VOCABULARY, (2, 16))
        mask = (torch.arange(16) < torch.tensor([[16], [10]])).long()
        axes = {name: {0: "batch", 1: "sequence"} for name in (*_INPUTS, _OUTPUTS[0])} | {_OUTPUTS[1]: {0: "batch"}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _Positional(torch, model),
                (ids, mask, torch.zeros_like(ids)),
                path,
                dynamo=False,
                opset_version=17,
                input_names=_INPUTS,
                output_names=_OUTPUTS,
                dynamic_axes=axes,
            )

    def reference(self, feeds: Feeds, dtype: str) -> list[np.ndarray]:
        """The outputs in float64, of weights rounded to ``dtype``."""
        torch = self._torch
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = self._model.to(getattr(torch, dtype)).to(device, torch.float64)
        with torch.no_grad():
            out = model(**{name: torch.from_numpy(value).to(device) for name, value in feeds.items()})
        return [out.last_hidden_state.cpu().numpy(), out.pooler_output.cpu().numpy()]


def _Positional(torch: Any, model: Any) -> Any:
    """The exporter gives inputs by position, and wants a tuple."""

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask, token_type_ids):  # noqa: ANN001, ANN202
            out = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
            return out.last_hidden_state, out.pooler_output

    return Positional().eval()  # the exporter puts the model back into the mode of the outermost module


def _optimize(layers: int, folder: Path) -> None:
    """Writes what ONNX Runtime's transformers optimizer makes of the model.

    It recognises attention in the eager form only: it is given that.
    """
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    Bert(layers).export(folder / "eager.onnx", "eager")
    result = optimizer.optimize_model(
        str(folder / "eager.onnx"),
        model_type="bert",
        num_heads=_HEADS,
        hidden_size=_HIDDEN,
        use_gpu=True,
        opt_level=0,
        optimization_options=FusionOptions("bert"),
    )
    onnx.save(result.model, folder / "optimized.float32.onnx")


def _to_float16(source: Path, target: Path) -> None:
    """A float32 model in float16, by ONNX Runtime's tool: the exporter's own float16 graphs do not load everywhere."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    # ONNX's shape inference does not know the optimizer's operators; it is only needed for types that stay.
    model = convert_float_to_float16(onnx.load(source), keep_io_types=False, disable_shape_infer=True)
    onnx.save(model, target)


def _session(model: onnx.ModelProto | Path) -> tuple[Any, bool]:
    """A session on CUDA, and whether its runs can be captured into CUDA graphs."""
    try:
        return make_session(model, provider="cuda", provider_options={"enable_cuda_graph": "1"}), True
    except OrtPluginsError:  # some node of the graph does not run on the device, or copies from the host
        return make_session(model, provider="cuda"), False


def _feeds(batch: int, sequence: int) -> Feeds:
    rng = np.random.default_rng(batch * sequence)
    ids = rng.integers(5, _VOCABULARY, (batch, sequence))
    lengths = np.linspace(sequence, sequence // 2, batch).astype(np.int64)
    mask = (np.arange(sequence) < lengths[:, None]).astype(np.int64)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def _error(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    return max(float(np.max(np.abs(a.astype(np.float64) - e))) for a, e in zip(actual, expected))


def _check(
    contenders: Sequence[Contender], dtype: str, shape: tuple[int, int], feeds: Feeds, expected: Sequence[np.ndarray]
) -> None:
    """Notes the errors of all; OrtPluginsError if ours is out of its bound."""
    options = import_onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", "-1")  # no capture: the inputs lie elsewhere in every run
    for contender in contenders:
        outputs = contender.session.run(None, feeds, options)
        contender.errors[shape] = _error(outputs, expected)
    stock = next(c for c in contenders if c.baseline == "ort")
    largest = max(float(np.max(np.abs(e))) for e in expected)
    if not stock.errors[shape] <= IMPLAUSIBLE * STATED_BOUND[dtype] * largest:
        raise OrtPluginsError(f"the stock graph is off by {stock.errors[shape]:.3g} at {shape}: the float64 run is of another")
    bound = 2.0 * stock.errors[shape] + FLOOR_ULPS * float(np.finfo(dtype).eps) * largest
    for contender in contenders:
        if contender.baseline is None and not contender.errors[shape] <= bound:  # NaN is an error
            raise OrtPluginsError(
                f"the rewritten model ({contender.precision or dtype}) is off by {contender.errors[shape]:.3g} at {shape}, "
                f"more than {bound:.3g}; the stock model is off by {stock.errors[shape]:.3g}"
            )


def _records(
    name: str,
    dtype: str,
    shape: tuple[int, int],
    calls: Sequence[tuple[Contender, bool, Callable[[], object]]],
    min_seconds: float,
) -> list[Record]:
    """Times ``calls``, each a contender with or without its CUDA graph, and makes a record for each of ours."""
    rounds = timing.alternate([call for _, _, call in calls], min_rounds=5, min_seconds=min_seconds)
    records = []
    for i, (ours, graph, _) in enumerate(calls):
        if ours.baseline is not None:
            continue
        measured = rounds.timing(i)
        sizes = {"model": name, "batch": shape[0], "sequence": shape[1], "cuda_graph": graph}
        record = Record(
            MODEL, sizes, dtype, ours.precision, ours.summary, measured.median_us, measured.spread_us, ours.errors[shape]
        )
        for j, (rival, same, _) in enumerate(calls):
            if rival.baseline is not None and same == graph:
                record.add_baseline(rival.baseline, rounds.timing(j))
        # What a user has who changes nothing: the stock graph without a CUDA graph.
        if graph:
            stock = next(j for j, (r, same, _) in enumerate(calls) if r.baseline == "ort" and not same)
            record.add_baseline("ort_no_graph", rounds.timing(stock))
        records.append(record)
    return records


def _contenders_cuda(folder: Path, dtype: str) -> list[Contender]:
    path = folder / f"{dtype}.onnx"
    contenders = []
    for source, baseline in ((path, "ort"), (folder / f"optimized.{dtype}.onnx", "ort_optimizer")):
        session, can_capture = _session(source)
        contenders.append(Contender(session, baseline, can_capture=can_capture))
    for precision in ("tf32x3", "ieee") if dtype == "float32" else (None,):
        model = rewrite(path, precision=precision).model
        session, can_capture = _session(model)
        contenders.append(Contender(session, None, precision, model, can_capture))
    return contenders


def _run_cuda(min_seconds: float, layers: int, shapes: Sequence[tuple[int, int]], progress: Progress) -> list[Record]:
    records = []
    # Making the models takes longer than measuring them: the optimizer and its conversion have a process of their own.
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(1, get_context("spawn")) as process:
        progress("making the models", 0.0)
        folder = Path(name)
        optimizing = process.submit(_optimize, layers, folder)
        converting = process.submit(_to_float16, folder / "optimized.float32.onnx", folder / "optimized.float16.onnx")
        bert = Bert(layers)
        bert.export(folder / "float32.onnx", "sdpa")
        _to_float16(folder / "float32.onnx", folder / "float16.onnx")
        optimizing.result()
        for i, dtype in enumerate(("float32", "float16")):  # in this order: the second rounds the weights
            progress(f"{dtype}: starting sessions", i / 2)
            contenders = _contenders_cuda(folder, dtype)
            converting.result()  # nothing else may run while something is timed
            for j, shape in enumerate(shapes):
                progress(f"{dtype} {shape[0]}x{shape[1]}", (i + (j + 1) / (len(shapes) + 1)) / 2)
                feeds = _feeds(*shape)
                expected = bert.reference(feeds, dtype)
                _check(contenders, dtype, shape, feeds, expected)
                outputs = dict(zip(_OUTPUTS, (e.shape for e in expected)))
                calls: list[tuple[Contender, bool, Callable[[], object]]] = []
                for contender in contenders:
                    for graph in (False, True) if contender.can_capture else (False,):
                        run = GraphCall(contender.session, feeds, outputs, dtype, j + 1 if graph else -1)
                        calls.append((contender, graph, run))
                records += _records("bert-base", dtype, shape, calls, min_seconds)
            del contenders
    return records


def _run_cpu(
    min_seconds: float, threads: int, shapes: Sequence[tuple[int, int]], progress: Progress
) -> list[Record]:
    path = demo.find_model()
    original = load_model(path)
    rewritten = rewrite(path).model
    contenders = [
        Contender(make_session(path, threads=threads), "ort"),
        Contender(make_session(rewritten, threads=threads), None, None, rewritten),
    ]
    names = [o.name for o in original.graph.output]
    exact = Float64Model(original)
    records = []
    for i, shape in enumerate(shapes):
        progress(f"float32 {shape[0]}x{shape[1]}", i / len(shapes))
        feeds = make_inputs(original, batch=shape[0], length=shape[1])
        expected = exact(feeds)
        _check(contenders, "float32", shape, feeds, [expected[n] for n in names])
        calls = [(c, False, DeviceCall(c.session, feeds, "cpu")) for c in contenders]
        records += _records(path.stem, "float32", shape, calls, min_seconds)
    return records


def run(
    provider: str,
    *,
    threads: int = 2,
    min_seconds: float = MIN_SECONDS,
    command: str = "",
    layers: int = _LAYERS,
    shapes: Sequence[tuple[int, int]] | None = None,
    progress: Progress = lambda what, fraction: None,
) -> tuple[dict[str, Any], list[Record]]:
    """Measures the model on ``provider`` and returns the environment and the records.

    ``min_seconds`` is the least time for each shape and type, ``layers`` and ``shapes`` make it smaller.
    """
    if provider == "cpu":
        records = _run_cpu(min_seconds, threads, shapes or demo.SHAPES, progress)
        return environment(cpu_name(), command, threads=threads, cpu_isa=native.cpu_isa()), records
    import torch

    records = _run_cuda(min_seconds, layers, shapes or SHAPES, progress)
    facts = environment(torch.cuda.get_device_name(0), command, driver=driver_version(), torch=torch.__version__)
    return facts, records
