from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.duet import duet

seconds = st.floats(1e-3, 0.5)


def algorithm(t_d, t_p, decode_tokens, prefill_tokens, tau, most, concurrent):
    """Lines 6 to 20 as the article prints them, but for S_d < S, k ≥ 1 and the bound on k."""
    best, plan = 0.0, None
    for level in range(len(t_d)):
        if t_d[level] > tau:
            continue
        base = math.floor(t_p[level] / t_d[level])
        for k in (base, base + 1):
            k = min(max(k, 1), most)
            time_s = max(k * t_d[level], t_p[level]) if concurrent else k * t_d[level] + t_p[level]
            rate = (k * decode_tokens + prefill_tokens) / time_s
            if rate > best:
                best, plan = rate, (level, k)
    return best, plan


@given(
    st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8),
    st.integers(1, 300),
    st.integers(1, 9000),
    st.floats(5e-3, 0.4),
    st.integers(1, 20),
    st.booleans(),
)
def test_duet_is_the_published_loop(times, decode_tokens, prefill_tokens, tau, most, concurrent) -> None:
    t_d, t_p = np.array(times).T
    plans = duet(t_d, t_p, decode_tokens, prefill_tokens, tau, most, concurrent)
    rate, plan = algorithm(t_d, t_p, decode_tokens, prefill_tokens, tau, most, concurrent)
    if plan is None:
        assert not plans.allowed.any()
        return
    # In the order of the loop: S_d outside, k inside.
    flat = np.where(plans.allowed, plans.tokens_per_s, -1.0).T.ravel()
    level, which = divmod(int(np.argmax(flat)), 2)
    assert (level, plans.steps[which, level]) == plan
    assert plans.tokens_per_s[which, level] == pytest.approx(rate)


def test_the_articles_example() -> None:
    """18 of 66 TPCs to decode, k = 5: the decode that five times fits beside the prefill wins."""
    t_d, t_p = np.array([0.120, 0.040, 0.030]), np.array([0.180, 0.210, 0.400])
    plans = duet(t_d, t_p, 32, 8192, 0.1, 64)
    assert plans.allowed.tolist() == [[False, True, True]] * 2
    assert plans.steps.tolist() == [[1, 5, 13], [2, 6, 14]]
    assert plans.duration_s[0, 1] == pytest.approx(0.210)
    assert plans.tokens_per_s[0, 1] == pytest.approx((5 * 32 + 8192) / 0.210)
