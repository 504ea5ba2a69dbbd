"""The look-ahead window: k decode steps launched back to back, their tokens taken one step at a time.

The window, not the requests, owns the KV slots ahead of the accepted length. Each accepted step hands one slot per
request over; closing frees what is left. It opens and closes inside one ``run_batch``, so retraction, pause, flush
and weight update see only states that stock has too.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.compat import batch as batches
from sglang_ext.compat import kv

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_ext.compat.scheduler import ConfluxScheduler


class Window:
    """``steps`` queued decode steps of ``running``, whose slots must fit."""

    def __init__(self, scheduler: ConfluxScheduler, running: ScheduleBatch, steps: int) -> None:
        self._scheduler = scheduler
        self._running = running
        self._requests: list[Req] = running.reqs[:]
        self._base: list[int] = running.seq_lens_cpu.tolist()
        for request, length in zip(self._requests, self._base, strict=True):
            if not request.kv_committed_len == request.kv.kv_allocated_len == length:
                raise RuntimeError(
                    f"request {request.rid} has {length} tokens, {request.kv_committed_len} committed and "
                    f"{request.kv.kv_allocated_len} allocated KV slots: an iteration was not drained before a window"
                )
        self._locations = kv.allocate_ahead(scheduler, running, steps)
        self._launched: list[Future[Any]] = []
        self._given_back: list[torch.Tensor] = []
        self.size = steps
        self.accepted = 0
        self.discarded_tokens = 0
        self.returned_slots = 0
        self.ends: list[int] = []

    def launch_all(self) -> None:
        """Queue every step. No token value is read on the host before the last one is launched."""
        scheduler = self._scheduler
        for index in range(self.size):
            step = batches.decode_step(self._running, index, self._locations)
            self._launched.append(scheduler.launcher.launch(lambda step=step: scheduler.run_stock(step)))
        # The running batch goes on from behind the window.
        batches.advance(self._running, self.size)
        self._running.input_ids = None
        self._running.out_cache_loc = None

    def accept_all(self) -> None:
        """Take each step's tokens as it finishes: append, check for the end, stream."""
        for _ in range(self.size - self.accepted):
            self._accept_next()

    def _accept_next(self) -> None:
        scheduler = self._scheduler
        result, batch, _ = self._launched[self.accepted].result()
        live = [not request.finished() for request in self._requests]
        self.discarded_tokens += live.count(False)
        # As in stock's overlap, the KV of this step's token counts as written: the next step writes it.
        own = min(self.accepted + 2, self.size)
        for request, length, alive in zip(self._requests, self._base, live, strict=True):
            if alive:
                request.kv_committed_len = request.kv.kv_allocated_len = length + own
                request.decode_batch_idx += 1
        scheduler.process_batch_result(batch, result)
        self.accepted += 1
        for index, request in enumerate(self._requests):
            if live[index] and request.finished():
                self.ends.append(self.accepted)
                first = kv.ceil_to(self._base[index] + own, scheduler.page_size) - self._base[index]
                if first < self.size:
                    self._given_back.append(self._locations[index, first:])

    def close(self) -> None:
        """Free what finished requests did not need."""
        self.returned_slots = sum(len(locations) for locations in self._given_back)
        kv.free(self._scheduler, self._given_back)
        self._given_back = []
        self._launched.clear()


@dataclasses.dataclass(slots=True)
class WindowStats:
    """What windows did so far: how many of each size, at which of their steps requests ended, what went unused."""

    by_size: Counter[int] = dataclasses.field(default_factory=Counter)
    ends_at_step: Counter[int] = dataclasses.field(default_factory=Counter)
    discarded_tokens: int = 0
    returned_slots: int = 0

    def add(self, window: Window) -> None:
        self.by_size[window.size] += 1
        self.ends_at_step.update(window.ends)
        self.discarded_tokens += window.discarded_tokens
        self.returned_slots += window.returned_slots

    def to_dict(self) -> dict[str, Any]:
        return {
            "by_size": {str(size): count for size, count in sorted(self.by_size.items())},
            "ends_at_step": {str(step): count for step, count in sorted(self.ends_at_step.items())},
            "discarded_tokens": self.discarded_tokens,
            "returned_slots": self.returned_slots,
        }
