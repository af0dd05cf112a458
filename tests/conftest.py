"""What all tests share: the `gpu` marker skips, visibly, where there is no GPU that the library can use."""

from __future__ import annotations

import pytest


def gpu_missing_reason() -> str | None:
    """Why GPU tests cannot run here, or None if they can."""
    from ortplugins import native

    if not native.with_cuda:
        return "the library was built without CUDA"
    if native.cuda_device(0) is None:
        return "there is no CUDA device or driver"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    reason = gpu_missing_reason()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
