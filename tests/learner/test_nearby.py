"""The short-lived correction by the newest like forwards."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from learner.columns import LOG_FEATURES
from learner.nearby import INERTIA, MOST_CUT, MOST_POINTS, POINT_WIDTH, RADIUS, Nearby, points_of

HERE = np.full((1, LOG_FEATURES), 5.0)


def points(residuals, *, place=HERE, group=1):
    count = len(residuals)
    return points_of(
        np.repeat(place, count, axis=0),
        np.full(count, group),
        np.array(residuals, dtype=float),
        np.arange(count, dtype=float),
        count,
    )


def shift(numbers, *, place=HERE, group=1) -> float:
    return float(Nearby(numbers).shift(place.T, np.array([group]))[0])


def test_nothing_seen_changes_nothing():
    assert shift([]) == 0.0


def test_a_level_that_stays_is_taken_over():
    assert 0.2 < shift(points([0.25] * 30)) < 0.25


def test_it_fades_with_distance_and_stays_in_its_group():
    numbers = points([0.25] * 30)
    near, far = HERE + 0.3 / np.sqrt(LOG_FEATURES), HERE + 1.01 * RADIUS / np.sqrt(LOG_FEATURES)
    assert 0.0 < shift(numbers, place=near) < shift(numbers)
    assert shift(numbers, place=far) == 0.0
    assert shift(numbers, group=2) == 0.0


def test_newer_forwards_count_more():
    assert shift(points([0.2] * 20 + [-0.2] * 20)) < -0.1


def test_one_pause_moves_little():
    quiet = [0.01, -0.01] * 20
    assert abs(shift(points([*quiet, 3.0])) - shift(points(quiet))) < 0.03


@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=120),
    st.lists(st.floats(0, 20), min_size=LOG_FEATURES, max_size=LOG_FEATURES),
    st.integers(0, 5),
)
def test_shift_is_a_bounded_average_as_computed_plainly(residuals, place, group):
    rng = np.random.default_rng(len(residuals))
    logs = rng.uniform(0, 20, (len(residuals), LOG_FEATURES))
    logs[::2] = place + rng.uniform(-0.5, 0.5, LOG_FEATURES)
    logs = np.abs(logs)
    groups = rng.integers(0, 6, len(residuals))
    numbers = points_of(logs, groups, np.array(residuals), np.arange(len(residuals), dtype=float), len(residuals))
    rows = np.array(numbers).reshape(-1, POINT_WIDTH)
    assert len(rows) == min(len(residuals), MOST_POINTS)
    top = bottom = 0.0
    for row in rows:
        distance = ((row[:LOG_FEATURES] - place) ** 2).sum()
        like = max(0.0, 1.0 - distance / RADIUS**2) ** 4 * row[-1] * (row[LOG_FEATURES] == group)
        top, bottom = top + like * row[LOG_FEATURES + 1], bottom + like
    found = shift(numbers, place=np.array([place]), group=group)
    assert abs(found) <= MOST_CUT
    assert np.isclose(found, top / (bottom + INERTIA), atol=1e-9)
