"""Where the halves of a window run.

A *lane* is the stream, with its set of TPCs, that a forward is launched on. Devices that cannot run two halves at once
have one lane for everything.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Lanes(Protocol):
    """``concurrent``: the two halves of a window run at once. Counts of SMs are in TPCs."""

    concurrent: bool
    may_outlast: bool
    """A prefill may still run when the planned decode steps have ended; then more of them are launched."""
    serial: bool
    """For tests: the same lanes, but a prefill begins when the decode steps have ended."""
    levels: tuple[int, ...]
    """TPC counts that decode can have to itself, or that prefill can be kept off while decode runs on all."""

    def window(self, tpcs: int) -> AbstractContextManager[None]:
        """Around a window that gives decode ``tpcs``: what ran before and what runs after it is ordered with it."""

    def decoding(self, tpcs: int) -> AbstractContextManager[None]:
        """Around the launch of one decode step of a window that gives decode ``tpcs``."""

    def prefilling(self, tpcs: int) -> AbstractContextManager[None]:
        """Around the launch of a window's prefill on ``tpcs``."""

    def prefill_runs(self) -> bool:
        """Whether the window's prefill, launched as a whole, still runs. False where lanes are not concurrent."""

    def state(self) -> dict[str, Any]:
        """For ``/server_info``."""


class OneLane:
    """A CPU, or a GPU without SM control: a window's halves run one after the other."""

    concurrent = False
    may_outlast = serial = False
    levels: tuple[int, ...] = ()

    def __init__(self, reason: str = "a CPU has no SMs to share") -> None:
        self.reason = reason

    def window(self, tpcs: int) -> AbstractContextManager[None]:
        return nullcontext()

    def decoding(self, tpcs: int) -> AbstractContextManager[None]:
        return nullcontext()

    def prefilling(self, tpcs: int) -> AbstractContextManager[None]:
        return nullcontext()

    def prefill_runs(self) -> bool:
        return False

    def state(self) -> dict[str, Any]:
        return {"concurrent": False, "reason": self.reason}


class RandomLane(OneLane):
    """For tests, on any device: a prefill that seems to run on for a random time, or fails."""

    may_outlast = True
    failing = (2, 5)
    """Which windows' prefills cannot be launched."""
    goes_on = 0.99
    """How likely one still runs when it has been asked for once more."""

    def __init__(
        self, seed: int, fails: bool = True, around_prefill: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        super().__init__("random")
        self._around_prefill = around_prefill
        self._random = random.Random(seed)
        self._prefills, self._failing = 0, self.failing if fails else ()
        self._runs = False

    def prefilling(self, tpcs: int) -> AbstractContextManager[None]:
        self._prefills += 1
        if self._prefills in self._failing:
            raise RuntimeError("no prefill here: a test")
        self._runs = True
        return self._around_prefill()

    def prefill_runs(self) -> bool:
        self._runs = self._runs and self._random.random() < self.goes_on
        return self._runs
