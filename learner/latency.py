"""The latency model that the scheduler evaluates: roofline terms, weighed by the newest snapshot.

A forward's mean time is a non-negative sum of physical terms (own and contention), times a bounded correction that
depends on the batch but not on S, times what the newest like forwards showed, held between learnt multiples of the
roofline and never less than launching takes. Its upper bound is that times a margin, and while the learner is known to
be off no less than before anything was learnt. Every term is non-increasing in S, and the factors, margins and launch
times do not depend on S; so predictions are non-increasing in S by construction. (Beside another stream this holds
while the two sets of TPCs stay disjoint, and again while they overlap.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from learner.columns import COLUMN, DECODE, LOG_COLUMNS, PHASES, TERMS
from learner.contention import BESIDE, Contention
from learner.correction import Correction
from learner.device import DeviceProfile
from learner.nearby import Nearby
from learner.outlook import Numbers, Outlook, Workshop
from learner.roofline import Roofline
from learner.shape import ModelShape
from learner.sizes import SIGN, Sizes
from learner.snapshot import Snapshot

FloatArray = npt.NDArray[np.float64]

_PHASE, _PADDED_TOKENS = COLUMN["phase"], COLUMN["padded_tokens"]
_MARGIN, _LEAST_UPPER = 3, 6  # rows of a model's group factors


@dataclass(frozen=True, slots=True)
class Terms:
    """m forwards of one stream as columns; see :data:`learner.columns.COLUMNS` for their names."""

    matrix: FloatArray  # [m, len(COLUMNS)]
    tpcs: FloatArray  # [m]
    roofline_s: FloatArray  # [m]

    def __len__(self) -> int:
        return int(self.roofline_s.shape[0])

    def column(self, name: str) -> FloatArray:
        """One named column, [m]. Raises KeyError for a name that is none of COLUMNS."""
        return self.matrix[:, COLUMN[name]]

    def take(self, index: npt.ArrayLike | slice) -> Terms:
        """The forwards that ``index`` picks (integers, a mask or a slice)."""
        at = index if isinstance(index, slice) else np.asarray(index)
        return Terms(self.matrix[at], self.tpcs[at], self.roofline_s[at])


class Prediction(NamedTuple):
    """Times of m forwards in seconds."""

    mean_s: FloatArray  # [m]
    upper_s: FloatArray  # [m], ≥ mean_s: exceeded by no more than 1 − coverage of the times
    roofline_s: FloatArray  # [m]


class Explained(NamedTuple):
    """A prediction of m forwards and what it is made of, for who learns from their times; arrays are [m]."""

    columns: FloatArray  # [len(COLUMNS), m]
    contention: FloatArray | None  # [CONTENTION_TERMS, m], None alone
    group: npt.NDArray[np.intp]
    base_s: FloatArray  # the physical terms
    correction: FloatArray | None  # log factor by batch composition, not yet weighed; None if there is none
    nearby: FloatArray | None  # log factor by the newest like forwards, not yet weighed, likewise
    level_s: FloatArray  # the mean without what was nearby
    prediction: Prediction


class LatencyModel:
    """Predicts forwards of one model on one device. Immutable; a new snapshot makes a new model.

    Without a snapshot it is the roofline itself with a default margin (``learner.snapshot.COLD_MARGIN``).
    Raises ValueError for an unsound snapshot.
    """

    def __init__(self, shape: ModelShape, profile: DeviceProfile, snapshot: Snapshot | None = None) -> None:
        self.shape = shape
        self.profile = profile
        self._roofline = Roofline(shape, profile)
        self._contention = Contention(shape, profile)
        self._workshop: Workshop | None = None
        self._load(snapshot)

    def _load(self, snapshot: Snapshot | None) -> None:
        self.snapshot = snapshot or Snapshot.roofline()
        self.snapshot.validate()
        numbers = self.snapshot
        self._coefficients = np.array(numbers.coefficients)
        self._contention_coefficients = np.array(numbers.contention)
        self._correction = Correction(numbers.correction)
        # Its residuals are weighed already.
        self._nearby = Nearby(numbers.nearby, numbers.nearby_weight)
        self._nearby_weight = np.array(numbers.nearby_weight)
        self._sizes = Sizes(numbers.sizes, numbers.size_shift)
        self._looks_nearby = any(numbers.nearby_weight) and len(self._nearby) > 0
        self._group_factors = np.array(
            [
                np.exp(numbers.offset),
                numbers.min_ratio,
                numbers.max_ratio,
                numbers.margin,
                numbers.correction_weight,
                numbers.floor_s,
                numbers.least_upper,
            ]
        )

    @property
    def total_tpcs(self) -> int:
        """TPCs of the whole device."""
        return self.profile.tpcs

    @property
    def version(self) -> int:
        """Version of the snapshot; 0 is the roofline."""
        return self.snapshot.version

    def with_snapshot(self, snapshot: Snapshot | None) -> LatencyModel:
        """The same model and device with other numbers. Raises ValueError for an unsound snapshot."""
        model = object.__new__(LatencyModel)
        model.shape, model.profile = self.shape, self.profile
        model._roofline, model._contention = self._roofline, self._contention
        model._workshop = self._workshop
        model._load(snapshot)
        return model

    def terms(
        self,
        q: npt.ArrayLike,
        c: npt.ArrayLike,
        logits_rows: npt.ArrayLike,
        tpcs: npt.ArrayLike,
    ) -> Terms:
        """Roofline terms of m forwards.

        ``q``, ``c``: new and cached tokens per request, integers, [n] or [m, n] or broadcastable to it (rows with
        q == 0 are padding and cost nothing). ``logits_rows``: rows that get logits, [m] or scalar. ``tpcs``: TPCs
        that the forward may use, [m] or scalar. The terms do not depend on the snapshot.
        """
        columns, s, roofline = self._roofline.columns(q, c, logits_rows, tpcs)
        return Terms(columns.T, s, roofline)

    def predict(
        self,
        terms: Terms,
        beside: Terms | None = None,
        share: npt.ArrayLike | None = None,
        settled: npt.ArrayLike | None = None,
    ) -> Prediction:
        """Predicted times of ``terms``; ``beside`` is what the other stream runs, row by row or one row for all, and
        ``share`` [m] during how much of each forward's time (None: all of it).

        None: alone. Where either row is empty it is as if alone. ``settled`` [m]: where nothing but decode has run for
        a while (:mod:`learner.quiet`), None: nowhere.
        """
        columns, contention, group = self._placed(terms, beside, share)
        mean = self.mean_s(columns, contention, terms.roofline_s, group, nearby=True)
        return self._bound(terms, group, mean, settled)

    def explain(
        self,
        terms: Terms,
        beside: Terms | None = None,
        share: npt.ArrayLike | None = None,
        settled: npt.ArrayLike | None = None,
    ) -> Explained:
        """The same as :meth:`predict`, with what it is made of."""
        columns, contention, group = self._placed(terms, beside, share)
        base, correction = self.parts(columns, contention)
        shift = self.size_shift(columns, group) if len(self._sizes) else np.zeros(len(terms))
        level = self._bounded_s(base, correction, shift.copy(), terms.roofline_s, group)
        near, mean = None, level
        if len(self._nearby):
            near = self._unweighed_nearby.shift(columns[LOG_COLUMNS], group)
            shift += near * self._nearby_weight.take(group)
            mean = self._bounded_s(base, correction, shift, terms.roofline_s, group)
        prediction = self._bound(terms, group, mean, settled)
        return Explained(columns, contention, group, base, correction, near, level, prediction)

    def _placed(
        self, terms: Terms, beside: Terms | None, share: npt.ArrayLike | None
    ) -> tuple[FloatArray, FloatArray | None, npt.NDArray[np.intp]]:
        """Columns, contention columns and groups of forwards."""
        columns = terms.matrix.T
        contention = None if beside is None else self.contention_columns(terms, beside, share)
        return columns, contention, self.group(columns, contention)

    def _bound(
        self, terms: Terms, group: npt.NDArray[np.intp], mean: FloatArray, settled: npt.ArrayLike | None
    ) -> Prediction:
        margin = self._group_factors[_MARGIN].take(group)
        if settled is not None:
            margin[np.asarray(settled) & (group == DECODE)] = self.snapshot.settled_margin
        upper = mean * margin
        least = terms.roofline_s * self._group_factors[_LEAST_UPPER].take(group)
        return Prediction(mean, np.maximum(upper, least, out=upper), terms.roofline_s)

    def outlook(self, new: npt.NDArray[np.int64], cached: npt.NDArray[np.int64], context: npt.ArrayLike) -> Outlook:
        """The same predictions for what one iteration could run, in a fraction of the time.

        ``new``, ``cached`` [n]: uncached and cached tokens of waiting prompts; ``context`` [n_d] of running decodes.
        """
        return Outlook(self._outlook_numbers, new, cached, context)

    @cached_property
    def _outlook_numbers(self) -> Numbers:
        if self._workshop is None:
            self._workshop = Workshop(self._roofline, self._contention)
        return Numbers(self._workshop, self.snapshot, self._correction, self._nearby, self._sizes)

    def mean_s(
        self,
        columns: FloatArray,
        contention: FloatArray | None,
        roofline_s: FloatArray,
        group: npt.NDArray[np.intp],
        *,
        nearby: bool,
    ) -> FloatArray:
        """Mean times in seconds, [m]; with or without what the newest like forwards showed.

        ``columns`` [len(COLUMNS), m], ``contention`` [CONTENTION_TERMS, m], ``roofline_s`` and ``group`` [m].
        """
        base, correction = self.parts(columns, contention)
        shift = self._nearby.shift(columns[LOG_COLUMNS], group) if nearby and self._looks_nearby else None
        if len(self._sizes):
            of_size = self.size_shift(columns, group)
            shift = of_size if shift is None else np.add(shift, of_size, out=shift)
        return self._bounded_s(base, correction, shift, roofline_s, group)

    def _bounded_s(
        self,
        base: FloatArray,
        correction: FloatArray | None,
        shift: FloatArray | None,
        roofline_s: FloatArray,
        group: npt.NDArray[np.intp],
    ) -> FloatArray:
        """Mean times of physical sums ``base``, log ``correction``, not yet weighed, and nearby ``shift``; all [m]."""
        offset, low, high, _, weight, floor, _ = self._group_factors.take(group, axis=1)
        mean = base * offset
        factor: FloatArray | None = None
        if correction is not None:
            factor = np.multiply(correction, weight, out=weight)
        if shift is not None:
            factor = shift if factor is None else np.add(factor, shift, out=shift)
        if factor is not None:
            mean *= np.exp(factor, out=factor)
        low *= roofline_s
        high *= roofline_s
        np.maximum(mean, low, out=mean)
        np.minimum(mean, high, out=mean)
        floor *= roofline_s > 0.0  # nothing is launched for nothing
        return np.asarray(np.maximum(mean, floor, out=mean))

    def contention_columns(self, terms: Terms, beside: Terms, share: npt.ArrayLike | None = None) -> FloatArray:
        """Contention terms of ``terms`` beside ``beside``, as [CONTENTION_TERMS, m]; see :meth:`predict`."""
        used = self._contention.used
        columns = self._contention.columns(used(terms.matrix.T), terms.tpcs, used(beside.matrix.T), beside.tpcs)
        if share is not None:
            columns *= np.asarray(share, dtype=np.float64)
        return columns

    @staticmethod
    def group(columns: FloatArray, contention: FloatArray | None = None) -> npt.NDArray[np.intp]:
        """Which of a snapshot's groups each forward belongs to, [m]: its phase, + len(PHASES) if it runs beside another
        stream for most of its time."""
        group: npt.NDArray[np.intp] = columns[_PHASE].astype(np.intp)
        if contention is not None:
            group += _beside(contention)
        return group

    def parts(self, columns: FloatArray, contention: FloatArray | None = None) -> tuple[FloatArray, FloatArray | None]:
        """What a mean is made of: the sum of physical terms in seconds, and the log correction; each [m].

        ``columns`` [len(COLUMNS), m], ``contention`` [CONTENTION_TERMS, m]. The correction is bounded but not yet
        weighed, and None if the snapshot has none.
        """
        base = self._coefficients @ columns[:TERMS]
        if contention is not None:
            base += self._contention_coefficients @ contention
        return base, self._correction.log_factor(columns[LOG_COLUMNS]) if self._correction.present else None

    def size_shift(self, columns: FloatArray, group: npt.NDArray[np.intp]) -> FloatArray:
        """Log factor by exact size, [m]."""
        return self._sizes.shift(sizes_of(columns, group))

    @cached_property
    def _unweighed_nearby(self) -> Nearby:
        return Nearby(self.snapshot.nearby)


def sizes_of(columns: FloatArray, group: npt.NDArray[np.intp]) -> FloatArray:
    """Keys of forwards in :class:`learner.sizes.Sizes`, [m]; ``columns`` [len(COLUMNS), m], ``group`` [m]."""
    return np.asarray(columns[_PADDED_TOKENS] * SIGN[group])


def _beside(contention: FloatArray) -> npt.NDArray[np.intp]:
    """By how much a row's group lies behind its phase's own, [m]."""
    behind: npt.NDArray[np.intp] = (contention[BESIDE] >= 0.5).astype(np.intp)
    behind *= len(PHASES)
    return behind
