"""Running decodes (q = 1), summed once for all the forwards that they may take part in.

F and B of a decode's attention are both linear in its context, so which of F / Π(S) and B / 𝓑(S) is larger switches at
one context for each S: with contexts in order and their sums from the end, a sum of maxima is one look-up. Look-ahead
adds the same number of tokens to every context, which only shifts that look-up and the sums.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class DecodeBatch:
    """Decodes with ``context`` [n] tokens in the KV cache, at least 1 each. Must not be changed afterwards."""

    def __init__(self, context: npt.ArrayLike) -> None:
        c: FloatArray = np.asarray(context, dtype=np.float64)
        self.context = c
        rows, cached, longest = float(c.size), float(np.add.reduce(c)), float(np.maximum.reduce(c, initial=0.0))
        # Times a growth: Σ (c + 1)², Σ c, the number of rows, and the longest context.
        self.moments = np.array(
            [
                [float(c @ c) + 2.0 * cached + rows, 2.0 * (cached + rows), rows],
                [cached, rows, 0.0],
                [rows, 0.0, 0.0],
                [longest, 1.0 if rows else 0.0, 0.0],
            ]
        )

    def beyond(self, context: FloatArray) -> tuple[FloatArray, FloatArray]:
        """How many decodes have more than ``context`` [m] tokens in the cache, and the sum of theirs; each [m]."""
        ordered, sums = self._ordered
        first = np.searchsorted(ordered, context, side="right")
        return ordered.size - first.astype(np.float64), sums[first]

    @cached_property
    def _ordered(self) -> tuple[FloatArray, FloatArray]:
        """Contexts, ascending [n], and the sum of each and all after it [n + 1]."""
        ordered = np.sort(self.context)
        sums = np.zeros(ordered.size + 1)
        sums[:-1] = np.cumsum(ordered[::-1])[::-1]
        return ordered, sums


def growth(share: npt.ArrayLike, grown: npt.ArrayLike) -> FloatArray:
    """Which of m forwards decode a batch, and with how many more tokens in each context than when it was summed.

    ``share`` is 1 where the batch takes part and 0 elsewhere; each [m] or scalar. The result, [3, m], may be kept.
    """
    share, grown = (np.asarray(of, dtype=np.float64).reshape(-1) for of in (share, grown))
    powers: FloatArray = share * np.stack([np.ones_like(grown), grown, grown * grown])
    return powers


UNGROWN = growth(1.0, 0.0)


class Decoding(NamedTuple):
    """A batch, and how it takes part in m forwards: a :func:`growth`, of m forwards or one for all."""

    batch: DecodeBatch
    growth: FloatArray = UNGROWN
