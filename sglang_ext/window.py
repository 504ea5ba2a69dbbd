"""The look-ahead window: k decode steps launched back to back, their tokens taken one step at a time.

The window, not the requests, owns the KV slots ahead of the accepted length. Each accepted step hands one slot per
request over; closing frees what is left. It opens and closes inside one ``run_batch``, so retraction, pause, flush
and weight update see only states that stock has too.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.compat import batch as batches
from sglang_ext.compat import kv

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_ext.compat.scheduler import ConfluxScheduler
    from sglang_ext.timing import Span


class Pace:
    """When a window's steps end. ``step_s``: how long one is expected to take, until two have ended."""

    def __init__(self, step_s: float) -> None:
        self.step_s = max(step_s, 1e-3)
        self._last_s = time.perf_counter()
        self._any = False

    def step_ended(self) -> None:
        """A step's tokens have been taken."""
        now_s = time.perf_counter()
        if self._any:
            self.step_s = max(now_s - self._last_s, 1e-3)
        self._last_s, self._any = now_s, True

    def left_s(self, steps: int) -> float:
        """How long so many more steps will take."""
        return self._last_s + steps * self.step_s - time.perf_counter()


class Window:
    """Decode steps of ``running``, at most as many as ``locations`` [requests, steps], their KV slots, has columns.

    ``launch_step`` launches one of them; its future gives the result, the batch to process it with, what it holds on
    to, and its times.
    """

    def __init__(
        self,
        scheduler: ConfluxScheduler,
        running: ScheduleBatch,
        locations: torch.Tensor,
        launch_step: Callable[[ScheduleBatch], Future[Any]],
    ) -> None:
        self._scheduler = scheduler
        self._running = running
        self._start = copy.copy(running)
        self._requests: list[Req] = running.reqs[:]
        self._base: list[int] = running.seq_lens_cpu.tolist()
        for request, length in zip(self._requests, self._base, strict=True):
            if not request.kv_committed_len == request.kv.kv_allocated_len == length:
                raise RuntimeError(
                    f"request {request.rid} has {length} tokens, {request.kv_committed_len} committed and "
                    f"{request.kv.kv_allocated_len} allocated KV slots: an iteration was not drained before a window"
                )
        self._locations = locations
        self._launch_step = launch_step
        self._launched: list[Future[Any]] = []
        self._given_back: list[torch.Tensor] = []
        self.accepted = 0
        self.prefill_taken = False
        self.first_tokens_at_s: float | None = None  # of those that go on decoding
        self.discarded_tokens = 0
        self.returned_slots = 0
        self.error: Exception | None = None
        self.ends: list[int] = []
        self.spans: list[Span] = []

    @property
    def launched(self) -> int:
        return len(self._launched)

    @property
    def pending(self) -> bool:
        """Whether a launched step's tokens have not been taken."""
        return self.accepted < self.launched

    @property
    def outstanding(self) -> int:
        """Steps that have been launched and not taken."""
        return self.launched - self.accepted

    @property
    def has_ended(self) -> bool:
        """Whether the step whose tokens are to be taken next has ended, as far as that can be seen without waiting."""
        future = self._launched[self.accepted]
        if not future.done():
            return False
        copied = future.result()[0].copy_done
        return copied is None or bool(copied.query())

    @property
    def can_grow(self) -> bool:
        room = self.launched < self._locations.shape[1] and self.error is None
        return room and not all(request.finished() for request in self._requests)

    def launch(self, steps: int) -> None:
        """Queue ``steps`` more. No token value is read on the host in between.

        If one cannot be launched that is the last: see ``error``.
        """
        before = self.launched
        for index in range(before, before + steps):
            try:
                self._launched.append(self._launch_step(batches.decode_step(self._start, index, self._locations)))
            except Exception as error:
                self.error = error
                break
        # The running batch goes on from behind the window.
        batches.advance(self._running, self.launched - before)
        self._running.input_ids = None
        self._running.out_cache_loc = None

    def accept_next(self) -> None:
        """Take the next step's tokens when it has finished: append, check for the end, stream."""
        scheduler = self._scheduler
        result, batch, _, span = self._launched[self.accepted].result()
        self.spans.append(span)
        live = [not request.finished() for request in self._requests]
        self.discarded_tokens += live.count(False)
        # As in stock's overlap, the KV of this step's token counts as written: the next step writes it.
        own = min(self.accepted + 2, self.launched)
        for request, length, alive in zip(self._requests, self._base, live, strict=True):
            if alive:
                request.kv_committed_len = request.kv.kv_allocated_len = length + own
                request.decode_batch_idx += 1
        scheduler.process_batch_result(batch, result)
        self.accepted += 1
        for index, request in enumerate(self._requests):
            if live[index] and request.finished():
                self.ends.append(self.accepted)
                self._give_back(index, own)

    def _give_back(self, index: int, own: int) -> None:
        first = kv.ceil_to(self._base[index] + own, self._scheduler.page_size) - self._base[index]
        if first < self._locations.shape[1]:
            self._given_back.append(self._locations[index, first:])

    def close(self) -> None:
        """Free what finished requests did not need, and what no step was launched for."""
        for index, request in enumerate(self._requests):
            if not request.finished():
                self._give_back(index, self.launched)
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
        self.by_size[window.accepted] += 1
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
