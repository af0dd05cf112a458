"""Errors of float32 products against float64: cuBLAS, the rows of the variant table, and three TF32 products whose sums
leave the tensor cores never, every 128 or every 32 of k.

Tensor cores truncate when they add. That is not only less exact than rounding: it is one-sided, so that every sum shrinks,
and the layers of a model shrink with it. The bias shows it: the mean of the signed errors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import native
from . import cuda, ladder
from .records import LadderRecord

SIZE = 2048
DEPTHS = (768, 2048, 8192)
INPUTS = ("normal", "same sign")
_OP = "FusedGemm"


def _operands(inputs: str, depth: int) -> list[torch.Tensor]:
    torch.manual_seed(depth)
    make = torch.randn if inputs == "normal" else torch.rand
    return [make(*shape, device="cuda") for shape in ((SIZE, depth), (depth, SIZE))]


def _calls(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[ladder.Stage, str, cuda.Call]]:
    """The stages, the kernels that they are, and their launches."""
    sizes = (SIZE, SIZE, a.shape[1])
    for stage in ladder.PRODUCTS:
        yield stage, stage.name, ladder.stage_call("gemm", stage.name, (a, b, y), sizes)
    arguments = [cuda.device_tensor(a), cuda.device_tensor(b)]
    chosen = native.choose(_OP, arguments, {"precision": "ieee"}, device="cuda")
    ieee = ladder.Stage("ieee", "plain float32", precision="ieee")
    yield ieee, chosen, cuda.our_call(_OP, [a, b], {"precision": "ieee"}, y)
    for row in native.variants(_OP):
        if "x3_" not in row.name:
            continue
        attrs = {"precision": "tf32x3"}
        try:
            call = cuda.our_call(_OP, [a, b], attrs, y, row.name)
            call()
        except NotImplementedError:  # not for this device
            continue
        yield ladder.Stage("row", "a row of the table", precision="tf32x3"), row.name, call


def run() -> list[LadderRecord]:
    """``error`` is the largest of |y - float64| / (|A||B|), ``ladder["bias"]`` the mean of (y - float64) sign(float64) over
    that of |float64|; the same for cuBLAS in float32, as the baseline.
    """
    records = []
    torch.backends.cuda.matmul.allow_tf32 = False
    for inputs in INPUTS:
        for depth in DEPTHS:
            a, b = _operands(inputs, depth)
            exact, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
            y = torch.empty(SIZE, SIZE, device="cuda")

            def judged(call: cuda.Call) -> tuple[float, float, float]:
                """Error, bias, and microseconds."""
                y.fill_(torch.nan)
                call()
                difference = y.double() - exact
                bias = (difference * exact.sign()).mean() / exact.abs().mean()
                return float((difference.abs() / scale).max()), float(bias), 1e6 * cuda.Captured([call]).seconds()

            error, bias, time = judged(lambda: torch.mm(a, b, out=y))
            rival = {"median_us": time, "error": error, "bias": bias}
            for stage, variant, call in _calls(a, b, y):
                error, bias, time = judged(call)
                records.append(
                    LadderRecord(
                        _OP,
                        {"m": SIZE, "n": SIZE, "k": depth},
                        "float32",
                        stage.precision,
                        variant,
                        time,
                        (time, time),
                        error,
                        {"cublas_fp32": rival},
                        ladder={"table": "errors", "idea": stage.idea, "inputs": inputs, "bias": bias},
                    )
                )
    return records
