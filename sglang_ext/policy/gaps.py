"""The largest time between two tokens that a plan can bring.

Every formula bounds it for the requests that decode while the plan runs, from their last token before it to their
first token after it, and for those whose first token it makes. Inputs are scalars or arrays that broadcast.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sglang_ext.policy.types import BoolArray, FloatArray


class Gaps(NamedTuple):
    largest_s: FloatArray
    """Largest gap between two tokens."""
    left_s: FloatArray
    """How long a request's last token will have waited when the iteration ends."""


class Halves(NamedTuple):
    """Predicted times of a window's halves [...]: one decode step and the whole prefill, mean and bound."""

    decode_s: FloatArray
    decode_upper_s: FloatArray
    prefill_s: FloatArray
    prefill_upper_s: FloatArray


def mixed_gap_s(upper_s: float, overhead_s: float) -> float:
    """A mixed batch makes one token per request when it ends: after the wait so far, the host's time, the batch."""
    return upper_s + overhead_s


def window_gaps(
    halves: Halves,
    steps: FloatArray,
    begins: BoolArray,
    next_upper_s: float,
    host_overhead_s: float,
    waited_s: float,
    concurrent: bool,
) -> Gaps:
    """Gaps of windows of ``steps`` = k decode steps beside (or, not ``concurrent``, before) one prefill [k, p, n].

    Three gaps can be the largest: to the first step (the wait so far, the host, t_d); between two steps (t_d, smaller
    than the first); and across the end: what is left of max(k·t_d, t_p) after the k-th step, plus the host and
    ``next_upper_s``, the bound on a decode step alone, which the next iteration can always run. What is left counts
    the prefill at its bound and the steps at their mean: a decode that is quicker than its bound waits longer. Where
    ``begins`` the prefill makes first tokens; they wait for the rest of the steps, which then count at their bound.
    The k steps are alike, as in the article: what a few more tokens of context add is far below the bound's margin.
    """
    first_s = halves.decode_upper_s + (host_overhead_s + waited_s)
    after_s = host_overhead_s + next_upper_s
    if not concurrent:
        left_s = np.broadcast_to(halves.prefill_upper_s, steps.shape)
        return Gaps(np.maximum(first_s, left_s + after_s), left_s)
    left_s = halves.prefill_upper_s - steps * halves.decode_s
    begun_s = (steps * halves.decode_upper_s - halves.prefill_s) * begins
    left_s = np.maximum(np.maximum(left_s, begun_s), 0.0)
    return Gaps(np.maximum(first_s, left_s + after_s), left_s)


def least_steps(halves: Halves, next_upper_s: float, host_overhead_s: float, limit_s: float) -> FloatArray:
    """The smallest k that keeps the gap across a concurrent window's end within ``limit_s``; more only costs rate."""
    spare_s = limit_s - host_overhead_s - next_upper_s
    return np.asarray(np.ceil((halves.prefill_upper_s - spare_s) / halves.decode_s))


def within(tbt_slo_s: float) -> float:
    """The largest gap that keeps τ: τ itself, up to rounding."""
    return tbt_slo_s * (1.0 + 1e-9)
