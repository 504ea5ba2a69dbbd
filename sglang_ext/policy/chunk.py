"""The largest prefill budget whose mixed batch stays within a limit."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from sglang_ext.policy.forwards import MixedTimes
from sglang_ext.policy.prefill import Offer
from sglang_ext.policy.types import IntArray

COARSE = 12
"""Budgets of the first look, spaced by a constant factor: a small chunk needs a finer grid than a large one."""

ENDS = 6
"""How many ends of prompts the first look includes: there time jumps up, or bends down."""

PART_PAGE, ONE_TOKEN = np.array([-1, 0, 1]), np.array([0, 2])

FINE = 10
"""Budgets of the second look, between the nearest and the furthest that the limit can be crossed."""

BEFORE = (-1 / 16, -1 / 64)
"""And before them, in widths of the bracket: where a prompt begins the chord may cross too late."""

_WAY = np.linspace(0.0, 1.0, FINE)
LOOKS = np.concatenate([[(before, 1.0, 0.0) for before in BEFORE], np.stack([0.0 * _WAY, 1.0 - _WAY, _WAY], axis=1)])
"""All of these, as weights of the bracket's width, the nearest and the furthest."""


@lru_cache(maxsize=1024)
def _spaced(pages: int, page: int) -> frozenset[int]:
    return frozenset((np.rint(np.geomspace(1, pages - 1, COARSE)).astype(np.int64) * page).tolist())


def coarse_budgets(offer: Offer) -> IntArray:
    """Budgets below the whole offer, from a page on, ascending, to begin the search with; all if they are few."""
    pages = offer.most // offer.page
    if pages - 1 <= COARSE:
        return np.arange(1, pages) * offer.page
    bends = (bend for bend in _bends(offer)[:ENDS].ravel().tolist() if 0 < bend < offer.most)
    return np.array(sorted(_spaced(pages, offer.page).union(bends)))


def _bends(offer: Offer) -> IntArray:
    """Budgets around where each prompt but the first begins [n − 1, 2 or 3], so that the corners lie between these.

    The page before may be a part; the first page reads all that the prompt has cached, and if it is a single token
    it counts as a decode.
    """
    bends: IntArray = offer.start[1:, None] + (PART_PAGE * offer.page if offer.page > 1 else ONE_TOKEN)
    return bends


def largest_chunk(
    coarse: MixedTimes,
    whole: MixedTimes,
    predict: Callable[[IntArray], MixedTimes],
    offer: Offer,
    limit_s: float,
    tolerance_s: float,
    worth: Callable[[float], bool] = lambda tokens: True,
) -> MixedTimes:
    """The largest mixed batch found whose ``upper_s`` is within ``limit_s``; one row.

    ``coarse``: the batches of :func:`coarse_budgets`, at least one; ``whole``: that of the whole offer, one row, known
    to break it. If even a page breaks it, the limit becomes a page's own time plus ``tolerance_s``: the least
    violation, up to what a prediction can tell apart.

    But where prompts end, a roofline bends up only: it sums maxima of linear and quadratic terms of tokens. So between
    two batches with no such end between them it crosses the limit after their chord and before the lines through the
    neighbours, and that is where the second look goes. What is found keeps the limit by its own prediction, whatever
    the curve. It is exact where all budgets of the bracket are looked at; else it is a few per cent short at most, for
    a time that never falls. If ``worth`` says of the furthest crossing, in tokens, that no chunk up to there matters,
    the second look is spared.
    """
    page_s = float(coarse.upper_s[0])
    if page_s > limit_s:
        limit_s = page_s + tolerance_s
    below = int((coarse.upper_s <= limit_s).nonzero()[0][-1])
    best = coarse.row(below)
    above = coarse.row(below + 1) if below + 1 < len(coarse.budgets) else whole
    page = offer.page
    first, last = int(best.budgets[0]) // page, int(above.budgets[0]) // page
    first_s, last_s = float(best.upper_s[0]), float(above.upper_s[0])
    between = last - first - 1
    if between < 1 or last_s <= limit_s:
        return best
    nearest, furthest = first + (last - first) * (limit_s - first_s) / (last_s - first_s), float(last)
    bends = _bends(offer)
    if not ((bends > first * page) & (bends < last * page)).any():
        furthest = max(_furthest(coarse, whole, below, page, limit_s), nearest)
    if not worth(furthest * page):
        return best
    if between <= FINE:
        grid = np.arange(first + 1, last)
    else:
        looks = LOOKS @ (last - first, nearest, furthest)
        grid = np.minimum(np.maximum(looks.astype(np.int64), first + 1), last - 1)
    fine = predict(grid * page)
    fitting = np.where(fine.upper_s <= limit_s, grid, 0)
    largest = int(fitting.argmax())
    return fine.row(largest) if fitting[largest] else best


def _furthest(coarse: MixedTimes, whole: MixedTimes, below: int, page: int, limit_s: float) -> float:
    """The furthest page where a curve that bends up only can cross the limit, after budget ``below`` of ``coarse``."""
    around = slice(max(below - 1, 0), below + 3)
    pages = [budget // page for budget in coarse.budgets[around].tolist()]
    times = coarse.upper_s[around].tolist()
    if below + 3 > len(coarse.budgets):
        pages.append(int(whole.budgets[0]) // page)
        times.append(float(whole.upper_s[0]))
    at = min(below, 1)
    furthest = float(pages[at + 1])
    for start, end in ((at - 1, at), (at + 1, at + 2)):
        if start >= 0 and end < len(pages) and times[end] > times[start]:
            slope = (times[end] - times[start]) / (pages[end] - pages[start])
            furthest = min(furthest, pages[end] + (limit_s - times[end]) / slope)
    return furthest
