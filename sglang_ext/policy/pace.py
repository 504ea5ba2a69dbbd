"""How fast a model prefills, as a curve that is computed once and read often."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sglang_ext.policy.types import FloatArray, Model

LONGEST = 1 << 21
"""Prompts beyond this many tokens take time in proportion."""


@lru_cache(maxsize=4)
def prefill_curve(model: Model) -> tuple[FloatArray, FloatArray]:
    """Tokens [m], from 0 on, and the mean time of a prompt of so many alone on the whole device [m], never falling.

    A learnt model is immutable, so each of its versions is asked once.
    """
    tokens = np.unique(np.rint(np.geomspace(1, LONGEST, 64)).astype(np.int64))
    times = model.predict(model.terms(tokens[:, None], np.zeros_like(tokens)[:, None], 1, model.total_tpcs)).mean_s
    return np.concatenate([[0.0], tokens]), np.maximum.accumulate(np.concatenate([[0.0], times]))
