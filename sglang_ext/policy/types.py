"""What a decision is made from and what it says: value objects, arrays and numbers only.

All counts of SMs are in TPCs, all times in seconds, all lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learner.records import Candidates

if TYPE_CHECKING:
    from learner.latency import Prediction, Terms
    from learner.outlook import Following
    from learner.pairs import Pairs

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]

Mode: TypeAlias = Literal["temporal", "chunked", "spatial", "reserved"]
MODES: tuple[Mode, ...] = ("temporal", "chunked", "spatial", "reserved")
TEMPORAL, CHUNKED, SPATIAL, RESERVED = range(4)

ModeSetting: TypeAlias = Literal["auto", "temporal", "chunked", "spatial", "reserved", "duet"]


class Outlook(Protocol):
    """What the policy asks of one iteration's forwards; see :class:`learner.outlook.Outlook`."""

    def predict(
        self,
        whole: IntArray,
        part: IntArray,
        prefills: int = 0,
        following: Following | None = None,
        pairs: Pairs | None = None,
    ) -> FloatArray: ...

    def beside(self) -> FloatArray: ...


class Model(Protocol):
    """What the policy asks of a latency model, which never changes; :class:`learner.latency.LatencyModel` is one."""

    @property
    def total_tpcs(self) -> int: ...

    def terms(self, q: ArrayLike, c: ArrayLike, logits_rows: ArrayLike, tpcs: ArrayLike) -> Terms: ...

    def predict(self, terms: Terms, beside: Terms | None = None) -> Prediction: ...

    def outlook(self, new: IntArray, cached: IntArray, context: IntArray) -> Outlook: ...

    def __hash__(self) -> int: ...


# Situations and decisions are values like the rest; but one of each is made in every iteration, and making a frozen
# one takes four times as long.
@dataclass(slots=True)
class Situation:
    """Everything about one iteration that is not a setting.

    ``decode_context`` [n_d]: tokens in the KV cache before this step, per running decode. ``prefill_new`` and
    ``prefill_cached`` [n_w]: uncached and cached tokens per waiting request, in the order of admission, a chunk in
    progress first; all entries of ``prefill_new`` are at least 1. ``tbt_slo_s`` is the batch's τ: the smallest of its
    decodes' targets. ``prefill_budget`` is the most prefill tokens that one iteration may carry,
    ``max_look_ahead`` the most decode steps that may be launched ahead (0: none). ``host_overhead_s`` is the exposed
    host time before a mixed batch, ``drain_s`` how much more there is before a window (what ran before has to be done
    with first), ``after_window_s`` what there is after one. Mixed batches follow each other no faster than every
    ``host_period_s``, however little there is for the device to do. Launching one that no CUDA graph holds takes
    ``eager_launch_s``, and while it lasts the tokens of the batch before wait.

    ``waited_s`` is how long the decodes' last tokens will have waited when this iteration starts, beyond that overhead:
    what was left of the previous window after its last decode step (:attr:`Decision.left_s`, or as measured), 0 after
    any other iteration. ``after_window``: the previous iteration was one. ``window_yield``: what windows have served of
    what was predicted of them.
    """

    decode_context: IntArray
    prefill_new: IntArray
    prefill_cached: IntArray
    tbt_slo_s: float
    prefill_budget: int
    max_look_ahead: int
    page_size: int = 1
    host_overhead_s: float = 0.0
    waited_s: float = 0.0
    drain_s: float = 0.0
    after_window_s: float = 0.0
    host_period_s: float = 0.0
    eager_launch_s: float = 0.0
    after_window: bool = False
    window_yield: float = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What stays the same from iteration to iteration.

    ``concurrent``: the device can run two halves at once. ``levels``: the numbers of TPCs on offer, ascending; spatial
    gives decode so many, reserved keeps prefill off so many. ``fixed_split`` replaces them by one. ``least_chunk``: the
    fewest tokens of a cut prefill. ``graph_tokens``, ascending: sizes of mixed batches that run as CUDA graphs; one of
    a size between two is padded to the larger, so cut ones are made to fit.
    """

    mode: ModeSetting = "auto"
    concurrent: bool = False
    levels: tuple[int, ...] = ()
    fixed_split: int | None = None
    max_look_ahead: int = 8
    explore: bool = True
    least_chunk: int = 1
    graph_tokens: tuple[int, ...] = ()


class Plan(NamedTuple):
    """One plan that was weighed.

    ``mode`` indexes :data:`MODES`. ``prefill_tokens`` is the budget for admission, a multiple of the page.
    ``look_ahead_steps`` counts decode steps: k in a window, 1 in a mixed batch, 0 if nothing decodes. ``predicted_s``,
    ``upper_s`` and ``roofline_s`` are of the whole iteration, without the host's overhead. ``largest_gap_s`` bounds
    the time between two tokens of a running request, with overheads and, for a window, the wait for the next
    iteration's token. ``tokens_per_s`` is the objective: tokens of both phases per second of predicted time.
    ``feasible`` (0 or 1): the constraint holds. ``left_s`` bounds how long a request's last token has waited when the
    iteration ends: what is left of a window after its last decode step. ``violation_s`` is the largest gap and, for a
    window that breaks the target at its first step and across its end, what the smaller of the two breaks it by.
    """

    mode: float
    prefill_tokens: float
    prefill_tpcs: float
    decode_tpcs: float
    look_ahead_steps: float
    predicted_s: float
    upper_s: float
    roofline_s: float
    largest_gap_s: float
    tokens_per_s: float
    feasible: float
    left_s: float
    violation_s: float


NO_PLANS = np.zeros((len(Plan._fields), 0))


class CandidateTable:
    """Plans that were weighed: the ``first``, those in ``columns`` [13, m], one column each, and the ``last``.

    They are laid out together only when somebody looks at them.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = Plan._fields

    def __init__(self, columns: FloatArray = NO_PLANS, first: Sequence[Plan] = (), last: Sequence[Plan] = ()) -> None:
        self.columns, self.first, self.last = columns, first, last

    @cached_property
    def matrix(self) -> FloatArray:
        """[13, m]: one row per quantity, one column per plan."""
        parts = (
            np.array(plans, dtype=np.float64).reshape(-1, len(Plan._fields)).T for plans in (self.first, self.last)
        )
        first, last = parts
        return np.concatenate((first, self.columns, last), axis=1)

    def __len__(self) -> int:
        return len(self.first) + int(self.columns.shape[1]) + len(self.last)

    def __getitem__(self, column: str) -> FloatArray:
        """One quantity of every plan [m]."""
        row: FloatArray = self.matrix[self.COLUMNS.index(column)]
        return row

    def quantity(self, row: int) -> list[float]:
        """The same, by the number of its row, without laying out the rest."""
        columns: list[float] = self.columns[row].tolist() if self.columns.size else []
        return [plan[row] for plan in self.first] + columns + [plan[row] for plan in self.last]

    def plan(self, index: int) -> Plan:
        """One of them."""
        if index < len(self.first):
            return self.first[index]
        index -= len(self.first)
        if index < self.columns.shape[1]:
            quantities: list[float] = self.columns[:, index].tolist()
            return Plan(*quantities)
        return self.last[index - int(self.columns.shape[1])]

    def to_record(self) -> Candidates:
        """The columns as lists, as they are logged."""
        mode, *counts = self.matrix[:5].astype(np.int64).tolist()
        times = self.matrix[5:10].tolist()
        return Candidates(
            mode=[MODES[code] for code in mode],
            prefill_tokens=counts[0],
            prefill_tpcs=counts[1],
            decode_tpcs=counts[2],
            look_ahead_steps=counts[3],
            predicted_s=times[0],
            upper_s=times[1],
            roofline_s=times[2],
            largest_gap_s=times[3],
            tokens_per_s=times[4],
            feasible=(self.matrix[10] > 0).tolist(),
        )


@dataclass(slots=True)
class Decision:
    """One iteration's plan; a row of ``candidates``, spelt out.

    ``mode``: ``temporal`` and ``chunked`` are one batch of all decodes and ``prefill_tokens`` of prefill on all TPCs
    (``chunked``: cut to meet the target); ``spatial`` and ``reserved`` are a prefill on ``prefill_tpcs`` beside
    ``look_ahead_steps`` decode steps on ``decode_tpcs``. Where the device cannot run both at once these two are
    equal, and the halves run one after the other, decode first. ``look_ahead_steps`` is 1 in a mixed batch.

    ``reason``: ``fits`` (the whole budget meets the target), ``best`` (the highest predicted rate among feasible
    plans), ``least_violation`` (nothing is feasible), ``forced``, ``explore``, ``idle`` (one phase has nothing to do,
    so there was nothing to share), or ``fallback:<why>`` (a forced mode was impossible).

    ``prefill_tokens`` is the budget for admission, a multiple of the page; 0: no prefill in this iteration. For the
    times see :class:`Plan`.
    """

    mode: Mode
    reason: str
    prefill_tokens: int
    prefill_tpcs: int
    decode_tpcs: int
    look_ahead_steps: int
    predicted_s: float
    upper_s: float
    roofline_s: float
    largest_gap_s: float
    left_s: float
    candidates: CandidateTable
    index: int
