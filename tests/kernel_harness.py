"""Runs kernels for tests: each variant on its device, between guard values, at odd addresses and at aligned ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
from ort_models import run_op

from ortplugins import native, ops

GUARD_ELEMENTS = 67
"""Least number of elements in front of and behind every tensor."""

ALIGNMENT = 256
"""Bytes: what runtimes align their tensors to."""

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number of each type."""

_CPU_ISAS = ("generic", "avx2", "avx512")


class Row(NamedTuple):
    """What a kernel test runs: a row of the variant table (or of ``RUNTIME_ROWS``) on tensors that are aligned or not."""

    id: int
    name: str
    device: str
    aligned: bool = False


RUNTIME_ROWS = {
    "onnxruntime_cpu": Row(0, "onnxruntime_cpu", "cpu"),
    "onnxruntime_cuda": Row(0, "onnxruntime_cuda", "cuda"),
}
"""Beside the rows of the table: what the op's own choice gives in an ONNX Runtime session on either provider."""

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def variant_params(op: str) -> list[Any]:
    """A pytest parameter for each row of the op's variant table, and for ONNX Runtime on each provider.

    Each row runs on tensors that start off every vector's boundary; on CUDA, where aligned tensors take other loads, on
    aligned ones too. What runs on CUDA carries the marker ``gpu``.
    """
    params = []
    for row in (Row(*info) for info in native.variants(op)):
        marks = [pytest.mark.gpu] if row.device == "cuda" else []
        isa = row.name.rsplit("_", 1)[-1]
        if row.device == "cpu" and isa in _CPU_ISAS and _CPU_ISAS.index(isa) > _CPU_ISAS.index(native.cpu_isa()):
            marks.append(pytest.mark.skip(reason=f"this processor has no {isa}"))
        params.append(pytest.param(row, id=row.name, marks=marks))
        if row.device == "cuda":
            params.append(pytest.param(row._replace(aligned=True), id=f"{row.name}-aligned", marks=marks))
    for row in RUNTIME_ROWS.values():
        marks = [pytest.mark.gpu] if row.device == "cuda" else []
        if row.device == "cuda" and PROVIDERS["cuda"] not in onnxruntime.get_available_providers():
            marks.append(pytest.mark.skip(reason="this ONNX Runtime has no CUDA provider"))
        params.append(pytest.param(row, id=row.name, marks=marks))
    return params


def table_params(op: str) -> list[Any]:
    """As :func:`variant_params`, each row of the table once, for tests that place tensors in memory themselves."""
    return [p for p in variant_params(op) if p.values[0].name not in RUNTIME_ROWS and not p.values[0].aligned]


def numpy_dtype(name: str) -> np.dtype:
    return native.DTYPES[name]


def random_tensor(rng: np.random.Generator, shape: Sequence[int], dtype: str, std: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(tuple(shape)) * std).astype(numpy_dtype(dtype))


def _guard_value(dtype: np.dtype) -> Any:
    if dtype == np.dtype(bool):
        return True
    if dtype.kind == "i":
        return np.iinfo(dtype).max
    return np.nan


def misaligned(values: np.ndarray, offset: int) -> np.ndarray:
    """A copy that starts ``offset`` elements past a 64-byte boundary."""
    buffer = np.zeros(values.size + offset + 64, values.dtype)
    start = -buffer.ctypes.data % 64 // values.dtype.itemsize + offset
    out = buffer[start : start + values.size].reshape(values.shape)
    out[...] = values
    return out


class Guarded:
    """An array between guard values: NaN for floating point, so that a read beyond an input shows in the result."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype, aligned: bool = False):
        size = int(np.prod(shape, dtype=np.int64))
        first = GUARD_ELEMENTS  # odd, so that the tensor starts off every vector's boundary
        room = ALIGNMENT // dtype.itemsize
        self._buffer = np.full(size + 2 * GUARD_ELEMENTS + room, _guard_value(dtype), dtype)
        misaligned = (self._buffer.ctypes.data + first * dtype.itemsize) % ALIGNMENT
        if aligned:
            first += (-misaligned % ALIGNMENT) // dtype.itemsize
        elif misaligned % 16 == 0:
            first += 1
        self._tensor = slice(first, first + size)
        self.array = self._buffer[self._tensor].reshape(shape)
        self._guards = self._guard_bytes()

    @classmethod
    def of(cls, values: np.ndarray, aligned: bool = False) -> Guarded:
        guarded = cls(values.shape, values.dtype, aligned)
        guarded.array[...] = values
        return guarded

    def _guard_bytes(self) -> bytes:
        return self._buffer[: self._tensor.start].tobytes() + self._buffer[self._tensor.stop :].tobytes()

    def check(self) -> None:
        assert self._guard_bytes() == self._guards, "a kernel wrote outside of its output"


def run_variant(
    op: str,
    variant: Row,
    inputs: Sequence[np.ndarray | None],
    attrs: Mapping[str, Any] | None = None,
    *,
    output_count: int = 1,
    threads: int = 2,
    prepack: bool = False,
) -> list[np.ndarray]:
    """Outputs of one variant. Skips where the variant does not support the problem: another row of the table does.

    A row of ``RUNTIME_ROWS`` runs in a session instead; ``prepack`` then makes constants of all inputs but the first.
    """
    if variant.name in RUNTIME_ROWS:
        constants = [i for i, t in enumerate(inputs) if prepack and i > 0 and t is not None]
        return run_op(op, inputs, attrs, provider=PROVIDERS[variant.device], output_count=output_count, constants=constants)
    guarded = [None if t is None else Guarded.of(t, variant.aligned) for t in inputs]
    arrays = [None if g is None else g.array for g in guarded]
    shapes = native.infer_shapes(op, arrays, attrs)[:output_count]
    types = [inputs[0].dtype if t.dtypes[0] == "T" else numpy_dtype(t.dtypes[0]) for t in ops.find(op).outputs]
    outputs = [Guarded(shape, dtype, variant.aligned) for shape, dtype in zip(shapes, types)]
    try:
        native.run(op, arrays, attrs, outputs=[o.array for o in outputs], variant=variant.name, device=variant.device, threads=threads,
                   prepack=prepack)
    except NotImplementedError as refusal:
        pytest.skip(f"{variant.name} leaves this to another variant: {refusal}")
    for o in outputs:
        o.check()
    for given, used in zip(inputs, guarded):
        if used is not None:
            assert used.array.tobytes() == given.tobytes(), "a kernel wrote to its input"
    return [o.array for o in outputs]


def for_each_dtype(dtypes: Sequence[str], check: Callable[[str], None]) -> None:
    """``check`` for every dtype that the variant takes; skips only if it leaves all of them to other variants."""
    refusals = []
    for dtype in dtypes:
        try:
            check(dtype)
        except pytest.skip.Exception as refusal:
            refusals.append(refusal)
    if len(refusals) == len(dtypes):
        raise refusals[0]


def assert_close(actual: np.ndarray, expected: np.ndarray, bound: float | np.ndarray) -> None:
    """NaN and infinities exactly where ``expected`` has them, and everywhere else at most ``bound`` away."""
    actual = actual.astype(np.float64)
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected), err_msg="NaN in the wrong places")
    with np.errstate(invalid="ignore"):
        error = np.where(np.isnan(expected) | (actual == expected), 0.0, np.abs(actual - expected))
    excess = error - np.where(error == 0.0, 0.0, bound)
    assert np.all(excess <= 0.0), f"error {error.flat[np.argmax(excess)]:.3g} over the bound {np.broadcast_to(bound, error.shape).flat[np.argmax(excess)]:.3g}"
