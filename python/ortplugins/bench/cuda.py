"""Benchmarks on a GPU, against PyTorch, cuBLAS and ONNX Runtime's own kernels. Needs PyTorch.

Every rival is timed by the same method, in alternation. The calls of a rival are captured into one CUDA graph that
walks over several sets of buffers, together larger than twice the L2 cache, so that no call finds its data in the cache
and no launch overhead is counted; the time of a call is the graph's, between two events, divided by its calls. ONNX
Runtime sessions cannot be captured together with others: they are queued on the same stream one after the other, so
that their launch overhead is hidden only where the kernels take longer than the launches. ``ort_mha`` is therefore
measured, and compared with ours, as many nodes in one session (see ``chains``).

The result of our op is checked against float64 before it is timed.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import native
from ..doctor import driver_version
from ..errors import OrtPluginsError
from ..register import import_onnxruntime
from ..session import make_session
from ..timing import Rounds, Timing
from .chains import chains
from .records import IN_SESSION, ChoiceRecord, Record, environment
from .workloads import WORKLOADS, key_lengths

try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    raise OrtPluginsError(f"benchmarks on CUDA need PyTorch for their rivals: {error}") from error

Tensors = list["torch.Tensor | None"]
Call = Callable[[], object]

HALF_TYPES = ("float16", "bfloat16")
MIN_SECONDS = 0.2
_GRAPH_SECONDS = 4e-3  # long enough that what starting a graph costs, some 10 us, is lost in it
_MAX_BYTES = 24 << 30


@dataclass(frozen=True)
class Job:
    """One row of the results: a problem in one dtype and, for float32 products, one precision."""

    name: str
    problem: dict[str, Any]
    dtype: str
    precision: str | None = None

    @property
    def label(self) -> str:
        return " ".join(map(str, (self.name, *self.problem.values(), self.precision or self.dtype)))


# --- Each op: its problems, inputs, float64 reference and rivals ------------------------------------------------------


def _all_types(name: str, problems: Sequence[dict[str, Any]]) -> list[Job]:
    return [Job(name, p, dtype) for p in problems for dtype in ("float32", *HALF_TYPES)]


def _copy(out: torch.Tensor, x: torch.Tensor) -> object:
    """The fastest copy on the device. In a CUDA graph the driver leaves large ones to a copy engine: on an H200 512 MB go
    at 2.7 TB/s, where a kernel, and the driver outside of a graph, reach 4.2; 128 MB go at 4.1 either way.
    """
    return out.copy_(x) if x.nbytes <= 128 << 20 else torch.neg(x, out=out)


class Softmax:
    """Rows of every length class, from a warp to many blocks a row; of odd lengths 64 MiB or more in every type."""

    SHAPES = (
        (16384, 128),
        (16384, 1024),
        (8192, 4096),
        (2048, 32768),
        (64, 131072),
        (1, 1048576),
        (65536, 1000),
        (32768, 1536),
        (16384, 3000),
        (8192, 5000),
        (4096, 12345),
        (1024, 50257),
        (512, 151936),
    )

    @classmethod
    def jobs(cls) -> list[Job]:
        return _all_types("softmax", [{"rows": r, "cols": c} for r, c in cls.SHAPES])

    @staticmethod
    def inputs(job: Job, dtype: torch.dtype) -> Tensors:
        return [torch.randn(job.problem["rows"], job.problem["cols"], device="cuda", dtype=dtype)]

    @staticmethod
    def attrs(job: Job) -> dict[str, Any]:
        return {}

    @staticmethod
    def reference(job: Job, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor | float]:
        return torch.softmax(inputs[0].double(), -1), 1.0

    @staticmethod
    def rivals(job: Job, inputs: Tensors, out: torch.Tensor) -> dict[str, Call]:
        x = inputs[0]
        return {"copy": lambda: _copy(out, x), "torch": lambda: torch.softmax(x, -1, out=out)}


class LayerNorm:
    """Plain layer normalisation, and with a residual in front."""

    @classmethod
    def jobs(cls) -> list[Job]:
        shapes = ((16384, 768), (16384, 4096), (4096, 12288))
        return _all_types(
            "layer_norm", [{"rows": r, "cols": c, **extra} for extra in ({}, {"residual": True}) for r, c in shapes]
        )

    @staticmethod
    def inputs(job: Job, dtype: torch.dtype) -> Tensors:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=dtype)

        rows, cols = job.problem["rows"], job.problem["cols"]
        return [randn(rows, cols), randn(rows, cols) if job.problem.get("residual") else None, randn(cols), randn(cols)]

    @staticmethod
    def attrs(job: Job) -> dict[str, Any]:
        return {}

    @staticmethod
    def reference(job: Job, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor | float]:
        x, residual, gamma, beta = inputs
        s = x if residual is None else x + residual  # rounded to the type, as the op defines it
        return F.layer_norm(s.double(), s.shape[-1:], gamma.double(), beta.double()), 1.0

    @staticmethod
    def rivals(job: Job, inputs: Tensors, out: torch.Tensor) -> dict[str, Call]:
        x, residual, gamma, beta = inputs
        if residual is None:
            return {"copy": lambda: _copy(out, x), "torch": lambda: F.layer_norm(x, x.shape[-1:], gamma, beta)}
        return {"copy": lambda: _copy(out, x), "torch": lambda: F.layer_norm(x + residual, x.shape[-1:], gamma, beta)}


class Gemm:
    """Square problems without an epilogue; the linear layers of BERT with one; thin and many small ones."""

    CUBES = (1024, 2048, 4096, 8192)
    LAYERS = tuple(
        (m, n, k) for m in (128, 1024, 4096, 16384) for n, k in ((768, 768), (2304, 768), (3072, 768), (768, 3072))
    )
    THIN = tuple((m, n, k) for m in (1, 4, 8, 16) for n, k in ((4096, 4096), (11008, 4096)))

    @classmethod
    def jobs(cls) -> list[Job]:
        plain = [{"m": s, "n": s, "k": s} for s in cls.CUBES] + [dict(zip("mnk", s)) for s in cls.THIN]
        plain.append({"m": 64, "n": 64, "k": 64, "batch": 4096})
        fused = [dict(zip("mnk", s), epilogue="bias_gelu") for s in cls.LAYERS]
        modes = [("float32", p) for p in ("ieee", "tf32x3", "tf32")] + [(t, None) for t in HALF_TYPES]
        return [Job("gemm", problem, dtype, precision) for problem in plain + fused for dtype, precision in modes]

    @staticmethod
    def inputs(job: Job, dtype: torch.dtype) -> Tensors:
        p = job.problem
        batch = (p["batch"],) if "batch" in p else ()
        a = torch.randn(*batch, p["m"], p["k"], device="cuda", dtype=dtype)
        b = torch.randn(*batch, p["k"], p["n"], device="cuda", dtype=dtype) / math.sqrt(p["k"])
        return [a, b, torch.randn(p["n"], device="cuda", dtype=dtype)] if "epilogue" in p else [a, b]

    @staticmethod
    def attrs(job: Job) -> dict[str, Any]:
        attrs = {"activation": "gelu"} if "epilogue" in job.problem else {}
        return attrs | ({"precision": job.precision} if job.precision else {})

    @staticmethod
    def reference(job: Job, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor | float]:
        a, b = inputs[0].double(), inputs[1].double()
        product = a @ b
        y = F.gelu(product + inputs[2].double()) if len(inputs) > 2 else product
        return y, a.abs() @ b.abs()

    @staticmethod
    def rivals(job: Job, inputs: Tensors, out: torch.Tensor) -> dict[str, Call]:
        a, b = inputs[0], inputs[1]

        def with_tf32(allowed: bool, call: Call) -> Call:
            def run() -> object:
                torch.backends.cuda.matmul.allow_tf32 = allowed
                return call()

            return run

        if len(inputs) > 2:
            bias = inputs[2]
            return {"cublaslt_plus_op": with_tf32(job.precision == "tf32", lambda: F.gelu(torch.addmm(bias, a, b)))}
        rivals = {"cublas": with_tf32(job.precision == "tf32", lambda: torch.matmul(a, b, out=out))}
        if job.precision in ("tf32x3", "tf32"):
            rivals["cublas_fp32"] = with_tf32(False, lambda: torch.matmul(a, b, out=out))
        return rivals if job.precision != "tf32x3" else {"cublas_fp32": rivals["cublas_fp32"]}


class Attention:
    """Long, short, causal and decoding problems; BNSH, as PyTorch's own kernels like it."""

    SHAPES = (
        (4, 16, 2048, 128),
        (1, 16, 8192, 128),
        (4, 16, 2048, 64),
        (8, 12, 512, 64),
        (8, 12, 128, 64),
        (1, 12, 128, 64),
    )
    HEAD_DIMS = (32, 40, 72, 80, 96, 160, 192, 256)
    FLOAT32 = ((4, 16, 2048, 64), (4, 16, 2048, 128), (8, 12, 512, 64), (8, 12, 128, 64), (1, 12, 128, 64))
    CACHES = (1024, 8192, 16384, 131072)

    @classmethod
    def jobs(cls) -> list[Job]:
        def problem(batch: int, heads: int, length: int, dim: int, causal: bool = False, **more: Any) -> dict[str, Any]:
            return {
                "batch": batch,
                "heads": heads,
                "kv_heads": heads,
                "q_len": length,
                "kv_len": length,
                "head_dim": dim,
                "is_causal": causal,
                "mask": "none",
                **more,
            }

        text = (32, 12, 77, 64)  # of a text encoder
        plain = [problem(*s) for s in cls.SHAPES]
        causal = [problem(*s, True) for s in (*cls.SHAPES, text)]
        masked, masked_causal = ([{**p, "mask": m} for p in ps for m in ("padding", "bias")] for ps in (plain, causal))
        jobs = [Job("attention", p, dtype) for p in plain + causal + masked for dtype in HALF_TYPES]
        # The half types share their kernels: what differs by head size, cache and both masks is measured in one of them.
        problems = masked_causal + [problem(4, 16, 2048, d) for d in cls.HEAD_DIMS]
        problems += [problem(b, 32, 1, 128, kv_heads=8, kv_len=n) for b in (1, 16) for n in cls.CACHES]
        jobs += [Job("attention", p, "float16") for p in problems]
        return jobs + [
            Job("attention", problem(*s), "float32", precision)
            for s in cls.FLOAT32
            for precision in ("ieee", "tf32x3", "tf32")
        ]

    @staticmethod
    def inputs(job: Job, dtype: torch.dtype) -> Tensors:
        p = job.problem
        q = torch.randn(p["batch"], p["heads"], p["q_len"], p["head_dim"], device="cuda", dtype=dtype)
        k, v = (
            torch.randn(p["batch"], p["kv_heads"], p["kv_len"], p["head_dim"], device="cuda", dtype=dtype)
            for _ in range(2)
        )
        if p["mask"] == "padding":
            lengths = torch.tensor(key_lengths(p), device="cuda")
            return [q, k, v, (torch.arange(p["kv_len"], device="cuda") < lengths[:, None])[:, None, None, :]]
        if p["mask"] == "bias":
            return [q, k, v, torch.randn(1, p["heads"], p["q_len"], p["kv_len"], device="cuda", dtype=dtype)]
        return [q, k, v]

    @staticmethod
    def attrs(job: Job) -> dict[str, Any]:
        attrs = {"layout": "BNSH", "is_causal": int(job.problem["is_causal"])}
        return attrs | ({"precision": job.precision} if job.precision else {})

    @staticmethod
    def reference(job: Job, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor | float]:
        p, (q, k, v) = job.problem, inputs[:3]
        mask = inputs[3] if len(inputs) > 3 else None
        out = torch.empty_like(q, dtype=torch.float64)
        for b in range(p["batch"]):
            for h in range(p["heads"]):  # one score matrix at a time
                g = h * p["kv_heads"] // p["heads"]
                scores = q[b, h].double() @ k[b, g].double().T / math.sqrt(p["head_dim"])
                if mask is not None:
                    row = mask[b % mask.shape[0], h % mask.shape[1]]
                    scores = scores.masked_fill(~row, -math.inf) if row.dtype == torch.bool else scores + row.double()
                if p["is_causal"]:
                    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
                out[b, h] = torch.softmax(scores, -1) @ v[b, g].double()
        return out, 1.0

    @staticmethod
    def rivals(job: Job, inputs: Tensors, out: torch.Tensor) -> dict[str, Call]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = inputs[:3]
        mask = inputs[3] if len(inputs) > 3 else None
        grouped = job.problem["heads"] != job.problem["kv_heads"]
        torch.backends.cuda.matmul.allow_tf32 = job.precision == "tf32"

        def sdpa(backend: SDPBackend) -> Call:
            def run() -> object:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(
                        q, k, v, attn_mask=mask, is_causal=job.problem["is_causal"], enable_gqa=grouped
                    )

            return run

        backends = {
            "torch_flash": SDPBackend.FLASH_ATTENTION,
            "torch_cudnn": SDPBackend.CUDNN_ATTENTION,
            "torch_memeff": SDPBackend.EFFICIENT_ATTENTION,
        }
        rivals: dict[str, Call] = {name: sdpa(backend) for name, backend in backends.items()}
        if job.problem["q_len"] == 1:  # what takes time is to read k and v, as many bytes as a copy of k moves
            copied = torch.empty_like(k)
            rivals["copy"] = lambda: _copy(copied, k)
        return rivals


OPS = {"softmax": Softmax, "gemm": Gemm, "attention": Attention, "layer_norm": LayerNorm}

# --- Ours, and how everything is timed --------------------------------------------------------------------------------


def device_tensor(tensor: torch.Tensor | None) -> native.DeviceTensor | None:
    if tensor is None:
        return None
    return native.DeviceTensor(tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def our_call(op: str, inputs: Tensors, attrs: dict[str, Any], out: torch.Tensor, variant: str | None = None) -> Call:
    """One launch on the current stream; everything that can be prepared is prepared here."""
    arguments, results = [device_tensor(t) for t in inputs], [device_tensor(out)]
    nbytes = native.workspace_bytes(op, arguments, results, attrs, variant=variant, device="cuda")
    workspace = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cuda")
    return lambda: native.run(
        op,
        arguments,
        attrs,
        outputs=results,
        variant=variant,
        device="cuda",
        stream=torch.cuda.current_stream().cuda_stream,
        workspace=(workspace.data_ptr(), nbytes),
    )


class Captured:
    """Calls captured into one CUDA graph; ``seconds()`` replays it once and gives the time of one call."""

    def __init__(self, calls: Sequence[Call]):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in calls:  # libraries choose their kernels and take their workspaces now
                call()
            seconds = _between_events(lambda: [call() for call in calls])
            repeats = max(1, round(_GRAPH_SECONDS / max(seconds, 1e-6)))
            self._calls = repeats * len(calls)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream):
                for _ in range(repeats):
                    for call in calls:
                        call()
        self._kept = list(calls)  # a graph holds addresses, not the workspaces that the calls own
        self.seconds()

    def seconds(self) -> float:
        return _between_events(self._graph.replay) / self._calls


class _Queued:
    """Runs of ONNX Runtime sessions queued on one stream."""

    def __init__(self, runs: Sequence[Call], stream: torch.cuda.Stream):
        self._runs, self._stream = runs, stream
        with torch.cuda.stream(stream):
            for run in runs * 3:
                run()
            seconds = _between_events(lambda: [run() for run in runs])
        self._repeats = max(1, round(_GRAPH_SECONDS / max(seconds, 1e-6)))

    def seconds(self) -> float:
        with torch.cuda.stream(self._stream):
            total = _between_events(lambda: [run() for _ in range(self._repeats) for run in self._runs])
        return total / (self._repeats * len(self._runs))


def _between_events(work: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def _stock_session(job: Job, sets: Sequence[tuple[Tensors, torch.Tensor]], tf32: bool) -> _Queued:
    """The workload's stock nodes in an ONNX Runtime session on a stream of torch's."""
    ort = import_onnxruntime()
    workload = WORKLOADS[job.name]
    arrays = [None if t is None else t.cpu().numpy() for t in sets[0][0]]
    stream = torch.cuda.Stream()
    provider_options = {"use_tf32": str(int(tf32)), "user_compute_stream": str(stream.cuda_stream)}
    session = make_session(workload.stock(job.problem, arrays), provider="cuda", provider_options=provider_options)
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    runs = []
    for inputs, out in sets:
        binding = session.io_binding()
        for i, (spec, t) in enumerate(zip(workload.spec.inputs, inputs)):
            if t is not None and i not in workload.constants:
                binding.bind_input(spec.name, "cuda", 0, arrays[i].dtype.type, tuple(t.shape), t.data_ptr())
        binding.bind_output(
            session.get_outputs()[0].name, "cuda", 0, arrays[0].dtype.type, tuple(out.shape), out.data_ptr()
        )
        runs.append(lambda binding=binding: session.run_with_iobinding(binding, options))
    return _Queued(runs, stream)


def _has_stock_graph(job: Job) -> bool:
    """Whether the workload's stock nodes compute this problem, in a type that ONNX Runtime's own kernels have."""
    p = job.problem
    if job.dtype == "bfloat16" or job.precision == "tf32x3":
        return False
    if job.name == "gemm":
        return "epilogue" in p
    return job.name != "attention" or (p["mask"] == "none" and not p["is_causal"] and p["heads"] == p["kv_heads"])


def _has_chain(job: Job) -> bool:
    """Whether ours is also measured inside a session, against MultiHeadAttention: short problems, where it matters."""
    p = job.problem
    plain = p["mask"] == "none" and p["q_len"] == p["kv_len"] <= 512 and p["heads"] == p["kv_heads"]
    return plain and job.dtype != "bfloat16" and job.precision != "tf32"


def buffer_sets(side: Any, job: Job, first: Tensors, out: torch.Tensor) -> list[tuple[Tensors, torch.Tensor]]:
    """Inputs and output in as many copies as together do not stay in the L2 cache; ``first`` and ``out`` are the first."""
    set_bytes = sum(t.nbytes for t in (*first, out) if t is not None)
    l2_bytes = native.cuda_device(0)["l2_bytes"]
    count = max(1, min(64, math.ceil(2 * l2_bytes / set_bytes), _MAX_BYTES // set_bytes))
    return [(first, out)] + [(side.inputs(job, out.dtype), torch.empty_like(out)) for _ in range(count - 1)]


def add_rivals(contenders: dict[str, Any], side: Any, job: Job, sets: Sequence[tuple[Tensors, torch.Tensor]]) -> None:
    """Captures the rivals in PyTorch, except those that do not take this problem."""
    rivals = [side.rivals(job, i, o) for i, o in sets]
    for name in rivals[0]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why a backend of torch refuses
                contenders[name] = Captured([r[name] for r in rivals])
        except RuntimeError:
            torch.cuda.synchronize()


def in_alternation(contenders: Mapping[str, Any], min_seconds: float, min_rounds: int = 10) -> dict[str, Timing]:
    """The time of each contender."""
    rounds = Rounds([[] for _ in contenders])
    order = list(enumerate(contenders.values()))
    deadline = time.perf_counter() + min_seconds
    while len(rounds.seconds[0]) < min_rounds or time.perf_counter() < deadline:
        for i, contender in order:
            rounds.seconds[i].append(contender.seconds())
        order.reverse()
    return {name: rounds.timing(i) for i, name in enumerate(contenders)}


def error_of(out: torch.Tensor, reference: torch.Tensor, scale: torch.Tensor | float) -> float:
    """The largest error against float64; NaN if there is one."""
    torch.cuda.synchronize()
    return float(((out.double() - reference).abs() / scale).max())


def solved(job: Job, make_call: Callable[[Tensors, torch.Tensor], Call]) -> tuple[Tensors, torch.Tensor, float]:
    """Inputs of a job, the output of the call that ``make_call`` makes of inputs and output, and its error against float64."""
    side = OPS[job.name]
    torch.manual_seed(0)
    inputs = side.inputs(job, getattr(torch, job.dtype))
    reference, scale = side.reference(job, inputs)
    out = torch.full(reference.shape, torch.nan, dtype=getattr(torch, job.dtype), device="cuda")
    make_call(inputs, out)()
    return inputs, out, error_of(out, reference, scale)


def _measure(job: Job, min_seconds: float) -> Record:
    side, op = OPS[job.name], WORKLOADS[job.name].spec.name
    attrs = side.attrs(job)
    first, out, error = solved(job, lambda i, o: our_call(op, i, attrs, o))
    sets = buffer_sets(side, job, first, out)
    contenders: dict[str, Any] = {"ours": Captured([our_call(op, i, attrs, o) for i, o in sets])}
    add_rivals(contenders, side, job, sets)
    if _has_stock_graph(job):
        contenders["ort_tf32" if job.precision == "tf32" else "ort"] = _stock_session(
            job, sets, tf32=job.precision == "tf32"
        )
    if job.name == "attention" and _has_chain(job):
        chain = chains(job.problem, job.dtype, job.precision, contenders["ours"].seconds())
        contenders |= {IN_SESSION if name == "ours" else name: c for name, c in chain.items()}
    times = in_alternation(contenders, min_seconds)
    measured = times.pop("ours")
    variant = native.choose(op, [device_tensor(t) for t in first], attrs, device="cuda")
    record = Record(
        op, dict(job.problem), job.dtype, job.precision, variant, measured.median_us, measured.spread_us, error
    )
    in_session = times.pop(IN_SESSION, None)
    record.in_session_us = in_session and in_session.median_us
    for name, timing in times.items():
        record.add_baseline(name, timing)
    return record


SLOW_ROW = 3.0
"""Rows that take so many times as long as the chosen one are not measured further."""


def _measure_choice(job: Job, min_seconds: float) -> ChoiceRecord:
    """Every row that takes the problem, in alternation; errors are those of the chosen one."""
    side, op = OPS[job.name], WORKLOADS[job.name].spec.name
    attrs = side.attrs(job)
    first, out, error = solved(job, lambda i, o: our_call(op, i, attrs, o))
    chosen = native.choose(op, [device_tensor(t) for t in first], attrs, device="cuda")
    sets = buffer_sets(side, job, first, out)
    contenders = {chosen: Captured([our_call(op, i, attrs, o, chosen) for i, o in sets])}
    most = SLOW_ROW * contenders[chosen].seconds()
    for row in native.variants(op, "cuda"):
        if row.name == chosen:
            continue
        try:
            calls = [our_call(op, i, attrs, o, row.name) for i, o in sets]
            calls[0]()
        except NotImplementedError:
            continue
        if min(_between_events(calls[0]) for _ in range(2)) > 2.0 * most + 20e-6:  # launches count here
            continue
        captured = Captured(calls)
        if captured.seconds() <= most:
            contenders[row.name] = captured
    times = in_alternation(contenders, min_seconds, min_rounds=5)
    measured = times.pop(chosen)
    rows = {name: {"median_us": t.median_us, "spread_us": t.spread_us} for name, t in times.items()}
    return ChoiceRecord(
        op,
        dict(job.problem),
        job.dtype,
        job.precision,
        chosen,
        measured.median_us,
        measured.spread_us,
        error,
        rows=rows,
    )


def _best(call: Call) -> float:
    """Seconds of a call, at its best."""
    captured = Captured([call])
    return min(captured.seconds() for _ in range(5))


def _copy_bytes_per_second() -> float:
    source = torch.randn(1 << 27, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: _copy(target, source))


def _matmul_flops_per_second(dtype: torch.dtype, tf32: bool) -> float:
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return 2 * size**3 / _best(lambda: torch.matmul(a, b, out=out))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def _ceilings() -> dict[str, float]:
    """What this very device copies and multiplies, as the measure of "percent of peak"."""
    ceilings = {"copy_TB_per_s": round(_copy_bytes_per_second() / 1e12, 3)}
    kinds = (("fp16", torch.float16, False), ("tf32", torch.float32, True), ("fp32", torch.float32, False))
    for name, dtype, tf32 in kinds:
        ceilings[f"{name}_TFLOP_per_s"] = round(_matmul_flops_per_second(dtype, tf32) / 1e12, 1)
        torch.cuda.empty_cache()
    return ceilings


def measure_environment(command: str, progress: Callable[[str, float], None]) -> dict[str, Any]:
    """What the figures depend on, and the ceilings. OrtPluginsError if there is no GPU to measure on."""
    if not torch.cuda.is_available() or not native.with_cuda:
        raise OrtPluginsError(
            "there is no GPU that both PyTorch and this build of ortplugins can use; `ortplugins doctor` says more"
        )
    progress("measuring what the device can do", 0.0)
    return environment(
        torch.cuda.get_device_name(0), command, driver=driver_version(), torch=torch.__version__, ceilings=_ceilings()
    )


def run(
    names: Sequence[str],
    *,
    threads: int = 2,
    min_seconds: float = MIN_SECONDS,
    command: str = "",
    progress: Callable[[str, float], None] = lambda what, fraction: None,
    rows: bool = False,
) -> tuple[dict[str, Any], list[Record]]:
    """Measures every CUDA problem of the ops ``names`` and returns the environment and the records.

    ``min_seconds`` is the least time for each problem; ``threads`` only matters on the CPU. ``rows``: against the other
    rows of the variant table (``ChoiceRecord``), not against rivals.
    """
    facts = measure_environment(command, progress)
    jobs = [job for name in names for job in OPS[name].jobs()]
    records: list[Record] = []
    for i, job in enumerate(jobs):
        progress(job.label, i / len(jobs))
        records.append(_measure_choice(job, min_seconds) if rows else _measure(job, min_seconds))
        torch.cuda.empty_cache()
    return facts, records
