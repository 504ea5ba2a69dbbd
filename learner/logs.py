"""Log lines of the learner process: one an event on stderr, and no more of a kind than somebody wants to read."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

_MAX_KINDS = 256


class RateLimit(logging.Filter):
    """Let one record of each kind through per ``interval_s``; the next one says how many were held back.

    A kind is the message before its arguments are put in, so "rejected: %s" is one kind whatever the reason.
    """

    def __init__(self, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._last_s: dict[object, float] = {}
        self._held_back: dict[object, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        kind = record.msg
        if kind in self._last_s and now - self._last_s[kind] < self._interval_s:
            self._held_back[kind] = self._held_back.get(kind, 0) + 1
            return False
        if len(self._last_s) >= _MAX_KINDS:
            self._last_s.clear()
        self._last_s[kind] = now
        held_back = self._held_back.pop(kind, 0)
        if held_back:
            record.msg, record.args = f"{record.getMessage()} (and {held_back} more like it)", None
        return True


class OneLine(logging.Formatter):
    """One line per event, whatever the message."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).split())


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send this process's log and its warnings (numpy's, scikit-learn's) to stderr, rate limited."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("[%(asctime)s conflux-learner %(process)d] %(levelname)s: %(message)s"))
    handler.addFilter(RateLimit())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
