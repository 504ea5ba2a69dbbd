"""DuetServe's partition optimiser, as published (arXiv 2511.04791, §4.2 and its Algorithm 1).

    maximise over S_d, k   (k·T_decode + T_prefill) / max(k·t_d(S_d), t_p(S − S_d))   subject to   t_d(S_d) ≤ τ

with k ∈ {⌊t_p/t_d⌋, ⌊t_p/t_d⌋ + 1}. It is kept as it is, to compare with: the constraint bounds the time of one decode
step only, by its mean and without the host's share. It says nothing of the time between a window's last step and the
next iteration's first, which is max(k·t_d, t_p) − k·t_d longer and breaks τ when k is bounded. The other plans of this
package are held to the largest gap instead (:mod:`sglang_ext.policy.gaps`). S_d < S and k ≥ 1 are ours: the article's
loop ends at S_d = S, where no prefill runs, and its first k may be 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sglang_ext.policy.types import BoolArray, FloatArray


class DuetPlans(NamedTuple):
    """Every plan that the algorithm visits [2, n]: two values of k, n numbers of decode TPCs."""

    steps: FloatArray
    duration_s: FloatArray
    tokens_per_s: FloatArray
    allowed: BoolArray


def steps_between(decode_s: FloatArray, prefill_s: FloatArray, most: int, steps: FloatArray) -> None:
    """k ∈ {⌊t_p/t_d⌋, ⌊t_p/t_d⌋ + 1} in the first two rows of ``steps`` [2 or more, ...]; keeps all within 1 and
    ``most``."""
    first = steps[0]
    np.divide(prefill_s, decode_s, first)
    np.floor(first, first)
    np.add(first, 1.0, steps[1])
    np.maximum(steps, 1.0, out=steps)
    np.minimum(steps, most, out=steps)


def duet(
    decode_s: FloatArray,
    prefill_s: FloatArray,
    decode_tokens: int,
    prefill_tokens: int,
    tbt_slo_s: float,
    most_steps: int,
    concurrent: bool = True,
) -> DuetPlans:
    """The algorithm's lines 8 to 20 over t_d(S_d), t_p(S − S_d) [n], ascending in S_d.

    ``most_steps`` ≥ 1 bounds k by the memory for look-ahead. The published result is the plan of the highest
    ``tokens_per_s`` among those ``allowed``, of equals the one with the smaller S_d, then k; there may be none.
    """
    steps = np.empty((2, *decode_s.shape))
    steps_between(decode_s, prefill_s, most_steps, steps)
    decoding_s = steps * decode_s
    time_s = np.maximum(decoding_s, prefill_s) if concurrent else decoding_s + prefill_s
    allowed = np.broadcast_to(decode_s <= tbt_slo_s, steps.shape)
    return DuetPlans(steps, time_s, (steps * decode_tokens + prefill_tokens) / time_s, allowed)
