"""Building and choosing from the table of candidates."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sglang_ext.policy.types import MODES, CandidateTable, Decision, FloatArray

FEASIBLE = CandidateTable.COLUMNS.index("feasible")
RATE = CandidateTable.COLUMNS.index("tokens_per_s")

SAME = 0.1
"""Where nothing is feasible, violations this much above the least count as the least: predictions are no finer, and
with pages of one token a prefill would otherwise crawl along by a token an iteration."""


def plans(
    size: int,
    *,
    mode: ArrayLike,
    prefill_tokens: ArrayLike,
    prefill_tpcs: ArrayLike,
    decode_tpcs: ArrayLike,
    look_ahead_steps: ArrayLike,
    predicted_s: ArrayLike,
    upper_s: ArrayLike,
    roofline_s: ArrayLike,
    largest_gap_s: ArrayLike,
    tokens_per_s: ArrayLike,
    feasible: ArrayLike,
    left_s: ArrayLike,
) -> FloatArray:
    """Lay ``size`` plans out as columns of a table; every quantity is a scalar or [size]."""
    matrix = np.empty((len(CandidateTable.COLUMNS), size))
    matrix[0] = mode
    matrix[1] = prefill_tokens
    matrix[2] = prefill_tpcs
    matrix[3] = decode_tpcs
    matrix[4] = look_ahead_steps
    matrix[5] = predicted_s
    matrix[6] = upper_s
    matrix[7] = roofline_s
    matrix[8] = largest_gap_s
    matrix[9] = tokens_per_s
    matrix[10] = feasible
    matrix[11] = left_s
    return matrix


def best_rate(columns: FloatArray) -> float:
    """The highest rate of the feasible among some plans [12, m]; 0 if there is none."""
    return float((columns[RATE] * columns[FEASIBLE]).max(initial=0.0))


def choose(table: CandidateTable) -> tuple[int, str]:
    """The feasible plan of the highest rate (``best``), the first of equals.

    If there is none, the highest rate among the plans with prefill whose largest gap is the least, or close to it
    (``least_violation``): neither phase may starve.
    """
    rate = table["tokens_per_s"]
    feasible = table["feasible"] > 0
    if feasible.any():
        return int(np.argmax(np.where(feasible, rate, -1.0))), "best"
    gap = np.where(table["prefill_tokens"] > 0, table["largest_gap_s"], np.inf)
    return int(np.argmax(np.where(gap <= gap.min() * (1.0 + SAME), rate, -1.0))), "least_violation"


def decision(table: CandidateTable, index: int, reason: str) -> Decision:
    """Spell out one row."""
    mode, tokens, prefill_tpcs, decode_tpcs, steps, predicted, upper, roofline, gap, _, _, left = table.matrix[
        :, index
    ].tolist()
    return Decision(
        mode=MODES[int(mode)],
        reason=reason,
        prefill_tokens=int(tokens),
        prefill_tpcs=int(prefill_tpcs),
        decode_tpcs=int(decode_tpcs),
        look_ahead_steps=int(steps),
        predicted_s=predicted,
        upper_s=upper,
        roofline_s=roofline,
        largest_gap_s=gap,
        left_s=left,
        candidates=table,
        index=index,
    )
