"""Which TPCs the two halves of a window get: every division on offer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy import add, maximum, multiply

from learner.pairs import Pairs
from sglang_ext.policy.table import (
    DECODE_TPCS,
    FEASIBLE,
    GAP,
    LEFT,
    LOOK_AHEAD_STEPS,
    MODE,
    PREDICTED,
    PREFILL_TOKENS,
    PREFILL_TPCS,
    RATE,
    ROOFLINE,
    VIOLATION,
)
from sglang_ext.policy.types import RESERVED, SPATIAL, FloatArray, IntArray, Plan, Settings

WHOLE = 0.05
"""How much more each next smaller part has to bring: predictions are no finer, and what is left has to run as well."""


class WindowRoom:
    """Room to weigh w windows (sizes of the prefill × n divisions, size by size) with k = 2 numbers of steps each.

    All is flat, [k · w]; see :mod:`learner.prompts` for why it is kept, which makes it room for one thread.
    ``table`` [13, k · w] is a candidate table, in which modes and TPCs stand already.
    """

    def __init__(self, mode: IntArray, decode_tpcs: IntArray, prefill_tpcs: IntArray, sizes: int) -> None:
        self.divisions = n = len(mode)
        k = 2
        w, size = sizes * n, k * sizes * n
        self.table = table = np.zeros((len(Plan._fields), size))
        table[[MODE, PREFILL_TPCS, DECODE_TPCS]] = np.tile((mode, prefill_tpcs, decode_tpcs), k * sizes)
        self.budgets, self.steps, self.left_s = table[PREFILL_TOKENS], table[LOOK_AHEAD_STEPS], table[LEFT]
        self.predicted_s, self.gap_s, self.violation_s = table[PREDICTED], table[GAP], table[VIOLATION]
        self.rate, self.feasible = table[RATE], table[FEASIBLE]
        self.by_window = self.steps.reshape(k, w)
        """The steps [k, w]."""

        size_of, window = np.tile(np.arange(sizes).repeat(n), k), np.tile(np.arange(w), k)
        self._size, self._half = size_of, np.concatenate([window, w + window])
        self._sizes, self._halves_s = np.empty((2, size)), np.empty((3, 2 * size))
        self._budgets, self.tokens = self._sizes
        self.step_s, self.step_upper_s, _ = step_s = self._halves_s[:, :size]
        self.prefill_s, self.prefill_upper_s, _ = prefill_s = self._halves_s[:, size:]
        self.of_window = self.step_s[:w], self.prefill_s[:w]
        """Means of a step and of the prefill of each window [w]."""
        self._durations = list(zip(step_s, prefill_s, table[PREDICTED : ROOFLINE + 1], strict=True))
        self.scratch, self.keeps, self.score = np.empty(size), np.empty(size, dtype=np.bool_), np.empty(size)
        self.score_by_division, self.first = self.score.reshape(-1, n), np.arange(n)
        self.discount = (1.0 - WHOLE) ** size_of
        self.preference_s = -1e-12 * np.arange(size)
        """Of gaps that are the same but for rounding, the first is the best: that with the larger prefill."""

    def fill(self, sizes: FloatArray, halves_s: FloatArray) -> None:
        """Take in each size's budget and tokens [2, sizes], and the halves' times [3, 2 · w]."""
        sizes.take(self._size, axis=1, out=self._sizes, mode="clip")
        halves_s.take(self._half, axis=1, out=self._halves_s, mode="clip")
        self.budgets[...] = self._budgets

    def last(self, concurrent: bool) -> None:
        """Find how long steps and prefills last, one by one and together: mean, bound and roofline."""
        for step_s, prefill_s, duration_s in self._durations:
            multiply(self.steps, step_s, duration_s)
            if concurrent:
                maximum(duration_s, prefill_s, out=duration_s)
            else:
                add(duration_s, prefill_s, duration_s)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Divisions of the device, each to be weighed with the same number of sizes of the prefill.

    ``decode_tpcs`` and ``prefill_tpcs`` [n]: what each division gives. ``pairs``: the halves of all windows if they run
    at once; None if they run one after the other. ``room``: where to weigh all windows.
    """

    decode_tpcs: IntArray
    prefill_tpcs: IntArray
    pairs: Pairs | None
    room: WindowRoom

    @property
    def concurrent(self) -> bool:
        """Whether the halves run at once."""
        return self.pairs is not None


@lru_cache(maxsize=64)
def levels_on_offer(settings: Settings, total_tpcs: int) -> tuple[int, ...]:
    """The settings' levels, or the fixed split, as far as the device has room for them: 1 ≤ level < S."""
    levels = settings.levels if settings.fixed_split is None else (settings.fixed_split,)
    return tuple(level for level in levels if 1 <= level < total_tpcs)


def spatial(levels: IntArray, total_tpcs: int) -> tuple[IntArray, IntArray]:
    """Disjoint parts: S_d of ``levels`` for decode, S − S_d for prefill."""
    return levels, total_tpcs - levels


def reserved(levels: IntArray, total_tpcs: int) -> tuple[IntArray, IntArray]:
    """Decode on all TPCs at high priority, prefill kept off ``levels`` of them: decode always finds room to start."""
    return np.full_like(levels, total_tpcs), total_tpcs - levels


DIVISIONS = {SPATIAL: spatial, RESERVED: reserved}


@lru_cache(maxsize=64)
def lay_out(modes: tuple[int, ...], levels: tuple[int, ...], total_tpcs: int, concurrent: bool, sizes: int) -> Layout:
    """All divisions of ``modes`` over ``levels``, for so many ``sizes`` of the prefill.

    Where the halves cannot run at once there is one for each mode: each half has the whole device in its turn.
    """
    if concurrent:
        offered = np.array(levels, dtype=np.int64)
        divided = [DIVISIONS[mode](offered, total_tpcs) for mode in modes]
    else:
        whole = np.array([total_tpcs], dtype=np.int64)
        divided = [(whole, whole) for _ in modes]
    mode = np.concatenate([np.full(len(at[0]), one) for one, at in zip(modes, divided, strict=True)])
    decode_tpcs, prefill_tpcs = (np.concatenate(halves) for halves in zip(*divided, strict=True))
    pairs = Pairs(decode_tpcs, prefill_tpcs, sizes) if concurrent else None
    return Layout(decode_tpcs, prefill_tpcs, pairs, WindowRoom(mode, decode_tpcs, prefill_tpcs, sizes))
