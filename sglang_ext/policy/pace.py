"""How fast a model prefills, as a curve that is computed once and read often."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

import numpy as np

from sglang_ext.policy.types import FloatArray, Model

LONGEST = 1 << 21
"""Prompts beyond this many tokens take time in proportion."""

_FAR = 1 << 40
_TOKENS = np.unique(np.rint(np.geomspace(1, LONGEST, 64)).astype(np.int64))
_AT = np.concatenate([[0.0], _TOKENS, [_FAR]])


@lru_cache(maxsize=4)
def prefill_curve(model: Model) -> tuple[FloatArray, FloatArray]:
    """Tokens [m], from 0 on, and the mean time of a prompt of so many alone on the whole device [m], never falling.

    A learnt model is immutable, so each of its versions is asked once.
    """
    new = _TOKENS[:, None]
    times = np.maximum.accumulate(model.predict(model.terms(new, np.zeros_like(new), 1, model.total_tpcs)).mean_s)
    return _AT, np.concatenate([[0.0], times, times[-1:] * (_FAR / LONGEST)])


@lru_cache(maxsize=4)
def _listed(model: Model) -> tuple[list[float], list[float]]:
    tokens, times = prefill_curve(model)
    return tokens.tolist(), times.tolist()


def prefill_s(model: Model, tokens: int) -> float:
    """The curve at so many tokens."""
    at, times = _listed(model)
    after = min(bisect_right(at, tokens), len(at) - 1)
    share = (tokens - at[after - 1]) / (at[after] - at[after - 1])
    return times[after - 1] + share * (times[after] - times[after - 1])
