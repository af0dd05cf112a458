"""The tables ``SMALL`` of the kernels' test modules name tests, parameters and values that are there."""

from __future__ import annotations

from types import ModuleType

import pytest
import test_attention
import test_gemm
import test_layer_norm
import test_softmax


@pytest.mark.parametrize("module", [test_softmax, test_gemm, test_attention, test_layer_norm], ids=lambda m: m.__name__)
def test_small_names_what_is_there(module: ModuleType) -> None:
    for function, wanted in module.SMALL.items():
        marks = [m for m in getattr(module, function).pytestmark if m.name == "parametrize"]
        offered = {m.args[0]: {getattr(v, "name", v) for v in m.args[1]} for m in marks if m.args[0] != "variant"}
        assert any(m.args[0] == "variant" for m in marks)
        for name, values in wanted.items():
            assert set(values) <= offered[name], f"{function}: {name}"
