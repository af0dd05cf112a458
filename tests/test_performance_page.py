"""What is rendered from the records: the performance page, roofline plots, the ladder's tables; with stale runs marked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ortplugins.bench import roofline
from ortplugins.bench.digest import is_source_tree, kernel_digest, ladder_digest
from ortplugins.bench.render import LADDER, PAGE, RECORDS, plot_path, plots, render, render_ladder

TREE = Path(__file__).parents[1]


def test_page_is_what_the_records_give() -> None:
    if not is_source_tree(TREE):
        pytest.skip("not a source tree")
    assert (TREE / PAGE).read_text() == render(TREE)


def test_ladder_tables_are_what_the_records_give() -> None:
    if not is_source_tree(TREE):
        pytest.skip("not a source tree")
    assert (TREE / LADDER).read_text() == render_ladder(TREE)


def test_plots_show_the_records() -> None:
    if not is_source_tree(TREE):
        pytest.skip("not a source tree")
    wanted = plots(TREE)
    assert set(TREE.glob("docs/roofline-*.svg")) == {TREE / path for path in wanted}
    for path, plot in wanted.items():
        assert roofline.is_drawn(plot, TREE / path), f"{path} is not what the records give"
        matplotlib = pytest.importorskip("matplotlib", reason="draws the plots")
        if roofline.drawn_by(TREE / path) == matplotlib.__version__:  # another version draws the same in other words
            assert (TREE / path).read_text() == roofline.draw(plot)


def record(digest: str) -> str:
    return json.dumps(
        {
            "kernel_digest": digest,
            "environment": {
                "device": "Device",
                "cuda": None,
                "onnxruntime": "1.32.0",
                "date": "2026-01-02",
                "command": "ortplugins bench softmax",
                "ceilings": {"copy_TB_per_s": 4.25},
            },
            "records": [
                {
                    "op": "FusedSoftmax",
                    "shape": {"rows": 4, "cols": 8},
                    "dtype": "float32",
                    "precision": None,
                    "variant": "row",
                    "median_us": 10.0,
                    "spread_us": [9.0, 11.0],
                    "error": 1.5e-7,
                    "baselines": {"ort": {"median_us": 25.0}},
                }
            ],
        }
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("plugins/core", "plugins/device", "plugins/kernels", "python/ortplugins", str(RECORDS)):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "python/ortplugins/ops.py").write_text("OPS = ()\n")
    return tmp_path


def test_figures_come_from_the_record(tree: Path) -> None:
    (tree / RECORDS / "run.json").write_text(record(kernel_digest(tree)))
    page = render(tree)
    assert "| rows 4 cols 8 | float32 | `row` | 1.5e-07 | 10 us | 25 us (2.50x) |" in page
    assert "copy TB/s 4.25" in page
    assert "Stale" not in page


def test_a_rival_inside_a_session_is_compared_with_ours_inside_one(tree: Path) -> None:
    run = json.loads(record(kernel_digest(tree)))
    run["records"][0] |= {"in_session_us": 12.0, "baselines": {"ort": {"median_us": 25.0}, "ort_mha": {"median_us": 18.0}}}
    (tree / RECORDS / "run.json").write_text(json.dumps(run))
    page = render(tree)
    assert "| in a session | ort | ort_mha |" in page
    assert "| 10 us | 12 us | 25 us (2.50x) | 18 us (1.50x) |" in page


def test_whole_models_have_a_table(tree: Path) -> None:
    run = json.loads(record(kernel_digest(tree)))
    shape = {"model": "bert-base", "batch": 8, "sequence": 128, "cuda_graph": True}
    run["records"][0] |= {"op": "model", "shape": shape, "dtype": "float16"}
    (tree / RECORDS / "run.json").write_text(json.dumps(run))
    assert "| model bert-base batch 8 sequence 128 cuda_graph True | float16 |" in render(tree)


def test_other_sources_make_a_run_stale(tree: Path) -> None:
    (tree / RECORDS / "run.json").write_text(record(kernel_digest(tree)))
    (tree / "plugins/kernels/new.cu").write_text("// changed\n")
    assert "**Stale**" in render(tree)


CEILINGS = {"copy_TB_per_s": 4.0, "fp16_TFLOP_per_s": 600.0, "tf32_TFLOP_per_s": 400.0, "fp32_TFLOP_per_s": 50.0}


def on_cuda(
    op: str,
    shape: dict[str, Any],
    median_us: float,
    *,
    dtype: str = "float32",
    precision: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    return {
        "op": op,
        "shape": shape,
        "dtype": dtype,
        "precision": precision,
        "variant": "row",
        "median_us": median_us,
        "spread_us": [median_us, median_us],
        "error": 1e-7,
        "baselines": {},
        **more,
    }


CUBE = {"m": 4096, "n": 4096, "k": 4096}


@pytest.mark.parametrize(
    ("made", "share"),
    [
        (on_cuda("FusedSoftmax", {"rows": 1000, "cols": 1000}, 4.0), "50 % of memory"),  # 8 MB at 4 TB/s
        (on_cuda("FusedSoftmax", {"rows": 1000, "cols": 1000}, 4.0, dtype="bfloat16"), "25 % of memory"),
        (on_cuda("FusedGemm", CUBE, 2**37 / 50e6 * 2), "50 % of arithmetic"),
        (on_cuda("FusedGemm", CUBE, 2**37 / 400e6, precision="tf32"), "100 % of arithmetic"),
        (on_cuda("FusedGemm", CUBE, 2**37 / 200e6, precision="tf32x3"), "100 % of arithmetic"),
        (on_cuda("FusedGemm", CUBE, 2**37 / 600e6 * 4, dtype="float16"), "25 % of arithmetic"),
        (on_cuda("FusedGemm", {"m": 1, "n": 1000, "k": 1000}, 2.004, precision="ieee"), "50 % of memory"),
        (on_cuda("FusedGemm", {"m": 64, "n": 64, "k": 64, "batch": 1000}, 12.288 * 2), "50 % of memory"),
    ],
)  # fmt: skip
def test_share_of_the_ceiling(made: dict[str, Any], share: str) -> None:
    assert roofline.share(made, CEILINGS) == share
    assert roofline.share(made, {"copy_TB_per_s": 4.0}) == ""


def cuda_run(tree: Path, name: str, records: list[dict[str, Any]], **more: str) -> None:
    environment = {
        "device": "Chip",
        "cuda": "13.0",
        "onnxruntime": "1.32.0",
        "date": "2026-01-02",
        "command": "bench",
        "ceilings": CEILINGS,
    }
    run = {"kernel_digest": kernel_digest(tree), **more, "environment": environment, "records": records}
    (tree / RECORDS / name).write_text(json.dumps(run))


def test_plot_is_drawn_the_same_each_time_and_linked(tree: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws the plots")
    cuda_run(
        tree,
        "run.json",
        [
            on_cuda("FusedSoftmax", {"rows": 1000, "cols": 1000}, us, dtype=t)
            for us, t in ((4.0, "float32"), (3.0, "bfloat16"))
        ],
    )
    ((path, plot),) = plots(tree).items()
    assert path == plot_path("softmax")
    command = [sys.executable, "-m", "ortplugins.bench.render", str(tree)]
    assert subprocess.run([*command, "--check"], capture_output=True, check=False).returncode == 1
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert subprocess.run([*command, "--check"], capture_output=True, check=False).returncode == 0
    assert (tree / path).read_text() == roofline.draw(plot) and roofline.is_drawn(plot, tree / path)
    page = (tree / PAGE).read_text()
    assert f"]({path.name})" in page and "| 50 % of memory |" in page
    cuda_run(tree, "run.json", [on_cuda("FusedSoftmax", {"rows": 1000, "cols": 1000}, 5.0)])
    assert not roofline.is_drawn(plots(tree)[path], tree / path)


def test_choices_of_rows_are_judged(tree: Path) -> None:
    best = on_cuda("FusedGemm", {"m": 64, "n": 8, "k": 8}, 10.0, precision="ieee", rows={"other": {"median_us": 12.0}})
    near = on_cuda("FusedGemm", {"m": 65, "n": 8, "k": 8}, 10.0, precision="ieee", rows={"other": {"median_us": 9.6}})
    bad = on_cuda("FusedGemm", {"m": 66, "n": 8, "k": 8}, 10.0, precision="ieee", rows={"slow": {"median_us": 20.0}, "other": {"median_us": 8.0}})
    for r in (best, near, bad):
        r["variant"] = "chosen"
    cuda_run(tree, "rows.json", [best, near, bad])
    page = render(tree)
    assert "within 5 % of the fastest in 2 of 3 problems" in page
    assert "| m 66 n 8 k 8 | float32 ieee | `chosen` | 10 us | `other` | 8 us (80 %) |" in page
    assert "m 65" in page and "m 64" not in page and "slow" not in page
    assert plots(tree) == {}


def test_errors_of_products(tree: Path) -> None:
    (tree / LADDER).parent.mkdir(parents=True)
    (tree / LADDER).write_text("<!-- rendered: gemm -->\n<!-- end -->\n<!-- rendered: errors -->\n<!-- end -->\n")
    records = []
    for depth in (64, 128):
        r = on_cuda("FusedGemm", {"m": 4, "n": 4, "k": depth}, 10.0, precision="tf32x3")
        r |= {"variant": "three", "baselines": {"cublas_fp32": {"median_us": 1.0, "error": 2e-7, "bias": 1e-9}}}
        r["ladder"] = {"table": "errors", "idea": "products", "inputs": "normal", "bias": -1e-6 * depth}
        records.append(r)
    cuda_run(tree, "ladder.json", records, ladder_digest=ladder_digest(tree))
    page = render_ladder(tree)
    assert "| kernel | normal, k 64 | normal, k 128 |" in page and page.count("Not recorded yet.") == 1
    assert "| cuBLAS, FP32 | 2.0e-07 (+1e-09) | 2.0e-07 (+1e-09) |" in page
    assert "| `three`: products | 1.0e-07 (-6e-05) | 1.0e-07 (-1e-04) |" in page


PROFILE = {
    "registers": 128.0,
    "occupancy_pct": 24.6,
    "issue_pct": 61.0,
    "dram_pct": 5.2,
    "l2_pct": 20.0,
    "l1_pct": 70.0,
    "sectors_per_load": 15.96,
    "bank_conflicts": 25.0,
    "shared_wavefronts": 1000.0,
    "local_loads": 0.0,
    "local_stores": 0.0,
    "stalls": {"long_scoreboard": 3.21, "wait": 0.01},
}


def test_ladder_tables(tree: Path) -> None:
    (tree / LADDER).parent.mkdir(parents=True)
    (tree / LADDER).write_text(
        "By hand.\n\n<!-- rendered: gemm -->\nold\n<!-- end -->\n\nMore.\n\n<!-- rendered: softmax -->\n<!-- end -->\n"
    )
    assert render_ladder(tree).count("Not recorded yet.") == 2
    stages = [
        on_cuda(
            "FusedGemm",
            CUBE,
            2**37 / 25e6,
            precision="ieee",
            ladder={"stage": "naive", "idea": "an idea", "profile": PROFILE},
        ),
        on_cuda(
            "FusedSoftmax", {"rows": 4, "cols": 8}, 4.0, ladder={"stage": "online", "idea": "an idea", "profile": None}
        ),
        on_cuda(
            "FusedSoftmax",
            {"rows": 4, "cols": 9},
            5.0,
            ladder={"stage": "online", "idea": "an idea", "profile": {**PROFILE, "local_loads": 2.0}},
        ),
        on_cuda(
            "FusedSoftmax", {"rows": 4, "cols": 9}, 2.5, ladder={"stage": "shared", "idea": "an idea", "profile": None}
        ),
    ]
    for r in stages:
        r["baselines"] = {"cublas" if r["op"] == "FusedGemm" else "copy": {"median_us": r["median_us"] / 2}}
    cuda_run(tree, "ladder.json", stages, ladder_digest=ladder_digest(tree))
    page = render_ladder(tree)
    assert "old" not in page and "By hand." in page and "More." in page and "Stale" not in page
    assert "| `naive` | an idea | float32 ieee | 5.5 ms | 25 | 50 % | 1.0e-07 | 128 | none |" in page
    assert "| `naive` | 25 % | 61 % | 5 % | 20 % | 70 % | 16.0 | 2 % | long scoreboard 3.2 |" in page
    assert (
        "| `online` | an idea | 4 us (50 %) | 5 us (50 %) |" in page
        and "| `shared` | an idea | - | 2.5 us (50 %) |" in page
    )
    assert "| `online` | 128 | yes | 25 % |" in page
    assert "ladder.json" not in render(tree), "the performance page is about the ops"
    (tree / LADDER).write_text(page)
    assert render_ladder(tree) == page
    (tree / "plugins/ladder/gemm.cu").write_text("// changed\n")
    assert render_ladder(tree).count("**Stale**") == 2 and "Stale" not in render(tree)
