"""The online model: learns from timed iterations, publishes snapshots, survives a restart.

Two stages. First, measured time as a non-negative sum of physical terms (:func:`learner.fitting.fit_terms`): it
extrapolates, and is monotone in S. Second, a smooth bounded log correction by batch composition
(:func:`learner.fitting.fit_correction`), used per group only while it predicts better before the fact. On top, per
group (phase, alone or beside another stream): a log offset that follows the newest residuals, so that a change of
level is met at once and the terms catch up later; a short-lived shift by the newest like forwards
(:mod:`learner.nearby`), likewise used only while it helps; bounds on mean / roofline; the time that launching takes as
the least; and an adaptive conformal margin. Forwards that waited for the host all along tell of that least time only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from learner.calibration import Calibration, CalibrationState
from learner.columns import DECODE, PHASES, TERMS
from learner.contention import CONTENTION_TERMS
from learner.device import DeviceProfile
from learner.fitting import fit_correction, fit_terms, logs_of, ratio_bounds, weighted_quantile
from learner.latency import LatencyModel, Terms
from learner.levels import level
from learner.nearby import points_of
from learner.prior import Prior
from learner.quiet import Quiet
from learner.records import Iteration
from learner.samples import MAX_STEP_S, Forward, Sample, samples_of
from learner.shape import ModelShape
from learner.snapshot import GROUPS, MAX_FLOOR_S, MAX_RATIO, MIN_RATIO, Snapshot
from learner.window import Batch, Window, WindowState

FloatArray = npt.NDArray[np.float64]

_SCHEMA = 6
COVERAGE = 0.99
# The first fits come after FEWEST_NEW samples each; later one is due when a 64th is new, within the other two.
FEWEST_NEW, LEAST_NEW, MOST_NEW = 16, 4, 256
# After how many younger samples one counts half; it never counts less than LEAST_WEIGHT, so that what is seen rarely
# stays known. Before a drift of its group it counts STALE_WEIGHT of that.
HALF_LIFE, LEAST_WEIGHT, STALE_WEIGHT = 400.0, 0.05, 0.1
# What the size of residuals is judged by, before the newest of them are published.
RECENT_RESIDUALS = 96
CORRECTION_SAMPLES = 64
# A stratum holds at most this part of the window: more for the usual, less for what is rare.
STRATUM = 8


class StepPrediction(NamedTuple):
    """What is predicted for one timed step before learning from it."""

    mean_s: float
    upper_s: float
    roofline_s: float


class _Steps(NamedTuple):
    """Consecutive samples that differ in nothing but the decodes' context."""

    samples: list[Sample]
    terms: Terms
    beside: Terms | None
    share: FloatArray | None  # [steps]
    settled: list[bool]  # [steps]


class _State(msgspec.Struct, frozen=True):
    """What a state file holds."""

    schema: int
    shape: ModelShape
    profile: DeviceProfile
    accepted: int
    rejected: int
    window: WindowState
    calibrations: list[CalibrationState]
    snapshot: Snapshot | None


class OnlineEstimator:
    """Learns how long forwards of one model take on one device. Not thread-safe; does no I/O.

    ``window`` is the most samples that a fit looks back on; ``prior`` is what it starts from and is drawn towards, None
    the roofline. ``accepted`` and ``rejected`` count samples.
    ``seed`` is accepted for symmetry with randomised estimators; nothing here is random.
    """

    def __init__(
        self,
        shape: ModelShape,
        profile: DeviceProfile,
        *,
        window: int = 2048,
        seed: int = 0,
        key: str = "",
        prior: Prior | None = None,
    ) -> None:
        del seed
        self._key = key
        self._cold = None if prior is None else prior.snapshot()
        self._model = LatencyModel(shape, profile, self._cold)
        self._window = Window(window, max(1, window // STRATUM), profile.tpcs)
        self._calibrations = [Calibration(1.0 - COVERAGE) for _ in range(GROUPS)]
        self._fitted_at = self._published_at = 0
        self._drifted = False
        self._quiet = Quiet()
        self.accepted = 0
        self.rejected = 0

    @property
    def model(self) -> LatencyModel:
        """The model as last fitted or restored; the roofline before."""
        return self._model

    def observe(self, iteration: Iteration) -> int:
        """Judge the current model by an iteration's timings, then store them; returns how many were accepted.

        A timing that is not finite, not positive, or absurd against the roofline is rejected and counted, as is every
        step of an iteration whose batch makes no sense. Never raises for what a record holds.
        """
        try:
            steps = list(self._steps(iteration))
        except ValueError:
            self.rejected += sum(len(stream.step_end_s) for stream in iteration.streams)
            return 0
        before = self.accepted
        for step in steps:
            self._learn(step)
        if self.accepted > before:
            self._quiet.note(iteration)
        return self.accepted - before

    def predict_iteration(self, iteration: Iteration) -> list[StepPrediction]:
        """Predictions of the current model, in the order of :func:`learner.samples.samples_of`.

        Raises ValueError as that does.
        """
        predictions: list[StepPrediction] = []
        for steps in self._steps(iteration):
            predicted = self._model.predict(steps.terms, steps.beside, steps.share, steps.settled)
            predictions.extend(StepPrediction(*row) for row in np.stack(predicted, axis=1).tolist())
        return predictions

    def ready(self) -> bool:
        """Whether there is something new to publish."""
        return self._fit_due() or (self._model.version > 0 and self.accepted > self._published_at)

    def _fit_due(self) -> bool:
        """Whether enough samples are new for a fit, or a few contradict the model."""
        new = self.accepted - self._fitted_at
        few = FEWEST_NEW if self.accepted < 2 * FEWEST_NEW else max(LEAST_NEW, self.accepted // 64)
        return new >= min(few, MOST_NEW) or (self._drifted and new > 0)

    def fit(self) -> Snapshot | None:
        """Publish the next snapshot: of a fit of the window if one is due, else the last fit with what is nearby now.

        None while there are fewer than FEWEST_NEW samples.
        """
        batch = self._window.batch()
        if len(batch) < FEWEST_NEW:
            return None
        self._published_at = self.accepted
        if self._fit_due() or not self._model.version:
            draft = self._fitted(batch)
        else:
            draft = msgspec.structs.replace(
                self._model.snapshot,
                version=self._model.version + 1,
                samples=self.accepted,
                created_unix_s=time.time(),
            )
        draft = self._look_nearby(draft, batch)
        draft.validate()
        self._model = self._model.with_snapshot(draft)
        return draft

    def _fitted(self, batch: Batch) -> Snapshot:
        self._fitted_at, self._drifted = self.accepted, False
        weights = np.maximum(LEAST_WEIGHT, 0.5 ** ((self.accepted - batch.serial) / HALF_LIFE))
        stale_before = np.array([calibration.stale_before for calibration in self._calibrations])
        weights[batch.serial < stale_before[batch.group]] *= STALE_WEIGHT
        coefficients, contention = fit_terms(batch, weights, self._cold)
        fitted = batch.columns[:, :TERMS] @ coefficients + batch.contention @ contention
        residual = np.log(batch.measured_s / np.maximum(fitted, 1e-9))
        draft = msgspec.structs.replace(
            Snapshot.roofline(),
            version=self._model.version + 1,
            key=self._key,
            samples=self.accepted,
            created_unix_s=time.time(),
            coverage=COVERAGE,
            coefficients=coefficients.tolist(),
            contention=contention.tolist(),
            correction_weight=[calibration.correction_weight for calibration in self._calibrations],
            nearby_weight=[0.0] * GROUPS,
        )
        # A window's forwards are always launched alike; others may be a graph or not, whatever the last ones were.
        for group in range(len(PHASES), GROUPS):
            draft.floor_s[group] = min(self._calibrations[group].floor_s, MAX_FLOOR_S)
        if len(batch) >= CORRECTION_SAMPLES:
            for group in range(GROUPS):
                at = batch.group == group
                residual[at] -= weighted_quantile(residual[at], weights[at], 0.5)
            draft.correction[:] = fit_correction(logs_of(batch), residual, weights).ravel().tolist()
        draft.min_ratio[:], draft.max_ratio[:] = ratio_bounds(batch, FEWEST_NEW)
        settled_margin = level(draft, self._model.with_snapshot(draft), self._calibrations, self.accepted)
        return msgspec.structs.replace(draft, settled_margin=settled_margin)

    def state(self) -> bytes:
        """Everything learnt, as msgpack."""
        return msgspec.msgpack.encode(
            _State(
                _SCHEMA,
                self._model.shape,
                self._model.profile,
                self.accepted,
                self.rejected,
                self._window.state(),
                [calibration.state() for calibration in self._calibrations],
                self._model.snapshot if self._model.version else None,
            )
        )

    def restore(self, data: bytes) -> None:
        """Continue from :meth:`state`. Raises ValueError, having changed nothing, if it is unsound or of another model.

        The snapshot is back at once; a fit refreshes it.
        """
        try:
            state = msgspec.msgpack.decode(data, type=_State)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not an estimator's state: {error}") from error
        if state.schema != _SCHEMA:
            raise ValueError(f"state has schema {state.schema}, this program reads {_SCHEMA}")
        mine, theirs = self._model.profile, state.profile
        if state.shape != self._model.shape or msgspec.structs.replace(theirs, provenance=mine.provenance) != mine:
            raise ValueError("state is of another model or device")
        if len(state.calibrations) != GROUPS or min(state.accepted, state.rejected) < 0:
            raise ValueError("state has the wrong number of calibrations or a negative count")
        other = OnlineEstimator(state.shape, mine, window=self._window.capacity, key=self._key)
        other._window.restore(state.window)
        for calibration, stored in zip(other._calibrations, state.calibrations, strict=True):
            calibration.restore(stored)
        self._model = self._model.with_snapshot(state.snapshot or self._cold)
        self._window, self._calibrations, self._quiet = other._window, other._calibrations, Quiet()
        self.accepted, self.rejected, self._fitted_at = state.accepted, state.rejected, 0

    def _steps(self, iteration: Iteration) -> Iterator[_Steps]:
        """The iteration's samples, those that can be predicted together in one go."""
        if any(stream.tpcs > self._model.total_tpcs for stream in iteration.streams):
            raise ValueError(f"a stream ran on more than the device's {self._model.total_tpcs} TPCs")
        settled = self._quiet.settled(iteration)
        run: list[Sample] = []
        for sample in samples_of(iteration):
            if run and (sample.stream != run[-1].stream or sample.beside is not run[-1].beside):
                yield self._together(run, settled[run[0].stream])
                run = []
            run.append(sample)
        if run:
            yield self._together(run, settled[run[0].stream])

    def _together(self, samples: list[Sample], settled: list[bool]) -> _Steps:
        first = samples[0]
        context = first.c if len(samples) == 1 else np.stack([sample.c for sample in samples])
        terms = self._model.terms(first.q, context, first.logits_rows, first.tpcs)
        quiet = [settled[sample.step] for sample in samples]
        if first.beside is None:
            return _Steps(samples, terms, None, None, quiet)
        share = np.array([sample.share for sample in samples])
        return _Steps(samples, terms, self._terms_of(first.beside), share, quiet)

    def _terms_of(self, forward: Forward) -> Terms:
        return self._model.terms(forward.q, forward.c, forward.logits_rows, forward.tpcs)

    def _learn(self, steps: _Steps) -> None:
        terms, model = steps.terms, self._model
        said = model.explain(terms, steps.beside, steps.share, steps.settled)
        contention, groups, predicted = said.contention, said.group.tolist(), said.prediction
        for at, sample in enumerate(steps.samples):
            measured, roofline = sample.measured_s, float(terms.roofline_s[at])
            if not (0.0 < measured <= MAX_STEP_S and MIN_RATIO * roofline <= measured <= MAX_RATIO * roofline):
                self.rejected += 1
                continue
            group, settled = groups[at], steps.settled[at] and groups[at] == DECODE
            calibration = self._calibrations[group]
            if sample.launch_s > 0.0 and group >= len(PHASES):
                calibration.launched(sample.launch_s)
            if sample.host_bound:
                self.accepted += 1
                continue
            if model.version:
                calibration.judge(
                    math.log(measured / max(float(said.base_s[at]), 1e-9)),
                    0.0 if said.correction is None else float(said.correction[at]),
                    math.log(measured / float(said.level_s[at])),
                    0.0 if said.nearby is None else float(said.nearby[at]),
                    abs(float(predicted.mean_s[at]) / measured - 1.0),
                    measured > float(predicted.upper_s[at]),
                    settled,
                )
            beside = np.zeros(CONTENTION_TERMS) if contention is None else contention[:, at]
            stored = (roofline, measured, group, float(terms.tpcs[at]), self.accepted)
            calibration.add(self._window.add(said.columns[:, at], beside, *stored), self.accepted, settled)
            self.accepted += 1
            if model.version and calibration.drifted(self.accepted):
                self._drifted = True

    def _look_nearby(self, draft: Snapshot, batch: Batch) -> Snapshot:
        """The draft with the newest samples' residuals, used where that has helped, and with which groups drift."""
        recent = batch.take(np.arange(max(0, len(batch) - RECENT_RESIDUALS), len(batch)))
        model = self._model.with_snapshot(draft)
        mean_s = model.mean_s(recent.columns.T, recent.contention.T, recent.roofline_s, recent.group, nearby=False)
        residual = np.log(recent.measured_s / mean_s)
        return msgspec.structs.replace(
            draft,
            nearby=points_of(logs_of(recent), recent.group, residual, recent.serial, self.accepted),
            nearby_weight=[calibration.nearby_weight for calibration in self._calibrations],
            drifting=[float(calibration.alarm.drifting) for calibration in self._calibrations],
        )
