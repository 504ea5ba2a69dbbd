"""What the learner publishes: the numbers of a latency model, versioned and checked."""

from __future__ import annotations

import itertools
import math

import msgspec

from learner.columns import LOG_FEATURES, PHASES, ROOFLINE_COLUMNS, TERM_COLUMNS, TERMS
from learner.contention import CONTENTION_TERMS
from learner.nearby import MOST_CUT, MOST_POINTS, POINT_WIDTH
from learner.sizes import MOST_SHIFT, MOST_SIZES

SCHEMA = 5
GROUPS = 2 * len(PHASES)  # each phase alone, then each phase beside another stream
GROUP_NAMES = (*PHASES, *(f"{phase}_beside" for phase in PHASES))
KNOTS = 32  # of each log2 feature: 0, 1, …, 31
# A snapshot outside these is a mistake or a lie; no real device is this far from its roofline.
MIN_RATIO, MAX_RATIO = 1e-2, 1e3
MAX_MARGIN = 4.0
MAX_CORRECTION = 0.7
MAX_COEFFICIENT = 1e6
MAX_FLOOR_S = 10.0
MAX_TOKENS = 1e9
MAX_BYTES = 1 << 16

# Before anything is learnt the bound is this much above the roofline: recorded H200 forwards lie 0.9–1.34 × it.
COLD_MARGIN = 1.4
# Decode was measured 20–30 % slower beside prefill on disjoint TPCs, prefill 15–20 %; both suffer more where they share
# TPCs. In the order of CONTENTION_COLUMNS.
COLD_CONTENTION = (0.0, *(0.15, 0.15, 0.1, 0.2, 0.2) * 2)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of a latency model.

    ``coefficients`` [TERMS] and ``contention`` [CONTENTION_TERMS] weigh the physical terms, none negative.
    ``correction`` is [LOG_FEATURES · KNOTS], row by row: log factors at log2(1 + x) = 0, 1, …, scaled per group by
    ``correction_weight``. ``nearby`` are rows of POINT_WIDTH (:mod:`learner.nearby`): log features, group, residual and
    weight of the newest samples, used in groups whose ``nearby_weight`` is 1. ``sizes``, ascending, and ``size_shift``
    are log factors of batches of exactly these sizes (:mod:`learner.sizes`). ``offset``, ``margin``,
    ``min_ratio``, ``max_ratio`` and ``floor_s`` are per group (phases alone, then beside another stream): log shift of
    the mean, upper / mean, the bounds of mean / roofline, and how long the host takes to launch a forward: none ends
    before. ``settled_margin`` is the margin of decode alone where nothing else ran for a while (:mod:`learner.quiet`).
    ``drifting`` is 1 for groups whose predictions are further off than usual (:mod:`learner.drift`), else 0.
    ``coverage`` is the share of times that the margin is meant to cover. ``version`` 0 is the bare roofline.
    """

    schema: int = SCHEMA
    version: int
    key: str = ""
    learner_id: str = ""
    samples: int = 0
    created_unix_s: float = 0.0
    coverage: float = 0.99
    coefficients: list[float]
    contention: list[float]
    correction: list[float]
    correction_weight: list[float]
    nearby: list[float]
    nearby_weight: list[float]
    sizes: list[float]
    size_shift: list[float]
    offset: list[float]
    margin: list[float]
    settled_margin: float
    min_ratio: list[float]
    max_ratio: list[float]
    floor_s: list[float]
    drifting: list[float]

    @classmethod
    def roofline(cls) -> Snapshot:
        """Version 0: the article's roofline as it is, with a default margin and default contention."""
        return cls(
            version=0,
            coefficients=[float(name in ROOFLINE_COLUMNS) for name in TERM_COLUMNS],
            contention=list(COLD_CONTENTION),
            correction=[0.0] * (LOG_FEATURES * KNOTS),
            correction_weight=[0.0] * GROUPS,
            nearby=[],
            nearby_weight=[0.0] * GROUPS,
            sizes=[],
            size_shift=[],
            offset=[0.0] * GROUPS,
            margin=[COLD_MARGIN] * GROUPS,
            settled_margin=COLD_MARGIN,
            min_ratio=[MIN_RATIO] * GROUPS,
            max_ratio=[MAX_RATIO] * GROUPS,
            floor_s=[0.0] * GROUPS,
            drifting=[0.0] * GROUPS,
        )

    @property
    def least_upper(self) -> list[float]:
        """Upper / roofline at least, per group: what it is before anything is learnt while the group is in drift, or 0.

        So there the safer of learner and roofline bounds a forward's time.
        """
        return [COLD_MARGIN * drifting for drifting in self.drifting]

    @property
    def drifting_groups(self) -> list[str]:
        """Names of the groups that are in drift."""
        return [name for name, drifting in zip(GROUP_NAMES, self.drifting, strict=True) if drifting]

    def validate(self) -> None:
        """Raises ValueError if any number is missing, not finite or absurd."""
        if self.schema != SCHEMA:
            raise ValueError(f"snapshot has schema {self.schema}, this program reads {SCHEMA}")
        if self.version < 0 or self.samples < 0:
            raise ValueError(f"snapshot version {self.version} and samples {self.samples} must not be negative")
        if not math.isfinite(self.created_unix_s):
            raise ValueError("snapshot's creation time is not finite")
        if not 0.5 <= self.coverage < 1.0:
            raise ValueError(f"snapshot's coverage {self.coverage} is not in [0.5, 1)")
        _check("coefficients", self.coefficients, TERMS, 0.0, MAX_COEFFICIENT)
        _check("contention", self.contention, CONTENTION_TERMS, 0.0, MAX_COEFFICIENT)
        _check("correction", self.correction, LOG_FEATURES * KNOTS, -MAX_CORRECTION, MAX_CORRECTION)
        _check("correction_weight", self.correction_weight, GROUPS, 0.0, 1.0)
        _check("nearby_weight", self.nearby_weight, GROUPS, 0.0, 1.0)
        self._check_nearby()
        _check("sizes", self.sizes, min(len(self.sizes), 2 * MOST_SIZES), -MAX_TOKENS, MAX_TOKENS)
        _check("size_shift", self.size_shift, len(self.sizes), -MOST_SHIFT, MOST_SHIFT)
        if any(one >= other for one, other in itertools.pairwise(self.sizes)):
            raise ValueError("snapshot's sizes do not ascend")
        _check("offset", self.offset, GROUPS, -math.log(MAX_RATIO), math.log(MAX_RATIO))
        _check("margin", self.margin, GROUPS, 1.0, MAX_MARGIN)
        _check("settled_margin", [self.settled_margin], 1, 1.0, MAX_MARGIN)
        _check("min_ratio", self.min_ratio, GROUPS, MIN_RATIO, MAX_RATIO)
        _check("max_ratio", self.max_ratio, GROUPS, MIN_RATIO, MAX_RATIO)
        _check("floor_s", self.floor_s, GROUPS, 0.0, MAX_FLOOR_S)
        _check("drifting", self.drifting, GROUPS, 0.0, 1.0)
        if any(low > high for low, high in zip(self.min_ratio, self.max_ratio, strict=True)):
            raise ValueError("snapshot's min_ratio exceeds its max_ratio")

    def _check_nearby(self) -> None:
        points, left = divmod(len(self.nearby), POINT_WIDTH)
        if left or points > MOST_POINTS:
            raise ValueError(f"snapshot's nearby has {len(self.nearby)} numbers")
        limits = [(0.0, 64.0)] * LOG_FEATURES + [(0.0, GROUPS - 1.0), (-MOST_CUT, MOST_CUT), (0.0, 1.0)]
        for column, (low, high) in enumerate(limits):
            _check("nearby", self.nearby[column::POINT_WIDTH], points, low, high)

    def encode(self) -> bytes:
        """As msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Snapshot:
        """Decode and validate. Raises ValueError for anything but a sound snapshot."""
        if len(data) > MAX_BYTES:
            raise ValueError(f"snapshot of {len(data)} bytes is larger than {MAX_BYTES}")
        try:
            snapshot = msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a snapshot: {error}") from error
        snapshot.validate()
        return snapshot


def _check(field: str, values: list[float], length: int, low: float, high: float) -> None:
    if len(values) != length:
        raise ValueError(f"snapshot's {field} has {len(values)} numbers, not {length}")
    if not all(low <= value <= high for value in values):  # NaN fails both comparisons
        raise ValueError(f"snapshot's {field} has a number outside [{low:g}, {high:g}]")
