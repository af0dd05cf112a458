"""FusedLayerNorm: every variant against float64."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import (
    EPSILON,
    RUNTIME_ROWS,
    assert_close,
    misaligned,
    numpy_dtype,
    random_tensor,
    run_variant,
    table_params,
    variant_params,
)
from onnx import helper
from ort_models import make_model, make_session, run_model, run_op, value_info
from reference import layer_norm_reference

from ortplugins import native, ops

OP = "FusedLayerNorm"
NORMS = ("layer_norm", "rms_norm")
DTYPES = ops.FLOAT_TYPES
VARIANTS = variant_params(OP)


def tensors(rng: np.random.Generator, shapes, dtype: str = "float32") -> list[np.ndarray | None]:
    return [None if s is None else random_tensor(rng, s, dtype) for s in shapes]


ULPS = {"cpu": 4.0, "cuda": 16.0}
"""On CUDA the mean is found from differences to the row's first element, which may lie 4 deviations from it."""


def bound_of(inputs, attrs=None, ulps: float = ULPS["cpu"]) -> np.ndarray:
    """Allowed error: ``ulps`` of float32 for the terms of each element, where a row's statistics are as good as its
    quarter-largest element is; half types round the result once more."""
    x, residual, gamma, beta, bias = [*inputs, *[None] * (5 - len(inputs))]
    scaled, _ = layer_norm_reference([x, residual, gamma, None, bias], attrs)
    expected, _ = layer_norm_reference(inputs, attrs)
    terms = np.abs(scaled) + (0.0 if beta is None else np.abs(beta.astype(np.float64)))
    terms = np.nan_to_num(terms, posinf=0.0)
    bound = ulps * EPSILON["float32"] * np.maximum(terms, np.max(terms, axis=-1, keepdims=True, initial=0.0) / 4)
    if x.dtype != np.dtype(np.float32):
        bound = bound + EPSILON[x.dtype.name] / 2 * 1.01 * np.nan_to_num(np.abs(expected), posinf=0.0) + 2.0**-25
    return bound


def check(variant, inputs, attrs=None, *, output_count: int = 2) -> list[np.ndarray]:
    """Runs one variant between guards; y near float64, and sum exactly as it is defined."""
    y, *total = results = run_variant(OP, variant, inputs, attrs, output_count=output_count)
    expected_y, expected_total = layer_norm_reference(inputs, attrs)
    assert_close(y, expected_y, bound_of(inputs, attrs, ULPS[variant.device]))
    if total:
        np.testing.assert_array_equal(total[0], expected_total)
    return results


COLS = (1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 257, 384, 768, 1023, 1024, 1025, 2048, 4096, 4099, 8192, 12288,
        12289, 20011, 65536, 130003)

SMALL = {
    "test_lengths": {"cols": (1, 33, 1025, 4099, 20011, 130003), "norm": ("layer_norm",), "dtype": DTYPES},
    "test_optional_tensors": {"present": (31,), "norm": ("rms_norm",), "dtype": DTYPES},
    "test_alignment": {"cols": (64, 5000), "offset": (0, 3), "dtype": ("float32", "bfloat16")},
}
"""What runs under compute-sanitizer: every kernel, with tails."""


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_lengths(variant, cols, dtype, norm):
    rows = max(1, min(37, 40000 // cols))
    x, gamma, beta = tensors(np.random.default_rng(cols), [(rows, cols), (cols,), (cols,)], dtype)
    check(variant, [x, None, gamma, beta], {"norm": norm}, output_count=1)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("present", range(32))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_optional_tensors(variant, dtype, present, norm):
    """Every combination of residual, gamma, beta, bias and sum."""
    shapes = [s if present & 1 << i else None for i, s in enumerate(((11, 203), (203,), (203,), (203,)))]
    inputs = tensors(np.random.default_rng(present), [(11, 203), *shapes], dtype)
    check(variant, inputs, {"norm": norm}, output_count=2 if present & 16 else 1)


@pytest.mark.parametrize("cols", (5, 768, 4100, 12288, 16400, 70001))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_y_is_the_norm_of_the_written_sum(variant, dtype, cols):
    """Bit by bit, whether or not the sum is written, by every row. A session chooses a row for each of the three problems,
    whose sums may be in another order: there each is near float64."""
    inputs = tensors(np.random.default_rng(cols), [(3, cols), (3, cols), None, None, (cols,)], dtype)
    y, total = check(variant, inputs)
    for same in (inputs, [total]):
        if variant.name in RUNTIME_ROWS and variant.device == "cuda":
            check(variant, same, output_count=1)
        else:
            np.testing.assert_array_equal(y, run_variant(OP, variant, same)[0])


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", (64, 769, 5000))
@pytest.mark.parametrize("variant", table_params(OP))
def test_alignment(variant, cols, dtype, offset):
    """Every tensor at another distance from a 64-byte boundary; all at one boundary where the offset is 0."""
    values = tensors(np.random.default_rng(offset), [(5, cols), (5, cols), (cols,), (cols,), (cols,)], dtype)
    inputs = [misaligned(t, i * offset % 8) for i, t in enumerate(values, 1)]
    outputs = [misaligned(np.zeros((5, cols), numpy_dtype(dtype)), i * offset % 8) for i in (6, 7)]
    try:
        native.run(OP, inputs, outputs=outputs, variant=variant.name, device=variant.device)
    except NotImplementedError as refusal:
        pytest.skip(f"{variant.name} leaves this to another variant: {refusal}")
    y, total = layer_norm_reference(inputs)
    assert_close(outputs[0], y, bound_of(inputs, ulps=ULPS[variant.device]))
    np.testing.assert_array_equal(outputs[1], total)


@pytest.mark.parametrize("cols", (7, 100, 768, 5000, 12288, 65536))
@pytest.mark.parametrize("mean", (1e4, -3e5))
@pytest.mark.parametrize("variant", VARIANTS)
def test_large_mean(variant, mean, cols):
    """Mean 1e4 and more, standard deviation 1: as accurate as around 0."""
    x = (np.random.default_rng(0).standard_normal((4, cols)) + mean).astype(np.float32)
    check(variant, [x])


@pytest.mark.parametrize("cols", (64, 4096, 14000))
@pytest.mark.parametrize("variant", VARIANTS)
def test_first_element_far_from_all_others(variant, cols):
    (x,) = tensors(np.random.default_rng(0), [(3, cols)])
    x[:, 0] = 1e6
    check(variant, [x])


@pytest.mark.parametrize("value", (0.0, 1.0, -0.1, 1e-40, 12345.678, -1e30))
@pytest.mark.parametrize("cols", (1, 3, 255, 1000, 12289, 65537))
@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_values_give_beta(variant, cols, value):
    gamma, beta = tensors(np.random.default_rng(0), [(cols,), (cols,)])
    (y,) = run_variant(OP, variant, [np.full((2, cols), value, np.float32), None, gamma, beta])
    np.testing.assert_array_equal(y, np.broadcast_to(beta, y.shape))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cols", (16, 300, 5000, 14000))
def test_nan_and_infinity_stay_in_their_row(variant, norm, cols):
    (x,) = tensors(np.random.default_rng(1), [(6, cols)])
    x[1, cols // 2] = np.nan
    x[3, cols - 1] = np.inf
    x[4, 0] = -np.inf
    (y,) = check(variant, [x], {"norm": norm}, output_count=1)
    assert np.isnan(y[1]).all()
    if norm == "rms_norm":  # finite values over an infinite root mean square
        assert np.all(y[3, :-1] == 0) and np.isnan(y[3, -1])
    else:
        assert np.isnan(y[3:5]).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_rms_norm_of_zeros_and_subnormals(variant):
    x = np.zeros((3, 100), np.float32)
    x[1] = 1e-40
    (y,) = run_variant(OP, variant, [x], {"norm": "rms_norm"})
    assert np.all(y[0] == 0) and np.all(np.abs(y[1] - 1e-40 / np.sqrt(1e-5)) <= 1e-38)


@pytest.mark.parametrize("axis", (0, 1, 2, 3, -1, -2, -4))
@pytest.mark.parametrize("variant", VARIANTS)
def test_axis(variant, axis):
    shape = (3, 2, 5, 7)
    last = shape[axis:]
    inputs = tensors(np.random.default_rng(0), [shape, shape, last, (*(1,) * (axis % 4), *last), last])
    check(variant, inputs, {"axis": axis})


@pytest.mark.parametrize("shape", ((4, 5, 48), (5, 48), (1, 5, 48), (48,), (1, 1, 48)))
@pytest.mark.parametrize("variant", VARIANTS)
def test_residual_of_the_last_dimensions(variant, shape):
    """As position embeddings are: the same for all dimensions in front."""
    check(variant, tensors(np.random.default_rng(0), [(4, 5, 48), shape]))


@pytest.mark.parametrize("epsilon", (0.0, 1e-12, 1e-6, 0.5))
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_epsilon(variant, norm, epsilon):
    x = random_tensor(np.random.default_rng(0), (9, 96), "float32", 1e-3)
    check(variant, [x], {"norm": norm, "epsilon": epsilon})


@pytest.mark.parametrize("shape", ((0, 8), (3, 0), (0, 0), (2, 0, 8)))
@pytest.mark.parametrize("variant", VARIANTS)
def test_empty(variant, shape):
    x = np.zeros(shape, np.float32)
    y, total = run_variant(OP, variant, [x, x, np.zeros(shape[-1], np.float32)], output_count=2)
    assert y.shape == total.shape == shape


@pytest.mark.parametrize("shape", ((100_003, 8), (2503, 4096)))
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_rows(variant, shape):
    """More than run at once: blocks that stay for several rows use their buffers again."""
    check(variant, tensors(np.random.default_rng(0), [shape, shape]))


def test_large_output_in_two_threads():
    (x,) = tensors(np.random.default_rng(0), [(9001, 768)])  # 27.7 MB: past the caches
    x = misaligned(x, 0)
    y = misaligned(np.zeros_like(x), 0)
    native.run(OP, [x], outputs=[y], threads=2)
    assert_close(y, layer_norm_reference([x])[0], bound_of([x]))


@pytest.mark.parametrize("shapes, attrs, message", [
    ([(2, 8)], {"axis": 2}, "axis"),
    ([(2, 8)], {"norm": "batch_norm"}, "norm"),
    ([()], {}, "x"),
    ([(2, 8), None, (7,)], {}, "gamma.*8"),
    ([(2, 8), None, None, (2, 8)], {}, "beta"),
    ([(2, 3, 4), None, (4,)], {"axis": 1}, "gamma.*12"),
    ([(8,), None, (1, 8)], {}, "gamma"),
    ([(2, 8), None, None, None, (1,)], {}, "bias"),
    ([(2, 8), (3, 8)], {}, "residual"),
    ([(4, 2, 8), (4, 1, 8)], {}, "residual"),
    ([(2, 3, 4), (4,)], {"axis": 1}, "residual"),
])
def test_refused(shapes, attrs, message):
    with pytest.raises(ValueError, match=message):
        native.run(OP, [None if s is None else np.zeros(s, np.float32) for s in shapes], attrs)


def test_checker_rejects_wrong_results():
    inputs = tensors(np.random.default_rng(0), [(4, 64)])
    expected, bound = layer_norm_reference(inputs)[0], bound_of(inputs)
    (y,) = native.run(OP, inputs)
    assert_close(y, expected, bound)
    for wrong in (y * np.float32(1 + 1e-5), np.full_like(y, np.nan), np.roll(y, 1, axis=1)):
        with pytest.raises(AssertionError):
            assert_close(wrong, expected, bound)


# --- In ONNX Runtime --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constants", ((), (2, 3, 4)))
@pytest.mark.parametrize("output_count", (1, 2))
def test_session(dtype, constants, output_count):
    inputs = tensors(np.random.default_rng(0), [(2, 5, 96), (2, 5, 96), (96,), (96,), (96,)], dtype)
    attrs = {"epsilon": 1e-6}
    results = run_op(OP, inputs, attrs, output_count=output_count, constants=constants)
    for ours, direct in zip(results, native.run(OP, inputs, attrs, output_count=output_count), strict=True):
        np.testing.assert_array_equal(ours, direct)


def test_session_with_omitted_inputs():
    inputs, attrs = tensors(np.random.default_rng(0), [(3, 40), None, None, (40,)]), {"norm": "rms_norm"}
    np.testing.assert_array_equal(run_op(OP, inputs, attrs)[0], native.run(OP, inputs, attrs)[0])


def run_stock(node, feeds):
    outputs = [value_info(o, np.float32, None) for o in node.output if o]
    model = make_model([node], [value_info(n, t.dtype, t.shape) for n, t in feeds.items()], outputs)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return run_model(make_session(model), feeds)


@pytest.mark.parametrize("axis", (-1, 1))
def test_equals_stock_layer_normalization(axis):
    shape = (3, 10, 64)
    x, gamma, beta = tensors(np.random.default_rng(0), [shape, shape[axis:], shape[axis:]])
    attrs = {"axis": axis, "epsilon": 1e-6}
    node = helper.make_node("LayerNormalization", ["x", "gamma", "beta"], ["y"], **attrs)
    (stock,) = run_stock(node, {"x": x, "gamma": gamma, "beta": beta})
    assert_close(native.run(OP, [x, None, gamma, beta], attrs)[0], stock, 1e-5)


def test_equals_stock_skip_layer_normalization():
    names = ("x", "skip", "gamma", "beta", "bias")
    inputs = tensors(np.random.default_rng(0), [(2, 7, 64), (2, 7, 64), (64,), (64,), (64,)])
    node = helper.make_node("SkipLayerNormalization", names, ["y", "", "", "sum"], domain="com.microsoft", epsilon=1e-5)
    results = native.run(OP, inputs, output_count=2)
    for ours, stock in zip(results, run_stock(node, dict(zip(names, inputs))), strict=True):
        assert_close(ours, stock, 1e-5)
