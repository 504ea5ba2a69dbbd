from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.drift import CUT_FACTOR, FACTOR, INSIDE, LEAST_CUT, LEAST_USUAL, MOST_CUT, YOUNG, DriftAlarm, DriftState

seeds = st.integers(0, 2**32 - 1)
errors = st.lists(st.floats(0.0, 1e6), max_size=60)


def noisy(seed: int, noise: float, pauses: float, count: int) -> np.ndarray:
    """Measured times of forwards that take 1 s but for log-normal noise and pauses of 2–10 times."""
    random = np.random.default_rng(seed)
    paused = np.where(random.random(count) < pauses, random.uniform(2.0, 10.0, count), 1.0)
    return np.exp(noise * random.standard_normal(count)) * paused


def judge(alarm: DriftAlarm, measured_s: np.ndarray, predicted_s: float = 1.0) -> Iterator[bool]:
    for measured in measured_s.tolist():
        alarm.judge(abs(predicted_s / measured - 1.0))
        yield alarm.drifting


@settings(max_examples=40)
@given(seeds, st.floats(0.0, 0.2), st.floats(0.0, 0.015))
def test_noise_and_pauses_are_no_drift(seed: int, noise: float, pauses: float) -> None:
    assert not any(judge(DriftAlarm(), noisy(seed, noise, pauses, 3000)))


@settings(max_examples=60)
@given(seeds, st.floats(0.0, 0.05), st.floats(0.0, 0.01), st.sampled_from([1.3, 0.7]), st.integers(200, 1500))
def test_a_step_change_raises_it_and_adaptation_ends_it(
    seed: int, noise: float, pauses: float, factor: float, before: int
) -> None:
    alarm, measured_s = DriftAlarm(), noisy(seed, noise, pauses, before + 400)
    assert not any(judge(alarm, measured_s[:before]))
    changed = factor * measured_s[before:]
    raised = list(judge(alarm, changed[:64]))
    # One in the noise of 5 % takes longer to see than one without.
    assert 3 <= raised.index(True) < 32
    assert raised[-1]
    returned = list(judge(alarm, changed[64:], factor))
    assert 3 <= returned.index(False) < 120
    assert not any(returned[120:])


@given(seeds, st.floats(0.0, 0.05))
def test_a_few_pauses_in_a_row_are_no_drift(seed: int, noise: float) -> None:
    alarm, measured_s = DriftAlarm(), noisy(seed, noise, 0.0, 600)
    measured_s[[400, 401, 402]] *= 100.0
    assert not any(judge(alarm, measured_s))


def test_an_error_that_stays_becomes_the_usual_one() -> None:
    alarm = DriftAlarm()
    list(judge(alarm, noisy(1, 0.02, 0.0, 600)))
    forever = list(judge(alarm, noisy(2, 0.2, 0.0, 2000)))
    assert forever[100]
    assert not any(forever[1500:])


def test_a_young_group_is_never_in_drift() -> None:
    alarm = DriftAlarm()
    assert not any(judge(alarm, np.full(YOUNG // 2, 1.02)))
    assert not any(judge(alarm, np.full(YOUNG // 2, 3.0)))


def test_between_the_limits_nothing_changes() -> None:
    between = 0.5 * (INSIDE + 1.0) * FACTOR * LEAST_USUAL
    for drifting in (True, False):
        alarm = DriftAlarm()
        alarm.restore(DriftState(10_000, between, LEAST_USUAL, drifting))
        alarm.judge(between)
        assert alarm.drifting == drifting


@given(errors, st.integers(1, 10_000))
def test_its_numbers_stay_within_bounds(seen: list[float], judged: int) -> None:
    alarm = DriftAlarm()
    alarm.restore(DriftState(judged, LEAST_USUAL, LEAST_USUAL, False))
    for error in seen:
        most = max(alarm.recent, min(error, max(CUT_FACTOR * alarm.limit / FACTOR, LEAST_CUT), MOST_CUT))
        alarm.judge(error)
        assert 0.0 <= alarm.recent <= most
        assert FACTOR * LEAST_USUAL <= alarm.limit <= FACTOR * MOST_CUT


@given(errors, errors)
def test_state_round_trip(before: list[float], after: list[float]) -> None:
    first, second = DriftAlarm(), DriftAlarm()
    for error in before * 4:
        first.judge(error)
    second.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(first.state()), type=DriftState))
    for error in after:
        first.judge(error)
        second.judge(error)
    assert second.state() == first.state()


@pytest.mark.parametrize(
    "change",
    [{"judged": -1}, {"recent": math.nan}, {"recent": -0.1}, {"recent": 1.1}, {"usual": math.inf}, {"usual": 0.0}],
)
def test_a_state_that_cannot_be_is_refused(change: dict[str, float]) -> None:
    alarm = DriftAlarm()
    sound = alarm.state()
    with pytest.raises(ValueError, match="drift alarm"):
        alarm.restore(msgspec.structs.replace(sound, **change))
    assert alarm.state() == sound
