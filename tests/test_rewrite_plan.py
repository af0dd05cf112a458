"""The plan: sizes, roofline, what the report says of each site, and the options that leave sites alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from rewrite_helpers import CORPUS, Graph, fused, sites

from ortplugins.cli import main
from ortplugins.errors import OrtPluginsError
from ortplugins.rewrite import Report, rewrite
from ortplugins.rewrite.cost import H200, Device, SizeValues, this_cpu
from ortplugins.rewrite.symbolic import Dim

F = np.float32
M, K, N = 6, 16, 10

PLAIN = Device("plain", "made up", 1e9, dict.fromkeys(("ieee", "tf32x3", "tf32", "half"), 1e10), 0.0)
"""Ten operations for each byte, and nodes that cost nothing by themselves."""


def linear(rows: object = "rows") -> onnx.ModelProto:
    g = Graph()
    y = g.add("MatMul", g.input("x", F, ["batch", rows, K]), g.weight(K, N), name="product")
    g.output(g.add("Relu", g.add("Add", y, g.weight(N))))
    return g.model()


def planned(model: onnx.ModelProto, **sizes: int) -> Report:
    report = rewrite(model).report
    report.estimate(PLAIN, sizes)
    return report


def test_linear_chain() -> None:
    (site,) = planned(linear(), batch=3, rows=5).sites
    m = 15
    assert site.estimate.flops == 2 * m * N * K
    assert site.estimate.bytes == 4 * (m * K + K * N + N + m * N)
    assert site.estimate.intensity == pytest.approx(site.estimate.flops / site.estimate.bytes)
    assert site.estimate.bound == "memory"
    before = 4 * (m * K + K * N + m * N) + 4 * (2 * m * N + N) + 4 * 2 * m * N
    assert site.estimate.gain == pytest.approx(before / site.estimate.bytes)


def test_attention_counts_both_products_and_the_past() -> None:
    name = "gpt2_past.dyn23.sdpa.fp32.onnx"
    report = rewrite(CORPUS / name).report
    report.estimate(PLAIN, batch=2, length=8)
    sizes = report.symbols
    assert sizes
    for site in report.select("attention"):
        heads, dim, new, past = 4, 8, 8, 4
        assert site.estimate.flops == 4 * 2 * heads * new * (new + past) * dim


def test_long_products_are_bound_by_arithmetic() -> None:
    for batch, bound in ((1, "memory"), (4096, "compute")):
        g = Graph()
        g.output(g.add("MatMul", g.input("x", F, ["batch", 512]), g.const(np.ones((512, 512), F))))
        assert planned(g.model(), batch=batch).sites[0].estimate.bound == bound


def test_a_site_that_stays_has_its_intensity_and_no_gain() -> None:
    report = rewrite(linear(), skip="linear").report
    report.estimate(PLAIN)
    (site,) = report.sites
    assert site.status == "skipped" and site.estimate.gain is None and site.estimate.flops == 2 * 128 * N * K


def test_sizes_that_are_not_known_give_no_estimate() -> None:
    g = Graph()
    some = g.add("Slice", g.input("x", F, ["n", 4]), np.array([0]), g.input("end", np.int64, [1]), np.array([0]))
    g.output(g.add("Softmax", some, axis=-1))
    (site,) = planned(g.model()).sites
    assert site.status == "fused" and site.estimate is None


def test_names_of_sizes_are_checked() -> None:
    with pytest.raises(OrtPluginsError, match="no input has a dimension named row; .* batch, rows"):
        planned(linear(), row=5)


@pytest.mark.parametrize(
    ("size", "value"),
    [
        (7, 7),
        (Dim.symbol("s") * 2 + 3, 13),
        (Dim.symbol("min(4,s)"), 4),
        (Dim.symbol("min(2*s+1,t)") * 3, 21),
        (Dim.symbol("broadcast(1,min(s,t))"), 5),
        (Dim.symbol("y[2]"), None),
        (Dim.symbol("min(4,y[2])"), None),
    ],
)
def test_symbolic_sizes(size: object, value: int | None) -> None:
    assert SizeValues({"s": 5, "t": 7}.get).of(size) == value


@pytest.mark.parametrize("name", ["bert.ts17.sdpa.fp32.onnx", "llama_past.ts17.sdpa.fp32.onnx", "swin.dyn18.eager.fp32.onnx"])
def test_corpus_sites_all_have_estimates(name: str) -> None:
    report = rewrite(CORPUS / name).report
    report.estimate(H200, length=16)
    assert report.sites
    for site in report.sites:
        assert site.estimate is not None and site.estimate.gain > 0 and site.estimate.flops > 0
        assert site.kind != "attention" or site.estimate.gain > 1.5, "six nodes or more became one"


def test_half_products_run_at_the_rate_of_halves() -> None:
    slow = Device("slow", "made up", 1e12, {"ieee": 1e9, "tf32x3": 1e9, "tf32": 2e9, "half": 1e12}, 0.0)
    model = linear()
    for precision, flops_per_s in (("ieee", 1e9), ("tf32", 2e9)):
        report = rewrite(model, precision={"gemm": precision}).report
        report.estimate(slow)
        (site,) = report.sites
        assert site.estimate.seconds == pytest.approx(site.estimate.flops / flops_per_s)


def test_this_cpu_is_measured() -> None:
    device = this_cpu()
    assert 1e8 <= device.bytes_per_s <= 1e13 and 1e8 <= device.flops["ieee"] <= 1e14


# -- options


def test_kept_nodes_must_exist() -> None:
    with pytest.raises(OrtPluginsError, match="no node named prodct"):
        rewrite(linear(), keep=["prodct"])


def test_a_node_without_a_name_is_kept_by_that_of_its_output() -> None:
    model = linear()
    for node in model.graph.node:
        node.name = ""
    (site,) = sites(rewrite(model, keep=[model.graph.node[0].output[0]]), "linear")
    assert site.status == "skipped" and "kept" in site.reason


def test_precision_of_one_operator() -> None:
    (node,) = fused(rewrite(linear(), precision={"gemm": "tf32x3"}).model, "FusedGemm")
    assert node["precision"] == "tf32x3"
    assert "precision" not in fused(rewrite(linear(), precision={"attention": "tf32"}).model, "FusedGemm")[0]
    with pytest.raises(ValueError, match="expected one of gemm, attention"):
        rewrite(linear(), precision={"softmax": "tf32"})


# -- the command line


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(a) for a in args])
    return result.exit_code, result.output


@pytest.fixture
def path(tmp_path: Path) -> Path:
    out = tmp_path / "model.onnx"
    onnx.save(linear(), out)
    return out


def test_dry_run_shows_the_plan_and_writes_nothing(path: Path) -> None:
    report = path.with_name("plan.json")
    status, output = run("rewrite", path, "--dry-run", "--device", "cuda", "--dim", "rows=64", "--report", report)
    assert status == 0, output
    assert "Plan for NVIDIA H200 (measured)" in output and "product" in output and "memory" in output
    assert "3 nodes would become 1" in output and "wrote" not in output
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.onnx", "plan.json"]
    document = json.loads(report.read_text())
    assert document["sites"][0]["estimate"]["flops"] == 2 * 64 * N * K
    assert document["device"] == "NVIDIA H200 (measured)"


def test_dry_run_gives_the_reason_of_a_near_miss() -> None:
    status, output = run("rewrite", CORPUS / "torch_mha.dyn18.eager.fp32.onnx", "--dry-run", "--device", "cuda")
    assert status == 0
    assert "node_softmax)" in output and "stays" in output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give OUT.onnx, or --dry-run"),
        (("out.onnx", "--dry-run"), "give OUT.onnx, or --dry-run"),
        (("--dry-run", "--precision", "softmax=tf32"), "'softmax=tf32' is not one of ieee, tf32x3, tf32"),
        (("--dry-run", "--precision", "gemm=fast"), "'gemm=fast' is not one of"),
        (("--dry-run", "--dim", "cols=3"), "no input has a dimension named cols"),
        (("--dry-run", "--keep", "nothing"), "no node named nothing"),
    ],
)
def test_wrong_use(path: Path, args: tuple[str, ...], message: str) -> None:
    status, output = run("rewrite", path, *args)
    assert status != 0 and message in " ".join(output.split())
    assert not Path("out.onnx").exists()
