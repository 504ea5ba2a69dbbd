"""All that one iteration could run, predicted in one go, for a scheduler that decides in every iteration.

What is predicted is what :meth:`learner.latency.LatencyModel.predict` says of the same requests, listed one by one.
Here every batch takes the first of the waiting prompts, as admission does, and all decodes or none. So requests are
summed once; what does not depend on S is found once per batch; the snapshot's terms are folded together; and the room
for it all is kept (:mod:`learner.prompts`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy import add, maximum

from learner.contention import Contention
from learner.correction import Correction
from learner.decodes import DecodeBatch
from learner.factors import OF_SUMS, ROWS, FactorRoom, Factors, times_of
from learner.folded import Folded, operators
from learner.nearby import Nearby
from learner.pairs import PairNumbers, PairRoom, Pairs
from learner.prompts import PromptSums
from learner.requests import DECODE_CACHED, DECODE_EXCESS, DECODE_ROWS, LOGITS, LONGEST, TOKENS
from learner.roofline import OPERATORS, Roofline
from learner.sizes import Sizes
from learner.snapshot import Snapshot

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# What a batch's sums are turned into: the operators' F and B on the whole device, the rest of the mean and of the
# roofline, and what its factors follow from.
_REST, _PLACE = 2 * OPERATORS, 2 * OPERATORS + 2


class Following(NamedTuple):
    """The decode step after an iteration: contexts have ``grown``, and the first ``joined`` prompts decode too."""

    joined: int
    grown: int


class _Room:
    """Room for ``batches`` batches over ``prompts`` prompts; see :class:`learner.prompts.PromptSums`."""

    def __init__(
        self, roofline: Roofline, pair_bytes: FloatArray, prompts: int, batches: int, prefills: int, beside: int
    ) -> None:
        self.prompts = PromptSums(roofline.requests, pair_bytes, prompts, batches, prefills, beside)
        self.sums_beside = self.prompts.sums[:, :beside]
        rows = np.empty((_PLACE + ROWS, batches))
        self.linear = rows[: _PLACE + len(OF_SUMS)]
        # A decode step beside others is predicted alone too.
        first = max(beside - 1, 0)
        self.factors = FactorRoom(rows[_PLACE:], first)
        alone = rows[:_PLACE, first:]
        self.flops, self.bytes, self.rest = alone[:OPERATORS], alone[OPERATORS:_REST], alone[_REST:]
        self.maxima, self.times = np.empty(self.flops.shape), np.empty(self.rest.shape)
        self.physical_s, self.roofline_s = self.times


class Workshop:
    """What follows from model and device alone, and room to work in, which every new snapshot uses again.

    For one thread: the room is overwritten by whoever predicts next.
    """

    def __init__(self, roofline: Roofline, contention: Contention) -> None:
        self.roofline, self.folded = roofline, Folded(roofline)
        self._contention = contention
        self._rooms: dict[tuple[int, int, int, Pairs | None], _Room] = {}
        self._pair_rooms: dict[Pairs, PairRoom] = {}

    def room(self, prompts: int, batches: int, prefills: int, pairs: Pairs | None) -> _Room:
        """Room for batches, the same whenever their numbers are."""
        key = prompts, batches, prefills, pairs
        room = self._rooms.get(key)
        if room is None:
            pair_bytes = self.roofline.by_tpcs[3]
            wanted = [-1] if pairs is None else [*pairs.parts, -1]
            beside = 0 if pairs is None else prefills + 1
            room = _Room(self.roofline, pair_bytes.take(wanted), prompts, batches, prefills, beside)
            self._rooms[key] = room
        return room

    def pair_room(self, pairs: Pairs) -> PairRoom:
        """Room for pairs, likewise."""
        room = self._pair_rooms.get(pairs)
        if room is None:
            room = self._pair_rooms[pairs] = PairRoom(pairs, self.roofline, self._contention)
        return room


class Numbers:
    """What follows from a snapshot besides."""

    def __init__(
        self, workshop: Workshop, snapshot: Snapshot, correction: Correction, nearby: Nearby, sizes: Sizes
    ) -> None:
        self.workshop = workshop
        self.factors = Factors(snapshot, correction, nearby, sizes)
        folded, self._coefficients = workshop.folded, np.array(snapshot.coefficients)
        self._contention = np.array(snapshot.contention)
        self.linear = np.concatenate([folded.alone(folded.mean(self._coefficients)), OF_SUMS])
        self.operators = operators(self._coefficients)
        self._pairs: dict[Pairs, PairNumbers] = {}

    def of(self, pairs: Pairs) -> PairNumbers:
        """The numbers of some pairs, which come again and again."""
        numbers = self._pairs.get(pairs)
        if numbers is None:
            room = self.workshop.pair_room(pairs)
            numbers = PairNumbers(room, self.workshop.folded, self._coefficients, self._contention)
            self._pairs[pairs] = numbers
        return numbers


class Outlook:
    """Predicts what one queue of prompts and one batch of decodes could run, as ``numbers`` say.

    ``new``, ``cached`` [n]: uncached and cached tokens of the prompts, in the order of admission; ``context`` [n_d]:
    tokens in the KV cache of each decode, at least 1.
    """

    def __init__(self, numbers: Numbers, new: IntArray, cached: IntArray, context: npt.ArrayLike) -> None:
        self._numbers = numbers
        self._new, self._cached, self._decodes = new, cached, DecodeBatch(context)
        # Room for a prompt of nothing, these, and one that is never taken, rounded up so that there are few sizes.
        self._prompts = 8 << ((len(new) + 1) // 8).bit_length()

    def predict(
        self,
        whole: IntArray,
        part: IntArray,
        prefills: int = 0,
        following: Following | None = None,
        pairs: Pairs | None = None,
    ) -> FloatArray:
        """Times of k batches on the whole device: rows of mean, bound and roofline in seconds.

        Each batch takes the first ``whole`` [k] prompts and ``part`` [k] tokens of the next, 0 for none, and the
        decodes unless it is one of the first ``prefills``. If either of the following is given, the one after these is
        a decode step. ``following``: so is the next, which stands for the step following. Steps take no prompt.

        With ``pairs`` the first are the pairs' prefills. :meth:`beside` tells of these, so they are left out of the
        result [3, k − prefills]; and their decode step is predicted as beside a stream that is never busy: no pair's
        takes less.
        """
        numbers, decodes = self._numbers, self._decodes
        self._last = room, _ = numbers.workshop.room(self._prompts, len(whole), prefills, pairs), pairs
        prompts = room.prompts
        prompts.add_up(self._new, self._cached, whole, part, decodes)
        if numbers.workshop.roofline.decode_computes:
            prompts.add_excess(whole, decodes)
        if following is not None:
            self._join(following, prompts, prompts.sums[:, prefills + 1])
        prompts.complete(0 if pairs is None else prefills)
        numbers.linear.dot(prompts.sums, room.linear)
        numbers.factors.find(room.factors)
        maximum(room.flops, room.bytes, out=room.maxima)
        numbers.operators.dot(room.maxima, room.times)
        add(room.times, room.rest, room.times)
        return times_of(room.physical_s, room.roofline_s, room.factors.found_alone)

    def beside(self) -> FloatArray:
        """Times of the pairs that the last call of :meth:`predict` was given: all steps, then all prefills.

        [3, 2 · pairs]. None of them may be empty. Nothing else may have been predicted since by the same model.
        """
        room, pairs = self._last
        assert pairs is not None, "no pairs were given"
        numbers, roofline, excess = self._numbers.of(pairs), self._numbers.workshop.roofline, None
        if roofline.decode_computes:
            excess = self._decodes.excess(roofline.requests, numbers.room.step_pair_bytes), room.prompts.excess
        return numbers.times(room.sums_beside, room.prompts.bounds, excess, room.factors.found)

    def _join(self, following: Following, prompts: PromptSums, sums: FloatArray) -> None:
        """Make the sums [WIDTH] of a decode step those of the ``following`` one."""
        decodes, roofline, (joined, grown) = self._decodes, self._numbers.workshop.roofline, following
        tokens, longest = prompts.joined(joined)
        sums[DECODE_CACHED] = decodes.cached + tokens + grown * (decodes.rows + joined)
        sums[DECODE_ROWS] = sums[TOKENS] = sums[LOGITS] = decodes.rows + joined
        sums[LONGEST] = max(longest, decodes.longest) + grown
        if roofline.decode_computes:
            pair_bytes = roofline.by_tpcs[3, -1:]
            joining = np.asarray(self._new[:joined] + self._cached[:joined] + (grown + 1.0), dtype=np.float64)
            excess = decodes.excess(roofline.requests, pair_bytes, grown)
            sums[DECODE_EXCESS] = excess[0] + np.add.reduce(roofline.requests.excess(1.0, joining, pair_bytes))
