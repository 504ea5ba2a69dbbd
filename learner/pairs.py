"""Decode steps and prefills that run beside each other, each on its own TPCs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy import add, divide, maximum, minimum, multiply

from learner.contention import BESIDE, DECODE_COSTS, PREFILL_COSTS, Contention, Costs
from learner.factors import FOUND, Found, times_of
from learner.folded import AS_IS, PER_BYTE, PER_FLOP, PER_SHORTFALL, RATES, Folded, operators
from learner.prompts import WIDTH
from learner.requests import ACTIVE, CAUSAL_BOUND, DECODE_EXCESS, PREFILL_BOUND, PREFILLS
from learner.roofline import OPERATORS, Roofline

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Every one of ``sizes`` prefills beside a decode step, for n ways to divide the TPCs: p · n pairs."""

    decode_tpcs: IntArray  # [n]
    prefill_tpcs: IntArray  # [n]
    sizes: int  # p

    @property
    def parts(self) -> IntArray:
        """The distinct numbers of TPCs that prefills get [s]."""
        return np.unique(self.prefill_tpcs)


# What is found of each half, in seconds: the operators' F, then their B; the rest of the mean by its rates, and of the
# roofline; what the other half costs by the same rates, and where they share TPCs; own bytes, with which it competes,
# and the bandwidth that it asks for; all its F, and launching it if it is eager; attention's bounds and excess, which
# depend on S request by request.
_FLOPS, _MAXIMA = slice(0, OPERATORS), slice(OPERATORS, 2 * OPERATORS)
_REST, _REST_OF_ROOFLINE, _BESIDE = (2 * OPERATORS + at * RATES for at in range(3))
_SHARED = _BESIDE + RATES
_COMPETING, _DEMAND, _COMPUTE, _LAUNCH, _BOUND, _EXCESS = (_SHARED + at for at in (2, 3, 4, 5, 6, 8))
_BY_REQUEST = [PREFILL_BOUND, CAUSAL_BOUND, DECODE_EXCESS]


class PairRoom:
    """What some pairs' times follow from whatever they run and the snapshot says, and room; see learner.prompts."""

    def __init__(self, pairs: Pairs, roofline: Roofline, contention: Contention) -> None:
        p, n = pairs.sizes, len(pairs.decode_tpcs)
        # Which batch each half is; the decode step is the one after the prefills.
        self.batch = np.concatenate([np.full(p * n, p), np.repeat(np.arange(p), n)])
        per_flop, per_byte, shortfall, pair_bytes = roofline.by_tpcs
        decode, prefill = np.tile(pairs.decode_tpcs, p), np.tile(pairs.prefill_tpcs, p)
        own, beside = np.concatenate([decode, prefill]), np.concatenate([prefill, decode])
        self.step_pair_bytes, self.launch_s = pair_bytes.take(decode), contention.launch_s
        # Where a prefill's bounds stand in [2 · s, p], and its excess in [s, p].
        part, size = pairs.parts.searchsorted(pairs.prefill_tpcs), np.arange(p)[:, None]
        self.bound_at = np.stack([2 * part * p + size, (2 * part + 1) * p + size]).reshape(2, p * n)
        self.excess_at = (part * p + size).ravel()
        rows = _EXCESS + int(roofline.decode_computes)
        self.rates = np.ones((rows, own.size))
        for at in (_FLOPS, _COMPUTE):
            self.rates[at] = per_flop.take(own)
        for at in (_MAXIMA, _COMPETING, slice(_BOUND, rows)):
            self.rates[at] = per_byte.take(own)
        for rest in (_REST, _REST_OF_ROOFLINE, _BESIDE):
            self.rates[rest + PER_FLOP] = per_flop.take(own)
            self.rates[rest + PER_BYTE] = per_byte.take(own)
            self.rates[rest + PER_SHORTFALL] = shortfall.take(own)
        self.rates[_SHARED : _SHARED + 2] = contention.sharing(own.astype(np.float64), beside.astype(np.float64))

        self.sums, self.linear = np.empty((WIDTH, p + 1)), np.empty((_BOUND, p + 1))
        self.work = work = np.zeros((rows, own.size))
        steps, prefills = slice(0, p * n), slice(p * n, None)
        self.halves, self.bounds = work[:_BOUND], work[_BOUND:_EXCESS, prefills]
        self.step_excess, self.prefill_excess = work[_EXCESS:, steps], work[_EXCESS:, prefills]
        self.flops, self.maxima, self.weighed = work[_FLOPS], work[_MAXIMA], work[OPERATORS:]
        self.times, self.ones = np.empty((3, own.size)), np.ones(own.size)
        self.physical_s, self.roofline_s, self.beside_s = self.times
        self.beside_step_s = self.beside_s[steps]
        self.compute_s, self.launching_s, self.busy = work[_COMPUTE, prefills], work[_LAUNCH, prefills], np.empty(p * n)
        self.found = Found(np.empty((FOUND, own.size)))
        # What each half takes of the bandwidth, and what it asks for.
        self.competing, self.demand = work[_COMPETING], work[_DEMAND]
        self.competing_step, self.competing_prefill = self.competing[steps], self.competing[prefills]
        self.demand_of_step, self.demand_of_prefill = self.demand[steps], self.demand[prefills]


class PairNumbers:
    """Predicts pairs by a snapshot's numbers."""

    def __init__(self, room: PairRoom, folded: Folded, coefficients: FloatArray, contention: FloatArray) -> None:
        self.room = room
        mean, base = folded.mean(coefficients), folded.roofline.copy()
        mean[AS_IS, ACTIVE] += contention[BESIDE]  # however busy the other half is
        by_request = np.array([mean[PER_BYTE, _BY_REQUEST], base[PER_BYTE, _BY_REQUEST]])
        mean[PER_BYTE, _BY_REQUEST] = base[PER_BYTE, _BY_REQUEST] = 0.0
        per_flop, per_byte, *_ = folded.whole_rates
        rows = []
        for costs in (Costs(*contention[PREFILL_COSTS]), Costs(*contention[DECODE_COSTS])):
            others = (
                *folded.beside(costs),
                costs.shared_compute * per_flop * folded.compute,
                costs.shared_memory * per_byte * folded.memory,
                costs.bandwidth * folded.memory,
                per_byte * folded.memory,
                folded.compute,
                room.launch_s * (np.arange(WIDTH) == PREFILLS),
            )
            rows.append(np.concatenate([folded.flops, folded.bytes, mean, base, others]))
        self._of_prefill, self._of_step = rows
        weights = np.zeros((3, _EXCESS + 1))
        weights[:2, _MAXIMA] = operators(coefficients)
        weights[0, _REST:_REST_OF_ROOFLINE] = weights[1, _REST_OF_ROOFLINE:_BESIDE] = 1.0
        weights[2, _BESIDE:_COMPETING] = 1.0
        weights[:2, _BOUND:] = by_request
        self._weights = weights[:, OPERATORS : len(room.rates)].copy()

    def times(
        self, sums: FloatArray, bounds: FloatArray, excess: tuple[FloatArray, FloatArray] | None, found: Found
    ) -> FloatArray:
        """Mean, bound and roofline of each half, all steps first; [3, 2 · p · n].

        ``sums`` [WIDTH, p + 1]: those of the prefills and of the decode step, none of them empty. ``bounds``
        [2 · s, p]: PREFILL_BOUND and CAUSAL_BOUND of the prefills on each of the pairs' ``parts``. ``excess``:
        DECODE_EXCESS of the steps for each of ``step_pair_bytes`` and of the prefills [s, p]; None where always 0.
        ``found``: the batches' factors.
        """
        room = self.room
        physical_s, roofline_s, demand, busy = room.physical_s, room.roofline_s, room.demand, room.busy
        room.sums[...] = sums
        self._of_prefill.dot(room.sums, room.linear)
        # A prompt of which all but one token is cached is a decode step as well.
        steps = room.sums[PREFILLS] == 0.0
        room.linear[:, steps] = self._of_step @ room.sums[:, steps]
        room.linear.take(room.batch, axis=1, out=room.halves, mode="clip")
        room.bounds[...] = bounds.ravel().take(room.bound_at)
        if excess is not None:
            of_steps, of_prefills = excess
            room.step_excess[...], room.prefill_excess[...] = of_steps, of_prefills.ravel().take(room.excess_at)
        multiply(room.work, room.rates, room.work)
        maximum(room.flops, room.maxima, out=room.maxima)
        self._weights.dot(room.weighed, room.times)
        divide(demand, roofline_s, demand)
        minimum(demand, room.ones, out=demand)
        multiply(room.competing_step, room.demand_of_prefill, room.competing_step)
        multiply(room.competing_prefill, room.demand_of_step, room.competing_prefill)
        add(room.beside_s, room.competing, room.beside_s)
        # See learner.contention.
        add(room.compute_s, room.launching_s, busy)
        divide(room.compute_s, busy, busy)
        multiply(room.beside_step_s, busy, room.beside_step_s)
        add(physical_s, room.beside_s, physical_s)
        found.rows.take(room.batch, axis=1, out=room.found.rows, mode="clip")
        return times_of(physical_s, roofline_s, room.found)
