"""The tables ``SMALL`` of the kernels' test modules name tests, parameters and values that are there."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

import test_attention
import test_gemm
import test_layer_norm
import test_softmax
from ortplugins import native


@pytest.mark.parametrize("module", [test_softmax, test_gemm, test_attention, test_layer_norm], ids=lambda m: m.__name__)
def test_small_names_what_is_there(module: ModuleType) -> None:
    for function, wanted in module.SMALL.items():
        marks = [m for m in getattr(module, function).pytestmark if m.name == "parametrize"]
        offered = {m.args[0]: {getattr(v, "name", v) for v in m.args[1]} for m in marks if m.args[0] != "variant"}
        assert any(m.args[0] == "variant" for m in marks)
        for name, values in wanted.items():
            assert set(values) <= offered[name], f"{function}: {name}"


def supports(variant: str, op: str, inputs: list[np.ndarray | None], attrs: dict) -> bool:
    """Whether the row takes the problem where tensors are aligned, as some of the parameters of `variant_params` are."""

    def tensor(shape: tuple[int, ...], dtype: str) -> native.DeviceTensor:
        return native.DeviceTensor(256, dtype, shape)

    given = [None if t is None else tensor(t.shape, t.dtype.name) for t in inputs]
    outputs = [tensor(native.infer_shapes(op, given, attrs)[0], inputs[0].dtype.name)]
    try:
        native.workspace_bytes(op, given, outputs, attrs, variant=variant, device="cuda")
    except NotImplementedError:
        return False
    return True


@pytest.mark.gpu
@pytest.mark.parametrize("module", [test_softmax, test_gemm, test_attention], ids=lambda m: m.__name__)
def test_small_reaches_every_cuda_variant(module: ModuleType) -> None:
    problems = []
    for function, wanted in module.SMALL.items():
        if "case" not in wanted:
            continue
        offered = next(m for m in getattr(module, function).pytestmark if m.args[0] == "case").args[1]
        for case in (c for c in offered if c.name in wanted["case"]):
            attrs = case.attributes() if hasattr(case, "attributes") else case.attrs
            for precision in wanted.get("precision", (None,)):
                more = {} if precision is None else {"precision": precision}
                dtypes = case.dtypes if precision is None else ("float32",)
                problems += [(case.inputs(dtype), {**attrs, **more}) for dtype in dtypes]
    rows = [row.name for row in native.variants(module.OP, "cuda")]
    assert rows
    reached = {name for name in rows for inputs, attrs in problems if supports(name, module.OP, inputs, attrs)}
    assert sorted(set(rows) - reached) == []
