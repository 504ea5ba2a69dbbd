"""Windows: one prefill beside (or after) k decode steps. Picks each division's best plan from its halves' times.

    maximise   (k·T_decode + T_prefill) / max(k·t_d, t_p)   subject to   largest gap ≤ τ

over k and the size of the prefill, for every division of the TPCs. The objective is DuetServe's (arXiv 2511.04791,
§4.2), over predictions that know of the other half beside; the constraint is :mod:`sglang_ext.policy.gaps`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sglang_ext.policy.duet import duration_s, steps_between
from sglang_ext.policy.forwards import Everything
from sglang_ext.policy.gaps import Halves, least_steps, window_gaps, within
from sglang_ext.policy.layout import Layout
from sglang_ext.policy.prefill import Offer
from sglang_ext.policy.table import plans
from sglang_ext.policy.types import BoolArray, FloatArray, IntArray, Situation

SHARES = (1, 2, 4)
"""Parts of the largest prefill that a window may carry: a whole one can outlast the k steps that there is room for."""

DUET_SHARES = (1,)
"""The article's windows carry a whole one."""


class Windows(NamedTuple):
    """Predicted windows [p, n]: p sizes of the prefill, n divisions of the TPCs."""

    budgets: IntArray
    """[p, 1]: prefill budget"""
    prefill_tokens: IntArray
    """[p, 1]: tokens that it buys"""
    begins: BoolArray
    """[p, 1]: whether a prompt ends, which makes a first token"""
    halves: Halves
    decode_roofline_s: FloatArray
    prefill_roofline_s: FloatArray


def prefill_sizes(offer: Offer, shares: tuple[int, ...]) -> IntArray:
    """The offer's largest budget divided by each share, in whole pages, largest first, without repeats."""
    pages = offer.most // offer.page
    sizes = sorted({max(pages // share, 1) for share in shares}, reverse=True)
    return np.array(sizes, dtype=np.int64) * offer.page


def as_windows(everything: Everything) -> Windows:
    """The predicted windows of each of the sizes in each division of the layout."""
    sizes = everything.sizes
    shape = (2, len(sizes.budgets), len(everything.layout.mode))
    mean_s, upper_s, roofline_s = (time.reshape(shape) for time in everything.windows)
    return Windows(
        sizes.budgets[:, None],
        sizes.tokens[:, None],
        (sizes.ended > 0)[:, None],
        Halves(mean_s[0], upper_s[0], mean_s[1], upper_s[1]),
        roofline_s[0],
        roofline_s[1],
    )


class Plans(NamedTuple):
    """Windows with a number of steps each [k, p, n]."""

    steps: FloatArray
    predicted_s: FloatArray
    largest_gap_s: FloatArray
    left_s: FloatArray
    tokens_per_s: FloatArray


def weigh(windows: Windows, situation: Situation, steps: FloatArray, next_upper_s: float, concurrent: bool) -> Plans:
    """Duration, gaps and rate of every window for every number of steps [k, p, n]."""
    halves, host_s = windows.halves, situation.host_overhead_s
    gaps = window_gaps(halves, steps, windows.begins, next_upper_s, host_s, situation.waited_s, concurrent)
    predicted_s = duration_s(steps, halves.decode_s, halves.prefill_s, concurrent)
    rate = (steps * len(situation.decode_context) + windows.prefill_tokens) / (predicted_s + host_s)
    return Plans(steps, predicted_s, gaps.largest_s, gaps.left_s, rate)


def best_windows(
    windows: Windows, layout: Layout, situation: Situation, next_upper_s: float, most_steps: int
) -> FloatArray:
    """The best plan of each division, as columns of a candidate table [12, n].

    Of a division's plans (values of k × sizes of the prefill) it is the feasible one of the highest rate, else the one
    whose largest gap is smallest. k is the article's ⌊t_p/t_d⌋ or one more or, where the halves run at once, the least
    that keeps the gap across the window's end: the rate rises up to t_p/t_d and falls beyond, so no other k is
    feasible at a higher one. All are within 1 and ``most_steps`` ≥ 1.
    """
    halves, limit_s = windows.halves, within(situation.tbt_slo_s)
    least = [least_steps(halves, next_upper_s, situation.host_overhead_s, limit_s)] if layout.concurrent else []
    steps = steps_between(halves.decode_s, halves.prefill_s, most_steps, *least)
    weighed = weigh(windows, situation, steps, next_upper_s, layout.concurrent)
    feasible = weighed.largest_gap_s <= limit_s
    score = np.where(feasible, weighed.tokens_per_s, -weighed.largest_gap_s)
    divisions = len(layout.mode)
    best = score.reshape(-1, divisions).argmax(axis=0)
    return lay_down(windows, layout, weighed, feasible, best * divisions + np.arange(divisions))


def lay_down(windows: Windows, layout: Layout, weighed: Plans, feasible: BoolArray, pick: IntArray) -> FloatArray:
    """Some of the plans, as columns of a candidate table [12, m]; ``pick`` [m] counts through [k, p, n]."""
    halves, concurrent = windows.halves, layout.concurrent
    window = pick % halves.decode_s.size
    size, division = np.divmod(window, len(layout.mode))
    steps = weighed.steps.take(pick)
    return plans(
        len(pick),
        mode=layout.mode.take(division),
        prefill_tokens=windows.budgets.take(size),
        prefill_tpcs=layout.prefill_tpcs.take(division),
        decode_tpcs=layout.decode_tpcs.take(division),
        look_ahead_steps=steps,
        predicted_s=weighed.predicted_s.take(pick),
        upper_s=duration_s(steps, halves.decode_upper_s.take(window), halves.prefill_upper_s.take(window), concurrent),
        roofline_s=duration_s(
            steps, windows.decode_roofline_s.take(window), windows.prefill_roofline_s.take(window), concurrent
        ),
        largest_gap_s=weighed.largest_gap_s.take(pick),
        tokens_per_s=weighed.tokens_per_s.take(pick),
        feasible=feasible.take(pick),
        left_s=weighed.left_s.take(pick),
    )
