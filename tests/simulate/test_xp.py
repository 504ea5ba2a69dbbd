from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import LatencyModel
from learner.traces import TraceRequest
from sglang_ext.served import LoadResult
from sglang_ext.simulate.engine import Engine
from sglang_ext.simulate.host import HostTimes
from sglang_ext.simulate.systems import system
from sglang_ext.simulate.xp import XpEngine, gpus_of, round_robin, split_over
from tests.learner.test_latency import H200, LARGE
from tests.simulate.test_command import model, replay, trace  # noqa: F401  (fixtures)
from tests.simulate.test_engine import traces

MODEL = LatencyModel(LARGE, H200)
HOST = HostTimes()


def serve(requests: list[TraceRequest], ranks: int, tbt_slo_s: float = 0.05, **options) -> tuple[LoadResult, XpEngine]:
    engine = XpEngine(split_over(MODEL, xp=ranks), ranks, tbt_slo_s=tbt_slo_s, ttft_slo_s=2.0, host=HOST, **options)
    return engine.run(requests), engine


@settings(deadline=None, max_examples=40)
@given(traces(), st.sampled_from([2, 4]), st.sampled_from([0.01, 0.1]), st.booleans(), st.integers(1, 20))
def test_everybody_gets_all_tokens_in_order_and_gives_its_slots_back(requests, ranks, tbt_slo_s, tight, most) -> None:
    largest = max(request.input_tokens + request.output_tokens for request in requests)
    kv_tokens = largest + -(-largest // ranks) + 10 if tight else None
    result, engine = serve(requests, ranks, tbt_slo_s, kv_tokens=kv_tokens, most_running=most)
    for request, got in zip(requests, result.requests, strict=True):
        assert got.output_tokens == len(got.event_s) == max(request.output_tokens, 1)
        assert got.event_s[0] >= request.arrival_s + HOST.ingest_s + HOST.deliver_s
        assert all(late > early for early, late in itertools.pairwise(got.event_s))
    assert len(set(engine._free)) == 1
    assert engine._free[0] == (kv_tokens or engine._slots)


def test_a_request_too_long_for_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="KV slots of one rank"):
        serve([TraceRequest(0.0, 1000, 10)], 2, kv_tokens=1400)


def test_a_long_prompt_alone_is_quicker_on_more_gpus_and_decodes_as_on_one() -> None:
    requests = [TraceRequest(0.0, 32_000, 50)]
    alone = Engine(system("stock", MODEL, 2.0), MODEL, tbt_slo_s=0.1).run(requests).requests[0]
    spread = {ranks: serve(requests, ranks)[0].requests[0] for ranks in (2, 4)}
    assert spread[2].event_s[0] < 0.65 * alone.event_s[0]
    assert spread[4].event_s[0] < 0.65 * spread[2].event_s[0]
    gaps = [one.event_s[-1] - one.event_s[1] for one in (alone, *spread.values())]
    assert gaps == pytest.approx([gaps[0]] * 3, rel=0.02)


def test_replicas_take_turns() -> None:
    requests = [TraceRequest(0.0, 100 + at, 3) for at in range(5)]
    seen = []

    def one(part):
        seen.append([request.input_tokens for request in part])
        return Engine(system("stock", MODEL, 2.0), MODEL, tbt_slo_s=0.1).run(part)

    result = round_robin(requests, 2, one)
    assert seen == [[100, 102, 104], [101, 103]]
    assert [request.input_tokens for request in result.requests] == [100, 101, 102, 103, 104]
    assert [request.index for request in result.requests] == [0, 1, 2, 3, 4]


def test_names_say_how_many_gpus() -> None:
    assert gpus_of("conflux-xp4") == ("conflux-xp4", "xp", 4)
    assert gpus_of("stock-mixed-512/tp2") == ("stock-mixed-512", "tp", 2)
    assert gpus_of("conflux-auto/dp8") == ("conflux-auto", "dp", 8)
    assert gpus_of("stock") == ("stock", "", 1)


def test_gpus_beside_each_other_on_the_command_line(trace, model, tmp_path, capsys) -> None:  # noqa: F811
    names = ["conflux-xp2", "stock/tp2", "conflux-auto/dp2"]
    given = ["--trace", trace, "--model", model, "--device", "h200", "--json", tmp_path / "t.json"]
    assert replay(*given, "--systems", *names) == 0
    figures = json.loads((tmp_path / "t.json").read_text())
    assert [of["completed"] for of in figures["systems"].values()] == [12, 12, 12]
    assert replay(*given, "--systems", "conflux-xp3") == 2
    assert "must divide" in capsys.readouterr().err
