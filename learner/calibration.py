"""What is kept about one group of forwards (a phase, alone or beside another stream) to level and bound its means."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import numpy.typing as npt

from learner.conformal import AdaptiveLevel, undisturbed_quantile
from learner.drift import DriftAlarm, DriftState
from learner.window import Batch, Window, WindowState

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# What a margin looks back on, and the newest of it that an offset does.
RECENT_SAMPLES, OFFSET_SAMPLES = 320, 48
# The correction counts once it has been judged on this many samples; errors are averaged over about as many.
JUDGED_SAMPLES = 64
# What is nearby adapts at once, so it may prove itself sooner.
NEARBY_SAMPLES = 12
# Each must err less than this multiple of what the mean without it does.
JUDGED_RATIO = 0.98
# Newest residuals that, all but a few on one side and by this much in the median, say that the past is stale.
DRIFT_SAMPLES, DRIFT, DRIFT_AGREEMENT = 24, 0.2, 0.9
# Fewer residuals than this give no margin.
LEAST_SCORES = 20
# The newest launches, of which this quantile is how long one takes if it does not wait for room in a queue.
LAUNCHES, LAUNCH_QUANTILE = 32, 0.25


class CalibrationState(msgspec.Struct, frozen=True):
    """A calibration's content for a state file."""

    recent: WindowState
    alpha: float
    unsettled: WindowState
    settled: list[int]
    settled_alpha: float
    stale_before: int
    judged: int
    error: float
    corrected_error: float
    plain_error: float
    nearby_error: float
    launches_s: list[float]
    alarm: DriftState


class Calibration:
    """Recent samples, miss level and drift of one group."""

    def __init__(self, target: float) -> None:
        self._recent = Window(RECENT_SAMPLES, RECENT_SAMPLES)
        self._level, self._settled_level = AdaptiveLevel(target), AdaptiveLevel(target)
        # Of samples that are settled and of others, those of the second kind alone: they may be rare.
        self._settled: deque[int] = deque(maxlen=RECENT_SAMPLES)
        self._unsettled = Window(RECENT_SAMPLES, RECENT_SAMPLES)
        self._residuals: deque[float] = deque(maxlen=DRIFT_SAMPLES)
        self._judged = 0
        self._error = self._corrected_error = 0.0
        self._plain_error = self._nearby_error = 0.0
        self._launches_s: deque[float] = deque(maxlen=LAUNCHES)
        self.alarm = DriftAlarm()
        # Samples accepted before this one are from before the newest drift.
        self.stale_before = 0
        # Medians of log(measured / mean) over recent samples, without the correction and with it.
        self.centre = self.corrected_centre = 0.0

    def judge(
        self,
        residual: float,
        correction: float,
        published: float,
        nearby: float,
        error: float,
        missed: bool,
        settled: bool = False,
    ) -> None:
        """Take note of how well a sample was predicted.

        ``residual``: log(measured / physical terms); ``correction``: the log correction it would have had;
        ``published``: log(measured / mean) but for what was nearby, and ``nearby`` that shift; ``error``:
        |mean / measured − 1| with all that was published; ``missed``: whether it exceeded its upper bound;
        ``settled``: which bound that was.
        """
        (self._settled_level if settled else self._level).update(missed)
        self.alarm.judge(error)
        self._residuals.append(published)
        self._judged += 1
        share = 1.0 / min(self._judged, JUDGED_SAMPLES)
        self._error += share * (abs(residual - self.centre) - self._error)
        corrected = abs(residual - correction - self.corrected_centre)
        self._corrected_error += share * (corrected - self._corrected_error)
        self._plain_error += share * (abs(published) - self._plain_error)
        self._nearby_error += share * (abs(published - nearby) - self._nearby_error)

    def add(self, row: FloatArray, serial: int, settled: bool = False) -> None:
        """Remember a sample as another window stored it; see :meth:`learner.window.Window.add`."""
        self._recent.add_row(row)
        if settled:
            self._settled.append(serial)
        else:
            self._unsettled.add_row(row)

    def launched(self, launch_s: float) -> None:
        """Take note of how long launching a forward kept the host."""
        self._launches_s.append(launch_s)

    @property
    def floor_s(self) -> float:
        """How long launching a forward takes; 0 while that is not known."""
        return float(np.quantile(self._launches_s, LAUNCH_QUANTILE)) if len(self._launches_s) >= LAUNCHES // 4 else 0.0

    def drifted(self, serial: int) -> bool:
        """Whether the newest residuals contradict the model; if so what came before them counts as stale."""
        # The sum is a cheap test that nearly always says no.
        if len(self._residuals) < DRIFT_SAMPLES or abs(sum(self._residuals)) < 0.5 * DRIFT * DRIFT_SAMPLES:
            return False
        residuals = np.array(self._residuals)
        if abs(float(np.median(residuals))) < DRIFT:
            return False
        positive = float((residuals > 0.0).mean())
        if max(positive, 1.0 - positive) < DRIFT_AGREEMENT:
            return False
        self._residuals.clear()
        self.stale_before = serial - DRIFT_SAMPLES
        return True

    def recent(self) -> Batch:
        """The newest samples since the last drift, oldest first."""
        return self._since_drift(self._recent)

    def settled(self, recent: Batch) -> BoolArray:
        """Which of some samples were settled."""
        return np.isin(recent.serial, np.array(self._settled, dtype=np.int64))

    def unsettled(self) -> Batch | None:
        """The newest samples that were not settled, as :meth:`recent`; None where none is."""
        return self._since_drift(self._unsettled) if self._settled else None

    def _since_drift(self, window: Window) -> Batch:
        batch = window.batch()
        return batch.take(batch.serial >= self.stale_before)

    @property
    def correction_weight(self) -> float:
        """1 while the correction has proved itself, else 0."""
        proved = self._judged >= JUDGED_SAMPLES and self._corrected_error < JUDGED_RATIO * self._error
        return 1.0 if proved else 0.0

    @property
    def nearby_weight(self) -> float:
        """1 while what is nearby has proved itself, else 0."""
        proved = self._judged >= NEARBY_SAMPLES and self._nearby_error < JUDGED_RATIO * self._plain_error
        return 1.0 if proved else 0.0

    def margin(self, scores: FloatArray, *, settled: bool = False) -> float | None:
        """Log margin over the mean for these log residuals, all settled or not; None if they are too few."""
        level = self._settled_level if settled else self._level
        return undisturbed_quantile(scores, level.alpha) if scores.size >= LEAST_SCORES else None

    def state(self) -> CalibrationState:
        """Content for a state file."""
        return CalibrationState(
            self._recent.state(),
            self._level.alpha,
            self._unsettled.state(),
            list(self._settled),
            self._settled_level.alpha,
            self.stale_before,
            self._judged,
            self._error,
            self._corrected_error,
            self._plain_error,
            self._nearby_error,
            list(self._launches_s),
            self.alarm.state(),
        )

    def restore(self, state: CalibrationState) -> None:
        """Replace the content by a state's. Raises ValueError if it is unsound."""
        errors = (state.error, state.corrected_error, state.plain_error, state.nearby_error)
        if (
            not np.isfinite([state.alpha, state.settled_alpha, *errors, *state.launches_s]).all()
            or min(state.launches_s, default=0.0) < 0.0
        ):
            raise ValueError("a stored calibration holds numbers that are not finite, or negative times")
        self._recent.restore(state.recent)
        self._unsettled.restore(state.unsettled)
        self.alarm.restore(state.alarm)
        target = self._level.target
        self._level, self._settled_level = (
            AdaptiveLevel(target, state.alpha),
            AdaptiveLevel(target, state.settled_alpha),
        )
        self._settled = deque(state.settled, maxlen=RECENT_SAMPLES)
        self.stale_before, self._judged = state.stale_before, state.judged
        self._error, self._corrected_error, self._plain_error, self._nearby_error = errors
        self._launches_s = deque(state.launches_s, maxlen=LAUNCHES)
