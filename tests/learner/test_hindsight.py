from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.hindsight import SAME, HindsightCount
from learner.records import Candidates, Iteration, StreamRecord
from tests.learner.generated import iteration

TAU_S = 0.1


def plans(*rows: tuple[str, float, float, float, bool]) -> Candidates:
    """Mode, mean, bound, tokens per second, feasible; the gap is the bound."""
    mode, predicted, upper, rate, feasible = (list(column) for column in zip(*rows, strict=True))
    none = [0] * len(rows)
    return Candidates(
        mode=mode,
        prefill_tokens=none,
        prefill_tpcs=none,
        decode_tpcs=none,
        look_ahead_steps=none,
        predicted_s=predicted,
        upper_s=upper,
        roofline_s=predicted,
        largest_gap_s=upper,
        tokens_per_s=rate,
        feasible=feasible,
    )


def ran(seconds: float) -> StreamRecord:
    return StreamRecord(
        phase="mixed",
        tpcs=66,
        q=[100, 1],
        c=[0, 10],
        logits_rows=2,
        step_start_s=[0.001],
        step_end_s=[0.001 + seconds],
        predicted_s=[0.05],
        upper_s=[0.06],
        roofline_s=[0.04],
    )


def decided(seconds: float, candidates: Candidates | None, index: int = 0, *more: StreamRecord) -> Iteration:
    return msgspec.structs.replace(
        iteration(1, ran(seconds), *more), candidates=candidates, decision=index, tbt_slo_s=TAU_S
    )


def found(*iterations: Iteration):
    count = HindsightCount()
    for one in iterations:
        count.add(one)
    return count.result()


TWO = plans(("chunked", 0.05, 0.06, 1000.0, True), ("spatial", 0.08, 0.09, 900.0, True))


def test_a_plan_that_took_as_long_as_predicted_was_right() -> None:
    result = found(decided(0.05, TWO))
    assert (result.decisions, result.outrun, result.broken, result.withheld) == (1, 0, 0, 0)
    assert result.tokens == pytest.approx(50.0)


def test_a_plan_that_took_longer_is_outrun_by_the_next_best() -> None:
    # 50 tokens in 62.5 ms are 800 a second.
    result = found(decided(0.0625, TWO))
    assert (result.outrun, result.broken, result.withheld) == (1, 0, 0)
    assert result.outrun_tokens == pytest.approx((900.0 - 800.0) * 0.0625)


def test_a_plan_that_broke_the_target_cost_what_it_took_beyond() -> None:
    result = found(decided(0.13, TWO), decided(0.11, TWO))
    assert (result.outrun, result.broken, result.withheld) == (0, 2, 0)
    assert result.broken_ms == pytest.approx(20.0)
    # No other plan would have kept it, or it was known to break it.
    alone = plans(("chunked", 0.05, 0.06, 1000.0, True), ("spatial", 0.2, 0.3, 900.0, False))
    known = plans(("chunked", 0.15, 0.16, 1000.0, False), ("spatial", 0.2, 0.3, 900.0, False))
    assert found(decided(0.13, alone), decided(0.15, known)).broken == 0


def test_a_faster_plan_was_refused_by_its_bound_alone() -> None:
    bound = plans(("chunked", 0.05, 0.06, 1000.0, True), ("temporal", 0.09, 0.11, 1200.0, False))
    result = found(decided(0.05, bound))
    assert (result.outrun, result.broken, result.withheld) == (0, 0, 1)
    assert result.withheld_tokens == pytest.approx(200.0 * 0.05)
    mean = plans(("chunked", 0.05, 0.06, 1000.0, True), ("temporal", 0.11, 0.12, 1200.0, False))
    assert found(decided(0.05, mean)).withheld == 0


def test_a_window_s_gap_is_its_longest_step() -> None:
    decode = msgspec.structs.replace(ran(0.0), phase="decode", q=[1], c=[10])
    steps = msgspec.structs.replace(decode, step_start_s=[0.0], step_end_s=[0.02, 0.05])
    prefill = msgspec.structs.replace(ran(0.15), phase="prefill")
    window = plans(("spatial", 0.15, 0.16, 1000.0, True), ("chunked", 0.05, 0.06, 900.0, True))
    one = decided(0.15, window, 0, steps)
    one = msgspec.structs.replace(one, streams=[prefill, steps])
    assert found(one).broken == 0
    late = msgspec.structs.replace(steps, step_end_s=[0.02, 0.13])
    assert found(msgspec.structs.replace(one, streams=[prefill, late])).broken_ms == pytest.approx(10.0)


def test_what_holds_no_choice_is_left_out() -> None:
    one = plans(("temporal", 0.05, 0.06, 1000.0, True))
    assert found(decided(0.05, None, -1), decided(0.05, one), decided(0.05, TWO, 7), decided(0.0, TWO)) is None


@given(st.lists(st.tuples(st.floats(0.001, 0.3), st.floats(0.01, 0.2), st.floats(1.0, 1e4), st.booleans()), min_size=2))
def test_a_decision_counts_once_and_costs_are_not_negative(rows) -> None:
    took_s = rows[0][0]
    table = plans(*(("chunked", mean_s, 1.1 * mean_s, rate, feasible) for _, mean_s, rate, feasible in rows))
    result = found(decided(took_s, table))
    assert result.decisions == 1
    assert result.outrun + result.broken + result.withheld <= 1
    assert min(result.outrun_tokens, result.broken_ms, result.withheld_tokens) >= 0.0
    served = rows[0][2] * rows[0][1] / took_s
    others = [rate for _, _, rate, _ in rows[1:] if rate > served * (1 + SAME)]
    assert others or not result.outrun + result.withheld
