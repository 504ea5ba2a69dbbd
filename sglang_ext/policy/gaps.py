"""The largest time between two tokens that a plan can bring.

Every formula bounds it for the requests that decode while the plan runs, from their last token before it to their
first token after it, and for those whose first token it makes. Inputs are scalars or arrays that broadcast.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sglang_ext.policy.types import FloatArray


class Gaps(NamedTuple):
    largest_s: FloatArray
    """Largest gap between two tokens."""
    left_s: FloatArray
    """What is left of the iteration after its last decode step."""


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
    begins: FloatArray,
    next_upper_s: float,
    host_overhead_s: float,
    waited_s: float,
    concurrent: bool,
) -> Gaps:
    """Gaps of a window of ``steps`` = k decode steps beside (or, not ``concurrent``, before) one prefill.

    Three gaps can be the largest: to the first step (the wait so far, the host, t_d); between two steps (t_d, smaller
    than the first); and across the end: what is left of max(k·t_d, t_p) after the k-th step, plus the host and
    ``next_upper_s``, the bound on a decode step alone, which the next iteration can always run. What is left counts
    the prefill at its bound and the steps at their mean: a decode that is quicker than its bound waits longer. Where
    ``begins`` is 1 the prefill makes first tokens, which wait for the rest of the steps, at their bound.
    """
    first_s = halves.decode_upper_s + (host_overhead_s + waited_s)
    after_s = host_overhead_s + next_upper_s
    if not concurrent:
        left_s = halves.prefill_upper_s
        return Gaps(np.maximum(first_s, left_s + after_s), left_s)
    left_s = np.maximum(halves.prefill_upper_s - steps * halves.decode_s, 0.0)
    begun_s = begins * np.maximum(steps * halves.decode_upper_s - halves.prefill_s, 0.0)
    return Gaps(np.maximum(first_s, np.maximum(left_s, begun_s) + after_s), left_s)


def least_steps(
    halves: Halves,
    next_upper_s: float,
    host_overhead_s: float,
    limit_s: float,
    concurrent: bool,
) -> FloatArray:
    """The smallest k whose gap across the end is within ``limit_s`` (at least 1); beyond it k only costs rate."""
    if not concurrent:
        return np.ones_like(halves.decode_s)
    spare_s = limit_s - host_overhead_s - next_upper_s
    return np.maximum(np.ceil((halves.prefill_upper_s - spare_s) / halves.decode_s), 1.0)


def within(tbt_slo_s: float) -> float:
    """The largest gap that keeps τ: τ itself, up to rounding."""
    return tbt_slo_s * (1.0 + 1e-9)
