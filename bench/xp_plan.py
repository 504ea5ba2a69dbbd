"""Time XP's plans beside a long queue (``python -m bench.xp_plan``).

A plan is what rank 0 does between hearing what the ranks have and telling them what to run: the queue's order,
admission, placement, the chunks and their pieces. Real ranks run one iteration meanwhile. Prompts are of 100 to 30,000
tokens, one joins the queue with every fifth plan; Qwen3-8B on H200s, every rank with 32 decodes.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.decision import learnt_model
from learner.latency import LatencyModel
from sglang_ext.slo import Progress

DECODES, CONTEXT, SLOTS = 32, 2000, 700_000
JOINS_EVERY = 5


class Queue:
    """As much of a scheduler as plans are made from, with ``waiting`` requests."""

    def __init__(self, model: LatencyModel, waiting: int) -> None:
        self.chunked_prefill_size = self.max_prefill_tokens = 8192
        self.gracefully_exit = self.paused = False
        self.controller = SimpleNamespace(model=model)
        self.waiting_queue: list[Any] = []
        self._random, self._names = random.Random(0), 0
        for _ in range(waiting):
            self.join(waited_s=3.0 * self._random.random())

    def join(self, waited_s: float = 0.0) -> None:
        """One more request, which came so long ago."""
        self._names += 1
        request = SimpleNamespace(
            rid=str(self._names),
            origin_input_ids=range(self._random.randint(100, 30_000)),
            output_ids=[],
            sampling_params=SimpleNamespace(max_new_tokens=300),
            conflux=Progress(time.perf_counter() - waited_s, ttft_slo_s=2.0, tbt_slo_s=0.1),
            xp_request=None,
        )
        self.waiting_queue.append(request)

    def keep(self, request: Any) -> None:
        """The scheduler's part of an admission on rank 0."""


def measure(ranks: int, queued: int, plans: int, model: LatencyModel) -> dict[str, Any]:
    """How long plans take, in ms; the first, which sees all requests for the first time, is left out."""
    from sglang_ext.compat.xp_leader import Leader
    from sglang_ext.xp.plan import Status

    queue = Queue(model, queued)
    leader = Leader(queue, ranks)  # type: ignore[arg-type]
    taken_ms, admitted = [], 0
    for number in range(plans + 1):
        contexts = [np.full(DECODES, CONTEXT, dtype=np.int64) for _ in range(ranks)]
        statuses = [Status(context, 0.1, SLOTS - DECODES * CONTEXT, SLOTS, 50) for context in contexts]
        begin_s = time.perf_counter()
        plan = leader.plan(statuses)
        taken_ms.append(1e3 * (time.perf_counter() - begin_s))
        admitted += len(plan.admissions)
        while len(queue.waiting_queue) < queued - 1 or (
            number % JOINS_EVERY == 0 and len(queue.waiting_queue) < queued
        ):
            queue.join()
    p50, p99 = np.quantile(taken_ms[1:], [0.5, 0.99]).tolist()
    figures = {"median_ms": p50, "p99_ms": p99, "max_ms": max(taken_ms[1:]), "first_ms": taken_ms[0]}
    return {"ranks": ranks, "queued": queued, "plans": plans, "admitted": admitted} | figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.xp_plan", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--queued", type=int, default=1000)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures to this file")
    args = parser.parse_args(argv)
    results = []
    for ranks in args.ranks:
        results.append(result := measure(ranks, args.queued, args.plans, learnt_model()))
        print(
            f"{ranks} ranks, {args.queued} queued: median {result['median_ms']:.2f} ms, p99 {result['p99_ms']:.2f}, "
            f"the first {result['first_ms']:.1f}; {result['admitted']} requests in {args.plans} plans",
            flush=True,
        )
    if args.json is not None:
        about = {"python": platform.python_version(), "machine": platform.processor() or platform.machine()}
        args.json.write_text(json.dumps(about | {"plans": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
