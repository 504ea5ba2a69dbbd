"""Adaptive conformal margins (Gibbs & Candès 2021): an upper bound whose coverage holds even when times drift."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class AdaptiveLevel:
    """The miss rate α that a quantile is taken at, steered so that misses come at the rate asked for.

    After each time: α ← α + step · (target − missed). A miss lowers α, which widens the bound; α below 0 asks for
    more than the largest residual seen.
    """

    __slots__ = ("alpha", "target")

    step = 0.005
    lowest, highest = -0.01, 0.05

    def __init__(self, target: float, alpha: float | None = None) -> None:
        self.target = target
        self.alpha = target if alpha is None else min(max(alpha, self.lowest), self.highest)

    def update(self, missed: bool) -> None:
        """Take note whether the newest time exceeded its bound."""
        self.alpha = min(max(self.alpha + self.step * (self.target - missed), self.lowest), self.highest)


def conformal_quantile(scores: FloatArray, alpha: float) -> float:
    """The ⌈(n + 1)(1 − α)⌉-th smallest of n scores (log residuals), never negative.

    Where that is beyond the largest, the largest and a part of it for every missing rank in n. ``scores`` [n], n ≥ 1.
    """
    n = scores.size
    rank = math.ceil((n + 1) * (1.0 - alpha))
    if rank <= n:
        return max(0.0, float(np.partition(scores, rank - 1)[rank - 1]))
    largest = max(0.0, float(scores.max()))
    return largest * (1.0 + min(1.0, 20.0 * (rank - n) / n))
