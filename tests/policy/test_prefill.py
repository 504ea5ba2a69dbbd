from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.prefill import Offer, offer
from sglang_ext.policy.types import Situation
from tests.policy import reference
from tests.policy.analytic import situations


def situation(new: list[int], budget: int, page: int = 1) -> Situation:
    waiting = np.array(new, dtype=np.int64)
    return Situation(np.zeros(0, np.int64), waiting, np.zeros_like(waiting), 0.1, budget, 0, page)


def taken_of(offered: Offer, budget: int) -> list[int]:
    """Tokens of each prompt that a budget reaches, as the split says."""
    (whole,), (part,) = (of.tolist() for of in offered.split([budget]))
    assert offered.prompts(budget) == whole
    taken = offered.new[:whole].tolist() + ([part] if part else [])
    assert offered.tokens(budget) == sum(taken)
    return taken


@given(situations(), st.integers(0, 800))
def test_composition_is_that_of_admission(s: Situation, budget: int) -> None:
    offered = offer(s)
    budget = min(budget // s.page_size * s.page_size, offered.most)
    taken = taken_of(offered, budget)
    expected = reference.admit(s.prefill_new.tolist(), budget, s.page_size)
    assert taken == expected[: len(taken)]
    assert not any(expected[len(taken) :])


@given(situations(), st.integers(0, 800))
def test_what_is_left_after_a_budget_is_the_rest(s: Situation, budget: int) -> None:
    offered = offer(s)
    budget = min(budget // s.page_size * s.page_size, offered.most - s.page_size)
    if budget < 0:
        return
    left = offered.after(budget)
    before = taken_of(offered, budget)
    assert left.most == offered.most - budget
    assert sum(before) + left.tokens(left.most) == offered.tokens(offered.most)
    assert (left.new >= 1).all()
    whole = offered.prompts(budget)
    assert (left.new + left.cached == offered.new[whole:] + offered.cached[whole:]).all()
    assert left.cached[0] == offered.cached[whole] + (budget - offered.starts[whole])


@given(situations())
def test_the_whole_offer_is_the_least_budget_that_takes_all_that_the_largest_can(s: Situation) -> None:
    offered = offer(s)
    assert offered.most == reference.largest_budget(s)
    assert offered.most <= s.prefill_budget
    assert offered.most % s.page_size == 0
    new = s.prefill_new.tolist()
    taken = sum(reference.admit(new, offered.most, s.page_size))
    assert taken == sum(reference.admit(new, s.prefill_budget // s.page_size * s.page_size, s.page_size))
    if offered.most:
        assert sum(reference.admit(new, offered.most - s.page_size, s.page_size)) < taken


def test_a_budget_of_less_than_a_page_buys_nothing() -> None:
    assert offer(situation([5, 100], budget=15, page=16)).most == 0


def test_a_prompt_may_end_off_a_page_but_a_chunk_may_not() -> None:
    offered = offer(situation([20, 100], budget=96, page=16))
    assert [taken_of(offered, budget) for budget in (0, 16, 32, 96)] == [[], [16], [20], [20, 64]]


def test_only_the_reachable_part_of_a_long_queue_is_looked_at() -> None:
    offered = offer(situation([100] * 5000, budget=250))
    assert offered.new.tolist() == [100, 100, 100]
    assert offered.most == 250
