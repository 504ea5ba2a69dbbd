"""Outlooks by their definition: every batch's requests one by one, through the model's terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from learner.outlook import Following
from learner.pairs import Pairs


@dataclass
class ListedOutlook:
    """:class:`learner.outlook.Outlook` for any model with ``terms`` and ``predict``."""

    model: Any
    new: np.ndarray
    cached: np.ndarray
    context: np.ndarray
    batches: list = field(default_factory=list)
    pairs: Pairs | None = None

    def batch(self, whole: int, part: int, decodes: bool) -> tuple[list[int], list[int], int]:
        """q, c and rows with logits."""
        running = len(self.context) if decodes else 0
        q = [1] * running + self.new[:whole].tolist() + ([part] if part else [])
        c = self.context[:running].tolist() + self.cached[: whole + (part > 0)].tolist()
        return q, c, running + whole

    def following(self, after: Following) -> tuple[list[int], list[int], int]:
        joined = (self.new + self.cached)[: after.joined].tolist()
        contexts = [c + after.grown for c in [*self.context.tolist(), *joined]]
        return [1] * len(contexts), contexts, len(contexts)

    def forward(self, batch, tpcs: int):
        q, c, rows = batch
        return self.model.terms(np.array([q or [0]]), np.array([c or [0]]), rows, tpcs)

    def times(self, batch, tpcs: int, other=None, other_tpcs: int = 0) -> list[float]:
        beside = None if other is None else self.forward(other, other_tpcs)
        return [float(of[0]) for of in self.model.predict(self.forward(batch, tpcs), beside)]

    def predict(
        self, whole, part, prefills: int = 0, following: Following | None = None, pairs: Pairs | None = None
    ) -> np.ndarray:
        self.batches = [
            self.batch(int(w), int(p), decodes=at >= prefills)
            for at, (w, p) in enumerate(zip(whole, part, strict=True))
        ]
        if following is not None:
            self.batches[prefills + 1] = self.following(following)
        self.pairs = pairs
        times = np.array([self.times(batch, self.model.total_tpcs) for batch in self.batches]).reshape(-1, 3).T
        if pairs is None:
            return times
        times[:, prefills] = self.beside().reshape(3, 2, -1)[:, 0].min(axis=1)
        return times[:, prefills:]

    def beside(self) -> np.ndarray:
        steps, parts = [], []
        divisions = list(zip(self.pairs.decode_tpcs.tolist(), self.pairs.prefill_tpcs.tolist(), strict=True))
        for size in range(self.pairs.sizes):
            for decode_tpcs, prefill_tpcs in divisions:
                halves = (self.batches[self.pairs.sizes], decode_tpcs), (self.batches[size], prefill_tpcs)
                steps.append(self.times(*halves[0], *halves[1]))
                parts.append(self.times(*halves[1], *halves[0]))
        return np.array([*steps, *parts]).reshape(-1, 3).T
