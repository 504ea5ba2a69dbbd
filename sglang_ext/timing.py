"""How long forwards took, without ever waiting for the device.

A forward is one call of the model worker: metadata, forward and sampling. A :class:`Span` is filled in when its times
are known: at once on a CPU, some iterations later on a GPU.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol

import torch


class Span:
    """Start and end of one forward, in seconds on :func:`time.perf_counter`'s clock; None until known.

    ``launch_s`` is how long the host took to launch it; 0 where launching is running.
    """

    __slots__ = ("_begin", "_begun_s", "_end", "_stopped", "end_s", "launch_s", "start_s")

    def __init__(self) -> None:
        self.launch_s = 0.0
        self.start_s: float | None = None
        self.end_s: float | None = None
        self._begin: Any = None
        self._begun_s = 0.0
        self._end: Any = None
        self._stopped = False

    @property
    def known(self) -> bool:
        return self.end_s is not None


class Clock(Protocol):
    def start(self) -> Span: ...
    def stop(self, span: Span) -> None: ...
    def begin(self, span: Span) -> None:
        """Count a forward's time from now on: the device may have waited for the host since it was started."""

    def drop(self, span: Span) -> None:
        """Forget a forward that failed while it was launched."""

    def poll(self) -> None:
        """Fill in the spans whose forwards have ended."""


class WallClock:
    """For devices whose forwards return when they are done."""

    def start(self) -> Span:
        span = Span()
        span.start_s = time.perf_counter()
        return span

    def stop(self, span: Span) -> None:
        span.end_s = time.perf_counter()

    def begin(self, span: Span) -> None:
        pass

    def drop(self, span: Span) -> None:
        pass

    def poll(self) -> None:
        pass


class EventClock:
    """CUDA events around each forward on the stream that is current when it is launched.

    Event pairs give differences only, with float32 resolution. Positions on the host's clock are summed up from
    differences to the forward before; the sum is tied to the host's clock anew whenever the device had been idle.
    """

    _IDLE_GAP_S = 0.05

    def __init__(self) -> None:
        self._open: deque[Span] = deque()
        self._previous: tuple[Any, float] | None = None  # an end event and its position

    def start(self) -> Span:
        span = Span()
        span._begin = torch.cuda.Event(enable_timing=True)
        span._end = torch.cuda.Event(enable_timing=True)
        self.begin(span)
        span.launch_s = -span._begun_s
        self._open.append(span)
        return span

    def begin(self, span: Span) -> None:
        span._begin.record()
        span._begun_s = time.perf_counter()

    def stop(self, span: Span) -> None:
        span._end.record()
        span.launch_s += time.perf_counter()
        span._stopped = True

    def drop(self, span: Span) -> None:
        self._open = deque(one for one in self._open if one is not span)

    def poll(self) -> None:
        # Another thread may be launching one; an event that was never recorded counts as ended.
        while self._open and self._open[0]._stopped and self._open[0]._end.query():
            span = self._open.popleft()
            start_s = span._begun_s
            if self._previous is not None:
                event, position_s = self._previous
                after_s = event.elapsed_time(span._begin) / 1e3
                if after_s < self._IDLE_GAP_S:
                    start_s = position_s + after_s
            span.start_s = start_s
            span.end_s = start_s + span._begin.elapsed_time(span._end) / 1e3
            self._previous = (span._end, span.end_s)
            span._begin = span._end = None


def make_clock(device: str) -> Clock:
    return EventClock() if device == "cuda" else WallClock()
