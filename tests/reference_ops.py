"""The package's operators in NumPy, float64 inside, for `onnx.reference.ReferenceEvaluator`.

They say what an operator means with no kernel in the way, so that a rewritten model can be checked without a library.
"""

from __future__ import annotations

import math

import numpy as np
from onnx.reference.op_run import OpRun

_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))) if x.size else x,
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
    "quick_gelu": lambda x: x / (1.0 + np.exp(-1.702 * x)),
}


def softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Softmax in which a row of -inf gives zeros."""
    top = scores.max(axis=axis, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        e = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = e.sum(axis=axis, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total != 0)


def masked(scores: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    if mask is None:
        return scores
    if mask.dtype == bool:
        return np.where(mask, scores, -np.inf)
    return scores + mask.astype(np.float64)


class FusedSoftmax(OpRun):
    op_domain = "ortplugins"

    def _run(self, x, mask=None, axis=None, scale=None, log=None, **_):
        axis = -1 if axis is None else axis
        scores = masked(x.astype(np.float64) * (1.0 if scale is None else scale), mask)
        y = softmax(scores, axis)
        if log:
            with np.errstate(divide="ignore"):
                top = scores.max(axis=axis, keepdims=True)
                shifted = scores - np.where(np.isneginf(top), 0.0, top)
                y = shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))
                y = np.where(np.isneginf(scores), -np.inf, y)
        return (y.astype(x.dtype),)


class FusedGemm(OpRun):
    op_domain = "ortplugins"

    def _run(
        self, a, b, bias=None, residual=None, alpha=None, beta=None, transA=None, transB=None, activation=None, **_
    ):  # noqa: N803
        x = np.swapaxes(a, -1, -2) if transA else a
        w = np.swapaxes(b, -1, -2) if transB else b
        y = (1.0 if alpha is None else alpha) * (x.astype(np.float64) @ w.astype(np.float64))
        if bias is not None:
            y = y + (1.0 if beta is None else beta) * bias.astype(np.float64)
        if residual is not None:
            assert residual.shape == y.shape, f"residual {residual.shape} for y {y.shape}"
            y = y + residual.astype(np.float64)
        return (ACTIVATIONS[activation or "none"](y).astype(a.dtype),)


class FusedAttention(OpRun):
    op_domain = "ortplugins"

    def _run(
        self,
        q,
        k,
        v,
        mask=None,
        past_k=None,
        past_v=None,
        total_lengths=None,
        layout=None,
        num_heads=None,
        kv_num_heads=None,
        scale=None,
        is_causal=None,
        softcap=None,
        window=None,
        window_right=None,
        **_,
    ):
        rank, dtype = q.ndim, q.dtype
        assert k.ndim == rank and v.ndim == rank, "q, k and v of one rank"
        kv_num_heads = kv_num_heads or num_heads

        def heads(x, n, part):
            if rank == 5:
                x = x.take(part, axis=2 if layout == "BS3NH" else 3)
            if rank == 3:
                x = x.reshape(x.shape[0], x.shape[1], n, x.shape[2] // n)
            return x if layout == "BNSH" and rank == 4 else x.transpose(0, 2, 1, 3)

        operands = ((q, num_heads), (k, kv_num_heads), (v, kv_num_heads))
        q, k, v = (heads(x, n, part).astype(np.float64) for part, (x, n) in enumerate(operands))
        past = 0
        if past_k is not None:
            past = past_k.shape[2]
            k = np.concatenate([past_k.astype(np.float64), k], axis=2)
            v = np.concatenate([past_v.astype(np.float64), v], axis=2)
        present = k.astype(dtype), v.astype(dtype)
        assert k.shape[0] == q.shape[0] and q.shape[1] % max(k.shape[1], 1) == 0, f"q {q.shape} k {k.shape}"
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale) * (q @ k.swapaxes(-1, -2))
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        if mask is not None:
            short = k.shape[2] - mask.shape[-1]
            if mask.shape[-1] != 1 and short > 0:
                fill = False if mask.dtype == bool else -np.inf
                mask = np.concatenate([mask, np.full((*mask.shape[:-1], short), fill, mask.dtype)], axis=-1)
            assert np.broadcast_shapes(mask.shape, scores.shape) == scores.shape, (
                f"mask {mask.shape} for {scores.shape}"
            )
            scores = masked(scores, mask)
        i, j = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])
        for b in range(q.shape[0]):
            offset = past if total_lengths is None else int(total_lengths[b]) - q.shape[2]
            seen = np.ones((q.shape[2], k.shape[2]), bool)
            if total_lengths is not None:
                seen &= j < total_lengths[b]
            if is_causal:
                seen &= j <= i + offset
            if window is not None and window >= 0:
                seen &= j >= i + offset - window
            if window_right is not None and window_right >= 0:
                seen &= j <= i + offset + window_right
            scores[b] = np.where(seen, scores[b], -np.inf)
        y = (softmax(scores) @ v).astype(dtype)
        if not (layout == "BNSH" and rank == 4):
            y = y.transpose(0, 2, 1, 3)
        if rank != 4:
            y = y.reshape(y.shape[0], y.shape[1], -1)
        return (y, *present)[: len(self.onnx_node.output)]


OPERATORS = [FusedSoftmax, FusedGemm, FusedAttention]
