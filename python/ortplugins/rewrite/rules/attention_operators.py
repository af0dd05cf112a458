"""Operators that are a whole attention: ONNX's own, and those of ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ..facts import Facts, attr, op_of, tensor_of
from ..layout import Arrangement, Factor
from ..operands import Level
from ..report import Refused
from ..symbolic import Size, exact_div
from ..tape import Tape
from . import TYPES
from .attention_problem import Problem
from .masks import Term


def _standard(facts: Facts, node: ir.Node) -> Problem:
    """The ONNX Attention operator."""
    q, k, v, mask, past_k, past_v, lengths = [*node.inputs, *[None] * (7 - len(node.inputs))][:7]
    outputs = [*node.outputs, *[None] * (4 - len(node.outputs))]
    used = [o is not None and bool(o.uses() or o.is_graph_output()) for o in outputs]
    if used[3]:
        raise Refused("the node gives its scores out", node)
    if any(a.is_ref() for a in node.attributes.values()):
        raise Refused("an attribute of the node is an attribute of the function", node)
    unknown = set(node.attributes) - {
        "is_causal",
        "scale",
        "softcap",
        "q_num_heads",
        "kv_num_heads",
        "qk_matmul_output_mode",
        "softmax_precision",
        "left_window_size",
        "right_window_size",
    }
    if unknown:
        raise Refused(f"attribute {sorted(unknown)[0]} is not understood", node)
    if attr(node, "softmax_precision", 1) == ir.DataType.DOUBLE:
        raise Refused("Softmax is computed in double precision", node)
    shapes = [facts.shape(x) for x in (q, k, v)]
    if any(s is None for s in shapes):
        raise Refused("the rank of an input is not known", node)
    qs, ks, vs = shapes
    if len(qs) == 4:
        n, nkv = qs[1], ks[1]
    else:
        n, nkv = attr(node, "q_num_heads"), attr(node, "kv_num_heads")
    group = exact_div(n, nkv)
    if group is None:
        raise Refused(f"{n} query heads are not known to be a multiple of {nkv} key heads", node)
    b, s, own = (
        Factor("b", qs[0]),
        Factor("s", qs[1] if len(qs) == 3 else qs[2]),
        Factor("k", ks[1] if len(ks) == 3 else ks[2]),
    )
    past = facts.shape(past_k) if past_k is not None else (0, 0, 0, 0)
    if past is None or (past_k is None) != (past_v is None):
        raise Refused("the cache is not known to be two tensors of rank 4", node)
    j = Factor("j", own.size + past[2]) if past_k is not None else own
    heads_kv, groups = Factor("n", nkv), Factor("g", group)
    if len(qs) == 4:
        d, dv = Factor("d", qs[3]), Factor("v", vs[3])
    else:
        d, dv = Factor("d", exact_div(qs[2], n)), Factor("v", exact_div(vs[2], nkv))
        if d.size is None or dv.size is None:
            raise Refused("the head size is not known", node)
    both = [heads_kv, groups] if group != 1 else [heads_kv]
    bnsh = len(qs) == 4

    def arranged(heads: list[Factor], seq: Factor, dim: Factor) -> Arrangement:
        return [[b], heads, [seq], [dim]] if bnsh else [[b], [seq], [*heads, dim]]

    terms = []
    if mask is not None:
        scores: Arrangement = [[b], both, [s], [j]]
        fill = -math.inf if facts.dtype(mask) == ir.DataType.BOOL else None
        shape = facts.shape(mask)
        if not shape:
            raise Refused(f"the rank of the mask {mask.name} is not known", node)
        # The mask may be shorter than the keys: the rest counts as -inf, here and there.
        short = shape[-1] not in (1, j.size)
        terms.append(Term(mask, scores, node, fill=fill, whole=short))
    scale = attr(node, "scale")
    if scale is None:
        if not isinstance(d.size, int):
            raise Refused("the head size is not known", node)
        scale = 1.0 / math.sqrt(d.size)
    return Problem(
        q=Level(q, arranged(both, s, d)),
        k=Level(k, arranged([heads_kv], own, d)),
        v=Level(v, arranged([heads_kv], own, dv)),
        out=Level(node.outputs[0], arranged(both, s, dv)),
        batch=[b],
        heads=both,
        sq=s,
        sk=j,
        d=d,
        dv=dv,
        scale=scale,
        softcap=float(attr(node, "softcap", 0.0)),
        terms=terms,
        nodes=[node],
        is_causal=bool(attr(node, "is_causal", 0)),
        window=attr(node, "left_window_size", -1),
        window_right=attr(node, "right_window_size", -1),
        past_k=past_k,
        past_v=past_v,
        total_lengths=lengths,
        own=own if past_k is not None else None,
        present_k=outputs[1] if used[1] else None,
        present_v=outputs[2] if used[2] else None,
    )


def _not_referring(node: ir.Node) -> None:
    if any(a.is_ref() for a in node.attributes.values()):
        raise Refused("an attribute of the node is an attribute of the function", node)


def _inputs(node: ir.Node, count: int) -> list[ir.Value | None]:
    return [*node.inputs, *[None] * (count - len(node.inputs))][:count]


def _padding(facts: Facts, node: ir.Node, mask: ir.Value, dtype: ir.DataType) -> Term:
    """A mask of 0 and 1, (batch, keys) or (batch, query, key): what is not above 0 gets a finite number added."""
    rank = facts.rank(mask)
    if rank not in (2, 3):
        raise Refused("the padding mask is not of rank 2 or 3", node)
    fill = float(attr(node, "mask_filter_value", -10000.0))

    def make(tape: Tape) -> ir.Value:
        value = (
            tape.op("Reshape", [mask, tape.ints([0, 1, 1, -1])])
            if rank == 2
            else tape.op("Unsqueeze", [mask, tape.ints([1])])
        )
        keep = tape.op("Greater", [value, tape.constant(np.array(0, facts.dtype(mask).numpy()))])
        return tape.op(
            "Where", [keep, tape.constant(np.array(0, dtype.numpy())), tape.constant(np.array(fill, dtype.numpy()))]
        )

    if rank == 3 and facts.opset < 13:
        raise Refused("a padding mask of rank 3 needs opset 13", node)
    return Term(mask, [], node, factor=1.0, make=make)


def _multi_head_attention(facts: Facts, node: ir.Node) -> Problem:
    """com.microsoft MultiHeadAttention."""
    _not_referring(node)
    q, k, v, bias, padding, added, past_k, past_v, *more = _inputs(node, 10)
    outputs = [*node.outputs, *[None] * (4 - len(node.outputs))]
    used = [o is not None and bool(o.uses() or o.is_graph_output()) for o in outputs]
    if used[3]:
        raise Refused("the node gives its scores out", node)
    if any(x is not None for x in more):
        raise Refused("the cache is updated in place", node)
    if v is None:
        return _packed_multi_head_attention(facts, node, q, k, [bias, padding, past_k], added)
    shapes = [facts.shape(x) for x in (q, k, v)]
    n = attr(node, "num_heads")
    if (
        any(s is None for s in shapes)
        or len(shapes[0]) != 3
        or len(shapes[1]) != len(shapes[2])
        or len(shapes[1]) not in (3, 4)
    ):
        raise Refused("the ranks of the inputs are not 3, or 4 for keys and values", node)
    qs, ks, vs = shapes
    bnsh = len(ks) == 4
    d = exact_div(qs[2], n)
    dv = vs[3] if bnsh else exact_div(vs[2], n)
    if not isinstance(d, int) or dv is None:
        raise Refused("the head size is not known", node)
    past = facts.shape(past_k) if past_k is not None else (0, 0, 0, 0)
    if past is None or (past_k is None) != (past_v is None):
        raise Refused("the cache is not known to be two tensors of rank 4", node)
    if bnsh and (past_k is not None or bias is not None):
        raise Refused("keys of rank 4 together with a cache or a bias", node)
    b, s, own = Factor("b", qs[0]), Factor("s", qs[1]), Factor("k", ks[2] if bnsh else ks[1])
    heads, dim, dim_v = Factor("n", n), Factor("d", d), Factor("v", dv)
    j = Factor("j", own.size + past[2]) if past_k is not None else own

    def kv(last: Factor) -> Arrangement:
        return [[b], [heads], [own], [last]] if bnsh else [[b], [own], [heads, last]]

    levels = [Level(q, [[b], [s], [heads, dim]]), Level(k, kv(dim)), Level(v, kv(dim_v))]
    if bias is not None:
        if tensor_of(bias) is None:
            raise Refused("the bias is computed in the graph", node)
        start = 0
        for level, width in zip(levels, (qs[2], ks[2], vs[2])):
            if not isinstance(width, int):
                raise Refused("the head size is not known", node)
            level.make = _with_bias(level.value, bias, start, start + width)
            start += width
    dtype = facts.dtype(q)
    terms = []
    if padding is not None:
        if dtype not in TYPES:
            raise Refused("the element type is not known", node)
        terms.append(_padding(facts, node, padding, dtype))
    if added is not None:
        terms.append(Term(added, [[b], [heads], [s], [j]], node))
    scale = attr(node, "scale", 0.0)
    return Problem(
        q=levels[0],
        k=levels[1],
        v=levels[2],
        out=Level(node.outputs[0], [[b], [s], [heads, dim_v]]),
        batch=[b],
        heads=[heads],
        sq=s,
        sk=j,
        d=dim,
        dv=dim_v,
        scale=float(scale) or 1.0 / math.sqrt(d),
        terms=terms,
        nodes=[node],
        is_causal=bool(attr(node, "unidirectional", 0)),
        past_k=past_k,
        past_v=past_v,
        own=own if past_k is not None else None,
        present_k=outputs[1] if used[1] else None,
        present_v=outputs[2] if used[2] else None,
    )


def _packed_multi_head_attention(
    facts: Facts,
    node: ir.Node,
    q: ir.Value,
    kv: ir.Value | None,
    others: list[ir.Value | None],
    added: ir.Value | None,
) -> Problem:
    """MultiHeadAttention of (batch, sequence, heads, 3, head_dim), or of queries and (batch, keys, heads, 2, head_dim)."""
    if any(x is not None for x in others):
        raise Refused("packed queries, keys and values together with a bias, a padding mask or a cache", node)
    packed = q if kv is None else kv
    shape, qs = facts.shape(packed), facts.shape(q)
    count, n = 3 if kv is None else 2, attr(node, "num_heads")
    if shape is None or qs is None or len(shape) != 5 or shape[2:4] != (n, count) or not isinstance(shape[4], int):
        raise Refused("the packed operand is not (batch, sequence, heads, 3 or 2, head_dim)", node)
    b, s = Factor("b", shape[0]), Factor("s", qs[1])
    own, heads = Factor("k", shape[1]), Factor("n", n)
    dim, dim_v = Factor("d", shape[4]), Factor("v", shape[4])

    def part(i: int, seq: Factor, last: Factor) -> Level:
        level = Level(packed, [[b], [seq], [heads], [last]])
        level.make = lambda tape: tape.op("Gather", [packed, tape.constant(np.array(i, np.int64))], {"axis": 3})
        return level

    scale = attr(node, "scale", 0.0)
    return Problem(
        q=part(0, s, dim) if kv is None else Level(q, [[b], [s], [heads, dim]]),
        k=part(count - 2, own, dim),
        v=part(count - 1, own, dim_v),
        out=Level(node.outputs[0], [[b], [s], [heads, dim_v]]),
        batch=[b],
        heads=[heads],
        sq=s,
        sk=own,
        d=dim,
        dv=dim_v,
        scale=float(scale) or 1.0 / math.sqrt(shape[4]),
        terms=[] if added is None else [Term(added, [[b], [heads], [s], [own]], node)],
        nodes=[node],
        is_causal=bool(attr(node, "unidirectional", 0)),
    )


def _with_bias(value: ir.Value, bias: ir.Value, start: int, stop: int) -> Callable[[Tape], ir.Value]:
    return lambda tape: tape.op("Add", [value, tape.folded(bias, lambda t: t[start:stop])])


def _projected_attention(facts: Facts, node: ir.Node) -> Problem:
    """com.microsoft Attention: one weight projects the input to queries, keys and values."""
    _not_referring(node)
    x, w, bias, mask, past, added, length = _inputs(node, 7)
    if past is not None or length is not None or any(o.uses() or o.is_graph_output() for o in node.outputs[1:]):
        raise Refused("the cache of both keys and values is one tensor", node)
    if attr(node, "do_rotary", 0):
        raise Refused("the node rotates queries and keys", node)
    weight, shape = tensor_of(w), facts.shape(x)
    if weight is None or not w.is_initializer() or (bias is not None and tensor_of(bias) is None):
        raise Refused("the weight or the bias is computed in the graph", node)
    if shape is None or len(shape) != 3:
        raise Refused("the rank of the input is not 3", node)
    dtype = facts.dtype(x)
    if dtype not in TYPES:
        raise Refused("the element type is not one that the operator takes", node)
    n = attr(node, "num_heads")
    total = int(weight.shape[1])
    widths = [int(u) for u in attr(node, "qkv_hidden_sizes", [total // 3] * 3)]
    if any(u % n for u in widths) or sum(widths) != total:
        raise Refused("the projections are not whole heads", node)
    b, s = Factor("b", shape[0]), Factor("s", shape[1])
    own, heads = Factor("k", shape[1]), Factor("n", n)
    dim, dim_v = Factor("d", widths[0] // n), Factor("v", widths[2] // n)
    levels, start = [], 0
    for i, (width, last) in enumerate(zip(widths, (dim, dim, dim_v))):
        level = Level(x, [[b], [own if i else s], [heads, last]])
        level.make = _projection(x, w, bias, start, start + width)
        levels.append(level)
        start += width
    terms = []
    if mask is not None:
        terms.append(_padding(facts, node, mask, dtype))
    if added is not None:
        terms.append(Term(added, [[b], [heads], [s], [own]], node))
    scale = attr(node, "scale", 0.0)
    return Problem(
        q=levels[0],
        k=levels[1],
        v=levels[2],
        out=Level(node.outputs[0], [[b], [s], [heads, dim_v]]),
        batch=[b],
        heads=[heads],
        sq=s,
        sk=own,
        d=dim,
        dv=dim_v,
        scale=float(scale) or 1.0 / math.sqrt(widths[0] // n),
        terms=terms,
        nodes=[node],
        is_causal=bool(attr(node, "unidirectional", 0)),
    )


def _projection(x: ir.Value, w: ir.Value, bias: ir.Value | None, start: int, stop: int) -> Callable[[Tape], ir.Value]:
    def make(tape: Tape) -> ir.Value:
        inputs = [
            x,
            tape.folded(w, lambda t: t[:, start:stop]),
            None if bias is None else tape.folded(bias, lambda t: t[start:stop]),
        ]
        return tape.fused("FusedGemm", inputs, {}).outputs[0]

    return make


_GROUPED_ATTRIBUTES = frozenset(
    {"num_heads", "kv_num_heads", "scale", "softcap", "do_rotary", "rotary_interleaved", "local_window_size"}
    | {"smooth_softmax", "qk_output", "k_quant_type", "v_quant_type", "kv_cache_bit_width"}
)


def _grouped_query_attention(facts: Facts, node: ir.Node) -> Problem:
    """com.microsoft GroupQueryAttention, where every sequence is known to be as long as the tensors.

    The node writes new keys behind the valid part of the cache, which may end elsewhere in each sequence. Where the
    lengths are computed from the sizes, cache and new keys are simply joined.
    """
    _not_referring(node)
    q, k, v, past_k, past_v, valid, total, _cos, _sin, _positions, added, *more = _inputs(node, 14)
    outputs = [*node.outputs, *[None] * (4 - len(node.outputs))]
    used = [o is not None and bool(o.uses() or o.is_graph_output()) for o in outputs]
    if unknown := set(node.attributes) - _GROUPED_ATTRIBUTES:
        raise Refused(f"attribute {sorted(unknown)[0]} is not understood", node)
    if attr(node, "do_rotary", 0):
        raise Refused("the node rotates queries and keys", node)
    if attr(node, "local_window_size", -1) != -1:
        raise Refused("the node has a local window, which its kernels count differently", node)
    if attr(node, "smooth_softmax", 0) == 1 or any(x is not None for x in more):
        raise Refused("the node has a sink or a quantised cache", node)
    if k is None or v is None:
        raise Refused("queries, keys and values are packed into one tensor", node)
    if used[3]:
        raise Refused("the node gives its scores out", node)
    shapes = [facts.shape(x) for x in (q, k, v)]
    n, nkv = attr(node, "num_heads"), attr(node, "kv_num_heads")
    if any(s is None or len(s) != 3 for s in shapes):
        raise Refused("the ranks of the inputs are not 3", node)
    qs, ks, vs = shapes
    d, dv = exact_div(ks[2], nkv), exact_div(vs[2], nkv)
    if not isinstance(d, int) or dv is None or qs[2] != n * d or n % nkv:
        raise Refused("the head size is not known", node)
    past = facts.shape(past_k) if past_k is not None else (0, 0, 0, 0)
    if past is None or len(past) != 4 or (past_k is None) != (past_v is None):
        raise Refused("the cache is not known to be two tensors of rank 4", node)
    length = past[2] + qs[1]
    if ks[1] != qs[1] or _uniform(facts, valid) != length - 1 or _uniform(facts, total) != length:
        raise Refused(
            "the valid lengths of its sequences are only known at run time, and so is where new keys are written", node
        )
    b, s, own = Factor("b", qs[0]), Factor("s", qs[1]), Factor("k", ks[1])
    heads, groups = Factor("n", nkv), Factor("g", n // nkv)
    both = [heads, groups] if n != nkv else [heads]
    dim, dim_v = Factor("d", d), Factor("v", dv)
    j = Factor("j", length) if past_k is not None else own
    scale = attr(node, "scale", 0.0)
    return Problem(
        q=Level(q, [[b], [s], [*both, dim]]),
        k=Level(k, [[b], [own], [heads, dim]]),
        v=Level(v, [[b], [own], [heads, dim_v]]),
        out=Level(node.outputs[0], [[b], [s], [*both, dim_v]]),
        batch=[b],
        heads=both,
        sq=s,
        sk=j,
        d=dim,
        dv=dim_v,
        scale=float(scale) or 1.0 / math.sqrt(d),
        softcap=float(attr(node, "softcap", 0.0)),
        terms=[] if added is None else [Term(added, [[b], both, [s], [j]], node)],
        nodes=[node],
        is_causal=True,
        past_k=past_k,
        past_v=past_v,
        own=own if past_k is not None else None,
        present_k=outputs[1] if used[1] else None,
        present_v=outputs[2] if used[2] else None,
    )


def _uniform(facts: Facts, value: ir.Value | None) -> Size | None:
    """The integer that every element of a tensor has, as a formula over sizes; None if that is not known."""
    data = facts.ints(value)
    if data:
        return data[0] if all(x == data[0] for x in data) else None
    node = value.producer() if value is not None else None
    op = op_of(node)
    if op in ("Cast", "Expand", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Tile"):
        return _uniform(facts, node.inputs[0])
    if op == "ConstantOfShape":
        fill = attr(node, "value")
        return int(fill.numpy().reshape(-1)[0]) if fill is not None and fill.dtype.is_integer() else None
    if op in ("Add", "Sub"):
        a, b = (_uniform(facts, x) for x in node.inputs)
        return None if a is None or b is None else a + b if op == "Add" else a - b
    return None


OPERATORS: dict[str, Callable[[Facts, ir.Node], Problem]] = {
    "Attention": _standard,
    "com.microsoft::MultiHeadAttention": _multi_head_attention,
    "com.microsoft::Attention": _projected_attention,
    "com.microsoft::GroupQueryAttention": _grouped_query_attention,
}
"""Operators that are a whole attention."""
