"""Wait for other processes without assuming that they are fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

DEADLINE_S = 120.0

T = TypeVar("T")


def eventually(ask: Callable[[], T], every_s: float = 0.005, deadline_s: float = DEADLINE_S) -> T:
    """Return the first true answer; fail when there is none within the deadline."""
    end_s = time.monotonic() + deadline_s
    while True:
        if answer := ask():
            return answer
        if time.monotonic() > end_s:
            raise AssertionError(f"nothing happened within {deadline_s:g} s")
        time.sleep(every_s)
