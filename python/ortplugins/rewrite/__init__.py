"""Rewrites ONNX models so that they use the package's operators.

>>> from ortplugins.rewrite import rewrite
>>> result = rewrite("model.onnx", output="model.fused.onnx")
>>> result.report.counts()
{'attention': {'fused': 12, 'skipped': 0}, 'linear': {'fused': 48, 'skipped': 0}}
"""

from __future__ import annotations

from .api import RewriteResult, rewrite
from .report import Report, Site

__all__ = ["Report", "RewriteResult", "Site", "rewrite"]
