from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_ext.policy.chunk import COARSE
from sglang_ext.policy.decide import decide
from sglang_ext.policy.explore import Explorer
from sglang_ext.policy.types import RESERVED, SPATIAL, CandidateTable, Settings, Situation
from tests.policy import reference
from tests.policy.analytic import Analytic, h200, models, situations

MODES = ("auto", "temporal", "chunked", "spatial", "reserved", "duet")
PLAIN = Situation(
    decode_context=np.array([500, 700]),
    prefill_new=np.array([300]),
    prefill_cached=np.array([0]),
    tbt_slo_s=0.1,
    prefill_budget=256,
    max_look_ahead=8,
)
MODEL = Analytic()
LEVELS = (2, 4, 6)

any_settings = st.builds(
    Settings,
    mode=st.sampled_from(MODES),
    concurrent=st.booleans(),
    levels=st.sets(st.integers(1, 14), max_size=3).map(lambda levels: tuple(sorted(levels))),
    fixed_split=st.none() | st.integers(1, 14),
    max_look_ahead=st.integers(1, 8),
)


def changed(**changes: object) -> Situation:
    return dataclasses.replace(PLAIN, **changes)


@settings(deadline=None, max_examples=300)
@given(situations(), any_settings, models, st.booleans())
def test_no_decision_is_impossible(s: Situation, chosen: Settings, model: Analytic, exploring: bool) -> None:
    explorer = Explorer(share=0.9, slack=0.0) if exploring else None
    for _ in range(3):
        d = decide(s, chosen, model, explorer)
        assert d.prefill_tokens <= s.prefill_budget
        assert d.prefill_tokens % s.page_size == 0
        assert sum(reference.admit(s.prefill_new.tolist(), d.prefill_tokens, s.page_size)) > 0 or not d.prefill_tokens
        for value in (d.predicted_s, d.upper_s, d.roofline_s, d.largest_gap_s, d.left_s):
            assert np.isfinite(value)
            assert value >= 0
        assert d.predicted_s <= d.upper_s * (1 + 1e-9)
        if d.mode in ("spatial", "reserved"):
            assert 1 <= d.look_ahead_steps <= min(s.max_look_ahead, chosen.max_look_ahead)
            assert d.prefill_tokens > 0
            assert len(s.decode_context) > 0
            levels = chosen.levels if chosen.fixed_split is None else (chosen.fixed_split,)
            if not chosen.concurrent:
                assert d.decode_tpcs == d.prefill_tpcs == model.total_tpcs
            elif d.mode == "spatial":
                assert 1 <= d.decode_tpcs < model.total_tpcs
                assert d.decode_tpcs in levels
                assert d.prefill_tpcs == model.total_tpcs - d.decode_tpcs
            else:
                assert d.decode_tpcs == model.total_tpcs
                assert model.total_tpcs - d.prefill_tpcs in levels
        else:
            assert d.decode_tpcs == d.prefill_tpcs == model.total_tpcs
            assert d.look_ahead_steps == (1 if len(s.decode_context) else 0)
            assert d.left_s == 0
        if not d.prefill_tokens and reference.largest_budget(s) and len(s.decode_context):
            assert s.waited_s > 0 or s.after_window
        if d.reason == "explore":
            assert chosen.mode == "auto"
            assert chosen.concurrent
            assert d.largest_gap_s <= s.tbt_slo_s * (1 + 1e-9)
        if chosen.mode == "temporal" or (chosen.mode == "auto" and not chosen.concurrent):
            assert d.mode in ("temporal", "chunked")
        row = dict(zip(CandidateTable.COLUMNS, d.candidates.matrix[:, d.index].tolist(), strict=True))
        assert row["prefill_tokens"] == d.prefill_tokens
        assert row["largest_gap_s"] == d.largest_gap_s


@settings(deadline=None, max_examples=150)
@given(
    situations(most_decodes=3, most_waiting=3, tokens=8),
    models,
    st.booleans(),
    st.sets(st.integers(1, 12), max_size=2),
    st.floats(0.7, 3.0),
)
def test_auto_is_the_best_of_all_plans(s: Situation, model: Analytic, concurrent, levels, scale) -> None:
    """Against every chunk, division, size and k, each predicted on its own."""
    most = reference.largest_budget(s)
    assume(len(s.decode_context) and most and most // s.page_size <= COARSE + 1)
    chosen = Settings("auto", concurrent, tuple(sorted(levels)), max_look_ahead=4)
    mixed = reference.all_mixed(s, model)
    # A target near what a mixed batch takes, where the choice is hard.
    s = dataclasses.replace(s, tbt_slo_s=scale * mixed[0].gap_s)
    d = decide(s, chosen, model)
    tau = s.tbt_slo_s
    whole, chunks = mixed[-1], [plan for plan in mixed[:-1] if plan.keeps(tau)]
    if whole.keeps(tau):
        assert (d.mode, d.reason, d.prefill_tokens) == ("temporal", "fits", most)
        return
    plans = [chunks[-1]] if chunks else []
    if s.waited_s > 0 or s.after_window:
        plans.append(reference.mixed(s, model, 0, "temporal"))
    windows = reference.all_windows(s, chosen, model, ("spatial", "reserved")) if concurrent else []
    rivals = reference.best_of_divisions(windows, tau)
    if rivals:
        # What takes more of the offer at once is measured by the whole of it.
        rival = max(rivals, key=lambda plan: plan.rate)
        plans = [reference.over(s, model, rival.budget, plan) if plan.budget else plan for plan in plans]
    feasible = [plan for plan in plans if plan.keeps(tau)] + rivals
    if feasible:
        assert d.reason == "best"
        assert d.largest_gap_s <= tau * (1 + 1e-9)
        rate = d.candidates["tokens_per_s"][d.index]
        assert rate == pytest.approx(max(plan.rate for plan in feasible))
    else:
        assert d.reason == "least_violation"
        alone = [plan for plan in plans if not plan.budget]
        assert alone or d.prefill_tokens >= s.page_size
        least = min(plan.violation_s for plan in [*mixed, *windows, *alone])
        assert d.candidates["violation_s"][d.index] <= 1.1 * least * (1 + 1e-9)


def test_a_first_chunk_is_not_taken_for_the_whole_prompt() -> None:
    """Alone it promises more than any window; but later ones look back on more and the last is small."""
    decodes = np.full(32, 8000)
    s = changed(decode_context=decodes, prefill_new=np.array([8000]), prefill_budget=8000, tbt_slo_s=0.05)
    table = decide(s, Settings("auto", True, LEVELS, max_look_ahead=64), MODEL).candidates
    modes = np.array(table.to_record().mode)
    windows = np.flatnonzero((table["feasible"] > 0) & ((modes == "spatial") | (modes == "reserved")))
    rival = windows[table["tokens_per_s"][windows].argmax()]
    (chunk,) = np.flatnonzero(modes == "chunked")
    first = reference.mixed(s, MODEL, int(table["prefill_tokens"][chunk]), "chunked")
    over = reference.over(s, MODEL, int(table["prefill_tokens"][rival]), first)
    assert table["tokens_per_s"][chunk] == pytest.approx(over.rate)
    assert over.rate < first.rate


def test_temporal_when_all_fits_and_only_that_is_weighed() -> None:
    d = decide(PLAIN, Settings("auto", True, LEVELS), MODEL)
    assert (d.mode, d.reason, d.prefill_tokens, len(d.candidates)) == ("temporal", "fits", 256, 1)


def test_the_slo_test_takes_the_bound_and_the_hosts_time_and_the_wait() -> None:
    upper_s = decide(PLAIN, Settings(), MODEL).upper_s
    assert upper_s == pytest.approx(1.1 * decide(PLAIN, Settings(), MODEL).predicted_s)
    for parts in ({"tbt_slo_s": upper_s}, {"tbt_slo_s": upper_s + 3e-3, "host_overhead_s": 1e-3, "waited_s": 2e-3}):
        fits = changed(**parts)
        assert decide(fits, Settings(), MODEL).reason == "fits"
        tighter = dataclasses.replace(fits, tbt_slo_s=fits.tbt_slo_s - 1e-6)
        assert decide(tighter, Settings(), MODEL).mode in ("chunked", "temporal")
        assert decide(tighter, Settings(), MODEL).prefill_tokens < 256


def test_one_phase_alone_leaves_nothing_to_share() -> None:
    none = np.zeros(0, dtype=np.int64)
    for mode in MODES:
        chosen = Settings(mode, True, LEVELS)
        alone = decide(changed(prefill_new=none, prefill_cached=none), chosen, MODEL)
        assert (alone.mode, alone.reason, alone.prefill_tokens, alone.look_ahead_steps) == ("temporal", "idle", 0, 1)
        assert alone.predicted_s > 0
        # Without decodes the whole budget runs, however small τ.
        prefill = decide(changed(decode_context=none, tbt_slo_s=5e-3, prefill_budget=300), chosen, MODEL)
        assert (prefill.mode, prefill.reason, prefill.prefill_tokens) == ("temporal", "idle", 300)
        assert prefill.largest_gap_s == 0
        # Nor is it predicted, while the device waits.
        assert prefill.predicted_s == 0
        nothing = decide(changed(decode_context=none, prefill_new=none, prefill_cached=none), chosen, MODEL)
        assert (nothing.reason, nothing.prefill_tokens, nothing.predicted_s) == ("idle", 0, 0.0)


def test_a_budget_of_less_than_a_page_is_decode_alone() -> None:
    d = decide(changed(prefill_budget=15, page_size=16), Settings("auto", True, LEVELS), MODEL)
    assert (d.mode, d.reason, d.prefill_tokens) == ("temporal", "idle", 0)


def test_forced_temporal_takes_the_whole_budget_whatever_tau() -> None:
    d = decide(changed(tbt_slo_s=5e-3), Settings("temporal", True, LEVELS), MODEL, Explorer(share=0.9))
    assert (d.mode, d.reason, d.prefill_tokens) == ("temporal", "forced", 256)
    assert d.largest_gap_s > 5e-3


def test_forced_chunked_cuts_to_tau_and_only_as_far_as_needed() -> None:
    d = decide(PLAIN, Settings("chunked"), MODEL)
    assert (d.mode, d.reason, d.prefill_tokens) == ("chunked", "forced", 256)
    tight = changed(tbt_slo_s=decide(PLAIN, Settings("chunked"), MODEL).upper_s * 0.999)
    d = decide(tight, Settings("chunked"), MODEL)
    assert (d.mode, d.reason) == ("chunked", "forced")
    assert 240 <= d.prefill_tokens < 256
    d = decide(changed(tbt_slo_s=5e-3), Settings("chunked"), Analytic(launch_s=0.01))
    assert (d.mode, d.reason) == ("chunked", "least_violation")


@pytest.mark.parametrize("mode", ["spatial", "reserved"])
def test_forced_windows_run_even_where_a_mixed_batch_fits(mode: str) -> None:
    d = decide(PLAIN, Settings(mode, True, LEVELS), MODEL)
    assert (d.mode, d.reason) == (mode, "forced")
    assert set(d.candidates.to_record().mode) == {mode}


@pytest.mark.parametrize("mode", ["spatial", "reserved", "duet"])
def test_forced_windows_fall_back_for_a_reason(mode: str) -> None:
    tight = changed(tbt_slo_s=5e-3)
    no_room = decide(dataclasses.replace(tight, max_look_ahead=0), Settings(mode, True, LEVELS), MODEL)
    assert no_room.reason == "fallback:no_look_ahead"
    no_part = decide(tight, Settings(mode, True, (), fixed_split=MODEL.total_tpcs), MODEL)
    assert no_part.reason == "fallback:no_division"
    for d in (no_room, no_part):
        assert d.mode in ("temporal", "chunked")
        assert d.prefill_tokens > 0
    roomy = decide(changed(max_look_ahead=0), Settings(mode, True, LEVELS), MODEL)
    assert (roomy.mode, roomy.reason, roomy.prefill_tokens) == ("temporal", "fallback:no_look_ahead", 256)


def test_halves_in_turn_are_predicted_as_their_sum() -> None:
    one = Analytic(total_tpcs=1)
    d = decide(changed(max_look_ahead=5, host_overhead_s=1e-3), Settings("spatial"), one)
    assert (d.mode, d.reason, d.decode_tpcs, d.prefill_tpcs) == ("spatial", "forced", 1, 1)
    step = reference.forward(one, [1, 1], [500, 700], 2, 1)
    prefill = reference.forward(one, [d.prefill_tokens], [0], 0, 1)
    assert d.predicted_s == pytest.approx(d.look_ahead_steps * step[0] + prefill[0])
    assert d.upper_s == pytest.approx(d.look_ahead_steps * step[1] + prefill[1])
    assert d.left_s == pytest.approx(prefill[1])
    assert d.largest_gap_s > d.left_s + 1e-3


def test_a_window_on_one_cpu_looks_ahead_as_far_as_it_may() -> None:
    slow = Analytic(total_tpcs=1, token_s=5e-3)
    d = decide(changed(tbt_slo_s=5.0), Settings("spatial", max_look_ahead=8), slow)
    assert d.look_ahead_steps == 8


def test_auto_on_a_device_of_one_partition_never_opens_windows() -> None:
    for tau in (5e-3, 8e-3, 0.1):
        d = decide(changed(tbt_slo_s=tau), Settings("auto", False, LEVELS), MODEL, Explorer(share=0.9))
        assert set(d.candidates.to_record().mode) <= {"temporal", "chunked"}


def test_a_fixed_split_is_the_only_division() -> None:
    tight = changed(tbt_slo_s=6.2e-3)
    spatial = decide(tight, Settings("spatial", True, LEVELS, fixed_split=3), MODEL)
    assert (spatial.decode_tpcs, spatial.prefill_tpcs) == (3, 5)
    reserved = decide(tight, Settings("reserved", True, LEVELS, fixed_split=3), MODEL)
    assert (reserved.decode_tpcs, reserved.prefill_tpcs) == (8, 5)
    duet = decide(tight, Settings("duet", True, LEVELS, fixed_split=3), MODEL)
    assert set(duet.candidates["decode_tpcs"].tolist()) == {3.0, 8.0}


def test_a_wait_left_by_a_window_may_be_paid_by_decode_alone() -> None:
    """40 ms of τ are gone: no chunk fits the rest, a lone decode step does."""
    model = Analytic(token_s=2e-2, weights_s=1e-3, margin=1.0)
    rest = reference.mixed(PLAIN, model, 0, "temporal").upper_s
    s = changed(tbt_slo_s=0.04 + rest + 1e-3, waited_s=0.04)
    d = decide(s, Settings("auto", False), model)
    assert (d.mode, d.reason, d.prefill_tokens) == ("temporal", "best", 0)
    # Also if it cannot keep τ either: another window would pass the wait on to the next iteration.
    late = changed(tbt_slo_s=0.04 + rest - 1e-3, waited_s=0.04)
    for concurrent in (False, True):
        d = decide(late, Settings("auto", concurrent, LEVELS if concurrent else ()), model)
        assert (d.mode, d.reason, d.prefill_tokens) == ("temporal", "least_violation", 0)
        assert d.largest_gap_s == pytest.approx(0.04 + rest)
    # With nothing to pay the least violation carries prefill instead.
    d = decide(changed(tbt_slo_s=rest + 1e-3), Settings("auto", False), model)
    assert (d.reason, d.prefill_tokens > 0) == ("least_violation", True)


def test_one_late_token_is_better_than_two() -> None:
    """The decodes have waited too long already. A window makes the next token sooner, and another late one at its end;
    a mixed batch only the one."""
    model = Analytic(token_s=2e-4, weights_s=5e-3, margin=1.0)
    s = changed(tbt_slo_s=0.01, waited_s=0.03, max_look_ahead=4, after_window_s=0.02)
    d = decide(s, Settings("auto", True, LEVELS), model)
    windows = np.isin(d.candidates["mode"], (SPATIAL, RESERVED))
    assert d.candidates["largest_gap_s"][windows].min() < d.largest_gap_s
    assert (d.mode, d.reason) == ("chunked", "least_violation")


def test_duet_keeps_to_the_articles_constraint() -> None:
    """It takes means and single steps: its plan may exceed τ by the gaps that the table shows."""
    s = changed(tbt_slo_s=6.2e-3, max_look_ahead=2, host_overhead_s=1e-3)
    d = decide(s, Settings("duet", True, LEVELS), MODEL)
    assert (d.mode, d.reason) == ("spatial", "best")
    step = reference.forward(MODEL, [1, 1], [500, 700], 2, d.decode_tpcs, ([256], [0], 0, d.prefill_tpcs))[0]
    assert step <= s.tbt_slo_s
    assert d.largest_gap_s > s.tbt_slo_s
    record = d.candidates.to_record()
    assert record.mode[0] == "temporal"
    assert len(record.mode) == 1 + 2 * len(LEVELS)
    mean_s = decide(PLAIN, Settings("temporal"), MODEL).predicted_s
    assert decide(changed(tbt_slo_s=mean_s), Settings("duet", True, LEVELS), MODEL).reason == "fits"
    assert decide(changed(tbt_slo_s=mean_s), Settings("auto", True, LEVELS), MODEL).reason != "fits"


def test_duet_without_an_allowed_plan_takes_the_least_violation() -> None:
    d = decide(changed(tbt_slo_s=1e-3), Settings("duet", True, LEVELS), MODEL)
    assert d.reason == "least_violation"
    assert d.prefill_tokens > 0


def test_huge_contexts_and_queues_stay_finite() -> None:
    s = Situation(
        decode_context=np.full(256, 1_000_000),
        prefill_new=np.full(3000, 1_000_000),
        prefill_cached=np.full(3000, 1_000_000),
        tbt_slo_s=0.1,
        prefill_budget=16384,
        max_look_ahead=64,
        page_size=64,
    )
    for mode in MODES:
        d = decide(s, Settings(mode, True, (8, 24), max_look_ahead=64), h200())
        assert np.isfinite(d.candidates.matrix).all()
        assert 64 <= d.prefill_tokens <= 16384


def test_the_table_goes_into_the_record_as_it_is() -> None:
    d = decide(changed(tbt_slo_s=6.7e-3), Settings("auto", True, LEVELS), MODEL)
    record = d.candidates.to_record()
    assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record
    assert record.mode[d.index] == d.mode
    assert record.prefill_tokens[d.index] == d.prefill_tokens
    assert record.look_ahead_steps[d.index] == d.look_ahead_steps
    assert record.upper_s[d.index] == d.upper_s
    assert {"temporal", "chunked", "spatial", "reserved"} == set(record.mode)
    assert len(record.mode) == 2 + 2 * len(LEVELS)


def test_windows_that_do_not_yield_what_they_promise_give_way_to_chunks() -> None:
    s = changed(decode_context=np.full(64, 8000), prefill_new=np.array([8000]), prefill_budget=8000, tbt_slo_s=0.05)
    s = dataclasses.replace(s, max_look_ahead=64)
    settings = Settings("auto", True, LEVELS, max_look_ahead=64)
    trusted = decide(s, settings, MODEL)
    assert trusted.mode in ("spatial", "reserved")
    rates = trusted.candidates["tokens_per_s"] * (trusted.candidates["feasible"] > 0)
    is_window = np.isin(trusted.candidates["mode"], (SPATIAL, RESERVED))
    share = rates[~is_window].max() / rates[is_window].max()
    assert 0.0 < share < 1.0
    d = decide(dataclasses.replace(s, window_yield=0.8 * share), settings, MODEL)
    assert d.mode == "chunked"
    promised = d.candidates["tokens_per_s"][np.isin(d.candidates["mode"], (SPATIAL, RESERVED))]
    assert promised.max() == pytest.approx(0.8 * share * rates[is_window].max())
