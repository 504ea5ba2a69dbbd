"""Which decisions a better prediction would have changed, and what they cost, by the plans that a record holds.

Of each decision the record tells what was predicted of every plan, and how long the chosen one took. Held against that:

- *outrun*: the chosen plan kept the target, but took so long that another one, predicted to keep it too, should have
  served more;
- *broken*: the chosen plan exceeded the target although it was predicted to keep it, and another one should have kept
  it;
- *withheld*: the chosen plan kept the target, but a faster one was refused only because its bound exceeds the target,
  which its mean keeps. That is the price of a bound, not of a wrong mean.

Other plans were not run: what is said of them is as good as their own predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from learner.records import Candidates, Iteration, StreamRecord

SAME = 0.03
"""Rates closer than this are the same: predictions are no finer."""


@dataclass(frozen=True, slots=True)
class Hindsight:
    """Counts of decisions among two plans and more. ``*_tokens`` is what the better plans would have served beyond the
    chosen ones in the time that these took, of ``tokens`` that all decisions served; ``broken_ms`` is by how much the
    target was exceeded, on average over the broken ones."""

    decisions: int
    tokens: float
    outrun: int
    outrun_tokens: float
    broken: int
    broken_ms: float
    withheld: int
    withheld_tokens: float


class HindsightCount:
    """Adds decisions up."""

    def __init__(self) -> None:
        self._decisions = self._outrun = self._broken = self._withheld = 0
        self._tokens = self._outrun_tokens = self._withheld_tokens = self._broken_s = 0.0

    def add(self, iteration: Iteration) -> None:
        """Take note of one iteration, if its record holds more than one plan and sound times."""
        plans, at = iteration.candidates, iteration.decision
        if plans is None or len(plans.mode) < 2 or not 0 <= at < len(plans.mode):
            return
        took_s = max((stream.step_end_s[-1] for stream in iteration.streams if stream.step_end_s), default=0.0)
        took_s -= min((stream.step_start_s[0] for stream in iteration.streams if stream.step_start_s), default=0.0)
        if not (took_s > 0.0 and plans.predicted_s[at] > 0.0 and plans.upper_s[at] > 0.0):
            return
        rates, target_s = np.array(plans.tokens_per_s), iteration.tbt_slo_s
        rate = rates[at] * plans.predicted_s[at] / took_s
        self._decisions += 1
        self._tokens += rate * took_s
        faster = rates > rate * (1.0 + SAME)
        faster[at] = False
        feasible = np.array(plans.feasible)
        excess_s = _largest_gap_s(iteration, plans, took_s) - target_s
        others = feasible.copy()
        others[at] = False
        if excess_s > 0.0:
            if feasible[at] and others.any():
                self._broken += 1
                self._broken_s += excess_s
        elif (faster & feasible).any():
            self._outrun += 1
            self._outrun_tokens += (rates[faster & feasible].max() - rate) * took_s
        elif (refused := faster & ~feasible & (_mean_gaps_s(plans) <= target_s)).any():
            self._withheld += 1
            self._withheld_tokens += (rates[refused].max() - rate) * took_s

    def result(self) -> Hindsight | None:
        """What was found; None if no record held a choice."""
        if not self._decisions:
            return None
        return Hindsight(
            decisions=self._decisions,
            tokens=self._tokens,
            outrun=self._outrun,
            outrun_tokens=self._outrun_tokens,
            broken=self._broken,
            broken_ms=1e3 * self._broken_s / max(self._broken, 1),
            withheld=self._withheld,
            withheld_tokens=self._withheld_tokens,
        )


def _largest_gap_s(iteration: Iteration, plans: Candidates, took_s: float) -> float:
    """Between two tokens of a decode, as it came: what the plan's bound on the gap holds beyond its forward comes on
    top of the batch, or of the longest step of a window."""
    at = iteration.decision
    if len(iteration.streams) == 1:
        return took_s + max(plans.largest_gap_s[at] - plans.upper_s[at], 0.0)
    decodes = [stream for stream in iteration.streams if stream.phase == "decode"]
    return max((_longest_step_s(stream) for stream in decodes), default=0.0)


def _longest_step_s(stream: StreamRecord) -> float:
    return float(max(np.diff([stream.step_start_s[0], *stream.step_end_s]), default=0.0)) if stream.step_end_s else 0.0


def _mean_gaps_s(plans: Candidates) -> np.ndarray:
    """Largest gaps by means: bounds on them, drawn in as the iteration's mean is to its bound."""
    upper_s = np.maximum(np.array(plans.upper_s), 1e-9)
    return np.asarray(np.array(plans.largest_gap_s) * np.array(plans.predicted_s) / upper_s)
