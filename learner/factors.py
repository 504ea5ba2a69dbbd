"""What makes a mean of a physical sum, and a bound of the mean, without depending on S."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy import add, exp, log2, maximum, minimum, multiply

from learner.columns import DECODE, LOG_FEATURES, MIXED, PHASES, PREFILL
from learner.correction import Correction, CorrectionRoom
from learner.nearby import PLACE, Nearby, NearbyRoom
from learner.prompts import BESIDE, WIDTH
from learner.requests import (
    DECODE_CACHED,
    DECODE_ROWS,
    DECODES,
    LONGEST,
    ONE,
    PREFILL_CONTEXT,
    PREFILL_TOKENS,
    PREFILLS,
    TOKENS,
)
from learner.sizes import SIGN, Sizes
from learner.snapshot import Snapshot

FloatArray = npt.NDArray[np.float64]

# A batch's sums as its tokens, the number of its kind, then its place (:mod:`learner.nearby`) without the squares and
# before logarithms are taken. The kind counts 1 for decodes, 2 for prefill and 4 for a stream beside.
_BEFORE = 2
_LINEAR = _BEFORE + PLACE - LOG_FEATURES
OF_SUMS = np.zeros((_LINEAR, WIDTH))
OF_SUMS[0, TOKENS] = 1.0
OF_SUMS[1, [DECODES, PREFILLS, BESIDE]] = 1.0, 2.0, 4.0
_LOG_SUMS = PREFILL_TOKENS, PREFILL_CONTEXT, DECODE_ROWS, DECODE_CACHED, LONGEST
for _row, _sum in enumerate(_LOG_SUMS, start=_BEFORE):
    OF_SUMS[_row, [_sum, ONE]] = 1.0
for _row, _sum in enumerate((ONE, DECODES, PREFILLS, BESIDE), start=_BEFORE + LOG_FEATURES):
    OF_SUMS[_row, _sum] = 1.0
ROWS = _BEFORE + PLACE
FOUND = 7
_FLOOR = 5  # row of what is found
_LOGS, _SQUARES = slice(_BEFORE, _BEFORE + LOG_FEATURES), slice(_LINEAR, ROWS)
_PHASE_OF_KIND = (PREFILL, DECODE, PREFILL, MIXED)  # an empty forward counts as a prefill


class Found:
    """What is found of m batches, [FOUND, m].

    Rows: factor, (unused), least and largest mean / roofline, margin, floor, least upper / roofline.
    """

    def __init__(self, rows: FloatArray) -> None:
        self.rows = rows
        self.factor, self.weight, self.least, self.most, self.margin, self.floor_s, self.least_upper = rows


class FactorRoom:
    """Room for the factors of batches: ``rows`` [ROWS, batches] are OF_SUMS times their sums, and for the squares."""

    def __init__(self, rows: FloatArray, beside: int) -> None:
        batches = rows.shape[1]
        self.tokens, self.kinds = rows[:_BEFORE]
        self.logs, self.place, self.squares = rows[_LOGS], rows[_BEFORE:], rows[_SQUARES]
        self.kind = np.empty(batches, dtype=np.intp)
        self.correction, self.nearby = CorrectionRoom(batches), NearbyRoom(batches)
        self.found = Found(np.empty((FOUND, batches)))
        self.found_alone = Found(self.found.rows[:, beside:])


class Factors:
    """A snapshot's numbers per group, with its correction and what is nearby, residuals weighed by group."""

    def __init__(self, snapshot: Snapshot, correction: Correction, nearby: Nearby, sizes: Sizes) -> None:
        group = np.array([phase + beside for beside in (0, len(PHASES)) for phase in _PHASE_OF_KIND])
        of = snapshot
        factors = of.offset, of.correction_weight
        bounds = of.min_ratio, of.max_ratio, of.margin, of.floor_s, of.least_upper
        self._by_kind = np.array([*factors, *bounds])[:, group]
        self._by_kind[_FLOOR, :: len(_PHASE_OF_KIND)] = 0.0  # nothing is launched for nothing
        self._correction, self._nearby, self._sizes, self._size_sign = correction, nearby, sizes, SIGN[group]
        self._looks_nearby = any(of.nearby_weight) and len(nearby) > 0

    def find(self, room: FactorRoom) -> None:
        """Fill the room's ``found`` from its rows, which are changed."""
        logs, factor, weight = room.logs, room.found.factor, room.found.weight
        room.kind[...] = room.kinds
        self._by_kind.take(room.kind, axis=1, out=room.found.rows, mode="clip")
        if len(self._sizes):
            add(factor, self._sizes.shift(room.tokens * self._size_sign[room.kind]), factor)
        log2(logs, logs)
        if self._correction.present:
            multiply(weight, self._correction.log_factor(logs, room.correction), weight)
            add(factor, weight, factor)
        if self._looks_nearby:
            multiply(logs, logs, room.squares)
            add(factor, self._nearby.shift_at(room.place, room.nearby), factor)
        exp(factor, factor)


def times_of(physical_s: FloatArray, roofline_s: FloatArray, found: Found) -> FloatArray:
    """Mean, bound and roofline [3, m] of physical sums [m], which are overwritten, and rooflines [m]."""
    times = np.empty((3, physical_s.size))
    mean_s, upper_s, times[2] = times[0], times[1], roofline_s
    multiply(physical_s, found.factor, physical_s)
    multiply(roofline_s, found.least, mean_s)
    maximum(physical_s, mean_s, out=physical_s)
    multiply(roofline_s, found.most, mean_s)
    minimum(physical_s, mean_s, out=mean_s)
    maximum(mean_s, found.floor_s, out=mean_s)
    multiply(mean_s, found.margin, upper_s)
    multiply(roofline_s, found.least_upper, physical_s)
    maximum(upper_s, physical_s, out=upper_s)
    return times
