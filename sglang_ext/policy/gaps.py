"""The largest time between two tokens that a plan can bring.

Every formula bounds it for the requests that decode while the plan runs, from their last token before it to their
first token after it. Inputs are scalars or arrays that broadcast.
"""

from __future__ import annotations

from numpy import add, maximum, minimum, multiply, subtract

from sglang_ext.policy.types import FloatArray

MORE_STEPS = 2
"""By so many decode steps, and as many as were planned, a window may go on while its prefill does."""

LEAD_S, LEAD = 3e-3, 0.05
PATIENCE = 0.9


def mixed_gap_s(upper_s: float, overhead_s: float, period_s: float) -> float:
    """A mixed batch makes one token per request when it ends: after the wait so far, the host's time, the batch. The
    host may be what takes longest: then the batch counts as the host's ``period_s``."""
    return max(upper_s, period_s) + overhead_s


def window_gaps(
    step_s: FloatArray,
    step_upper_s: FloatArray,
    steps: FloatArray,
    prefill_upper_s: FloatArray,
    most_steps: int,
    waited_s: float,
    next_s: float,
    largest_s: FloatArray,
    left_s: FloatArray,
) -> None:
    """Gaps of windows of k decode steps beside one prefill: fills ``largest_s``, the largest gap between two tokens,
    and ``left_s``, how long a request's last token will have waited when the window ends. Arrays are of any one shape.

    Given are mean and bound of one step, k, and the bound of the prefill; ``waited_s``, how long the decodes will have
    waited before the first step; and ``next_s``, how long after the window a decode step alone, which the next
    iteration can always run, will have ended. While the prefill runs on after the k steps decode goes on beside it, up
    to :func:`reach` steps.

    Three gaps can be the largest: to the first step (the wait so far, t_d); between two steps (t_d, smaller than the
    first); and across the window's end: what is left, and the next step. What is left is the rest of a prefill, at its
    bound, that outlasts all steps, at their mean: quicker decodes wait longer. The first tokens that the prefill makes
    go out so late that their next ones follow within τ (:func:`first_tokens_s`). The steps are alike, as in the
    article: what a few more tokens of context add is far below the bound's margin.
    """
    reach(steps, most_steps, left_s)
    multiply(left_s, step_s, left_s)
    subtract(prefill_upper_s, left_s, left_s)
    maximum(left_s, 0.0, out=left_s)
    _largest(step_upper_s, waited_s, next_s, largest_s, left_s)


def reach(steps: FloatArray, most_steps: int, reached: FloatArray) -> None:
    """Fill ``reached`` with the most steps that a window of k can make: its own, as many spare ones, and MORE_STEPS."""
    multiply(steps, 2.0, reached)
    add(reached, MORE_STEPS, reached)
    minimum(reached, most_steps, out=reached)


def lead_s(step_s: float) -> float:
    """How long before a decode step's end the next is launched while a window's prefill runs.

    Launching takes half a millisecond, the host may be held up, and steps differ by some per cent. Sooner would keep
    the window open by another step when its prefill has ended.
    """
    return LEAD_S + LEAD * step_s


def first_tokens_s(prefill_end_s: float, end_s: float, next_s: float, tbt_slo_s: float) -> float:
    """When the first tokens of a window's prefill go out if no more prefill waits: when they are known, or so much
    later that the second ones, which come ``next_s`` after the window's end at ``end_s``, keep τ with a tenth to spare.

    With more prefill to come it is the window's end: who has been waiting for a second token leaves the next iteration
    less time.
    """
    return max(prefill_end_s, min(end_s, end_s + next_s - PATIENCE * tbt_slo_s))


def turn_gaps(
    decode_upper_s: FloatArray,
    prefill_upper_s: FloatArray,
    waited_s: float,
    next_s: float,
    largest_s: FloatArray,
    left_s: FloatArray,
) -> None:
    """The same for windows whose prefill runs after the steps: all of it is left then."""
    left_s[...] = prefill_upper_s
    _largest(decode_upper_s, waited_s, next_s, largest_s, left_s)


def violations(
    decode_upper_s: FloatArray,
    waited_s: float,
    next_s: float,
    tbt_slo_s: float,
    left_s: FloatArray,
    largest_s: FloatArray,
    violation_s: FloatArray,
) -> None:
    """Fill ``violation_s``: of windows, the largest gap, and what the other of the two (to the first step, across the
    end) exceeds τ by. One late token is better than two, the second as late as the first.
    """
    minimum(decode_upper_s + waited_s, left_s + next_s, out=violation_s)
    subtract(violation_s, tbt_slo_s, violation_s)
    maximum(violation_s, 0.0, out=violation_s)
    add(violation_s, largest_s, violation_s)


def _largest(
    decode_upper_s: FloatArray,
    waited_s: float,
    next_s: float,
    largest_s: FloatArray,
    left_s: FloatArray,
) -> None:
    """Fill ``largest_s``: the gap to the first step or across the window's end, whichever is larger."""
    add(left_s, next_s, largest_s)
    maximum(largest_s, decode_upper_s + waited_s, out=largest_s)


def within(tbt_slo_s: float) -> float:
    """The largest gap that keeps τ: τ itself, up to rounding."""
    return tbt_slo_s * (1.0 + 1e-9)
