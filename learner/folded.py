"""A latency model's terms folded together: few numbers per forward instead of one per column.

A mean is a weighed sum of columns, and all columns but the operators' maxima are linear in the sums over a batch's
requests times 1 / Π(S), 1 / 𝓑(S), whole / S − 1 or 1. So the columns of each of these four rates are one row, and so
are those that make up the roofline.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from learner.columns import COLUMN, LINEAR_COLUMNS, ROOFLINE_COLUMNS, TERMS
from learner.contention import Costs
from learner.prompts import WIDTH
from learner.requests import SUMS, TOKENS
from learner.roofline import BYTE_ROWS, FLOP_ROWS, OPERATOR_ROWS, OPERATORS, PARTITION_ROWS, Roofline

FloatArray = npt.NDArray[np.float64]

RATES = 4
PER_FLOP, PER_BYTE, PER_SHORTFALL, AS_IS = range(RATES)
_OPERATOR_COLUMNS = [COLUMN[name] for name in (*LINEAR_COLUMNS, "classifier_s")]


class Folded:
    """What turns a batch's sums [WIDTH] into times, whatever the snapshot says."""

    def __init__(self, roofline: Roofline) -> None:
        weights = np.zeros((len(roofline.weights), WIDTH))
        weights[:, :SUMS] = roofline.weights
        self.flops, self.bytes = weights[:OPERATORS], weights[OPERATOR_ROWS]
        """[OPERATORS, WIDTH]: the operators' FLOPs and bytes."""
        rate = np.full(OPERATORS + TERMS, AS_IS)
        rate[FLOP_ROWS], rate[BYTE_ROWS], rate[PARTITION_ROWS] = PER_FLOP, PER_BYTE, PER_SHORTFALL
        rate[OPERATOR_ROWS] = -1
        columns = weights[OPERATORS : OPERATORS + TERMS]
        self._terms = (rate[OPERATORS:] == np.arange(RATES)[:, None])[:, :, None] * columns
        self._terms[PER_FLOP, COLUMN["all_reduce_s"], TOKENS] = roofline.reduction_flops
        self.roofline = self._terms[:, [COLUMN[name] for name in ROOFLINE_COLUMNS]].sum(axis=1)
        """[RATES, WIDTH]: all that is in the roofline but not an operator, by the rate that it follows."""
        self.compute, self.memory = columns[COLUMN["compute_s"]], columns[COLUMN["memory_s"]]
        self.whole_rates = np.array([*roofline.by_tpcs[:3, -1], 1.0])
        """The rates of the whole device."""

    def mean(self, coefficients: FloatArray) -> FloatArray:
        """All that a mean with ``coefficients`` [TERMS] has beside operators, by the rate that it follows.

        [RATES, WIDTH].
        """
        rows: FloatArray = coefficients @ self._terms
        return rows

    def beside(self, costs: Costs) -> FloatArray:
        """What is added to the mean beside another stream, as busy as that is; [RATES, WIDTH]."""
        rows = np.zeros((RATES, WIDTH))
        rows[PER_FLOP] = costs.compute * self.compute
        rows[PER_BYTE] = costs.memory * self.memory
        return rows

    def alone(self, mean: FloatArray) -> FloatArray:
        """On the whole device the rates are fixed: the operators' F and B in seconds, the rest of the mean and of the
        roofline; [2 · OPERATORS + 2, WIDTH]."""
        per_flop, per_byte, *_ = self.whole_rates
        rest = (self.whole_rates @ mean, self.whole_rates @ self.roofline)
        return np.concatenate([per_flop * self.flops, per_byte * self.bytes, rest])


def operators(coefficients: FloatArray) -> FloatArray:
    """What weighs the operators' maxima in the mean and in the roofline; [2, OPERATORS]."""
    return np.stack([coefficients[_OPERATOR_COLUMNS], np.ones(OPERATORS)])
