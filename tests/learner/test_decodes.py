from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from learner.decodes import DecodeBatch
from learner.requests import Requests
from tests.learner.test_outlook import BALANCED, PAIR_BYTES, contexts
from tests.learner.test_roofline import SHAPE


@given(contexts, st.lists(st.floats(-10.0, 250_000.0), min_size=1, max_size=6))
def test_beyond_counts_and_sums(running: list[int], limits: list[float]) -> None:
    count, total = DecodeBatch(running).beyond(np.array(limits))
    assert count.tolist() == [sum(c > limit for c in running) for limit in limits]
    assert total.tolist() == [sum(c for c in running if c > limit) for limit in limits]


@given(contexts, st.integers(0, 300))
def test_excess_is_that_of_every_decode(running: list[int], grown: int) -> None:
    requests = Requests(SHAPE)
    one_by_one = [
        sum(float(requests.excess(1.0, np.array(c + grown + 1.0), np.array(pair))) for c in running)
        for pair in PAIR_BYTES
    ]
    np.testing.assert_allclose(
        DecodeBatch(running).excess(requests, np.array(PAIR_BYTES), grown), one_by_one, rtol=1e-9
    )
    assert BALANCED.tpcs == len(PAIR_BYTES)
