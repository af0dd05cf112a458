"""Creating plugins through TensorRT's own registry: every field, in both phases, and fields that are wrong.

The code runs in processes of their own, with each TensorRT runtime that is installed. No GPU is needed.
"""

from __future__ import annotations

import json
import pathlib

import pytest
from tensorrt_support import fields, full_attributes, installed, library_path, plugin_host, run_child

from ortplugins import ops

RUNTIMES = installed("tensorrt", "tensorrt_lean")
pytestmark = pytest.mark.skipif(
    not RUNTIMES, reason="no TensorRT is installed: pip install tensorrt-lean-cu13-libs tensorrt-lean-cu13-bindings"
)
EACH_RUNTIME = pytest.mark.parametrize("runtime", RUNTIMES)
EACH_OP = pytest.mark.parametrize("op", [op.name for op in ops.OPS])

PRELUDE = """
import importlib, json, sys
import numpy as np
trt = importlib.import_module(sys.argv[1])
assert trt.get_plugin_registry().load_library(sys.argv[2]) is not None
creator = trt.get_plugin_registry().get_creator(sys.argv[3], "1", "ortplugins")
attrs = json.loads(sys.argv[4])
TYPES = {int: (trt.PluginFieldType.INT64, np.int64), float: (trt.PluginFieldType.FLOAT32, np.float32)}

def field(name, value):
    if isinstance(value, str):
        return trt.PluginField(name, np.frombuffer(value.encode(), np.int8), trt.PluginFieldType.CHAR)
    kind, dtype = TYPES[type(value)]
    return trt.PluginField(name, np.array([value], dtype), kind)

def create(fields, phase=trt.TensorRTPhase.BUILD):
    return creator.create_plugin("node", trt.PluginFieldCollection(fields), phase)
"""


def run(runtime: str, op: str, code: str, attrs: dict[str, object] | None = None) -> tuple[list[str], str]:
    """Lines of output and errors; the child must end well."""
    done = run_child(PRELUDE + code, runtime, library_path(), op, json.dumps(attrs or {}))
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines(), done.stderr


@EACH_RUNTIME
@EACH_OP
def test_fields_are_those_of_the_specification(runtime: str, op: str):
    lines, _ = run(runtime, op, "print([f.name for f in creator.field_names])")
    spec = ops.find(op)
    expected = [a.name for a in spec.attrs] + (["plugin_outputs"] if any(t.optional for t in spec.outputs) else [])
    assert lines == [str(expected)]


@EACH_RUNTIME
@EACH_OP
def test_created_in_both_phases_with_every_field(runtime: str, op: str):
    lines, err = run(
        runtime,
        op,
        """
for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME):
    for given in ({}, attrs, *({k: v} for k, v in attrs.items())):
        plugin = create([field(k, v) for k, v in given.items()], phase)
        assert plugin is not None, given
        for kind in (trt.PluginCapabilityType.CORE, trt.PluginCapabilityType.BUILD, trt.PluginCapabilityType.RUNTIME):
            assert plugin.get_capability_interface(kind) is not None
print("done")
""",
        full_attributes(op),
    )
    assert lines == ["done"]
    assert err == ""


@EACH_RUNTIME
@EACH_OP
def test_cloned_serialised_and_created_again_from_the_registry(runtime: str, op: str):
    host = plugin_host()
    given = [(name, kind, list(data), length) for name, kind, data, length in fields(op, full_attributes(op))]
    lines, err = run(
        runtime,
        op,
        """
sys.path.append(attrs["host"])
import _plugin_host as host
mapped = [line.split()[-1] for line in open("/proc/self/maps")]
tensorrt = next(m for m in mapped if m.split("/")[-1].startswith(("libnvinfer.so", "libnvinfer_lean.so")))
creator = host.Creator.in_registry(tensorrt, sys.argv[3], "1", "ortplugins")
build = host.Builder(creator, "node", [(n, k, bytes(d), l) for n, k, d, l in attrs["fields"]])
written = build.serialize()
assert written == build.serialize_clone()
engine = host.Engine(creator, "node", written, 0)
assert engine.serialize() == written
engine.attach_twice()
print("done")
""",
        {"host": str(pathlib.Path(host.__file__).parent), "fields": given},
    )
    assert lines == ["done"] and err == ""


@EACH_RUNTIME
def test_integers_and_floats_of_other_widths(runtime: str):
    lines, err = run(
        runtime,
        "FusedSoftmax",
        """
for bits in (8, 16, 32):
    kind, dtype = getattr(trt.PluginFieldType, f"INT{bits}"), np.dtype(f"int{bits}")
    assert create([trt.PluginField("axis", np.array([-1], dtype), kind)]) is not None
assert create([trt.PluginField("scale", np.array([0.5]), trt.PluginFieldType.FLOAT64)]) is not None
print("done")
""",
    )
    assert lines == ["done"] and err == ""


@EACH_RUNTIME
@pytest.mark.parametrize(
    ("op", "bad", "message"),
    [
        ("FusedSoftmax", "field('log', 2)", "FusedSoftmax node 'node': attribute log: 2 is not in [0, 1]"),
        ("FusedSoftmax", "field('scale', float('nan'))", "attribute scale: is not a finite number"),
        ("FusedSoftmax", "field('scale', 1)", "attribute scale must be a float"),
        ("FusedSoftmax", "field('axis', 1.0)", "attribute axis must be an integer"),
        ("FusedSoftmax", "field('axis', 'last')", "attribute axis must be an integer"),
        (
            "FusedSoftmax",
            "trt.PluginField('axis', np.array([0, 1]), trt.PluginFieldType.INT64)",
            "attribute axis must be an integer",
        ),
        ("FusedSoftmax", "trt.PluginField('axis')", "attribute axis must be an integer"),
        ("FusedSoftmax", "field('axes', 1)", "there is no attribute axes; the op has axis scale log"),
        ("FusedSoftmax", "field('profiles', 1)", "there is no attribute profiles"),
        ("FusedSoftmax", "field('plugin_outputs', 2)", "attribute plugin_outputs must be an integer from 1 to 1"),
        (
            "FusedGemm",
            "field('activation', 'tanh')",
            "attribute activation: 'tanh' is not one of none relu gelu gelu_tanh silu quick_gelu",
        ),
        ("FusedGemm", "field('precision', '')", "attribute precision: '' is not one of ieee tf32x3 tf32"),
        ("FusedGemm", "field('activation', 1)", "attribute activation must be a string"),
        ("FusedAttention", "field('plugin_outputs', 4)", "attribute plugin_outputs must be an integer from 1 to 3"),
        ("FusedAttention", "field('plugin_outputs', 0)", "attribute plugin_outputs must be an integer from 1 to 3"),
        ("FusedAttention", "field('num_heads', -1)", "attribute num_heads: -1 is not in [0, "),
        ("FusedAttention", "field('window', -2)", "attribute window: -2 is not in [-1, "),
    ],
)
def test_bad_field_gives_null_and_a_message(runtime: str, op: str, bad: str, message: str):
    lines, err = run(
        runtime,
        op,
        f"""
for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME)[: 1 if "profiles" in {bad!r} else 2]:
    assert create([{bad}], phase) is None
print("done")
""",
    )
    assert lines == ["done"]
    assert f"[ortplugins] {op} node 'node': " in err and message in err


@EACH_RUNTIME
def test_profiles_of_another_version_are_refused(runtime: str):
    lines, err = run(
        runtime,
        "FusedSoftmax",
        """
for values in ([1], [1, 99, 0], [1, -1, 0], [1, 1, -5], [1, 1, 0, 9], [1, 1, 0, 2, 1, 1, 1]):
    field = trt.PluginField("profiles", np.array(values, np.int64), trt.PluginFieldType.INT64)
    assert create([field], trt.TensorRTPhase.RUNTIME) is None, values
print("done")
""",
    )
    assert lines == ["done"]
    assert err.count("the engine was written by another version of this plugin") == 6
