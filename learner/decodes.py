"""Running decodes (q = 1), summed once for all the forwards that they may take part in.

F and B of a decode's attention are both linear in its context, so which of F / Π(S) and B / 𝓑(S) is larger switches at
one context for each S: with contexts in order and their sums from the end, a sum of maxima is one look-up. Look-ahead
adds the same number of tokens to every context, which only shifts that look-up and the sums.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from learner.requests import Requests

FloatArray = npt.NDArray[np.float64]


class DecodeBatch:
    """Decodes with ``context`` [n] tokens in the KV cache, at least 1 each. Must not be changed afterwards."""

    def __init__(self, context: npt.ArrayLike) -> None:
        c: FloatArray = np.asarray(context, dtype=np.float64)
        self.context = c
        self.rows = c.size
        self.cached = float(np.add.reduce(c))
        self.longest = float(c[c.argmax()]) if c.size else 0.0
        padded_pairs = float(c @ c) + 2.0 * self.cached + self.rows  # Σ (c + 1)²
        moments = padded_pairs, self.cached, self.rows, 0.0, self.rows, self.rows
        self.moments = np.fromiter(moments, np.float64, 6).reshape(6, 1)
        """What the batch adds to the sums from PADDED_PAIRS to LOGITS (:mod:`learner.requests`); [6, 1]."""

    def excess(self, requests: Requests, pair_bytes: FloatArray, grown: float = 0.0) -> FloatArray:
        """The sum of all excesses (:meth:`learner.requests.Requests.excess`) for each of ``pair_bytes`` [m], once every
        context has ``grown``; [m].
        """
        # F − B = (c + grown + 1) · over − the query's bytes, which is positive from one context on.
        over = np.maximum(pair_bytes - requests.context_bytes, 0.0)
        switch = np.divide(requests.query_bytes, over, out=np.full_like(over, np.inf), where=over > 0.0)
        count, cached = self.beyond(switch - 1.0 - grown)
        excess: FloatArray = (cached + count * (grown + 1.0)) * over - count * requests.query_bytes
        return excess

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
