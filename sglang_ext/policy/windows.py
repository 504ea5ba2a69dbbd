"""Windows: one prefill beside (or after) k decode steps. Predicts both halves and picks each division's best plan.

    maximise   (k·T_decode + T_prefill) / max(k·t_d, t_p)   subject to   largest gap ≤ τ

over k and the size of the prefill, for every division of the TPCs. The objective is DuetServe's (arXiv 2511.04791,
§4.2), over predictions that know of the other half beside; the constraint is :mod:`sglang_ext.policy.gaps`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_ext.policy.duet import duration_s, steps_between
from sglang_ext.policy.forwards import Prefills
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
    begins: FloatArray
    """[p, 1]: 1 where a prompt ends, which makes a first token"""
    halves: Halves
    decode_roofline_s: FloatArray
    prefill_roofline_s: FloatArray


def prefill_sizes(offer: Offer, shares: tuple[int, ...]) -> IntArray:
    """The offer's largest budget divided by each share, in whole pages, largest first, without repeats."""
    pages = offer.most // offer.page
    sizes = sorted({max(pages // share, 1) for share in shares}, reverse=True)
    return np.array(sizes, dtype=np.int64) * offer.page


def predict_windows(model: Model, layout: Layout, steps: Terms, prefills: Prefills) -> Windows:
    """Predict each division of ``layout`` for each budget of ``prefills``.

    ``steps`` are a decode step on each of the layout's ``decode_tpcs``; ``prefills`` run on each of its
    ``prefill_tpcs``. Each half is predicted beside the other, where they run at once.
    """
    sizes, parts = len(prefills.budgets), len(layout.prefill_tpcs)
    shape = (sizes, len(layout.mode))
    step_terms = steps.take(np.tile(layout.decode_index, sizes))
    prefill_terms = prefills.terms.take((np.arange(sizes)[:, None] * parts + layout.prefill_index).ravel())
    step = model.predict(step_terms, prefill_terms if layout.concurrent else None)
    prefill = model.predict(prefill_terms, step_terms if layout.concurrent else None)
    decode_s, decode_upper_s, decode_roofline_s = (column.reshape(shape) for column in step)
    prefill_s, prefill_upper_s, prefill_roofline_s = (column.reshape(shape) for column in prefill)
    return Windows(
        prefills.budgets[:, None],
        prefills.tokens[:, None],
        (prefills.ended > 0).astype(np.float64)[:, None],
        Halves(decode_s, decode_upper_s, prefill_s, prefill_upper_s),
        decode_roofline_s,
        prefill_roofline_s,
    )


class Plans(NamedTuple):
    """Windows with a number of steps each [p, n, 2]."""

    steps: FloatArray
    predicted_s: FloatArray
    largest_gap_s: FloatArray
    left_s: FloatArray
    tokens_per_s: FloatArray


def weigh(windows: Windows, situation: Situation, steps: FloatArray, next_upper_s: float, concurrent: bool) -> Plans:
    """Duration, gaps and rate of every window for every number of steps [p, n, 2]."""
    halves = Halves(*(column[..., None] for column in windows.halves))
    gaps = window_gaps(
        halves,
        steps,
        windows.begins[..., None],
        next_upper_s,
        situation.host_overhead_s,
        situation.waited_s,
        concurrent,
    )
    predicted_s = duration_s(steps, halves.decode_s, halves.prefill_s, concurrent)
    tokens = steps * len(situation.decode_context) + windows.prefill_tokens[..., None]
    rate = tokens / (predicted_s + situation.host_overhead_s)
    return Plans(steps, predicted_s, gaps.largest_s, np.broadcast_to(gaps.left_s, steps.shape), rate)


def best_windows(
    windows: Windows, layout: Layout, situation: Situation, next_upper_s: float, most_steps: int
) -> FloatArray:
    """The best plan of each division, as columns of a candidate table [12, n].

    Of a division's plans (sizes of the prefill × two values of k) it is the feasible one of the highest rate, else the
    one whose largest gap is smallest. k is the article's ⌊t_p/t_d⌋ or one more, raised to the least that keeps the
    gap across the window's end: no other k is feasible at a higher rate. Both are within 1 and ``most_steps`` ≥ 1.
    """
    halves = windows.halves
    least = least_steps(halves, next_upper_s, situation.host_overhead_s, situation.tbt_slo_s, layout.concurrent)
    steps = steps_between(halves.decode_s, halves.prefill_s, most_steps)
    steps = np.clip(np.maximum(steps, least[..., None]), 1.0, most_steps)
    weighed = weigh(windows, situation, steps, next_upper_s, layout.concurrent)
    feasible = weighed.largest_gap_s <= within(situation.tbt_slo_s)
    score = np.where(feasible, weighed.tokens_per_s, -weighed.largest_gap_s)
    divisions = len(layout.mode)
    flat = score.transpose(1, 0, 2).reshape(divisions, -1).argmax(axis=1)
    size, which = np.divmod(flat, 2)
    return lay_down(windows, layout, weighed, feasible, (size, np.arange(divisions), which))


def lay_down(
    windows: Windows, layout: Layout, weighed: Plans, feasible: BoolArray, pick: tuple[IntArray, IntArray, IntArray]
) -> FloatArray:
    """The plans at ``pick`` (size, division, which k; [m] each) as columns of a candidate table [12, m]."""
    size, division, _ = pick
    window = (size, division)
    halves = windows.halves
    steps = weighed.steps[pick]
    return plans(
        len(size),
        mode=layout.mode[division],
        prefill_tokens=windows.budgets[size, 0],
        prefill_tpcs=layout.prefill_tpcs[layout.prefill_index[division]],
        decode_tpcs=layout.decode_tpcs[layout.decode_index[division]],
        look_ahead_steps=steps,
        predicted_s=weighed.predicted_s[pick],
        upper_s=duration_s(steps, halves.decode_upper_s[window], halves.prefill_upper_s[window], layout.concurrent),
        roofline_s=duration_s(
            steps, windows.decode_roofline_s[window], windows.prefill_roofline_s[window], layout.concurrent
        ),
        largest_gap_s=weighed.largest_gap_s[pick],
        tokens_per_s=weighed.tokens_per_s[pick],
        feasible=feasible[pick],
        left_s=weighed.left_s[pick],
    )
