"""The largest prefill budget whose mixed batch stays within a limit."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from sglang_ext.policy.forwards import MixedTimes
from sglang_ext.policy.prefill import Offer, compose
from sglang_ext.policy.types import FloatArray, IntArray

COARSE = 16
"""Budgets of the first look, spaced by a constant factor: a small chunk needs a finer grid than a large one."""

ENDS = 8
"""How many ends of prompts the first look includes: where the next prompt begins, time bends down."""

CLOSE = 0.03
"""A bracket whose bend could hide no more than this share of the budget needs no second look."""

OFFSETS = np.array([-1 / 16, -1 / 64, 0, 1 / 128, 1 / 64, 1 / 32, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 1 / 2])
"""Where the second look lies, in widths of the bracket around its chord's crossing. Most lie above: where time bends
up, the chord crosses too soon."""


@lru_cache(maxsize=1024)
def _spaced(pages: int) -> IntArray:
    return np.unique(np.rint(np.geomspace(1, pages - 1, COARSE)).astype(np.int64))


def coarse_budgets(offer: Offer) -> IntArray:
    """Budgets below the whole offer, from a page on, ascending, to begin the search with; all if they are few."""
    pages = offer.most // offer.page
    if pages - 1 <= COARSE:
        return np.arange(1, pages) * offer.page
    spaced = _spaced(pages) * offer.page
    return np.unique(np.concatenate([spaced, offer.start[1 : ENDS + 1]])) if len(offer.start) > 1 else spaced


def largest_chunk(
    coarse: MixedTimes,
    whole: MixedTimes,
    predict: Callable[[IntArray], MixedTimes],
    offer: Offer,
    limit_s: float,
    tolerance_s: float,
) -> MixedTimes:
    """The largest mixed batch found whose ``upper_s`` is within ``limit_s``; one row.

    ``coarse``: the batches of :func:`coarse_budgets`, at least one; ``whole``: that of the whole offer, one row, known
    to break it. If even a page breaks it, the limit becomes a page's own time plus ``tolerance_s``: the least
    violation, up to what a prediction can tell apart.

    Within a prompt, time bends up only: a sum of maxima of linear and quadratic terms of its tokens. So between two
    batches that hold one prompt's end at most at their ends it lies under the chord, where the result is sought, and
    above the lines through the neighbours. Where these leave more than ``CLOSE`` undecided ``predict`` is called, once.
    The result is exact where all budgets are in ``coarse`` or in the last bracket's second look; else a few per cent
    short at most. Its times are the chord's if there was no second look.
    """
    page_s = float(coarse.upper_s[0])
    if page_s > limit_s:
        limit_s = page_s + tolerance_s
    below = int(np.flatnonzero(coarse.upper_s <= limit_s)[-1])
    best = coarse.row(below)
    above = coarse.row(below + 1) if below + 1 < len(coarse.budgets) else whole
    page = offer.page
    first, last = int(best.budgets[0]) // page, int(above.budgets[0]) // page
    first_s, last_s = float(best.upper_s[0]), float(above.upper_s[0])
    between = last - first - 1
    if between < 1 or last_s <= limit_s:
        return best
    crossing = first + (last - first) * (limit_s - first_s) / (last_s - first_s)
    if between > len(OFFSETS):
        inside = offer.start[(offer.start > first * page) & (offer.start < last * page)]
        if not len(inside) and _furthest(coarse, below, page, first, last, limit_s) - crossing <= CLOSE * crossing:
            return _on_chord(best, above, int(crossing) * page, offer)
        steps = np.floor(crossing + (last - first) * OFFSETS).astype(np.int64)
        grid = np.minimum(np.maximum(steps, first + 1), last - 1)
    else:
        grid = np.arange(first + 1, last)
    fine = predict(grid * page)
    fits = np.flatnonzero(fine.upper_s <= limit_s)
    return fine.row(int(fits[np.argmax(fine.budgets[fits])])) if len(fits) else best


def _furthest(coarse: MixedTimes, below: int, page: int, first: int, last: int, limit_s: float) -> float:
    """The furthest that a curve which bends up only can cross, by the lines through the bracket's neighbours."""
    furthest = float(last)
    times, pages = coarse.upper_s, coarse.budgets // page
    if below > 0:
        slope = float(times[below] - times[below - 1]) / float(pages[below] - pages[below - 1])
        if slope > 0:
            furthest = min(furthest, first + (limit_s - float(times[below])) / slope)
    if below + 2 < len(pages):
        slope = float(times[below + 2] - times[below + 1]) / float(pages[below + 2] - pages[below + 1])
        if slope > 0:
            furthest = min(furthest, last - (float(times[below + 1]) - limit_s) / slope)
    return furthest


def _on_chord(first: MixedTimes, last: MixedTimes, budget: int, offer: Offer) -> MixedTimes:
    share = (budget - int(first.budgets[0])) / float(last.budgets[0] - first.budgets[0])

    def between(a: FloatArray, b: FloatArray) -> FloatArray:
        return a + share * (b - a)

    return MixedTimes(
        np.array([budget]),
        compose(offer, np.array([budget])).sum(axis=1),
        between(first.mean_s, last.mean_s),
        between(first.upper_s, last.upper_s),
        between(first.roofline_s, last.roofline_s),
    )
