"""What all tests share: the `gpu` marker skips, visibly, where there is no GPU that the library can use; `small` marks what a
module's table ``SMALL`` names."""

from __future__ import annotations

import pytest
from kernel_harness import RUNTIME_ROWS


def gpu_missing_reason() -> str | None:
    """Why GPU tests cannot run here, or None if they can."""
    from ortplugins import native

    if not native.with_cuda:
        return "the library was built without CUDA"
    if native.cuda_device(0) is None:
        return "there is no CUDA device or driver"
    return None


def is_small(item: pytest.Item) -> bool:
    """Whether the module's ``SMALL`` (test function, parameter, values or names of values) takes this item.

    Sessions of ONNX Runtime are left out: what they launch besides our kernels takes minutes under compute-sanitizer.
    """
    function = getattr(item, "function", None)
    wanted = getattr(item.module, "SMALL", {}).get(function.__name__) if function is not None else None
    if wanted is None:
        return False
    params = item.callspec.params
    if params["variant"].name in RUNTIME_ROWS:
        return False
    return all(getattr(params[name], "name", params[name]) in values for name, values in wanted.items())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_small(item):
            item.add_marker(pytest.mark.small)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    reason = gpu_missing_reason()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
