from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_ext.policy.waterfill import Curves, largest_prefill, water_fill, water_fill_monotone, water_level


@st.composite
def all_curves(draw: st.DrawFn, most: int = 60) -> Curves:
    """Two to five ranks whose times rise, pause and jump, each from a load of its own."""
    ranks, knots = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    tokens, times = [], []
    for _ in range(ranks):
        steps = draw(st.lists(st.integers(1, most), min_size=knots, max_size=knots))
        rises = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, 17.0]), min_size=knots, max_size=knots))
        base = draw(st.sampled_from([0.0, 1.0, 2.5, 40.0]))
        tokens.append(np.cumsum([0, *steps]))
        times.append(np.cumsum([base, *rises]))
    return Curves(np.array(tokens, dtype=float), np.array(times))


def greedy(curves: Curves, tokens: int, page: int) -> list[int]:
    """Page by page, each to the rank where it ends soonest; of equals the lower page, then the lower rank."""
    shares = [0] * len(curves.tokens)
    heap = []

    def offer(rank: int) -> None:
        after = shares[rank] + page
        if after <= curves.tokens[rank, -1]:
            ends = float(np.interp(after, curves.tokens[rank], curves.time_s[rank]))
            heapq.heappush(heap, (ends, after, rank))

    for rank in range(len(shares)):
        offer(rank)
    last = 0
    for _ in range(-(-tokens // page)):
        _, after, last = heapq.heappop(heap)
        shares[last] = after
        offer(last)
    if tokens:
        shares[last] -= -tokens % page
    return shares


def room(curves: Curves, page: int) -> int:
    return int((curves.tokens[:, -1] // page).sum()) * page


@settings(deadline=None, max_examples=300)
@given(all_curves(), st.integers(0, 300), st.sampled_from([1, 4, 16]))
def test_filling_is_taking_the_next_page_where_it_ends_soonest(curves, tokens, page) -> None:
    tokens = min(tokens, room(curves, page))
    shares = water_fill(curves, tokens, page)
    assert shares.tolist() == greedy(curves, tokens, page)
    assert shares.sum() == tokens
    assert (shares % page != 0).sum() <= (tokens % page != 0)


@settings(deadline=None, max_examples=100)
@given(all_curves(20), st.integers(0, 100), st.sampled_from([1, 4]))
def test_bisection_finds_the_same(curves, tokens, page) -> None:
    tokens = min(tokens, room(curves, page))
    shares = water_fill_monotone(curves.at, curves.tokens[:, -1].astype(np.int64), tokens, page)
    assert shares.tolist() == greedy(curves, tokens, page)


@settings(deadline=None)
@given(all_curves(), st.sampled_from([1, 4]))
def test_more_tokens_take_nothing_away(curves, page) -> None:
    before = water_fill(curves, 0, page)
    for tokens in range(1, min(room(curves, page), 40) + 1):
        shares = water_fill(curves, tokens, page)
        assert (shares >= before).all()
        before = shares


@settings(deadline=None, max_examples=60)
@given(all_curves(8), st.integers(1, 12))
def test_no_other_spread_has_a_smaller_largest_time(curves, tokens) -> None:
    assume(len(curves.tokens) <= 3)
    tokens = min(tokens, room(curves, 1))

    def spreads(rank: int, left: int):
        most = min(left, int(curves.tokens[rank, -1]))
        if rank == len(curves.tokens) - 1:
            if left <= most:
                yield [left]
            return
        for n in range(most + 1):
            for rest in spreads(rank + 1, left - n):
                yield [n, *rest]

    best = min(curves.at(np.array(spread)).max() for spread in spreads(0, tokens))
    assert curves.at(water_fill(curves, tokens)).max() == pytest.approx(best)


def test_ranks_level() -> None:
    """A rank with a heavy decode load gets less, and all end together."""
    load_s = np.array([0.010, 0.020, 0.015, 0.0])
    curves = Curves(np.tile([0.0, 16384.0], (4, 1)), load_s[:, None] + np.array([0.0, 0.32768]))
    shares = water_fill(curves, 8192)
    assert shares.sum() == 8192
    times = curves.at(shares)
    assert times.max() - times.min() <= 2e-5 * (1 + 1e-9)
    assert water_level(curves, 8192) == pytest.approx(times.mean(), rel=1e-3)
    assert shares.argsort().tolist() == [1, 2, 0, 3]


def test_a_rank_above_the_level_gets_nothing() -> None:
    curves = Curves(np.tile([0.0, 100.0], (2, 1)), np.array([[0.0, 1.0], [5.0, 6.0]]))
    assert water_fill(curves, 90).tolist() == [90, 0]
    assert water_fill(curves, 150).tolist() == [100, 50]


def test_a_flat_start_is_shared_evenly() -> None:
    """Tokens that cost nothing, since the weights are read anyway, do not all go to the first rank."""
    curves = Curves(np.tile([0.0, 200.0, 400.0], (4, 1)), np.tile([1.0, 1.0, 3.0], (4, 1)))
    assert water_fill(curves, 100).tolist() == [25, 25, 25, 25]


def test_more_than_the_ranks_hold_is_refused() -> None:
    curves = Curves(np.array([[0.0, 100.0]]), np.array([[0.0, 1.0]]))
    assert water_fill(curves, 100).tolist() == [100]
    for spread in (
        lambda: water_fill(curves, 101),
        lambda: water_fill(curves, 97, 16),
        lambda: water_fill_monotone(curves.at, np.array([100]), 101),
    ):
        with pytest.raises(ValueError, match="ranks that hold"):
            spread()
    with pytest.raises(ValueError, match="ranks that hold 100"):
        water_level(curves, 100.5)


@settings(deadline=None)
@given(all_curves(), st.floats(0.0, 60.0), st.integers(0, 400), st.sampled_from([1, 4]))
def test_the_largest_prefill_under_a_limit_is_the_largest(curves, limit_s, most, page) -> None:
    found = largest_prefill(curves, limit_s, most, page)
    assert found <= most
    assert found % page == 0
    if found:
        assert curves.at(water_fill(curves, found, page)).max() <= limit_s * (1 + 1e-9)
    more = found + page
    if more <= min(most // page * page, room(curves, page)):
        assert curves.at(water_fill(curves, more, page)).max() > limit_s * (1 - 1e-9)
