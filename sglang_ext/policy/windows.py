"""Windows: one prefill beside (or after) k decode steps. Picks each division's best plan from its halves' times.

    maximise   (k·T_decode + T_prefill) / max(k·t_d, t_p)   subject to   largest gap ≤ τ

over k and the size of the prefill, for every division of the TPCs. The objective is DuetServe's (arXiv 2511.04791,
§4.2), over predictions that know of the other half beside; the constraint is :mod:`sglang_ext.policy.gaps`.
"""

from __future__ import annotations

import numpy as np
from numpy import add, divide, less_equal, multiply, subtract

from sglang_ext.policy.duet import duet, steps_between
from sglang_ext.policy.forwards import Windows
from sglang_ext.policy.gaps import turn_gaps, violations, window_gaps, within
from sglang_ext.policy.layout import WindowRoom
from sglang_ext.policy.prefill import Offer
from sglang_ext.policy.types import FloatArray, Situation

SHARES = (1, 2, 4)
"""Parts of the largest prefill that a window may carry: a whole one can outlast the k steps that there is room for."""

DUET_SHARES = (1,)
"""The article's windows carry a whole one."""


def prefill_sizes(offer: Offer, shares: tuple[int, ...], least: int) -> list[int]:
    """The offer's largest budget divided by each share, in whole pages and not below ``least``, largest first, without
    repeats."""
    pages = offer.most // offer.page
    return sorted({max(pages // share * offer.page, least) for share in shares}, reverse=True)


def weigh(windows: Windows, situation: Situation, room: WindowRoom, most_steps: int) -> None:
    """Fill in the room's table but for what is feasible, all else being there."""
    before_s, after_s = situation.host_overhead_s + situation.drain_s, situation.after_window_s
    concurrent, waits_s = windows.layout.concurrent, (before_s + situation.waited_s, after_s + windows.next_upper_s)
    room.last(concurrent)
    if concurrent:
        halves_s = room.step_s, room.step_upper_s, room.steps, room.prefill_upper_s
        window_gaps(*halves_s, most_steps, *waits_s, room.gap_s, room.left_s)
    else:
        turn_gaps(room.step_upper_s, room.prefill_upper_s, *waits_s, room.gap_s, room.left_s)
    violations(room.step_upper_s, *waits_s, situation.tbt_slo_s, room.left_s, room.gap_s, room.violation_s)
    multiply(room.steps, len(situation.decode_context), room.rate)
    add(room.rate, room.tokens, room.rate)
    divide(room.rate, add(room.predicted_s, before_s + after_s, room.scratch), room.rate)
    multiply(room.rate, situation.window_yield, room.rate)


def best_windows(windows: Windows, situation: Situation, most_steps: int) -> FloatArray:
    """The best plan of each division, as columns of a candidate table [13, n].

    Of a division's plans (values of k × sizes of the prefill) it is the feasible one of the highest rate (a smaller
    prefill only if its rate is higher by :data:`sglang_ext.policy.layout.WHOLE`), else the one
    whose violation is smallest, of equals that with the larger prefill. k is the article's ⌊t_p/t_d⌋ or one more,
    within 1 and ``most_steps`` ≥ 1: the rate rises up to t_p/t_d and falls beyond. Beside a prefill it is one more in
    any case: steps go on until the prefill has ended, and the last one ends after it.
    """
    limit_s, room = within(situation.tbt_slo_s), windows.layout.room
    room.fill(*windows.details())
    step_s, prefill_s = room.of_window
    steps_between(step_s, prefill_s, most_steps, room.by_window)
    if windows.layout.concurrent:
        room.by_window[0] = room.by_window[1]
    weigh(windows, situation, room, most_steps)
    less_equal(room.gap_s, limit_s, room.keeps)
    room.feasible[...] = room.keeps
    subtract(room.preference_s, room.violation_s, room.score)
    multiply(room.rate, room.discount, room.scratch)
    np.copyto(room.score, room.scratch, where=room.keeps)
    best = room.score_by_division.argmax(axis=0) * room.divisions + room.first
    picked: FloatArray = room.table.take(best, axis=1)
    return picked


def duet_windows(windows: Windows, situation: Situation, most_steps: int) -> FloatArray:
    """Every plan that DuetServe's algorithm visits, by its own constraint and objective and in its order, likewise.

    ``windows`` are of one size.
    """
    concurrent, room = windows.layout.concurrent, windows.layout.room
    room.fill(*windows.details())
    step_s, prefill_s = room.of_window
    visited = duet(
        step_s,
        prefill_s,
        len(situation.decode_context),
        int(room.tokens[0]),
        situation.tbt_slo_s,
        most_steps,
        concurrent,
    )
    room.by_window[...] = visited.steps
    weigh(windows, situation, room, most_steps)
    room.rate[...], room.feasible[...] = visited.tokens_per_s.ravel(), visited.allowed.ravel()
    by_division = np.arange(room.steps.size).reshape(2, -1).T.ravel()
    return room.table.take(by_division, axis=1)
