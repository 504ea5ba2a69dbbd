from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.policy.queue import order_queue, prefill_alone_s
from tests.policy import reference
from tests.policy.analytic import Analytic, h200

PACE_S = 1e-4  # a token alone

waiting = st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.1, 5.0), st.integers(1, 50_000)), max_size=30)


def order(now_s: float, queue, **options) -> list[int]:
    arrival_s, target_s, tokens = (np.array(column, dtype=float) for column in zip(*queue, strict=True))
    return order_queue(now_s, arrival_s, target_s, tokens.astype(np.int64), tokens * PACE_S, **options).tolist()


@given(waiting, st.floats(100.0, 150.0))
def test_the_order_is_that_of_the_rules_read_one_by_one(queue, now_s) -> None:
    def key(index: int):
        arrival_s, target_s, tokens = queue[index]
        deadline_s = arrival_s + target_s
        if now_s + tokens * PACE_S <= deadline_s:
            return (1, deadline_s)
        if now_s - deadline_s > 30.0:
            return (0, arrival_s)
        return (2, tokens + 1000.0 * (arrival_s - now_s))

    if queue:
        assert order(now_s, queue) == sorted(range(len(queue)), key=key)


def test_hopeful_requests_go_by_deadline_and_the_rest_by_length() -> None:
    now_s = 10.0
    queue = [
        (9.9, 2.0, 9000),  # late: needs 0.9 s … no, still in time, deadline 11.9
        (9.0, 2.0, 5000),  # deadline 11.0
        (7.5, 2.0, 4000),  # deadline passed
        (8.3, 2.0, 4000),  # deadline 10.3, needs 0.4 s: past hope
        (9.5, 1.0, 100),  # deadline 10.5
    ]
    assert order(now_s, queue, ageing_tokens_per_s=0.0) == [4, 1, 0, 2, 3]


def test_equals_keep_their_order() -> None:
    assert order(5.0, [(4.0, 2.0, 100)] * 5) == [0, 1, 2, 3, 4]
    assert order(5.0, [(1.0, 2.0, 100)] * 5) == [0, 1, 2, 3, 4]
    assert order(50.0, [(1.0, 2.0, 100)] * 5) == [0, 1, 2, 3, 4]


def test_an_empty_queue_has_an_empty_order() -> None:
    none = np.zeros(0)
    assert order_queue(0.0, none, 2.0, none.astype(np.int64), none).tolist() == []


@settings(deadline=None)
@given(st.integers(1, 40_000), st.integers(1, 20), st.integers(1, 4000), st.floats(0.05, 2.0), st.booleans())
def test_nobody_starves(victim_tokens, rate, tokens, service_s, hopeful) -> None:
    """One request is served at a time, for ``service_s``; ``rate`` rivals arrive meanwhile, each of a kind to pass.

    However many they are, the victim is first when it has waited its target and the patience, at the latest.
    """
    target_s, patience_s = 0.5, 30.0
    queue = [(0.0, target_s, victim_tokens)]
    now_s = 0.0
    while now_s <= target_s + patience_s + 2 * service_s:
        first = order(now_s, queue)[0]
        if queue[first][0] == 0.0 and queue[first][2] == victim_tokens:
            return
        del queue[first]
        now_s += service_s
        # Always one that can still meet its deadline, or always a short one past hope.
        late = 0.0 if hopeful else target_s
        queue += [(now_s - late + 1e-6 * i, target_s, tokens if hopeful else 1) for i in range(rate)]
        queue = queue[:1] + queue[1:][-200:]
    raise AssertionError("starved")


@settings(deadline=None)
@given(st.integers(1, 30_000), st.floats(0.1, 5.0))
def test_ageing_bounds_who_passes_a_long_request(tokens, later) -> None:
    """Among those past hope, one of n tokens is passed only by what arrives within n / ageing seconds after it."""
    passes = order(40.0, [(10.0, 0.1, tokens), (10.0 + later, 0.1, 1)], patience_s=100.0)[0] == 1
    assert passes == (later < (tokens - 1) / 1000.0)


@settings(deadline=None)
@given(st.integers(1, 100_000), st.integers(0, 100_000), st.sampled_from([Analytic(), h200()]))
def test_the_remaining_prefill_is_read_off_the_models_curve(new, cached, model) -> None:
    found = float(prefill_alone_s(model, np.array([new]), np.array([cached]))[0])
    alone = reference.forward(model, [new], [0], 1, model.total_tpcs)[0]
    assert found >= 0.98 * alone
    whole = reference.forward(model, [new + cached], [0], 1, model.total_tpcs)[0]
    part = reference.forward(model, [cached], [0], 1, model.total_tpcs)[0] if cached else 0.0
    assert found == pytest.approx(max(alone, whole - part), rel=0.05, abs=0.03 * whole)


def test_prompts_beyond_the_curve_take_time_in_proportion() -> None:
    model = Analytic(pair_s=0.0)
    one, two = prefill_alone_s(model, np.array([1 << 21, 1 << 22]), np.zeros(2, np.int64)).tolist()
    assert one == pytest.approx(reference.forward(model, [1 << 21], [0], 1, 8)[0])
    assert two == pytest.approx(2 * one)


def test_thousands_are_ordered_at_once() -> None:
    numbers = np.random.default_rng(0)
    tokens = numbers.integers(1, 30_000, 5000)
    alone_s = prefill_alone_s(h200(), tokens, np.zeros_like(tokens))
    found = order_queue(60.0, numbers.uniform(0, 60, 5000), 2.0, tokens, alone_s)
    assert sorted(found.tolist()) == list(range(5000))
