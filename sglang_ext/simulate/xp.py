"""Several GPUs on simulated time: conflux's XP, and what stands beside it."""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from learner.latency import LatencyModel
from learner.traces import TraceRequest
from sglang_ext.policy.queue import order_queue, prefill_alone_s
from sglang_ext.policy.spread import Chunk, RankLoad, Waiting, as_one_request, place, shard_slots, spread
from sglang_ext.served import LoadResult, RequestResult
from sglang_ext.simulate.engine import MOST_CELLS, MOST_STEPS, Engine, Live, contexts_of, give_tokens
from sglang_ext.simulate.host import HostTimes
from sglang_ext.simulate.systems import LEAST_CHUNK, STOCK_CHUNK, system

_PLENTY = 1 << 40
_SEEN = 64


def gpus_of(name: str) -> tuple[str, str, int]:
    """(system, way, GPUs) of ``conflux-xpN`` (way ``xp``), ``SYSTEM/tpN``, ``SYSTEM/dpN``, or a system on one GPU."""
    if found := re.fullmatch(r"conflux-xp(\d+)", name):
        return name, "xp", int(found[1])
    if found := re.fullmatch(r"(.+)/(tp|dp)(\d+)", name):
        return found[1], found[2], int(found[3])
    return name, "", 1


def split_over(model: LatencyModel, *, tp: int = 1, xp: int = 1) -> LatencyModel:
    """The same model and what was learnt of it, over several GPUs. Raises ValueError if it cannot be divided so."""
    shape = msgspec.structs.replace(model.shape, tp=tp, xp=xp)
    return LatencyModel(shape, model.profile, model.snapshot)


def round_robin(
    trace: Sequence[TraceRequest], replicas: int, serve: Callable[[Sequence[TraceRequest]], LoadResult]
) -> LoadResult:
    """Every n-th request goes to the same one of so many servers."""
    results: list[RequestResult | None] = [None] * len(trace)
    for first in range(replicas):
        for result, index in zip(
            serve(trace[first::replicas]).requests, range(first, len(trace), replicas), strict=True
        ):
            results[index] = dataclasses.replace(result, index=index)
    served = [result for result in results if result is not None]
    return LoadResult(served, max((result.end_s for result in served), default=0.0))


def serve_on(
    name: str,
    trace: Sequence[TraceRequest],
    model: LatencyModel,
    *,
    tbt_slo_s: float,
    ttft_slo_s: float,
    host: HostTimes,
    kv_tokens: int | None = None,
    most_running: int = 256,
    ended: Callable[[], None] = lambda: None,
) -> tuple[LoadResult, list[tuple[float, float, float]]]:
    """Serve a trace with a system on however many GPUs its name says (:func:`gpus_of`); the result, and the shares of
    :attr:`sglang_ext.simulate.engine.Engine.shares`.

    ``model`` is of one GPU, which has ``kv_tokens`` KV slots. Raises ValueError for a name that is none, a model that
    cannot be divided so, or a request for which there are too few slots.
    """
    kind, way, gpus = gpus_of(name)
    shares: list[tuple[float, float, float]] = []

    def serve(part: Sequence[TraceRequest]) -> LoadResult:
        slots = kv_tokens * gpus if way == "tp" and kv_tokens is not None else kv_tokens
        engine: Engine | XpEngine
        if way == "xp":
            engine = XpEngine(
                split_over(model, xp=gpus),
                gpus,
                tbt_slo_s=tbt_slo_s,
                ttft_slo_s=ttft_slo_s,
                host=host,
                kv_tokens=slots,
                most_running=most_running,
            )
        else:
            device = split_over(model, tp=gpus) if way == "tp" else model
            one = system(kind, device, ttft_slo_s)
            engine = Engine(one, device, tbt_slo_s=tbt_slo_s, host=host, kv_tokens=slots, most_running=most_running)
        result = engine.run(part, ended)
        shares.extend(engine.shares)
        return result

    result = round_robin(trace, gpus, serve) if way == "dp" else serve(trace)
    return result, sorted(shares)


class XpEngine:
    """Serves a trace on ``ranks`` GPUs in step, by the policy that really serves.

    ``model``: one rank's forwards. ``kv_tokens``: KV slots of each rank. Prompts are not cached, as in the server.
    """

    def __init__(
        self,
        model: LatencyModel,
        ranks: int,
        *,
        tbt_slo_s: float,
        ttft_slo_s: float,
        host: HostTimes,
        kv_tokens: int | None = None,
        most_running: int = 256,
    ) -> None:
        self._model, self._ranks, self._host = model, ranks, host
        self._tbt_slo_s, self._ttft_slo_s = tbt_slo_s, ttft_slo_s
        self._slots, self._most_running = kv_tokens or _PLENTY, most_running
        self._free = [self._slots] * ranks
        self._running: list[list[Live]] = [[] for _ in range(ranks)]
        self._arriving: deque[Live] = deque()
        self._waiting: list[Live] = []
        self._active: list[tuple[Live, int]] = []
        self._clock_s = 0.0
        self.shares: list[tuple[float, float, float]] = []
        """As :attr:`sglang_ext.simulate.engine.Engine.shares`: nothing is divided here."""

    def run(self, trace: Sequence[TraceRequest], ended: Callable[[], None] = lambda: None) -> LoadResult:
        """Serve the whole trace; ``ended`` is called for every request that ends.

        Raises ValueError for a request that fits into no rank's KV pool.
        """
        lives = [Live(index, request, request.arrival_s + self._host.ingest_s) for index, request in enumerate(trace)]
        for live in lives:
            if live.needs + self._shard(live) > self._slots:
                raise ValueError(f"request {live.index} needs {live.needs + self._shard(live):,} KV slots of one rank")
        self._arriving, self._ended = deque(lives), ended
        while self._arriving or self._waiting or self._active or any(self._running):
            while self._arriving and self._arriving[0].seen_s <= self._clock_s:
                self._waiting.append(self._arriving.popleft())
            self._admit()
            if self._active:
                self._prefill()
            elif any(self._running):
                self._decode()
            else:
                self._clock_s = max(self._clock_s, self._arriving[0].seen_s)
        results = [live.result(self._host.deliver_s) for live in lives]
        return LoadResult(results, max((result.end_s for result in results), default=0.0))

    def _shard(self, live: Live) -> int:
        return shard_slots(live.request.input_tokens, self._ranks)

    # ---- who begins

    def _admit(self) -> None:
        budget, left = STOCK_CHUNK * self._ranks, sum(live.new for live, _ in self._active)
        if not self._waiting or left >= budget:
            return
        arrival_s = np.array([live.request.arrival_s for live in self._waiting])
        new = np.array([live.request.input_tokens for live in self._waiting], dtype=np.int64)
        alone_s = prefill_alone_s(self._model, new, np.zeros_like(new)) / self._ranks
        order = order_queue(self._clock_s, arrival_s, self._ttft_slo_s, new, alone_s).tolist()
        self._waiting = [self._waiting[at] for at in order]
        while self._waiting and left < budget and len(self._active) < _SEEN:
            live = self._waiting[0]
            owner = place(live.request.input_tokens, live.request.output_tokens, self._loads())
            if owner is None:
                return
            for rank in range(self._ranks):
                self._free[rank] -= self._shard(live) + (live.needs if rank == owner else 0)
            live.left = max(live.request.output_tokens, 1)
            self._active.append((self._waiting.pop(0), owner))
            left += live.new

    def _loads(self) -> list[RankLoad]:
        return [
            RankLoad(contexts_of(running), free if len(running) < self._most_running else 0, self._slots)
            for running, free in zip(self._running, self._free, strict=True)
        ]

    # ---- what runs

    def _prefill(self) -> None:
        """One iteration with pieces of prompts and everybody's decodes."""
        loads = self._loads()
        chunks = spread(
            [Waiting(live.request.input_tokens, live.done, owner) for live, owner in self._active],
            loads,
            self._model,
            tbt_slo_s=self._tbt_slo_s,
            budget=STOCK_CHUNK * self._ranks,
            least=LEAST_CHUNK * self._ranks,
            overhead_s=self._host.batch_s,
        )
        taken_s = max(self._takes_s(chunks, load, rank) for rank, load in enumerate(loads))
        self._clock_s += self._host.batch_s + taken_s
        for running in self._running:
            give_tokens(running, [self._clock_s])
        done = []
        for chunk in chunks:
            live, owner = self._active[chunk.prompt]
            live.done = chunk.end
            if not live.new:
                give_tokens([live], [self._clock_s])
                self._running[owner].append(live)
                done.append(chunk.prompt)
                for rank in range(self._ranks):
                    self._free[rank] += self._shard(live)
        self._active = [pair for index, pair in enumerate(self._active) if index not in done]
        self._let_go()

    def _takes_s(self, chunks: Sequence[Chunk], load: RankLoad, rank: int) -> float:
        pieces = [(chunk, chunk.pieces[rank]) for chunk in chunks if chunk.pieces[rank]]
        q = [piece for _, piece in pieces]
        c = [as_one_request(chunk.start, chunk.end - chunk.start, piece, self._ranks) for chunk, piece in pieces]
        decodes = len(load.decode_context)
        new = np.array(q + [1] * decodes, dtype=np.int64)
        if not len(new):
            return 0.0
        cached = np.concatenate([np.array(c, dtype=np.int64), load.decode_context])
        terms = self._model.terms(new, cached, float(decodes + len(q)), self._model.total_tpcs)
        return float(self._model.predict(terms).mean_s[0])

    def _decode(self) -> None:
        """Decode alone, until somebody ends or arrives; ranks run in step."""
        lives = [live for running in self._running for live in running]
        rows = max(map(len, self._running))
        steps = max(1, min(MOST_STEPS, MOST_CELLS // rows, *(live.left for live in lives)))
        times_s = np.zeros(steps)
        for running in self._running:
            if running:
                c = contexts_of(running) + np.arange(steps)[:, None]
                terms = self._model.terms(1, c, len(running), self._model.total_tpcs)
                np.maximum(times_s, self._model.predict(terms).mean_s, out=times_s)
        ends_s = self._clock_s + np.cumsum(times_s + self._host.batch_s)
        if self._arriving:
            steps = min(steps, int(ends_s.searchsorted(self._arriving[0].seen_s, "left")) + 1)
        for running in self._running:
            give_tokens(running, ends_s[:steps].tolist())
        self._clock_s = float(ends_s[steps - 1])
        self._let_go()

    def _let_go(self) -> None:
        for rank, running in enumerate(self._running):
            for live in running:
                if not live.left:
                    self._free[rank] += live.needs
                    self._ended()
            self._running[rank] = [live for live in running if live.left]
