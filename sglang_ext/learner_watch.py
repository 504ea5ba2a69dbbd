"""What is said in the log about the learner, from what the controller hears of it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from learner.snapshot import COLD_MARGIN, Snapshot

if TYPE_CHECKING:
    from learner.client import ClientStats

_SILENT_S = 30.0
_DRIFT_SAID_EVERY_S = 60.0


class LearnerWatch:
    """``say(what, message)`` warns once of each ``what``; ``logger`` is whose name the rest is said in."""

    def __init__(self, say: Callable[[str, str], None], logger: logging.Logger) -> None:
        self.drifting: list[str] = []
        """Groups of forwards whose times are not as learnt, by the newest snapshot."""
        self._say, self._logger = say, logger
        self._created_s = time.perf_counter()
        self._said_s: dict[str, float] = {}
        self._open: set[str] = set()

    def heard(self, stats: ClientStats) -> None:
        """Say once, each, that the learner is silent or that what it sends cannot be used."""
        silent_s = stats.last_heartbeat_age_s
        if silent_s is None:
            silent_s = time.perf_counter() - self._created_s
        if silent_s > _SILENT_S:
            self._say("silent", f"no word from the learner for {silent_s:.0f} s; predictions stay as they are")
        if stats.rejected:
            self._say("rejected", "the learner sent something that cannot be used; it is ignored and counted")

    def seen(self, snapshot: Snapshot) -> None:
        """Say which groups have come into drift since the last snapshot, and for which it is over; of one group no
        more than once in so long."""
        before, self.drifting = self.drifting, snapshot.drifting_groups
        now_s = time.perf_counter()
        for group in self.drifting:
            if group not in before and now_s - self._said_s.get(group, -math.inf) > _DRIFT_SAID_EVERY_S:
                text = "conflux: %s takes other times than learnt; meanwhile its bound is at least %g x the roofline"
                self._logger.warning(text, group, COLD_MARGIN)
                self._said_s[group] = now_s
                self._open.add(group)
        for group in self._open.difference(self.drifting):
            self._logger.info("conflux: %s takes about what is predicted again", group)
            self._open.discard(group)
