"""Which TPCs the two halves of a window get: every division on offer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from learner.decodes import growth
from sglang_ext.policy.types import RESERVED, SPATIAL, FloatArray, IntArray, Settings


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Divisions of the device, each to be weighed with several sizes of the prefill.

    ``mode`` (an index of MODES), ``decode_tpcs`` and ``prefill_tpcs`` [n]: what each division gives. A decode step is
    predicted once for each of ``step_tpcs``, the distinct counts, and a prefill for each size on each of
    ``part_tpcs``; ``tpcs`` are those of all these forwards, in this order. ``own`` [2 · sizes · n] picks from them the
    windows' steps, then their prefills, and ``beside`` what runs beside each.
    """

    mode: IntArray
    decode_tpcs: IntArray
    prefill_tpcs: IntArray
    step_tpcs: IntArray
    part_tpcs: IntArray
    tpcs: IntArray
    own: IntArray
    beside: IntArray
    total_tpcs: int
    concurrent: bool


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
    Without modes there is none.
    """
    if concurrent:
        offered = np.array(levels, dtype=np.int64)
        divided = [DIVISIONS[mode](offered, total_tpcs) for mode in modes]
    else:
        whole = np.array([total_tpcs], dtype=np.int64)
        divided = [(whole, whole) for _ in modes]
    none = np.zeros(0, dtype=np.int64)
    mode = np.concatenate([none, *(np.full(len(at[0]), one) for one, at in zip(modes, divided, strict=True))])
    decode_tpcs = np.concatenate([none, *(decode for decode, _ in divided)])
    prefill_tpcs = np.concatenate([none, *(prefill for _, prefill in divided)])
    step_tpcs, step_index = np.unique(decode_tpcs, return_inverse=True)
    part_tpcs, part_index = np.unique(prefill_tpcs, return_inverse=True)
    tpcs = np.concatenate([step_tpcs, np.tile(part_tpcs, sizes)])
    step_rows = np.tile(step_index, sizes)
    prefill_rows = len(step_tpcs) + (np.arange(sizes)[:, None] * len(part_tpcs) + part_index).ravel()
    own = np.concatenate([step_rows, prefill_rows])
    beside = np.concatenate([prefill_rows, step_rows])
    return Layout(mode, decode_tpcs, prefill_tpcs, step_tpcs, part_tpcs, tpcs, own, beside, total_tpcs, concurrent)


class Arrangement(NamedTuple):
    """Rows of one call of the model: a layout's forwards, the next decode step, mixed batches, and nothing at all.

    ``composition`` says what each row prefills, as an index of the layout's sizes, then the mixed batches (the first
    prefills nothing, the second everything); ``decodes`` (0 or 1) whether it decodes; both [r], like ``tpcs``;
    ``growth`` [3, r] in what contexts. ``following`` is the next decode step's row. ``own`` picks what is predicted:
    the layout's windows, then the next decode step and the mixed batches; ``beside`` what runs beside each.
    """

    composition: IntArray
    decodes: FloatArray
    growth: FloatArray
    tpcs: IntArray
    following: int
    own: IntArray
    beside: IntArray


@lru_cache(maxsize=256)
def arrange(layout: Layout, sizes: int, mixed: int, grown: int) -> Arrangement:
    """The rows for a layout made for so many ``sizes``, so many ``mixed`` batches on the whole device, and a next
    decode step in contexts that have ``grown``.
    """
    steps, following = len(layout.step_tpcs), len(layout.tpcs)
    alone, whole, nothing = sizes, sizes + 1, following + 1 + mixed
    composition = np.concatenate(
        [
            np.full(steps, alone),
            np.arange(sizes).repeat(len(layout.part_tpcs)),
            [whole],
            alone + np.arange(mixed),
            [alone],
        ]
    )
    decodes = np.ones(nothing + 1)
    decodes[steps:following] = decodes[nothing] = 0.0
    longer = np.zeros(nothing + 1)
    longer[following] = grown
    tpcs = np.concatenate([layout.tpcs, np.full(mixed + 2, layout.total_tpcs)])
    own = np.concatenate([layout.own, np.arange(following, nothing)])
    beside = np.concatenate([layout.beside, np.full(mixed + 1, nothing)])
    return Arrangement(composition, decodes, growth(decodes, longer), tpcs, following, own, beside)
