"""What is never tried is never learnt: now and then, with slack in hand, another mode than the best."""

from __future__ import annotations

import random

import numpy as np

from sglang_ext.policy.types import MODES, CandidateTable

_CLOSE = 0.85
"""What share of its mode's best rate a plan must have to be tried."""
_MANY, _FORGET = 8.0, 0.9998
"""After so many turns that found a plan the next come half as often; of these turns so much is left per iteration."""


class Explorer:
    """Bounded exploration, the same for the same seed and history.

    At most ``share`` of the iterations that could share the device (one :meth:`due` each) run another mode's plan:
    each earns that much credit, a turn costs one whether or not it finds a plan, and no more than ``BURST`` is saved
    up. What has been tried often is known, so credit comes ever more slowly, until those turns are long ago. Only plans
    whose largest gap stays below τ by ``slack`` (a fraction) are tried, and only while the chosen plan's does too: a
    prediction that is wrong by that much still breaks nothing. Of the other modes the one tried least is next, in any
    of its plans that come close to its best: to try a mode where it is at its worst would cost much and tell little.

    Only an ``auto`` that can run two halves at once explores: otherwise all its plans are mixed batches, which differ
    in size alone, and sizes vary by themselves.
    """

    BURST = 2.0

    def __init__(self, share: float = 0.02, slack: float = 0.2, seed: int = 0) -> None:
        """Raise ValueError unless ``share`` and ``slack`` lie in [0, 1)."""
        if not (0.0 <= share < 1.0 and 0.0 <= slack < 1.0):
            raise ValueError(f"share and slack must lie in [0, 1), not {share} and {slack}")
        self.share = share
        self.slack = slack
        self.tried = [0] * len(MODES)
        self._credit = self._turns = 0.0
        self._random = random.Random(seed)

    def due(self) -> bool:
        """Count one iteration; whether it may explore. Not at regular intervals, lest it follow the load's rhythm."""
        self._turns *= _FORGET
        self._credit = min(self._credit + self.share / (1.0 + self._turns / _MANY), self.BURST)
        if self._credit < 1.0 or self._random.random() >= 0.25:
            return False
        self._credit -= 1.0
        return True

    def pick(self, table: CandidateTable, chosen: int, tbt_slo_s: float) -> int | None:
        """A plan of another mode than the chosen one's to try; None without one that is safe."""
        mode = table["mode"].astype(np.int64)
        safe = (table["largest_gap_s"] <= tbt_slo_s * (1.0 - self.slack)) & (table["feasible"] > 0)
        if not safe[chosen]:
            return None
        safe &= (mode != mode[chosen]) & (table["prefill_tokens"] > 0)
        if not safe.any():
            return None
        others = np.unique(mode[safe]).tolist()
        least = min(others, key=lambda code: self.tried[code])
        rate = table["tokens_per_s"] * (safe & (mode == least))
        rows = np.flatnonzero(rate >= _CLOSE * rate.max()).tolist()
        self.tried[least] += 1
        self._turns += 1.0
        return int(self._random.choice(rows))
