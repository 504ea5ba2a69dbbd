"""Which TPCs the two halves of a window get: every division on offer."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sglang_ext.policy.types import RESERVED, SPATIAL, IntArray, Settings


class Layout(NamedTuple):
    """Divisions [n]: ``mode`` (an index of MODES) and each half's TPCs, as indices of distinct counts.

    ``decode_tpcs``, ``prefill_tpcs``: the distinct counts; ``decode_index``, ``prefill_index`` [n] point into them.
    """

    mode: IntArray
    decode_tpcs: IntArray
    decode_index: IntArray
    prefill_tpcs: IntArray
    prefill_index: IntArray
    concurrent: bool


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
def lay_out(modes: tuple[int, ...], levels: tuple[int, ...], total_tpcs: int, concurrent: bool) -> Layout:
    """All divisions of ``modes`` over ``levels``.

    Where the halves cannot run at once there is one for each mode: each half has the whole device in its turn.
    """
    if concurrent:
        offered = np.array(levels, dtype=np.int64)
        divided = [DIVISIONS[mode](offered, total_tpcs) for mode in modes]
    else:
        whole = np.array([total_tpcs], dtype=np.int64)
        divided = [(whole, whole) for _ in modes]
    decode_tpcs, decode_index = np.unique(np.concatenate([decode for decode, _ in divided]), return_inverse=True)
    prefill_tpcs, prefill_index = np.unique(np.concatenate([prefill for _, prefill in divided]), return_inverse=True)
    mode = np.repeat(np.array(modes, dtype=np.int64), len(divided[0][0]))
    return Layout(mode, decode_tpcs, decode_index, prefill_tpcs, prefill_index, concurrent)
