"""The largest time between two tokens that a plan can bring.

Every formula bounds it for the requests that decode while the plan runs, from their last token before it to their
first token after it, and for those whose first token it makes. Inputs are scalars or arrays that broadcast.
"""

from __future__ import annotations

from numpy import add, ceil, divide, maximum, multiply, subtract

from sglang_ext.policy.types import FloatArray


def mixed_gap_s(upper_s: float, overhead_s: float) -> float:
    """A mixed batch makes one token per request when it ends: after the wait so far, the host's time, the batch."""
    return upper_s + overhead_s


def window_gaps(
    decode_upper_s: FloatArray,
    decoding_s: FloatArray,
    decoding_upper_s: FloatArray,
    prefill_s: FloatArray,
    prefill_upper_s: FloatArray,
    begins: FloatArray,
    next_upper_s: float,
    host_overhead_s: float,
    waited_s: float,
    largest_s: FloatArray,
    left_s: FloatArray,
) -> None:
    """Gaps of windows of k decode steps beside one prefill: fills ``largest_s``, the largest gap between two tokens,
    and ``left_s``, how long a request's last token will have waited when the window ends. Arrays are of any one shape.

    Given are the bound on one step; mean and bound of all k steps, of which the bound is overwritten; and mean and
    bound of the prefill. Three gaps can be the largest: to the first step (the wait so far, the host, t_d); between
    two steps (t_d, smaller than the first); and across the end: what is left of max(k·t_d, t_p) after the k-th step,
    plus the host and ``next_upper_s``, the bound on a decode step alone, which the next iteration can always run. What
    is left counts the prefill at its bound and the steps at their mean: a decode that is quicker than its bound waits
    longer. Where ``begins`` is 1, else 0, the prefill makes first tokens; they wait for the rest of the steps, which
    then count at their bound. The k steps are alike, as in the article: what a few more tokens of context add is far
    below the bound's margin.
    """
    subtract(prefill_upper_s, decoding_s, left_s)
    begun_s = subtract(decoding_upper_s, prefill_s, decoding_upper_s)
    multiply(begun_s, begins, begun_s)
    maximum(left_s, begun_s, out=left_s)
    maximum(left_s, 0.0, out=left_s)
    _largest(decode_upper_s, next_upper_s, host_overhead_s, waited_s, largest_s, left_s)


def turn_gaps(
    decode_upper_s: FloatArray,
    prefill_upper_s: FloatArray,
    next_upper_s: float,
    host_overhead_s: float,
    waited_s: float,
    largest_s: FloatArray,
    left_s: FloatArray,
) -> None:
    """The same for windows whose prefill runs after the steps: all of it is left then."""
    left_s[...] = prefill_upper_s
    _largest(decode_upper_s, next_upper_s, host_overhead_s, waited_s, largest_s, left_s)


def _largest(
    decode_upper_s: FloatArray,
    next_upper_s: float,
    host_overhead_s: float,
    waited_s: float,
    largest_s: FloatArray,
    left_s: FloatArray,
) -> None:
    """Fill ``largest_s``: the gap to the first step or across the window's end, whichever is larger."""
    add(left_s, host_overhead_s + next_upper_s, largest_s)
    maximum(largest_s, decode_upper_s + (host_overhead_s + waited_s), out=largest_s)


def least_steps(
    decode_s: FloatArray,
    prefill_upper_s: FloatArray,
    next_upper_s: float,
    host_overhead_s: float,
    limit_s: float,
    steps: FloatArray,
) -> None:
    """Fill ``steps`` [w] with the smallest k that keeps the gap across a window's end within ``limit_s``; more only
    costs rate."""
    subtract(prefill_upper_s, limit_s - host_overhead_s - next_upper_s, steps)
    divide(steps, decode_s, steps)
    ceil(steps, steps)


def within(tbt_slo_s: float) -> float:
    """The largest gap that keeps τ: τ itself, up to rounding."""
    return tbt_slo_s * (1.0 + 1e-9)
