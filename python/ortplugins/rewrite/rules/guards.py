"""Nodes behind a Softmax that only mend what the package's operators never produce."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ..facts import Facts, op_of


def nan_guard(facts: Facts, value: ir.Value, users: Sequence[ir.Node]) -> list[ir.Node] | None:
    """IsNaN and Where that turn NaN into zero: what the fused operator does anyway."""
    tests = [n for n in users if op_of(n) == "IsNaN"]
    choices = [n for n in users if op_of(n) == "Where"]
    if len(users) != 2 or len(tests) != 1 or len(choices) != 1:
        return None
    test, choice = tests[0], choices[0]
    condition = test.outputs[0]
    if choice.inputs[0] is not condition or facts.only_reader(condition) is not choice or choice.inputs[2] is not value:
        return None
    if facts.scalar(choice.inputs[1]) != 0.0:
        return None
    return [test, choice]
