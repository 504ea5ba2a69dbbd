"""The largest prefill budget whose mixed batch stays within a limit."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from sglang_ext.policy.forwards import Batch, Batches
from sglang_ext.policy.prefill import Offer

COARSE = 12
"""Budgets of the first look, spaced by a constant factor: a small chunk needs a finer grid than a large one."""

ENDS = 6
"""How many ends of prompts the first look includes: there time jumps up, or bends down."""

FINE = 10
"""Budgets of the second look, between the nearest and the furthest that the limit can be crossed."""

BEFORE = (-1 / 16, -1 / 64)
"""And before them, in widths of the bracket: where a prompt begins the chord may cross too late."""

WAY = tuple(np.linspace(0.0, 1.0, FINE).tolist())


@lru_cache(maxsize=1024)
def _spaced(first: int, last: int, page: int) -> tuple[int, ...]:
    """COARSE pages from ``first`` to ``last``, in tokens."""
    return tuple(sorted(set((np.rint(np.geomspace(first, last, COARSE)).astype(np.int64) * page).tolist())))


@lru_cache(maxsize=1024)
def fitting_budgets(graph_tokens: tuple[int, ...], decodes: int, page: int) -> tuple[int, ...]:
    """Budgets that fill up a CUDA graph beside so many decodes, in whole pages, ascending."""
    return tuple(sorted({budget for tokens in graph_tokens if (budget := (tokens - decodes) // page * page) > 0}))


def least_budget(offer: Offer, least_chunk: int) -> int:
    """The smallest budget of at least so many tokens, or the whole offer."""
    return min(-(-least_chunk // offer.page) * offer.page, offer.most)


def coarse_budgets(offer: Offer, least: int, fitting: tuple[int, ...] = ()) -> list[int]:
    """Budgets from the ``least`` to the whole offer, ascending, to begin the search with; all if they are few.

    Of ``fitting`` ones (:func:`fitting_budgets`) so many that the second look can take all between two; beyond the
    last of them, any.
    """
    most, page = offer.most, offer.page
    inside = fitting[bisect_right(fitting, least) : bisect_left(fitting, most)]
    found = {*inside[:: -(-len(inside) // COARSE) or 1], *inside[-1:]}
    if not fitting or fitting[-1] < most:
        first, last = max((least, *fitting[-1:])) // page, most // page
        if last - first <= COARSE:
            found.update(range(first * page, most, page))
        else:
            found.update(_spaced(first, last - 1, page))
            found.update(
                bend
                for start in offer.starts[1:-1][:ENDS]
                for by in _around(page)
                if first * page < (bend := start + by) < most
            )
    return sorted({least, most}.union(found))


def _around(page: int) -> tuple[int, ...]:
    """Where time bends, from where a prompt but the first begins: the corners lie between these budgets.

    The page before may be a part; the first page reads all that the prompt has cached, and if it is a single token
    it counts as a decode.
    """
    return (-page, 0, page) if page > 1 else (0, 2)


def _bends(offer: Offer, low: int, high: int) -> bool:
    """Whether time bends between two budgets."""
    starts, last = offer.starts, len(offer.new)
    for by in _around(offer.page):
        first = bisect_right(starts, low - by, 1, last)
        if first < last and starts[first] + by < high:
            return True
    return False


def largest_chunk(
    batches: Batches,
    predict: Callable[[list[int]], Batches],
    offer: Offer,
    limit_s: float,
    tolerance_s: float,
    worth: Callable[[float], bool] = lambda tokens: True,
    fitting: tuple[int, ...] = (),
) -> Batch:
    """The largest mixed batch found whose ``upper_s`` is within ``limit_s``.

    ``batches``: those of :func:`coarse_budgets`, at least two; the last, the whole offer, is known to break it. If even
    the first breaks it, the limit becomes its own time plus ``tolerance_s``: the least violation, up to what a
    prediction can tell apart. Where budgets are ``fitting`` nothing between them is looked at.

    But where prompts end, a roofline bends up only: it sums maxima of linear and quadratic terms of tokens. So between
    two batches with no such end between them it crosses the limit after their chord and before the lines through the
    neighbours, and that is where the second look goes. What is found keeps the limit by its own prediction, whatever
    the curve. It is exact where all budgets of the bracket are looked at; else it is a few per cent short at most, for
    a time that never falls. If ``worth`` says of the furthest crossing, in tokens, that no chunk up to there matters,
    the second look is spared.
    """
    budgets, upper_s, page = batches.budgets, batches.upper_s, offer.page
    if upper_s[0] > limit_s:
        limit_s = upper_s[0] + tolerance_s
    below = len(budgets) - 2
    while upper_s[below] > limit_s:
        below -= 1
    low, high = budgets[below], budgets[below + 1]
    low_s, high_s = upper_s[below], upper_s[below + 1]
    first, last = low // page, high // page
    between = last - first - 1
    if between < 1 or high_s <= limit_s:
        return batches.at(below)
    if fitting and low < fitting[-1]:
        inside = list(fitting[bisect_right(fitting, low) : bisect_left(fitting, high)])
        return _largest_of(predict(inside), limit_s, batches.at(below)) if inside else batches.at(below)
    nearest, furthest = first + (last - first) * (limit_s - low_s) / (high_s - low_s), float(last)
    if not _bends(offer, low, high):
        furthest = max(_furthest(budgets, upper_s, below, limit_s) / page, nearest)
    if not worth(furthest * page):
        return batches.at(below)
    if between <= FINE:
        grid = list(range(first + 1, last))
    else:
        looks = [nearest + part * (last - first) for part in BEFORE]
        looks += [(1.0 - part) * nearest + part * furthest for part in WAY]
        grid = [min(max(int(look), first + 1), last - 1) for look in looks]
    return _largest_of(predict([pages * page for pages in grid]), limit_s, batches.at(below))


def _largest_of(batches: Batches, limit_s: float, otherwise: Batch) -> Batch:
    """The largest within the limit, if there is one."""
    within = [index for index, time_s in enumerate(batches.upper_s) if time_s <= limit_s]
    return batches.at(max(within, key=batches.budgets.__getitem__)) if within else otherwise


def _furthest(budgets: list[int], upper_s: list[float], below: int, limit_s: float) -> float:
    """The furthest that a curve that bends up only can cross the limit, after ``below`` of some batches."""
    furthest = float(budgets[below + 1])
    for start, end in ((below - 1, below), (below + 1, below + 2)):
        if start >= 0 and end < len(budgets) and upper_s[end] > upper_s[start]:
            slope = (upper_s[end] - upper_s[start]) / (budgets[end] - budgets[start])
            furthest = min(furthest, budgets[end] + (limit_s - upper_s[end]) / slope)
    return furthest
