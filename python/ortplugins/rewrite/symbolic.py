"""Symbolic sizes: polynomials with integer coefficients over named sizes, in one canonical form.

Two sizes are equal when their canonical forms are; a size that cannot be derived is a symbol of its own, equal only to
itself. Plain sizes stay Python integers, so that arithmetic on them costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Union

Size = Union[int, "Dim"]

_Terms = dict[tuple[str, ...], int]


class Dim:
    """A polynomial that is not a constant. Symbols stand for non-negative integers."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: _Terms) -> None:
        self.terms: tuple[tuple[tuple[str, ...], int], ...] = tuple(sorted(terms.items()))
        self._hash = hash(self.terms)

    @staticmethod
    def symbol(name: str) -> Dim:
        return Dim({(name,): 1})

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and self.terms == other.terms

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __add__(self, other: Size) -> Size:
        return _combine(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Size) -> Size:
        return _combine(self, other, -1)

    def __rsub__(self, other: Size) -> Size:
        return (-1 * self) + other

    def __neg__(self) -> Size:
        return -1 * self

    def __mul__(self, other: Size) -> Size:
        out: _Terms = {}
        for ma, ca in self.terms:
            for mb, cb in _terms(other):
                monomial = tuple(sorted(ma + mb))
                out[monomial] = out.get(monomial, 0) + ca * cb
        return _make(out)

    __rmul__ = __mul__

    def __str__(self) -> str:
        parts = []
        for monomial, c in self.terms:
            factors = ([str(c)] if c != 1 or not monomial else []) + list(monomial)
            parts.append("*".join(factors))
        return "+".join(parts)

    __repr__ = __str__

    @property
    def nonnegative(self) -> bool:
        """Known to be at least 0."""
        return all(c >= 0 for _, c in self.terms)

    @property
    def positive(self) -> bool:
        """Known to be at least 1, whatever the symbols are."""
        return self.nonnegative and any(not m and c > 0 for m, c in self.terms)


def _terms(x: Size) -> Iterable[tuple[tuple[str, ...], int]]:
    return x.terms if isinstance(x, Dim) else (((), int(x)),)


def _make(terms: _Terms) -> Size:
    terms = {m: c for m, c in terms.items() if c}
    if not terms:
        return 0
    if len(terms) == 1 and () in terms:
        return terms[()]
    return Dim(terms)


def _combine(a: Size, b: Size, sign: int) -> Size:
    out = dict(_terms(a))
    for m, c in _terms(b):
        out[m] = out.get(m, 0) + sign * c
    return _make(out)


def product(sizes: Iterable[Size]) -> Size:
    out: Size = 1
    for s in sizes:
        out = out * s
    return out


def exact_div(a: Size, b: Size) -> Size | None:
    """a / b where b divides every term of a; None where that is not known. Only single-term divisors are tried,
    and the divisor itself."""
    if a == b and a != 0:
        return 1
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    divisor = list(_terms(b))
    if len(divisor) != 1 or divisor[0][1] == 0:
        return _polynomial_div(a, b)
    ((mb, cb),) = divisor
    out: _Terms = {}
    for ma, ca in _terms(a):
        rest = list(ma)
        for s in mb:
            if s not in rest:
                return None
            rest.remove(s)
        if ca % cb:
            return None
        out[tuple(rest)] = ca // cb
    return _make(out)


def _polynomial_div(a: Size, b: Size) -> Size | None:
    """Division by a polynomial of several terms: exact long division in the canonical order."""
    quotient: Size = 0
    rest = a
    lead_m, lead_c = list(_terms(b))[-1]
    for _ in range(8):
        if rest == 0:
            return quotient
        step = None
        for m, c in reversed(list(_terms(rest))):
            step = exact_div(_make({m: c}), _make({lead_m: lead_c}))
            if step is not None:
                break
        if step is None:
            return None
        quotient = quotient + step
        rest = rest - step * b
    return None
