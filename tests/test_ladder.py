"""The ladder: every stage is right at every size, its table fits the library's, its profile is read as it is meant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kernel_harness import Guarded, assert_close
from ortplugins import native
from ortplugins.bench import ladder
from ortplugins.bench.workloads import WORKLOADS
from ortplugins.errors import OrtPluginsError

KERNELS = {kind: [s for s in stages if s.variant is None] for kind, stages in ladder.STAGES.items()}
KERNELS["gemm"] += ladder.PRODUCTS


def on_device(
    stage: str, kind: str, inputs: Sequence[np.ndarray], shape: tuple[int, ...], sizes: tuple[int, ...], aligned: bool
) -> np.ndarray:
    """The result of a stage on inputs between guard values."""
    guarded = [*(Guarded.of(v, aligned) for v in inputs), Guarded(shape, np.dtype(np.float32), aligned)]
    buffers, addresses = [], []
    for g in guarded:
        owner = g.array if g.array.base is None else g.array.base
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        offset = owner.ctypes.data % 256
        buffers.append((native.CudaBuffer.of(owner, offset), owner, offset))
        addresses.append(buffers[-1][0].address + offset + g.array.ctypes.data - owner.ctypes.data)
    try:
        ladder.launch(kind, stage, addresses, sizes)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    for buffer, owner, offset in buffers:
        buffer.copy_to(owner, offset)
    for g in guarded:
        g.check()
    for given, g in zip(inputs, guarded):
        assert g.array.tobytes() == given.tobytes(), "a kernel wrote to its input"
    return guarded[-1].array


SANITIZED = {True: [pytest.mark.small], False: []}
"""Marks of what runs under compute-sanitizer too."""

GEMM_SIZES = [
    (1, 1, 1),
    (2, 3, 5),
    (7, 31, 17),
    (8, 32, 4),
    (31, 33, 31),
    (32, 32, 32),
    (33, 36, 40),
    (127, 129, 7),
    (128, 128, 8),
    (129, 132, 12),
    (131, 257, 67),
    (260, 140, 516),
    (5, 6, 0),
    (0, 4, 3),
]


@pytest.mark.gpu
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "odd"])
@pytest.mark.parametrize("stage", KERNELS["gemm"], ids=lambda s: s.name)
@pytest.mark.parametrize(("m", "n", "k"), [pytest.param(*s, marks=SANITIZED[s[0] in (33, 131)]) for s in GEMM_SIZES])
def test_gemm(stage: ladder.Stage, m: int, n: int, k: int, aligned: bool) -> None:
    rng = np.random.default_rng(m * n + k)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    given = [a, np.ascontiguousarray(b.T) if stage.column_major_b else b]
    y = on_device(stage.name, "gemm", given, (m, n), (m, n, k), aligned)
    expected, bound = product(a, b)
    truncated = stage in ladder.PRODUCTS  # at each of three additions for 8 of k, and lo lo is left out
    assert_close(y, expected, bound + (k / 2.0 * 2.0**-23 * (np.abs(a) @ np.abs(b)) if truncated else 0.0))


def product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In float64, and how far a sum in float32 may be from it."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return a @ b, (min(a.shape[1], 8) + 2) * 2.0**-24 * (np.abs(a) @ np.abs(b))


def test_bound_rejects_less_exact_products() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((40, 40)).astype(np.float32) for _ in range(2))
    assert_close((a.astype(np.float64) @ b).astype(np.float32), *product(a, b))
    rounded = (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)  # to TF32
    with pytest.raises(AssertionError, match="over the bound"):
        assert_close(rounded @ b, *product(a, b))


SOFTMAX_COLS = [1, 2, 3, 5, 31, 32, 33, 127, 1000, 1023, 1024, 1025, 4099, 8192, 20011, 32769, 70001, 131072]


def softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    top = np.where(np.isneginf(x.max(-1, keepdims=True)), 0.0, x.max(-1, keepdims=True))
    e = np.exp(x - top)
    return e / np.maximum(e.sum(-1, keepdims=True), 1e-300)


@pytest.mark.gpu
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "odd"])
@pytest.mark.parametrize("stage", KERNELS["softmax"], ids=lambda s: s.name)
@pytest.mark.parametrize("cols", [pytest.param(c, marks=SANITIZED[c in (33, 1025, 20011)]) for c in SOFTMAX_COLS])
def test_softmax(stage: ladder.Stage, cols: int, aligned: bool) -> None:
    x = (3.0 * np.random.default_rng(cols).standard_normal((3, cols))).astype(np.float32)
    x[1, : cols // 2] = -np.inf
    x[2] = -np.inf
    y = on_device(stage.name, "softmax", [x], x.shape, x.shape, aligned)
    expected = softmax(x)
    with np.errstate(invalid="ignore"):  # a row of -inf
        below = np.where(np.isfinite(x), x.max(-1, keepdims=True) - x.astype(np.float64), 0.0)
    assert_close(y, expected, 2.0**-23 * (4.0 + 2.0 * below) * expected + 2.0**-126)
    assert not y[2].any(), "a row of -inf must be exactly zero"


@pytest.mark.gpu
def test_refusals_have_their_reasons() -> None:
    with pytest.raises(ValueError, match="stage: is not on the ladder"):
        ladder.launch("gemm", "ascent", [0, 0, 0], (1, 1, 1))
    with pytest.raises(NotImplementedError, match="x: has 40000 columns, of which the registers of a block hold 32768"):
        ladder.launch("softmax", "registers", [0, 0], (1, 40000))


@pytest.mark.skipif(not native.with_cuda, reason="the library was built without CUDA")
def test_library_is_built_and_loads() -> None:
    assert ladder.is_built()
    ladder._library()


@pytest.mark.parametrize("kind", ladder.STAGES)
def test_production_stages_are_rows_of_the_table(kind: str) -> None:
    rows = {v.name for v in native.variants(WORKLOADS[kind].spec.name)}
    names = {s.variant for s in ladder.STAGES[kind] if s.variant}
    if not native.with_cuda:
        pytest.skip("the library was built without CUDA")
    assert names <= rows


PROFILE = """\
==PROF== Connected to process 1
"ID","Process ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread","smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio","dram__throughput.avg.pct_of_peak_sustained_elapsed"
"","","","ns","register/thread","inst","inst","%"
"0","1","scale_kernel","1,000","16","9.5","0.5","80.5"
"1","1","product_kernel(Params)","12,500","168","0.25","1.5","n/a"
"2","1","ladder_boundary_kernel()","900","4","0","0","0"
"3","1","naive_kernel","2000","26","1","2","3"
"4","1","ladder_boundary_kernel()","900","4","0","0","0"
"""


def test_profile_is_that_of_the_longest_kernel_of_each_stage() -> None:
    first, second = (ladder.profile_of(launches) for launches in ladder.stages_of(ladder.parse_profile(PROFILE)))
    assert first == {"time_us": 12.5, "registers": 168.0, "stalls": {"wait": 1.5, "barrier": 0.25}}
    assert second == {"time_us": 2.0, "registers": 26.0, "dram_pct": 3.0, "stalls": {"wait": 2.0, "barrier": 1.0}}


def test_missing_profiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OrtPluginsError, match="ncu of Nsight Compute is not on the PATH"):
        ladder._profiled([("gemm", "naive", (1, 1, 1))])


def test_profiler_that_stops_early_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ncu").write_text("#!/bin/sh\necho 'no permission' >&2\nexit 1\n")
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(OrtPluginsError, match="profiled 0 of 1 stages: no permission"):
        ladder._profiled([("gemm", "naive", (1, 1, 1))])
