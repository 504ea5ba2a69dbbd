from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_ext.policy.chunk import COARSE, coarse_budgets, fitting_budgets, largest_chunk, least_budget
from sglang_ext.policy.forwards import Batch, Forwards
from sglang_ext.policy.prefill import offer
from sglang_ext.policy.types import Situation
from tests.policy import reference
from tests.policy.analytic import Analytic, corrected, h200, models, situations


def search(
    s: Situation, model, limit_s: float, tolerance_s: float = 0.0, least: int = 1, fitting=(), **options
) -> tuple[Batch, int]:
    """The chunk found, and how many further calls of the model it took."""
    offered = offer(s)
    forwards = Forwards(s, offered, model)
    calls = []

    def predict(budgets):
        calls.append(budgets)
        return forwards.mixed(budgets)

    batches = forwards.mixed(coarse_budgets(offered, least_budget(offered, least), fitting))
    return largest_chunk(batches, predict, offered, limit_s, tolerance_s, fitting=fitting, **options), len(calls)


@settings(deadline=None)
@given(situations(most_waiting=3, tokens=12), models, st.floats(-0.2, 1.0))
def test_few_pages_are_searched_exactly(s: Situation, model: Analytic, position: float) -> None:
    plans = reference.all_mixed(s, model)
    assume(2 <= len(plans) <= COARSE + 1)
    first_s, last_s = plans[0].upper_s, plans[-1].upper_s
    limit_s = first_s + position * (last_s - first_s) if last_s > first_s else 0.9 * last_s
    assume(last_s > limit_s)
    found, calls = search(s, model, limit_s)
    keep = [plan.budget for plan in plans[:-1] if plan.upper_s <= max(limit_s, first_s)]
    assert calls == 0
    assert found.budget == max(keep)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 1500), st.integers(0, 20000)), min_size=1, max_size=12),
    st.integers(0, 64),
    st.floats(0.0, 1.0),
    st.sampled_from([1, 16]),
    st.one_of(models, st.integers(0, 3).map(lambda seed: corrected(seed) if seed else h200())),
)
def test_many_pages_are_searched_closely(waiting, decodes, position, page, model) -> None:
    s = Situation(
        np.full(decodes, 1000),
        np.array([new for new, _ in waiting]),
        np.array([cached // page * page for _, cached in waiting]),
        0.1,
        1600,
        0,
        page,
    )
    most = reference.largest_budget(s)
    assume(most // page > COARSE + 1)
    forwards = Forwards(s, offer(s), model)
    budgets = np.arange(page, most, page)
    upper_s = np.array(forwards.mixed(budgets.tolist()).upper_s)
    whole_s = forwards.mixed([most]).upper_s[0]
    limit_s = float(upper_s[0]) + position * (whole_s - float(upper_s[0])) * 0.999
    assume(limit_s < whole_s)
    found, calls = search(s, model, limit_s)
    budget = found.budget
    assert calls <= 1
    assert budget % page == 0
    actual = reference.mixed(s, model, budget, "chunked")
    assert offer(s).tokens(budget) == sum(reference.admit(s.prefill_new.tolist(), budget, page))
    assert actual.upper_s <= limit_s * (1 + 1e-9)
    assert actual.upper_s == pytest.approx(found.upper_s)
    best = int(budgets[upper_s <= limit_s].max())
    if isinstance(model, Analytic) or model.version == 0:
        assert budget >= 0.94 * best - page


def test_if_even_a_page_is_too_much_the_smallest_violation_is_taken_up_to_the_tolerance() -> None:
    model = Analytic(token_s=1e-4, weights_s=1e-3, pair_s=0.0, margin=1.0)
    s = Situation(np.full(20, 100), np.array([500]), np.array([0]), 1e-3, 500, 0)
    page_s = reference.mixed(s, model, 1, "chunked").upper_s
    assert search(s, model, page_s / 2)[0].budget == 1
    found, _ = search(s, model, page_s / 2, tolerance_s=10.5e-4)
    assert found.budget == 11


def test_the_second_look_is_spared_where_no_chunk_is_worth_it() -> None:
    s = Situation(np.full(4, 100), np.array([8000]), np.array([0]), 0.1, 8000, 0)
    limit_s = reference.mixed(s, Analytic(), 3000, "chunked").upper_s
    asked = []
    for answer, calls in ((True, 1), (False, 0)):
        found, made = search(s, Analytic(), limit_s, worth=lambda tokens, answer=answer: asked.append(tokens) or answer)
        assert made == calls
        assert reference.mixed(s, Analytic(), found.budget, "chunked").upper_s <= limit_s
    assert min(asked) >= 3000


def test_a_bend_between_two_looks_is_found() -> None:
    """Up to the knee tokens are free, since the weights must be read anyway; τ allows just that."""
    bent = Analytic(weights_s=0.05, pair_s=0.0)
    s = Situation(np.full(4, 100), np.array([8000]), np.array([0]), 0.1, 8000, 0)
    knee = 2496
    limit_s = reference.mixed(s, bent, knee, "chunked").upper_s
    assert reference.mixed(s, bent, knee + 1, "chunked").upper_s > limit_s
    found, calls = search(s, bent, limit_s)
    assert calls == 1
    assert 0.98 * knee <= found.budget <= knee


graphs = st.sets(st.integers(1, 90).map(lambda sixteens: 16 * sixteens), min_size=1, max_size=80)


@settings(deadline=None, max_examples=60)
@given(graphs, st.integers(0, 64), st.integers(2, 3000), st.sampled_from([1, 16]), st.floats(0.0, 0.999), models)
def test_chunks_fill_up_a_graph_where_there_is_one(sizes, decodes, prompt, page, position, model) -> None:
    s = Situation(np.full(decodes, 1000), np.array([prompt]), np.array([0]), 0.1, 4096, 0, page)
    most, least = reference.largest_budget(s), 32
    fitting = fitting_budgets(tuple(sorted(sizes)), decodes, page)
    first = least_budget(offer(s), least)
    assume(first < most)
    first_s, whole_s = (reference.mixed(s, model, budget, "chunked").upper_s for budget in (first, most))
    limit_s = first_s + position * (whole_s - first_s)
    assume(limit_s < whole_s)
    found, calls = search(s, model, limit_s, least=least, fitting=fitting)
    assert calls <= 1
    assert first <= found.budget < most
    fits = [budget for budget in fitting if first < budget < most]
    keep = [budget for budget in fits if reference.mixed(s, model, budget, "chunked").upper_s <= limit_s]
    if keep and keep[-1] < fitting[-1]:
        assert found.budget == max(keep)
    assert found.budget in (*fits, first) or not fitting or found.budget > fitting[-1]
    assert reference.mixed(s, model, found.budget, "chunked").upper_s <= max(limit_s, first_s) * (1 + 1e-9)


def test_budgets_that_fill_a_graph_are_whole_pages_that_leave_room_for_the_decodes() -> None:
    assert fitting_budgets((64, 128, 256), 40, 1) == (24, 88, 216)
    assert fitting_budgets((64, 128, 256), 40, 16) == (16, 80, 208)
    assert fitting_budgets((64, 128), 64, 1) == (64,)
    assert fitting_budgets((), 64, 1) == ()


def test_what_no_graph_holds_is_bound_by_its_launch_too() -> None:
    """While the host launches a batch kernel by kernel, the tokens of the batch before it wait."""
    graphs = (256, 512)
    s = Situation(np.full(4, 100), np.array([8000]), np.array([0]), 0.1, 8000, 0, eager_launch_s=0.03)
    offered, model = offer(s), Analytic()
    plain, late = Forwards(s, offered, model), Forwards(s, offered, model, graphs)
    budgets = [0, 252, 508, 509, 4000, 8000]
    without = Forwards(replace(s, eager_launch_s=0.0), offered, model, graphs).mixed(budgets)
    found = late.mixed(budgets)
    assert found.mean_s == without.mean_s
    added = [round(a - b, 9) for a, b in zip(found.upper_s, without.upper_s, strict=True)]
    # A batch that ends before the next is launched holds nothing up: then the host sets the pace.
    assert added == [0.0, 0.0, 0.0, *(0.03 * (without.upper_s[at] > 0.03) for at in (3, 4, 5))]
    assert added[-1] == 0.03
    # Without graphs every batch with prefill is launched so; without decodes nobody waits.
    assert plain.mixed([0, 8000]).upper_s[1] == pytest.approx(without.upper_s[5] + 0.03)
    nobody = replace(s, decode_context=np.empty(0, dtype=np.int64))
    assert Forwards(nobody, offered, model).mixed([8000]).upper_s[0] < found.upper_s[5] - 0.03
