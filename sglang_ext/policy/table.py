"""Choosing from the table of candidates."""

from __future__ import annotations

from typing import NamedTuple

from sglang_ext.policy.types import MODES, CandidateTable, Decision, FloatArray

MODE, PREFILL_TOKENS, PREFILL_TPCS, DECODE_TPCS, LOOK_AHEAD_STEPS = range(5)
PREDICTED, UPPER, ROOFLINE, GAP, RATE, FEASIBLE, LEFT, VIOLATION = range(5, 13)

SAME = 0.1
"""Where nothing is feasible, violations this much above the least count as the least: predictions are no finer, and
with pages of one token a prefill would otherwise crawl along by a token an iteration."""


class Rival(NamedTuple):
    """What others have to beat."""

    tokens_per_s: float
    prefill_tokens: int


NO_RIVAL = Rival(0.0, 0)


def best_rival(columns: FloatArray) -> Rival:
    """The feasible plan of the highest rate among some [13, m]."""
    rates = columns[RATE] * columns[FEASIBLE]
    best = int(rates.argmax()) if rates.size else 0
    return Rival(float(rates[best]), int(columns[PREFILL_TOKENS, best])) if rates.any() else NO_RIVAL


def choose(table: CandidateTable) -> tuple[int, str]:
    """The feasible plan of the highest rate (``best``), the first of equals.

    If there is none, the highest rate among the plans whose violation is the least, or close to it
    (``least_violation``). Decode alone is a plan only where a window has just ended, so prefill does not starve: it
    pays for the window's end, which else another window would pass on to the next.
    """
    rates = table.quantity(RATE)
    scores = [rate if keeps else -1.0 for rate, keeps in zip(rates, table.quantity(FEASIBLE), strict=True)]
    best = max(scores)
    if best >= 0.0:
        return scores.index(best), "best"
    gaps_s = table.quantity(VIOLATION)
    limit_s = min(gaps_s) * (1.0 + SAME)
    scores = [rate if gap_s <= limit_s else -1.0 for rate, gap_s in zip(rates, gaps_s, strict=True)]
    return scores.index(max(scores)), "least_violation"


def decision(table: CandidateTable, index: int, reason: str) -> Decision:
    """Spell out one plan."""
    plan = table.plan(index)
    return Decision(
        mode=MODES[int(plan.mode)],
        reason=reason,
        prefill_tokens=int(plan.prefill_tokens),
        prefill_tpcs=int(plan.prefill_tpcs),
        decode_tpcs=int(plan.decode_tpcs),
        look_ahead_steps=int(plan.look_ahead_steps),
        predicted_s=plan.predicted_s,
        upper_s=plan.upper_s,
        roofline_s=plan.roofline_s,
        largest_gap_s=plan.largest_gap_s,
        left_s=plan.left_s,
        candidates=table,
        index=index,
    )
