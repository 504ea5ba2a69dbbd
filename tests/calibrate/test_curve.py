"""Points of a profile from raw timings."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.device import DeviceProfile
from sglang_ext.calibrate.curve import Timed, points, rate

positive = st.floats(1e-6, 1e15)
broken = st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf])


@st.composite
def measured(draw: st.DrawFn) -> tuple[list[tuple[int, float | None]], int]:
    """Rates of sets, some of one size, some that failed, and the size of the device, which has a rate."""
    total = draw(st.integers(1, 100))
    some = draw(st.lists(st.tuples(st.integers(1, total), st.none() | positive), max_size=30))
    some.insert(draw(st.integers(0, len(some))), (total, draw(positive)))
    return some, total


@given(measured())
def test_points_are_a_curve_of_the_whole_device(drawn: tuple[list[tuple[int, float | None]], int]) -> None:
    rates, total = drawn
    found = points(rates, total)
    counts, values = [s for s, _ in found], [value for _, value in found]
    assert counts == sorted({float(count) for count, measured in rates if measured is not None})
    assert counts[-1] == total
    assert all(first <= second * (1 + 1e-12) for first, second in itertools.pairwise(values))
    usable = [measured for _, measured in rates if measured is not None]
    assert min(usable) * (1 - 1e-9) <= values[0]
    assert values[-1] <= max(usable) * (1 + 1e-9)
    DeviceProfile(name="any", tpcs=total, flops=found, bandwidth=found)  # which checks them


@given(st.lists(positive, min_size=1, max_size=20, unique=True))
def test_what_already_grows_is_kept_as_it_is(rates: list[float]) -> None:
    ascending = sorted(rates)
    found = points(enumerate(ascending, start=1), len(ascending))
    assert [value for _, value in found] == ascending


@given(measured())
def test_levelling_twice_changes_nothing_more(drawn: tuple[list[tuple[int, float | None]], int]) -> None:
    once = points(*drawn)
    twice = points([(int(s), value) for s, value in once], drawn[1])
    assert [value for _, value in twice] == pytest.approx([value for _, value in once], rel=1e-9)


def test_sets_of_one_size_count_by_their_median() -> None:
    assert points([(4, 10.0), (8, 30.0), (4, 12.0), (4, 100.0)], 8) == ((4.0, 12.0), (8.0, 30.0))


def test_a_dip_is_shared_with_what_stands_before_it() -> None:
    assert points([(2, 1.0), (4, 6.0), (6, 4.0), (8, 9.0)], 8) == ((2.0, 1.0), (4.0, 5.0), (6.0, 5.0), (8.0, 9.0))


def test_failed_sets_are_left_out() -> None:
    assert points([(2, None), (4, 5.0), (8, 9.0)], 8) == ((4.0, 5.0), (8.0, 9.0))


def test_the_whole_device_is_needed() -> None:
    with pytest.raises(ValueError, match="the whole device could not be measured"):
        points([(4, 5.0), (8, None)], 8)
    with pytest.raises(ValueError, match="a set of 9 TPCs on a device of 8"):
        points([(9, 5.0), (8, 1.0)], 8)


@given(positive, st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=21))
def test_rate_is_by_the_median(amount: float, seconds: list[float]) -> None:
    assert rate(amount, seconds) == amount / statistics.median(seconds)


@given(st.lists(st.floats(1e-3, 1.0), max_size=6), st.lists(broken, max_size=6), st.randoms())
def test_broken_timings_do_not_count(good: list[float], bad: list[float], random: object) -> None:
    mixed = [*good, *bad]
    random.shuffle(mixed)  # type: ignore[attr-defined]
    found = rate(1.0, mixed)
    if good and len(good) >= len(bad):
        assert found == 1.0 / statistics.median(good)
    else:
        assert found is None


def test_one_slow_repeat_does_not_move_a_rate() -> None:
    one = Timed("small", 2, gemm_s={(10, 10, 10): [1.0, 1.0, 50.0]}, read_s=[2.0, 2.0, 9.0], read_bytes=8)
    assert one.flops == 2000.0
    assert one.bandwidth == 4.0


def test_the_best_shape_counts() -> None:
    one = Timed("small", 2, gemm_s={(10, 10, 10): [1.0], (20, 10, 10): [1.0], (30, 10, 10): []})
    assert one.flops == 4000.0
    assert one.bandwidth is None
    assert Timed("small", 2, failure="it hung").flops is None
