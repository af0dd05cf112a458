"""FusedSoftmax: one table of cases, for every variant on every device, against float64."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernel_harness import (
    EPSILON,
    assert_close,
    for_each_dtype,
    misaligned,
    numpy_dtype,
    random_tensor,
    run_variant,
    table_params,
    variant_params,
)
from ortplugins import native, ops
from reference import SoftmaxResult, softmax_reference

OP = "FusedSoftmax"
X, MASK = range(2)

Inputs = list[np.ndarray | None]

LOWEST = {name: float(ml_dtypes.finfo(numpy_dtype(name)).min) for name in ops.FLOAT_TYPES}
"""Lowest finite number of each type, with which exporters fill masks."""
SMALLEST = {name: float(ml_dtypes.finfo(numpy_dtype(name)).smallest_subnormal) for name in ops.FLOAT_TYPES}


@dataclass(frozen=True)
class Case:
    """``mask`` is a shape, ``mask_kind`` how it is filled; ``spoil`` edits the inputs."""

    name: str
    shape: tuple[int, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    mask: tuple[int, ...] | None = None
    mask_kind: str = "bool"  # bool, add, -inf (30 % of it), lowest (the same)
    std: float = 3.0
    spoil: Callable[[Inputs], None] | None = None
    dtypes: tuple[str, ...] = ops.FLOAT_TYPES

    def make_mask(self, rng: np.random.Generator, dtype: str) -> np.ndarray:
        kept = np.asarray(rng.random(self.mask) < 0.7)  # NumPy makes no array of rank 0
        values = np.asarray(random_tensor(rng, self.mask, dtype))
        if self.mask_kind == "bool":
            return kept
        if self.mask_kind == "add":
            return values
        hidden = {"-inf": -np.inf, "lowest": LOWEST[dtype]}[self.mask_kind]
        return np.asarray(np.where(kept, values, numpy_dtype(dtype).type(hidden)))

    def inputs(self, dtype: str) -> Inputs:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        inputs: Inputs = [random_tensor(rng, self.shape, dtype, self.std)]
        if self.mask is not None:
            inputs.append(self.make_mask(rng, dtype))
        if self.spoil is not None:
            self.spoil(inputs)
        return inputs


def fill(value: float) -> Callable[[Inputs], None]:
    return lambda inputs: inputs[X].fill(value)


def put(index: Any, value: float | bool, tensor: int = X) -> Callable[[Inputs], None]:
    return lambda inputs: inputs[tensor].__setitem__(index, value)


def huge(inputs: Inputs) -> None:
    """Values of both signs up to the ends of the type; differences overflow."""
    inputs[X].flat[::2] = LOWEST[inputs[X].dtype.name] * 0.9
    inputs[X].flat[1::3] = LOWEST[inputs[X].dtype.name] * -0.9


def subnormal(inputs: Inputs) -> None:
    inputs[X][...] = (np.sign(inputs[X].astype(np.float64)) * SMALLEST[inputs[X].dtype.name] * 5).astype(
        inputs[X].dtype
    )


def garbage_where_hidden(inputs: Inputs) -> None:
    hidden = np.broadcast_to(~inputs[MASK], inputs[X].shape)
    inputs[X][hidden] = np.resize([np.nan, np.inf, -np.inf], hidden.sum()).astype(inputs[X].dtype)


def log_of(cases: list[Case]) -> list[Case]:
    return [
        Case(f"log_{c.name}", c.shape, {**c.attrs, "log": 1}, c.mask, c.mask_kind, c.std, c.spoil, c.dtypes)
        for c in cases
    ]


def masked(name: str, shape: tuple[int, ...], masks: list[tuple[int, ...]], **problem: Any) -> list[Case]:
    return [
        Case(f"{name}_mask_{'x'.join(map(str, m)) or 'scalar'}_{kind}", shape, mask=m, mask_kind=kind, **problem)
        for m in masks
        for kind in ("bool", "add", "-inf")
    ]


CONTIGUOUS = [
    # Row lengths: one, primes, and around vectors, warps, register and buffer limits
    *(
        Case(f"cols_{n}", (3, n))
        for n in (
            1,
            2,
            3,
            7,
            15,
            16,
            17,
            31,
            32,
            33,
            64,
            127,
            128,
            129,
            1023,
            1024,
            1025,
            2053,
            4095,
            4096,
            4097,
            8191,
            8193,
            16383,
            16385,
            20011,
        )
    ),
    *(Case(f"cols_{n}", (2, n)) for n in (32767, 32769, 70001, 131072, 300001, 700001)),
    # Enough rows for blocks that stay, and for clusters of few blocks
    *(Case(f"long_rows_{'x'.join(map(str, shape))}", shape) for shape in ((270, 9001), (140, 20011))),
    Case("rank_1", (37,)),
    Case("rank_5", (2, 1, 3, 2, 29)),
    Case("many_rows", (1031, 33)),
    Case("trailing_ones", (3, 19, 1, 1), {"axis": 1}),
    Case("cols_of_one", (3, 5, 1)),
    Case("scale", (5, 100), {"scale": 0.125}),
    Case("scale_negative", (5, 100), {"scale": -1.7}),
    Case("scale_zero", (5, 100), {"scale": 0.0}),
]
OTHER_AXES = [
    *(Case(f"axis_{a}", (2, 3, 4, 5), {"axis": a}) for a in (-4, -3, -2, -1, 0, 1, 2, 3)),
    *(
        Case(f"inner_{n}", (3, 19, n), {"axis": 1, "scale": 0.7})
        for n in (2, 3, 5, 8, 11, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 128, 131)
    ),
    *(Case(f"axis_length_{n}", (2, n, 6), {"axis": 1}) for n in (1, 2, 3, 5, 127, 1031)),
    *(Case(f"long_axis_inner_{n}", (5003, n), {"axis": 0}) for n in (2, 70)),
]
MASKED = [
    *masked(
        "rows",
        (2, 3, 5, 37),
        [(37,), (5, 37), (5, 1), (2, 1, 1, 37), (1, 3, 1, 37), (2, 3, 5, 37), (2, 1, 5, 1), (1,), ()],
    ),
    # Rows that CPU kernels keep in registers, by the width of their vectors
    *(m for n in (30, 61, 121) for m in masked(f"register_{n}", (2, 5, n), [(n,), (5, 1), (2, 1, n)])),
    *masked("longest", (2, 66001), [(66001,), (2, 1)]),
    *masked("long", (2, 3, 4501), [(4501,), (3, 4501), (2, 1, 4501), (3, 1)]),
    *masked(
        "axis1",
        (2, 7, 3, 20),
        [(20,), (3, 20), (3, 1), (7, 1, 1), (7, 3, 20), (2, 1, 3, 1), (2, 7, 1, 20), (2, 7, 3, 20), (1, 1)],
        attrs={"axis": 1},
    ),
    *masked("narrow", (4, 23, 5), [(5,), (23, 1), (23, 5), (4, 1, 5), (4, 1, 1), (4, 23, 5), (1,)], attrs={"axis": 1}),
    *masked("wide", (2, 13, 70), [(70,), (13, 1), (13, 70), (2, 1, 70), (2, 13, 70), (2, 1, 1)], attrs={"axis": 1}),
    Case("mask_lowest", (4, 3, 50), mask=(4, 1, 50), mask_kind="lowest"),
    Case("mask_lowest_axis_1", (4, 50, 20), {"axis": 1}, mask=(50, 20), mask_kind="lowest"),
    Case("mask_scale", (4, 3, 50), {"scale": 0.125}, mask=(50,), mask_kind="add"),
    Case("mask_garbage", (4, 3, 50), mask=(4, 1, 50), spoil=garbage_where_hidden),
    Case("mask_garbage_long", (3, 5000), mask=(5000,), spoil=garbage_where_hidden),
    Case("mask_garbage_axis_0", (50, 21), {"axis": 0}, mask=(50, 1), spoil=garbage_where_hidden),
    *(
        Case(
            f"masked_row_{kind}_{'x'.join(map(str, shape))}_{axis}",
            shape,
            {"axis": axis},
            mask=shape,
            mask_kind=kind,
            spoil=lambda inputs, axis=axis, kind=kind: np.moveaxis(inputs[MASK], axis, -1).__setitem__(
                0, False if kind == "bool" else -np.inf
            ),
        )
        for kind in ("bool", "-inf")
        for shape, axis in (((4, 40), -1), ((4, 30), -1), ((4, 61), -1), ((4, 121), -1), ((3, 5000), -1), ((3, 20, 40), 1), ((3, 20, 5), 1))
    ),
    Case("masked_all", (3, 70), mask=(), spoil=lambda inputs: inputs[MASK].fill(False)),
    Case(
        "masked_nan_row", (3, 70), mask=(70,), spoil=lambda inputs: (inputs[MASK].fill(False), inputs[X].fill(np.nan))
    ),
]
VALUES = [
    Case("zeros", (5, 77), spoil=fill(0.0)),
    Case("all_equal", (5, 77), spoil=fill(-3.5)),
    Case("all_lowest", (3, 77), spoil=lambda inputs: inputs[X].fill(LOWEST[inputs[X].dtype.name])),
    Case("huge", (5, 77), spoil=huge),
    *(Case(f"huge_{n}", (5, n), spoil=huge) for n in (30, 61, 121)),
    *(Case(f"nan_{n}", (5, n), spoil=lambda inputs: inputs[X].__setitem__((2, 0), np.nan)) for n in (30, 61, 121)),
    Case("huge_axis_0", (77, 20), {"axis": 0}, spoil=huge),
    Case("huge_long", (2, 5001), spoil=huge),
    # All equal and huge after scaling: 0.7 and 1/sqrt(128) round, and so do their products
    *(
        Case(f"huge_scale_{scale}_{n}", (2, n), {"scale": scale}, spoil=fill(-3.0e4))
        for scale in (0.7, -0.08838835) for n in (77, 5000, 40000)
    ),
    Case("wide_range", (5, 333), std=40.0),
    Case("subnormal", (5, 77), spoil=subnormal),
    *(
        Case(f"{name}_{'x'.join(map(str, shape))}_{axis}", shape, {"axis": axis}, spoil=put(index, value))
        for name, value in (("nan", np.nan), ("inf", np.inf), ("-inf", -np.inf))
        for shape, axis, index in (
            ((4, 40), -1, (1, 3)),
            ((3, 5000), -1, (2, 4999)),
            ((3, 70001), -1, (1, 60000)),
            ((3, 20, 40), 1, (1, 2, 3)),
            ((3, 20, 5), 1, (1, 2, 3)),
        )
    ),
    *(
        Case(
            f"row_of_-inf_{'x'.join(map(str, shape))}_{axis}",
            shape,
            {"axis": axis},
            spoil=lambda inputs, axis=axis: np.moveaxis(inputs[X], axis, -1).__setitem__(0, -np.inf),
        )
        for shape, axis in (
            *(((4, n), -1) for n in (30, 40, 61, 121)),
            *(((3, n), -1) for n in (5000, 70001)),
            ((3, 20, 40), 1),
            ((3, 20, 5), 1),
        )
    ),
    Case("-inf_and_nan", (3, 50), spoil=lambda inputs: (put(1, -np.inf)(inputs), put((1, 7), np.nan)(inputs))),
    *(
        Case(f"first_third_{name}_{n}", (2, n), spoil=put((slice(None), slice(0, n // 3)), value))
        for name, value in (("-inf", -np.inf), ("low", -1000.0))
        for n in (5000, 70001)
    ),
]
EMPTY = [Case("no_rows", (0, 8)), Case("no_cols", (8, 0)), Case("no_inner", (3, 4, 0), {"axis": 1})]

LOG_NAMES = (
    "cols_1",
    "cols_33",
    "cols_1025",
    "cols_4097",
    "cols_20011",
    "cols_70001",
    "axis_0",
    "axis_2",
    "inner_5",
    "inner_64",
    "inner_97",
    "long_axis_inner_70",
    "mask_lowest",
    "mask_garbage",
    "mask_garbage_axis_0",
    "rows_mask_5x1_add",
    "axis1_mask_3x20_bool",
    "masked_all",
    "zeros",
    "huge",
    "wide_range",
    "subnormal",
    "-inf_and_nan",
    "nan_4x40_-1",
    "inf_4x40_-1",
    "row_of_-inf_3x5000_-1",
    "row_of_-inf_3x70001_-1",
    "first_third_low_70001",
    "row_of_-inf_3x20x5_1",
    "scale_negative",
)
_PLAIN = [*CONTIGUOUS, *OTHER_AXES, *MASKED, *VALUES, *EMPTY]
CASES = [*_PLAIN, *log_of([c for c in _PLAIN if c.name in LOG_NAMES])]

SMALL = {
    "test_softmax": {
        "case": (
            "cols_1",
            "cols_33",
            "cols_129",
            "cols_1025",
            "cols_4097",
            "cols_20011",
            "cols_70001",
            "many_rows",
            "axis_1",
            "inner_5",
            "inner_65",
            "rows_mask_5x37_add",
            "long_mask_3x4501_bool",
            "masked_row_-inf_3x5000_-1",
            "log_cols_1025",
        )
    },
    "test_alignment": {"cols": (31, 1000, 70000), "mask_kind": ("none", "bool"), "offsets": ((0, 0, 0), (5, 2, 0))},
}
"""What runs under compute-sanitizer: every kernel, with tails."""


def bound_of(inputs: Inputs, attrs: dict[str, Any], expected: SoftmaxResult) -> np.ndarray:
    """What rounding of each score, each exponential and the sum to float32 can do, and the rounding of the result.

    A relative error e of an exponential and the weighted mean of those of its row are what the softmax can be off by; a
    score is rounded when it is scaled, masked and shifted, and once more if it is multiplied by log2(e).
    """
    axis, dtype = attrs.get("axis", -1), inputs[X].dtype.name
    unit = EPSILON["float32"] / 2
    with np.errstate(invalid="ignore"):
        top = np.max(expected.score, axis=axis, keepdims=True, initial=-np.inf)
        shifted = np.abs(expected.score - np.where(np.isneginf(top), 0.0, top))
        error = unit * (2.0 * expected.magnitude + 3.0 * shifted)
        mean = np.nansum(np.where(expected.weight > 0, expected.weight * error, 0.0), axis=axis, keepdims=True)
        if attrs.get("log", 0):
            bound = unit * (2.0 * expected.magnitude + 3.0 * shifted + 4.0 * np.abs(expected.y) + 16.0) + mean
        else:
            # Beyond a score of -100 nothing is left of a weight in float32.
            bound = expected.weight * (np.where(shifted > 100.0, 0.0, error) + mean + 16.0 * unit) + 2.0**-126
        size = np.nan_to_num(np.abs(expected.y), posinf=0.0)
    rounding = 0.0 if dtype == "float32" else EPSILON[dtype] / 2 * size + SMALLEST[dtype]
    return np.nan_to_num(bound + rounding, posinf=0.0)


@functools.cache
def solved(name: str, dtype: str) -> tuple[Inputs, SoftmaxResult, np.ndarray]:
    """Inputs, expected result and bound of a case; made once for all variants."""
    case = next(c for c in CASES if c.name == name)
    inputs = case.inputs(dtype)
    expected = softmax_reference(inputs, case.attrs)
    bound = bound_of(inputs, case.attrs, expected)
    with np.errstate(over="ignore", invalid="ignore"):
        overflows = np.isneginf(expected.y.astype(inputs[X].dtype))
    return inputs, replace(expected, y=np.where(overflows, -np.inf, expected.y)), bound


@pytest.mark.parametrize("variant", variant_params(OP))
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_softmax(case: Case, variant: native.VariantInfo) -> None:
    def check(dtype: str) -> None:
        inputs, expected, bound = solved(case.name, dtype)
        (y,) = run_variant(OP, variant, inputs, case.attrs)
        assert_close(y, expected.y, bound)

    for_each_dtype(case.dtypes, check)


@pytest.mark.parametrize(
    "offsets",
    [(0, 0, 0), (1, 1, 1), (3, 3, 0), (0, 1, 2), (5, 2, 0), (7, 7, 3)],
    ids=lambda offsets: "_".join(map(str, offsets)),
)
@pytest.mark.parametrize("mask_kind", ["none", "bool", "add"])
@pytest.mark.parametrize("cols", (24, 31, 256, 1000, 1027, 5000, 70000))
@pytest.mark.parametrize("variant", table_params(OP))
def test_alignment(
    variant: native.VariantInfo, cols: int, mask_kind: str, offsets: tuple[int, int, int]
) -> None:
    """x, y and the mask at elements ``offsets`` past a 64-byte boundary; rows of some lengths keep that, others move on."""
    case = Case(f"alignment_{cols}", (3, cols), mask=None if mask_kind == "none" else (cols,), mask_kind=mask_kind)

    def check(dtype: str) -> None:
        inputs = [misaligned(t, offset) for t, offset in zip(case.inputs(dtype), offsets[::2])]
        y = misaligned(np.zeros((3, cols), numpy_dtype(dtype)), offsets[1])
        try:
            native.run(OP, inputs, outputs=[y], variant=variant.name, device=variant.device)
        except NotImplementedError as refusal:
            pytest.skip(f"{variant.name} leaves this to another variant: {refusal}")
        expected = softmax_reference(inputs)
        assert_close(y, expected.y, bound_of(inputs, {}, expected))

    for_each_dtype(ops.FLOAT_TYPES, check)


@pytest.mark.parametrize("variant", variant_params(OP))
def test_masked_rows_are_exactly_zero(variant: native.VariantInfo) -> None:
    for case in (c for c in MASKED if c.name.startswith("masked_row")):
        inputs, expected, _ = solved(case.name, "float32")
        (y,) = run_variant(OP, variant, inputs, case.attrs)
        empty = np.isneginf(np.max(expected.score, axis=case.attrs["axis"], keepdims=True)) & np.ones(y.shape, bool)
        assert empty.any() and not y[empty].any()


@pytest.mark.parametrize("variant", variant_params(OP))
def test_large_output(variant: native.VariantInfo) -> None:
    """More than the caches hold: written past them, in pieces for several threads, from an odd address on."""
    x = random_tensor(np.random.default_rng(0), (101, 65537), "float32")
    (y,) = run_variant(OP, variant, [x])
    expected = softmax_reference([x[::25]])
    assert_close(y[::25], expected.y, bound_of([x[::25]], {}, expected))
    np.testing.assert_allclose(y.sum(axis=1, dtype=np.float64), 1.0, atol=1e-6)


@pytest.mark.parametrize("variant", variant_params(OP))
def test_threads_do_not_change_results(variant: native.VariantInfo) -> None:
    for attrs in ({}, {"axis": 0}, {"axis": 1}):
        inputs = [random_tensor(np.random.default_rng(1), (41, 70, 67), "float32")]
        (once,) = run_variant(OP, variant, inputs, attrs, threads=1)
        for threads in (2, 5):
            np.testing.assert_array_equal(run_variant(OP, variant, inputs, attrs, threads=threads)[0], once)


@pytest.mark.parametrize(
    ("name", "wrong_attrs", "wrong_mask"),
    [
        ("scale", {}, False),
        ("axis_1", {"axis": 2}, False),
        ("log_cols_33", {}, False),
        ("rows_mask_5x37_add", {}, True),
        ("rows_mask_5x37_bool", {}, True),
    ],
)
def test_bound_rejects_wrong_results(name: str, wrong_attrs: dict[str, Any], wrong_mask: bool) -> None:
    """The bound is tight enough to see a forgotten attribute or mask in each type."""
    for dtype in ops.FLOAT_TYPES:
        inputs, expected, bound = solved(name, dtype)
        wrong = softmax_reference(inputs[:1] if wrong_mask else inputs, wrong_attrs).y
        with pytest.raises(AssertionError, match="over the bound"):
            assert_close(wrong, expected.y, bound)


def test_bound_rejects_lost_precision() -> None:
    """An exponential with the accuracy of bfloat16, and a row that is not quite normalised."""
    _inputs, expected, bound = solved("cols_128", "float32")
    for wrong in (
        expected.y.astype(ml_dtypes.bfloat16),
        expected.y * (1 + 2.0**-18),
        np.where(expected.y > 0.1, np.nan, expected.y),
    ):
        with pytest.raises(AssertionError):
            assert_close(wrong.astype(np.float64), expected.y, bound)


@pytest.mark.parametrize(
    ("shape", "attrs", "mask", "message"),
    [
        ((3, 4), {"axis": 2}, None, r"axis: 2 is not in \[-2, 1\]"),
        ((3, 4), {}, (3, 5), "mask: does not broadcast"),
        ((3, 4), {}, (2, 3, 4), "mask: does not broadcast"),
        ((), {}, None, "x: needs at least one dimension"),
    ],
)
def test_refuses(shape: tuple[int, ...], attrs: dict[str, Any], mask: tuple[int, ...] | None, message: str) -> None:
    inputs = [np.zeros(shape, np.float32), None if mask is None else np.zeros(mask, bool)]
    with pytest.raises(ValueError, match=message):
        native.run(OP, inputs, attrs, outputs=[np.zeros(shape, np.float32)])
