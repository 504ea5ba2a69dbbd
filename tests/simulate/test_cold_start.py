"""A fresh server has learnt nothing: it decides by the prior and learns from what it runs, here on simulated time."""

from __future__ import annotations

import math
import random
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from learner.estimator import OnlineEstimator
from learner.latency import LatencyModel, Terms
from learner.prior import shipped_prior
from learner.record_file import RecordReader
from learner.records import StreamRecord
from learner.traces import TraceRequest
from sglang_ext.host_time import WindowYield
from sglang_ext.policy.types import Situation
from sglang_ext.simulate.engine import Engine
from sglang_ext.simulate.systems import Conflux, Step, System, system
from tests.learner.worlds import iteration, stream

RECORD = Path(__file__).parents[2] / "bench" / "results" / "h200-qwen3-8b-interference-latest.jsonl.gz"
DECODES, CONTEXT, PROMPT, SECONDS = 32, 2048, 8192, 12
TTFT_SLO_S, SCATTER = 2.0, 0.015


@lru_cache(maxsize=1)
def world() -> LatencyModel:
    """Times as a GPU's record shows them."""
    with RecordReader(RECORD) as reader:
        estimator = OnlineEstimator(reader.header.model, reader.header.device)
        for number, one in enumerate(islice(reader, 3000)):
            estimator.observe(one)
            if number % 500 == 499:
                estimator.fit()
    return estimator.model


class Fresh(Conflux):
    """conflux's policy with what a learner of its own has made of the times so far."""

    def __init__(self, device: LatencyModel) -> None:
        self.learner = OnlineEstimator(device.shape, device.profile, prior=shipped_prior(device.profile))
        super().__init__("auto", self.learner.model, TTFT_SLO_S)

    def learn(self, *streams: StreamRecord) -> None:
        self.learner.observe(iteration(*streams, concurrent=len(streams) > 1))
        if self.learner.ready() and self.learner.fit() is not None:
            self._model = self.learner.model


class Learning(Engine):
    """Forwards scatter, and the system learns from them."""

    def __init__(self, fresh: Fresh, device: LatencyModel, tbt_slo_s: float) -> None:
        super().__init__(fresh, device, tbt_slo_s=tbt_slo_s)
        self._fresh, self._random = fresh, random.Random(0)

    def _scatter(self) -> float:
        return math.exp(self._random.gauss(0.0, SCATTER))

    def _takes(self, q, c, logits_rows: int) -> float:
        taken_s = super()._takes(q, c, logits_rows) * self._scatter()
        phase = "decode" if max(q) == 1 else "mixed" if min(q) == 1 else "prefill"
        self._fresh.learn(stream(phase, self._tpcs, q.tolist(), c.tolist(), [taken_s]))
        return taken_s

    def _window(self, step: Step, begin_s, contexts, new, cached, ends):
        self._halves = [
            ("decode", step.decode_tpcs, [1] * len(contexts), contexts.tolist()),
            ("prefill", step.prefill_tpcs, new.tolist(), cached.tolist()),
        ]
        return super()._window(step, begin_s, contexts, new, cached, ends)

    def _take_beside(self, decode: Terms, prefill: Terms) -> tuple[float, float]:
        step_s, prefill_s = (taken_s * self._scatter() for taken_s in super()._take_beside(decode, prefill))
        steps, whole = self._halves
        self._fresh.learn(stream(*steps, [step_s] * math.ceil(prefill_s / step_s)), stream(*whole, [prefill_s]))
        return step_s, prefill_s


def interference(engine: Engine) -> tuple[float, float]:
    """Thirty-two decodes and a long prompt every second: the prompts' mean TTFT, and the decodes' p99 gap, in s."""
    decodes = [TraceRequest(0.0, CONTEXT, 120 * SECONDS) for _ in range(DECODES)]
    prompts = [TraceRequest(2.0 + at, PROMPT, 8) for at in range(SECONDS)]
    results = engine.run([*decodes, *prompts]).requests
    ttfts_s = [one.ttft_s for one in results[DECODES:]]
    gaps_s = [gap_s for one in results[:DECODES] for gap_s in one.gaps_s]
    return float(np.mean(ttfts_s)), float(np.quantile(gaps_s, 0.99))


@pytest.mark.parametrize(("tbt_slo_s", "chunk"), [(0.025, 512), (0.05, 1024), (0.1, 2048)])
def test_a_fresh_server_is_as_good_as_the_chunk_that_somebody_has_found_for_its_target(
    tbt_slo_s: float, chunk: int
) -> None:
    found: System = system(f"stock-mixed-{chunk}", world(), TTFT_SLO_S)
    stock_ttft_s, stock_gap_s = interference(Engine(found, world(), tbt_slo_s=tbt_slo_s))
    assert stock_gap_s <= tbt_slo_s
    ttft_s, gap_s = interference(Learning(Fresh(world()), world(), tbt_slo_s))
    assert gap_s <= tbt_slo_s
    assert ttft_s <= 1.1 * stock_ttft_s


def test_the_first_prompts_teach_what_a_mixed_batch_takes() -> None:
    fresh = Fresh(world())
    situation = Situation(np.full(DECODES, CONTEXT), np.array([PROMPT]), np.array([0]), 0.025, 8192, 64)
    situation.window_yield = WindowYield().value
    before = fresh.step(situation)
    interference(Learning(fresh, world(), 0.025))
    after = fresh.step(situation)
    assert not before.window
    assert before.prefill_tokens < after.prefill_tokens
