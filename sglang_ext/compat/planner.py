"""What the policy needs to know of SGLang 0.5.17's scheduler, and the order of its queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.managers.schedule_policy import match_prefix_for_req

from sglang_ext.compat import batch as batches
from sglang_ext.compat import kv
from sglang_ext.compat.ranks import agree
from sglang_ext.policy.queue import order_queue, prefill_alone_s
from sglang_ext.policy.types import Situation

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from learner.latency import LatencyModel
    from sglang_ext.compat.scheduler import ConfluxScheduler

# Prefix matches are estimates for the queue's order and the prediction; admission matches anew.
_MATCH_HEAD = 32
_MATCH_AGE_S = 0.25
_WAITING_SEEN = 64
# A queue that nobody joined keeps its order for so long: with a hundred requests ordering takes a millisecond.
_ORDER_AGE_S = 0.05
LONGEST_TTFT_S = 60.0
# A token passes through the scheduler's own processing and two more processes before it is sent, some sooner than
# others. With a hundred requests the 99th percentile of gaps at the client is 1.4 to 2.7 ms above what the device takes
# (stock's mixed chunks too); no more than this share of a target is set aside for it.
_DELIVERY_S, _DELIVERY_SHARE = 2e-3, 0.08


class Planner:
    """Reads the state of ``scheduler``; changes nothing but the order of its waiting queue."""

    def __init__(self, scheduler: ConfluxScheduler) -> None:
        self._scheduler = scheduler
        self._orders_queue = scheduler.server_args.schedule_policy == "fcfs"
        # What the user or SGLang set; the scheduler's own field holds one iteration's decision.
        self._chunk = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        self.tbt_slo_s = scheduler.controller.config.tbt_slo_s
        """The smallest target of the decodes that :meth:`situation` last saw."""
        self._order = QueueOrder()

    def order_waiting(self) -> None:
        """Put the queue in order, unless the user chose another --schedule-policy."""
        scheduler = self._scheduler
        # Matching a prefix splits and touches nodes of the cache, so ranks must match the same requests.
        now_s = agree(scheduler, time.perf_counter)
        for req in scheduler.waiting_queue[:_MATCH_HEAD]:
            progress = req.conflux
            if now_s - progress.matched_s > _MATCH_AGE_S:
                match_prefix_for_req(scheduler.tree_cache, req, include_req=True)
                progress.cached, progress.matched_s = req.num_matched_prefix_tokens, now_s
        waiting = scheduler.waiting_queue
        if not self._orders_queue or len(waiting) < 2:
            return
        scheduler.waiting_queue = self._order.of(
            waiting, now_s, lambda: agree(scheduler, lambda: queue_order(waiting, scheduler.controller.model, now_s))
        )

    def situation(self, running: ScheduleBatch) -> Situation:
        """The next iteration, as the policy sees it."""
        scheduler = self._scheduler
        new, cached = [], []
        if scheduler.chunked_req is not None:
            done = len(scheduler.chunked_req.prefix_indices)
            new.append(_tokens(scheduler.chunked_req) - done)
            cached.append(done)
        for req in scheduler.waiting_queue[:_WAITING_SEEN]:
            new.append(max(_tokens(req) - req.conflux.cached, 1))
            cached.append(req.conflux.cached)
        decodes = 0 if running.is_empty() else running.batch_size()
        page = scheduler.page_size
        budget = min(self._chunk, scheduler.max_prefill_tokens) // page * page
        controller = scheduler.controller
        targets_s = (req.conflux.tbt_slo_s for req in running.reqs)
        self.tbt_slo_s = tbt_slo_s = min(targets_s, default=controller.config.tbt_slo_s)
        return Situation(
            decode_context=running.seq_lens_cpu.numpy() if decodes else np.empty(0, dtype=np.int64),
            prefill_new=np.array(new, dtype=np.int64),
            prefill_cached=np.array(cached, dtype=np.int64),
            tbt_slo_s=tbt_slo_s - delivered_in(tbt_slo_s),
            prefill_budget=max(budget, page),
            max_look_ahead=self.most_steps(running) if decodes else 0,
            page_size=page,
            waited_s=scheduler.waited_s,
            eager_launch_s=scheduler.windows.eager_launch_s,
            after_window=scheduler.after_window,
            window_yield=controller.window_yield.value,
            **controller.host_time.overheads(scheduler.after_window)._asdict(),
        )

    def most_steps(self, running: ScheduleBatch) -> int:
        """How many steps this batch could decode ahead: by its own end, its context and the KV pool."""
        scheduler, lengths = self._scheduler, running.seq_lens_cpu
        most = min(
            scheduler.controller.settings.max_look_ahead,
            batches.remaining_tokens(running.reqs),
            scheduler.model_config.context_len - int(lengths.max()),
        )
        return kv.most_look_ahead(lengths, kv.room(scheduler), scheduler.page_size, max(most, 0))


class QueueOrder:
    """Orders a queue anew where somebody has joined it or some time has passed; till then those that left are missing
    from it, and nothing else."""

    def __init__(self) -> None:
        self._last: Req | None = None  # of the queue as it was left, and how long that was
        self._length, self._ordered_s = 0, -_ORDER_AGE_S

    def of(self, waiting: list[Req], now_s: float, order: Callable[[], list[int]]) -> list[Req]:
        """The queue in order; ``order`` says in which. There must be somebody in it."""
        joined = waiting[-1] is not self._last or len(waiting) > self._length
        if joined or now_s - self._ordered_s >= _ORDER_AGE_S:
            waiting = [waiting[index] for index in order()]
            self._last, self._ordered_s = waiting[-1], now_s
        self._length = len(waiting)
        return waiting


def queue_order(waiting: list[Req], model: LatencyModel, now_s: float, gpus: int = 1) -> list[int]:
    """In which order to admit requests that so many GPUs prefill together. What it follows from is kept with each."""
    new = [req for req in waiting if req.conflux.placed != req.conflux.cached]
    if new:
        cached = np.array([req.conflux.cached for req in new], dtype=np.int64)
        uncached = np.maximum(np.array([_tokens(req) for req in new], dtype=np.int64) - cached, 1)
        alone_s = prefill_alone_s(model, uncached, cached) / gpus
        for req, *known in zip(new, uncached.tolist(), alone_s.tolist(), strict=True):
            progress = req.conflux
            # A request with all the time in the world must still be served while others keep coming.
            progress.place = progress.arrival_s, min(progress.ttft_slo_s, LONGEST_TTFT_S), *known
            progress.placed = progress.cached
    return order_queue(now_s, *np.array([req.conflux.place for req in waiting]).T).tolist()


def delivered_in(tbt_slo_s: float) -> float:
    """What is set aside of a target for a token's way to the client, in seconds."""
    return min(_DELIVERY_S, _DELIVERY_SHARE * tbt_slo_s)


def _tokens(req: Req) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)
