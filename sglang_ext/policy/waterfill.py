"""Spreading prefill tokens over ranks so that their predicted times level, like water over an uneven floor.

Every rank takes pages of tokens; the time of rank r with n tokens, t_r(n), is non-decreasing. Think of all pages of
all ranks as one list, in the order of t_r(n) with that page, of equals the lower page, then the lower rank. Filling p
pages takes the first p of the list: no other way of taking as many has a smaller largest time, and whoever gets some
of p pages gets no less of p + 1. The functions here find that prefix without walking the list.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from sglang_ext.policy.types import FloatArray, IntArray

BISECTIONS = 100
"""As a rule fewer suffice to leave no number between two levels."""


class Curves(NamedTuple):
    """Piecewise-linear times of r ranks: ``time_s`` [r, m], non-decreasing, at ``tokens`` [r, m].

    ``tokens`` ascends strictly from 0 in every row; its last column is what the rank can hold.
    """

    tokens: FloatArray
    time_s: FloatArray

    def at(self, shares: IntArray) -> FloatArray:
        """t_r of ``shares`` [r, ...], by rank; same shape."""
        return np.stack([np.interp(n, x, t) for n, x, t in zip(shares, self.tokens, self.time_s, strict=True)])


def water_level(curves: Curves, tokens: float) -> float:
    """The time that all ranks with a share reach when ``tokens``, taken as divisible, have been spread.

    Closed form: Σ_r t_r⁻¹(L) is linear in L between the knots' times, so the level lies between two of these. Raises
    ValueError if the ranks cannot hold ``tokens``.
    """
    knots = np.unique(curves.time_s)

    def upto(index: int) -> float:
        return float(_tokens_at(curves, float(knots[index]), "right").sum())

    if tokens > (most := upto(-1)) * (1.0 + 1e-12):
        raise ValueError(f"{tokens:g} tokens for ranks that hold {most:g}")
    index = min(bisect_left(range(len(knots)), tokens, key=upto), len(knots) - 1)
    before = float(_tokens_at(curves, float(knots[index]), "left").sum())
    if index == 0 or before <= tokens:
        return float(knots[index])
    share = (tokens - upto(index - 1)) / (before - upto(index - 1))
    return float(knots[index - 1] + share * (knots[index] - knots[index - 1]))


def water_fill(curves: Curves, tokens: int, page: int = 1) -> IntArray:
    """Tokens of each rank [r] that level the ranks' times; their sum is ``tokens``.

    Every share is a multiple of ``page`` but one, if ``tokens`` is not. Raises ValueError if the ranks' whole pages
    cannot hold ``tokens``.
    """
    room = curves.tokens[:, -1].astype(np.int64) // page
    pages = _pages(room, tokens, page)
    if pages == 0:
        return np.zeros_like(room)
    level_s = water_level(curves, min(float(pages * page), float(curves.tokens[:, -1].sum())))
    # The prefix holds all pages that end below the level, and few above it: whole pages leave less than one page a
    # rank to place, and as much again where a rank's room is no whole number of them.
    sure = np.maximum(np.floor(_tokens_at(curves, level_s, "left") / page).astype(np.int64) - 1, 0)
    reach = np.floor(_tokens_at(curves, level_s, "right") / page).astype(np.int64) + 2 * len(room) + 1
    sure, reach = np.minimum(sure, room), np.minimum(reach, room)
    width = int((reach - sure).max())
    counts = np.minimum(sure[:, None] + np.arange(1, width + 1), room[:, None])
    return _first(sure, reach, pages, tokens, page, curves.at(counts * page))


def water_fill_monotone(
    time_s: Callable[[IntArray], FloatArray], room_tokens: IntArray, tokens: int, page: int = 1
) -> IntArray:
    """:func:`water_fill` for any non-decreasing times, by bisection of the level.

    ``time_s`` maps shares [r] to times [r], by rank; ``room_tokens`` [r] is what each rank can hold.
    """
    room = room_tokens // page
    pages = _pages(room, tokens, page)
    if pages == 0:
        return np.zeros_like(room)

    def pages_at(level_s: float) -> IntArray:
        low, high = np.zeros_like(room), room.copy()
        while (low < high).any():
            middle = (low + high + 1) // 2
            fits = time_s(middle * page) <= level_s
            low, high = np.where(fits, middle, low), np.where(fits, high, np.maximum(middle - 1, low))
        return low

    above_s = float(time_s(room * page).max())
    below_s, sure, reach = min(0.0, float(time_s(np.zeros_like(room)).min())), np.zeros_like(room), room
    for _ in range(BISECTIONS):
        middle_s = below_s + (above_s - below_s) / 2
        if not below_s < middle_s < above_s:
            break
        filled = pages_at(middle_s)
        if filled.sum() < pages:
            below_s, sure = middle_s, filled
        else:
            above_s, reach = middle_s, filled
    # All pages between end at the same time.
    return _first(sure, reach, pages, tokens, page, np.zeros((len(room), int((reach - sure).max()))))


def largest_prefill(curves: Curves, limit_s: float, most: int, page: int = 1) -> int:
    """The most tokens, at most ``most`` and in whole pages, that the ranks can share with no time above ``limit_s``.

    0 if a rank is above it with nothing: the ranks run in step.
    """
    if (curves.time_s[:, 0] > limit_s).any():
        return 0
    pages = int((_tokens_at(curves, limit_s, "right") // page).sum())
    return min(pages, most // page) * page


def _pages(room: IntArray, tokens: int, page: int) -> int:
    pages = -(-tokens // page)
    if pages > room.sum():
        raise ValueError(f"{pages} pages of {page} tokens for ranks that hold {int(room.sum())}")
    return pages


def _tokens_at(curves: Curves, level_s: float, side: Literal["left", "right"]) -> FloatArray:
    """t_r⁻¹ [r]: the most tokens with a time ≤ the level (right), or the least with a time ≥ it (left)."""
    # Few numbers, asked for often: lists are quicker than arrays.
    find = bisect_right if side == "right" else bisect_left
    out = []
    for tokens, times in zip(curves.tokens.tolist(), curves.time_s.tolist(), strict=True):
        upto = find(times, level_s)
        if upto == 0:
            out.append(0.0)
        elif upto == len(times):
            out.append(tokens[-1])
        else:
            share = (level_s - times[upto - 1]) / (times[upto] - times[upto - 1])
            out.append(tokens[upto - 1] + share * (tokens[upto] - tokens[upto - 1]))
    return np.array(out)


def _first(sure: IntArray, reach: IntArray, pages: int, tokens: int, page: int, ends_s: FloatArray) -> IntArray:
    """Shares [r] of the first ``pages`` of the list, of which ``sure`` [r] are known and none is beyond ``reach`` [r].

    ``ends_s`` [r, w]: time with each of the pages after the sure ones. The last page of the list may be a part.
    """
    open_pages = reach - sure
    rank = np.repeat(np.arange(len(sure)), open_pages)
    ahead = np.arange(len(rank)) - np.repeat(np.cumsum(open_pages) - open_pages, open_pages)
    order = np.lexsort((rank, sure[rank] + ahead, ends_s[rank, ahead]))
    taken = rank[order[: pages - int(sure.sum())]]
    shares: IntArray = (sure + np.bincount(taken, minlength=len(sure))) * page
    shares[taken[-1]] -= pages * page - tokens
    return shares
