"""Targets of requests, and the count of what was met."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.config import ConfigError
from sglang_ext.slo import Attainment, Progress, check_custom_params

NUMBERS = st.one_of(st.integers(-5, 10**6), st.floats(), st.booleans(), st.text(max_size=4), st.lists(st.integers()))


@given(st.dictionaries(st.sampled_from(["ttft_slo_ms", "tbt_slo_ms", "other"]), st.none() | NUMBERS))
def test_what_passes_the_check_makes_targets(params):
    try:
        check_custom_params(params)
    except ConfigError:
        bad = [name for name in ("ttft_slo_ms", "tbt_slo_ms") if params.get(name) is not None]
        assert bad
        return
    progress = Progress.of(params, now_s=10.0, ttft_slo_s=2.0, tbt_slo_s=0.1)
    assert progress.tbt_slo_s >= 0.005
    assert progress.ttft_slo_s > 0
    assert progress.deadline_s == 10.0 + progress.ttft_slo_s


@pytest.mark.parametrize("params", [None, {}, {"__req__": object()}, [1], "text"])
def test_requests_without_targets_have_the_servers(params):
    check_custom_params(params)
    progress = Progress.of(params, now_s=0.0, ttft_slo_s=2.0, tbt_slo_s=0.1)
    assert (progress.ttft_slo_s, progress.tbt_slo_s) == (2.0, 0.1)


def test_own_targets_are_in_milliseconds_and_tbt_is_floored():
    progress = Progress.of({"ttft_slo_ms": 500, "tbt_slo_ms": 1}, now_s=0.0, ttft_slo_s=2.0, tbt_slo_s=0.1)
    assert (progress.ttft_slo_s, progress.tbt_slo_s) == (0.5, 0.005)


@pytest.mark.parametrize("value", ["50", "x", -1, 0, 10**400, float("nan"), [], True, 1e12])
def test_what_slips_past_the_check_counts_as_absent(value):
    """The scheduler must not die of a request, whatever way its parameters came."""
    with pytest.raises(ConfigError):
        check_custom_params({"tbt_slo_ms": value})
    assert Progress.of({"tbt_slo_ms": value}, now_s=0.0, ttft_slo_s=2.0, tbt_slo_s=0.1).tbt_slo_s == 0.1


def test_attainment_counts_first_tokens_and_gaps():
    progress = Progress.of({}, now_s=0.0, ttft_slo_s=1.0, tbt_slo_s=0.1)
    counted = Attainment()
    for tokens, now_s in [(0, 0.5), (1, 0.9), (1, 0.95), (2, 1.0), (3, 1.2), (5, 1.25)]:
        counted.note(progress, tokens, now_s)
    assert (counted.ttft_met, counted.ttft_missed) == (1, 0)
    assert (counted.tbt_met, counted.tbt_missed) == (2, 1)
    late = Progress.of({}, now_s=0.0, ttft_slo_s=1.0, tbt_slo_s=0.1)
    counted.note(late, 1, 1.5)
    assert counted.ttft_missed == 1
