"""The last numbers of a new fit: offsets, factors by size and margins, from each group's newest samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from learner.calibration import OFFSET_SAMPLES, Calibration
from learner.columns import DECODE, PHASES
from learner.latency import LatencyModel, sizes_of
from learner.sizes import SIGN, Sizes, learn_sizes
from learner.snapshot import COLD_MARGIN, MAX_MARGIN, Snapshot

FloatArray = npt.NDArray[np.float64]

# An offset needs this many residuals, and counts half at that.
LEAST_LEVEL = 8
# Decode's mean is this quantile of its residuals: a step predicted too short costs more than one predicted too long.
DECODE_QUANTILE = 0.6
# Residuals of a fit flatter it while samples are few: they are widened by this many over the samples.
OPTIMISM_SAMPLES = 16.0


def level(draft: Snapshot, model: LatencyModel, calibrations: Sequence[Calibration], accepted: int) -> None:
    """Fill in the ``draft``'s offsets, sizes and margins by the samples of ``calibrations``, one for each group, as
    ``model``, which is the draft's, would have predicted them. ``accepted`` samples there have been in all.
    """
    widened = 1.0 + OPTIMISM_SAMPLES / max(accepted, 1)
    scores: list[FloatArray] = []
    for group, calibration in enumerate(calibrations):
        recent = calibration.recent()
        base, correction = model.parts(recent.columns.T, recent.contention.T)
        plain = np.log(recent.measured_s / np.maximum(base, 1e-9))
        corrected = plain if correction is None else plain - correction
        newest = slice(-OFFSET_SAMPLES, None)
        quantile = DECODE_QUANTILE if group % len(PHASES) == DECODE else 0.5
        calibration.centre = _level(plain[newest], 0.5)
        calibration.corrected_centre = _level(corrected[newest], 0.5)
        residual = corrected if draft.correction_weight[group] else plain
        if SIGN[group]:
            keys = sizes_of(recent.columns.T, recent.group)
            sizes, shift = learn_sizes(keys, residual - _level(residual, 0.5))
            # Keys ascend from group to group: decode's, which come first, are negative.
            draft.sizes.extend(sizes)
            draft.size_shift.extend(shift)
            residual = residual - Sizes(sizes, shift).shift(keys)
        offset = _level(residual[newest], quantile)
        draft.offset[group] = offset
        scores.append((residual - offset) * widened)
    pooled = np.concatenate(scores)
    for group, calibration in enumerate(calibrations):
        margin = calibration.margin(scores[group])
        if margin is None:
            # Too few of its own: whatever suits all, and no less than before anything was learnt.
            margin = max(math.log(COLD_MARGIN), calibration.margin(pooled) or 0.0)
        draft.margin[group] = min(math.exp(margin), MAX_MARGIN)


def _level(values: FloatArray, quantile: float) -> float:
    """The quantile, drawn to zero while values are few; 0 of so few that one pause could move it."""
    if values.size < LEAST_LEVEL:
        return 0.0
    return float(np.quantile(values, quantile)) * values.size / (values.size + LEAST_LEVEL)
