"""The load that the demo picks for a machine."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import machine_speed
from bench.machine_speed import MachineSpeed, measure_speed, scale_to_machine
from learner.traces import TraceRequest
from sglang_ext.served import LoadResult, RequestResult

TRACE = [TraceRequest(0.37 * i * i % 100 + i, 200 + 37 * i % 7000, 1 + 13 * i % 90) for i in range(300)]
TRACE.sort(key=lambda request: request.arrival_s)


@given(
    prefill=st.floats(5, 1e6),
    step=st.floats(1e-3, 3.0),
    duration=st.floats(20, 200),
)
def test_the_load_fits_the_time(prefill: float, step: float, duration: float) -> None:
    speed = MachineSpeed(prefill, step)
    load = scale_to_machine(TRACE, speed, duration)
    assert 2 <= len(load.trace) <= len(TRACE)
    assert load.duration_s <= duration
    assert load.trace[-1].arrival_s <= load.duration_s
    assert 0 < load.input_factor <= 1
    assert 0 < load.output_factor <= 1
    assert all(request.input_tokens >= 1 and request.output_tokens >= 1 for request in load.trace)
    # By the probes' rates the whole of it keeps the machine busy for about its share of the time, never far beyond.
    mean = machine_speed.UTILISATION * load.duration_s / len(load.trace)
    factors = speed.request_s(
        load.input_factor * sum(r.input_tokens for r in TRACE[:72]) / 72,
        load.output_factor * sum(r.output_tokens for r in TRACE[:72]) / 72,
    )
    assert factors <= mean * 1.3 or len(load.trace) == 2
    assert load.tbt_slo_s >= min(2.5 * step, 0.02)
    assert load.ttft_slo_s >= 1.0


def test_a_fast_machine_gets_the_trace_as_it_is() -> None:
    load = scale_to_machine(TRACE, MachineSpeed(200_000, 0.004), 110)
    assert (load.input_factor, load.output_factor) == (1.0, 1.0)
    assert len(load.trace) == 300
    assert load.duration_s < 110
    assert load.tbt_slo_s == 0.02


def test_a_slow_machine_gets_shorter_and_then_fewer_requests() -> None:
    slow = scale_to_machine(TRACE, MachineSpeed(400, 0.2), 110)
    slower = scale_to_machine(TRACE, MachineSpeed(40, 1.0), 110)
    assert slow.input_factor < 1
    assert slower.input_factor <= slow.input_factor
    assert len(slower.trace) < len(slow.trace) <= 80
    assert slower.tbt_slo_s == 2.5


def test_probes_are_read_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(url: str, plan: list, *, deadline_s: float) -> LoadResult:
        results = []
        for request in plan:
            count = request.output_tokens
            times = [0.5 + 0.1 * i for i in range(count)]
            result = RequestResult(0, 0, 0, times[-1], len(request.input_ids), count, times, list(range(1, count + 1)))
            results.append(result)
        return LoadResult(results, 1.0)

    monkeypatch.setattr(machine_speed, "run_load", run)
    speed = measure_speed("http://nowhere", 1000)
    assert speed.prefill_tokens_per_s == pytest.approx(machine_speed.PROBE_PROMPT_TOKENS / 0.5)
    assert speed.decode_step_s == pytest.approx(0.1)
    assert speed.decode_tokens_per_s == pytest.approx(machine_speed.PROBE_DECODES / 0.1)


def test_a_failing_probe_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = RequestResult(0, 0, 0, 1, 1, 1, [], [], "HTTP 500: no")
    monkeypatch.setattr(machine_speed, "run_load", lambda *_, **__: LoadResult([failed], 1.0))
    with pytest.raises(machine_speed.ProbeError, match="HTTP 500"):
        measure_speed("http://nowhere", 1000)


@given(gaps=st.lists(st.floats(0, 100), min_size=1, max_size=50), longest=st.floats(1.1, 10))
def test_idle_time_is_cut_and_bursts_are_kept(gaps: list[float], longest: float) -> None:
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    trace = [TraceRequest(at, 10 + i, 5) for i, at in enumerate(times)]
    cut = machine_speed.without_idle_time(trace, longest)
    assert [request.input_tokens for request in cut] == [request.input_tokens for request in trace]
    after = [later.arrival_s - earlier.arrival_s for earlier, later in itertools.pairwise(cut)]
    mean = sum(after) / len(after)
    assert max(after) <= (1 + 1e-6) * longest * mean + 1e-6
    # Gaps that were short stay as they were; none grows.
    assert all(new <= old + 1e-6 for new, old in zip(after, gaps, strict=True))
    bound = max(after)
    assert all(new == pytest.approx(old, abs=1e-6) for new, old in zip(after, gaps, strict=True) if old < 0.99 * bound)


def test_a_single_request_has_no_gaps() -> None:
    assert machine_speed.without_idle_time([TraceRequest(3.0, 1, 1)]) == [TraceRequest(0.0, 1, 1)]
