"""What the last few forwards like this one took: a short-lived correction that follows what no feature explains.

Other load on the machine, clocks and temperature move the times of all like forwards for seconds. The newest residuals
are weighed by likeness and recency; without any nearby, nothing changes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy import divide, maximum, multiply

from learner.columns import DECODE, LOG_FEATURES, PHASES, PREFILL

FloatArray = npt.NDArray[np.float64]

MOST_POINTS = 48
POINT_WIDTH = LOG_FEATURES + 3  # log features, group, residual, weight
HALF_LIFE = 8.0  # in samples
# Points further away than this, in log2 units over all features, count nothing.
RADIUS = 1.5
# The weight of "no change" beside that of the points.
INERTIA = 0.3
# Residuals are cut to this many standard deviations of their group, and to these at least and at most.
CUT_SIGMAS, LEAST_CUT, MOST_CUT = 2.5, 0.05, 0.7

# A place is what a forward is compared by: the log features, 1, whether it decodes, prefills and has another stream
# beside it (each 0 or 1), and the log features' squares.
KINDS = 3
PLACE = 2 * LOG_FEATURES + 1 + KINDS
_LOGS, _ONE, _KINDS, _SQUARES = (
    slice(0, LOG_FEATURES),
    LOG_FEATURES,
    slice(LOG_FEATURES + 1, LOG_FEATURES + 1 + KINDS),
    slice(LOG_FEATURES + 1 + KINDS, PLACE),
)
# By phase: whether it decodes and prefills.
_PHASE_KINDS = np.array([(phase != PREFILL, phase != DECODE) for phase in range(len(PHASES))], dtype=np.float64)


def kinds_of(group: npt.NDArray[np.intp]) -> FloatArray:
    """Whether forwards of these groups [m] decode, prefill and have a stream beside them; [m, KINDS]."""
    beside, phase = np.divmod(group, len(PHASES))
    return np.column_stack([_PHASE_KINDS[phase], beside])


class NearbyRoom:
    """Room to look around ``size`` forwards; see :mod:`learner.prompts`."""

    def __init__(self, size: int) -> None:
        self.likeness = np.empty((MOST_POINTS + 1, size))
        self.none = np.zeros_like(self.likeness)
        self.sums = np.empty((2, size))
        self.residual, self.weight = self.sums


class Nearby:
    """Evaluates the points of a snapshot: rows of POINT_WIDTH numbers; ``weight`` [groups] scales their residuals."""

    def __init__(self, points: list[float], weight: list[float] | None = None) -> None:
        rows = np.array(points, dtype=np.float64).reshape(-1, POINT_WIDTH)
        at, group, residual, weight_of = np.split(rows, [LOG_FEATURES, LOG_FEATURES + 1, LOG_FEATURES + 2], axis=1)
        groups = group[:, 0].astype(np.intp)
        kinds = kinds_of(groups)
        if weight is not None:
            residual *= np.array(weight)[groups, None]
        # Times a place: 1 − distance² / RADIUS², and 2 less for each kind that differs, so that points of another group
        # count nothing. The last row is a point of "no change" that is near to everything.
        count = len(rows)
        self._count = count
        self._nearness = np.zeros((MOST_POINTS + 1, PLACE))
        self._nearness[:count, _LOGS] = at * (2.0 / RADIUS**2)
        self._nearness[:count, _ONE] = 1.0 - (at * at).sum(axis=1) / RADIUS**2 - 2.0 * kinds.sum(axis=1)
        self._nearness[:count, _KINDS] = 4.0 * kinds - 2.0
        self._nearness[:count, _SQUARES] = -1.0 / RADIUS**2
        self._nearness[-1, _ONE] = 1.0
        self._weights = np.zeros((2, MOST_POINTS + 1))
        self._weights[:, :count] = np.concatenate([residual * weight_of, weight_of], axis=1).T
        self._weights[1, -1] = INERTIA

    def __len__(self) -> int:
        return self._count

    def shift_at(self, places: FloatArray, room: NearbyRoom | None = None) -> FloatArray:
        """Log factor for forwards at these places [PLACE, m]; [m]. In ``room`` for m the next call overwrites it."""
        room = room or NearbyRoom(places.shape[1])
        # Likeness is the nearness where it is positive, to the fourth power.
        likeness, residual = room.likeness, room.residual
        self._nearness.dot(places, likeness)
        maximum(likeness, room.none, out=likeness)
        multiply(likeness, likeness, likeness)
        multiply(likeness, likeness, likeness)
        self._weights.dot(likeness, room.sums)
        return np.asarray(divide(residual, room.weight, residual))

    def shift(self, logs: FloatArray, group: npt.NDArray[np.intp]) -> FloatArray:
        """The same for log features [LOG_FEATURES, m] and groups [m]."""
        places = np.ones((PLACE, logs.shape[1]))
        places[_LOGS] = logs
        places[_KINDS] = kinds_of(group).T
        np.multiply(logs, logs, out=places[_SQUARES])
        return self.shift_at(places)


def points_of(
    logs: FloatArray, group: npt.NDArray[np.intp], residual: FloatArray, serial: FloatArray, now: int
) -> list[float]:
    """The newest samples as a snapshot's points.

    ``logs`` [n, LOG_FEATURES], ``group`` [n] and ``residual`` [n], log(measured / mean) by the model that they will
    correct, of samples with serial numbers ``serial`` [n], ascending; ``now`` is the next serial number.
    """
    cut = np.empty_like(residual)
    for one in np.unique(group):
        own = group == one
        sigma = 1.4826 * float(np.median(np.abs(residual[own])))
        limit = min(max(CUT_SIGMAS * sigma, LEAST_CUT), MOST_CUT)
        cut[own] = np.clip(residual[own], -limit, limit)
    newest = slice(-MOST_POINTS, None)
    weight = 0.5 ** ((now - serial[newest]) / HALF_LIFE)
    columns = [logs[newest], group[newest, None], cut[newest, None], weight[:, None]]
    points: list[float] = np.concatenate(columns, axis=1).ravel().tolist()
    return points
