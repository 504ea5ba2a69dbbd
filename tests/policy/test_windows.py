from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_ext.policy.forwards import Windows
from sglang_ext.policy.gaps import turn_gaps, window_gaps
from sglang_ext.policy.layout import lay_out, levels_on_offer
from sglang_ext.policy.prefill import offer
from sglang_ext.policy.table import choose
from sglang_ext.policy.types import MODES, RESERVED, SPATIAL, CandidateTable, Settings, Situation
from sglang_ext.policy.weigh import Weighing
from sglang_ext.policy.windows import best_windows
from tests.policy import reference
from tests.policy.analytic import Analytic, models, situations


def gaps(decode_s, decode_upper_s, prefill_s, prefill_upper_s, k, *, begins=False, following=0.0, host=0.0, waited=0.0):
    largest_s, left_s = np.empty(1), np.empty(1)
    given_s = decode_upper_s, k * decode_s, k * decode_upper_s, prefill_s, prefill_upper_s
    arrays = [np.array([seconds]) for seconds in given_s]
    window_gaps(*arrays, np.array([float(begins)]), following, host, waited, largest_s, left_s)
    return largest_s.item(), left_s.item()


def test_the_end_of_a_window_counts_what_is_left_of_the_prefill() -> None:
    """k = 8 steps of 18 ms end at 144 ms; the prefill at 228 ms; the next token comes 8 ms after that."""
    parts = (0.018, 0.018, 0.228, 0.228)
    assert gaps(*parts, 8, following=0.008) == pytest.approx((0.092, 0.084))
    assert gaps(*parts, 13, following=0.008)[0] == pytest.approx(0.018)


def test_k_reaches_as_far_as_the_prefills_bound() -> None:
    """⌊100 / 10⌋ = 10 steps and 11 leave 60 and 50 ms of a prefill's bound of 160; only from 13 on no more than τ."""
    layout = lay_out((SPATIAL,), (2,), 8, True, 1)
    halves_s = np.array([[0.010, 0.100], [0.011, 0.160], [1.0, 1.0]])
    windows = Windows(layout, 0.0, 0.010, lambda: (np.array([[1.0], [1.0], [0.0]]), halves_s))
    s = Situation(np.array([5]), np.array([1]), np.array([0]), 0.040, 1, 20)
    for most, steps, feasible in ((20, 13, 1), (13, 13, 1), (12, 12, 0)):
        plans = CandidateTable(best_windows(windows, s, most))
        assert (plans["look_ahead_steps"].tolist(), plans["feasible"].tolist()) == ([steps], [feasible])


def test_first_tokens_wait_for_the_rest_of_the_steps() -> None:
    parts = (0.02, 0.03, 0.05, 0.06)
    assert gaps(*parts, 4, begins=False) == pytest.approx((0.03, 0.0))
    assert gaps(*parts, 4, begins=True, following=0.01) == pytest.approx((0.08, 0.07))


def test_halves_in_turn_leave_the_whole_prefill() -> None:
    largest_s, left_s = np.empty(1), np.empty(1)
    turn_gaps(np.array([0.03]), np.array([0.06]), 0.01, 0.002, 0.0, largest_s, left_s)
    assert (largest_s.item(), left_s.item()) == pytest.approx((0.072, 0.06))


def test_what_the_decodes_have_waited_already_counts_for_the_first_step() -> None:
    assert gaps(0.02, 0.03, 0.05, 0.06, 3, host=0.002, waited=0.04)[0] == pytest.approx(0.072)


def test_spatial_parts_are_disjoint_and_reserved_ones_keep_prefill_off() -> None:
    layout = lay_out((SPATIAL, RESERVED), (8, 24), 66, True, 2)
    assert layout.decode_tpcs.tolist() == [8, 24, 66, 66]
    assert layout.prefill_tpcs.tolist() == [58, 42, 58, 42]
    assert layout.pairs.sizes == 2
    assert lay_out((SPATIAL, RESERVED), (8, 24), 66, False, 2).pairs is None


def test_levels_that_leave_a_half_without_tpcs_are_not_on_offer() -> None:
    assert levels_on_offer(Settings(levels=(0, 1, 4, 8, 9)), 8) == (1, 4)
    assert levels_on_offer(Settings(levels=(1, 4), fixed_split=6), 8) == (6,)
    assert levels_on_offer(Settings(levels=(1, 4), fixed_split=8), 8) == ()


@settings(deadline=None)
@given(
    situations(3, 3),
    models,
    st.sets(st.integers(1, 12), min_size=1, max_size=2),
    st.booleans(),
    st.sampled_from([2, 5]),
)
def test_windows_are_the_best_of_all(s: Situation, model: Analytic, levels, concurrent, look_ahead) -> None:
    assume(len(s.decode_context) and reference.largest_budget(s) and s.max_look_ahead)
    # Where the halves run in turn nothing weighs both kinds, which are the same.
    mode, modes = ("auto", ("spatial", "reserved")) if concurrent else ("spatial", ("spatial",))
    chosen = Settings(mode, concurrent, tuple(sorted(levels)), max_look_ahead=look_ahead)
    plans = reference.all_windows(s, chosen, model, modes)
    assume(plans)
    table = CandidateTable(Weighing(s, chosen, model, offer(s)).window_plans())
    index, reason = choose(table)
    feasible = [plan for plan in plans if plan.keeps(s.tbt_slo_s)]
    row = dict(zip(CandidateTable.COLUMNS, table.matrix[:, index].tolist(), strict=True))
    assert (reason == "best") == bool(feasible)
    if feasible:
        assert row["tokens_per_s"] == pytest.approx(max(plan.rate for plan in feasible))
    else:
        published = min(plan.gap_s for plan in plans if plan.published)
        assert min(plan.gap_s for plan in plans) * (1 - 1e-9) <= table["largest_gap_s"].min() <= published * (1 + 1e-9)
        assert row["largest_gap_s"] <= published * 1.1 * (1 + 1e-9)
    # And the row says what it is.
    same = [
        plan
        for plan in plans
        if (plan.mode, plan.budget, plan.decode_tpcs, plan.prefill_tpcs, plan.steps)
        == (
            MODES[int(row["mode"])],
            row["prefill_tokens"],
            row["decode_tpcs"],
            row["prefill_tpcs"],
            row["look_ahead_steps"],
        )
    ]
    assert len(same) == 1
    assert row["predicted_s"] == pytest.approx(same[0].predicted_s)
    assert row["upper_s"] == pytest.approx(same[0].upper_s)
    assert row["largest_gap_s"] == pytest.approx(same[0].gap_s)
    assert row["tokens_per_s"] == pytest.approx(same[0].rate)
