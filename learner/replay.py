"""Prequential replay: a record through a fresh learner in arrival order; each step is predicted, then learnt from.

Beside the learner stand the roofline alone, a persistence baseline, and what the server itself predicted at the time
("live", with whatever snapshot it had). All four are judged on the same steps: those that persistence has an answer
for, which leaves out the first of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from learner.accuracy import Accuracy, accuracy
from learner.columns import PHASES
from learner.estimator import OnlineEstimator, StepPrediction
from learner.hindsight import Hindsight, HindsightCount
from learner.persistence import Persistence
from learner.prior import shipped_prior
from learner.records import Header, Iteration
from learner.samples import MAX_STEP_S, Sample, samples_of
from learner.snapshot import MAX_RATIO, MIN_RATIO

FloatArray = npt.NDArray[np.float64]
PREDICTORS = ("learner", "roofline", "persistence", "live")
WINDOWS = 20


@dataclass(frozen=True, slots=True)
class Steps:
    """Every judged step, column by column, in the order of the record."""

    time_s: FloatArray  # [n] start of its iteration, after the first one
    phase: npt.NDArray[np.str_]  # [n]
    mode: npt.NDArray[np.str_]  # [n]
    version: npt.NDArray[np.int64]  # [n] of the snapshot behind the live prediction, 0 for the roofline
    measured_s: FloatArray  # [n]
    learner_s: FloatArray  # [n]
    learner_upper_s: FloatArray  # [n]
    roofline_s: FloatArray  # [n]
    persistence_s: FloatArray  # [n]
    live_s: FloatArray  # [n]
    live_upper_s: FloatArray  # [n]

    def __len__(self) -> int:
        return int(self.measured_s.size)

    def where(self, mask: npt.NDArray[np.bool_ | np.intp]) -> Steps:
        """The steps that a mask, or an array of indices, picks."""
        return Steps(*(getattr(self, name)[mask] for name in self.__slots__))

    def predicted_s(self, predictor: str) -> FloatArray:
        """What one of :data:`PREDICTORS` said, [n]."""
        column: FloatArray = getattr(self, f"{predictor}_s")
        return column

    def upper_s(self, predictor: str) -> FloatArray | None:
        """The upper bound of one of :data:`PREDICTORS`, None if it gives none."""
        bound: FloatArray | None = getattr(self, f"{predictor}_upper_s", None)
        return bound


@dataclass(frozen=True, slots=True)
class Group:
    """The errors of every predictor over some of the steps."""

    name: str
    steps: int
    by_predictor: dict[str, Accuracy]


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the record with about as many steps as any other: MAPE in percent by predictor."""

    start_s: float
    end_s: float
    steps: int
    mape_pct: dict[str, float]


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What :func:`replay` found. Groups without a step are left out.

    ``unusable_steps`` had timings that the learner refused; ``unjudged_steps`` had no neighbour yet. ``live_learnt``
    covers the steps whose live prediction came from a learnt snapshot, None if there are none; ``hindsight`` the
    decisions whose plans were recorded, likewise.
    """

    header: Header
    iterations: int
    judged_steps: int
    unusable_steps: int
    unjudged_steps: int
    duration_s: float
    refits: int
    last_live_version: int
    total: Group
    first_half: Group
    second_half: Group
    phases: list[Group]
    modes: list[Group]
    live_learnt: Group | None
    windows: list[Window]
    hindsight: Hindsight | None


class ReplayError(ValueError):
    """The record has nothing to judge."""


def replay(
    header: Header,
    iterations: Iterable[Iteration],
    *,
    progress: Callable[[], object] | None = None,
) -> tuple[ReplayReport, Steps]:
    """Run a record through a fresh learner. ``progress`` is called after every iteration.

    The learner refits whenever it has enough new samples; a live one may also have to wait, for it bounds its share of
    a core. Raises :class:`ReplayError` if the record has fewer than two steps that can be judged.
    """
    run = _Run(OnlineEstimator(header.model, header.device, prior=shipped_prior(header.device)))
    for iteration in iterations:
        run.step(iteration)
        if progress is not None:
            progress()
    steps = run.steps()
    if len(steps) < 2:
        raise ReplayError(f"{run.iterations} iterations, but fewer than two steps that can be judged")
    return _report(header, run, steps), steps


def group(name: str, steps: Steps) -> Group:
    """Return the errors of every predictor over ``steps``. Raises ValueError if there are none."""
    return Group(
        name,
        len(steps),
        {who: accuracy(steps.predicted_s(who), steps.measured_s, steps.upper_s(who)) for who in PREDICTORS},
    )


def windows(steps: Steps, count: int = WINDOWS) -> list[Window]:
    """Cut ``steps`` into at most ``count`` windows of equal numbers of steps."""
    found = []
    for at in np.array_split(np.arange(len(steps)), min(count, len(steps))):
        part = steps.where(at)
        mape = {who: accuracy(part.predicted_s(who), part.measured_s).mape_pct for who in PREDICTORS}
        found.append(Window(float(part.time_s[0]), float(part.time_s[-1]), len(part), mape))
    return found


class _Run:
    """The state of one replay."""

    def __init__(self, estimator: OnlineEstimator) -> None:
        self._estimator = estimator
        self._persistence = Persistence()
        self.hindsight = HindsightCount()
        self._rows: list[tuple[float, str, str, int, float, float, float, float, float, float, float]] = []
        self._start_s: float | None = None
        self.end_s = 0.0
        self.iterations = self.refits = self.unusable = self.unjudged = self.last_version = 0

    def step(self, iteration: Iteration) -> None:
        self.iterations += 1
        self.hindsight.add(iteration)
        if self._start_s is None:
            self._start_s = iteration.time_s
        self.end_s = iteration.time_s - self._start_s
        self.last_version = max(self.last_version, iteration.model_version)
        try:
            samples = samples_of(iteration)
            predictions = self._estimator.predict_iteration(iteration)
        except ValueError:
            self.unusable += sum(len(stream.step_end_s) for stream in iteration.streams)
            return
        judged = [
            (sample, predicted)
            for sample, predicted in zip(samples, predictions, strict=True)
            if _possible(sample.measured_s, predicted.roofline_s)
        ]
        self.unusable += len(samples) - len(judged)
        for sample, predicted in judged:
            self._judge(iteration, sample, predicted)
        for sample, _ in judged:
            self._persistence.observe(iteration.streams[sample.stream].phase, sample)
        self._estimator.observe(iteration)
        if self._estimator.ready() and self._estimator.fit() is not None:
            self.refits += 1

    def steps(self) -> Steps:
        columns = list(zip(*self._rows, strict=True)) or [()] * 11
        kinds = [np.float64, np.str_, np.str_, np.int64, *[np.float64] * 7]
        return Steps(*(np.array(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True)))

    def _judge(self, iteration: Iteration, sample: Sample, predicted: StepPrediction) -> None:
        stream = iteration.streams[sample.stream]
        persisted_s = self._persistence.predict(stream.phase, sample)
        if persisted_s is None:
            self.unjudged += 1
            return
        self._rows.append(
            (
                self.end_s,
                stream.phase,
                iteration.mode,
                iteration.model_version,
                sample.measured_s,
                predicted.mean_s,
                predicted.upper_s,
                predicted.roofline_s,
                persisted_s,
                stream.predicted_s[sample.step],
                stream.upper_s[sample.step],
            )
        )


def _possible(measured_s: float, roofline_s: float) -> bool:
    """Whether a learner would learn from that time (NaN fails every comparison)."""
    return 0.0 < measured_s <= MAX_STEP_S and MIN_RATIO * roofline_s <= measured_s <= MAX_RATIO * roofline_s


def _report(header: Header, run: _Run, steps: Steps) -> ReplayReport:
    half = np.arange(len(steps)) < (len(steps) + 1) // 2
    learnt = steps.version > 0
    return ReplayReport(
        header=header,
        iterations=run.iterations,
        judged_steps=len(steps),
        unusable_steps=run.unusable,
        unjudged_steps=run.unjudged,
        duration_s=run.end_s,
        refits=run.refits,
        last_live_version=run.last_version,
        total=group("all", steps),
        first_half=group("first half", steps.where(half)),
        second_half=group("second half", steps.where(~half)),
        phases=[group(phase, steps.where(steps.phase == phase)) for phase in PHASES if (steps.phase == phase).any()],
        modes=[group(mode, steps.where(steps.mode == mode)) for mode in sorted(set(steps.mode.tolist()))],
        live_learnt=group("live, learnt", steps.where(learnt)) if learnt.any() else None,
        windows=windows(steps),
        hindsight=run.hindsight.result(),
    )
