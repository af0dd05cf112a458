"""Timing several ways to do the same thing in alternation, so that a change of the machine's speed meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def alternate(
    calls: Sequence[Callable[[], object]],
    *,
    min_rounds: int = 10,
    max_rounds: int = 1000,
    min_seconds: float = 1.0,
    warmup: int = 3,
    progress: Callable[[float], None] | None = None,
) -> list[Timing]:
    """Calls each of ``calls`` once per round, each round in the opposite order, until ``min_seconds`` have passed.

    A call must return only when its work is done. At least ``min_rounds`` and at most ``max_rounds`` rounds are made;
    ``progress`` is told the fraction done.
    """
    for _ in range(warmup):
        for call in calls:
            call()
    seconds: list[list[float]] = [[] for _ in calls]
    order = list(range(len(calls)))
    start = time.perf_counter()
    for round_index in range(max_rounds):
        for i in order:
            begin = time.perf_counter()
            calls[i]()
            seconds[i].append(time.perf_counter() - begin)
        order.reverse()
        elapsed = time.perf_counter() - start
        if progress is not None:
            progress(min(1.0, elapsed / min_seconds, (round_index + 1) / min_rounds))
        if elapsed >= min_seconds and round_index + 1 >= min_rounds:
            break
    return [Timing.of(s) for s in seconds]


def ratio(baseline: Timing, ours: Timing) -> float:
    """How many times as fast as the baseline ours is, by the medians."""
    return baseline.median_us / ours.median_us


def verdict(baseline: Timing, ours: Timing) -> str:
    """``faster``, ``slower``, or ``same`` where each median lies within the other's spread."""
    if ours.spread_us[0] <= baseline.median_us <= ours.spread_us[1] and baseline.spread_us[0] <= ours.median_us <= baseline.spread_us[1]:
        return "same"
    return "faster" if ours.median_us < baseline.median_us else "slower"
