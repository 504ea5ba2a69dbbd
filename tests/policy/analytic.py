"""A latency model with a formula that fits on a line, and strategies for it and for situations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np
from hypothesis import strategies as st

from bench.decision import QWEN3_8B
from learner.device import DeviceProfile
from learner.latency import LatencyModel, Prediction, Terms
from learner.snapshot import Snapshot
from sglang_ext.policy.types import Situation
from tests.learner.listed import ListedOutlook


@lru_cache(maxsize=1)
def h200() -> LatencyModel:
    """The real model, unlearnt, on the recorded H200."""
    return LatencyModel(QWEN3_8B, DeviceProfile.shipped("h200"))


def corrected(seed: int, scale: float = 0.3) -> LatencyModel:
    """The same with a random learnt correction, which bends its curves both ways."""
    numbers = np.random.default_rng(seed)
    plain = Snapshot.roofline()
    return h200().with_snapshot(
        msgspec.structs.replace(
            plain,
            version=1,
            correction=numbers.uniform(-scale, scale, len(plain.correction)).tolist(),
            correction_weight=[1.0] * len(plain.correction_weight),
            margin=numbers.uniform(1.05, 1.5, len(plain.margin)).tolist(),
        )
    )


@dataclass(frozen=True)
class Listed:
    """The model, its outlooks by their definition."""

    model: LatencyModel

    @property
    def total_tpcs(self) -> int:
        return self.model.total_tpcs

    def terms(self, *args) -> Terms:
        return self.model.terms(*args)

    def predict(self, terms: Terms, beside: Terms | None = None) -> Prediction:
        return self.model.predict(terms, beside)

    def outlook(self, new, cached, context) -> ListedOutlook:
        return ListedOutlook(self, new, cached, context)


@dataclass(frozen=True)
class Analytic:
    """t = launch + max(weights / 𝓑(S), tokens · token_s / Π(S)) + pairs · pair_s / Π(S) + contexts · context_s / 𝓑(S).

    Π is linear in S, 𝓑 saturates at a third of the device. Beside another stream everything takes ``contention`` more.
    The bound is ``margin`` times the mean.
    """

    total_tpcs: int = 8
    launch_s: float = 1e-3
    weights_s: float = 4e-3
    token_s: float = 2e-5
    pair_s: float = 1e-9
    context_s: float = 5e-8
    contention: float = 1.2
    margin: float = 1.1

    def terms(self, q, c, logits_rows, tpcs) -> Terms:
        q, c = np.broadcast_arrays(np.atleast_2d(np.asarray(q, float)), np.atleast_2d(np.asarray(c, float)))
        tpcs = np.atleast_1d(np.asarray(tpcs, float))
        rows = max(len(q), len(tpcs))
        share = np.broadcast_to(tpcs, rows) / self.total_tpcs
        decode = (q == 1) & (c > 0)
        tokens = np.broadcast_to(q.sum(axis=1), rows)
        pairs = np.broadcast_to((q * (q + c) * ~decode).sum(axis=1), rows)
        contexts = np.broadcast_to((decode * (c + 1)).sum(axis=1), rows)
        time_s = (
            self.launch_s
            + np.maximum(self.weights_s / np.minimum(3 * share, 1), tokens * self.token_s / share)
            + pairs * self.pair_s / share
            + contexts * self.context_s / np.minimum(3 * share, 1)
        )
        time_s = np.where(tokens > 0, time_s, 0.0)
        return Terms(time_s[:, None], np.broadcast_to(tpcs, rows).copy(), time_s)

    def predict(self, terms: Terms, beside: Terms | None = None) -> Prediction:
        mean_s = terms.matrix[:, 0].copy()
        if beside is not None:
            mean_s = np.where(beside.matrix[:, 0] > 0, self.contention * mean_s, mean_s)
        return Prediction(mean_s, self.margin * mean_s, terms.roofline_s)

    def outlook(self, new, cached, context) -> ListedOutlook:
        return ListedOutlook(self, new, cached, context)


models = st.builds(
    Analytic,
    total_tpcs=st.integers(2, 12),
    launch_s=st.floats(1e-4, 5e-3),
    weights_s=st.floats(5e-4, 2e-2),
    token_s=st.floats(1e-6, 2e-4),
    pair_s=st.sampled_from([0.0, 1e-10, 1e-8]),
    context_s=st.sampled_from([0.0, 1e-8, 1e-6]),
    contention=st.floats(1.0, 1.5),
    margin=st.floats(1.0, 1.4),
)


@st.composite
def situations(draw: st.DrawFn, most_decodes: int = 6, most_waiting: int = 5, tokens: int = 400) -> Situation:
    """Small situations; either phase may be absent, budgets may be less than a page."""
    page = draw(st.sampled_from([1, 1, 4, 16]))
    decodes = draw(st.lists(st.integers(1, 3000), max_size=most_decodes))
    waiting = draw(st.lists(st.tuples(st.integers(1, tokens), st.integers(0, 40)), max_size=most_waiting))
    return Situation(
        decode_context=np.array(decodes, dtype=np.int64),
        prefill_new=np.array([new for new, _ in waiting], dtype=np.int64),
        prefill_cached=np.array([pages * page for _, pages in waiting], dtype=np.int64),
        tbt_slo_s=draw(st.floats(5e-3, 0.2)),
        prefill_budget=draw(st.integers(0, 2 * tokens)),
        max_look_ahead=draw(st.integers(0, 12)),
        page_size=page,
        host_overhead_s=draw(st.sampled_from([0.0, 1e-3])),
        drain_s=draw(st.sampled_from([0.0, 0.0, 1e-3])),
        after_window_s=draw(st.sampled_from([0.0, 1e-3, 5e-3])),
        host_period_s=draw(st.sampled_from([0.0, 0.0, 5e-3, 3e-2])),
        waited_s=draw(st.sampled_from([0.0, 0.0, 2e-3, 2e-2])),
        after_window=draw(st.booleans()),
    )
