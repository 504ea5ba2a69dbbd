"""What the last few forwards like this one took: a short-lived correction that follows what no feature explains.

Other load on the machine, clocks and temperature move the times of all like forwards for seconds. The newest residuals
are weighed by likeness and recency; without any nearby, nothing changes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from learner.columns import LOG_FEATURES, PHASES

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
_GROUPS = 2 * len(PHASES)


class Nearby:
    """Evaluates the points of a snapshot: rows of POINT_WIDTH numbers."""

    def __init__(self, points: list[float]) -> None:
        rows = np.array(points, dtype=np.float64).reshape(-1, POINT_WIDTH)
        places, group, residual, weight = np.split(rows, [LOG_FEATURES, LOG_FEATURES + 1, LOG_FEATURES + 2], axis=1)
        # Times log features, 1, and the sum of their squares: 1 − distance² / RADIUS².
        self._nearness = np.concatenate(
            [
                places * (2.0 / RADIUS**2),
                1.0 - (places * places).sum(axis=1, keepdims=True) / RADIUS**2,
                np.full_like(weight, -1.0 / RADIUS**2),
            ],
            axis=1,
        )
        own = (group == np.arange(_GROUPS)) * weight
        # [2 · groups, points]: points of one group count nothing in another.
        self._weights = np.concatenate([own * residual, own], axis=1).T.copy()

    def __len__(self) -> int:
        return int(self._nearness.shape[0])

    def shift(
        self, logs: FloatArray, group: npt.NDArray[np.intp], which: npt.NDArray[np.intp] | None = None
    ) -> FloatArray:
        """Log factor for forwards with these log features [LOG_FEATURES, m] and groups [m]; [m].

        With ``which`` [w] for those that it picks, whose groups [w] may differ from pick to pick; [w].
        """
        size = logs.shape[1]
        place = np.empty((LOG_FEATURES + 2, size))
        place[:LOG_FEATURES] = logs
        place[LOG_FEATURES] = 1.0
        np.add.reduce(logs * logs, axis=0, out=place[LOG_FEATURES + 1])
        # Likeness is the nearness where it is positive, to the fourth power.
        likeness = self._nearness @ place
        np.maximum(likeness, 0.0, out=likeness)
        likeness *= likeness
        likeness *= likeness
        sums = self._weights @ likeness
        sums[_GROUPS:] += INERTIA
        by_group = sums[:_GROUPS] / sums[_GROUPS:]
        return np.asarray(by_group.take(group * size + (np.arange(size) if which is None else which)))


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
