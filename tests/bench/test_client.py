"""The load client against a server whose timing is known."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.client import replay
from bench.plan import PlannedRequest, make_plan
from learner.traces import TraceRequest
from sglang_ext.served import LoadResult
from tests.bench.stub import Script, stub_server

SLACK_S = 0.08  # what a busy machine may add to a sleep


def load(
    script: Callable[[dict[str, Any]], Script], plan: list[PlannedRequest], deadline_s: float | None = None
) -> tuple[LoadResult, list[dict[str, Any]]]:
    async def run() -> tuple[LoadResult, list[dict[str, Any]]]:
        async with stub_server(script) as (url, bodies):
            return await replay(url, plan, deadline_s=deadline_s), bodies

    return asyncio.run(run())


def request(arrival_s: float = 0.0, output_tokens: int = 3) -> PlannedRequest:
    return PlannedRequest(arrival_s=arrival_s, input_ids=[1, 2, 3], output_tokens=output_tokens)


def test_gaps_are_those_of_the_server() -> None:
    result, bodies = load(lambda _: Script([0.2, 0.1, 0.3], [1, 1, 1]), [request()])
    (only,) = result.requests
    assert only.error is None
    assert only.ttft_s is not None
    assert 0.2 <= only.ttft_s < 0.2 + SLACK_S
    assert only.gaps_s == pytest.approx([0.1, 0.3], abs=SLACK_S)
    assert only.output_tokens == 3
    assert only.burst_events == 0
    assert only.tpot_s == pytest.approx(0.2, abs=SLACK_S)
    assert bodies == [request().body()]
    assert bodies[0]["stream"] is True
    assert bodies[0]["sampling_params"]["ignore_eos"] is True


def test_a_burst_is_seen_and_does_not_shorten_the_gap() -> None:
    result, _ = load(lambda _: Script([0.0, 0.3], [1, 4]), [request(output_tokens=5)])
    (only,) = result.requests
    assert only.burst_events == 1
    assert only.gaps_s == pytest.approx([0.3], abs=SLACK_S)
    assert result.summary(2.0, 0.1).burst_events == 1


def test_the_load_is_open_and_lateness_is_measured() -> None:
    plan = [request(0.0), request(0.15), request(0.3)]
    result, bodies = load(lambda _: Script([0.5, 0.0, 0.0], [1, 1, 1]), plan)
    assert len(bodies) == 3
    for planned, got in zip(plan, result.requests, strict=True):
        # The event loop wakes sleepers up to its clock's resolution early.
        assert got.sent_s >= planned.arrival_s - 1e-3
        assert -1e-3 <= got.lateness_s < SLACK_S
    # All were running at once: none waited for the one before.
    assert result.requests[2].sent_s < result.requests[0].end_s


def test_a_blocked_client_reports_its_lag() -> None:
    def script(_: dict[str, Any]) -> Script:
        time.sleep(0.3)  # the stub shares the client's loop, so this holds the client up
        return Script([0.0], [3])

    result, _ = load(script, [request(0.0), request(0.1)])
    assert result.max_client_lag_s > 0.15
    assert max(r.lateness_s for r in result.requests) > 0.1


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (Script([], [], status=400), "HTTP 400"),
        (Script([0.0], [1], error="out of room"), "out of room"),
        (Script([0.0], [1]), "1 of 3 tokens"),
        (Script([0.0], [3], finish={"type": "abort"}), "abort"),
        (Script([0.0], [1], finish=None, cut_off=True), ""),
        (Script([], []), "without a last event"),
    ],
)
def test_failures_are_counted_with_their_reason(script: Script, complaint: str) -> None:
    plan = [request(), request(0.05)]

    def answer(body: dict[str, Any]) -> Script:
        return script if body["input_ids"] == [9] else Script([0.0, 0.0], [1, 2])

    bad = PlannedRequest(arrival_s=0.02, input_ids=[9], output_tokens=3)
    result, _ = load(answer, [plan[0], bad, plan[1]])
    assert [r.ok for r in result.requests] == [True, False, True]
    assert complaint in str(result.requests[1].error)
    summary = result.summary(2.0, 1.0)
    assert (summary.completed, summary.failed) == (2, 1)
    assert summary.slo_attainment == pytest.approx(2 / 3)


def test_an_absent_server_fails_every_request() -> None:
    result = asyncio.run(replay("http://127.0.0.1:9", [request(), request()]))
    assert [r.ok for r in result.requests] == [False, False]
    assert result.summary(1.0, 1.0).failed == 2


def test_the_deadline_gives_up_what_still_runs() -> None:
    started = time.perf_counter()
    plan = [request(output_tokens=1), request(output_tokens=2), request(30.0)]
    scripts = iter([Script([0.0], [1]), Script([0.0, 20.0], [1, 1])])
    result, _ = load(lambda _: next(scripts), plan, deadline_s=0.6)
    assert time.perf_counter() - started < 5
    assert [r.ok for r in result.requests] == [True, False, False]
    assert "deadline" in str(result.requests[1].error)
    assert result.requests[1].output_tokens == 1  # what came until then is kept
    assert result.duration_s == pytest.approx(0.6, abs=0.3)


def test_json_holds_the_summary_and_raw_times(tmp_path: Path) -> None:
    result, _ = load(lambda _: Script([0.0, 0.1, 0.1], [1, 1, 1]), [request()])
    summary = result.summary(2.0, 0.5)
    result.write_json(tmp_path / "load.json", summary, backend="stub")
    read = json.loads((tmp_path / "load.json").read_text())
    assert read["backend"] == "stub"
    assert read["p99_itl_ms"] == pytest.approx(summary.p99_itl_ms)
    assert read["request_throughput"] == pytest.approx(1 / result.duration_s)
    assert len(read["requests"][0]["event_s"]) == 3


def test_an_empty_run_has_no_numbers_but_is_valid_json(tmp_path: Path) -> None:
    result = LoadResult([], 1.0)
    result.write_json(tmp_path / "load.json", result.summary(2.0, 0.1))
    assert json.loads((tmp_path / "load.json").read_text())["p99_itl_ms"] is None


def test_prompts_are_of_the_wanted_length_and_each_its_own() -> None:
    trace = [TraceRequest(10.0, 40, 5), TraceRequest(12.5, 40, 0), TraceRequest(13.0, 7, 9)]
    plan = make_plan(trace, 1024, seed=3, custom_params={"tbt_slo_ms": 50})
    assert [p.arrival_s for p in plan] == [0.0, 2.5, 3.0]
    assert [len(p.input_ids) for p in plan] == [40, 40, 7]
    assert [p.output_tokens for p in plan] == [5, 1, 9]
    assert plan[0].input_ids[:8] != plan[1].input_ids[:8]
    assert all(256 <= token < 1024 for p in plan for token in p.input_ids)
    assert plan[0].body()["sampling_params"]["custom_params"] == {"tbt_slo_ms": 50}
    assert make_plan(trace, 1024, seed=3) == make_plan(trace, 1024, seed=3)
    assert make_plan(trace, 1024, seed=3) != make_plan(trace, 1024, seed=4)


def test_blocks_are_shared_only_when_asked() -> None:
    trace = [TraceRequest(0.0, 25, 1, (1, 2, 3)), TraceRequest(1.0, 30, 1, (1, 2, 9)), TraceRequest(2.0, 15, 1, (1, 2))]
    first, second, third = make_plan(trace, 5000, share_blocks=True, block_tokens=10)
    assert [len(p.input_ids) for p in (first, second, third)] == [25, 30, 15]
    assert first.input_ids[:20] == second.input_ids[:20]
    assert first.input_ids[20:25] != second.input_ids[20:25]
    assert third.input_ids == first.input_ids[:15]
    apart = make_plan(trace, 5000, block_tokens=10)
    assert apart[0].input_ids[:10] != apart[1].input_ids[:10]
