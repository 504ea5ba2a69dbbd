"""From raw timings to the points of a device profile. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from learner.device import Points

LEAST_SHARE_VALID = 0.5


@dataclass(frozen=True, slots=True)
class Timed:
    """What one set of TPCs took.

    ``gemm_s``: seconds of each repeat, by shape (m, k, n). ``read_s``: seconds of each pass over ``read_bytes``.
    ``failure``: why there are no timings.
    """

    side: str
    count: int
    gemm_s: Mapping[tuple[int, int, int], Sequence[float]] = field(default_factory=dict)
    read_s: Sequence[float] = ()
    read_bytes: int = 0
    failure: str = ""

    @property
    def flops(self) -> float | None:
        """FLOP/s of the shape that runs best: the ceiling that a roofline wants. None without a usable timing."""
        rates = [rate(2.0 * math.prod(shape), seconds) for shape, seconds in self.gemm_s.items()]
        return max((found for found in rates if found is not None), default=None)

    @property
    def bandwidth(self) -> float | None:
        """Bytes/s read. None without a usable timing."""
        return rate(float(self.read_bytes), self.read_s)


def rate(amount: float, seconds: Sequence[float]) -> float | None:
    """``amount`` per second at the median of the repeats.

    None if fewer than half of the repeats are positive and finite: such a set was not measured.
    """
    valid = [taken for taken in seconds if math.isfinite(taken) and taken > 0.0]
    if not valid or len(valid) < LEAST_SHARE_VALID * len(seconds):
        return None
    found = amount / statistics.median(valid)
    return found if math.isfinite(found) and found > 0.0 else None


def points(rates: Iterable[tuple[int, float | None]], total: int) -> Points:
    """Ascending, non-decreasing points (TPCs, rate), one per count, the last at ``total``.

    Sets without a rate are left out; of several sets of one size the median counts. Where a larger count measured
    slower than a smaller one both get their mean (isotonic regression), so that one lucky reading does not lift
    every point after it. Raises ValueError if the whole device has no rate, or a count lies outside 1 … total.
    """
    by_count: dict[int, list[float]] = {}
    for count, measured in rates:
        if not 1 <= count <= total:
            raise ValueError(f"a set of {count} TPCs on a device of {total}")
        if measured is not None:
            by_count.setdefault(count, []).append(measured)
    if total not in by_count:
        raise ValueError("the whole device could not be measured")
    counts = sorted(by_count)
    # Pool adjacent violators: (mean, how many) of runs that are one value.
    runs: list[tuple[float, int]] = []
    for count in counts:
        mean, size = statistics.median(by_count[count]), 1
        while runs and runs[-1][0] > mean:
            before, length = runs.pop()
            mean, size = (before * length + mean * size) / (length + size), length + size
        runs.append((mean, size))
    levelled = [mean for mean, size in runs for _ in range(size)]
    return tuple((float(count), value) for count, value in zip(counts, levelled, strict=True))
