"""The fusion page: rendered from the corpus and the rewriter, with wrong files of other tools marked."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TREE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = TREE / "scripts" / "render_fusion.py"
    spec = importlib.util.spec_from_file_location("render_fusion", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_what_the_script_gives(script: ModuleType) -> None:
    page = script.render(TREE)
    assert (TREE / script.PAGE).read_text() == page
    assert "| **total** | **102** | **101** | **8** | **27** |" in page


@pytest.mark.parametrize(
    ("difference", "masked", "dtype", "shown"),
    [
        (1e-6, None, "fp32", "2"),
        (2e-3, None, "fp32", "2!"),
        (2e-3, 1e-3, "fp16", "2"),
        ("Fail: invalid model", None, "fp32", "2!"),
        (1e-6, 0.5, "fp32", "2~"),
        (None, None, "fp32", "2"),
    ],
)
def test_marks(script: ModuleType, difference: Any, masked: Any, dtype: str, shown: str) -> None:
    baseline = {"tool": 2, "tool_max_abs_diff": difference, "tool_full_mask_row_diff": masked}
    assert script.rivals_count({"dtype": dtype, "baseline": baseline}, "tool") == shown
