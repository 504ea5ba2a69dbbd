"""The learnt models of one learner process: one estimator per :func:`~learner.store.model_id`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from learner.estimator import OnlineEstimator
from learner.prior import shipped_prior
from learner.records import Header, Iteration
from learner.snapshot import Snapshot
from learner.store import StateFile, StateStore, model_id

logger = logging.getLogger(__name__)

# Versions are reserved on disk in blocks, before any of the block is published, so that a learner killed at any moment
# continues above every version that a scheduler may have seen, at the price of one write per block.
VERSION_BLOCK = 10_000

# What has learnt from fewer samples is not worth a file: it is back in seconds, and a stray header leaves no trace.
WORTH_SAVING = 64

# A refit that took t seconds of CPU time is followed by at least t·(1/share − 1) seconds without one.
REFIT_SHARE = 0.1
REFIT_INTERVAL_S = 0.1
REFIT_AFTER_FAILURE_S = 30.0

LOG_INTERVAL_S = 10.0


@dataclass(slots=True)
class LearntModel:
    """One estimator and what has been published of it."""

    name: str
    header: Header
    estimator: OnlineEstimator
    file: StateFile | None
    version: int = 0
    reserved_version: int = 0
    snapshot: Snapshot | None = None
    samples: int = 0
    fitted_s: float = -float("inf")
    unsaved: bool = False
    used: int = 0


class EstimatorPool:
    """Opens, feeds, refits and saves learnt models, and holds at most ``limit`` of them in memory.

    Beyond the limit the model with the fewest samples (of those, the one longest unused) is saved and closed, so that
    a flood of made-up headers cannot push out what has been learnt. ``store=None`` keeps nothing on disk.
    """

    def __init__(
        self,
        store: StateStore | None,
        learner_id: str,
        *,
        limit: int = 8,
        clock: Callable[[], float] = time.monotonic,
        may_fit: Callable[[], bool] = lambda: True,
        estimator: Callable[[Header], OnlineEstimator] = lambda header: OnlineEstimator(
            header.model, header.device, prior=shipped_prior(header.device)
        ),
    ) -> None:
        self._store = store
        self._learner_id = learner_id
        self._limit = limit
        self._clock = clock
        self._may_fit = may_fit
        self._new_estimator = estimator
        self._models: dict[str, LearntModel] = {}
        self._uses = 0
        self._next_fit_s = -float("inf")
        self._next_log_s = -float("inf")
        self.rejected_steps = 0

    def open(self, header: Header) -> LearntModel:
        """Return the model for ``header``, from memory, from its saved state, or a fresh one."""
        name = model_id(header)
        model = self._models.get(name)
        if model is None:
            if len(self._models) >= self._limit:
                self._close(min(self._models.values(), key=lambda other: (other.samples, other.used)))
            model = self._models[name] = self._restored(name, header)
        self._uses += 1
        model.used = self._uses
        return model

    def get(self, name: str) -> LearntModel | None:
        """Return the model of that name if it is in memory."""
        return self._models.get(name)

    def observe(self, model: LearntModel, iteration: Iteration) -> int:
        """Feed one iteration; return the number of samples accepted."""
        before = model.estimator.rejected
        accepted = model.estimator.observe(iteration)
        self.rejected_steps += model.estimator.rejected - before
        if accepted:
            model.samples += accepted
            model.unsaved = True
        return accepted

    def refit(self) -> LearntModel | None:
        """Refit one model that is ready for it, if the budget allows; return it if it has a new snapshot."""
        if self._clock() < self._next_fit_s or not self._may_fit():
            return None
        ready = [model for model in self._models.values() if model.estimator.ready()]
        if not ready:
            return None
        model = min(ready, key=lambda other: other.fitted_s)
        return model if self._fit(model) else None

    def save(self) -> None:
        """Save every model that has learnt something since it was last saved."""
        for model in self._models.values():
            if model.unsaved:
                # Reserved versions stay reserved: this may be the last save before a kill.
                self._save(model, max(model.version, model.reserved_version))

    def close(self) -> None:
        """Save and forget everything."""
        for model in list(self._models.values()):
            self._close(model)

    def _restored(self, name: str, header: Header) -> LearntModel:
        file = self._store.file(header) if self._store is not None else None
        model = LearntModel(name, header, self._new_estimator(header), file)
        saved = file.load() if file is not None else None
        if file is None or saved is None:
            logger.info("a new model: %s", header.key)
            return model
        model.version = model.reserved_version = saved.last_version
        try:
            model.estimator.restore(saved.estimator)
        except Exception as error:  # whatever an older or damaged encoding leads to
            file.set_aside(f"{type(error).__name__}: {error}")
            model.estimator = self._new_estimator(header)
            return model
        logger.info("continuing from saved state, version %d: %s", saved.last_version, header.key)
        if model.estimator.model.version > 0:
            self._publish(model, model.estimator.model.snapshot)
        return model

    def _fit(self, model: LearntModel) -> bool:
        started_s = time.thread_time()
        try:
            snapshot = model.estimator.fit()
        except Exception as error:  # scikit-learn and LAPACK have many ways to refuse a matrix
            logger.error("refit failed: %s: %s", type(error).__name__, error)
            self._next_fit_s = self._clock() + REFIT_AFTER_FAILURE_S
            return False
        took_s = time.thread_time() - started_s
        model.fitted_s = self._clock()
        self._next_fit_s = self._clock() + max(REFIT_INTERVAL_S, took_s * (1.0 / REFIT_SHARE - 1.0))
        if snapshot is None or not self._publish(model, snapshot):
            return False
        if self._clock() >= self._next_log_s:
            self._next_log_s = self._clock() + LOG_INTERVAL_S
            logger.info("version %d in %.0f ms from %d samples", model.version, 1e3 * took_s, snapshot.samples)
        return True

    def _publish(self, model: LearntModel, snapshot: Snapshot) -> bool:
        """Give a snapshot the next version and make it the model's; False if it cannot be used."""
        snapshot = msgspec.structs.replace(
            snapshot, version=model.version + 1, key=model.header.key, learner_id=self._learner_id
        )
        try:
            snapshot.validate()
        except ValueError as error:
            logger.error("a refit gave a snapshot that cannot be used: %s", error)
            return False
        model.version += 1
        model.samples = max(model.samples, snapshot.samples)
        model.snapshot = snapshot
        model.unsaved = True
        if model.version > model.reserved_version:
            self._save(model, model.version + VERSION_BLOCK)
        return True

    def _save(self, model: LearntModel, last_version: int) -> None:
        if model.file is None or model.samples < WORTH_SAVING:
            return
        # A failed save does not stop publication: accuracy now is worth more than version numbers after a restart.
        model.reserved_version = last_version
        if model.file.save(estimator=model.estimator.state(), last_version=last_version, saved_unix_s=time.time()):
            model.unsaved = False

    def _close(self, model: LearntModel) -> None:
        if model.unsaved or model.reserved_version > model.version:
            self._save(model, model.version)
        if model.file is not None:
            model.file.close()
        del self._models[model.name]
