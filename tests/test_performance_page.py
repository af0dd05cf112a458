"""The performance page: rendered from the records, with stale runs marked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ortplugins.bench.digest import is_source_tree, kernel_digest
from ortplugins.bench.render import PAGE, RECORDS, render

TREE = Path(__file__).parents[1]


def test_page_is_what_the_records_give() -> None:
    if not is_source_tree(TREE):
        pytest.skip("not a source tree")
    assert (TREE / PAGE).read_text() == render(TREE)


def record(digest: str) -> str:
    return json.dumps({
        "kernel_digest": digest,
        "environment": {"device": "Device", "cuda": None, "onnxruntime": "1.32.0", "date": "2026-01-02", "command": "ortplugins bench softmax",
                        "ceilings": {"copy_TB_per_s": 4.25}},
        "records": [{"op": "FusedSoftmax", "shape": {"rows": 4, "cols": 8}, "dtype": "float32", "precision": None, "variant": "row",
                     "median_us": 10.0, "spread_us": [9.0, 11.0], "error": 1.5e-7, "baselines": {"ort": {"median_us": 25.0}}}],
    })


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


def test_other_sources_make_a_run_stale(tree: Path) -> None:
    (tree / RECORDS / "run.json").write_text(record(kernel_digest(tree)))
    (tree / "plugins/kernels/new.cu").write_text("// changed\n")
    assert "**Stale**" in render(tree)
