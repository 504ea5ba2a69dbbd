"""Made-up devices with known times: what the estimator is judged against. Their laws are not the model's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bench.decision import QWEN3_8B
from learner import DeviceProfile, Iteration, LatencyModel, ModelShape, StreamRecord

SMALL = ModelShape(
    name="small",
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocabulary=49152,
    tied_embeddings=True,
    weight_bytes=4.0,
    activation_bytes=4.0,
    kv_bytes=4.0,
)
LARGE = QWEN3_8B
CPU = DeviceProfile(name="cpu", tpcs=1, flops=((1.0, 6e10),), bandwidth=((1.0, 1.5e10),))
# Few points, so that the worlds between and below them are not what the model was told.
H200 = DeviceProfile(
    name="H200",
    tpcs=66,
    flops=((2.0, 28e12), (13.0, 171e12), (20.0, 253e12), (33.0, 420e12), (48.0, 552e12), (66.0, 677e12)),
    bandwidth=((8.0, 1906e9), (16.0, 3807e9), (24.0, 4135e9), (66.0, 4250e9)),
    link_bandwidth=378e9,
)


def stream(
    phase: str, tpcs: int, q: Sequence[int], c: Sequence[int], step_s: Sequence[float], *, start_s: float = 0.0
) -> StreamRecord:
    """One stream whose steps follow each other without a gap."""
    ends = start_s + np.cumsum(step_s)
    return StreamRecord(
        phase=phase,
        tpcs=tpcs,
        q=list(q),
        c=list(c),
        logits_rows=len(q),
        step_start_s=[start_s, *ends[:-1].tolist()],
        step_end_s=ends.tolist(),
        predicted_s=[],
        upper_s=[],
        roofline_s=[],
    )


def iteration(*streams: StreamRecord, number: int = 0, concurrent: bool = False) -> Iteration:
    return Iteration(
        iteration=number,
        time_s=float(number),
        mode="spatial" if concurrent else "temporal",
        reason="fits",
        tbt_slo_s=0.1,
        model_version=0,
        running=0,
        waiting=0,
        concurrent=concurrent,
        host_overhead_s=0.0,
        candidates=None,
        decision=0,
        streams=list(streams),
    )


class World:
    """Draws iterations, each timed by ``true_s`` times noise (log-normal) and now and then a pause of 2–10 times."""

    def __init__(
        self, seed: int, *, noise: float, pauses: float, scale: Callable[[int], float] = lambda number: 1.0
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.number = 0
        self._noise, self._pauses, self._scale = noise, pauses, scale

    def disturbed(self, true_s: float) -> float:
        measured = true_s * self._scale(self.number) * float(np.exp(self._noise * self.random.standard_normal()))
        return measured * float(self.random.uniform(2, 10)) if self.random.random() < self._pauses else measured


class CpuWorld(World):
    """A CPU: chunked prefill of 128 tokens mixed with up to 16 decodes, costs per call and per request, an attention
    that pads a chunk's queries to the whole sequence, small matrices multiplied badly."""

    shape, profile = SMALL, CPU

    def __init__(self, seed: int, *, noise: float = 0.12, pauses: float = 0.015, **options: object) -> None:
        super().__init__(seed, noise=noise, pauses=pauses, **options)  # type: ignore[arg-type]
        self._waiting: list[list[int]] = []
        self._running: list[list[int]] = []

    def true_s(self, q: Sequence[int], c: Sequence[int]) -> float:
        new, context = np.array(q, float), np.array(q, float) + np.array(c, float)
        weights = SMALL.block_parameters * SMALL.layers
        rows = new.sum()
        linear = max(2.0 * rows * weights / 5e10 * (1.0 + 7.0 / rows), weights * 4.0 / 9e9)
        classifier = 2.0 * len(q) * SMALL.hidden * SMALL.vocabulary / 4e10
        if any(a > 1 or not b for a, b in zip(q, c, strict=True)):
            attention = 0.003 + float((30 * 2 * context**2 * 9 * 64 * 2 / 2.5e10).sum())
        else:
            attention = float((30 * context * 2 * 3 * 64 * 4 * 3 / 8e9).sum())
        return 0.004 + linear + classifier + attention + len(q) * 30 * 4e-5

    def draw(self) -> Iteration:
        self.number += 1
        q: list[int] = []
        c: list[int] = []
        while not q:
            if self.random.random() < 0.25 and len(self._waiting) < 3:
                self._waiting.append([int(self.random.integers(8, 600)), 0])
            budget = 128
            decodes = self._running[:16]
            for request in list(self._waiting):
                if take := min(budget, request[0] - request[1]):
                    q.append(take)
                    c.append(request[1])
                    request[1] += take
                    budget -= take
                if request[1] == request[0]:
                    self._waiting.remove(request)
                    self._running.append([request[0], int(self.random.integers(4, 40))])
            prefills = len(q)
            for request in decodes:
                q.append(1)
                c.append(request[0])
                request[0] += 1
                request[1] -= 1
            self._running = [request for request in self._running if request[1] > 0]
        phase = "decode" if not prefills else "prefill" if prefills == len(q) else "mixed"
        return iteration(stream(phase, 1, q, c, [self.disturbed(self.true_s(q, c))]), number=self.number)


class GpuWorld(World):
    """A GPU: decode, mixed batches, and prefill beside look-ahead decode on disjoint or shared TPCs. An eager prefill
    cannot be quicker than its launch; both streams slow each other down."""

    shape, profile = LARGE, H200

    def __init__(self, seed: int, *, noise: float = 0.03, pauses: float = 0.005, **options: object) -> None:
        super().__init__(seed, noise=noise, pauses=pauses, **options)  # type: ignore[arg-type]
        self._model = LatencyModel(LARGE, H200)
        self._contexts = [2000] * 30

    def decode_s(self, c: Sequence[int], tpcs: int) -> float:
        terms = self._model.terms([1] * len(c), c, len(c), tpcs)
        linear = sum(float(terms.column(name)[0]) for name in ("qkv_s", "output_s", "gate_up_s", "down_s"))
        attention, classifier = float(terms.column("attention_decode_s")[0]), float(terms.column("classifier_s")[0])
        return 1.12 * linear + 1.25 * attention + 1.2 * classifier + 8e-4 + 4e-6 * len(c)

    def prefill_s(self, q: Sequence[int], c: Sequence[int], tpcs: int, decodes: Sequence[int] = ()) -> float:
        rows = len(q) + len(decodes)
        terms = self._model.terms([*q, *[1] * len(decodes)], [*c, *decodes], rows, tpcs)
        linear = sum(float(terms.column(name)[0]) for name in ("qkv_s", "output_s", "gate_up_s", "down_s"))
        attention = float(terms.column("attention_causal_s")[0]) + float(terms.column("attention_decode_s")[0])
        return max(1.05 * linear + 1.3 * attention + 0.001, 0.0145)

    def draw(self) -> Iteration:
        self.number += 1
        if self.random.random() < 0.02:
            self._contexts = self.random.integers(200, 8000, int(self.random.choice([4, 16, 32, 64, 128]))).tolist()
        self._contexts = [context + 1 for context in self._contexts]
        ones = [1] * len(self._contexts)
        kind = self.random.random()
        if kind < 0.6:
            measured = self.disturbed(self.decode_s(self._contexts, 66))
            return iteration(stream("decode", 66, ones, self._contexts, [measured]), number=self.number)
        q = [int(self.random.choice([512, 1024, 2048, 4096, 8192]))] * int(self.random.integers(1, 3))
        c = [int(self.random.choice([0, 0, 1024, 4096]))] * len(q)
        if kind < 0.75:
            measured = self.disturbed(self.prefill_s(q, c, 66, self._contexts))
            return iteration(stream("mixed", 66, q + ones, c + self._contexts, [measured]), number=self.number)
        shared = kind > 0.9
        decode_tpcs = 66 if shared else int(self.random.choice([8, 12, 16, 24, 32]))
        prefill_tpcs = 50 if shared else 66 - decode_tpcs
        prefill = self.prefill_s(q, c, prefill_tpcs) * (2.0 if shared else 1.17)
        decode = self.decode_s(self._contexts, decode_tpcs) * (1.6 if shared else 1.25)
        steps = [self.disturbed(decode) for _ in range(max(1, min(24, round(prefill / decode))))]
        return iteration(
            stream("prefill", prefill_tpcs, q, c, [self.disturbed(prefill)]),
            stream("decode", decode_tpcs, ones, self._contexts, steps),
            number=self.number,
            concurrent=True,
        )
