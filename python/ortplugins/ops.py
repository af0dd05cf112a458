"""The operator specifications: the one place that says what an op is called and what it takes.

ONNX Runtime's schema, TensorRT's plugin fields, shape inference, the rewriter, the tests and the op list in the
documentation are derived from :data:`OPS`. The C++ side reads the same table: ``plugins/core/generate_op_specs.py`` turns
it into ``op_specs.h`` at build time. Only the standard library is imported here.

Axes are written as space-separated terms. A term is a symbol (``B``), an attribute (``num_heads``), a product ``A*B`` or a
sum ``A+B``; ``...`` in front stands for any number of leading dimensions, which broadcast as in NumPy when several tensors
have them. A symbol means the same size wherever it occurs in an op. A sum counts a symbol that no tensor bound as zero.
"""

from __future__ import annotations

from dataclasses import dataclass

DOMAIN = "ortplugins"
"""ONNX domain of every op, and the TensorRT plugin namespace."""

OPSET_VERSION = 1
"""Version of the domain, for ``opset_import``; also the TensorRT plugin version."""

FLOAT_TYPES = ("float32", "float16", "bfloat16")

ONNX_TYPE_CODES = {
    "float32": 1,
    "uint8": 2,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "bfloat16": 16,
}
"""``onnx.TensorProto.DataType`` of each dtype name used here."""


@dataclass(frozen=True)
class Axes:
    """The axes of a tensor where ``when`` holds: attribute values by name, and the tensor's rank (0: any)."""

    terms: str
    when: tuple[tuple[str, str | int], ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class Tensor:
    """An input or output. ``dtypes`` are names, or ``T``: the type that all tensors marked ``T`` share.

    ``broadcast`` marks a tensor that broadcasts to the given axes instead of having them. The first entry of ``axes``
    whose condition holds is the one that counts.
    """

    name: str
    axes: str | tuple[Axes, ...]
    dtypes: tuple[str, ...] = ("T",)
    optional: bool = False
    broadcast: bool = False
    doc: str = ""

    @property
    def cases(self) -> tuple[Axes, ...]:
        return (Axes(self.axes),) if isinstance(self.axes, str) else self.axes


@dataclass(frozen=True)
class Attr:
    """An attribute: ``kind`` is ``int``, ``float`` or ``string`` (then one of ``choices``).

    ``default`` None means that the kernel derives the value when the node does not give it. Where ``zero_means`` names
    another attribute, the value 0 stands for that attribute's value.
    """

    name: str
    kind: str
    default: int | float | str | None
    choices: tuple[str, ...] = ()
    zero_means: str = ""
    minimum: int | None = None
    maximum: int | None = None
    doc: str = ""


@dataclass(frozen=True)
class OpSpec:
    """One operator: its ONNX op type, inputs, outputs, attributes and the values that ``T`` may take."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attrs: tuple[Attr, ...] = ()
    dtypes: tuple[str, ...] = FLOAT_TYPES
    doc: str = ""

    @property
    def kernel(self) -> str:
        """Folder and C++ name of the kernel: ``FusedLayerNorm`` is ``layer_norm``."""
        words = "".join(f"_{c.lower()}" if c.isupper() else c for c in self.name.removeprefix("Fused"))
        return words.lstrip("_")

    def attr(self, name: str) -> Attr:
        return next(a for a in self.attrs if a.name == name)


PRECISIONS = ("ieee", "tf32x3", "tf32")

_PRECISION = Attr(
    "precision",
    "string",
    "ieee",
    choices=PRECISIONS,
    doc="Arithmetic of float32 products on CUDA. `ieee`: plain float32. `tf32x3`: three tensor-core products of factors in two "
    "parts of 11 bits each, with float32 accuracy. `tf32`: one product of factors with 11 bits, about three decimal digits. The "
    "parts are TF32, or float16 where scaling loses nothing. CPU kernels and half types ignore it: "
    "half types always accumulate in float32.",
)

FUSED_SOFTMAX = OpSpec(
    "FusedSoftmax",
    inputs=(
        Tensor("x", "...", doc="Scores, of any rank of at least 1."),
        Tensor("mask", "...", dtypes=("T", "bool"), optional=True, broadcast=True,
               doc="Added to `scale * x`, or boolean: where it is false the element has no weight."),
    ),
    outputs=(Tensor("y", "..."),),
    attrs=(
        Attr("axis", "int", -1, doc="The axis that sums to one; negative counts from the end."),
        Attr("scale", "float", 1.0, doc="Factor on `x` before the mask."),
        Attr("log", "int", 0, minimum=0, maximum=1, doc="1: the logarithm of the softmax."),
    ),
    doc="`softmax(scale * x + mask)` along `axis`. A fully masked row (all -inf) gives zeros (with `log`, -inf); any other "
    "row equals ONNX Softmax (LogSoftmax).",
)

FUSED_GEMM = OpSpec(
    "FusedGemm",
    inputs=(
        Tensor("a", (Axes("... K M", when=(("transA", 1),)), Axes("... M K"))),
        Tensor("b", (Axes("... N K", when=(("transB", 1),)), Axes("... K N"))),
        Tensor("bias", "M N", optional=True, broadcast=True, doc="Broadcasts to (M, N): a scalar, (N), (1, N), (M, 1) or (M, N)."),
        Tensor("residual", "... M N", optional=True, doc="Added before the activation; has the shape of `y`."),
    ),
    outputs=(Tensor("y", "... M N"),),
    attrs=(
        Attr("alpha", "float", 1.0),
        Attr("beta", "float", 1.0),
        Attr("transA", "int", 0, minimum=0, maximum=1),
        Attr("transB", "int", 0, minimum=0, maximum=1),
        Attr("activation", "string", "none", choices=("none", "relu", "gelu", "gelu_tanh", "silu", "quick_gelu"),
             doc="`gelu` uses erf, `gelu_tanh` the tanh approximation; `quick_gelu` is x * sigmoid(1.702 x)."),
        _PRECISION,
    ),
    doc="`activation(alpha * op(a) op(b) + beta * bias + residual)`; leading dimensions broadcast as in MatMul. An empty K "
    "gives the epilogue of zeros.",
)

_QKV_LAYOUTS = (
    "`BSNH`: (batch, sequence, heads, head_dim), or (batch, sequence, heads * head_dim) with `num_heads`; "
    "`BNSH`: (batch, heads, sequence, head_dim). Packed, as one projection gives them: `BS3NH` (batch, sequence, 3, heads, "
    "head_dim) and `BSN3H` (batch, sequence, heads, 3, head_dim); `q`, `k` and `v`, usually one and the same tensor, are "
    "then the parts 0, 1 and 2 of theirs, and `y` is (batch, sequence, heads * head_dim)."
)

PACKED_LAYOUTS = ("BS3NH", "BSN3H")
"""Layouts of FusedAttention in which a tensor holds queries, keys and values side by side."""


def _qkv(name: str, seq: str, heads: str, heads_attr: str, dim: str) -> Tensor:
    return Tensor(
        name,
        (
            Axes(f"B {seq} {heads_attr}*{dim}", rank=3),
            Axes(f"B {heads} {seq} {dim}", when=(("layout", "BNSH"),)),
            Axes(f"B {seq} Parts {heads} {dim}", when=(("layout", "BS3NH"),)),
            Axes(f"B {seq} {heads} Parts {dim}", when=(("layout", "BSN3H"),)),
            Axes(f"B {seq} {heads} {dim}"),
        ),
    )


FUSED_ATTENTION = OpSpec(
    "FusedAttention",
    inputs=(
        _qkv("q", "Sq", "N", "num_heads", "D"),
        _qkv("k", "S", "Nkv", "kv_num_heads", "D"),
        _qkv("v", "S", "Nkv", "kv_num_heads", "Dv"),
        Tensor("mask", "B N Sq P+S", dtypes=("T", "bool"), optional=True, broadcast=True,
               doc="Added to the scaled scores, or boolean: false keys have no weight. A last dimension shorter than the "
               "key length is filled up with -inf."),
        Tensor("past_k", "B Nkv P D", optional=True, doc="Cached keys, in front of `k`; BNSH in either layout."),
        Tensor("past_v", "B Nkv P Dv", optional=True, doc="Cached values, in front of `v`; BNSH in either layout."),
        Tensor("total_lengths", "B", dtypes=("int64",), optional=True,
               doc="Number of valid keys of each sequence; later keys and values are never used. Not together with past."),
    ),
    outputs=(
        Tensor("y", (
            Axes("B Sq num_heads*Dv", rank=3),
            Axes("B N Sq Dv", when=(("layout", "BNSH"),)),
            *(Axes("B Sq N*Dv", when=(("layout", packed),)) for packed in PACKED_LAYOUTS),
            Axes("B Sq N Dv"),
        )),
        Tensor("present_k", (Axes("B kv_num_heads P+S D", rank=3), Axes("B Nkv P+S D")), optional=True,
               doc="`past_k` and `k`, concatenated; BNSH."),
        Tensor("present_v", (Axes("B kv_num_heads P+S Dv", rank=3), Axes("B Nkv P+S Dv")), optional=True,
               doc="`past_v` and `v`, concatenated; BNSH."),
    ),
    attrs=(
        Attr("layout", "string", "BSNH", choices=("BSNH", "BNSH", *PACKED_LAYOUTS), doc=_QKV_LAYOUTS),
        Attr("num_heads", "int", 0, minimum=0, doc="Query heads; required with 3-D tensors."),
        Attr("kv_num_heads", "int", 0, minimum=0, zero_means="num_heads", doc="Key and value heads of 3-D tensors; 0: as many as query heads."),
        Attr("scale", "float", None, doc="Factor on the scores; 1 / sqrt(head_dim) when absent."),
        Attr("is_causal", "int", 0, minimum=0, maximum=1,
             doc="1: query i sees key j only if j <= i + offset, where offset is the past length with `past_k`, "
             "`total_lengths - Sq` with `total_lengths`, else 0."),
        Attr("softcap", "float", 0.0, doc="Scores become softcap * tanh(score / softcap) before the mask; 0: off."),
        Attr("window", "int", -1, minimum=-1, doc="Query i sees key j only if j >= i + offset - window; -1: unbounded."),
        Attr("window_right", "int", -1, minimum=-1, doc="Query i sees key j only if j <= i + offset + window_right; -1: unbounded."),
        _PRECISION,
    ),
    doc="`softmax(softcap(scale * q k^T) + mask) v` with the semantics of the ONNX operator Attention; a fully masked row "
    "gives zeros. Query heads may be a multiple of key heads (grouped-query attention).",
)

FUSED_LAYER_NORM = OpSpec(
    "FusedLayerNorm",
    inputs=(
        Tensor("x", "...", doc="Of any rank of at least 1."),
        Tensor("residual", "...", optional=True, broadcast=True,
               doc="Added to `x`: of its shape, or of its last dimensions, then the same for all dimensions before them."),
        Tensor("gamma", "...", optional=True, broadcast=True,
               doc="Factor on the result, of the shape of the normalised dimensions; 1 when absent."),
        Tensor("beta", "...", optional=True, broadcast=True,
               doc="Added to the result, of the shape of `gamma`; 0 when absent."),
        Tensor("bias", "...", optional=True, broadcast=True,
               doc="Added to `x` before `residual`, of the shape of `gamma`."),
    ),
    outputs=(
        Tensor("y", "..."),
        Tensor("sum", "...", optional=True, doc="`x + bias + residual`."),
    ),
    attrs=(
        Attr("norm", "string", "layer_norm", choices=("layer_norm", "rms_norm"),
             doc="`layer_norm`: `(s - mean) / sqrt(variance + epsilon)`. `rms_norm`: `s / sqrt(mean of s^2 + epsilon)`."),
        Attr("axis", "int", -1,
             doc="The first normalised dimension; all from it on are normalised together. Negative counts from the end."),
        Attr("epsilon", "float", 1e-5, doc="Added to the variance (the mean square)."),
    ),
    doc="`norm(s) * gamma + beta` with `s = x + bias + residual`. All arithmetic is float32. Half types are rounded twice: "
    "`s`, so that `y` is the normalised `sum` whether or not that is asked for, and `y`; `norm(s)` is not rounded before "
    "`gamma`. A row of equal values gives exactly `beta` under `layer_norm` if `epsilon` is positive.",
)

OPS: tuple[OpSpec, ...] = (FUSED_SOFTMAX, FUSED_GEMM, FUSED_ATTENTION, FUSED_LAYER_NORM)
"""Every operator of the package."""


def find(name: str) -> OpSpec:
    """The specification of op type ``name``; KeyError if there is none."""
    for op in OPS:
        if op.name == name:
            return op
    raise KeyError(name)
