"""The learnt correction that depends on the batch: piecewise-linear factors of its log features."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy import add, maximum, minimum, multiply

from learner.columns import LOG_FEATURES
from learner.snapshot import KNOTS, MAX_CORRECTION

FloatArray = npt.NDArray[np.float64]

_FIRST_KNOT = np.arange(LOG_FEATURES, dtype=np.intp)[:, None] * KNOTS
_EACH = np.ones(2 * LOG_FEATURES)


class CorrectionRoom:
    """Room to correct ``size`` forwards; see :mod:`learner.prompts`."""

    def __init__(self, size: int) -> None:
        self.first_knot = np.repeat(_FIRST_KNOT, size, axis=1)
        self.piece = np.empty_like(self.first_knot)
        self.pieces = np.empty((2, LOG_FEATURES, size))
        self.slope, self.lines = self.pieces[0], self.pieces.reshape(2 * LOG_FEATURES, size)
        self.factor, self.most = np.empty(size), np.full(size, MAX_CORRECTION)
        self.least = -self.most


class Correction:
    """Evaluates a snapshot's ``values`` [LOG_FEATURES · KNOTS]: log factors at each feature's knots."""

    def __init__(self, values: list[float]) -> None:
        at = np.array(values).reshape(LOG_FEATURES, KNOTS)
        self.present = bool(at.any())
        self._within = bool(np.abs(at).max(axis=1).sum() <= MAX_CORRECTION)
        # Piece by piece as slope · log2(1 + x) + intercept.
        slopes = np.diff(at, axis=1, append=at[:, -1:])
        self._pieces = np.stack([slopes, at - slopes * np.arange(KNOTS)]).reshape(2, LOG_FEATURES * KNOTS)

    def log_factor(self, logs: FloatArray, room: CorrectionRoom | None = None) -> FloatArray:
        """The sum over the features of their log factors, bounded, for log features [LOG_FEATURES, m]; [m].

        In ``room`` for m it is overwritten by the next call.
        """
        room = room or CorrectionRoom(logs.shape[1])
        piece, factor = room.piece, room.factor
        piece[...] = logs
        add(piece, room.first_knot, piece)
        self._pieces.take(piece, axis=1, out=room.pieces, mode="clip")
        multiply(room.slope, logs, room.slope)
        _EACH.dot(room.lines, factor)
        if self._within:
            return factor
        maximum(factor, room.least, out=factor)
        return np.asarray(minimum(factor, room.most, out=factor))
