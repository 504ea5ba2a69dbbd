"""The baseline that any learner must beat: it takes as long as the most similar batch took last time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from learner.samples import Sample

FEATURES = 5
DEFAULT_MEMORY = 4096


class Persistence:
    """Nearest neighbour over what has been measured.

    Only batches of the same phase compare, and batches that ran beside another stream only among themselves. The
    nearest is the one at the least Euclidean distance in log2(1 + x) of: new tokens Σq, cached tokens Σc, requests,
    attention pairs Σq(q + c), and TPCs; a doubling of any of them counts the same. Of several equally near (the same
    batch again) the last measurement wins. The newest ``memory`` batches of each kind are kept.
    """

    def __init__(self, memory: int = DEFAULT_MEMORY) -> None:
        self._memory = memory
        self._known: dict[tuple[str, bool], _Ring] = {}

    def predict(self, phase: str, sample: Sample) -> float | None:
        """Seconds that the nearest batch took, or None if no batch of that kind has been measured."""
        ring = self._known.get((phase, sample.mostly_beside))
        return None if ring is None else ring.nearest(features(sample))

    def observe(self, phase: str, sample: Sample) -> None:
        """Remember what a batch took."""
        ring = self._known.setdefault((phase, sample.mostly_beside), _Ring(self._memory))
        ring.add(features(sample), sample.measured_s)


class _Ring:
    def __init__(self, memory: int) -> None:
        self._features = np.zeros((memory, FEATURES))
        self._measured_s = np.zeros(memory)
        self._count = 0

    def add(self, at: npt.NDArray[np.float64], measured_s: float) -> None:
        slot = self._count % len(self._measured_s)
        self._features[slot] = at
        self._measured_s[slot] = measured_s
        self._count += 1

    def nearest(self, at: npt.NDArray[np.float64]) -> float:
        filled = min(self._count, len(self._measured_s))
        distance = ((self._features[:filled] - at) ** 2).sum(axis=1)
        # Newest first, so that argmin, which takes the first of equals, takes the last measurement.
        newest = (self._count - 1 - np.arange(filled)) % len(self._measured_s)
        return float(self._measured_s[newest[int(np.argmin(distance[newest]))]])


def features(sample: Sample) -> npt.NDArray[np.float64]:
    """log2(1 + x) of new tokens, cached tokens, requests, attention pairs and TPCs of one batch; [FEATURES]."""
    q, c = sample.q.astype(np.float64), sample.c.astype(np.float64)
    return np.log2(1.0 + np.array([q.sum(), c.sum(), np.count_nonzero(q), q @ (q + c), sample.tpcs]))
