"""The command line: exit statuses, messages, reports, and Polygraphy's side of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import ortplugins
from ort_versions import PACKAGE_FOLDER
from ortplugins import cli, demo
from ortplugins.bench import digest
from ortplugins.bench.workloads import WORKLOADS
from ortplugins.errors import OrtPluginsError
from test_compare import edited, small_encoder

TREE = Path(__file__).parents[1]


def run(*args) -> tuple[int, str]:
    """Exit status and output of ``ortplugins ARGS``; an exception that is no exit fails the test."""
    result = CliRunner().invoke(cli.main, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def model(tmp_path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(small_encoder(), path)
    return path


@pytest.fixture
def fused(model) -> Path:
    path = model.with_name("fused.onnx")
    ortplugins.rewrite(model, output=path)
    return path


@pytest.mark.parametrize("args", [(), ("rewrite",), ("compare",), ("bench",), ("demo",), ("doctor",)])
def test_help_teaches_with_examples(args):
    status, output = run(*args, "--help")
    assert status == 0 and f"Usage: main {' '.join(args)}".strip() in output
    assert args == ("doctor",) or f"ortplugins {' '.join(args)}".strip() in output


def test_version():
    assert ortplugins.__version__ in run("--version")[1]


def test_rewrite_writes_model_and_report(model, tmp_path):
    out, report = tmp_path / "out.onnx", tmp_path / "report.json"
    status, output = run("rewrite", model, out, "--report", report)
    assert status == 0 and "sites fused" in output and "wrote" in output
    assert "ortplugins" in {o.domain for o in onnx.load(out).opset_import}
    sites = json.loads(report.read_text())["sites"]
    assert {s["kind"] for s in sites} >= {"attention", "linear"}
    for site in sites:
        assert {"kind", "nodes", "status", "op", "reason"} <= site.keys()
        assert site["nodes"] and (site["status"] == "fused") == (site["reason"] is None)


def test_rewrite_shows_the_reason_of_a_skipped_site(model, tmp_path):
    status, output = run("rewrite", model, tmp_path / "out.onnx", "--keep", "softmax", "--skip", "linear")
    assert status == 0 and "Skipped" in output and "softmax" in output


@pytest.mark.parametrize(
    "content, message",
    [(None, "there is no file"), (b"garbage", "cannot be read as an ONNX model"), (b"", "is not an ONNX model")],
)
@pytest.mark.parametrize("command", ["rewrite", "compare"])
def test_bad_files_give_one_line_and_write_nothing(tmp_path, command, content, message):
    path, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    if content is not None:
        path.write_bytes(content)
    status, output = run(command, path, *([out] if command == "rewrite" else []))
    assert status == 1 and not out.exists()
    assert output.startswith("Error: ") and message in output and output.count("\n") == 1


def test_compare_passes(model, fused, tmp_path):
    report = tmp_path / "report.json"
    status, output = run("compare", model, fused, "--report", report, "--seconds", 0.1, "--layers")
    assert status == 0 and "PASSED" in output and "float64" in output and "Latency" in output and "Layers" in output
    assert json.loads(report.read_text())["passed"] is True


def test_compare_rewrites_when_given_one_model(model):
    status, output = run("compare", model, "--no-latency", "--dim", "batch=3", "--dim", "sequence=7")
    assert status == 0 and "sites fused" in output and "input_ids 3x7" in output


@pytest.mark.parametrize("options", [(), ("--atol", "1e-4")])
def test_compare_fails_out_of_tolerance(model, tmp_path, options):
    changed = tmp_path / "changed.onnx"
    onnx.save(edited(small_encoder(), b1=lambda b: b + 0.01), changed)
    status, output = run("compare", model, changed, "--no-latency", *options)
    assert status == 1 and "FAILED" in output and "above the bound" in output


def test_compare_takes_inputs_from_a_file(model, fused, tmp_path):
    np.savez(tmp_path / "inputs.npz", input_ids=np.ones((1, 3), np.int64), attention_mask=np.ones((1, 3), np.int64))
    status, output = run("compare", model, fused, "--inputs", tmp_path / "inputs.npz", "--no-latency")
    assert status == 0 and "input_ids 1x3" in output
    (tmp_path / "bad.npz").write_text("no archive")
    assert run("compare", model, fused, "--inputs", tmp_path / "bad.npz")[0] == 1


@pytest.mark.parametrize(
    "options, message",
    [
        (("--dim", "batch"), "is not NAME=SIZE"),
        (("--dim", "bath=2"), "no input has a dimension named bath"),
        (("--library", "nowhere.so"), "nowhere.so"),
        (("--provider", "tpu"), "'cpu', 'cuda'"),
    ],
)
def test_compare_refuses_bad_options(model, fused, options, message):
    status, output = run("compare", model, fused, "--no-latency", *options)
    assert status != 0 and message in output and "Traceback" not in output


def test_compare_refuses_a_provider_that_is_not_there(model):
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    status, output = run("compare", model, "--provider", "cuda")
    assert status == 1 and "has no CUDAExecutionProvider" in output and "doctor" in output


def test_module_runs_as_a_program(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(PACKAGE_FOLDER)}
    command = [sys.executable, "-m", "ortplugins", "compare", "missing.onnx"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "Error: there is no file missing.onnx\n")


def test_bench_measures_and_records(tmp_path, monkeypatch):
    attention = dict(WORKLOADS["attention"].cpu[0], batch=1, q_len=3, kv_len=5)
    small = {
        "softmax": {"rows": 3, "cols": 17},
        "gemm": {"m": 5, "n": 7, "k": 11},
        "attention": attention,
        "layer_norm": {"rows": 3, "cols": 17, "residual": True},
    }
    for name, problem in small.items():
        monkeypatch.setitem(WORKLOADS, name, replace(WORKLOADS[name], cpu=[problem]))
    path = tmp_path / "bench.json"
    status, output = run("bench", "--seconds", 0.05, "--json", path)
    assert status == 0 and all(w.spec.name in output for w in WORKLOADS.values())
    document = json.loads(path.read_text())
    assert document["kernel_digest"] and document["environment"]["onnxruntime"]
    assert [r["op"] for r in document["records"]] == [WORKLOADS[n].spec.name for n in WORKLOADS]
    for record in document["records"]:
        assert record["error"] <= 1e-5 and record["median_us"] > 0 and record["baselines"]["ort"]["median_us"] > 0
        assert record["variant"].startswith("cpu_") and record["dtype"] == "float32" and record["precision"] is None


def test_bench_ladder_is_for_what_has_one():
    status, output = run("bench", "attention", "--ladder")
    assert status == 2 and "attention: there are gemm, softmax" in output


@pytest.mark.parametrize("options", [[], ["--provider", "cuda", "--ladder"]])
def test_bench_rows_are_those_of_a_gpu(options):
    status, output = run("bench", "gemm", "--rows", *options)
    assert status == 2 and "--rows" in output and "--provider cuda" in output


def test_bench_of_a_whole_model(tmp_path, monkeypatch):
    """The command that measures BERT on a GPU, with the demo's model on the CPU."""
    try:
        demo.find_model()
    except OrtPluginsError as error:
        pytest.skip(str(error))
    monkeypatch.setattr("ortplugins.demo.SHAPES", ((2, 16),))
    path = tmp_path / "e2e.json"
    status, output = run("bench", "e2e", "--seconds", 0.05, "--json", path)
    assert status == 0, output
    (record,) = json.loads(path.read_text())["records"]
    assert record["op"] == "model" and record["shape"]["batch"] == 2 and record["shape"]["cuda_graph"] is False
    assert 0 < record["error"] < 1e-4 and record["median_us"] > 0 and record["baselines"]["ort"]["median_us"] > 0
    assert "3 FusedAttention" in record["variant"]


def test_bench_measures_whole_models_by_themselves():
    status, output = run("bench", "e2e", "softmax")
    assert status == 2 and "give e2e alone" in output


def test_bench_refuses_an_unknown_op():
    status, output = run("bench", "convolution")
    assert status == 2 and "there are softmax, gemm, attention, layer_norm" in output


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_stock_nodes_and_reference_agree(name):
    """The rival computes what the reference says: a benchmark against anything else would be worth nothing."""
    import onnxruntime

    workload = WORKLOADS[name]
    problem = dict(workload.cpu[0])
    problem |= (
        {"rows": 7}
        if "rows" in problem
        else {"m": 9, "k": 31}
        if "m" in problem
        else {"batch": 1, "q_len": 6, "kv_len": 6}
    )
    inputs = workload.inputs(problem, np.random.default_rng(0))
    result = onnxruntime.InferenceSession(workload.stock(problem, inputs).SerializeToString()).run(
        None, workload.feeds(inputs)
    )[0]
    assert workload.error(problem, inputs, result) <= 2e-6
    assert not workload.error(problem, inputs, result + 1e-3) <= 2e-6
    assert not workload.error(problem, inputs, np.full_like(result, np.nan)) <= 2e-6


def test_digest_depends_on_kernel_sources_only(tmp_path):
    for folder in ("plugins/core", "plugins/device", "plugins/kernels", "plugins/onnxruntime"):
        shutil.copytree(TREE / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "python/ortplugins").mkdir(parents=True)
    shutil.copy(TREE / "python/ortplugins/ops.py", tmp_path / "python/ortplugins")
    before = digest.kernel_digest(tmp_path)
    assert before == digest.kernel_digest(TREE)

    def changes(name: str) -> bool:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        old = path.read_bytes() if path.exists() else None
        path.write_bytes((old or b"") + b"\n")
        result = digest.kernel_digest(tmp_path) != before
        path.unlink() if old is None else path.write_bytes(old)
        return result

    assert (
        changes("plugins/kernels/softmax/softmax.cc")
        and changes("plugins/core/op.h")
        and changes("python/ortplugins/ops.py")
    )
    assert changes("plugins/kernels/softmax/another.cu")
    assert not changes("plugins/onnxruntime/custom_ops.cc") and not changes("plugins/ladder/gemm.cu")
    assert not changes("plugins/kernels/softmax/README.md")


def test_digest_command(monkeypatch, tmp_path):
    monkeypatch.chdir(TREE)
    assert run("bench", "--digest") == (0, digest.kernel_digest(TREE) + "\n")


def polygraphy(*args, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``polygraphy run ARGS``; where the package is a source tree, with its entry points written down for the
    occasion."""
    path = [PACKAGE_FOLDER]
    if not any(e.name == "ortplugins" for e in metadata.entry_points(group="polygraphy.run.plugins")):
        tomllib = pytest.importorskip("tomllib", reason="reads the entry points from pyproject.toml")
        groups = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]["entry-points"]
        folder = cwd / "metadata" / "ortplugins-0.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            line
            for group, entries in groups.items()
            for line in (f"[{group}]", *(f"{n} = {v}" for n, v in entries.items()))
        ]
        (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ortplugins\nVersion: 0\n")
        path.append(folder.parent)
    command = [
        sys.executable,
        "-c",
        "import sys; from polygraphy.tools import main; sys.exit(main())",
        "run",
        *map(str, args),
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)


SHAPES = (
    "--input-shapes",
    "input_ids:[2,6]",
    "attention_mask:[2,6]",
    "--val-range",
    "input_ids:[0,28]",
    "attention_mask:[0,1]",
)


def test_polygraphy_runs_the_rewritten_model_against_stock_outputs(model, fused, tmp_path):
    stock = polygraphy(model, "--onnxrt", "--save-outputs", "stock.json", *SHAPES, cwd=tmp_path)
    assert stock.returncode == 0, stock.stderr
    plain = polygraphy(fused, "--onnxrt", *SHAPES, cwd=tmp_path)
    assert plain.returncode != 0, "without the library ONNX Runtime does not know the ops"
    ours = polygraphy(
        fused, "--ortplugins", "--load-outputs", "stock.json", "--atol", "1e-5", "--rtol", "1e-5", *SHAPES, cwd=tmp_path
    )
    assert ours.returncode == 0, ours.stdout[-2000:] + ours.stderr[-2000:]
    changed = tmp_path / "changed.onnx"
    ortplugins.rewrite(edited(small_encoder(), b1=lambda b: b + 0.01), output=changed)
    other = polygraphy(
        changed,
        "--ortplugins",
        "--load-outputs",
        "stock.json",
        "--atol",
        "1e-5",
        "--rtol",
        "1e-5",
        *SHAPES,
        cwd=tmp_path,
    )
    assert other.returncode != 0


def test_polygraphy_marks_every_layer(fused, tmp_path):
    result = polygraphy(
        fused, "--ortplugins", "--onnx-outputs", "mark", "all", "--save-outputs", "layers.json", *SHAPES, cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    from polygraphy.comparator import RunResults

    ((_, iterations),) = RunResults.load(str(tmp_path / "layers.json")).items()
    produced = {o for n in onnx.load(fused).graph.node if n.op_type != "Constant" for o in n.output if o}
    assert produced <= set(iterations[0])


def test_polygraphy_wrong_library_fails(fused, tmp_path):
    result = polygraphy(fused, "--ortplugins", "--ortplugins-library", "nowhere.so", *SHAPES, cwd=tmp_path)
    assert result.returncode != 0 and "there is no custom-op library at nowhere.so" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_polygraphy_help_names_the_runner(tmp_path):
    assert "--ortplugins" in polygraphy("--help", cwd=tmp_path).stdout
