"""What the summary of a load run means."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.served import LoadResult, RequestResult


def result(event_s: list[float], *, sent_s: float = 0.0, tokens: list[int] | None = None, ok: bool = True):
    tokens = tokens or list(range(1, len(event_s) + 1))
    return RequestResult(
        index=0,
        scheduled_s=0.0,
        sent_s=sent_s,
        end_s=event_s[-1] if event_s else sent_s,
        input_tokens=10,
        requested_tokens=len(event_s),
        event_s=event_s,
        event_tokens=tokens,
        error=None if ok else "failed",
    )


def test_one_stall_breaks_the_strict_target_but_not_the_deadlines() -> None:
    # The first token comes 1.9 s early, so a stall of 1 s still ends before the deadline of its token.
    stalled = result([0.1, 0.15, 1.15, 1.2])
    assert not stalled.meets(2.0, 0.1)
    assert stalled.meets_deadlines(2.0, 0.1)
    late = result([2.1, 2.15, 2.2])
    assert not late.meets(2.0, 0.1)
    assert not late.meets_deadlines(2.0, 0.1)


def test_one_gap_in_a_hundred_is_forgiven_and_two_are_not() -> None:
    def with_stalls(count: int) -> RequestResult:
        gaps = [1.0] * count + [0.05] * (100 - count)
        times = [0.1]
        for gap in gaps:
            times.append(times[-1] + gap)
        return result(times)

    assert with_stalls(1).meets(2.0, 0.1)
    assert not with_stalls(2).meets(2.0, 0.1)


def test_deadlines_count_tokens_not_events() -> None:
    burst = result([0.5, 2.55], tokens=[1, 5])
    assert burst.meets_deadlines(2.0, 0.6)  # the burst's first token, token 1, was due at 2.6 s
    assert not burst.meets_deadlines(2.0, 0.5)


def test_failed_requests_meet_nothing() -> None:
    failed = result([0.1, 0.2], ok=False)
    assert not failed.meets(10.0, 10.0)
    assert not failed.meets_deadlines(10.0, 10.0)
    summary = LoadResult([failed, result([0.1, 0.2])], duration_s=2.0).summary(10.0, 10.0)
    assert summary.slo_attainment == 0.5
    assert summary.request_goodput == 0.5
    assert summary.request_throughput == 0.5


def test_figures_of_a_small_run() -> None:
    run = LoadResult([result([0.2, 0.3, 0.5]), result([1.4, 1.5], sent_s=1.0)], duration_s=4.0)
    summary = run.summary(0.3, 0.15)
    assert summary.mean_ttft_ms == pytest.approx(300)
    assert summary.p50_itl_ms == pytest.approx(100)
    assert summary.max_itl_ms == pytest.approx(200)
    assert summary.output_throughput == pytest.approx(5 / 4)
    assert summary.gap_attainment == pytest.approx(2 / 3)
    assert summary.ttft_attainment == 0.5
    assert summary.mean_tpot_ms == pytest.approx(1e3 * (0.15 + 0.1) / 2)


def test_nothing_measured_is_nan() -> None:
    summary = LoadResult([], duration_s=1.0).summary(1.0, 1.0)
    assert math.isnan(summary.p99_itl_ms)
    assert math.isnan(summary.slo_attainment)
    assert summary.request_goodput == 0.0


@given(
    first=st.floats(0.001, 3.0),
    gaps=st.lists(st.floats(0.0, 0.5), max_size=60),
    ttft_slo=st.floats(0.1, 3.0),
    tbt_slo=st.floats(0.01, 0.5),
)
def test_a_request_without_any_long_gap_meets_its_deadlines(first, gaps, ttft_slo, tbt_slo) -> None:
    times = [first]
    for gap in gaps:
        times.append(times[-1] + gap)
    request = result(times)
    if request.meets(ttft_slo, tbt_slo) and all(gap <= tbt_slo for gap in gaps):
        assert request.meets_deadlines(ttft_slo + 1e-9, tbt_slo + 1e-9)
    # Wider targets never turn a met one into a missed one.
    if request.meets(ttft_slo, tbt_slo):
        assert request.meets(ttft_slo * 2, tbt_slo * 2)
    if request.meets_deadlines(ttft_slo, tbt_slo):
        assert request.meets_deadlines(ttft_slo * 2, tbt_slo * 2)
