from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.conformal import AdaptiveLevel, conformal_quantile, undisturbed_quantile

scores = st.lists(st.floats(-2, 2), min_size=1, max_size=300).map(np.array)


@given(scores, st.floats(-0.01, 0.3))
def test_the_quantile_leaves_out_no_more_than_alpha(values: np.ndarray, alpha: float) -> None:
    bound = conformal_quantile(values, alpha)
    assert bound >= 0.0
    assert (values > bound).sum() <= max(0.0, alpha) * (values.size + 1)


@given(scores, st.floats(-0.01, 0.3), st.floats(0, 0.1))
def test_fewer_misses_need_a_wider_bound(values: np.ndarray, alpha: float, less: float) -> None:
    assert conformal_quantile(values, alpha - less) >= conformal_quantile(values, alpha)


def test_pauses_are_not_chased_but_a_bad_fit_is() -> None:
    random = np.random.default_rng(0)
    body = 0.1 * random.standard_normal(400)
    paused = np.concatenate([body, np.full(8, 2.0)])  # 2 % of the times are seven times as long
    assert conformal_quantile(paused, 0.01) == 2.0
    assert undisturbed_quantile(paused, 0.01) < 0.5
    misfit = np.concatenate([body, np.full(40, 0.8)])  # 10 %: not a pause, a regime that the model gets wrong
    assert undisturbed_quantile(misfit, 0.01) == pytest.approx(0.8)


class QuickLevel(AdaptiveLevel):
    step = 0.05
    lowest, highest = -1.0, 0.5


@pytest.mark.parametrize("shift", [0.0, 0.01])
def test_coverage_comes_true_while_times_drift(shift: float) -> None:
    """The bound looks back on 100 scores; each is on average ``shift`` above the one before."""
    random = np.random.default_rng(1)
    level, past, missed = QuickLevel(0.05), [1.0] * 30, []
    for number in range(4000):
        score = shift * number + abs(random.standard_normal())
        missed.append(score > conformal_quantile(np.array(past[-100:]), level.alpha))
        level.update(missed[-1])
        past.append(score)
    assert 0.03 < np.mean(missed[500:]) < 0.07


def test_the_level_stays_within_its_limits() -> None:
    level = AdaptiveLevel(0.01)
    for _ in range(100):
        level.update(True)
    assert level.alpha == level.lowest
    for _ in range(5000):
        level.update(False)
    assert level.alpha == level.highest
    assert AdaptiveLevel(0.01, 7.0).alpha == level.highest
