from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.host_time import WindowYield


def test_windows_have_to_promise_more_until_they_have_kept_their_word() -> None:
    own = WindowYield()
    assert own.value == pytest.approx(0.8)
    for _ in range(40):
        own.note(1.0)
    assert own.value > 0.98


def test_windows_that_serve_half_of_what_was_predicted_count_half_and_less_while_they_vary() -> None:
    steady, varying = WindowYield(), WindowYield()
    for number in range(60):
        steady.note(0.5)
        varying.note(0.5 * (1.3 if number % 2 else 1 / 1.3))
    assert steady.value == pytest.approx(0.5, rel=0.02)
    assert 0.3 < varying.value < 0.45


def test_what_did_not_keep_its_word_is_tried_again_some_day() -> None:
    own = WindowYield()
    for _ in range(10):
        own.note(0.3)
    low = own.value
    for _ in range(1000):
        own.fade()
    assert low < own.value < 0.75
    for _ in range(20_000):
        own.fade()
    assert own.value == pytest.approx(0.8, rel=0.01)


@given(st.lists(st.floats(0.0, 1e9), max_size=50))
def test_the_yield_stays_within_its_limits(shares: list[float]) -> None:
    own = WindowYield()
    for share in shares:
        own.note(share)
        assert 0.02 < own.value <= 1.0
