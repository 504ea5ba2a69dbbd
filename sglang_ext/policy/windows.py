"""Windows: one prefill beside (or after) k decode steps. Predicts both halves and picks each division's best plan.

    maximise   (k·T_decode + T_prefill) / max(k·t_d, t_p)   subject to   largest gap ≤ τ

over k and the size of the prefill, for every division of the TPCs. The objective is DuetServe's (arXiv 2511.04791,
§4.2), over predictions that know of the other half beside; the constraint is :mod:`sglang_ext.policy.gaps`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_ext.policy.duet import duration_s, steps_between
from sglang_ext.policy.forwards import Sizes
from sglang_ext.policy.gaps import Halves, least_steps, window_gaps, within
from sglang_ext.policy.layout import Layout
from sglang_ext.policy.prefill import Offer
from sglang_ext.policy.table import plans
from sglang_ext.policy.types import BoolArray, FloatArray, IntArray, Model, Situation

if TYPE_CHECKING:
    from learner.latency import Terms

SHARES = (1, 2, 4)
"""Parts of the largest prefill that a window may carry: a whole one can outlast the k steps that there is room for."""


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


def predict_windows(model: Model, layout: Layout, sizes: Sizes, halves: Terms) -> Windows:
    """Predict each division of ``layout`` for each of the ``sizes``; ``halves`` are terms of all that they consist of.

    Each half is predicted beside the other, where they run at once.
    """
    shape = (2, len(sizes.budgets), len(layout.mode))
    beside = halves.take(layout.beside) if layout.concurrent else None
    mean_s, upper_s, roofline_s = (time.reshape(shape) for time in model.predict(halves.take(layout.own), beside))
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
    steps = steps_between(halves.decode_s, halves.prefill_s, most_steps)
    if layout.concurrent:
        least = least_steps(halves, next_upper_s, situation.host_overhead_s, limit_s)
        steps = np.concatenate([steps, np.minimum(np.maximum(least, 1.0), most_steps)[None]])
    weighed = weigh(windows, situation, steps, next_upper_s, layout.concurrent)
    feasible = weighed.largest_gap_s <= limit_s
    score = np.where(feasible, weighed.tokens_per_s, -weighed.largest_gap_s)
    sizes, divisions = windows.halves.decode_s.shape
    which, size = np.divmod(score.reshape(-1, divisions).argmax(axis=0), sizes)
    return lay_down(windows, layout, weighed, feasible, (which, size, np.arange(divisions)))


def lay_down(
    windows: Windows, layout: Layout, weighed: Plans, feasible: BoolArray, pick: tuple[IntArray, IntArray, IntArray]
) -> FloatArray:
    """The plans at ``pick`` (which k, size, division; [m] each) as columns of a candidate table [12, m]."""
    _, size, division = pick
    window = (size, division)
    halves, concurrent = windows.halves, layout.concurrent
    steps = weighed.steps[pick]
    return plans(
        len(size),
        mode=layout.mode[division],
        prefill_tokens=windows.budgets[size, 0],
        prefill_tpcs=layout.prefill_tpcs[division],
        decode_tpcs=layout.decode_tpcs[division],
        look_ahead_steps=steps,
        predicted_s=weighed.predicted_s[pick],
        upper_s=duration_s(steps, halves.decode_upper_s[window], halves.prefill_upper_s[window], concurrent),
        roofline_s=duration_s(steps, windows.decode_roofline_s[window], windows.prefill_roofline_s[window], concurrent),
        largest_gap_s=weighed.largest_gap_s[pick],
        tokens_per_s=weighed.tokens_per_s[pick],
        feasible=feasible[pick],
        left_s=weighed.left_s[pick],
    )
