"""What deciding has predicted is kept for the record only if the batch that ran is the one that was weighed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from learner.device import DeviceProfile
from learner.latency import LatencyModel
from learner.shape import ModelShape
from sglang_ext.iteration import foretold
from sglang_ext.policy.decide import decide
from sglang_ext.policy.types import Settings, Situation
from tests.policy import reference
from tests.policy.analytic import situations

SHAPE = ModelShape(name="m", layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocabulary=1000)
MODEL = LatencyModel(SHAPE, DeviceProfile.shipped("h200"))


def batch_of(situation: Situation, budget: int) -> tuple[list[int], list[int]]:
    """(q, c) of the mixed batch that SGLang's admission makes of a budget."""
    taken = reference.admit(situation.prefill_new.tolist(), budget, situation.page_size)
    prompts = [(q, c) for q, c in zip(taken, situation.prefill_cached.tolist(), strict=True) if q]
    decodes = [(1, c) for c in situation.decode_context.tolist()]
    q, c = zip(*prompts, *decodes, strict=True)
    return list(q), list(c)


@given(situations(), st.sampled_from(["temporal", "chunked"]))
def test_what_was_decided_is_not_predicted_again(situation: Situation, mode: str) -> None:
    decision = decide(situation, Settings(mode=mode), MODEL)
    assume(len(situation.decode_context) and decision.prefill_tokens)
    q, c = batch_of(situation, decision.prefill_tokens)
    kept = foretold(decision, situation, q, c, ())
    assert kept is not None
    whole = reference.admit(situation.prefill_new.tolist(), decision.prefill_tokens, situation.page_size)
    goes_on = any(0 < taken < tokens for taken, tokens in zip(whole, situation.prefill_new.tolist(), strict=True))
    anew = MODEL.predict(MODEL.terms(q, c, len(q) - goes_on, MODEL.total_tpcs))
    for one, other in zip(kept, anew, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


@given(situations(), st.data())
def test_another_batch_is_predicted_for_itself(situation: Situation, data: st.DataObject) -> None:
    decision = decide(situation, Settings(mode="chunked"), MODEL)
    assume(len(situation.decode_context) and decision.prefill_tokens)
    q, c = batch_of(situation, decision.prefill_tokens)
    prompts = len(q) - len(situation.decode_context)
    at = data.draw(st.integers(0, prompts - 1))
    change = data.draw(st.sampled_from(["longer", "cached", "fewer"]))
    if change == "longer":
        q[at] += 1
    elif change == "cached":
        c[at] += 1
    else:
        del q[at], c[at]
    assert foretold(decision, situation, q, c, ()) is None


@pytest.mark.parametrize(("tokens", "kept"), [(100, True), (101, False)])
def test_the_bound_on_a_batch_without_a_graph_is_not_that_of_its_forward(tokens: int, kept: bool) -> None:
    base = Situation(np.full(1, 50), np.array([tokens - 1]), np.zeros(1, np.int64), 10.0, 512, 0)
    situation = dataclasses.replace(base, eager_launch_s=0.01)
    decision = decide(situation, Settings(mode="temporal", graph_tokens=(64, 100)), MODEL)
    found = foretold(decision, situation, *batch_of(situation, decision.prefill_tokens), (64, 100))
    assert (found is not None) is kept


def test_a_window_that_is_mixed_after_all_is_predicted_as_what_it_became() -> None:
    situation = Situation(np.full(4, 50), np.array([300]), np.zeros(1, np.int64), 10.0, 512, 8)
    decision = decide(situation, Settings(mode="spatial"), MODEL)
    assert decision.mode == "spatial"
    q, c = batch_of(situation, decision.prefill_tokens)
    assert foretold(decision, situation, q, c, ()) is None
    assert foretold(dataclasses.replace(decision, mode="chunked"), situation, q, c, ()) is not None
