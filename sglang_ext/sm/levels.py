"""How many TPCs decode may be offered: few counts, dense where decode is short of them."""

from __future__ import annotations

import math
from collections.abc import Callable

RATIO = 1.2
"""Least growth from level to level. A decode step's time falls as 1/S at most, so finer levels differ by less than
what running beside another stream adds (20–30 % on an H200), and each costs a set of CUDA graphs."""

LEAST_SHARE, MOST_SHARE = 1 / 8, 3 / 4
"""Of all TPCs. Decode on less than an eighth reads at less than half of an H200's bandwidth (1.9 of 4.2 TB/s), and
prefill on less than a quarter falls so far behind that a mixed batch serves both sooner."""


def geometric_levels(total: int, quantum: int, most: int, possible: Callable[[int], bool]) -> tuple[int, ...]:
    """At most ``most`` multiples of ``quantum``, ascending, each at least ``RATIO`` times the one before.

    They lie within the shares of ``total`` above, the first as near to the lower end as ``quantum`` allows; counts
    that are not ``possible`` are passed over. On 66 TPCs by fours: 8, 12, 16, 20, 24, 32, 40, 48.
    """
    first = max(round(total * LEAST_SHARE / quantum), 1) * quantum
    last = math.floor(total * MOST_SHARE)
    if last < first:
        return ()
    ratio = max(RATIO, (last / first) ** (1 / (most - 1)) if most > 1 else math.inf)
    levels: list[int] = []
    for tpcs in range(first, last + 1, quantum):
        if (not levels or tpcs >= levels[-1] * ratio) and possible(tpcs):
            levels.append(tpcs)
    # Rounding of the ratio must not let one more in.
    return tuple(levels[:most])


def nearest_possible(total: int, wanted: int, possible: Callable[[int], bool]) -> tuple[int, ...]:
    """The possible count from 1 to ``total`` − 1 nearest to ``wanted``, of two as near the larger; empty if none."""
    found = [tpcs for tpcs in range(1, total) if possible(tpcs)]
    return tuple(sorted(found, key=lambda tpcs: (abs(tpcs - wanted), -tpcs))[:1])
