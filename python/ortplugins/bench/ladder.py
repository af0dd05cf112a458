"""The ladder: each stage of the climb to the production GEMM and softmax, checked, timed and profiled.

The stages below the production kernels come from the library ``libortplugins_ladder.so`` (sources and story:
``plugins/ladder``); above them the rows of the variant table take over, forced by name.

Nsight Compute, where it is found, profiles one launch of every stage: it runs this module, which does nothing else.
"""

from __future__ import annotations

import csv
import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import native
from ..errors import OrtPluginsError
from ..register import LIBRARY_FOLDER
from .records import LadderRecord
from .workloads import WORKLOADS

Address = int
Sizes = tuple[int, ...]

LIBRARY = "libortplugins_ladder.so"
MIN_SECONDS = 0.1
CHOSEN = ""
"""As a variant: the row that the op's own choice takes for the problem."""


@dataclass(frozen=True)
class Stage:
    """One rung. ``variant`` is a row of the op's variant table, or ``CHOSEN``; None: a kernel of the ladder's library.

    ``column_major_b``: the stage reads b column by column, that is, it is given b transposed.
    """

    name: str
    idea: str
    dtype: str = "float32"
    precision: str | None = None
    variant: str | None = None
    column_major_b: bool = False


GEMM_STAGES = (
    Stage("naive", "a thread for each element, B column-major", precision="ieee", column_major_b=True),
    Stage("coalesced", "B row-major: a warp reads neighbours", precision="ieee"),
    Stage("shared_tile", "tiles in shared memory, read as float4", precision="ieee"),
    Stage("micro_tile", "8 x 8 results a thread in registers", precision="ieee"),
    Stage("double_buffered", "cp.async brings the next tiles", precision="ieee"),
    Stage("simt", "larger tiles, four stages", precision="ieee", variant=CHOSEN),
    Stage("tf32_mma", "tensor cores by mma.sync, TF32", precision="tf32", variant="sm80_tf32_128x128x16_s4"),
    Stage("tf32", "tensor cores by wgmma", precision="tf32", variant=CHOSEN),
    Stage("tf32x3", "three products for one of FP32", precision="tf32x3", variant=CHOSEN),
    Stage("fp16_mma", "tensor cores by mma.sync, FP16", dtype="float16", variant="sm80_mma_128x128x32_s4"),
    Stage("fp16_wgmma", "warpgroups, TMA, specialised warps", dtype="float16", variant=CHOSEN),
)
PRODUCTS = (
    Stage("three_products", "three TF32 products, summed by the tensor cores", precision="tf32x3"),
    Stage("three_products_128", "the sums leave them every 128 of k", precision="tf32x3"),
    Stage("three_products_32", "every 32 of k", precision="tf32x3"),
)
"""For the table of errors (``precision``): what promotion of the sums is worth. No rungs: they are not fast."""

SOFTMAX_STAGES = (
    Stage("three_pass", "maximum, sum, result: three reads"),
    Stage("online", "maximum and sum together: two reads"),
    Stage("vectors", "16-byte accesses"),
    Stage("registers", "the row waits in registers: one read"),
    Stage("shared", "the row waits in shared memory"),
    Stage("cluster", "eight blocks share a row"),
    Stage("production", "the row of the table that is chosen", variant=CHOSEN),
)
STAGES = {"gemm": GEMM_STAGES, "softmax": SOFTMAX_STAGES}
PROBLEMS: dict[str, tuple[dict[str, int], ...]] = {
    "gemm": ({"m": 4096, "n": 4096, "k": 4096},),
    "softmax": tuple({"rows": r, "cols": c} for r, c in ((16384, 1024), (8192, 4096), (2048, 32768), (64, 131072))),
}

# --- The library ------------------------------------------------------------------------------------------------------


class _Result(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_int32),
        ("tensor", ctypes.c_char_p),
        ("format", ctypes.c_char_p),
        ("args", ctypes.c_int64 * 4),
    ]


def is_built() -> bool:
    """Whether the library of the ladder is there: it needs a build with CUDA."""
    return (LIBRARY_FOLDER / LIBRARY).is_file()


@functools.cache
def _library() -> ctypes.CDLL:
    if not is_built():
        raise OrtPluginsError(f"{LIBRARY} is not in {LIBRARY_FOLDER}: the package was built without CUDA")
    library = ctypes.CDLL(str(LIBRARY_FOLDER / LIBRARY))
    pointer, size, result = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(_Result)
    for name, arguments in {
        "gemm": [ctypes.c_char_p, pointer, pointer, pointer, size, size, size, pointer],
        "softmax": [ctypes.c_char_p, pointer, pointer, size, size, pointer],
        "boundary": [],
        "profile": [ctypes.c_int],
    }.items():
        function = getattr(library, f"ortplugins_ladder_{name}")
        function.argtypes, function.restype = [*arguments, result], None
    return library


def _call(name: str, *arguments: Any) -> None:
    result = _Result()
    getattr(_library(), f"ortplugins_ladder_{name}")(*arguments, ctypes.byref(result))
    if result.code == 0:
        return
    text = f"{result.tensor.decode()}: {result.format.decode().format(*result.args)}"
    raise {1: ValueError, 2: NotImplementedError}.get(result.code, RuntimeError)(text)


def launch(kind: str, stage: str, tensors: Sequence[Address], sizes: Sizes, stream: int = 0) -> None:
    """Launches a stage of the ladder's library.

    ``gemm`` takes the tensors (a, b, y) and sizes (m, n, k), ``softmax`` (x, y) and (rows, cols). Tensors are device addresses of contiguous float32. NotImplementedError if the stage does not take the problem.
    """
    _call(kind, stage.encode(), *tensors, *sizes, stream)


# --- Measurement ------------------------------------------------------------------------------------------------------


def stage_call(kind: str, stage: str, tensors: Sequence[Any], sizes: Sizes) -> Callable[[], None]:
    """A launch of a stage of the library on PyTorch's tensors, which it keeps, in PyTorch's current stream."""
    import torch

    return lambda: launch(kind, stage, [t.data_ptr() for t in tensors], sizes, torch.cuda.current_stream().cuda_stream)


def _measure(kind: str, stage: Stage, problem: dict[str, int], min_seconds: float) -> LadderRecord:
    from . import cuda

    job = cuda.Job(kind, problem, stage.dtype, stage.precision)
    side, op, sizes = cuda.OPS[kind], WORKLOADS[kind].spec.name, tuple(problem.values())

    def call(inputs: cuda.Tensors, y: Any) -> cuda.Call:
        if stage.variant is not None:
            return cuda.our_call(op, inputs, side.attrs(job), y, stage.variant or None)
        if stage.column_major_b:
            inputs = [inputs[0], inputs[1].t().contiguous()]
        return stage_call(kind, stage.name, (*inputs, y), sizes)

    first, out, error = cuda.solved(job, call)
    if not error <= _most_error(stage):
        raise OrtPluginsError(f"the stage {stage.name} of {kind} is wrong: its error is {error:.2g}")
    sets = cuda.buffer_sets(side, job, first, out)
    contenders: dict[str, Any] = {"ours": cuda.Captured([call(i, o) for i, o in sets])}
    cuda.add_rivals(contenders, side, job, sets)
    times = cuda.in_alternation(contenders, min_seconds, min_rounds=5)
    measured = times.pop("ours")
    variant = stage.variant
    if variant == CHOSEN:
        variant = native.choose(op, [cuda.device_tensor(t) for t in first], side.attrs(job), device="cuda")
    record = LadderRecord(
        op,
        dict(problem),
        stage.dtype,
        stage.precision,
        variant or stage.name,
        measured.median_us,
        measured.spread_us,
        error,
        ladder={"stage": stage.name, "idea": stage.idea, "profile": None},
    )
    for name, timing in times.items():
        record.add_baseline(name, timing)
    return record


def _most_error(stage: Stage) -> float:
    """A wrong kernel is far beyond it: of a product relative to |A||B|, of softmax absolute."""
    return 2.0**-10 if stage.dtype == "float16" else 2.0**-11 if stage.precision == "tf32" else 1e-6


def run(
    names: Sequence[str],
    *,
    min_seconds: float = MIN_SECONDS,
    profile: bool = True,
    command: str = "",
    progress: Callable[[str, float], None] = lambda what, fraction: None,
) -> tuple[dict[str, Any], list[LadderRecord]]:
    """Checks and times every stage of the ladders ``names`` and returns the environment and the records.

    ``profile``: also ask Nsight Compute. Where that says nothing, ``no_profile`` of the environment says why.
    """
    from . import cuda, precision

    environment = cuda.measure_environment(command, progress)
    jobs = [(kind, stage, problem) for kind in names for problem in PROBLEMS[kind] for stage in STAGES[kind]]
    records: dict[tuple[str, str, Sizes], LadderRecord] = {}
    for i, (kind, stage, problem) in enumerate(jobs):
        progress(f"{kind} {stage.name}", i / len(jobs))
        try:
            records[kind, stage.name, tuple(problem.values())] = _measure(kind, stage, problem, min_seconds)
        except NotImplementedError:  # not made for this problem, or not for this device
            continue
        finally:
            cuda.torch.cuda.empty_cache()
    if profile:
        progress("asking Nsight Compute", 1.0)
        try:
            for key, values in _profiled(records).items():
                records[key].ladder["profile"] = values
        except OrtPluginsError as error:
            environment["no_profile"] = str(error)
    errors = []
    if "gemm" in names:
        progress("errors of products", 1.0)
        errors = precision.run()
    return environment, [*records.values(), *errors]


# --- Nsight Compute ---------------------------------------------------------------------------------------------------

METRICS = {
    "time_us": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "issue_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1_pct": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "sectors_per_load": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "local_loads": "l1tex__t_requests_pipe_lsu_mem_local_op_ld.sum",
    "local_stores": "l1tex__t_requests_pipe_lsu_mem_local_op_st.sum",
}
"""What a profile holds, and Nsight Compute's names for it."""

STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "not_selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_BOUNDARY = "ladder_boundary_kernel"
_SECONDS = 600.0


class _Launch(NamedTuple):
    kernel: str
    metrics: dict[str, float]


def parse_profile(text: str) -> Iterator[_Launch]:
    """The launches in what ``ncu --csv --page raw --print-units base`` wrote, without metrics that it does not know."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = csv.DictReader(lines)
    for row in rows:
        if not row["ID"]:  # the units
            continue
        metrics = {}
        for name, value in row.items():
            try:
                metrics[name] = float(value.replace(",", ""))
            except (AttributeError, ValueError):
                continue
        yield _Launch(row["Kernel Name"], metrics)


def profile_of(launches: Iterable[_Launch]) -> dict[str, Any]:
    """The profile of a stage: that of the kernel that took longest, with its three most frequent stalls.

    A stall is given in warps: how many on average waited for that reason at a cycle in which one was issued.
    """
    metrics = max(launches, key=lambda launch: launch.metrics.get(METRICS["time_us"], 0.0)).metrics
    values = {name: metrics[metric] for name, metric in METRICS.items() if metric in metrics}
    if "time_us" in values:
        values["time_us"] /= 1e3  # of ns
    stalls = {name: metrics[_STALL.format(name)] for name in STALLS if _STALL.format(name) in metrics}
    values["stalls"] = dict(sorted(stalls.items(), key=lambda item: -item[1])[:3])
    return values


def stages_of(launches: Iterable[_Launch]) -> list[list[_Launch]]:
    """The launches of each stage; a boundary follows every one."""
    stages: list[list[_Launch]] = [[]]
    for launched in launches:
        if _BOUNDARY in launched.kernel:
            stages.append([])
        else:
            stages[-1].append(launched)
    return stages[:-1]


def _profiled(keys: Iterable[tuple[str, str, Sizes]]) -> dict[tuple[str, str, Sizes], dict[str, Any]]:
    keys = list(keys)
    if shutil.which("ncu") is None:
        raise OrtPluginsError("ncu of Nsight Compute is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "profile.csv"
        metrics = [*METRICS.values(), *(_STALL.format(name) for name in STALLS)]
        # The clocks stay as the device has them.
        command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
        command += ["--print-units", "base", "--metrics", ",".join(metrics), "--log-file", str(log)]
        arguments = ["/".join((kind, stage, *map(str, sizes))) for kind, stage, sizes in keys]
        try:
            done = subprocess.run(
                [*command, sys.executable, "-m", __name__, *arguments],
                capture_output=True,
                text=True,
                check=False,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise OrtPluginsError(f"Nsight Compute took more than {_SECONDS:.0f} s") from error
        text = log.read_text() if log.is_file() else ""
    stages = stages_of(parse_profile(text))
    if done.returncode != 0 or len(stages) != len(keys):
        said = " ".join([*text.splitlines()[-3:], done.stderr[-500:]]).strip()
        raise OrtPluginsError(f"Nsight Compute profiled {len(stages)} of {len(keys)} stages: {said}")
    return {key: profile_of(launches) for key, launches in zip(keys, stages) if launches}


@functools.cache
def _random(shape: tuple[int, ...], dtype: str) -> native.CudaBuffer:
    return native.CudaBuffer.of(np.random.default_rng(0).random(shape, np.float32).astype(dtype))


def _launch_once(key: str) -> None:
    """One launch between cudaProfilerStart and cudaProfilerStop, on inputs of any values."""
    kind, name, *numbers = key.split("/")
    sizes = tuple(map(int, numbers))
    stage = next(s for s in STAGES[kind] if s.name == name)
    shapes = [sizes] if kind == "softmax" else [(sizes[0], sizes[2]), (sizes[2], sizes[1])]
    out_shape = sizes[:2]
    buffers = [_random(shape, stage.dtype) for shape in shapes]
    out = native.CudaBuffer(np.dtype(stage.dtype).itemsize * out_shape[0] * out_shape[1])
    if stage.variant is None:
        go = functools.partial(launch, kind, name, [b.address for b in (*buffers, out)], sizes)
    else:
        op = WORKLOADS[kind].spec.name
        inputs = [native.DeviceTensor(b.address, stage.dtype, shape) for b, shape in zip(buffers, shapes)]
        y = native.DeviceTensor(out.address, stage.dtype, out_shape)
        attrs = {"precision": stage.precision} if stage.precision else {}
        variant = stage.variant or None
        nbytes = native.workspace_bytes(op, inputs, [y], attrs, variant=variant, device="cuda")
        workspace = native.CudaBuffer(nbytes)
        go = functools.partial(
            native.run,
            op,
            inputs,
            attrs,
            outputs=[y],
            variant=variant,
            device="cuda",
            workspace=(workspace.address, nbytes),
        )
    _call("profile", 1)
    go()
    _call("boundary")
    _call("profile", 0)


def main() -> None:
    """Launches each stage named on the command line once, for a profiler."""
    for key in sys.argv[1:]:
        _launch_once(key)


if __name__ == "__main__":
    main()
