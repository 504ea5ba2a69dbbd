"""Waiting prompts, summed for every batch that takes the first of them.

On arrays as small as these, arithmetic costs less than making arrays and views of them, and less than broadcasting. So
arrays of full size are made once for each size, and all operations write into room that is there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy import add, maximum, minimum, multiply, subtract

from learner.decodes import DecodeBatch
from learner.requests import (
    CLASSIFIES,
    DECODE_CACHED,
    DECODE_EXCESS,
    DECODE_ROWS,
    DECODES,
    LOGITS,
    LONGEST,
    ONE,
    PADDED_PAIRS,
    PAIRS,
    PREFILL_CONTEXT,
    PREFILL_ROWS,
    PREFILL_TOKENS,
    PREFILLS,
    SQUARES,
    SUMS,
    TOKENS,
    Requests,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# A batch's sums, and whether another stream runs beside it.
BESIDE = SUMS
WIDTH = SUMS + 1

_SUMMED = LOGITS + 1  # the first sums add up request by request
# Of a request with 0, 1, more new tokens: whether there is one, and whether there are any.
_ONE_OR_ANY = np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0]])


class _Each:
    """What each of ``size`` requests adds to the first sums, its bounds for each of ``pair_bytes`` [s + 1]."""

    def __init__(self, requests: Requests, pair_bytes: FloatArray, size: int) -> None:
        bounds = 2 * len(pair_bytes)
        self.rows = np.zeros((bounds - 2 + _SUMMED, size))
        """[2 · s + …, size]: PREFILL_BOUND and CAUSAL_BOUND for all but the last of ``pair_bytes``, then all sums for
        the last. The caller fills in LOGITS, if there are any."""
        own = self.rows[bounds - 2 :]
        self.new, self.context = np.zeros(size, dtype=np.int64), np.zeros(size)
        """To be filled in: new and cached tokens."""
        self.total = np.empty(size)
        """New and cached tokens, of requests with new ones."""
        self.cached, self.decode, self._tokens = own[DECODE_CACHED], own[DECODE_ROWS], own[TOKENS]
        self._new, self._context, self._prefill = own[PREFILL_TOKENS], own[PREFILL_CONTEXT], own[PREFILL_ROWS]
        self._pairs, self._padded, self._square = own[PAIRS], own[PADDED_PAIRS], own[SQUARES]
        self._counts, self._ones = np.empty((2, size)), np.ones(size)
        self._one, self._any = self._counts
        self._polynomial = own[SQUARES : PREFILL_TOKENS + 1]
        self._linear, self._bytes = requests.bytes_of(pair_bytes).reshape(2 * bounds, -1), np.empty((2 * bounds, size))
        self._computed, self._moved, self._bounds = self._bytes[:bounds], self._bytes[bounds:], self.rows[:bounds]

    def find(self) -> None:
        """Fill ``rows`` from ``new`` and ``context``. One new token behind cached ones is a decode."""
        q, new, total = self._tokens, self._new, self.total
        q[...] = self.new
        _ONE_OR_ANY.take(self.new, axis=1, out=self._counts, mode="clip")
        multiply(self._one, self.context, self.cached)
        minimum(self.cached, self._ones, out=self.decode)
        subtract(q, self.decode, new)
        subtract(self._any, self.decode, self._prefill)
        add(q, self.context, total)
        multiply(total, self._any, total)
        multiply(total, total, self._padded)
        multiply(total, self._prefill, self._context)
        multiply(new, self._context, self._pairs)
        multiply(new, new, self._square)
        self._linear.dot(self._polynomial, self._bytes)
        maximum(self._computed, self._moved, out=self._bounds)


class PromptSums:
    """Sums of ``batches`` batches over ``prompts`` prompts, the first a prompt of nothing.

    ``pair_bytes`` [s + 1]: one pair's F · 𝓑 / Π for each number of TPCs that attention's bounds are wanted for, the
    whole device last. The first ``prefills`` batches leave the decodes out; the first ``beside`` run beside another
    stream.
    """

    def __init__(
        self, requests: Requests, pair_bytes: FloatArray, prompts: int, batches: int, prefills: int, beside: int
    ) -> None:
        self._requests, self._pair_bytes = requests, pair_bytes
        # A column for each prompt, then one for each batch's part of one.
        self._each = each = _Each(requests, pair_bytes, prompts + batches)
        before = 2 * len(pair_bytes) - 2
        each.rows[before + LOGITS, 1:prompts] = 1.0
        self._new, self._part = each.new[:prompts], each.new[prompts:]
        self._context, self._part_context = each.context[:prompts], each.context[prompts:]
        summed = each.rows[: before + _SUMMED]
        self._whole, self._rest = summed[:, :prompts], summed[:, prompts:]
        self._running, self._taken = np.empty((len(summed), prompts)), np.empty((len(summed), batches))
        self._next_context = self._context[1:]
        self._cached, self._rest_cached = each.cached[:prompts], each.cached[prompts:]
        self._sums_running = self._running[before:]
        self._longest_running, self._longest_taken = np.empty(prompts), np.empty(batches)

        total = np.zeros((before + WIDTH, batches))
        self.bounds, self.sums = total[:before, :prefills], total[before:]
        """PREFILL_BOUND and CAUSAL_BOUND of the first batches for all but the whole device [2 · s, prefills]; and all
        batches' sums on the whole device [WIDTH, batches]. The next call overwrites both."""
        self.excess = np.zeros((len(pair_bytes) - 1, prefills))
        """DECODE_EXCESS of the first batches, likewise."""
        sums = self.sums
        sums[ONE], sums[BESIDE, :beside] = 1.0, 1.0
        self._total, self._longest = total[: len(summed)], sums[LONGEST]
        self._running_decodes = sums[PADDED_PAIRS : LOGITS + 1]
        self._decodes, self._moments = np.zeros((1, batches)), np.empty(self._running_decodes.shape)
        self._decodes[:, prefills:] = 1.0
        self._decoding_longest, self._decoding_excess = sums[LONGEST, prefills:], sums[DECODE_EXCESS, prefills:]
        self._counts, self._indicators = sums[DECODE_ROWS : LOGITS + 1], sums[DECODES : CLASSIFIES + 1]
        self._ones = np.ones(self._counts.shape)
        self._padded, self._prefills = sums[PADDED_PAIRS], sums[PREFILLS]

    def add_up(self, new: IntArray, cached: IntArray, whole: IntArray, part: IntArray, decodes: DecodeBatch) -> None:
        """Sum the first ``whole`` [batches] prompts, ``part`` [batches] tokens of the next, and the decodes.

        ``new``, ``cached`` [n]: the prompts' tokens. There must be room for two more, of nothing and of anything.
        """
        each, end = self._each, len(new) + 1
        self._new[1:end], self._context[1:end], self._part[...] = new, cached, part
        self._next_context.take(whole, out=self._part_context, mode="clip")
        each.find()
        add.accumulate(self._whole, axis=1, out=self._running)
        self._running.take(whole, axis=1, out=self._taken, mode="clip")
        add(self._taken, self._rest, self._total)
        decodes.moments.dot(self._decodes, self._moments)
        add(self._running_decodes, self._moments, self._running_decodes)
        maximum.accumulate(self._cached, out=self._longest_running)
        self._longest_running.take(whole, out=self._longest_taken, mode="clip")
        maximum(self._longest_taken, self._rest_cached, out=self._longest)
        maximum(self._decoding_longest, decodes.longest, out=self._decoding_longest)

    def joined(self, prompts: int) -> tuple[float, float]:
        """All tokens of the first so many prompts: the sum and the most."""
        # Every prompt counts as one or the other.
        at = self._sums_running
        tokens = at[PREFILL_CONTEXT, prompts] + at[DECODE_CACHED, prompts] + at[DECODE_ROWS, prompts]
        total = self._each.total[: prompts + 1]
        return float(tokens), float(total[total.argmax()])

    def add_excess(self, whole: IntArray, decodes: DecodeBatch) -> None:
        """The same for DECODE_EXCESS, where it is not always 0."""
        cached, rows, n = self._each.cached, self._each.decode, self._new.size
        excess = self._requests.excess(rows, cached + rows, self._pair_bytes[:, None])
        total = excess[:, :n].cumsum(axis=1).take(whole, axis=1) + excess[:, n:]
        self.sums[DECODE_EXCESS] = total[-1]
        self.excess[...] = total[:-1, : self.excess.shape[1]]
        self._decoding_excess += decodes.excess(self._requests, self._pair_bytes[-1:])

    def complete(self, beside: int) -> None:
        """Fill in what follows from the other sums, see :func:`learner.requests.complete`, and pad all batches but the
        first ``beside``."""
        minimum(self._counts, self._ones, out=self._indicators)
        self._requests.pad(self.sums[TOKENS, beside:], self._prefills[beside:])
        multiply(self._padded, self._prefills, self._padded)
