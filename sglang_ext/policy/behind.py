"""Where windows are far behind mixed batches they are not weighed every time: that is half of a decision's cost."""

from __future__ import annotations

from sglang_ext.policy.table import FEASIBLE, RATE
from sglang_ext.policy.types import Decision, Situation

FAR = 0.85
"""Windows below this share of the chosen plan's rate are far behind."""
LEFT_OUT = 7
"""For how many decisions they are left out then."""


class FarBehind:
    """Remembers for a few decisions that windows were far behind."""

    def __init__(self) -> None:
        self._left = 0

    def skips(self, situation: Situation) -> bool:
        """Whether to leave windows out of this decision. After a window nothing is as it was."""
        if situation.after_window or not self._left:
            self._left = 0
            return False
        self._left -= 1
        return True

    def note(self, decision: Decision) -> None:
        """Take note of a decision for which windows were weighed, if at all."""
        if decision.mode != "chunked" or decision.reason != "best":
            return
        windows = decision.candidates.columns
        most = float((windows[RATE] * windows[FEASIBLE]).max()) if windows.size else 0.0
        if most < FAR * decision.candidates.plan(decision.index).tokens_per_s:
            self._left = LEFT_OUT
