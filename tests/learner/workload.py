"""Iterations of a made-up machine: its steps take a known multiple of their roofline time, with noise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from learner.latency import LatencyModel
from learner.records import Iteration, StreamRecord
from tests.learner.generated import CPU, SHAPE, iteration

OVERHEAD_S = 5e-4


def true_s(roofline_s: float, phase: str) -> float:
    """What a step really takes here, without noise."""
    return OVERHEAD_S + roofline_s * {"prefill": 1.6, "decode": 3.0, "mixed": 2.2}[phase]


def workload(
    count: int, seed: int = 0, noise: float = 0.03, first: int = 0, model: LatencyModel | None = None, version: int = 0
) -> Iterator[Iteration]:
    """Prefill, decode (some with several steps) and mixed batches; what was predicted live is what ``model`` says."""
    rng = np.random.default_rng(seed)
    model = model or LatencyModel(SHAPE, CPU)
    for number in range(first, first + count):
        phase = ("decode", "mixed", "prefill", "decode")[number % 4]
        decodes = int(rng.integers(1, 24)) if phase != "prefill" else 0
        prefills = int(rng.integers(1, 4)) if phase != "decode" else 0
        q = [*rng.integers(16, 512, prefills).tolist(), *[1] * decodes]
        c = [*[0] * prefills, *rng.integers(16, 2048, decodes).tolist()]
        stream = _stream(rng, model, phase, q, c, steps=1 + number % 3 if phase == "decode" else 1, noise=noise)
        mode = "spatial" if len(stream.step_end_s) > 1 else "temporal"
        yield iteration(number, stream, mode=mode, version=version)


def _stream(
    rng: np.random.Generator, model: LatencyModel, phase: str, q: list[int], c: list[int], *, steps: int, noise: float
) -> StreamRecord:
    starts: list[float] = []
    ends: list[float] = []
    columns: dict[str, list[float]] = {"predicted_s": [], "upper_s": [], "roofline_s": []}
    end_s = 0.0
    for step in range(steps):
        cached = [tokens + step for tokens in c]
        predicted = model.predict(model.terms(q, cached, len(q), 1))
        starts.append(end_s)
        end_s += true_s(float(predicted.roofline_s[0]), phase) * float(np.exp(noise * rng.standard_normal()))
        ends.append(end_s)
        for name, values in zip(columns, predicted, strict=True):
            columns[name].append(float(values[0]))
    return StreamRecord(
        phase=phase, tpcs=1, q=q, c=c, logits_rows=len(q), step_start_s=starts, step_end_s=ends, **columns
    )
