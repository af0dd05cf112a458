"""Axes as products of labelled factors: the algebra of Reshape and Transpose.

An `Arrangement` says what each axis of a tensor is: a list of factors, outermost first. ``[[b], [s], [n, d]]`` is a
(batch, sequence, heads * head_dim) tensor. Reshape regroups the factors, Transpose permutes the axes, Expand drops a
factor; a factor splits in two when a Reshape cuts through it. Following these ops from the operands of a product gives
the tensor that the operand really is, whatever chain of them an exporter wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from .symbolic import Size, exact_div, product

_T = TypeVar("_T")


class Factor:
    """One label. Splitting it is recorded here, so that all tensors that share the label see the split."""

    __slots__ = ("name", "parts", "size")

    def __init__(self, name: str, size: Size) -> None:
        self.name = name
        self.size = size
        self.parts: tuple[Factor, Factor] | None = None

    def __repr__(self) -> str:
        return f"{self.name}:{self.size}"

    def leaves(self) -> list[Factor]:
        if self.parts is None:
            return [self]
        return self.parts[0].leaves() + self.parts[1].leaves()

    def split(self, outer: Size) -> bool:
        """Cuts the factor into `outer` and the rest; False if that is not known to divide."""
        inner = exact_div(self.size, outer)
        if inner is None or self.parts is not None:
            return False
        self.parts = (Factor(self.name + "0", outer), Factor(self.name + "1", inner))
        return True


Arrangement = list[list[Factor]]


def resolve(arrangement: Sequence[Sequence[Factor]]) -> Arrangement:
    """The arrangement in leaves, after splits made elsewhere."""
    return [[leaf for factor in axis for leaf in factor.leaves()] for axis in arrangement]


def flat(arrangement: Sequence[Sequence[Factor]]) -> list[Factor]:
    return [f for axis in arrangement for f in axis]


def sizes(arrangement: Sequence[Sequence[Factor]]) -> tuple[Size, ...]:
    return tuple(product(f.size for f in axis) for axis in arrangement)


def regroup(arrangement: Arrangement, shape: Sequence[Size]) -> Arrangement | None:
    """The same factors in the same order, grouped to `shape`. None where sizes are not known to fit."""
    pending = flat(resolve(arrangement))
    out: Arrangement = []
    for i, want in enumerate(shape):
        axis: list[Factor] = []
        have: Size = 1
        while have != want:
            if not pending:
                return None
            factor = pending.pop(0)
            rest = exact_div(want, have)
            if rest is None:
                return None
            if factor.size != rest and exact_div(rest, factor.size) is None:
                if not factor.split(rest):
                    return None
                outer, inner = factor.parts  # type: ignore[misc]
                pending.insert(0, inner)
                factor = outer
            axis.append(factor)
            have = have * factor.size
        # A factor of size 1 belongs to an axis of size 1, if one comes next.
        if (
            want == 1
            and not axis
            and pending
            and pending[0].size == 1
            and _ones(pending) >= sum(s == 1 for s in shape[i:])
        ):
            axis.append(pending.pop(0))
        out.append(axis)
    if any(f.size != 1 for f in pending):
        return None
    if pending:
        if not out:
            return None
        out[-1].extend(pending)
    return resolve(out)


def _ones(pending: Sequence[Factor]) -> int:
    return sum(f.size == 1 for f in pending)


def permute(axes: Sequence[_T], perm: Sequence[int]) -> list[_T]:
    return [axes[p] for p in perm]


def unpermute(axes: Sequence[_T], perm: Sequence[int]) -> list[_T]:
    return [axes[i] for i in sorted(range(len(perm)), key=perm.__getitem__)]


def same(a: Sequence[Sequence[Factor]], b: Sequence[Sequence[Factor]]) -> bool:
    """The same factors on the same axes; factors of size 1 do not count."""
    ra, rb = resolve(a), resolve(b)
    return len(ra) == len(rb) and all(_solid(x) == _solid(y) for x, y in zip(ra, rb))


def _solid(axis: Sequence[Factor]) -> list[Factor]:
    return [f for f in axis if f.size != 1]


def parts_between(source: Arrangement, target: Arrangement) -> list[list[Factor]]:
    """The longest runs of factors that stay together on the way from one arrangement to the other, in source order."""
    follows = {a: b for axis in target for a, b in pairwise(axis)}
    out: list[list[Factor]] = []
    for axis in source:
        run: list[Factor] = []
        for factor in axis:
            if run and follows.get(run[-1]) is factor:
                run.append(factor)
            else:
                if run:
                    out.append(run)
                run = [factor]
        if run:
            out.append(run)
    return out
