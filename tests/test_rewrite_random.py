"""Attention put together at random: whatever the rule decides, the outputs are those of the original graph."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from rewrite_helpers import Graph, check, sites

F = np.float32
MIN = np.finfo(F).min
B, SQ, SK, D = 2, 5, 7, 4


class Maker:
    """One random graph with inputs for it."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.g = Graph()
        self.feeds: dict[str, np.ndarray] = {}
        self.heads = int(self.rng.choice([1, 2, 4]))
        self.self_attention = bool(self.rng.random() < 0.5)
        self.keys = SQ if self.self_attention else SK

    def pick(self, *choices: object) -> object:
        return choices[int(self.rng.integers(len(choices)))]

    def tensor(self, name: str, symbols: list, shape: list[int]) -> str:
        self.feeds[name] = self.rng.standard_normal(shape).astype(F) * F(1.5)
        return self.g.input(name, F, symbols)

    def mask_shape(self) -> tuple[list, list[int]]:
        batch, heads, rows = (bool(self.rng.random() < 0.5) for _ in range(3))
        seq = "queries" if self.self_attention else "keys"
        symbols = ["batch" if batch else 1, self.heads if heads else 1, "queries" if rows else 1, seq]
        return symbols, [B if batch else 1, self.heads if heads else 1, SQ if rows else 1, self.keys]

    def boolean(self, name: str) -> str:
        symbols, shape = self.mask_shape()
        keep = self.rng.random(shape) < 0.6
        if self.rng.random() < 0.5:
            keep[0, 0, 0] = False  # a row that sees nothing
        self.feeds[name] = keep
        value = self.g.input(name, bool, symbols)
        if self.rng.random() < 0.3:
            value = self.g.add("And", value, self.triangle())
        return self.g.add("Not", self.g.add("Not", value)) if self.rng.random() < 0.2 else value

    def triangle(self) -> str:
        g = self.g
        length = g.add("Squeeze", g.add("Gather", g.add("Shape", "x"), np.array([1])))
        width = length if self.self_attention else g.add("Squeeze", g.add("Gather", g.add("Shape", "y"), np.array([1])))
        rows = g.add("Unsqueeze", g.add("Range", np.array(0), length, np.array(1)), np.array([1]))
        columns = g.add("Unsqueeze", g.add("Range", np.array(0), width, np.array(1)), np.array([0]))
        if self.rng.random() < 0.3:
            return g.add("Greater", columns, g.add("Sub", rows, np.array(int(self.rng.integers(1, 4)))))
        return g.add("LessOrEqual", columns, g.add("Add", rows, np.array(int(self.rng.integers(0, 2)))))

    def masked(self, s: str, i: int) -> str:
        g, kind = self.g, self.pick("bias", "added", "chosen", "causal")
        fill = F(self.pick(-np.inf, MIN, -1e4))
        if kind == "bias":
            symbols, shape = self.mask_shape()
            return g.add("Add", *self.either(s, self.tensor(f"bias{i}", symbols, shape)))
        test = self.triangle() if kind == "causal" else self.boolean(f"mask{i}")
        if kind == "chosen" or self.rng.random() < 0.3:
            return g.add("Where", test, s, fill)
        return g.add("Add", *self.either(s, g.add("Where", test, F(0), fill)))

    def either(self, a: str, b: str) -> tuple[str, str]:
        return (a, b) if self.rng.random() < 0.5 else (b, a)

    def step(self, s: str, i: int) -> str:
        g = self.g
        kind = self.pick("scale", "mask", "mask", "cap", "nothing", "cast")
        if kind == "scale":
            return (
                g.add("Mul", *self.either(s, g.const(F(0.4)))) if self.rng.random() < 0.5 else g.add("Div", s, F(2.5))
            )
        if kind == "mask":
            return self.masked(s, i)
        if kind == "cap":
            cap = F(self.pick(3.0, 5.0))
            s = g.add("Tanh", g.add("Div", s, cap))
            return g.add("Mul", s, cap if self.rng.random() < 0.8 else F(2.0))
        return g.add("Cast", s, to=1) if kind == "cast" else g.add("Identity", s)

    def build(self) -> Graph:
        g, n = self.g, self.heads
        x = self.tensor("x", ["batch", "queries", n * D], [B, SQ, n * D])
        y = x if self.self_attention else self.tensor("y", ["batch", "keys", n * D], [B, SK, n * D])
        q = g.heads(g.add("MatMul", x, g.weight(n * D, n * D)), n, D)
        k = g.heads(g.add("MatMul", y, g.weight(n * D, n * D)), n, D)
        v = g.heads(g.add("MatMul", y, g.weight(n * D, n * D)), n, D)
        if self.rng.random() < 0.3:
            q = g.add("Mul", q, F(0.6))
        if self.rng.random() < 0.3:
            k = g.add("Div", k, F(1.5))
        if self.rng.random() < 0.2:
            v = g.add("Mul", v, F(0.5))
        s = g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2]))
        for i in range(int(self.rng.integers(0, 4))):
            s = self.step(s, i)
        p = g.add("Softmax", s, axis=int(self.pick(-1, 3, -1, 3, 2)) if self.self_attention else -1)
        if self.rng.random() < 0.4:
            p = g.add("Where", g.add("IsNaN", p), F(0), p)
        if self.rng.random() < 0.1:
            g.output(p)
        out = g.merge(g.add("MatMul", p, v), n * D)
        g.output(g.add("Add", g.add("MatMul", out, g.weight(n * D, n * D)), x) if self.rng.random() < 0.5 else out)
        return g


@pytest.mark.parametrize("seed", [*range(120), 1650, 1888, 1921, 2387, 2586, 2662])
def test_random_attention(seed: int) -> None:
    maker = Maker(seed)
    model = maker.build().model()
    # The inputs reach 6 and the scores 60, so that a float32 sum in another order differs by a little more than usual.
    check(model, maker.feeds, bound=1e-4)


def test_most_of_them_are_fused() -> None:
    """The cases above are no use if the rule always refuses."""
    from ortplugins.rewrite import rewrite

    counts = Counter(s.status for seed in range(120) for s in sites(rewrite(Maker(seed).build().model()), "attention"))
    assert counts["fused"] >= 60
    assert counts["skipped"] >= 10
