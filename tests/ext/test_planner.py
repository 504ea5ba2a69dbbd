from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.compat.planner import LONGEST_TTFT_S, QueueOrder, queue_order
from sglang_ext.compat.scheduler import ConfluxScheduler
from sglang_ext.policy.queue import order_queue, prefill_alone_s
from sglang_ext.slo import Progress
from tests.policy.analytic import h200

MODEL = h200()
tokens, seconds = st.integers(1, 50_000), st.floats(0.0, 100.0)


def expected(waiting, now_s: float) -> list[int]:
    """What the rules say of the requests as they are now."""
    progress = [req.conflux for req in waiting]
    cached = np.array([one.cached for one in progress], dtype=np.int64)
    total = np.array([len(req.origin_input_ids) + len(req.output_ids) for req in waiting], dtype=np.int64)
    uncached = np.maximum(total - cached, 1)
    arrival_s = np.array([one.arrival_s for one in progress])
    ttft_slo_s = np.array([min(one.ttft_slo_s, LONGEST_TTFT_S) for one in progress])
    return order_queue(now_s, arrival_s, ttft_slo_s, uncached, prefill_alone_s(MODEL, uncached, cached)).tolist()


def begins_again(req) -> None:
    """What the scheduler does when a request is put into the queue once more."""
    ConfluxScheduler.note(SimpleNamespace(), req)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(seconds, st.floats(0.1, 100.0), tokens), min_size=1, max_size=12), st.data())
def test_what_is_kept_of_requests_gives_the_order_that_they_have_now(queue, data) -> None:
    waiting = [
        SimpleNamespace(origin_input_ids=range(length), output_ids=[], conflux=Progress(arrival_s, ttft_slo_s, 0.1))
        for arrival_s, ttft_slo_s, length in queue
    ]
    assert queue_order(waiting, MODEL, 100.0) == expected(waiting, 100.0)
    # The cache finds more of one, another begins again with what it had made, a third arrives, and time goes on.
    one, other = (data.draw(st.sampled_from(waiting)) for _ in range(2))
    one.conflux.cached = data.draw(st.integers(0, len(one.origin_input_ids)))
    other.output_ids = range(data.draw(st.integers(1, 500)))
    begins_again(other)
    waiting.append(SimpleNamespace(origin_input_ids=range(300), output_ids=[], conflux=Progress(99.0, 2.0, 0.1)))
    now_s = data.draw(st.floats(100.0, 200.0))
    assert queue_order(waiting, MODEL, now_s) == expected(waiting, now_s)


def test_a_queue_is_ordered_anew_when_somebody_joins_or_time_has_passed() -> None:
    asked: list[list[str]] = []

    def order(queue: list[str]):
        def find() -> list[int]:
            asked.append(list(queue))
            return sorted(range(len(queue)), key=queue.__getitem__)

        return find

    kept = QueueOrder()

    def of(queue: list[str], now_s: float) -> list[str]:
        return kept.of(queue, now_s, order(queue))

    assert of(["c", "a"], 0.0) == ["a", "c"]
    assert of(["a", "c"], 0.01) == ["a", "c"]
    assert len(asked) == 1
    assert of(["a", "c", "b"], 0.02) == ["a", "b", "c"]
    assert of(["b", "c"], 0.03) == ["b", "c"]
    assert len(asked) == 2
    assert of(["c", "a"], 0.04) == ["a", "c"]  # one left, one joined
    assert len(asked) == 3
    assert of(["a", "c"], 0.2) == ["a", "c"]
    assert len(asked) == 4
