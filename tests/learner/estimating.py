"""Runs of the estimator over made-up devices, and how far its predictions were off."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import msgspec
import numpy as np

from learner import Iteration
from learner.columns import PHASES
from learner.estimator import OnlineEstimator
from learner.samples import samples_of
from learner.snapshot import Snapshot
from tests.learner.worlds import CpuWorld, GpuWorld, World


class Steps(NamedTuple):
    """Every step of a run, predicted before it was learnt: one array each."""

    iteration: np.ndarray
    group: np.ndarray
    measured_s: np.ndarray
    mean_s: np.ndarray
    upper_s: np.ndarray
    roofline_s: np.ndarray

    def take(self, index: Any) -> Steps:
        return Steps(*(column[index] for column in self))

    def error(self) -> float:
        return float(np.mean(np.abs(self.mean_s / self.measured_s - 1.0)))

    def roofline_error(self) -> float:
        return float(np.mean(np.abs(self.roofline_s / self.measured_s - 1.0)))

    def covered(self) -> float:
        return float(np.mean(self.measured_s <= self.upper_s))


def run(estimator: OnlineEstimator, iterations: list[Iteration]) -> Steps:
    rows = []
    for record in iterations:
        predictions = estimator.predict_iteration(record)
        for sample, predicted in zip(samples_of(record), predictions, strict=True):
            phase = PHASES.index(record.streams[sample.stream].phase)
            group = phase + len(PHASES) * sample.mostly_beside
            rows.append((record.iteration, group, sample.measured_s, *predicted))
        estimator.observe(record)
        if estimator.ready():
            estimator.fit()
    return Steps(*np.array(rows).T)


def draw(world: World, count: int) -> list[Iteration]:
    return [world.draw() for _ in range(count)]  # type: ignore[attr-defined]


@functools.cache
def learnt(world: type[CpuWorld] | type[GpuWorld], count: int) -> tuple[OnlineEstimator, Steps]:
    """One run for all tests that only look at it."""
    estimator = OnlineEstimator(world.shape, world.profile)
    return estimator, run(estimator, draw(world(11), count))


def same(one: Snapshot, other: Snapshot) -> bool:
    return msgspec.structs.replace(one, created_unix_s=0.0) == msgspec.structs.replace(other, created_unix_s=0.0)
