"""Stores of timed forwards that bound what the estimator remembers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from learner.columns import COLUMNS, LOG_COLUMNS
from learner.contention import CONTENTION_TERMS
from learner.snapshot import GROUPS

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_LOG_PREFILL_TOKENS, _LOG_PREFILL_CONTEXT, _LOG_DECODE_ROWS, _LOG_DECODE_CONTEXT = range(
    LOG_COLUMNS.start, LOG_COLUMNS.start + 4
)
# A stored sample: its columns, its contention columns, and these.
_CONTENTION = slice(len(COLUMNS), len(COLUMNS) + CONTENTION_TERMS)
_ROOFLINE, _MEASURED, _GROUP, _SERIAL, _KEY = range(_CONTENTION.stop, _CONTENTION.stop + 5)
_WIDTH = _KEY + 1
# Strata tell at most this many values of S apart.
_TPC_BUCKETS = 16


@dataclass(frozen=True, slots=True)
class Batch:
    """n timed forwards as arrays."""

    columns: FloatArray  # [n, len(COLUMNS)]
    contention: FloatArray  # [n, CONTENTION_TERMS]
    roofline_s: FloatArray  # [n]
    measured_s: FloatArray  # [n]
    group: npt.NDArray[np.intp]  # [n], as LatencyModel.parts counts groups
    serial: FloatArray  # [n], how many samples had been accepted before this one

    def __len__(self) -> int:
        return int(self.measured_s.size)

    def take(self, index: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Batch:
        """The forwards that ``index`` picks."""
        return Batch(
            self.columns[index],
            self.contention[index],
            self.roofline_s[index],
            self.measured_s[index],
            self.group[index],
            self.serial[index],
        )


class WindowState(msgspec.Struct, frozen=True):
    """A window's content for a state file: ``rows`` × ``width`` float64 in little-endian bytes, oldest first."""

    rows: int
    width: int
    data: bytes


class Window:
    """The newest samples, at most ``capacity`` in all and ``stratum_capacity`` of any one stratum.

    A stratum is what is alike in group (phase, alone or beside another stream), S, and the powers of two of tokens,
    decode rows and context. When the window is full, the oldest sample of the fullest stratum gives way, so what is
    seen rarely stays known however much of the usual arrives. With ``stratum_capacity`` equal to ``capacity`` there
    is one stratum only, and the window is a plain ring. ``tpcs`` is that of the device.
    """

    def __init__(self, capacity: int, stratum_capacity: int, tpcs: int = 1) -> None:
        if not 1 <= stratum_capacity <= capacity:
            raise ValueError(f"a stratum's capacity ({stratum_capacity}) must lie in [1, {capacity}]")
        self._stratum_capacity = stratum_capacity
        self._stratified = stratum_capacity < capacity
        self._tpcs_per_bucket = max(1, -(-tpcs // _TPC_BUCKETS))
        self._rows: FloatArray = np.zeros((capacity, _WIDTH))
        self._free = list(range(capacity - 1, -1, -1))
        self._strata: dict[int, deque[int]] = {}

    def __len__(self) -> int:
        return int(self._rows.shape[0]) - len(self._free)

    @property
    def capacity(self) -> int:
        """The most samples it holds."""
        return int(self._rows.shape[0])

    @property
    def strata(self) -> int:
        """How many strata hold a sample."""
        return len(self._strata)

    def add(
        self,
        columns: FloatArray,
        contention: FloatArray,
        roofline_s: float,
        measured_s: float,
        group: int,
        tpcs: float,
        serial: int,
    ) -> FloatArray:
        """Store one sample: ``columns`` [len(COLUMNS)], ``contention`` [CONTENTION_TERMS]; returns it as it is stored,
        for :meth:`add_row` of another window."""
        row = np.empty(_WIDTH)
        row[: len(COLUMNS)] = columns
        row[_CONTENTION] = contention
        row[_ROOFLINE:] = roofline_s, measured_s, group, serial, self._stratum(columns, group, tpcs)
        self.add_row(row)
        return row

    def batch(self) -> Batch:
        """All samples, oldest first."""
        rows = self._ordered()
        return Batch(
            rows[:, : len(COLUMNS)],
            rows[:, _CONTENTION],
            rows[:, _ROOFLINE],
            rows[:, _MEASURED],
            rows[:, _GROUP].astype(np.intp),
            rows[:, _SERIAL],
        )

    def state(self) -> WindowState:
        """Content for a state file."""
        rows = self._ordered()
        return WindowState(rows.shape[0], _WIDTH, rows.astype("<f8").tobytes())

    def restore(self, state: WindowState) -> None:
        """Replace the content by a state's. Raises ValueError if it does not fit or is not finite."""
        if state.width != _WIDTH or len(state.data) != state.rows * state.width * 8:
            raise ValueError("a stored window has another layout")
        rows = np.frombuffer(state.data, dtype="<f8").reshape(state.rows, state.width)
        # Nothing that is stored is ever negative, and no log2, group or key reaches the limits here.
        sound = np.isfinite(rows).all() and (rows >= 0.0).all() and (rows[:, [_ROOFLINE, _MEASURED]] > 0.0).all()
        if not sound or (rows[:, LOG_COLUMNS] > 64.0).any() or (rows[:, _GROUP] >= GROUPS).any():
            raise ValueError("a stored window holds numbers that cannot be")
        self._free = list(range(self._rows.shape[0] - 1, -1, -1))
        self._strata = {}
        for row in rows:
            self.add_row(row)

    def _ordered(self) -> FloatArray:
        used = np.fromiter((at for stratum in self._strata.values() for at in stratum), dtype=np.intp)
        rows = self._rows[used]
        return rows[np.argsort(rows[:, _SERIAL], kind="stable")]

    def _stratum(self, columns: FloatArray, group: int, tpcs: float) -> int:
        key = group
        for column in (_LOG_PREFILL_TOKENS, _LOG_PREFILL_CONTEXT, _LOG_DECODE_ROWS, _LOG_DECODE_CONTEXT):
            key = (key << 6) | int(columns[column])
        return (key << 6) | int(tpcs) // self._tpcs_per_bucket

    def _key(self, row: FloatArray) -> int:
        return int(row[_KEY]) if self._stratified else 0

    def add_row(self, row: FloatArray) -> None:
        """Store a sample that another window of this device has."""
        key = self._key(row)
        stratum = self._strata.get(key)
        if stratum is not None and len(stratum) >= self._stratum_capacity:
            at = stratum.popleft()
        elif self._free:
            at = self._free.pop()
        else:
            fullest = max(self._strata.values(), key=len)
            at = fullest.popleft()
            if not fullest:
                del self._strata[self._key(self._rows[at])]
            stratum = self._strata.get(key)
        if stratum is None:
            stratum = self._strata[key] = deque()
        self._rows[at] = row
        stratum.append(at)
