"""The newest errors of predictions and costs of the host, for ``/server_info``."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np

_KEPT = 512


class Recent:
    """Each kept for the newest few hundred."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=_KEPT)
        self._deciding_s: deque[float] = deque(maxlen=_KEPT)
        self._launching_s: dict[str, deque[float]] = {}
        self._taking_s: dict[str, deque[float]] = {}

    def decided(self, taken_s: float) -> None:
        self._deciding_s.append(taken_s)

    def took(self, part: str, taken_s: float) -> None:
        """How long the host took for a part of an iteration that stock has not, or not so."""
        self._taking_s.setdefault(part, deque(maxlen=_KEPT)).append(taken_s)

    def launched(self, phase: str, taken_s: float) -> None:
        """How long the host took to launch one forward."""
        self._launching_s.setdefault(phase, deque(maxlen=_KEPT)).append(taken_s)

    def predicted(self, predicted_s: float, measured_s: float) -> None:
        self._errors.append(abs(predicted_s - measured_s) / measured_s)

    def state(self) -> dict[str, Any]:
        """Plain values; None where nothing was seen."""
        return {
            "recent_mape": sum(self._errors) / len(self._errors) if self._errors else None,
            "decision_ms": _spread_ms(self._deciding_s),
            "host_ms": {part: _spread_ms(taken_s) for part, taken_s in self._taking_s.items()},
            "launch_ms": {phase: _spread_ms(taken_s) for phase, taken_s in self._launching_s.items()},
        }


def _spread_ms(taken_s: Collection[float]) -> dict[str, float] | None:
    if not taken_s:
        return None
    p50, p99 = np.quantile(list(taken_s), [0.5, 0.99]).tolist()
    return {"p50": 1e3 * p50, "p99": 1e3 * p99, "max": 1e3 * max(taken_s)}
