from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.placement import KV_THRESHOLD, place_decode

ranks = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(1, 1000).flatmap(lambda c: st.tuples(st.integers(0, c), st.just(c)))),
    min_size=1,
    max_size=8,
)


@given(ranks, st.integers(1, 1200))
def test_placement_respects_capacity_and_its_rule(loads, tokens) -> None:
    context = np.array([context for context, _ in loads])
    used, capacity = (np.array(column) for column in zip(*(kv for _, kv in loads), strict=True))
    rank = place_decode(tokens, context, used, capacity)
    fitting = [r for r in range(len(loads)) if used[r] + tokens <= capacity[r]]
    if rank is None:
        assert not fitting
        return
    assert rank in fitting
    if any(used[r] < KV_THRESHOLD * capacity[r] for r in range(len(loads))):
        assert rank == min(fitting, key=lambda r: (context[r], r))
    else:
        assert rank == min(fitting, key=lambda r: (capacity[r] - used[r], r))


def test_below_the_threshold_balance_above_it_best_fit() -> None:
    context, capacity = np.array([900, 300, 600]), np.array([1000, 1000, 1000])
    assert place_decode(50, context, np.array([850, 790, 850]), capacity) == 1
    assert place_decode(50, context, np.array([850, 810, 930]), capacity) == 2
    assert place_decode(100, context, np.array([850, 810, 930]), capacity) == 0
    assert place_decode(200, context, np.array([850, 810, 930]), capacity) is None
