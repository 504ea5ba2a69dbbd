from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.decide import decide
from sglang_ext.policy.explore import Explorer
from sglang_ext.policy.types import MODES, CandidateTable, Settings, Situation
from tests.policy.analytic import Analytic

ROOMY = Situation(
    decode_context=np.array([500, 700]),
    prefill_new=np.array([300]),
    prefill_cached=np.array([0]),
    tbt_slo_s=0.1,
    prefill_budget=256,
    max_look_ahead=8,
)
AUTO = Settings("auto", True, (2, 4, 6))


def table(modes: list[int], gaps: list[float]) -> CandidateTable:
    matrix = np.ones((len(CandidateTable.COLUMNS), len(modes)))
    matrix[CandidateTable.COLUMNS.index("mode")] = modes
    matrix[CandidateTable.COLUMNS.index("largest_gap_s")] = gaps
    return CandidateTable(matrix)


@given(st.floats(0.0, 0.5), st.integers(0, 1000), st.integers(1, 600))
def test_the_share_is_bounded_at_all_times(share, seed, turns) -> None:
    explorer, due = Explorer(share=share, seed=seed), 0
    for turn in range(1, turns + 1):
        due += explorer.due()
        assert due <= share * turn + 1e-6


def test_the_share_is_used_and_not_at_regular_intervals() -> None:
    explorer = Explorer(share=0.02, seed=3)
    turns = np.flatnonzero([explorer.due() for _ in range(20_000)])
    assert 380 <= len(turns) <= 400
    assert len(set(np.diff(turns).tolist())) > 5
    assert np.diff(turns).min() >= 1


def test_what_is_known_is_tried_ever_more_seldom_and_not_forgotten() -> None:
    plans, explorer = table([0, 2, 3], [0.01] * 3), Explorer(share=0.02, seed=4)

    def tried(iterations: int) -> int:
        return sum(explorer.due() and explorer.pick(plans, 0, 0.1) is not None for _ in range(iterations))

    first, later, last = tried(1000), tried(9000) / 9, tried(40_000) / 40
    # All modes within a thousand iterations, more than once.
    assert min(explorer.tried[2:]) >= 4 <= first
    assert first > 1.5 * later
    assert 0.1 * first < last < 0.5 * first


def test_the_same_seed_explores_alike_and_another_does_not() -> None:
    def turns(seed: int) -> list[bool]:
        explorer = Explorer(share=0.1, seed=seed)
        return [explorer.due() for _ in range(500)]

    assert turns(1) == turns(1)
    assert turns(1) != turns(2)


def test_only_safe_plans_of_other_modes_are_tried_the_rarest_mode_first() -> None:
    plans = table([0, 2, 2, 3, 3, 1], [0.05, 0.079, 0.081, 0.02, 0.2, 0.05])
    explorer = Explorer(slack=0.2)
    assert {explorer.pick(plans, 0, 0.1) for _ in range(60)} == {1, 3, 5}
    assert explorer.tried[0] == 0
    assert max(explorer.tried[1:]) - min(explorer.tried[1:]) <= 1


def test_a_mode_is_tried_where_it_comes_close_to_its_best() -> None:
    plans = table([0, 2, 2, 2, 3], [0.01] * 5)
    plans.matrix[CandidateTable.COLUMNS.index("tokens_per_s")] = [5.0, 1.0, 0.9, 0.5, 0.1]
    explorer = Explorer()
    assert {explorer.pick(plans, 0, 0.1) for _ in range(60)} == {1, 2, 4}


def test_nothing_is_tried_without_slack_in_the_chosen_plan() -> None:
    plans = table([0, 2], [0.09, 0.02])
    assert Explorer(slack=0.2).pick(plans, 0, 0.1) is None
    assert Explorer(slack=0.05).pick(plans, 0, 0.1) == 1


def test_a_plan_that_its_own_constraint_forbids_or_without_prefill_is_not_tried() -> None:
    plans = table([0, 2, 0], [0.05, 0.02, 0.01])
    plans.matrix[CandidateTable.COLUMNS.index("feasible"), 1] = 0
    assert Explorer().pick(plans, 0, 0.1) is None
    plans.matrix[CandidateTable.COLUMNS.index("feasible"), 1] = 1
    plans.matrix[CandidateTable.COLUMNS.index("prefill_tokens"), 1] = 0
    assert Explorer().pick(plans, 0, 0.1) is None


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_must_be_one(share: float) -> None:
    with pytest.raises(ValueError, match="share and slack"):
        Explorer(share=share)


def test_auto_explores_both_kinds_of_windows_within_the_share() -> None:
    explorer = Explorer(share=0.05, seed=1)
    decisions = [decide(ROOMY, AUTO, Analytic(), explorer) for _ in range(1000)]
    explored = [d for d in decisions if d.reason == "explore"]
    assert 15 <= len(explored) <= 50
    assert {d.mode for d in explored} == {"spatial", "reserved"}
    assert all(d.largest_gap_s <= 0.08 for d in explored)
    assert {(d.mode, d.reason) for d in decisions if d.reason != "explore"} == {("temporal", "fits")}


@pytest.mark.parametrize(
    "chosen",
    [dataclasses.replace(AUTO, explore=False), dataclasses.replace(AUTO, concurrent=False)]
    + [dataclasses.replace(AUTO, mode=mode) for mode in (*MODES, "duet")],
)
def test_nothing_else_explores(chosen: Settings) -> None:
    explorer = Explorer(share=0.9)
    assert all(decide(ROOMY, chosen, Analytic(), explorer).reason != "explore" for _ in range(50))


def test_no_window_is_explored_without_room_for_look_ahead() -> None:
    explorer = Explorer(share=0.9)
    cramped = dataclasses.replace(ROOMY, max_look_ahead=0)
    assert all(decide(cramped, AUTO, Analytic(), explorer).reason == "fits" for _ in range(50))
