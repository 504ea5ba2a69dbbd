"""What makes a decision quick does not change it."""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.decision import CASES, learnt_model, situation
from sglang_ext.policy.decide import decide
from sglang_ext.policy.explore import Explorer
from sglang_ext.policy.types import Decision, Settings, Situation
from sglang_ext.policy.weigh import Weighing
from tests.policy.analytic import Listed, corrected, h200, models, situations
from tests.policy.test_decide import any_settings

real = st.integers(0, 5).map(lambda seed: corrected(seed) if seed else h200())


@settings(max_examples=150)
@given(
    situations(),
    models | real,
    st.sets(st.integers(1, 40), min_size=1, max_size=4),
    st.booleans(),
)
def test_windows_that_are_not_weighed_could_not_have_won(s: Situation, model, levels, exploring: bool) -> None:
    def decided() -> list[Decision]:
        explorer = Explorer(share=0.9, slack=0.0, seed=3) if exploring else None
        return [decide(s, Settings("auto", True, tuple(sorted(levels))), model, explorer) for _ in range(3)]

    pruned = decided()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weighing, "windows_lose", lambda self: False)
        weighed = decided()
    for one, other in zip(pruned, weighed, strict=True):
        assert one.candidates.plan(one.index) == other.candidates.plan(other.index)
        assert one.reason == other.reason


@settings(max_examples=100)
@given(
    situations(most_decodes=40, most_waiting=12, tokens=3000),
    any_settings,
    real,
    st.floats(0.3, 3.0),
)
def test_decisions_are_those_by_the_models_definition(s: Situation, chosen: Settings, model, scale: float) -> None:
    """The whole decision, with every forward's requests listed one by one."""
    chosen = dataclasses.replace(chosen, levels=tuple(4 * level for level in chosen.levels))
    s = dataclasses.replace(s, tbt_slo_s=scale * decide(s, Settings("temporal"), model).upper_s or 0.1)
    d, slow = decide(s, chosen, model), decide(s, chosen, Listed(model))
    assert (d.mode, d.reason) == (slow.mode, slow.reason)
    assert d.candidates.plan(d.index) == pytest.approx(slow.candidates.plan(slow.index), rel=1e-8)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_room_that_is_used_again_keeps_nothing_of_the_last_decision(case) -> None:
    """The same situations with one model for all and with a new one for each; and no cycles for the collector."""
    numbers, model = np.random.default_rng(5), learnt_model()
    for count in (3, 40, 1, 17, 0, 9):
        s = situation(case, 8 * count, count, numbers)
        gc.collect()
        d = decide(s, case.settings, model)
        assert gc.collect() == 0
        assert d.candidates.matrix.tolist() == decide(s, case.settings, learnt_model()).candidates.matrix.tolist()
