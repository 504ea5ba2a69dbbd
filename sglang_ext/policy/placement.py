"""On which rank a new decode lives, with its KV cache, until it ends."""

from __future__ import annotations

import numpy as np

from sglang_ext.policy.types import IntArray

KV_THRESHOLD = 0.8
"""Share of a rank's KV cache above which room counts for more than balance."""


def place_decode(
    tokens: int,
    context_tokens: IntArray,
    used_tokens: IntArray,
    capacity_tokens: IntArray,
    kv_threshold: float = KV_THRESHOLD,
) -> int | None:
    """The rank for a decode that needs ``tokens`` of KV cache; None if no rank has so much room.

    Per rank [r]: ``context_tokens`` is the total context of its decodes, which is what a decode step's time follows;
    ``used_tokens`` of ``capacity_tokens`` KV slots are taken. While any rank's use is under ``kv_threshold`` of its
    capacity, the rank with the smallest total context, which balances the work; after that best fit, the rank with
    the least room that suffices, which leaves large holes whole (ConfluxServe). Of equals, the first.
    """
    free = capacity_tokens - used_tokens
    fits = free >= tokens
    if not fits.any():
        return None
    spare = (used_tokens < kv_threshold * capacity_tokens).any()
    cost = context_tokens if spare else free
    return int(np.argmin(np.where(fits, cost, np.iinfo(np.int64).max)))
