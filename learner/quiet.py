"""Since when nothing but decode has run.

A GPU is slower for a while after work that heats it: of decode steps within some tens of milliseconds after a prefill
or a mixed batch one in a hundred takes 14 to 26 % longer than predicted, of all others 0.6 % (one H200, Qwen3-8B's
shape; ``docs/learner.md``). So steps of decode alone have a bound for each of the two.
"""

from __future__ import annotations

import math

from learner.records import Iteration

SETTLED_S = 0.08
"""So long after the last prefill row decode is settled."""


class Quiet:
    """Follows iterations in their order; where some are missing, nothing is known of what ran between."""

    def __init__(self) -> None:
        self._number = self._time_s = -math.inf
        self._busy_until_s = math.inf

    def settled(self, iteration: Iteration) -> list[list[bool]]:
        """Of each stream whether each step is one of decode alone, long enough after all else."""
        since_s = self._since_s(iteration)
        alone = all(stream.phase == "decode" for stream in iteration.streams)
        return [
            [alone and iteration.time_s + start_s - since_s >= SETTLED_S for start_s in stream.step_start_s]
            for stream in iteration.streams
        ]

    def note(self, iteration: Iteration) -> None:
        """Take in that this one has run."""
        busy_s = [
            iteration.time_s + max(stream.step_end_s, default=0.0)
            for stream in iteration.streams
            if stream.phase != "decode"
        ]
        self._busy_until_s = max([self._since_s(iteration), *busy_s])
        self._number, self._time_s = iteration.iteration, iteration.time_s

    def _since_s(self, iteration: Iteration) -> float:
        follows = iteration.iteration == self._number + 1 and iteration.time_s >= self._time_s
        return self._busy_until_s if follows else iteration.time_s
