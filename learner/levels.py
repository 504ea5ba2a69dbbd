"""The last numbers of a new fit: offsets, factors by size and margins, from each group's newest samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from learner.calibration import LEAST_SCORES, OFFSET_SAMPLES, Calibration
from learner.columns import DECODE, PHASES
from learner.latency import LatencyModel, sizes_of
from learner.sizes import SIGN, Sizes, learn_sizes
from learner.snapshot import COLD_MARGIN, MAX_MARGIN, Snapshot
from learner.window import Batch

FloatArray = npt.NDArray[np.float64]

# An offset needs this many residuals, and counts half at that.
LEAST_LEVEL = 8
# Decode's mean is this quantile of its residuals: a step predicted too short costs more than one predicted too long.
DECODE_QUANTILE = 0.6
# Residuals of a fit flatter it while samples are few: they are widened by this many over the samples.
OPTIMISM_SAMPLES = 16.0
# Settled decode scatters by a few tenths of a per cent, and its level moves by more.
LEAST_SETTLED = 1.02


def level(draft: Snapshot, model: LatencyModel, calibrations: Sequence[Calibration], accepted: int) -> float:
    """Fill in the ``draft``'s offsets, sizes and margins by the samples of ``calibrations``, one for each group, as
    ``model``, which is the draft's, would have predicted them; return its ``settled_margin``. There have been
    ``accepted`` samples in all.
    """
    widened = 1.0 + OPTIMISM_SAMPLES / max(accepted, 1)
    scores: list[FloatArray] = []
    unsettled: FloatArray | None = None
    for group, calibration in enumerate(calibrations):
        recent = calibration.recent()
        plain, corrected = _residuals(model, recent)
        newest = slice(-OFFSET_SAMPLES, None)
        quantile = DECODE_QUANTILE if group % len(PHASES) == DECODE else 0.5
        calibration.centre = _level(plain[newest], 0.5)
        calibration.corrected_centre = _level(corrected[newest], 0.5)
        residual = corrected if draft.correction_weight[group] else plain
        known = Sizes([], [])
        if SIGN[group]:
            keys = sizes_of(recent.columns.T, recent.group)
            sizes, shift = learn_sizes(keys, residual - _level(residual, 0.5))
            # Keys ascend from group to group: decode's, which come first, are negative.
            draft.sizes.extend(sizes)
            draft.size_shift.extend(shift)
            known = Sizes(sizes, shift)
            residual = residual - known.shift(keys)
        offset = _level(residual[newest], quantile)
        draft.offset[group] = offset
        scores.append((residual - offset) * widened)
        if group == DECODE and (others := calibration.unsettled()) is not None:
            residual = _residuals(model, others)[1 if draft.correction_weight[group] else 0]
            unsettled = (residual - known.shift(sizes_of(others.columns.T, others.group)) - offset) * widened
    pooled = np.concatenate(scores)
    for group, calibration in enumerate(calibrations):
        own = scores[group]
        if group == DECODE and unsettled is not None and unsettled.size >= LEAST_SCORES:
            own = unsettled
        margin = calibration.margin(own)
        if margin is None:
            # Too few of its own: whatever suits all, and no less than before anything was learnt.
            margin = max(math.log(COLD_MARGIN), calibration.margin(pooled) or 0.0)
        draft.margin[group] = min(math.exp(margin), MAX_MARGIN)
    decode = calibrations[DECODE]
    settled = decode.margin(scores[DECODE][decode.settled(decode.recent())], settled=True)
    return draft.margin[DECODE] if settled is None else min(max(math.exp(settled), LEAST_SETTLED), MAX_MARGIN)


def _residuals(model: LatencyModel, batch: Batch) -> tuple[FloatArray, FloatArray]:
    """log(measured / physical terms) of some samples, and less their correction."""
    base, correction = model.parts(batch.columns.T, batch.contention.T)
    plain = np.log(batch.measured_s / np.maximum(base, 1e-9))
    return plain, plain if correction is None else plain - correction


def _level(values: FloatArray, quantile: float) -> float:
    """The quantile, drawn to zero while values are few; 0 of so few that one pause could move it."""
    if values.size < LEAST_LEVEL:
        return 0.0
    return float(np.quantile(values, quantile)) * values.size / (values.size + LEAST_LEVEL)
