"""An alarm for predictions that are further off than they usually are, for one group of forwards."""

from __future__ import annotations

import math

import msgspec

# Errors are |predicted − measured| / measured. Their recent mean weighs each new one by this share: as steady as the
# plain mean of the newest 64.
SHARE = 1.0 / 32.0
# A single error counts no more than this multiple of the usual one, but this at least and most, so that it takes more
# than a few pauses to raise the alarm.
CUT_FACTOR, LEAST_CUT, MOST_CUT = 4.0, 0.25, 1.0
# What the recent mean usually is: its running median, which moves by 1 / so much per sample, and is at least this.
SLOWNESS, LEAST_USUAL = 512, 0.02
# Drift begins beyond this multiple of the usual error, so never below 5 %, and ends within this share of that.
FACTOR, INSIDE = 2.5, 0.75
# While a group is young its model still settles, and whatever its error is counts as usual.
YOUNG = 128


class DriftState(msgspec.Struct, frozen=True):
    """An alarm's content for a state file."""

    judged: int
    recent: float
    usual: float
    drifting: bool


class DriftAlarm:
    """Compares the recent error of a group's published predictions with what it usually is."""

    def __init__(self) -> None:
        self._judged = 0
        self._recent, self._usual = 0.0, LEAST_USUAL
        self.drifting = False

    @property
    def recent(self) -> float:
        """Mean error of about the newest 64 forwards, single ones cut."""
        return self._recent

    @property
    def limit(self) -> float:
        """Beyond which recent error drift begins."""
        return FACTOR * self._usual

    def judge(self, error: float) -> None:
        """Take note of one forward's ``error``, |predicted − measured| / measured."""
        self._judged += 1
        cut = min(max(CUT_FACTOR * self._usual, LEAST_CUT), MOST_CUT)
        self._recent += max(SHARE, 1.0 / self._judged) * (min(error, cut) - self._recent)
        if self._judged <= YOUNG:
            usual = self._recent
        else:
            step = 1.0 / min(self._judged, SLOWNESS)
            usual = self._usual * math.exp(math.copysign(step, self._recent - self._usual))
        self._usual = min(max(usual, LEAST_USUAL), MOST_CUT)
        self.drifting = self._recent > self.limit * (INSIDE if self.drifting else 1.0)

    def state(self) -> DriftState:
        """Content for a state file."""
        return DriftState(self._judged, self._recent, self._usual, self.drifting)

    def restore(self, state: DriftState) -> None:
        """Replace the content by a state's. Raises ValueError if it is unsound."""
        sound = 0.0 <= state.recent <= MOST_CUT and LEAST_USUAL <= state.usual <= MOST_CUT  # not so for NaN
        if not sound or state.judged < 0:
            raise ValueError("a stored drift alarm holds numbers that cannot be")
        self._judged, self._recent, self._usual = state.judged, state.recent, state.usual
        self.drifting = state.drifting
