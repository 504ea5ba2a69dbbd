"""What passes between forwards, and between a client and the scheduler."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from learner.records import Iteration

_LEAST_SEEN = 8
# A longer wait is a pause of the load, not the host's work.
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Exposed host time in seconds, by where it falls; as measured on a machine with an H200 unless told otherwise.

    ``batch_s`` before a mixed batch or a decode step; ``drain_s`` more before a window; ``after_window_s`` after one.
    ``ingest_s``: from a client's sending until the scheduler sees the request; ``deliver_s``: from a token's end on the
    device until the client reads it.
    """

    batch_s: float = 0.05e-3
    drain_s: float = 1.5e-3
    after_window_s: float = 6e-3
    ingest_s: float = 3e-3
    deliver_s: float = 1e-3

    @classmethod
    def of_record(cls, iterations: Iterable[Iteration]) -> HostTimes:
        """Medians of what a record's iterations waited for the host; what it does not show stays as it is here."""
        batch: list[float] = []
        drain: list[float] = []
        after: list[float] = []
        follows_window = False
        for iteration in iterations:
            waited_s, window = iteration.host_overhead_s, len(iteration.streams) > 1
            if 0.0 < waited_s < _PAUSE_S:
                (after if follows_window else drain if window else batch).append(waited_s)
            follows_window = window
        found = cls()
        if len(batch) >= _LEAST_SEEN:
            found = replace(found, batch_s=statistics.median(batch))
        if len(drain) >= _LEAST_SEEN:
            found = replace(found, drain_s=max(statistics.median(drain) - found.batch_s, 0.0))
        if len(after) >= _LEAST_SEEN:
            found = replace(found, after_window_s=statistics.median(after))
        return found
