from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_ext.policy.gaps import turn_gaps, window_gaps
from sglang_ext.policy.layout import lay_out, levels_on_offer
from sglang_ext.policy.prefill import offer
from sglang_ext.policy.table import choose
from sglang_ext.policy.types import MODES, RESERVED, SPATIAL, CandidateTable, Settings, Situation
from sglang_ext.policy.weigh import Weighing
from tests.policy import reference
from tests.policy.analytic import Analytic, models, situations


def gaps(decode_s, decode_upper_s, prefill_upper_s, k, *, following=0, waited=0, most=64):
    largest_s, left_s = np.empty(1), np.empty(1)
    arrays = [np.array([float(each)]) for each in (decode_s, decode_upper_s, k, prefill_upper_s)]
    window_gaps(*arrays, most, waited, following, largest_s, left_s)
    return largest_s.item(), left_s.item()


def test_decode_goes_on_beside_a_prefill_that_outlasts_its_steps() -> None:
    """k = 8 steps of 18 ms end at 144 ms, the prefill at 228 ms: there is room for five more."""
    parts = (0.018, 0.018, 0.228)
    assert gaps(*parts, 8, following=0.008) == pytest.approx((0.018, 0.0))


def test_the_end_of_a_window_without_room_counts_what_is_left_of_the_prefill() -> None:
    """The next token comes 8 ms after the prefill has ended, 84 ms after the last of eight steps."""
    parts = (0.018, 0.018, 0.228)
    assert gaps(*parts, 8, following=0.008, most=8) == pytest.approx((0.092, 0.084))
    # Spare steps are as many as those planned, and those that are kept queued.
    assert gaps(*parts, 5, following=0.008)[1] == pytest.approx(0.228 - 12 * 0.018)


def test_halves_in_turn_leave_the_whole_prefill() -> None:
    largest_s, left_s = np.empty(1), np.empty(1)
    turn_gaps(np.array([0.03]), np.array([0.06]), 0.0, 0.01, largest_s, left_s)
    assert (largest_s.item(), left_s.item()) == pytest.approx((0.07, 0.06))


def test_what_the_decodes_have_waited_already_counts_for_the_first_step() -> None:
    assert gaps(0.02, 0.03, 0.06, 3, waited=0.042)[0] == pytest.approx(0.072)


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
    feasible = reference.best_of_divisions(plans, s.tbt_slo_s)
    row = dict(zip(CandidateTable.COLUMNS, table.matrix[:, index].tolist(), strict=True))
    assert (reason == "best") == bool(feasible)
    if feasible:
        assert row["tokens_per_s"] == pytest.approx(max(plan.rate for plan in feasible))
    else:
        least = min(plan.violation_s for plan in plans)
        assert table["violation_s"].min() == pytest.approx(least)
        assert row["violation_s"] <= least * 1.1 * (1 + 1e-9)
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
    assert row["violation_s"] == pytest.approx(same[0].violation_s)
    assert row["tokens_per_s"] == pytest.approx(same[0].rate)
