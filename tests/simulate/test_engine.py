from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import LatencyModel
from learner.traces import TraceRequest
from sglang_ext.config import MODES
from sglang_ext.served import LoadResult
from sglang_ext.simulate.engine import Engine, Live
from sglang_ext.simulate.host import HostTimes
from sglang_ext.simulate.systems import Step, system
from tests.learner.test_latency import H200, LARGE
from tests.learner.worlds import iteration, stream

MODEL = LatencyModel(LARGE, H200)
HOST = HostTimes()
SYSTEMS = ("stock", "stock-chunk-512", "stock-mixed-256", *(f"conflux-{mode}" for mode in MODES))


def serve(trace: list[TraceRequest], name: str, tbt_slo_s: float = 0.05, **options) -> tuple[LoadResult, Engine]:
    engine = Engine(system(name, MODEL, 2.0), MODEL, tbt_slo_s=tbt_slo_s, **options)
    return engine.run(trace), engine


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    requests, at_s = [], 0.0
    for _ in range(draw(st.integers(1, 12))):
        at_s += draw(st.sampled_from([0.0, 0.003, 0.1, 3.0]))
        tokens = draw(st.integers(1, 40) | st.integers(500, 9000))
        first = draw(st.integers(0, 1))
        blocks = tuple(100 * first + at for at in range(-(-tokens // 512))) if draw(st.booleans()) else ()
        requests.append(TraceRequest(at_s, tokens, draw(st.integers(0, 30)), blocks))
    return requests


@settings(deadline=None, max_examples=60)
@given(traces(), st.sampled_from(SYSTEMS), st.sampled_from([0.005, 0.025, 0.1]), st.booleans(), st.integers(1, 20))
def test_everybody_gets_all_tokens_in_order(trace, name, tbt_slo_s, tight, most_running) -> None:
    largest = max(request.input_tokens + request.output_tokens for request in trace)
    kv_tokens = largest + 600 if tight else None
    result, engine = serve(trace, name, tbt_slo_s, kv_tokens=kv_tokens, most_running=most_running)
    for request, got in zip(trace, result.requests, strict=True):
        assert got.output_tokens == len(got.event_s) == max(request.output_tokens, 1)
        assert got.event_s[0] >= request.arrival_s + HOST.ingest_s + HOST.deliver_s
        # Two requests may get tokens at once, one request never does.
        assert all(late > early for early, late in itertools.pairwise(got.event_s))
    assert engine._cache.room == (float("inf") if kv_tokens is None else kv_tokens)
    assert not engine._running
    assert all(0.0 <= share <= 1.0 and length > 0.0 for _, length, share in engine.shares)


@settings(deadline=None, max_examples=20)
@given(traces(), st.sampled_from(SYSTEMS))
def test_the_same_trace_gives_the_same_run(trace, name) -> None:
    assert serve(trace, name)[0] == serve(trace, name)[0]


@pytest.mark.parametrize("name", SYSTEMS)
def test_one_request_alone_takes_its_forwards_and_the_host(name: str) -> None:
    request = TraceRequest(1.0, 300, 4)
    (got,) = serve([request], name)[0].requests
    chunks = 2 if name == "stock-mixed-256" else 1
    takes = lambda q, c: float(MODEL.predict(MODEL.terms([q], [c], 1, 66)).mean_s[0])  # noqa: E731
    prefill_s = takes(300, 0) if chunks == 1 else 0.0
    if chunks == 2:
        unfinished = float(MODEL.predict(MODEL.terms([256], [0], 0, 66)).mean_s[0])
        prefill_s = unfinished + HOST.batch_s + takes(44, 256)
    assert got.ttft_s == pytest.approx(HOST.ingest_s + HOST.batch_s + prefill_s + HOST.deliver_s)
    expected = [HOST.batch_s + takes(1, context) for context in (300 + 1, 300 + 2, 300 + 3)]
    assert got.gaps_s == pytest.approx(expected)


def test_stock_stalls_decodes_for_a_prefill_and_a_target_does_not() -> None:
    trace = [*(TraceRequest(0.0, 100, 200) for _ in range(8)), TraceRequest(0.5, 8192, 2)]
    prefill_s = float(MODEL.predict(MODEL.terms([8192], [0], 1, 66)).mean_s[0])
    stock, _ = serve(trace, "stock")
    assert max(stock.requests[0].gaps_s) > prefill_s
    for mode in ("chunked", "auto"):
        held, _ = serve(trace, f"conflux-{mode}", tbt_slo_s=0.03)
        assert max(held.requests[0].gaps_s) <= 0.03
        assert held.requests[-1].ttft_s < 3.0 * stock.requests[-1].ttft_s
    assert all(share == 1.0 for *_, share in serve(trace, "conflux-chunked", 0.03)[1].shares)


def test_who_got_its_first_token_before_the_window_closed_has_waited_since() -> None:
    engine = Engine(system("conflux-spatial", MODEL, 2.0), MODEL, tbt_slo_s=0.1)
    engine._running = [Live(0, TraceRequest(0.0, 6000, 90), 0.0, left=90) for _ in range(32)]
    step = Step(256, 4, window=True, prefill_tpcs=50, decode_tpcs=16)
    contexts, one = np.full(32, 6000), np.array([256])
    first_s, end_s = engine._window(step, 1.0, contexts, one, 0 * one, ends=1)
    assert 1.0 < first_s < end_s
    assert engine._waited_s == pytest.approx(end_s - first_s)
    # Nobody waits for anything where the prompt goes on.
    engine._window(step, 1.0, contexts, one, 0 * one, ends=0)
    assert engine._waited_s == 0.0


def test_a_shared_prefix_is_not_computed_again() -> None:
    blocks = tuple(range(16))
    trace = [TraceRequest(0.0, 8192, 1, blocks), TraceRequest(5.0, 8192, 1, blocks), TraceRequest(9.0, 8192, 1)]
    first, again, other = (request.ttft_s for request in serve(trace, "stock")[0].requests)
    assert again < 0.2 * first
    assert other == pytest.approx(first)
    # No more blocks are kept than there is room for.
    small, _ = serve(trace, "stock", kv_tokens=8193)
    assert small.requests[1].ttft_s < 0.2 * first
    evicted = [trace[0], TraceRequest(2.0, 8192, 1), *trace[1:]]
    assert serve(evicted, "stock", kv_tokens=8193)[0].requests[2].ttft_s == pytest.approx(first)


def test_who_arrives_while_a_batch_runs_is_in_the_batch_after_the_next() -> None:
    """As with SGLang's overlap scheduler: the next batch is decided when the one before begins."""
    long_s = float(MODEL.predict(MODEL.terms([8192], [0], 1, 66)).mean_s[0])
    trace = [TraceRequest(0.0, 8192, 3), TraceRequest(0.01, 10, 1)]
    early, late = serve(trace, "stock")[0].requests
    assert early.ttft_s == pytest.approx(HOST.ingest_s + HOST.batch_s + long_s + HOST.deliver_s)
    # A decode step of the first runs before the second's prefill.
    assert early.event_s[1] < late.event_s[0] < early.event_s[2]


def test_a_request_that_fits_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match="request 1 needs 9,010 KV slots"):
        serve([TraceRequest(0.0, 10, 10), TraceRequest(0.0, 9000, 10)], "stock", kv_tokens=5000)


def test_the_host_is_what_a_record_shows() -> None:
    assert HostTimes.of_record([]) == HostTimes()
    plain, window = stream("decode", 66, [1], [50], [0.01]), stream("prefill", 50, [99], [0], [0.02])
    waits_s = itertools.cycle([(1e-4, False), (3e-3, True), (8e-3, False), (1e-4, False), (0.5, False)])
    records = [
        msgspec.structs.replace(iteration(plain, *[window] * both, concurrent=both), host_overhead_s=waited_s)
        for waited_s, both in itertools.islice(waits_s, 100)
    ]
    found = HostTimes.of_record(records)
    assert (found.batch_s, found.after_window_s) == (1e-4, 8e-3)
    assert found.drain_s == pytest.approx(2.9e-3)
    assert (found.ingest_s, found.deliver_s) == (HOST.ingest_s, HOST.deliver_s)
