"""How much longer mixed batches of one exact number of tokens take than their terms say.

A GEMM's time rises in steps with its rows, as tiles and waves fill up, and each CUDA graph keeps the kernels that were
chosen for its size. Chunks are cut to fill such a graph, so few sizes come, again and again, and each may have a factor
of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MOST_SIZES = 32
MOST_SHIFT = 0.3
# A size needs this many samples, and its shift counts half at the other.
LEAST_SAMPLES, INERTIA = 3, 4.0


class Sizes:
    """Log factors by size: ``tokens`` ascending, ``shift`` as many."""

    def __init__(self, tokens: list[float], shift: list[float]) -> None:
        # Behind them stands a size that no batch has.
        self._tokens = np.array([*tokens, np.inf])
        self._shift = np.array([*shift, 0.0])

    def __len__(self) -> int:
        return len(self._tokens) - 1

    def shift(self, tokens: FloatArray) -> FloatArray:
        """Log factors of mixed batches of so many tokens, [m]; 0 for a size of which nothing is known."""
        at = self._tokens.searchsorted(tokens)
        return np.asarray(self._shift[at] * (self._tokens[at] == tokens))


def learn_sizes(tokens: FloatArray, residual: FloatArray) -> tuple[list[float], list[float]]:
    """Sizes and their shifts, of log residuals [n] of mixed batches of so many ``tokens`` [n]; the most frequent sizes
    if there are too many."""
    sizes, which, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    known = np.flatnonzero(counts >= LEAST_SAMPLES)
    if len(known) > MOST_SIZES:
        known = np.sort(known[np.argsort(-counts[known], kind="stable")[:MOST_SIZES]])
    shifts = [float(np.median(residual[which == one])) * counts[one] / (counts[one] + INERTIA) for one in known]
    return sizes[known].tolist(), np.clip(shifts, -MOST_SHIFT, MOST_SHIFT).tolist()
