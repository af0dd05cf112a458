"""FusedGemm: one table of cases, for every variant on every device, against float64."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernel_harness import (
    EPSILON,
    assert_close,
    for_each_dtype,
    numpy_dtype,
    random_tensor,
    run_variant,
    variant_params,
)
from ortplugins import native, ops
from reference import ACTIVATIONS, GemmResult, gemm_reference

OP = "FusedGemm"
A, B, BIAS, RESIDUAL = range(4)

Inputs = list[np.ndarray | None]

PRECISIONS = ops.PRECISIONS
SMALLEST = {name: float(ml_dtypes.finfo(numpy_dtype(name)).smallest_subnormal) for name in ops.FLOAT_TYPES}


@dataclass(frozen=True)
class Case:
    """``a_batch`` and ``b_batch`` are leading dimensions, ``bias`` is a shape; ``same_sign`` makes all products positive, so
    that a biased accumulator shows; ``spoil`` edits the inputs."""

    name: str
    m: int = 5
    n: int = 6
    k: int = 7
    a_batch: tuple[int, ...] = ()
    b_batch: tuple[int, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    bias: tuple[int, ...] | None = None
    residual: bool = False
    same_sign: bool = False
    spoil: Callable[[Inputs], None] | None = None
    dtypes: tuple[str, ...] = ops.FLOAT_TYPES

    def inputs(self, dtype: str) -> Inputs:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))

        def tensor(shape: tuple[int, ...]) -> np.ndarray:
            values = (
                rng.random(shape).astype(numpy_dtype(dtype)) if self.same_sign else random_tensor(rng, shape, dtype)
            )
            return np.asarray(values)  # NumPy makes no array of rank 0

        a = (self.k, self.m) if self.attrs.get("transA", 0) else (self.m, self.k)
        b = (self.n, self.k) if self.attrs.get("transB", 0) else (self.k, self.n)
        inputs: Inputs = [tensor((*self.a_batch, *a)), tensor((*self.b_batch, *b))]
        batch = np.broadcast_shapes(self.a_batch, self.b_batch)
        inputs.append(None if self.bias is None else tensor(self.bias))
        inputs.append(tensor((*batch, self.m, self.n)) if self.residual else None)
        if self.spoil is not None:
            self.spoil(inputs)
        while inputs[-1] is None:
            inputs.pop()
        return inputs


def trans(a: int, b: int) -> dict[str, int]:
    return {"transA": a, "transB": b}


TRANSPOSES = [trans(a, b) for a in (0, 1) for b in (0, 1)]


def put(tensor: int, index: Any, value: float) -> Callable[[Inputs], None]:
    return lambda inputs: inputs[tensor].__setitem__(index, value)


def large_and_small_rows(inputs: Inputs) -> None:
    """Rows of a times 2^60 and 2^-60; the bound is relative to each row's own size."""
    inputs[A][1] *= inputs[A].dtype.type(2.0**60)
    inputs[A][3] *= inputs[A].dtype.type(2.0**-60)


def subnormal(inputs: Inputs) -> None:
    """Products with a factor of 1 are subnormal numbers, which must not be flushed to zero."""
    inputs[A][...] = (np.round(inputs[A].astype(np.float64) * 8) * SMALLEST[inputs[A].dtype.name]).astype(
        inputs[A].dtype
    )
    inputs[B][...] = np.sign(inputs[B].astype(np.float64)).astype(inputs[B].dtype)


# Tiles: 12 x 32, 6 x 16 and 4 x 8 on the CPU, 64 and 128 on CUDA; steps of K of 8, 16, 32, 256 and 512.
SIZES = [
    (1, 1, 1),
    (1, 1, 17),
    (1, 37, 5),
    (37, 1, 5),
    (2, 3, 5),
    (7, 13, 11),
    (11, 31, 7),
    (12, 32, 8),
    (13, 33, 9),
    (24, 64, 16),
    (5, 15, 33),
    (6, 16, 32),
    (63, 63, 31),
    (64, 64, 32),
    (65, 65, 33),
    (127, 127, 63),
    (128, 128, 64),
    (129, 129, 65),
    (31, 101, 127),
    (61, 67, 257),
    (97, 89, 513),
    (50, 40, 1031),
    (1, 300, 700),
    (3, 65, 2053),
    (200, 10, 40),
    (260, 300, 20),
    (49, 95, 300),
    (1031, 7, 3),
]

CASES = [
    *(Case(f"size_{m}x{n}x{k}", m, n, k) for m, n, k in SIZES),
    *(
        Case(f"trans{t['transA']}{t['transB']}_{m}x{n}x{k}", m, n, k, attrs=t)
        for t in TRANSPOSES
        for m, n, k in (
            (1, 1, 1),
            (3, 2, 4),
            (13, 33, 17),
            (64, 64, 64),
            (65, 130, 70),
            (131, 67, 521),
            (1, 70, 33),
            (70, 1, 33),
        )
    ),
    # Bias and residual
    *(
        Case(f"bias_{'x'.join(map(str, s)) or 'scalar'}", 13, 37, 9, bias=s)
        for s in ((), (1,), (37,), (1, 37), (13, 1), (13, 37), (1, 1))
    ),
    *(Case(f"bias_one_row_{'x'.join(map(str, s))}", 1, 37, 9, bias=s) for s in ((37,), (1, 1), (1, 37))),
    *(Case(f"bias_one_col_{'x'.join(map(str, s))}", 37, 1, 9, bias=s) for s in ((1,), (37, 1))),
    Case("residual", 13, 37, 9, residual=True),
    Case("alpha_beta", 70, 37, 19, bias=(37,), residual=True, attrs={"alpha": -0.3, "beta": 1.7}),
    Case("alpha_0", 13, 37, 9, bias=(13, 1), attrs={"alpha": 0.0}),
    Case("beta_0_bias_nan", 13, 37, 9, bias=(37,), attrs={"beta": 0.0}, spoil=put(BIAS, ..., np.nan)),
    # Activations, one tile and several
    *(
        Case(f"{name}_{m}x{n}x{k}", m, n, k, bias=(n,), residual=k == 40, attrs={"activation": name, "alpha": 0.5})
        for name in ACTIVATIONS
        for m, n, k in ((3, 5, 2), (33, 67, 40), (70, 40, 600))
    ),
    # Batches that broadcast
    *(
        Case(
            f"batch_{'x'.join(map(str, a)) or 'none'}_{'x'.join(map(str, b)) or 'none'}_{t['transA']}{t['transB']}",
            9,
            35,
            18,
            a,
            b,
            t,
            bias=(9, 35),
            residual=True,
        )
        for a, b in (
            ((3,), (3,)),
            ((3,), ()),
            ((), (3,)),
            ((2, 3), (2, 3)),
            ((2, 3), (3,)),
            ((3,), (2, 3)),
            ((2, 1), (3,)),
            ((2, 1, 2), (1, 3, 1)),
        )
        for t in TRANSPOSES
    ),
    Case("batch_merges", 17, 33, 21, (2, 5), (), bias=(33,), attrs={"activation": "gelu"}),
    Case("batch_of_many", 3, 4, 5, (70, 3), (70, 3), bias=(4,)),
    *(
        Case(f"small_{m}x{n}x{k}_{'x'.join(map(str, a))}_{'x'.join(map(str, b))}_b{t}", m, n, k, a, b, trans(0, t) | more, bias=(n,), residual=m > 1)
        for m, n, k, a, b, more in (
            (1, 3, 2, (4097,), (4097,), {}),
            (17, 12, 40, (900,), (900,), {"activation": "gelu"}),
            (63, 64, 65, (3,), (3,), {"activation": "relu"}),
            (64, 65, 63, (2, 3), (3,), {}),
            (65, 63, 64, (3,), (2, 3), {}),
            (64, 64, 128, (1,), (1,), {}),
        )
        for t in (0, 1)
    ),
    Case("batch_over_tiles", 70, 130, 65, (2,), (2,), attrs=trans(0, 1)),
    # Values
    Case("zeros", 13, 37, 50, spoil=put(A, ..., 0.0)),
    Case("subnormal", 13, 37, 9, spoil=subnormal),
    Case("nan_row", 13, 37, 9, spoil=put(A, (2, 3), np.nan), attrs={"activation": "relu"}),
    Case("inf_column", 13, 37, 9, spoil=put(B, (3, 2), np.inf)),
    Case("nan_bias", 13, 37, 9, bias=(37,), spoil=put(BIAS, 5, np.nan), attrs={"activation": "gelu"}),
    # Nothing to add up, nothing to write
    *(
        Case(f"k_0_{name}", 5, 37, 0, bias=(37,), residual=True, attrs={"activation": name, "beta": 0.5})
        for name in ACTIVATIONS
    ),
    Case("k_0_plain", 5, 37, 0),
    Case("k_0_batch", 5, 3, 0, (2,), (2,)),
    Case("m_0", 0, 37, 9, bias=(37,)),
    Case("n_0", 5, 0, 9, bias=(5, 1)),
    Case("batch_0", 5, 4, 9, (0,), (0,)),
    # Accuracy of long sums
    *(
        Case(f"deep_{'same_sign' if s else 'normal'}_{k}", 24, 40, k, same_sign=s)
        for s in (False, True)
        for k in (4096, 16384)
    ),
]


def spread(inputs: Inputs) -> None:
    """Elements of very different size within rows of a and columns of b."""
    rng = np.random.default_rng(7)
    for i in (A, B):
        inputs[i] *= np.exp2(rng.integers(-30, 30, inputs[i].shape)).astype(np.float32)


def pick_small(inputs: Inputs) -> None:
    """Each column of b is one 1, often where the elements of a are far smaller than the rest of their row."""
    inputs[A][:, ::2] *= np.float32(2.0**-45)
    inputs[B][...] = np.eye(*inputs[B].shape, dtype=np.float32)


# Rows that are multiples of 16 bytes in every type: some kernels need that.
ROWS_OF_16_BYTES = [
    *(
        Case(f"rows16_{m}x{n}x{k}", m, n, k, bias=(n,), residual=k == 64)
        for m, n, k in (
            (1, 8, 8),
            (64, 64, 64),
            (127, 264, 72),
            (128, 256, 64),
            (129, 128, 200),
            (260, 520, 136),
            (40, 72, 4104),
            (300, 1000, 64),
        )
    ),
    *(
        Case(f"rows16_trans{t['transA']}{t['transB']}_{m}x{n}x{k}", m, n, k, attrs=t)
        for t in TRANSPOSES
        for m, n, k in ((8, 8, 8), (128, 256, 128), (136, 264, 72), (136, 72, 2056))
    ),
    *(Case(f"rows16_few_{m}x{n}x{k}_b{t}", m, n, k, bias=(n,), residual=True, attrs=trans(0, t))
      for t in (0, 1) for m, n, k in ((3, 72, 264), (8, 200, 40), (16, 136, 4104), (16, 8712, 136), (5, 20008, 72))),
    Case("rows16_many_tiles", 2100, 2056, 72, bias=(2056,), residual=True, attrs={"activation": "gelu"}),
    Case("rows16_any_n", 70, 131, 72, bias=(131,), residual=True, attrs=trans(0, 1)),
    Case("rows16_bias_column", 130, 264, 72, bias=(130, 1), residual=True, attrs={"activation": "relu", "beta": 0.5}),
    *(
        Case(f"rows16_{name}", 136, 264, 520, bias=(264,), residual=True, attrs={"activation": name, "alpha": 0.5})
        for name in ACTIVATIONS
    ),
    Case("rows16_batch", 130, 72, 136, (3,), (3,), residual=True),
    *(Case(f"rows16_small_b{t}", 64, 64, 64, (300,), (300,), trans(0, t) | {"activation": "silu"}, bias=(64,), residual=True) for t in (0, 1)),
    *(Case(f"rows16_small_rows_b{t}", 40, 24, 104, (2, 3), (2, 1), trans(0, t)) for t in (0, 1)),
    Case("rows16_batch_of_a", 130, 72, 136, (3,), (), attrs=trans(1, 1)),
    Case("rows16_batch_of_b", 136, 72, 136, (), (3,), bias=(72,), attrs=trans(1, 0)),
    Case("rows16_nan_row", 136, 264, 72, spoil=put(A, (2, 3), np.nan)),
    Case("rows16_inf_column", 136, 264, 72, spoil=put(B, (3, 2), np.inf)),
    *(Case(f"rows16_deep_{'same_sign' if s else 'normal'}", 24, 40, 4096, same_sign=s) for s in (False, True)),
]

PRECISION_CASES = [
    *ROWS_OF_16_BYTES,
    *(
        Case(f"{f.__name__}_{m}x{n}x{k}", m, n, k, spoil=f, dtypes=("float32",))
        for f in (spread, pick_small)
        for m, n, k in ((40, 70, 129), (200, 300, 310))
    ),
    *(
        c
        for c in CASES
        if c.name.startswith(("size_6", "size_12", "small_", "trans", "deep", "size_50x40", "batch_over", "gelu_33", "k_0_gelu"))
    ),
    Case("rows_2^60", 40, 70, 129, spoil=large_and_small_rows, dtypes=("float32",)),
    Case("rows_2^60_bias", 140, 70, 33, bias=(70,), spoil=large_and_small_rows, dtypes=("float32",)),
]

SMALL = {
    "test_gemm": {
        "case": (
            "size_61x67x257",
            "trans10_65x130x70",
            "trans11_64x64x64",
            "batch_over_tiles",
            "gelu_33x67x40",
            "k_0_plain",
            "rows16_128x256x64",
            "rows16_trans00_136x72x2056",
            "rows16_trans11_136x264x72",
            "rows16_gelu",
            "rows16_few_8x200x40_b0",
            "rows16_few_8x200x40_b1",
            "small_17x12x40_900_900_b0",
            "small_17x12x40_900_900_b1",
        )
    },
    "test_precision": {
        "case": (
            "size_61x67x257",
            "trans10_65x130x70",
            "batch_over_tiles",
            "rows16_gelu",
            "small_17x12x40_900_900_b0",
            "small_17x12x40_900_900_b1",
        ),
        "precision": ("tf32x3", "tf32"),
    },
}
"""What runs under compute-sanitizer: every kernel and layout, with tails, and rings of stages that come round."""


def bound_of(case: Case, expected: GemmResult, dtype: str, precision: str = "ieee") -> np.ndarray:
    """Rounding of the sums, through the activation, and of the result.

    Sums of random signs grow like sqrt(k) while |A||B| grows like k: a float32 sum in any order is off by a few units of
    |A||B| 2^-24 whatever k is. With one sign the sum is |A||B| itself, and rounding adds up like sqrt(k). Tensor cores
    cut off instead of rounding, about once for 8 products. TF32 rounds each factor to 11 bits; errors of random sign grow
    like sqrt(k), too, unless few products make up the sum.
    """
    unit = EPSILON["float32"] / 2
    factor = min(case.k + 2.0, 8.0) + (2.0 * math.sqrt(case.k) if case.same_sign else 0.0)
    if dtype != "float32" or precision == "tf32x3":
        factor = 2.0 * factor + case.k / 8.0 * (1.0 if case.same_sign else 1.0 / math.sqrt(case.k + 1.0))
    relative = factor * unit
    if precision == "tf32":
        whole = case.same_sign or case.spoil in (spread, pick_small)
        relative += 2.0**-10 * (1.0 if whole else min(1.0, 6.0 / math.sqrt(case.k + 1.0)))
    before = relative * expected.product_size + 4.0 * unit * expected.addend_size + 2.0**-149
    # No activation is steeper than 1.13. Their own error: of relative size, and that of 1 + erf(x) near -1.
    own = 8.0 * unit * np.abs(expected.before)
    size = np.abs(expected.y)
    rounding = EPSILON[dtype] / 2 * size + SMALLEST[dtype]
    return np.nan_to_num(1.13 * before + own + rounding, posinf=0.0)


@functools.cache
def solved(name: str, dtype: str, precision: str = "ieee") -> tuple[Inputs, GemmResult, np.ndarray]:
    """Inputs, expected result and bound of a case; made once for all variants."""
    case = next(c for c in (*CASES, *ROWS_OF_16_BYTES, *PRECISION_CASES, BIAS_CASE) if c.name == name)
    inputs = case.inputs(dtype)
    expected = gemm_reference(inputs, case.attrs)
    return inputs, expected, bound_of(case, expected, dtype, precision)


@pytest.mark.parametrize("variant", variant_params(OP))
@pytest.mark.parametrize("case", [*CASES, *ROWS_OF_16_BYTES], ids=lambda c: c.name)
def test_gemm(case: Case, variant: native.VariantInfo) -> None:
    def check(dtype: str) -> None:
        inputs, expected, bound = solved(case.name, dtype)
        (y,) = run_variant(OP, variant, inputs, case.attrs)
        assert_close(y, expected.y, bound)

    for_each_dtype(case.dtypes, check)


@pytest.mark.parametrize("variant", variant_params(OP))
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", PRECISION_CASES, ids=lambda c: c.name)
def test_precision(case: Case, precision: str, variant: native.VariantInfo) -> None:
    """`tf32x3` has nearly the bound of `ieee`, `tf32` that of factors rounded to TF32; variants may be better than asked."""
    inputs, expected, bound = solved(case.name, "float32", precision)
    (y,) = run_variant(OP, variant, inputs, {**case.attrs, "precision": precision})
    assert_close(y, expected.y, bound)


BIAS_CASE = Case("bias_of_sums", 64, 128, 768, same_sign=True)
BIAS_BOUND = 2.0 * EPSILON["float32"]
"""Largest relative mean error of sums of one sign. A chain of n additions that cut off takes about 0.36 n 2^-24 off its
result, since the sum grows as it goes; n is 4 in kernels whose sums leave the tensor cores in time."""


def relative_bias(y: np.ndarray, expected: np.ndarray) -> float:
    return float(np.mean((y.astype(np.float64) - expected) / expected))


@pytest.mark.parametrize("variant", variant_params(OP))
@pytest.mark.parametrize("precision", ("ieee", "tf32x3"))
def test_sums_have_no_bias(precision: str, variant: native.VariantInfo) -> None:
    """An error that all elements share does not average out in the layers of a model, however small it is."""
    inputs, expected, _ = solved(BIAS_CASE.name, "float32")
    (y,) = run_variant(OP, variant, inputs, {"precision": precision})
    assert abs(relative_bias(y, expected.y)) <= BIAS_BOUND


@pytest.mark.parametrize("variant", [p for p in variant_params(OP) if p.values[0].device == "cpu"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_packed_b(case: Case, variant: native.VariantInfo) -> None:
    """A constant b, packed ahead as the runtimes do."""
    for dtype in case.dtypes:
        inputs, expected, bound = solved(case.name, dtype)
        (y,) = run_variant(OP, variant, inputs, case.attrs, prepack=True)
        assert_close(y, expected.y, bound)


@pytest.mark.parametrize("variant", variant_params(OP))
@pytest.mark.parametrize("activation", sorted(set(ACTIVATIONS) - {"none"}))
def test_activation_accuracy(activation: str, variant: native.VariantInfo) -> None:
    """Every float32 argument from -20 to 20, and some beyond: with an empty K nothing else is rounded.

    On the CPU a few ulp of the result however small it is, where the sigmoid is a normal number; elsewhere at least a few
    ulp of the argument.
    """
    edges = [
        0.0,
        -0.0,
        1e-30,
        -1e-30,
        1e-42,
        -1e-42,
        80.0,
        -80.0,
        88.8,
        -88.8,
        103.0,
        -103.0,
        1e4,
        -1e4,
        1e30,
        -1e30,
        3e38,
    ]
    x = np.concatenate([np.linspace(-20.0, 20.0, 20011), np.linspace(-1.0, 1.0, 5003), edges]).astype(np.float32)
    inputs: Inputs = [np.zeros((1, 0), np.float32), np.zeros((0, x.size), np.float32), x]
    (y,) = run_variant(OP, variant, inputs, {"activation": activation})
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.where(x < -1e3, -0.0, ACTIVATIONS[activation](x.astype(np.float64)))[None]
    ulp = EPSILON["float32"] * np.abs(expected) + SMALLEST["float32"]
    if variant.device == "cpu":
        bound = 8.0 * ulp + np.minimum(np.abs(x), 1e3) * SMALLEST["float32"]
    else:
        bound = 8.0 * ulp + 8.0 * EPSILON["float32"] * np.minimum(np.abs(x), 1e3) + 2.0**-126
    assert_close(y, expected, bound)


@pytest.mark.parametrize("variant", variant_params(OP))
def test_threads_do_not_change_results(variant: native.VariantInfo) -> None:
    for m, n, k, attrs in ((200, 130, 70, {}), (33, 500, 600, trans(0, 1)), (150, 60, 1100, trans(1, 0))):
        inputs = Case("threads", m, n, k, attrs=attrs).inputs("float32")
        for prepack in (False, True):
            (once,) = run_variant(OP, variant, inputs, attrs, threads=1, prepack=prepack)
            for threads in (2, 5):
                np.testing.assert_array_equal(
                    run_variant(OP, variant, inputs, attrs, threads=threads, prepack=prepack)[0], once
                )


@pytest.mark.parametrize(
    ("name", "wrong_attrs"),
    [
        ("trans01_64x64x64", {}),
        ("alpha_beta", {"alpha": -0.3}),
        ("alpha_beta", {"beta": 1.7}),
        ("gelu_33x67x40", {"activation": "none", "alpha": 0.5}),
        ("silu_33x67x40", {"activation": "gelu", "alpha": 0.5}),
    ],
)
def test_bound_rejects_wrong_results(name: str, wrong_attrs: dict[str, Any]) -> None:
    """The bound is tight enough to see a forgotten attribute in each type."""
    for dtype in ops.FLOAT_TYPES:
        inputs, expected, bound = solved(name, dtype)
        with pytest.raises(AssertionError, match="over the bound"):
            assert_close(gemm_reference(inputs, wrong_attrs).y, expected.y, bound)


def round_to_tf32(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("name", ["size_64x64x32", "trans01_131x67x521", "deep_normal_4096", "rows_2^60"])
def test_bound_rejects_lost_precision(name: str) -> None:
    """float32 products by way of TF32 or bfloat16 fail the bounds of `ieee` and `tf32x3`; bfloat16 fails that of `tf32`."""
    inputs, expected, _ = solved(name, "float32")
    case = next(c for c in (*CASES, *PRECISION_CASES) if c.name == name)
    tf32 = gemm_reference([round_to_tf32(t) for t in inputs], case.attrs).y
    bfloat16 = gemm_reference([t.astype(ml_dtypes.bfloat16) for t in inputs], case.attrs).y
    for precision in ("ieee", "tf32x3"):
        with pytest.raises(AssertionError, match="over the bound"):
            assert_close(tf32, expected.y, solved(name, "float32", precision)[2])
    assert_close(tf32, expected.y, solved(name, "float32", "tf32")[2])
    with pytest.raises(AssertionError, match="over the bound"):
        assert_close(bfloat16, expected.y, solved(name, "float32", "tf32")[2])


def truncated_sums(a: np.ndarray, b: np.ndarray, depth: int = 1) -> np.ndarray:
    """``a @ b`` of positive numbers, ``depth`` products at a time, cut off to float32 instead of rounded."""
    sums = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for p in range(0, a.shape[1], depth):
        exact = sums + a[:, p : p + depth].astype(np.float64) @ b[p : p + depth].astype(np.float64)
        nearest = exact.astype(np.float32)
        sums = np.where(nearest > exact, np.nextafter(nearest, np.float32(0)), nearest)
    return sums


def test_bound_rejects_biased_sums() -> None:
    """Sums of one sign that are cut off instead of rounded drift away."""
    inputs, expected, bound = solved("deep_same_sign_4096", "float32")
    with pytest.raises(AssertionError, match="over the bound"):
        assert_close(truncated_sums(inputs[A], inputs[B]), expected.y, bound)


def test_bias_bound_tells_chains_apart() -> None:
    """Tensor cores add eight products at once: sums over 32 of k pass, sums over 128 of k fail."""
    inputs, expected, _ = solved(BIAS_CASE.name, "float32")

    def promoted(depth: int) -> np.ndarray:
        parts = [truncated_sums(inputs[A][:, p : p + depth], inputs[B][p : p + depth], 8) for p in range(0, BIAS_CASE.k, depth)]
        return np.sum(parts, axis=0, dtype=np.float32)

    assert abs(relative_bias(promoted(32), expected.y)) <= BIAS_BOUND
    assert abs(relative_bias(promoted(128), expected.y)) > BIAS_BOUND


@pytest.mark.parametrize(
    ("shapes", "attrs", "message"),
    [
        (((3, 4), (5, 6)), {}, "b: dimension 0 is 5, expected 4"),
        (((3, 4), (4, 6), (5,)), {}, "bias: does not broadcast"),
        (((3, 4), (4, 6), (1, 3, 6)), {}, "bias: does not broadcast"),
        (((3, 4), (4, 6), None, (3, 5)), {}, "residual"),
        (((2, 3, 4), (3, 4, 6)), {}, "b: dimension 0 does not broadcast"),
        (((4,), (4, 6)), {}, "a: expected a rank of at least 2"),
        (((3, 4), (4, 6)), {"activation": "swish"}, "activation"),
        (((3, 4), (4, 6)), {"transA": 2}, "transA: 2 is not in"),
    ],
)
def test_refuses(shapes: tuple[tuple[int, ...] | None, ...], attrs: dict[str, Any], message: str) -> None:
    inputs = [None if s is None else np.zeros(s, np.float32) for s in shapes]
    with pytest.raises(ValueError, match=message):
        native.run(OP, inputs, attrs)
