"""Every plugin through the calls that TensorRT makes, by the host in ``tests/plugin_host``: building on any machine,
running on a GPU, against float64."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from kernel_harness import EPSILON, assert_close, numpy_dtype, random_tensor
from reference import attention_reference, layer_norm_reference
from reference_ops import FusedGemm, FusedSoftmax
from tensorrt_support import fields, full_attributes, library_path, names_of_fields, plugin_host

from ortplugins import native, ops

Size = int | str


@dataclass(frozen=True)
class Case:
    """A node. ``inputs`` are (dtype or T, sizes) or None; ``profile`` gives the smallest, best-tuned and largest value
    of each named size, and ``runs`` the values to run with."""

    name: str
    op: str
    inputs: tuple[tuple[str, tuple[Size, ...]] | None, ...]
    profile: dict[str, tuple[int, int, int]]
    runs: tuple[dict[str, int], ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1

    def shape(self, sizes: tuple[Size, ...], values: dict[str, int]) -> tuple[int, ...]:
        # P+S is the sum of two named sizes
        return tuple(s if isinstance(s, int) else sum(values[part] for part in s.split("+")) for s in sizes)

    def at(self, point: int) -> dict[str, int]:
        return {name: values[point] for name, values in self.profile.items()}

    def profile_inputs(self, dtype: str) -> list[tuple[str, list[int], list[int], list[int]] | None]:
        return [
            None
            if i is None
            else (dtype if i[0] == "T" else i[0], *(list(self.shape(i[1], self.at(p))) for p in range(3)))
            for i in self.inputs
        ]

    def arrays(self, dtype: str, values: dict[str, int], seed: int = 0) -> list[np.ndarray | None]:
        rng = np.random.default_rng(seed)
        arrays: list[np.ndarray | None] = []
        for i in self.inputs:
            if i is None:
                arrays.append(None)
            elif i[0] == "bool":
                arrays.append(rng.random(self.shape(i[1], values)) < 0.7)
            elif i[0] == "int64":
                arrays.append(rng.integers(1, values["S"] + 1, self.shape(i[1], values)))
            else:
                arrays.append(np.asarray(random_tensor(rng, self.shape(i[1], values), dtype), numpy_dtype(dtype)))
        return arrays

    def expected(self, arrays: list[np.ndarray | None]) -> list[np.ndarray]:
        doubles = [
            a.astype(np.float64) if a is not None and a.dtype not in (np.dtype(bool), np.dtype(np.int64)) else a
            for a in arrays
        ]
        if self.op == "FusedLayerNorm":
            return list(layer_norm_reference(arrays, self.attrs))[: self.outputs]
        if self.op == "FusedAttention":
            result = attention_reference(arrays, self.attrs)
            return [result.y, result.present_k, result.present_v][: self.outputs]
        return list({"FusedSoftmax": FusedSoftmax, "FusedGemm": FusedGemm}[self.op]._run(None, *doubles, **self.attrs))


_BS = {"B": (1, 2, 4), "S": (1, 64, 300)}
_BS_RUNS = ({"B": 1, "S": 1}, {"B": 2, "S": 64}, {"B": 3, "S": 131}, {"B": 4, "S": 300})
_PAST = {"B": (1, 2, 3), "Q": (1, 1, 9), "S": (1, 5, 40), "P": (1, 64, 513)}
_PAST_RUNS = (
    {"B": 1, "Q": 1, "S": 1, "P": 1},
    {"B": 2, "Q": 1, "S": 5, "P": 64},
    {"B": 3, "Q": 9, "S": 40, "P": 513},
    {"B": 1, "Q": 4, "S": 4, "P": 400},
)

CASES = (
    Case("softmax", "FusedSoftmax", (("T", ("B", 3, "S")),), _BS, _BS_RUNS),
    Case(
        "softmax_bool_mask",
        "FusedSoftmax",
        (("T", ("B", 3, "S")), ("bool", ("B", 1, "S"))),
        _BS,
        _BS_RUNS,
        {"scale": 0.5},
    ),
    Case("softmax_added_mask", "FusedSoftmax", (("T", ("B", 3, "S")), ("T", (3, "S"))), _BS, _BS_RUNS, {"log": 1}),
    Case("softmax_axis", "FusedSoftmax", (("T", ("B", "S", 5)),), _BS, _BS_RUNS, {"axis": 1}),
    Case("softmax_static", "FusedSoftmax", (("T", (2, 7)),), {}, ({},), {"axis": 0}),
    Case("gemm", "FusedGemm", (("T", ("B", "S", 32)), ("T", (32, 48))), _BS, _BS_RUNS, {"alpha": 0.5}),
    Case(
        "gemm_all",
        "FusedGemm",
        (("T", ("B", "S", 33)), ("T", (48, 33)), ("T", (48,)), ("T", ("B", "S", 48))),
        _BS,
        _BS_RUNS,
        {"transB": 1, "activation": "gelu", "beta": 2.0},
    ),
    Case(
        "gemm_no_bias",
        "FusedGemm",
        (("T", ("B", "S", 16)), ("T", (16, 40)), None, ("T", ("B", "S", 40))),
        _BS,
        _BS_RUNS,
        {"activation": "relu"},
    ),
    Case(
        "gemm_scalar_bias",
        "FusedGemm",
        (("T", ("S", 16)), ("T", (16, 8)), ("T", ())),
        {"S": (1, 64, 300)},
        ({"S": 1}, {"S": 77}),
    ),
    Case(
        "gemm_batches", "FusedGemm", (("T", ("B", 1, 24, "S")), ("T", ("B", 2, 24, 17))), _BS, _BS_RUNS, {"transA": 1}
    ),
    Case(
        "gemm_batch_of_one",
        "FusedGemm",
        (("T", ("A", 5, 8)), ("T", ("B", 8, 7))),
        {"A": (1, 1, 4), "B": (1, 4, 4)},
        ({"A": 1, "B": 4}, {"A": 4, "B": 1}, {"A": 3, "B": 3}),
    ),
    Case(
        "attention",
        "FusedAttention",
        tuple(("T", ("B", s, 4, 64)) for s in ("Q", "S", "S")),
        {"B": (1, 2, 4), "Q": (1, 64, 130), "S": (1, 64, 300)},
        (
            {"B": 1, "Q": 1, "S": 1},
            {"B": 2, "Q": 64, "S": 64},
            {"B": 3, "Q": 65, "S": 131},
            {"B": 4, "Q": 130, "S": 300},
        ),
    ),
    Case(
        "attention_3d",
        "FusedAttention",
        (("T", ("B", "S", 96)), ("T", ("B", "S", 48)), ("T", ("B", "S", 64)), ("bool", ("B", 1, 1, "S"))),
        _BS,
        _BS_RUNS,
        {"num_heads": 4, "kv_num_heads": 2, "scale": 0.25, "is_causal": 1},
    ),
    Case(
        "attention_added_mask",
        "FusedAttention",
        (*(("T", ("B", 2, "S", 40)) for _ in range(3)), ("T", (1, 2, "S", "S"))),
        _BS,
        _BS_RUNS,
        {"layout": "BNSH", "softcap": 5.0, "window": 100},
    ),
    Case(
        "attention_past",
        "FusedAttention",
        (
            ("T", ("B", 4, "Q", 32)),
            ("T", ("B", 2, "S", 32)),
            ("T", ("B", 2, "S", 48)),
            None,
            ("T", ("B", 2, "P", 32)),
            ("T", ("B", 2, "P", 48)),
        ),
        _PAST,
        _PAST_RUNS,
        {"layout": "BNSH"},
        outputs=3,
    ),
    Case(
        "attention_past_mask",
        "FusedAttention",
        (
            ("T", ("B", "Q", 2, 64)),
            ("T", ("B", "S", 2, 64)),
            ("T", ("B", "S", 2, 64)),
            ("bool", ("B", 1, "Q", "P+S")),
            ("T", ("B", 2, "P", 64)),
            ("T", ("B", 2, "P", 64)),
        ),
        _PAST,
        _PAST_RUNS,
        {"is_causal": 1},
    ),
    Case(
        "attention_lengths",
        "FusedAttention",
        (
            ("T", ("B", 1, 8, 64)),
            ("T", ("B", "S", 2, 64)),
            ("T", ("B", "S", 2, 64)),
            None,
            None,
            None,
            ("int64", ("B",)),
        ),
        _BS,
        _BS_RUNS,
    ),
    Case("layer_norm", "FusedLayerNorm", (("T", ("B", "S", 48)), None, ("T", (48,)), ("T", (48,))), _BS, _BS_RUNS),
    Case(
        "rms_norm_sum",
        "FusedLayerNorm",
        (("T", ("B", "S", 33)), ("T", ("B", "S", 33)), ("T", (33,)), None, ("T", (33,))),
        _BS,
        _BS_RUNS,
        {"norm": "rms_norm", "epsilon": 1e-3},
        outputs=2,
    ),
    Case("layer_norm_axis", "FusedLayerNorm", (("T", ("B", 3, "S")), ("T", (3, "S"))), _BS, _BS_RUNS, {"axis": 1}),
)
DTYPES = ops.FLOAT_TYPES
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def test_every_op_and_every_optional_input_has_a_case():
    assert {c.op for c in CASES} == {op.name for op in ops.OPS}
    assert sorted(c.op for c in CASES if c.name in SANITIZED) == sorted(op.name for op in ops.OPS)
    for op in ops.OPS:
        for i, tensor in enumerate(op.inputs):
            given = [len(c.inputs) > i and c.inputs[i] is not None for c in CASES if c.op == op.name]
            assert any(given)
            assert not tensor.optional or not all(given)


def builder(case: Case) -> Any:
    host = plugin_host()
    return host.Builder(
        host.Creator.in_library(library_path(), case.op), case.name, fields(case.op, case.attrs, case.outputs)
    )


# --- Building -------------------------------------------------------------------------------------------------------


@EACH_CASE
@EACH_DTYPE
def test_output_types_and_shapes_follow_the_inputs(case: Case, dtype: str):
    given = builder(case).shapes(case.profile_inputs(dtype))
    assert given["types"] == [dtype] * case.outputs
    for point, name in enumerate(("min", "opt", "max")):
        arrays = [None if i is None else np.empty(i[1 + point], numpy_dtype(i[0])) for i in case.profile_inputs(dtype)]
        assert [tuple(s) for s in given[name]] == native.infer_shapes(case.op, arrays, case.attrs)[: case.outputs]


@EACH_CASE
def test_exactly_the_linear_combinations_of_the_specification_are_accepted(case: Case):
    spec = ops.find(case.op)
    expected = set()
    for t in spec.dtypes:
        choices = [
            [t if d == "T" else d for d in spec.inputs[i].dtypes]
            for i, given in enumerate(case.inputs)
            if given is not None
        ]
        for types in itertools.product(*choices):
            expected.add((*types, *[t] * case.outputs))
    absent = {i for i, given in enumerate(case.inputs) if given is None}
    found = builder(case).combinations(case.profile_inputs("float32"))
    assert all(fmt == 0 for combination in found for _, fmt in combination)
    accepted = [tuple(t for i, (t, _) in enumerate(combination) if i not in absent) for combination in found]
    assert sorted(accepted) == sorted(expected)


@EACH_CASE
@EACH_DTYPE
def test_configuring_offers_variants_as_tactics(case: Case, dtype: str):
    workspace, tactics = builder(case).configure(case.profile_inputs(dtype))
    known = {v.id for v in native.variants(case.op, "cuda")}
    assert workspace >= 0
    assert set(tactics) <= known and 0 not in tactics and len(set(tactics)) == len(tactics)
    if native.with_cuda and native.cuda_device(0) is not None:
        assert tactics, "the last row of a table accepts everything"
    else:
        assert not tactics


@EACH_CASE
def test_what_is_serialised_makes_the_same_plugin(case: Case):
    host = plugin_host()
    build = builder(case)
    build.configure(case.profile_inputs("float16"))
    written = build.serialize()
    assert written == build.serialize_clone()
    engine = host.Engine(host.Creator.in_library(library_path(), case.op), case.name, written, 0)
    assert engine.serialize() == written
    engine.attach_twice()


@pytest.mark.parametrize("op", [op.name for op in ops.OPS])
def test_every_attribute_is_serialised(op: str):
    host = plugin_host()
    creator = host.Creator.in_library(library_path(), op)
    attrs = full_attributes(op)
    given = fields(op, attrs)
    written = {name: rest for name, *rest in host.Builder(creator, "node", given).serialize()}
    for name, kind, data, _ in given:
        assert written[name][0] == kind and written[name][1].rstrip(b"\0") == data.rstrip(b"\0")
    assert {a.name for a in ops.find(op).attrs} == set(attrs) == set(written) - {"plugin_outputs"}
    # An attribute without a default stays unset.
    unset = {a.name for a in ops.find(op).attrs if a.default is None}
    assert not unset & set(names_of_fields(host.Builder(creator, "node", []).serialize()))


def test_timing_cache_id_tells_attributes_apart():
    host = plugin_host()
    creator = host.Creator.in_library(library_path(), "FusedGemm")
    ids = {
        host.Builder(creator, "node", fields("FusedGemm", attrs)).timing_cache_id()
        for attrs in (
            {},
            {"alpha": 1.0},
            {"alpha": 1.0000001},
            {"transA": 1},
            {"transB": 1},
            {"activation": "relu"},
            {"precision": "tf32"},
        )
    }
    assert len(ids) == 6  # the first two are the same plugin
    assert all("FusedGemm" in i and len(i) < 1024 for i in ids)


@pytest.mark.parametrize(
    ("inputs", "attrs", "message"),
    [
        ([("float32", [2, 8]), ("float32", [7, 4])], {}, "FusedGemm node 'fc': b: dimension 0 is 7, expected 8"),
        ([("float32", [8]), ("float32", [8, 4])], {}, "FusedGemm node 'fc': a: expected a rank of at least 2, got 1"),
        ([("float32", [3, 2, 8]), ("float32", [2, 8, 4])], {}, "b: dimension 0 does not broadcast"),
        (
            [("float32", [2, 8]), ("float16", [8, 4])],
            {},
            "b: is float16 where the first input is float32, which the op does not mix",
        ),
        ([("int32", [2, 8]), ("int32", [8, 4])], {}, "a: its type is not one that the op takes"),
        ([], {}, "expected 1 to 4 inputs, got 0"),
    ],
)
def test_impossible_inputs_have_a_message(
    capfd: pytest.CaptureFixture[str], inputs: list[Any], attrs: dict[str, Any], message: str
):
    host = plugin_host()
    build = host.Builder(host.Creator.in_library(library_path(), "FusedGemm"), "fc", fields("FusedGemm", attrs))
    with pytest.raises(RuntimeError, match="failed"):
        build.shapes([(t, s, s, s) for t, s in inputs])
    assert message in capfd.readouterr().err


def test_mask_that_does_not_broadcast_is_refused_when_configured(capfd: pytest.CaptureFixture[str]):
    host = plugin_host()
    build = host.Builder(host.Creator.in_library(library_path(), "FusedSoftmax"), "sm", [])
    x, mask = [2, 8], [3, 8]
    with pytest.raises(RuntimeError, match="configurePlugin failed"):
        build.configure([("float32", x, x, x), ("bool", mask, mask, mask)])
    assert "FusedSoftmax node 'sm': mask: does not broadcast" in capfd.readouterr().err


# --- Running --------------------------------------------------------------------------------------------------------


def as_bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


class Run:
    """An execution context bound to one set of arrays."""

    def __init__(self, context: Any, case: Case, dtype: str, values: dict[str, int], workspace: int):
        self.context, self.case, self.dtype, self.values = context, case, dtype, values
        arrays = case.arrays(dtype, values)
        self.shapes = native.infer_shapes(case.op, arrays, case.attrs)[: case.outputs]
        context.bind(
            [None if a is None else (a.dtype.name, list(a.shape)) for a in arrays],
            [(dtype, list(s)) for s in self.shapes],
            workspace,
        )

    def write(self, seed: int) -> list[np.ndarray]:
        """New inputs; gives what the outputs should be."""
        arrays = self.case.arrays(self.dtype, self.values, seed)
        for i, a in enumerate(arrays):
            if a is not None:
                self.context.write(i, as_bytes(a))
        self.context.poison()
        return self.case.expected(arrays)

    def check(self, expected: list[np.ndarray]) -> None:
        for i, e in enumerate(expected):
            actual = np.frombuffer(self.context.read(i), numpy_dtype(self.dtype)).reshape(self.shapes[i])
            finite = np.where(np.isfinite(e), np.abs(e), 0.0)
            close = np.isneginf(e) & np.isneginf(actual.astype(np.float64))
            assert_close(
                np.where(close, 0, actual),
                np.where(close, 0.0, e),
                16 * EPSILON[self.dtype] * (1.0 + finite.max(initial=0.0)),
            )
        assert self.context.damaged() == []


def engines(case: Case, dtype: str) -> list[tuple[Any, int, int]]:
    """(engine, tactic, workspace bytes) for the default and every tactic."""
    host = plugin_host()
    creator = host.Creator.in_library(library_path(), case.op)
    build = builder(case)
    workspace, tactics = build.configure(case.profile_inputs(dtype))
    found = []
    for tactic in (0, *tactics):
        build.set_tactic(tactic)
        found.append((host.Engine(creator, case.name, build.serialize(), tactic), tactic, workspace))
    return found


SANITIZED = ("softmax_bool_mask", "gemm_no_bias", "attention_past", "rms_norm_sum")
"""One case of each op for compute-sanitizer."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[pytest.mark.small] if c.name in SANITIZED else []) for c in CASES]
)
@EACH_DTYPE
def test_every_tactic_is_right_at_every_shape(case: Case, dtype: str):
    host = plugin_host()
    for engine, _, workspace in engines(case, dtype):
        context = host.Context(engine)
        for seed, values in enumerate(case.runs):
            run = Run(context, case, dtype, values, workspace)
            expected = run.write(seed)
            context.enqueue()
            run.check(expected)


@pytest.mark.gpu
@EACH_CASE
@EACH_DTYPE
def test_capture_and_replay(case: Case, dtype: str):
    host = plugin_host()
    for engine, _, workspace in engines(case, dtype):
        context = host.Context(engine)
        run = Run(context, case, dtype, case.runs[-1], workspace)
        run.write(0)
        context.capture()
        for seed in (1, 2, 3):
            expected = run.write(seed)
            context.replay()
            run.check(expected)


@pytest.mark.gpu
@EACH_CASE
def test_two_contexts_on_two_streams_at_once(case: Case):
    host = plugin_host()
    engine, _, workspace = engines(case, "float16")[0]
    runs = [Run(host.Context(engine), case, "float16", values, workspace) for values in (case.runs[0], case.runs[-1])]
    expected = [run.write(seed) for seed, run in enumerate(runs)]
    barrier = threading.Barrier(2)

    def work(run: Run) -> None:
        barrier.wait()
        for _ in range(50):
            run.context.enqueue()

    threads = [threading.Thread(target=work, args=(run,)) for run in runs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for run, e in zip(runs, expected):
        run.check(e)


@pytest.mark.gpu
def test_shapes_outside_of_the_profiles_need_no_workspace():
    """The workspace was sized for the profile; a larger problem must not take more of it than there is."""
    case = next(c for c in CASES if c.name == "attention_past")
    host = plugin_host()
    for engine, _, _ in engines(case, "float16"):
        context = host.Context(engine)
        run = Run(context, case, "float16", {"B": 5, "Q": 1, "S": 1, "P": 4000}, 0)
        expected = run.write(0)
        context.enqueue()
        run.check(expected)


@pytest.mark.gpu
def test_unknown_tactic_falls_back(capfd: pytest.CaptureFixture[str]):
    case = CASES[0]
    host = plugin_host()
    build = builder(case)
    workspace, _ = build.configure(case.profile_inputs("float32"))
    engine = host.Engine(host.Creator.in_library(library_path(), case.op), case.name, build.serialize(), 987654)
    assert "no variant 987654" in capfd.readouterr().err
    context = host.Context(engine)
    run = Run(context, case, "float32", case.runs[1], workspace)
    expected = run.write(0)
    context.enqueue()
    run.check(expected)


@pytest.mark.gpu
def test_the_checks_notice_wrong_results_and_writes_outside():
    case = next(c for c in CASES if c.name == "softmax_static")
    host = plugin_host()
    engine, _, workspace = engines(case, "float32")[0]
    run = Run(host.Context(engine), case, "float32", {}, workspace)
    [expected] = run.write(0)
    run.context.enqueue()
    run.check([expected])
    with pytest.raises(AssertionError):
        run.check([expected + 1e-3])
    # A buffer of one row where the plugin writes two.
    run.context.bind([("float32", [2, 7])], [("float32", [1, 7])], workspace)
    run.context.enqueue()
    assert run.context.damaged() == ["output 0"]
