"""The kernels on NumPy arrays and device pointers, without a runtime: for tests and benchmarks.

Everything here goes through the op table of the kernel library, so that any variant can be forced by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ortplugins import ops

try:
    from ortplugins import _native
except ImportError as error:  # a source tree that was not built
    raise ImportError(f"ortplugins._native is not built or does not load: {error}") from error

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name) for name in ops.ONNX_TYPE_CODES
}
"""NumPy dtype of each dtype name."""

with_cuda: bool = _native.with_cuda
"""Whether the library was built with CUDA kernels."""


class VariantInfo(NamedTuple):
    """One row of an op's variant table. ``device`` is ``cpu`` or ``cuda``."""

    id: int
    name: str
    device: str


class DeviceTensor(NamedTuple):
    """A contiguous tensor in device memory: its address, dtype name and shape."""

    address: int
    dtype: str
    shape: tuple[int, ...]


TensorLike = np.ndarray | DeviceTensor | None


def variants(op: str, device: str | None = None) -> list[VariantInfo]:
    """The variant table of ``op``, best first; only rows for ``device`` if that is given."""
    rows = [VariantInfo(*row) for row in _native.variants(op)]
    return [row for row in rows if device in (None, row.device)]


def cpu_isa() -> str:
    """Instruction set that CPU kernels use here: ``generic``, ``avx2`` or ``avx512``."""
    return _native.cpu_isa()


def cuda_device(ordinal: int = 0) -> dict[str, int] | None:
    """Facts of a CUDA device (``sm``, ``sm_count``, ...), or None if there is none."""
    return _native.cuda_device(ordinal)


def _as_argument(tensor: TensorLike) -> tuple[int, int, list[int]] | None:
    if tensor is None:
        return None
    if isinstance(tensor, DeviceTensor):
        return tensor.address, ops.ONNX_TYPE_CODES[tensor.dtype], list(tensor.shape)
    if not tensor.flags.c_contiguous:
        raise ValueError("a tensor must be contiguous and row-major")
    return tensor.ctypes.data, ops.ONNX_TYPE_CODES[tensor.dtype.name], list(tensor.shape)


def infer_shapes(op: str, inputs: Sequence[TensorLike], attrs: Mapping[str, Any] | None = None) -> list[tuple[int, ...]]:
    """Shapes of all outputs of ``op`` for these inputs, optional ones included."""
    return [tuple(s) for s in _native.infer_shapes(op, dict(attrs or {}), [_as_argument(t) for t in inputs])]


def _output_dtypes(op: str, inputs: Sequence[TensorLike]) -> list[str]:
    shared = inputs[0].dtype if isinstance(inputs[0], DeviceTensor) else inputs[0].dtype.name
    return [shared if t.dtypes[0] == "T" else t.dtypes[0] for t in ops.find(op).outputs]


def empty_outputs(
    op: str, inputs: Sequence[TensorLike], attrs: Mapping[str, Any] | None = None, count: int = 1
) -> list[np.ndarray]:
    """Uninitialised NumPy arrays for the first ``count`` outputs."""
    shapes = infer_shapes(op, inputs, attrs)
    return [np.empty(s, DTYPES[d]) for s, d in zip(shapes[:count], _output_dtypes(op, inputs))]


def choose(op: str, inputs: Sequence[TensorLike], attrs: Mapping[str, Any] | None = None, device: str = "cpu", ordinal: int = 0) -> str:
    """Name of the variant that would run."""
    outputs = [(0, ops.ONNX_TYPE_CODES[d], list(s)) for s, d in zip(infer_shapes(op, inputs, attrs)[:1], _output_dtypes(op, inputs))]
    return _native.choose(op, dict(attrs or {}), [_as_argument(t) for t in inputs], outputs, device, ordinal)


def workspace_bytes(
    op: str, inputs: Sequence[TensorLike], outputs: Sequence[TensorLike], attrs: Mapping[str, Any] | None = None, *,
    variant: str | None = None, device: str = "cpu", ordinal: int = 0,
) -> int:
    """Bytes of workspace that :func:`run` needs."""
    return _native.workspace_bytes(op, dict(attrs or {}), [_as_argument(t) for t in inputs], [_as_argument(t) for t in outputs],
                                   variant or "", device, ordinal)


class CudaBuffer:
    """``bytes`` of device memory, freed with the object. :meth:`tensor` gives a view of it."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.address = _native.cuda_malloc(nbytes)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            _native.cuda_free(self.address)

    @classmethod
    def of(cls, array: np.ndarray, offset: int = 0) -> CudaBuffer:
        """A copy of ``array``, ``offset`` bytes into the buffer."""
        buffer = cls(array.nbytes + offset)
        if array.nbytes:
            _native.cuda_copy(buffer.address + offset, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        return buffer

    def copy_to(self, array: np.ndarray, offset: int = 0) -> None:
        """Wait for the device and copy ``array.nbytes`` bytes from ``offset`` on into ``array``."""
        _native.cuda_synchronize()
        if array.nbytes:
            _native.cuda_copy(array.ctypes.data, self.address + offset, array.nbytes)


def run(
    op: str,
    inputs: Sequence[TensorLike],
    attrs: Mapping[str, Any] | None = None,
    *,
    outputs: Sequence[TensorLike] | None = None,
    output_count: int = 1,
    variant: str | None = None,
    device: str = "cpu",
    ordinal: int = 0,
    stream: int = 0,
    workspace: tuple[int, int] = (0, 0),
    threads: int = 1,
    prepack: bool = False,
) -> list[np.ndarray]:
    """Run ``op`` once.

    Args:
        op: op type, for instance ``FusedSoftmax``.
        inputs: tensors in the order of the specification; None for an absent optional one.
        attrs: attributes by name; the rest have their defaults.
        outputs: tensors to write, or None to allocate the first ``output_count``. None within the sequence: not wanted.
        variant: name of the row of the variant table to force.
        device: ``cpu`` or ``cuda``. NumPy arrays are copied to the device and back; :class:`DeviceTensor` are used as
            they are, and the call then does not wait for the device.
        stream: ``cudaStream_t`` to launch on.
        workspace: address and bytes of device workspace; only needed with device tensors.
        threads: threads of the CPU kernels.
        prepack: bring inputs into the kernels' layout first, as the runtimes do for constants.

    Returns:
        The outputs that are NumPy arrays.

    Raises:
        ValueError: an argument does not fit the specification.
        NotImplementedError: no variant, or not the forced one, supports the problem on this device.
        RuntimeError: CUDA reported an error.
    """
    attrs = dict(attrs or {})
    results = list(outputs) if outputs is not None else empty_outputs(op, inputs, attrs, output_count)
    on_host = [t for t in (*inputs, *results) if isinstance(t, np.ndarray)]
    if device == "cuda" and on_host:
        return _run_copied(op, inputs, attrs, results, variant=variant, ordinal=ordinal)
    _native.run(op, attrs, [_as_argument(t) for t in inputs], [_as_argument(t) for t in results], variant or "", device, ordinal,
                stream, workspace[0], workspace[1], threads, prepack)
    return [t for t in results if isinstance(t, np.ndarray)]


def _run_copied(op: str, inputs: Sequence[TensorLike], attrs: dict[str, Any], results: list[TensorLike], *, variant: str | None,
                ordinal: int) -> list[np.ndarray]:
    # What surrounds a view goes to the device with it, at the same misalignment, so that tests of unaligned pointers and of
    # guard values mean the same there.
    owners = {id(t): _owner(t) for t in (*inputs, *results) if t is not None}
    offsets = {key: owner.ctypes.data % 256 for key, owner in owners.items()}
    buffers = {key: CudaBuffer.of(owner, offsets[key]) for key, owner in owners.items()}

    def on_device(t: np.ndarray | None) -> DeviceTensor | None:
        if t is None:
            return None
        address = buffers[id(t)].address + offsets[id(t)] + t.ctypes.data - owners[id(t)].ctypes.data
        return DeviceTensor(address, t.dtype.name, t.shape)

    device_inputs, device_outputs = [on_device(t) for t in inputs], [on_device(t) for t in results]
    nbytes = workspace_bytes(op, device_inputs, device_outputs, attrs, variant=variant, device="cuda", ordinal=ordinal)
    scratch = CudaBuffer(nbytes) if nbytes else None
    run(op, device_inputs, attrs, outputs=device_outputs, variant=variant, device="cuda", ordinal=ordinal,
        workspace=(scratch.address, nbytes) if scratch else (0, 0))
    arrays = [t for t in results if t is not None]
    for t in arrays:
        buffers[id(t)].copy_to(owners[id(t)], offsets[id(t)])
    return arrays


def _owner(t: np.ndarray) -> np.ndarray:
    """The array that ``t`` is a view of, if that is all of one contiguous piece of memory; else ``t``."""
    base = t.base
    while isinstance(base, np.ndarray) and isinstance(base.base, np.ndarray):
        base = base.base
    return base if isinstance(base, np.ndarray) and base.flags.c_contiguous and base.flags.writeable else t
