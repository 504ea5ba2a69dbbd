"""Rank 0's plans for ranks that only say what they have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.xp_plan import measure
from learner import LatencyModel
from sglang_ext.slo import Progress
from sglang_ext.xp.plan import Plan, Retracted, Status
from tests.learner.test_latency import H200, LARGE

leader_module = pytest.importorskip("sglang_ext.compat.xp_leader")
RANKS = 2


class Scheduler:
    """As much of a scheduler as the leader looks at."""

    def __init__(self) -> None:
        self.chunked_prefill_size, self.max_prefill_tokens = 1024, 16384
        self.gracefully_exit = self.paused = False
        self.waiting_queue: list[Any] = []
        self.controller = SimpleNamespace(model=LatencyModel(LARGE, H200))
        self.kept: list[str] = []

    def keep(self, req: Any) -> None:
        self.kept.append(req.rid)

    def ask(self, rid: str, tokens: int, arrival_s: float = 0.0, most_new: int = 100) -> None:
        params = SimpleNamespace(max_new_tokens=most_new)
        progress = Progress(arrival_s, ttft_slo_s=1e6, tbt_slo_s=0.1)
        self.waiting_queue.append(
            SimpleNamespace(
                rid=rid,
                origin_input_ids=range(tokens),
                output_ids=[],
                sampling_params=params,
                conflux=progress,
                xp_request=rid,
            )
        )


def status(*context: int, free: int = 10_000, retracted: tuple[Retracted, ...] = ()) -> Status:
    return Status(np.array(context, dtype=np.int64), 0.1, free, 10_000, 50, list(retracted))


def leader() -> tuple[Scheduler, Any]:
    scheduler = Scheduler()
    return scheduler, leader_module.Leader(scheduler, RANKS)


def test_prompts_are_taken_in_order_and_each_token_once() -> None:
    scheduler, plans = leader()
    lengths = {"a": 3000, "b": 10, "c": 700}
    for at, (rid, tokens) in enumerate(lengths.items()):
        scheduler.ask(rid, tokens, arrival_s=float(at))
    done: dict[str, int] = {}
    owners: dict[str, int] = {}
    for _ in range(10):
        plan: Plan = plans.plan([status(), status()])
        for admission in plan.admissions:
            assert admission.request == admission.rid
            assert len(admission.tokens) == lengths[admission.rid]
            owners[admission.rid] = admission.owner
        assert sum(sum(chunk.pieces) for chunk in plan.chunks) <= 2 * 1024
        for chunk in plan.chunks:
            assert chunk.start == done.get(chunk.rid, 0)
            done[chunk.rid] = chunk.end
        if not plans.busy:
            break
    assert done == lengths
    assert list(done) == ["a", "b", "c"]
    assert scheduler.kept == [rid for rid, owner in owners.items() if owner == 0]
    assert plans.plan([status(), status()]) == Plan()
    assert plans.idle


def test_a_prompt_without_room_waits_and_nobody_passes_it() -> None:
    scheduler, plans = leader()
    scheduler.ask("large", 4000, arrival_s=0.0)
    scheduler.ask("small", 10, arrival_s=1.0)
    assert plans.plan([status(free=5000), status(free=1500)]).admissions == []
    assert plans.busy
    plan = plans.plan([status(free=7000), status(free=2500)])
    assert [admission.rid for admission in plan.admissions] == ["large"]
    assert plan.admissions[0].owner == 0


def test_who_was_retracted_begins_again_first_and_where_it_is_known() -> None:
    scheduler, plans = leader()
    scheduler.ask("new", 10)
    back = Retracted("old", list(range(500)))
    plan = plans.plan([status(), status(free=100, retracted=(back,))])
    assert plan.admissions == []
    assert plans.busy
    plan = plans.plan([status(), status()])
    assert [(one.rid, one.owner, one.request) for one in plan.admissions][:1] == [("old", 1, None)]
    assert {chunk.rid for chunk in plan.chunks} == {"old", "new"}


def test_who_has_outgrown_its_rank_is_aborted() -> None:
    _, plans = leader()
    plan = plans.plan([status(), status(retracted=(Retracted("huge", list(range(9000))),))])
    assert plan.aborted == ["huge"]
    assert not plans.busy


def test_the_aborted_are_forgotten_in_whatever_state() -> None:
    scheduler, plans = leader()
    scheduler.ask("a-1", 5000)
    assert plans.plan([status(), status()]).chunks[0].rid == "a-1"
    plans.abort("a-")
    plan = plans.plan([status(), status()])
    assert plan.aborted == ["a-"]
    assert plan.chunks == []
    assert not plans.busy


def test_nothing_is_planned_while_paused_but_messages_go_out() -> None:
    scheduler, plans = leader()
    scheduler.ask("a", 100)
    scheduler.paused = True
    plans.share("pause")
    plan = plans.plan([status(5), status()])
    assert (plan.shared, plan.admissions, plan.chunks) == (["pause"], [], [])
    assert not plans.idle
    plans.plan([status(5), status()])
    assert plans.idle
    scheduler.paused = False
    assert plans.plan([status(5), status()]).chunks


def test_a_tight_target_leaves_less_room_for_prefill_beside_decodes() -> None:
    taken = []
    for slo_s in (0.02, 0.2):
        scheduler, plans = leader()
        scheduler.ask("a", 4000)
        there = status(*[2000] * 32)
        there.tbt_slo_s = slo_s
        taken.append(sum(sum(chunk.pieces) for chunk in plans.plan([there, status()]).chunks))
    assert 0 < taken[0] < taken[1]


def test_the_benchmark_plans_beside_as_long_a_queue_as_it_says() -> None:
    found = measure(2, queued=30, plans=12, model=LatencyModel(LARGE, H200))
    assert (found["ranks"], found["queued"], found["plans"]) == (2, 30, 12)
    assert found["admitted"] >= 2
    assert 0 < found["median_ms"] <= found["p99_ms"] <= found["max_ms"]
