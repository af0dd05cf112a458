"""FusedAttention: one table of cases, for every variant on every device, against float64; and ONNX's own test data."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from kernel_harness import (
    EPSILON,
    RUNTIME_ROWS,
    assert_close,
    for_each_dtype,
    numpy_dtype,
    random_tensor,
    run_variant,
    variant_params,
)
from ortplugins import native, ops
from reference import AttentionResult, attention_reference, plain

OP = "FusedAttention"
Q, K, V, MASK, PAST_K, PAST_V, TOTAL_LENGTHS = range(7)
Inputs = list[np.ndarray | None]

HALF_TYPES = ("float16", "bfloat16")
LOWEST = {name: float(ml_dtypes.finfo(numpy_dtype(name)).min) for name in ops.FLOAT_TYPES}
"""Lowest finite number of each type, with which exporters fill masks."""

PRECISION_CASES = (
    "bert",
    "long",
    "decode_long",
    "d257_std8",
    "d64_std8",
    "d80_63x513",
    "d1_63x65",
    "grouped_BSNH",
    "causal",
    "window",
    "softcap",
    "mask_tiles_2x3x70x131_add",
    "garbage_lengths_40",
    "past_tiles",
    "large",
)


@dataclass(frozen=True)
class Case:
    """One problem. ``mask`` is a shape, ``mask_kind`` how it is filled; ``spoil`` edits the inputs."""

    name: str
    b: int = 1
    heads: int = 2
    kv_heads: int = 0  # 0: heads
    sq: int = 8
    sk: int = 8
    d: int = 64
    dv: int = 0  # 0: d
    layout: str = "BSNH"  # or BNSH, 3D, or a packed one
    attrs: dict[str, Any] = field(default_factory=dict)
    mask: tuple[int, ...] | None = None
    mask_kind: str = "bool"  # bool, add, -inf (half of it), lowest
    past: int | None = None
    total_lengths: tuple[int, ...] | None = None
    std: float = 1.0
    spoil: Callable[[Inputs], None] | None = None
    dtypes: tuple[str, ...] = ops.FLOAT_TYPES

    def shape(self, seq: int, heads: int, dim: int) -> tuple[int, ...]:
        return {
            "BSNH": (self.b, seq, heads, dim),
            "BNSH": (self.b, heads, seq, dim),
            "3D": (self.b, seq, heads * dim),
            "BS3NH": (self.b, seq, 3, heads, dim),
            "BSN3H": (self.b, seq, heads, 3, dim),
        }[self.layout]

    def attributes(self) -> dict[str, Any]:
        attrs = dict(self.attrs)
        if self.layout == "3D":
            attrs["num_heads"] = self.heads
            if self.kv_heads:
                attrs["kv_num_heads"] = self.kv_heads
        else:
            attrs["layout"] = self.layout
        return attrs

    def make_mask(self, rng: np.random.Generator, dtype: str) -> np.ndarray:
        kept = rng.random(self.mask) < 0.6
        if self.mask_kind == "bool":
            return kept
        if self.mask_kind == "add":
            return random_tensor(rng, self.mask, dtype, 2.0)
        if self.mask_kind == "lowest":
            return np.where(kept, 0.0, LOWEST[dtype]).astype(numpy_dtype(dtype))
        assert self.mask_kind == "-inf"
        return np.where(kept, rng.standard_normal(self.mask), -np.inf).astype(numpy_dtype(dtype))

    def inputs(self, dtype: str) -> Inputs:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        kv_heads, dv = self.kv_heads or self.heads, self.dv or self.d
        inputs: Inputs = [
            random_tensor(rng, self.shape(self.sq, self.heads, self.d), dtype, self.std),
            random_tensor(rng, self.shape(self.sk, kv_heads, self.d), dtype, self.std),
            random_tensor(rng, self.shape(self.sk, kv_heads, dv), dtype, self.std),
            None if self.mask is None else self.make_mask(rng, dtype),
            None,
            None,
            None if self.total_lengths is None else np.array(self.total_lengths, np.int64),
        ]
        if self.layout in ops.PACKED_LAYOUTS:
            inputs[K] = inputs[V] = inputs[Q]
        if self.past is not None:
            inputs[PAST_K] = random_tensor(rng, (self.b, kv_heads, self.past, self.d), dtype, self.std)
            inputs[PAST_V] = random_tensor(rng, (self.b, kv_heads, self.past, dv), dtype, self.std)
        if self.spoil is not None:
            self.spoil(inputs)
        while inputs[-1] is None:
            inputs.pop()
        return inputs


def mask_row(value: float | bool) -> Callable[[Inputs], None]:
    def spoil(inputs: Inputs) -> None:
        inputs[MASK][..., 3, :] = value

    return spoil


def lowest_row(inputs: Inputs) -> None:
    inputs[MASK][..., 3, :] = LOWEST[inputs[MASK].dtype.name]


def garbage_keys(first: int, value: float = np.nan, *, last: int | None = None) -> Callable[[Inputs], None]:
    """Keys and values [first, last) of every sequence (layout BSNH) are ``value``."""

    def spoil(inputs: Inputs) -> None:
        inputs[K][:, first:last] = value
        inputs[V][:, first:last] = value

    return spoil


def garbage_where_masked(inputs: Inputs) -> None:
    """One mask over keys: those that it excludes hold NaN keys and infinite values."""
    excluded = ~inputs[MASK] if inputs[MASK].dtype == np.bool_ else np.isneginf(inputs[MASK])
    inputs[K][:, excluded] = np.nan
    inputs[V][:, excluded] = np.inf


def nan_key_that_is_masked(inputs: Inputs) -> None:
    """Key 3 is NaN, key 5 infinite; every row but the last masks both."""
    inputs[MASK][:-1, [3, 5]] = False if inputs[MASK].dtype == np.bool_ else -np.inf
    inputs[K][:, 3] = inputs[V][:, 3] = np.nan
    inputs[K][:, 5] = inputs[V][:, 5] = np.inf


def garbage_behind_lengths(inputs: Inputs) -> None:
    for b, length in enumerate(inputs[TOTAL_LENGTHS]):
        inputs[K][b, max(0, length) :] = np.nan
        inputs[V][b, max(0, length) :] = np.nan


def mask_values(*, row: int, key: int, value: float) -> Callable[[Inputs], None]:
    """One value of the mask, the same in all sequences and heads."""

    def spoil(inputs: Inputs) -> None:
        inputs[MASK][..., row, key] = value

    return spoil


def steep(inputs: Inputs) -> None:
    """Values of the mask in thousands: the largest one of a row takes all the weight."""
    inputs[MASK][...] *= inputs[MASK].dtype.type(2000)


def largest_value(inputs: Inputs) -> None:
    """One value that nothing else of its row comes near, and that times 1 / scale leaves float16, or float32."""
    inputs[MASK][..., 9, 200] = 6e4 if inputs[MASK].dtype == np.float16 else 1e38


def padding(inputs: Inputs) -> None:
    """Sequence 0 is padded on both sides, 1 not at all, 2 has a few keys, 3 has a hole."""
    mask = inputs[MASK]
    keep, drop = (True, False) if mask.dtype == bool else (0.0, mask.min())
    mask[...] = drop
    n = mask.shape[-1]
    for b, first, last in ((0, n // 3, n - 90), (1, 0, n), (2, 3, 7), (3, 0, n // 2), (3, n - 30, n)):
        mask[b, ..., first:last] = keep


def masked_sequence(inputs: Inputs) -> None:
    """Every key of sequence 1 is masked as much as its mask can, with the lowest number of an additive one."""
    mask = inputs[MASK]
    mask[1] = False if mask.dtype == np.bool_ else mask.min()


def large_values_where_masked(inputs: Inputs) -> None:
    inputs[V][:, np.isneginf(inputs[MASK])] = 1000.0


def zeros(inputs: Inputs) -> None:
    for i in (Q, K):
        inputs[i][...] = 0


def large(inputs: Inputs) -> None:
    """Scores of about +-1e30 in float32: the largest one takes all the weight."""
    inputs[Q][...] *= inputs[Q].dtype.type(1e15)
    inputs[K][...] *= inputs[K].dtype.type(1e15)


def subnormal(inputs: Inputs) -> None:
    inputs[V][...] = inputs[V] * inputs[V].dtype.type(1e-38 if inputs[V].dtype != np.float16 else 1e-6)


def nan_query(inputs: Inputs) -> None:
    inputs[Q][:, 1] = np.nan


def same_sign(inputs: Inputs) -> None:
    for i in (Q, K, V):
        inputs[i][...] = np.abs(inputs[i])


def scaled(q: float = 1.0, k: float = 1.0, v: float = 1.0) -> Callable[[Inputs], None]:
    def spoil(inputs: Inputs) -> None:
        for i, factor in ((Q, q), (K, k), (V, v)):
            inputs[i][...] *= inputs[i].dtype.type(factor)

    return spoil


def outlier(
    tensor: int, factor: float, *, row: int | slice = slice(None), column: int | slice = slice(None)
) -> Callable[[Inputs], None]:
    """Layout BSNH: one row or column of every head is ``factor`` times as large as the others."""

    def spoil(inputs: Inputs) -> None:
        inputs[tensor][:, row, :, column] *= inputs[tensor].dtype.type(factor)

    return spoil


def spread_values(inputs: Inputs) -> None:
    """Magnitudes of v, key by key, from 1e-8 to 1e8."""
    keys = inputs[V].shape[1]
    inputs[V][...] *= (10.0 ** np.linspace(-8.0, 8.0, keys)).astype(inputs[V].dtype)[None, :, None, None]


def masks(name: str, shapes: list[tuple[int, ...]], **problem: Any) -> list[Case]:
    return [
        Case(f"{name}_{'x'.join(map(str, s))}_{kind}", mask=s, mask_kind=kind, **problem)
        for s in shapes
        for kind in ("bool", "add", "-inf")
    ]


def rising(factor: float) -> Callable[[Inputs], None]:
    """Keys that point more and more along one direction, as do the queries, the last one against it."""

    def spoil(inputs: Inputs) -> None:
        q, k = inputs[Q], inputs[K]
        k[..., 0] = np.linspace(0, factor, k.shape[1])[None, :, None].astype(k.dtype)
        q[..., 0] = q.dtype.type(factor)
        q[:, -1, :, 0] = q.dtype.type(-factor)

    return spoil


CASES = [
    # Shapes: one row and one key; lengths around the tiles; head sizes around the vectors; many rows of one head
    Case("one", heads=1, sq=1, sk=1, d=1),
    Case("one_key", sq=5, sk=1, d=7),
    Case("one_query", heads=3, sq=1, sk=77, d=40),
    Case("bert", b=2, heads=3, sq=128, sk=128, d=32),
    Case("long", heads=1, sq=197, sk=1031, d=64),
    Case("decode_long", heads=2, sq=1, sk=4099, d=64),
    Case("few_rows_long", heads=1, sq=3, sk=2053, d=48, dv=80),
    Case("many_rows_long", heads=1, sq=33, sk=2053, d=16, dv=24),
    *(
        Case(f"d{d}_{sq}x{sk}", heads=2, sq=sq, sk=sk, d=d)
        for d, lengths in {
            1: ((63, 65), (77, 1)),
            37: ((65, 77), (1, 63)),
            40: ((77, 197), (63, 63)),
            72: ((197, 65), (65, 1)),
            80: ((63, 513), (1, 197)),
            96: ((513, 77), (1, 65)),
            100: ((65, 197), (77, 77)),
            128: ((197, 197), (1, 513)),
        }.items()
        for sq, sk in lengths
    ),
    # Lengths around tiles of 64 to 192 rows and keys, more tiles than a GPU has multiprocessors, heads in whole vectors
    *(
        Case(f"tiles_d{d}_{sq}x{sk}", heads=2, sq=sq, sk=sk, d=d, layout=layout)
        for d, layout in ((64, "BSNH"), (128, "BNSH"), (256, "BSNH"))
        for sq, sk in ((127, 129), (128, 128), (129, 127), (193, 177), (300, 520))
    ),
    Case("tiles_v_narrower", heads=2, sq=70, sk=200, d=128, dv=8),
    Case("tiles_v_wider", heads=2, sq=70, sk=200, d=16, dv=96),
    *(Case(f"tiles_d{d}", heads=2, sq=150, sk=150, d=d, attrs={"is_causal": 1}) for d in (32, 48, 160, 192)),
    Case("many_tiles", b=3, heads=50, sq=130, sk=70, d=64),
    Case(
        "many_tiles_causal",
        b=2,
        heads=40,
        kv_heads=10,
        sq=300,
        sk=300,
        d=64,
        attrs={"is_causal": 1},
        dtypes=HALF_TYPES,
    ),
    Case("many_tiles_lengths", b=5, heads=40, sq=20, sk=300, d=64, total_lengths=(300, 7, 0, 129, 256)),
    # Rows left over by tiles of 64 to 256, of as many heads as an H200 has multiprocessors
    *(Case(f"rest_rows_d{d}", b=11, heads=12, sq=250, sk=70, d=d, dtypes=HALF_TYPES) for d in (64, 80)),
    # All keys in one tile of 80 or 128, of queries in one tile of 64 or several
    *(
        Case(
            f"one_tile_{sq}x{sk}{name}",
            b=2,
            sq=sq,
            sk=sk,
            dtypes=HALF_TYPES,
            **{"heads": 3, "d": 64, **problem},
        )
        for sq, sk, name, problem in (
            (130, 1, "", {}),
            (65, 7, "", {"d": 8}),
            (64, 64, "_grouped", {"heads": 4, "kv_heads": 2}),
            (77, 77, "_causal", {"attrs": {"is_causal": 1}, "layout": "BNSH"}),
            (128, 80, "_v_narrower", {"dv": 40}),
            (128, 80, "_v_wider", {"d": 24, "dv": 56}),
            (63, 81, "", {"layout": "3D"}),
            (200, 127, "_causal", {"attrs": {"is_causal": 1}}),
            (128, 127, "_window", {"attrs": {"window": 20, "window_right": 3}}),
            (128, 128, "", {}),
            (128, 128, "_causal", {"heads": 8, "kv_heads": 1, "attrs": {"is_causal": 1}}),
            (128, 128, "_packed", {"layout": "BS3NH"}),
            (30, 128, "_lengths", {"total_lengths": (128, 40), "attrs": {"is_causal": 1}}),
            (70, 80, "_lengths_short", {"total_lengths": (69, 0), "attrs": {"is_causal": 1, "window": 50}}),
            (20, 20, "_past_80", {"past": 60, "attrs": {"is_causal": 1}}),
            (28, 28, "_past_128", {"past": 100, "kv_heads": 1}),
            (70, 128, "_std8", {"std": 8.0}),
            (70, 77, "_rising", {"spoil": rising(30)}),
            (70, 128, "_rising_mask", {"spoil": rising(30), "mask": (2, 1, 1, 128), "mask_kind": "add"}),
            (128, 128, "_garbage_lengths", {"total_lengths": (128, 7), "spoil": garbage_behind_lengths}),
            (70, 77, "_garbage_bool", {"mask": (77,), "spoil": garbage_where_masked}),
            (70, 128, "_garbage_-inf", {"mask": (128,), "mask_kind": "-inf", "spoil": garbage_where_masked}),
            (40, 128, "_garbage_causal", {"spoil": garbage_keys(20, last=21), "attrs": {"is_causal": 1}}),
            (40, 80, "_garbage_mask", {"mask": (50,), "mask_kind": "add", "spoil": garbage_keys(50, np.inf)}),
            (40, 128, "_garbage_seen", {"spoil": garbage_keys(5, last=6)}),
        )
    ),
    *(
        Case(
            f"one_tile_mask_{'x'.join(map(str, mask))}_{kind}",
            b=2,
            heads=3,
            sq=70,
            sk=mask[-1],
            d=d,
            attrs=attrs,
            mask=mask,
            mask_kind=kind,
            spoil=spoil,
            dtypes=HALF_TYPES,
        )
        for kind in ("bool", "add", "-inf", "lowest")
        for mask, d, attrs, spoil in (
            ((2, 1, 1, 7), 64, {}, None),
            ((2, 3, 1, 77), 32, {"is_causal": 1}, None),
            ((80,), 64, {}, None),
            ((2, 1, 1, 127), 64, {}, masked_sequence),
            ((2, 1, 1, 128), 64, {"is_causal": 1}, masked_sequence),
            # rows that start anywhere, at every second element, and at multiples of 16 bytes
            ((70, 77), 64, {"is_causal": 1}, None),
            ((2, 3, 70, 78), 40, {}, None),
            ((2, 1, 70, 80), 64, {"window": 30}, None),
            ((2, 3, 70, 127), 64, {}, masked_sequence),
            ((1, 3, 70, 128), 64, {}, None),
        )
    ),
    Case(
        "one_tile_mask_rows_lengths",
        b=2,
        heads=2,
        sq=70,
        sk=128,
        mask=(2, 1, 70, 100),
        mask_kind="add",
        total_lengths=(128, 90),
    ),
    Case("one_tile_mask_rows_steep", heads=2, sq=70, sk=128, mask=(70, 128), mask_kind="add", spoil=steep),
    Case(
        "one_tile_mask_rows_garbage",
        heads=2,
        sq=70,
        sk=128,
        mask=(70, 128),
        mask_kind="-inf",
        spoil=nan_key_that_is_masked,
    ),
    Case("one_tile_mask_steep", heads=2, sq=70, sk=128, mask=(128,), mask_kind="add", spoil=steep),
    *(
        # padding at either end and holes, of zeros and of something added
        Case(
            f"one_tile_padding_{kind}", b=4, heads=2, sq=70, sk=128, mask=(4, 1, 1, 128), mask_kind=kind, spoil=padding
        )
        for kind in ("bool", "-inf", "lowest")
    ),
    # Maxima that grow with every tile of keys, by a few and by hundreds, in all rows or in one
    *(
        Case(
            f"rising_d{d}_{factor}{name}",
            b=2,
            sq=140,
            sk=400,
            d=d,
            attrs=attrs,
            mask=mask,
            mask_kind="add",
            spoil=rising(factor),
            dtypes=HALF_TYPES,
        )
        for d, factor, name, attrs, mask in (
            (40, 10, "", {}, None),
            (64, 10, "_window", {"window": 90}, None),
            (64, 30, "", {"is_causal": 1}, None),
            (64, 30, "_rows", {}, (2, 140, 400)),
            (72, 10, "", {"is_causal": 1}, None),
            (80, 30, "", {}, None),
            (96, 10, "", {}, None),
            (128, 10, "", {}, None),
            (128, 30, "_keys", {"is_causal": 1}, (2, 1, 1, 400)),
            (192, 10, "", {}, None),
            (256, 30, "_softcap", {"softcap": 200.0}, None),
        )
    ),
    Case("rising_decode", b=2, heads=8, kv_heads=2, sq=3, sk=900, d=128, spoil=rising(30), dtypes=HALF_TYPES),
    # Whole tiles of padding in front of the keys and behind them, none, and nothing else
    *(
        Case(
            f"padding_{kind}{name}",
            b=4,
            heads=2,
            sq=140,
            sk=400,
            d=d,
            attrs=attrs,
            mask=(4, 1, 1, 400),
            mask_kind=kind,
            spoil=padding,
        )
        for kind in ("bool", "-inf", "lowest")
        for name, d, attrs in (("", 64, {}), ("_causal", 128, {"is_causal": 1}))
    ),
    *(
        Case(
            f"padding_{kind}_decode",
            b=4,
            heads=8,
            kv_heads=2,
            sq=1,
            sk=900,
            mask=(4, 1, 1, 900),
            mask_kind=kind,
            spoil=padding,
        )
        for kind in ("bool", "-inf")
    ),
    # Few queries of grouped heads on a cache of several splits, and of one
    Case(
        "split_one",
        b=16,
        heads=32,
        kv_heads=8,
        sq=2,
        sk=300,
        d=128,
        total_lengths=(300, 1, 128, 0) * 4,
        dtypes=HALF_TYPES,
    ),
    Case(
        "split_grouped",
        b=2,
        heads=8,
        kv_heads=2,
        sq=3,
        sk=1500,
        d=128,
        total_lengths=(1500, 37),
        attrs={"is_causal": 1},
    ),
    Case("split_window", heads=6, kv_heads=2, sq=5, sk=1300, d=64, attrs={"window": 700, "window_right": 9}),
    Case("split_mask", b=2, heads=8, kv_heads=2, sq=4, sk=1100, d=64, dv=96, mask=(2, 1, 1, 1100), mask_kind="-inf"),
    Case("split_mask_spoilt", b=1, heads=8, kv_heads=2, sq=1, sk=600, d=64, mask=(600,), spoil=garbage_where_masked),
    Case("split_mask_lowest", heads=4, kv_heads=2, sq=1, sk=600, d=64, mask=(600,), mask_kind="lowest"),
    # Large heads, values with a standard deviation of 8
    *(Case(f"d{d}_std8", heads=1, sq=16, sk=16, d=d, std=8.0) for d in (257, 320, 512)),
    *(Case(f"d{d}_1024_std8", heads=1, sq=16, sk=1024, d=d, std=8.0) for d in (257, 512)),
    Case("d64_std8", heads=2, sq=40, sk=130, d=64, std=8.0),
    Case("d640", heads=1, sq=9, sk=20, d=640),
    # Layouts, grouped heads, a head size of its own for v
    *(
        Case(f"layout_{layout}", b=2, heads=3, sq=21, sk=34, d=20, dv=12, layout=layout)
        for layout in ("BSNH", "BNSH", "3D")
    ),
    *(
        Case(f"grouped_{layout}", b=2, heads=6, kv_heads=2, sq=17, sk=50, d=24, dv=40, layout=layout)
        for layout in ("BSNH", "BNSH", "3D")
    ),
    *(Case(f"packed_{layout}", b=2, heads=3, sq=70, sk=70, d=20, layout=layout) for layout in ops.PACKED_LAYOUTS),
    *(
        Case(f"packed_{layout}_d64", b=2, heads=2, sq=150, sk=150, layout=layout, attrs={"is_causal": 1})
        for layout in ops.PACKED_LAYOUTS
    ),
    Case("packed_mask", b=2, heads=2, sq=24, sk=24, layout="BS3NH", mask=(2, 1, 1, 24)),
    Case("packed_decode", b=2, heads=4, sq=1, sk=1, past=300, d=64, layout="BS3NH", attrs={"is_causal": 1}),
    Case("multi_query_decode", b=2, heads=8, kv_heads=1, sq=1, sk=300, d=64),
    Case("grouped_few_rows", heads=6, kv_heads=2, sq=2, sk=70, d=33),
    Case("v_wider", heads=2, sq=40, sk=40, d=8, dv=136),
    Case("scale", sq=20, sk=20, attrs={"scale": 0.3}),
    Case(
        "scale_one_t5",
        b=2,
        heads=4,
        sq=24,
        sk=24,
        d=16,
        std=0.5,
        attrs={"scale": 1.0},
        mask=(1, 4, 24, 24),
        mask_kind="add",
    ),
    # Masks of every broadcastable shape
    *masks(
        "mask",
        [
            (7,),
            (5, 7),
            (1, 1, 5, 7),
            (2, 1, 1, 7),
            (2, 1, 5, 7),
            (1, 3, 5, 7),
            (2, 3, 5, 7),
            (3, 5, 7),
            (2, 1, 5, 1),
            (1, 3, 1, 7),
            (1,),
        ],
        b=2,
        heads=3,
        sq=5,
        sk=7,
        d=24,
    ),
    *masks(
        "mask_tiles",
        [(131,), (2, 1, 1, 131), (70, 131), (2, 3, 70, 131), (2, 1, 70, 1)],
        b=2,
        heads=3,
        sq=70,
        sk=131,
        d=16,
    ),
    *masks(
        "mask_grouped", [(1, 8, 12, 30), (2, 1, 12, 30), (2, 1, 1, 30)], b=2, heads=8, kv_heads=2, sq=12, sk=30, d=32
    ),
    *masks(
        "mask_rows",
        [(272,), (2, 1, 1, 272), (140, 272), (2, 3, 140, 272), (1, 3, 140, 272), (2, 1, 140, 272), (2, 3, 1, 272)],
        b=2,
        heads=3,
        sq=140,
        sk=272,
        d=64,
    ),
    *masks("mask_rows_loads", [(140, 271), (2, 1, 140, 271)], b=2, heads=3, sq=140, sk=271, d=64),
    *masks("mask_rows_short", [(70, 144)], b=1, heads=2, sq=70, sk=200, d=128),
    *(
        Case(
            f"mask_rows_spoilt_{kind}",
            heads=2,
            sq=70,
            sk=144,
            d=64,
            mask=(70, 144),
            mask_kind=kind,
            spoil=nan_key_that_is_masked,
        )
        for kind in ("bool", "-inf")
    ),
    # Masks whose rows differ: heads of 128, scales that are no powers of two, values that are infinite or large
    *masks("mask_rows_factor", [(140, 272), (2, 3, 140, 272)], b=2, heads=3, sq=140, sk=272, d=128),
    *(
        Case(
            f"mask_rows_{name}_d{d}",
            heads=2,
            sq=140,
            sk=272,
            d=d,
            mask=(140, 272),
            mask_kind="add",
            attrs=attrs,
            spoil=spoil,
        )
        for d in (64, 128)
        for name, attrs, spoil in (
            ("scaled", {"scale": 0.3}, None),
            ("scaled_up", {"scale": 20.0}, scaled(q=0.05)),
            ("infinity", {}, mask_values(row=37, key=200, value=-np.inf)),
            ("infinity_first", {}, mask_values(row=5, key=0, value=-np.inf)),
            ("steep", {}, steep),
            ("largest", {}, largest_value),
        )
    ),
    Case("mask_rows_lowest_d128", heads=2, sq=70, sk=272, d=128, mask=(70, 272), mask_kind="lowest", spoil=lowest_row),
    Case("mask_rows_lowest", heads=2, sq=70, sk=144, d=64, mask=(70, 144), mask_kind="lowest", spoil=lowest_row),
    Case("mask_rows_softcap", heads=2, sq=70, sk=144, d=64, mask=(70, 144), mask_kind="-inf", attrs={"softcap": 5.0}),
    Case(
        "mask_rows_window",
        heads=2,
        sq=170,
        sk=272,
        d=64,
        mask=(170, 272),
        mask_kind="add",
        attrs={"window": 40, "window_right": 70},
    ),
    Case("scale_negative", heads=2, sq=70, sk=144, d=64, attrs={"scale": -0.2}),
    Case("scale_zero_mask", heads=2, sq=70, sk=144, d=64, mask=(144,), attrs={"scale": 0.0}),
    *masks("mask_short", [(1, 1, 5, 4), (100,)], heads=2, sq=5, sk=130, d=16),
    Case("mask_lowest", b=2, heads=2, sq=40, sk=60, d=32, mask=(2, 1, 1, 60), mask_kind="lowest"),
    Case("mask_with_past", heads=2, sq=5, sk=5, past=9, mask=(5, 14), mask_kind="add"),
    # Rows with every key masked
    *(
        Case(f"masked_row_{name}_{sq}", b=2, heads=2, sq=sq, sk=8, mask=(2, 1, sq, 8), mask_kind=kind, spoil=spoil)
        for sq in (8, 50)
        for name, kind, spoil in (
            ("bool", "bool", mask_row(False)),
            ("-inf", "-inf", mask_row(-np.inf)),
            ("lowest", "lowest", lowest_row),
        )
    ),
    Case("masked_all", b=1, sq=20, sk=40, mask=(40,), spoil=lambda inputs: inputs[MASK].fill(False)),
    Case(
        "masked_blocks", heads=1, sq=50, sk=700, d=16, mask=(700,), spoil=lambda inputs: inputs[MASK][:400].fill(False)
    ),
    Case(
        "masked_row_nan_query",
        sq=4,
        sk=6,
        mask=(4, 6),
        spoil=lambda inputs: (inputs[MASK][1].fill(False), nan_query(inputs)),
    ),
    # Which corner "causal" means: top-left without a cache, shifted with one
    Case("causal", heads=2, sq=77, sk=77, d=32, attrs={"is_causal": 1}),
    Case("causal_long", heads=1, sq=300, sk=300, d=16, attrs={"is_causal": 1}),
    Case("causal_2x5", sq=2, sk=5, attrs={"is_causal": 1}),
    Case("causal_5x2", sq=5, sk=2, attrs={"is_causal": 1}),
    Case("causal_past", sq=2, sk=2, past=3, attrs={"is_causal": 1}),
    Case("causal_lengths", b=3, sq=2, sk=5, total_lengths=(5, 3, 1), attrs={"is_causal": 1}),
    Case("causal_negative_offset", b=2, heads=2, sq=40, sk=60, total_lengths=(17, 39), attrs={"is_causal": 1}),
    Case(
        "causal_grouped_decode", b=2, heads=8, kv_heads=2, sq=2, sk=90, total_lengths=(90, 33), attrs={"is_causal": 1}
    ),
    Case("causal_mask", heads=3, sq=50, sk=50, d=16, mask=(3, 50, 50), mask_kind="add", attrs={"is_causal": 1}),
    # Windows
    Case("window", sq=90, sk=90, d=16, attrs={"window": 7}),
    Case("window_0", sq=20, sk=20, d=16, attrs={"window": 0, "window_right": 0}),
    Case("window_both", sq=90, sk=120, d=16, attrs={"window": 20, "window_right": 3}),
    Case("window_causal_long", heads=1, sq=400, sk=400, d=16, attrs={"window": 100, "is_causal": 1}),
    Case("window_past", sq=4, sk=4, past=60, attrs={"window": 5, "is_causal": 1}),
    Case("window_lengths", b=2, sq=3, sk=50, total_lengths=(50, 20), attrs={"window": 4, "window_right": 1}),
    Case("window_right_only", sq=30, sk=50, d=16, attrs={"window_right": 2}),
    # Cache
    *(
        Case(f"past_{layout}", b=2, heads=4, kv_heads=2, sq=3, sk=3, past=70, d=24, dv=16, layout=layout)
        for layout in ("BSNH", "BNSH", "3D")
    ),
    Case("past_decode_split", heads=1, sq=1, sk=1, past=2000, d=64),
    Case("past_tiles", heads=1, sq=40, sk=40, past=100, d=64, attrs={"is_causal": 1}),
    Case("past_empty", sq=4, sk=6, past=0),
    Case("past_no_new_keys", sq=4, sk=0, past=6),
    Case("lengths", b=4, heads=2, sq=20, sk=130, total_lengths=(130, 0, 97, 1)),
    Case("lengths_out_of_range", b=2, sq=3, sk=10, total_lengths=(-5, 99)),
    # Soft cap, in front of the mask
    Case("softcap", sq=20, sk=70, std=3.0, attrs={"softcap": 5.0}),
    Case(
        "softcap_mask",
        heads=2,
        sq=20,
        sk=40,
        mask=(40,),
        mask_kind="-inf",
        attrs={"softcap": 5.0},
        spoil=large_values_where_masked,
    ),
    Case(
        "softcap_decode",
        heads=2,
        sq=1,
        sk=40,
        mask=(40,),
        mask_kind="-inf",
        attrs={"softcap": 5.0},
        spoil=large_values_where_masked,
    ),
    # What masked keys hold does not matter; what seen keys hold does
    *(
        Case(f"garbage_{name}_{sq}", b=2, heads=2, sq=sq, sk=150, d=24, spoil=spoil, **problem)
        for sq in (2, 40)
        for name, spoil, problem in (
            ("bool", garbage_where_masked, {"mask": (150,)}),
            ("-inf", garbage_where_masked, {"mask": (150,), "mask_kind": "-inf"}),
            ("lengths", garbage_behind_lengths, {"total_lengths": (150 - 41, 7)}),
            ("causal", garbage_keys(sq), {"attrs": {"is_causal": 1}}),
            ("causal_seen_by_some", garbage_keys(sq // 2, last=sq // 2 + 1), {"attrs": {"is_causal": 1}}),
            ("window", garbage_keys(0, last=1), {"attrs": {"window": 10}, "total_lengths": (150, 12 + sq)}),
            ("short_mask", garbage_keys(100, np.inf), {"mask": (100,), "mask_kind": "add"}),
            ("seen", garbage_keys(5, last=6), {}),
        )
    ),
    Case("nan_query", sq=4, sk=20, spoil=nan_query),
    # Extreme values
    Case("zeros", sq=20, sk=33, spoil=zeros),
    Case("large", sq=20, sk=33, spoil=large, dtypes=("float32", "bfloat16")),
    Case("subnormal", sq=20, sk=33, spoil=subnormal),
    # Magnitudes: what a format with a short exponent must be scaled for, or must refuse
    *(
        Case(f"magnitude_{name}", heads=2, sq=140, sk=270, d=d, spoil=spoil, dtypes=("float32",))
        for d in (64, 128)
        for name, spoil in (
            (f"same_sign_{d}", same_sign),
            (f"tiny_{d}", scaled(1e-20, 1e-20, 1e-20)),
            (f"balanced_{d}", scaled(1e12, 1e-12, 1e12)),
            (f"largest_{d}", scaled(1e-15, 1e15, 1e36)),
            (f"q_row_{d}", outlier(Q, 300.0, row=77)),
            (f"k_row_{d}", outlier(K, 300.0, row=77)),
            (f"k_column_{d}", outlier(K, 300.0, column=3)),
            (f"v_row_{d}", outlier(V, 1e6, row=77)),
            (f"v_column_{d}", outlier(V, 300.0, column=3)),
            (f"v_small_column_{d}", outlier(V, 1e-7, column=3)),
            (f"v_spread_{d}", spread_values),
        )
    ),
    Case(
        "magnitude_masked_keys",
        heads=2,
        sq=70,
        sk=270,
        d=64,
        mask=(270,),
        dtypes=("float32",),
        spoil=lambda inputs: inputs[K].__setitem__((slice(None), ~inputs[MASK]), 1e30),
    ),
    # Nothing to do
    Case("no_queries", sq=0, sk=5),
    Case("no_keys", b=2, sq=5, sk=0),
    Case("no_keys_decode", sq=1, sk=0, attrs={"is_causal": 1}),
    Case("no_batch", b=0, sq=5, sk=5),
    Case("no_head_dim", sq=5, sk=6, d=0, dv=4),
]

SMALL = {
    "test_attention": {
        "case": (
            "one_query",
            "d40_77x197",
            "d100_65x197",
            "d257_std8",
            "grouped_BSNH",
            "window_both",
            "mask_tiles_2x1x1x131_bool",
            "mask_rows_140x272_add",
            "mask_rows_factor_140x272_add",
            "one_tile_mask_70x77_add",
            "one_tile_mask_2x1x1x128_lowest",
            "past_decode_split",
            "past_tiles",
            "lengths",
        )
    },
    "test_precision": {
        "case": ("d80_63x513", "causal", "mask_tiles_2x3x70x131_add"),
        "precision": ("tf32x3", "tf32"),
    },
}
"""What runs under compute-sanitizer: every kernel, with tails."""


def bound_of(inputs: Inputs, attrs: dict[str, Any], expected: AttentionResult, precision: str = "ieee") -> float:
    """At most twice the error of the plain version, one and a half times for `tf32x3`. Where that is lucky: what one rounding of
    the scores and one of the result to float32 does, and one of the result to the tensors' type."""
    dtype = inputs[Q].dtype
    plain_error = np.abs(attention_reference(inputs, attrs, plain(dtype, precision)).y - expected.y)
    y = float(np.max(np.abs(expected.y), where=np.isfinite(expected.y), initial=0.0))
    # Beyond scores of 1e4 one key takes all the weight, and their rounding changes nothing.
    slack = EPSILON["float32"] * y * (2.0 + 0.5 * min(expected.largest_score, 1e4)) + (
        EPSILON[dtype.name] * y if dtype != np.float32 else 0.0
    )
    return (1.5 if precision == "tf32x3" else 2.0) * float(np.nan_to_num(plain_error).max(initial=0.0)) + slack


@functools.cache
def solved(name: str, dtype: str, precision: str = "ieee") -> tuple[Inputs, dict[str, Any], AttentionResult, float]:
    """Inputs, attributes, expected result and bound of a case; made once for all variants."""
    case = next(c for c in CASES if c.name == name)
    inputs, attrs = case.inputs(dtype), {**case.attributes(), "precision": precision}
    expected = attention_reference(inputs, attrs)
    return inputs, attrs, expected, bound_of(inputs, attrs, expected, precision)


@pytest.mark.parametrize("variant", variant_params(OP))
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_attention(case: Case, variant: native.VariantInfo) -> None:
    def check(dtype: str) -> None:
        inputs, attrs, expected, bound = solved(case.name, dtype)
        y, present_k, present_v = run_variant(OP, variant, inputs, attrs, output_count=3)
        assert_close(y, expected.y, bound)
        if case.mask_kind == "bool" or case.total_lengths is not None:
            empty = np.all(expected.y == 0.0, axis=-1)
            assert not np.any(y[empty]), "a row without keys must be exactly zero"
        np.testing.assert_array_equal(present_k.astype(np.float64), expected.present_k)
        np.testing.assert_array_equal(present_v.astype(np.float64), expected.present_v)

    for_each_dtype(case.dtypes, check)


@pytest.mark.parametrize("variant", variant_params(OP))
@pytest.mark.parametrize("case", [c for c in CASES if c.past is not None], ids=lambda c: c.name)
def test_past_without_present(case: Case, variant: native.VariantInfo) -> None:
    """A row computes the same whether it writes `present` or not. The op's own choice of a row may depend on it."""

    def check(dtype: str) -> None:
        inputs, attrs, expected, bound = solved(case.name, dtype)
        (y,) = run_variant(OP, variant, inputs, attrs)
        assert_close(y, expected.y, bound)
        if variant.name not in RUNTIME_ROWS:
            np.testing.assert_array_equal(y, run_variant(OP, variant, inputs, attrs, output_count=3)[0])

    for_each_dtype(case.dtypes, check)


def check_precision(case: Case, precision: str, variant: native.VariantInfo) -> None:
    inputs, attrs, expected, bound = solved(case.name, "float32", precision)
    y, present_k, present_v = run_variant(OP, variant, inputs, attrs, output_count=3)
    assert_close(y, expected.y, bound)
    np.testing.assert_array_equal(present_k, expected.present_k.astype(np.float32))
    np.testing.assert_array_equal(present_v, expected.present_v.astype(np.float32))


@pytest.mark.parametrize("variant", variant_params(OP))
@pytest.mark.parametrize("precision", ["tf32x3", "tf32"])
@pytest.mark.parametrize("case", [c for c in CASES if c.name in PRECISION_CASES], ids=lambda c: c.name)
def test_precision(case: Case, precision: str, variant: native.VariantInfo) -> None:
    """`tf32x3` has the bound of float32, `tf32` that of operands rounded to TF32; variants may be better than asked."""
    check_precision(case, precision, variant)


@pytest.mark.parametrize("variant", [v for v in variant_params(OP) if "tf32" in v.id or "fp16" in v.id])
@pytest.mark.parametrize("precision", ["tf32x3", "tf32"])
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if "float32" in c.dtypes and c.name not in (*PRECISION_CASES, "subnormal")],
    ids=lambda c: c.name,
)
def test_precision_rows(case: Case, precision: str, variant: native.VariantInfo) -> None:
    """All other cases, for the rows that only a precision opens. Not "subnormal": of numbers near the smallest, the second
    part of a split is below it."""
    check_precision(case, precision, variant)


@pytest.mark.parametrize("variant", variant_params(OP))
@pytest.mark.parametrize(
    "name", ["long", "d80_63x513", "d128_197x197", "causal_long", "mask_rows_140x272_add", "magnitude_same_sign_128"]
)
def test_tf32x3_error_is_that_of_float32(name: str, variant: native.VariantInfo) -> None:
    """Root mean square over the outputs, where chance has no part: one and a half times the plain version's, nothing else."""
    inputs, attrs, expected, _ = solved(name, "float32", "tf32x3")
    (y,) = run_variant(OP, variant, inputs, attrs)
    plain_y = attention_reference(inputs, attrs, plain(np.dtype(np.float32))).y
    error, plain_error = (np.sqrt(np.mean(np.square(a.astype(np.float64) - expected.y))) for a in (y, plain_y))
    assert error <= 1.5 * plain_error


@pytest.mark.parametrize("variant", variant_params(OP))
@pytest.mark.parametrize("dtype", ops.FLOAT_TYPES)
def test_lowest_mask_gives_mean(variant: native.VariantInfo, dtype: str) -> None:
    """A row masked with the type's lowest number throughout: scores are swallowed, so every key counts the same."""
    case = Case(
        "lowest_mean",
        b=2,
        heads=2,
        sq=9,
        sk=40,
        d=32,
        mask=(9, 40),
        mask_kind="add",
        std=0.001 if dtype == "float16" else 1.0,
        spoil=lambda inputs: inputs[MASK].fill(LOWEST[dtype]),
    )
    inputs = case.inputs(dtype)
    (y,) = run_variant(OP, variant, inputs, case.attributes())
    mean = np.broadcast_to(inputs[V].astype(np.float64).mean(axis=1, keepdims=True), y.shape)
    assert_close(y, mean, EPSILON[dtype] * 4 * np.abs(inputs[V].astype(np.float64)).max())


@pytest.mark.parametrize("variant", variant_params(OP))
def test_threads_do_not_change_results(variant: native.VariantInfo) -> None:
    for case in (c for c in CASES if c.name in ("long", "decode_long", "many_rows_long", "grouped_BSNH")):
        inputs, attrs = case.inputs("float32"), case.attributes()
        (once,) = run_variant(OP, variant, inputs, attrs, threads=1)
        for threads in (2, 5):
            np.testing.assert_array_equal(run_variant(OP, variant, inputs, attrs, threads=threads)[0], once)


@pytest.mark.parametrize("name", ["causal", "softcap", "mask_5x7_add", "grouped_BSNH"])
def test_bound_rejects_wrong_results(name: str) -> None:
    """The bound is tight enough to see a forgotten attribute, mask or head group in each type."""
    case = next(c for c in CASES if c.name == name)
    for dtype in case.dtypes:
        inputs, attrs, expected, bound = solved(name, dtype)
        wrong_inputs, wrong_attrs = (
            list(inputs),
            {k: v for k, v in attrs.items() if k in ("layout", "num_heads", "kv_num_heads")},
        )
        if case.mask is not None:
            wrong_inputs[MASK] = np.zeros_like(inputs[MASK])
        if case.kv_heads:
            wrong_inputs[K] = inputs[K][:, :, ::-1].copy()
        wrong = attention_reference(wrong_inputs, wrong_attrs).y
        with pytest.raises(AssertionError, match="over the bound"):
            assert_close(wrong, expected.y, bound)


def halve_heads(inputs: Inputs, *indices: int) -> None:
    for i in indices:
        inputs[i] = inputs[i][:, ::2].copy()


# --- What the op refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": (3, 4)}, "mask: does not broadcast to"),
        ({"mask": (1, 1, 1, 8, 8)}, "mask: expected a rank of 1 to 4"),
        ({"kv_heads": 3, "heads": 4}, "q: has 4 heads, not a multiple of the 3 heads of k"),
        ({"past": 3, "total_lengths": (4,)}, "total_lengths: cannot be combined with past_k"),
        ({"spoil": lambda inputs: inputs.__setitem__(V, inputs[V][:, :-1].copy())}, "v: dimension 1 is 7, expected 8"),
        (
            {"past": 3, "spoil": lambda inputs: inputs.__setitem__(PAST_V, None)},
            "past_k and past_v must be given together",
        ),
        (
            {"layout": "3D", "past": 2, "spoil": lambda inputs: halve_heads(inputs, PAST_K, PAST_V)},
            "past_k: has 1 heads, k and v 2",
        ),
        (
            {"layout": "BS3NH", "spoil": lambda inputs: inputs.__setitem__(K, inputs[K][:, :, :2].copy())},
            "k: dimension 2",
        ),
        (
            {"layout": "BS3NH", "spoil": lambda inputs: inputs.__setitem__(slice(3), [inputs[Q][:, :, :2].copy()] * 3)},
            "q: expected 3 parts",
        ),
        (
            {"layout": "3D", "spoil": lambda inputs: inputs.__setitem__(Q, inputs[Q][..., :-1].copy())},
            "q: dimension 2 is 127",
        ),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    case = replace(Case("refused"), **change)
    inputs = case.inputs("float32")
    with pytest.raises(ValueError, match=message):
        native.run(OP, inputs, case.attributes())


# --- ONNX's own test data for Attention -------------------------------------------------------------------------------

_ONNX_ATTRIBUTES = {
    "q_num_heads": "num_heads",
    "kv_num_heads": "kv_num_heads",
    "scale": "scale",
    "is_causal": "is_causal",
    "softcap": "softcap",
    "left_window_size": "window",
    "right_window_size": "window_right",
}
_ONNX_INPUTS = ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"]


def onnx_cases() -> list[Any]:
    import onnx.backend.test.case.node as node_cases
    import onnx.backend.test.case.node.attention  # noqa: F401  (collects its cases when imported)

    cases = node_cases._NodeTestCases
    return [pytest.param(c, id=c.name) for c in cases if [n.op_type for n in c.model.graph.node] == ["Attention"]]


@pytest.mark.parametrize("variant", variant_params(OP))
@pytest.mark.parametrize("case", onnx_cases())
def test_onnx_conformance(case: Any, variant: native.VariantInfo) -> None:
    """Every case of ONNX, by its outputs that the op has: all but the scores."""
    node = case.model.graph.node[0]
    attrs = {
        _ONNX_ATTRIBUTES[a.name]: onnx.helper.get_attribute_value(a)
        for a in node.attribute
        if a.name in _ONNX_ATTRIBUTES
    }
    unknown = {a.name for a in node.attribute} - set(_ONNX_ATTRIBUTES) - {"qk_matmul_output_mode", "softmax_precision"}
    assert not unknown
    given, expected = case.data_sets[0]
    values = dict(zip([n for n in node.input if n], given))
    names = [*node.input, *[""] * (len(_ONNX_INPUTS) - len(node.input))]
    inputs = [None if not name else np.ascontiguousarray(values[name]) for name in names]
    if inputs[Q].ndim == 4:
        attrs["layout"] = "BNSH"
    outputs = run_variant(OP, variant, inputs, attrs, output_count=3)
    for name, wanted in zip([n for n in node.output if n], expected):
        if name == "qk_matmul_output":
            continue
        actual = outputs[["Y", "present_key", "present_value"].index(name)]
        rtol = max(case.rtol, 4 * EPSILON[wanted.dtype.name])
        assert_close(
            actual, wanted.astype(np.float64), case.atol + rtol * np.maximum(1.0, np.abs(wanted.astype(np.float64)))
        )
