"""How much longer batches of one exact size take than their terms say.

A GEMM's time rises in steps with its rows, as tiles and waves fill up; each CUDA graph keeps the kernels that were
chosen for its size; and decodes are padded to the next graph. Chunks are cut to fill a graph, so few sizes come, again
and again, and each may have a factor of its own: mixed batches by their tokens, padding included, decode steps alone by
their rows.

Both are keyed by one number: the tokens of a mixed batch, or minus the rows of a decode step. 0 is neither.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from learner.columns import DECODE, MIXED, PHASES

FloatArray = npt.NDArray[np.float64]

MOST_SIZES = 64  # of either kind
# By a snapshot's groups, of their keys; the others have none.
SIGN = np.zeros(2 * len(PHASES))
SIGN[[DECODE, MIXED]] = -1.0, 1.0
MOST_SHIFT = 0.3
# A size's shift counts half at this many samples.
INERTIA = 1.0


class Sizes:
    """Log factors by size: ``keys`` ascending, ``shift`` as many."""

    def __init__(self, keys: list[float], shift: list[float]) -> None:
        # Behind them stands a size that no batch has.
        self._keys = np.array([*keys, np.inf])
        self._shift = np.array([*shift, 0.0])

    def __len__(self) -> int:
        return len(self._keys) - 1

    def shift(self, keys: FloatArray) -> FloatArray:
        """Log factors of batches of these sizes, [m]; 0 for a size of which nothing is known."""
        at = self._keys.searchsorted(keys)
        return np.asarray(self._shift[at] * (self._keys[at] == keys))


def learn_sizes(keys: FloatArray, residual: FloatArray) -> tuple[list[float], list[float]]:
    """Sizes and their shifts, of log residuals [n] of batches of the sizes ``keys`` [n]; the most frequent if there are
    too many."""
    sizes, which, counts = np.unique(keys, return_inverse=True, return_counts=True)
    known = np.sort(np.argsort(-counts, kind="stable")[:MOST_SIZES])
    shifts = [float(np.median(residual[which == one])) * counts[one] / (counts[one] + INERTIA) for one in known]
    return sizes[known].tolist(), np.clip(shifts, -MOST_SHIFT, MOST_SHIFT).tolist()
