"""What the host takes between forwards, as the device sees it: learnt from the times of the forwards themselves."""

from __future__ import annotations

import math
from typing import NamedTuple

_WEIGHT = 0.1
# A device that is idle for longer between two batches that are launched ahead has waited for the host.
_HOST_BOUND_S = 0.5e-3
# A longer time between two iterations is a pause (a weight update, say), and nobody's overhead.
_PAUSE_S = 0.1
# What is not seen for a while is forgotten: a mode that looked too slow once is tried again.
_KEPT = 0.999
# Around windows host time is bound by its mean and so many times its mean deviation: a bound is what a gap is held to.
_DEVIATIONS = 2.0


class Overheads(NamedTuple):
    """What the policy is told; see :class:`sglang_ext.policy.types.Situation`."""

    host_overhead_s: float
    drain_s: float
    after_window_s: float
    host_period_s: float


class Varying:
    """Moving averages of a time and of how far it is from that."""

    def __init__(self, mean_s: float = 0.0) -> None:
        self.mean_s, self.deviation_s = mean_s, 0.0

    def note(self, seconds: float) -> None:
        """Take in one more."""
        off_s = seconds - self.mean_s
        self.deviation_s += _WEIGHT * (abs(off_s) - self.deviation_s)
        self.mean_s += _WEIGHT * off_s

    def fade(self) -> None:
        """Forget a little."""
        self.mean_s, self.deviation_s = _KEPT * self.mean_s, _KEPT * self.deviation_s

    @property
    def upper_s(self) -> float:
        """What it seldom exceeds."""
        return self.mean_s + _DEVIATIONS * self.deviation_s


class WindowYield:
    """What windows served of what was predicted of them, in tokens per second: a moving average, less its deviation.

    A window's parts may each be predicted well and the whole not: a prefill that is launched kernel by kernel by a busy
    host, a step more than planned, an end that takes its time. A mixed batch is one CUDA graph. So windows have to
    promise more than it does, until they have shown that they keep it.
    """

    _UNTRIED = math.log(0.8)
    _WEIGHT, _KEPT = 0.2, 0.9995
    _LEAST, _MOST = math.log(0.2), math.log(1.25)

    def __init__(self) -> None:
        self._mean, self._deviation = self._UNTRIED, 0.0

    def note(self, share: float) -> None:
        """Take in a window that served this share of what was predicted."""
        log = min(max(math.log(max(share, 1e-9)), self._LEAST), self._MOST)
        self._deviation += self._WEIGHT * (abs(log - self._mean) - self._deviation)
        self._mean += self._WEIGHT * (log - self._mean)

    def fade(self) -> None:
        """Forget a little: what did not keep its word is tried again some day."""
        self._mean = self._UNTRIED + self._KEPT * (self._mean - self._UNTRIED)
        self._deviation *= self._KEPT

    @property
    def value(self) -> float:
        """What a predicted rate is to be multiplied by, at most 1."""
        return math.exp(min(self._mean - self._deviation, 0.0))


class HostTime:
    """Moving averages of exposed host time, by where it falls.

    Between mixed batches the host works while they run (``launches_ahead``), so that time between them means that it
    was late: then ``period_s`` is how fast it can be. Before a window the results of the last batch are taken first,
    after it those of its prefill, and nothing overlaps.
    """

    def __init__(self, launches_ahead: bool) -> None:
        self.launches_ahead = launches_ahead
        self.overhead_s = self.period_s = 0.0
        self.drained, self.after_window = Varying(), Varying()
        self._last_end_s: float | None = None
        self._after_window = False
        self._last_mixed_s: float | None = None

    def note(self, start_s: float, end_s: float, *, window: bool, mixed: bool, after_idle: bool) -> float:
        """Take in an iteration that ran from ``start_s`` to ``end_s``; returns the exposed host time before it."""
        exposed_s = 0.0
        if not after_idle and self._last_end_s is not None:
            exposed_s = max(start_s - self._last_end_s, 0.0)
            if exposed_s > _PAUSE_S:
                pass
            elif self._after_window:
                self.after_window.note(exposed_s)
            elif window:
                self.drained.note(exposed_s)
            else:
                self._between_batches(exposed_s, mixed)
        if not window and not self._after_window:
            self.drained.fade()
            self.after_window.fade()
        self._last_end_s, self._after_window = end_s, window
        self._last_mixed_s = end_s - start_s if mixed else None
        return exposed_s

    def _between_batches(self, exposed_s: float, mixed: bool) -> None:
        before_s = self._last_mixed_s if mixed and self.launches_ahead else None
        if before_s is not None and exposed_s > _HOST_BOUND_S:
            self.period_s += _WEIGHT * (before_s + exposed_s - self.period_s)
            return
        self.overhead_s += _WEIGHT * (exposed_s - self.overhead_s)
        if before_s is not None:
            self.period_s = min(self.period_s, before_s)

    def overheads(self, after_window: bool) -> Overheads:
        """Before and after the next iteration, which may follow a window."""
        after_s = max(self.after_window.upper_s, self.overhead_s)
        if after_window:
            return Overheads(after_s, 0.0, after_s, self.period_s)
        return Overheads(self.overhead_s, max(self.drained.upper_s - self.overhead_s, 0.0), after_s, self.period_s)

    def state(self) -> dict[str, float]:
        """For ``/server_info``, in milliseconds."""
        return {
            "host_overhead_ms": self.overhead_s * 1e3,
            "drained_overhead_ms": self.drained.mean_s * 1e3,
            "after_window_overhead_ms": self.after_window.mean_s * 1e3,
            "host_period_ms": self.period_s * 1e3,
        }
