"""A scheduler's side of a conversation with a learner process, and how good what it gets is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from learner.client import LearnerClient
from learner.latency import LatencyModel
from learner.snapshot import Snapshot
from tests.learner.generated import CPU, SHAPE, header
from tests.learner.waiting import eventually
from tests.learner.workload import true_s, workload


class Scheduler:
    """A client and the iterations that it sends, over and over."""

    def __init__(self, address: str) -> None:
        self.client = LearnerClient(address, header())
        self.snapshot: Snapshot | None = None
        self._number = 0

    def turn(self, count: int = 8) -> None:
        """Send some iterations, take what comes."""
        for one in workload(count, seed=self._number, first=self._number):
            self.client.send(one)
        self._number += count
        self.take()

    def take(self) -> None:
        while (snapshot := self.client.poll()) is not None:
            if self.snapshot is not None and snapshot.learner_id == self.snapshot.learner_id:
                assert snapshot.version > self.snapshot.version
            self.snapshot = snapshot

    def until(self, done: Callable[[], bool]) -> None:
        """Go on serving until something has happened."""

        def served() -> bool:
            self.turn()
            return done()

        eventually(served, every_s=0.02)

    @property
    def version(self) -> int:
        return self.snapshot.version if self.snapshot is not None else 0


def mape(snapshot: Snapshot | None) -> float:
    """Of a snapshot on batches that it has not seen, against the made-up machine's noiseless times."""
    model = LatencyModel(SHAPE, CPU, snapshot)
    errors = []
    for one in workload(80, seed=999, noise=0.0):
        batch = one.streams[0]
        predicted = model.predict(model.terms(batch.q, batch.c, batch.logits_rows, 1))
        measured = true_s(float(predicted.roofline_s[0]), batch.phase)
        errors.append(abs(float(predicted.mean_s[0]) - measured) / measured)
    return float(np.mean(errors))
