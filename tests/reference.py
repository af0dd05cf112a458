"""What the ops compute, in float64, and a plain version that rounds to the tensors' type as unfused nodes would.

The plain version sets the bound: a kernel may err at most twice as much as it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortplugins import ops

Rounding = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Arithmetic:
    """``dtype``: type of sums. ``rounded`` is applied to every result, ``operand`` to the factors of products."""

    dtype: np.dtype
    rounded: Rounding = lambda x: x
    operand: Rounding = lambda x: x

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """``a @ b``. Float32 sums run from first to last term, as in a plain loop; BLAS would be better than plain."""
        a, b = self.operand(a), self.operand(b)
        if self.dtype == np.dtype(np.float64):
            return a @ b
        out = np.zeros((*a.shape[:-1], b.shape[-1]), self.dtype)
        for i in range(a.shape[-1]):
            out += a[..., :, i, None] * b[..., None, i, :]
        return self.rounded(out)


def _round_to_tf32(x: np.ndarray) -> np.ndarray:
    """Mantissas rounded to the 10 bits that TF32 tensor cores read."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x0FFF) + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


EXACT = Arithmetic(np.dtype(np.float64))
FLOAT32 = Arithmetic(np.dtype(np.float32))
TF32 = Arithmetic(np.dtype(np.float32), operand=_round_to_tf32)


def plain(dtype: np.dtype, precision: str = "ieee") -> Arithmetic:
    """The arithmetic of unfused nodes on tensors of ``dtype``: float32 sums, rounded to ``dtype`` after every step."""
    if dtype == np.dtype(np.float32):
        return TF32 if precision == "tf32" else FLOAT32
    return Arithmetic(np.dtype(np.float32), rounded=lambda x: x.astype(dtype).astype(np.float32))


def _to_bnsh(x: np.ndarray, layout: str, heads: int, part: int) -> np.ndarray:
    """q, k or v, which is part 0, 1 or 2 of a packed tensor, as (batch, heads, sequence, head_dim)."""
    if layout in ops.PACKED_LAYOUTS:
        x = x.take(part, axis=2 if layout == "BS3NH" else 3)
    elif x.ndim == 3:
        x = x.reshape(*x.shape[:2], heads, x.shape[2] // heads if heads else 0)
    elif layout == "BNSH":
        return x
    return x.transpose(0, 2, 1, 3)


def _allowed_keys(q_len: int, total: int, past: int, length: int | None, attrs: Mapping[str, Any]) -> np.ndarray:
    """Which keys each query may see: (q_len, total)."""
    key = np.arange(total)[None, :]
    offset = past if length is None else length - q_len
    position = np.arange(q_len)[:, None] + offset
    allowed = np.ones((q_len, total), bool)
    if length is not None:
        allowed &= key < length
    if attrs.get("is_causal", 0):
        allowed &= key <= position
    if attrs.get("window", -1) >= 0:
        allowed &= key >= position - attrs["window"]
    if attrs.get("window_right", -1) >= 0:
        allowed &= key <= position + attrs["window_right"]
    return allowed


@dataclass(frozen=True)
class AttentionResult:
    """Outputs, and the largest magnitude of a score that counts, before the bias."""

    y: np.ndarray
    present_k: np.ndarray
    present_v: np.ndarray
    largest_score: float


def attention_reference(
    inputs: Sequence[np.ndarray | None],
    attrs: Mapping[str, Any] | None = None,
    arithmetic: Arithmetic = EXACT,
) -> AttentionResult:
    """FusedAttention of ``inputs``, in the order of the specification, None for absent ones."""
    dtype, rounded = arithmetic.dtype, arithmetic.rounded
    attrs = dict(attrs or {})
    q, k, v, mask, past_k, past_v, total_lengths = [*inputs, *[None] * (7 - len(inputs))]
    layout = attrs.get("layout", "BSNH")
    num_heads = attrs.get("num_heads", 0)
    rank = q.ndim
    q, k, v = (
        _to_bnsh(x.astype(dtype), layout, heads, part)
        for part, (x, heads) in enumerate(
            (
                (q, num_heads),
                (k, attrs.get("kv_num_heads", 0) or num_heads),
                (v, attrs.get("kv_num_heads", 0) or num_heads),
            )
        )
    )
    if past_k is not None:
        k = np.concatenate([past_k.astype(dtype), k], axis=2)
        v = np.concatenate([past_v.astype(dtype), v], axis=2)
    present_k, present_v = k, v
    batch, heads, q_len, head_dim = q.shape
    total = k.shape[2]
    group = heads // k.shape[1] if k.shape[1] else 1
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)

    bias = np.zeros((batch, heads, q_len, total), dtype)
    if mask is not None:
        values = (
            np.where(mask, dtype.type(0), dtype.type(-np.inf)) if mask.dtype == np.dtype(bool) else mask.astype(dtype)
        )
        if values.shape[-1] not in (1, total):
            values = np.concatenate(
                [values, np.full((*values.shape[:-1], total - values.shape[-1]), -np.inf, dtype)], axis=-1
            )
        bias = bias + values
    past = 0 if past_k is None else past_k.shape[2]
    for b in range(batch):
        length = None if total_lengths is None else int(total_lengths[b])
        bias[b] = np.where(_allowed_keys(q_len, total, past, length, attrs), bias[b], -np.inf)

    scale = attrs.get("scale")
    scale = float(np.float32(scale)) if scale is not None else 1.0 / float(np.sqrt(head_dim)) if head_dim else 1.0
    softcap = float(np.float32(attrs.get("softcap", 0.0)))
    with np.errstate(invalid="ignore", over="ignore"):
        score = rounded(arithmetic.matmul(q, k.transpose(0, 1, 3, 2)) * scale)
        if softcap:
            score = rounded(softcap * np.tanh(rounded(score / softcap)))
        counts = ~np.isneginf(bias)
        largest_score = float(np.max(np.abs(score), where=counts & np.isfinite(score), initial=0.0))
        score = np.where(counts, rounded(score + bias), -np.inf)
        maximum = np.max(score, axis=-1, keepdims=True, initial=-np.inf)
        weight = rounded(np.exp(rounded(score - np.where(np.isneginf(maximum), 0.0, maximum))))
        total_weight = rounded(weight.sum(axis=-1, keepdims=True))
        empty = ~np.any(counts, axis=-1, keepdims=True)
        weight = rounded(np.divide(weight, total_weight, out=np.zeros_like(weight), where=~empty))
        # A key without weight adds nothing, whatever its value is.
        bad = ~np.isfinite(v)
        y = arithmetic.matmul(weight, np.where(bad, dtype.type(0), v))
        if bad.any():
            y = np.where(
                (np.nan_to_num(weight, nan=1.0) > 0).astype(np.float64) @ bad.astype(np.float64) > 0, np.nan, y
            )
    if layout != "BNSH" or rank == 3:
        y = y.transpose(0, 2, 1, 3)
    if rank != 4:
        y = y.reshape(batch, q_len, -1)
    return AttentionResult(y, present_k, present_v, largest_score)


def layer_norm_reference(
    inputs: Sequence[np.ndarray | None], attrs: Mapping[str, Any] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """FusedLayerNorm of ``inputs``, in the order of the specification: ``y`` in float64, and ``sum``.

    The sum is by definition made in float32 and rounded to the tensors' type; ``y`` is what follows from it exactly.
    """
    attrs = dict(attrs or {})
    x, residual, gamma, beta, bias = [*inputs, *[None] * (5 - len(inputs))]
    total = x.astype(np.float32)
    for term in (bias, residual):
        if term is not None:
            total = total + term.astype(np.float32)
    total = total.astype(x.dtype)
    s = total.astype(np.float64)
    axes = tuple(range(attrs.get("axis", -1) % x.ndim, x.ndim))
    epsilon = float(np.float32(attrs.get("epsilon", 1e-5)))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if attrs.get("norm", "layer_norm") == "layer_norm":
            s = s - s.mean(axis=axes, keepdims=True)
        y = s / np.sqrt(np.mean(s * s, axis=axes, keepdims=True) + epsilon)
    if gamma is not None:
        y = y * gamma.astype(np.float64)
    if beta is not None:
        y = y + beta.astype(np.float64)
    return y, total


@dataclass(frozen=True)
class SoftmaxResult:
    """``y``; ``score``: scale * x + mask, -inf where a boolean mask hides an element; ``weight``: the softmax, also where
    ``y`` is its logarithm; ``magnitude``: the sum of the magnitudes that went into each score."""

    y: np.ndarray
    score: np.ndarray
    weight: np.ndarray
    magnitude: np.ndarray


def softmax_reference(inputs: Sequence[np.ndarray | None], attrs: Mapping[str, Any] | None = None) -> SoftmaxResult:
    """FusedSoftmax in float64."""
    attrs = dict(attrs or {})
    x, mask = [*inputs, None][:2]
    axis = attrs.get("axis", -1)
    with np.errstate(invalid="ignore", divide="ignore"):
        score = x.astype(np.float64) * float(np.float32(attrs.get("scale", 1.0)))
        magnitude = np.abs(score)
        if mask is not None and mask.dtype == np.dtype(bool):
            score = np.where(mask, score, -np.inf)
        elif mask is not None:
            score = score + mask.astype(np.float64)
            magnitude = magnitude + np.abs(mask.astype(np.float64))
        # The maximum of a row with NaN is NaN, so that only rows of nothing but -inf count as masked.
        top = np.max(score, axis=axis, keepdims=True, initial=-np.inf)
        shifted = score - np.where(np.isneginf(top), 0.0, top)
        weight = np.exp(shifted)
        total = weight.sum(axis=axis, keepdims=True)
        weight = np.where(np.isneginf(top), 0.0, weight / total)
        y = np.where(np.isneginf(top), -np.inf, shifted - np.log(total)) if attrs.get("log", 0) else weight
    return SoftmaxResult(y, score, weight, np.where(np.isneginf(score), 0.0, magnitude))


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * _erfc(-x / math.sqrt(2.0)) if x.size else x  # 1 + erf(x) would cancel


def _times_sigmoid(x: np.ndarray, u: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x / (1.0 + np.exp(-u))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": _gelu,
    "gelu_tanh": lambda x: _times_sigmoid(x, 2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)),
    "silu": lambda x: _times_sigmoid(x, x),
    "quick_gelu": lambda x: _times_sigmoid(x, 1.702 * x),
}


@dataclass(frozen=True)
class GemmResult:
    """``y``; ``product_size``: |alpha| |op(a)| |op(b)|; ``addend_size``: |beta bias| + |residual|; ``before``: what the
    activation is applied to."""

    y: np.ndarray
    product_size: np.ndarray
    addend_size: np.ndarray
    before: np.ndarray


def gemm_reference(inputs: Sequence[np.ndarray | None], attrs: Mapping[str, Any] | None = None) -> GemmResult:
    """FusedGemm in float64."""
    attrs = dict(attrs or {})
    a, b, bias, residual = [None if t is None else t.astype(np.float64) for t in [*inputs, None, None][:4]]
    if attrs.get("transA", 0):
        a = a.swapaxes(-1, -2)
    if attrs.get("transB", 0):
        b = b.swapaxes(-1, -2)
    alpha, beta = (float(np.float32(attrs.get(name, 1.0))) for name in ("alpha", "beta"))
    with np.errstate(invalid="ignore"):
        before = alpha * (a @ b)
        product_size = abs(alpha) * (np.abs(a) @ np.abs(b))
        addend_size = np.zeros_like(before)
        if bias is not None and beta != 0.0:  # as in BLAS: a bias that does not count is not read
            before = before + beta * bias
            addend_size = addend_size + np.abs(beta * bias)
        if residual is not None:
            before = before + residual
            addend_size = addend_size + np.abs(residual)
        y = ACTIVATIONS[attrs.get("activation", "none")](before)
    return GemmResult(y, product_size, addend_size, before)
