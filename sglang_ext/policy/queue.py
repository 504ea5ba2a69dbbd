"""In which order the waiting requests are admitted."""

from __future__ import annotations

import numpy as np

from sglang_ext.policy.pace import prefill_curve
from sglang_ext.policy.types import FloatArray, IntArray, Model

PATIENCE_S = 30.0
"""A request this long past its deadline goes before all that are not."""

AGEING_TOKENS_PER_S = 1000.0
"""Among those past hope of their deadline, a second of waiting makes up for so many tokens of length."""


def prefill_alone_s(model: Model, new: IntArray, cached: IntArray) -> FloatArray:
    """About how long each request's remaining prefill takes alone on the whole device [n].

    What a prompt of new + cached tokens takes more than one of the cached ones, which is right for causal attention,
    but no less than a prompt of the new ones.
    """
    n = len(new)
    times = np.interp(np.concatenate((new + cached, new, cached)), *prefill_curve(model))
    return np.maximum(times[:n] - times[2 * n :], times[n : 2 * n])


def order_queue(
    now_s: float,
    arrival_s: FloatArray,
    ttft_slo_s: FloatArray | float,
    uncached_tokens: IntArray,
    prefill_s: FloatArray,
    patience_s: float = PATIENCE_S,
    ageing_tokens_per_s: float = AGEING_TOKENS_PER_S,
) -> IntArray:
    """Permutation [n] of the waiting requests, first to be admitted first; equals keep their order.

    ``arrival_s`` [n] is on the clock of ``now_s``; ``ttft_slo_s`` the target, one or [n]; ``uncached_tokens`` [n];
    ``prefill_s`` [n] the predicted time of the remaining prefill alone (:func:`prefill_alone_s`). Three classes, in
    this order:

    1. those more than ``patience_s`` past their deadline, by arrival;
    2. those that can still meet it (now + ``prefill_s`` ≤ arrival + target), by earliest deadline (ConfluxServe);
    3. the rest, shortest first by uncached tokens, less ``ageing_tokens_per_s`` for each second waited. Between two
       requests that difference does not change with time, so one of n tokens is passed only by what arrives within
       n / ``ageing_tokens_per_s`` after it.

    So nothing starves: a request is first at the latest when it has waited its target and ``patience_s``, and all that
    arrived before it are gone.
    """
    deadline_s = arrival_s + ttft_slo_s
    late = prefill_s + now_s > deadline_s
    key = np.where(late, uncached_tokens + ageing_tokens_per_s * (arrival_s - now_s), deadline_s)
    rank = late.astype(np.int8)
    if len(key) and deadline_s[deadline_s.argmin()] < now_s - patience_s:
        overdue = late & (now_s - deadline_s > patience_s)
        key[overdue], rank[overdue] = arrival_s[overdue], -1
    return np.lexsort((key, rank))
