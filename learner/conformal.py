"""Adaptive conformal margins (Gibbs & Candès 2021): an upper bound whose coverage holds even when times drift."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# What tells a pause from noise or a poor fit; logs of measured / mean.
TAIL_SIGMAS = 4.0
PAUSE = math.log(1.1)
DISTURBED = 0.04


class AdaptiveLevel:
    """The miss rate α that a quantile is taken at, steered so that misses come at the rate asked for.

    After each time: α ← α + step · (target − missed). A miss lowers α, which widens the bound; α below 0 asks for
    more than the largest residual seen.
    """

    __slots__ = ("alpha", "target")

    step = 0.002
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
    rank = max(1, math.ceil((n + 1) * (1.0 - alpha)))
    if rank <= n:
        return max(0.0, float(np.partition(scores, rank - 1)[rank - 1]))
    largest = max(0.0, float(scores.max()))
    return largest * (1.0 + min(1.0, 20.0 * (rank - n) / n))


def undisturbed_quantile(scores: FloatArray, alpha: float) -> float:
    """:func:`conformal_quantile`, but pauses are not chased.

    Pauses (garbage collection, preemption, a first launch) come seldom and last arbitrarily long. A bound that covers
    them is of no use, because no plan satisfies it. So beyond TAIL_SIGMAS robust standard deviations, or PAUSE if that
    is more, the bound only goes as far as it takes to cover all but the DISTURBED share of the times. Where pauses are
    more frequent than the miss rate asked for, coverage falls short by as much, and its metric says so.
    """
    sigma = 1.4826 * float(np.median(np.abs(scores - np.median(scores))))
    ordinary = max(TAIL_SIGMAS * sigma, PAUSE, float(np.quantile(scores, 1.0 - DISTURBED)))
    return min(conformal_quantile(scores, alpha), ordinary)
