"""How far predictions were from what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Errors of ``steps`` predictions. APE is |predicted − measured| / measured, in percent.

    ``mape_pct`` is its mean and ``…_ape_pct`` its percentiles; ``bias_pct`` is the mean of the signed error, positive
    when predictions are too long. ``under_estimate_share`` is the share (0 to 1) of predictions below the measurement.
    ``coverage`` is the share of measurements within the upper bound, None for a predictor without one.
    """

    steps: int
    mape_pct: float
    p50_ape_pct: float
    p90_ape_pct: float
    p99_ape_pct: float
    max_ape_pct: float
    bias_pct: float
    under_estimate_share: float
    coverage: float | None = None


def accuracy(predicted_s: FloatArray, measured_s: FloatArray, upper_s: FloatArray | None = None) -> Accuracy:
    """Return the errors of ``predicted_s`` [n] against ``measured_s`` [n] > 0. Raises ValueError for n = 0."""
    if not measured_s.size:
        raise ValueError("there is nothing to compare")
    error = 100.0 * (predicted_s - measured_s) / measured_s
    size = np.abs(error)
    p50, p90, p99 = np.percentile(size, (50.0, 90.0, 99.0))
    return Accuracy(
        steps=int(measured_s.size),
        mape_pct=float(size.mean()),
        p50_ape_pct=float(p50),
        p90_ape_pct=float(p90),
        p99_ape_pct=float(p99),
        max_ape_pct=float(size.max()),
        bias_pct=float(error.mean()),
        under_estimate_share=float((predicted_s < measured_s).mean()),
        coverage=None if upper_s is None else float((measured_s <= upper_s).mean()),
    )
