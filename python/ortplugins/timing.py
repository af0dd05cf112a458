"""Timing rivals in alternation, so that a change of the machine's speed meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Timing:
    """Microseconds for one call: the median, and the 10th and 90th percentile as its spread."""

    median_us: float
    spread_us: tuple[float, float]
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        low, median, high = np.percentile(np.asarray(seconds) * 1e6, [10, 50, 90])
        return cls(float(median), (float(low), float(high)), len(seconds))


@dataclass
class Rounds:
    """What :func:`alternate` measured: one row of seconds for each call, one column for each round."""

    seconds: list[list[float]] = field(default_factory=list)

    def timing(self, index: int) -> Timing:
        """The timing of call ``index``."""
        return Timing.of(self.seconds[index])

    def ratio(self, baseline: int = 0, ours: int = 1) -> float:
        """How many times as fast as the baseline ours is, by the medians."""
        return self.timing(baseline).median_us / self.timing(ours).median_us

    def verdict(self, baseline: int = 0, ours: int = 1) -> str:
        """``faster`` or ``slower`` where one wins three rounds of four and the medians are 2 % apart, else ``same``."""
        wins = np.mean(np.asarray(self.seconds[ours]) < np.asarray(self.seconds[baseline]))
        ratio = self.ratio(baseline, ours)
        if wins >= 0.75 and ratio > 1.02:
            return "faster"
        return "slower" if wins <= 0.25 and ratio < 1 / 1.02 else "same"


def alternate(
    calls: Sequence[Callable[[], object]],
    *,
    min_rounds: int = 10,
    max_rounds: int = 2000,
    min_seconds: float = 1.0,
    warmup: int = 3,
    progress: Callable[[float], None] | None = None,
) -> Rounds:
    """Calls each of ``calls`` once per round, each round in the opposite order, until ``min_seconds`` have passed.

    A call must return only when its work is done. At least ``min_rounds`` and at most ``max_rounds`` rounds are made;
    ``progress`` is told the fraction done, between rounds.
    """
    for _ in range(warmup):
        for call in calls:
            call()
    rounds = Rounds([[] for _ in calls])
    order = list(range(len(calls)))
    start = time.perf_counter()
    for done in range(1, max_rounds + 1):
        for i in order:
            begin = time.perf_counter()
            calls[i]()
            rounds.seconds[i].append(time.perf_counter() - begin)
        order.reverse()
        elapsed = time.perf_counter() - start
        if progress is not None:
            progress(min(1.0, max(min(elapsed / min_seconds, done / min_rounds), done / max_rounds)))
        if elapsed >= min_seconds and done >= min_rounds:
            break
    return rounds
