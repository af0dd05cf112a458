"""ONNX's own cases of the operator Attention, as one node and as the nodes that its definition expands to."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from ort_models import run_model
from rewrite_helpers import in_numpy, session, sites

from ortplugins.rewrite import rewrite


def cases() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases

    return [pytest.param(c, id=c.name) for c in collect_testcases("Attention") if c.name.startswith("test_attention_")]


def _gives_scores(model: onnx.ModelProto) -> bool:
    return any(o.name == "qk_matmul_output" for o in model.graph.output)


@pytest.mark.parametrize("case", cases())
def test_case(case: Any) -> None:
    result = rewrite(case.model)
    (site,) = sites(result, "attention")
    if _gives_scores(case.model):
        assert site.status == "skipped"
        assert any(
            why in site.reason
            for why in ("gives its scores out", "is also used by", "are used by other nodes", "DOUBLE")
        )
        return
    assert site.status == "fused", site.reason
    onnx.checker.check_model(result.model, full_check=True)
    if "bf16" in case.name and "expanded" in case.name:
        run = in_numpy(result.model)  # the mask arithmetic around the operator has no bfloat16 kernel in ONNX Runtime
    else:
        run = functools.partial(run_model, session(result.model, ours=True))
    for given, expected in case.data_sets:
        feeds = dict(zip([i.name for i in case.model.graph.input], given))
        for actual, wanted in zip(run(feeds), expected, strict=True):
            epsilon = float(ml_dtypes.finfo(wanted.dtype).eps)
            error = np.abs(actual.astype(np.float64) - wanted.astype(np.float64))
            assert np.all(
                error <= case.atol + max(case.rtol, 4 * epsilon) * np.maximum(1.0, np.abs(wanted.astype(np.float64)))
            )
