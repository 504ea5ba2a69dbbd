"""How fast a running server prefills and decodes, measured in a few seconds, and a load that suits that speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bench.client import run_load
from bench.plan import make_plan
from learner.traces import TraceRequest, at_rate, scale_lengths
from sglang_ext.served import LoadResult, quantile

PROBE_PROMPT_TOKENS = 192
PROBE_DECODES = 6
PROBE_OUTPUT_TOKENS = 16
PROBE_TIMEOUT_S = 30.0

# Of the time that the requests would need by the probes' rates. Cut chunks and small batches are less efficient, so the
# server is then busy for most of the time, and bursts go far beyond it.
UTILISATION = 0.5
WANTED_REQUESTS = 72
LEAST_INPUT_TOKENS, LEAST_OUTPUT_TOKENS = 64, 12  # means; rather fewer requests than shorter ones
MIN_DURATION_S = 20.0
LONGEST_GAP = 4.0  # between arrivals, in mean gaps


class ProbeError(RuntimeError):
    """The server did not answer the probes."""


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """``prefill_tokens_per_s`` of one prompt alone; ``decode_step_s`` of :data:`PROBE_DECODES` requests at once."""

    prefill_tokens_per_s: float
    decode_step_s: float

    @property
    def decode_tokens_per_s(self) -> float:
        return PROBE_DECODES / self.decode_step_s

    def request_s(self, input_tokens: float, output_tokens: float) -> float:
        """Machine time of one request, its decode steps shared with others."""
        return input_tokens / self.prefill_tokens_per_s + output_tokens / self.decode_tokens_per_s


@dataclass(frozen=True, slots=True)
class Load:
    """A trace scaled to a machine, and targets that it can keep."""

    trace: list[TraceRequest]
    input_factor: float
    output_factor: float
    duration_s: float
    ttft_slo_s: float
    tbt_slo_s: float


def measure_speed(url: str, vocabulary: int) -> MachineSpeed:
    """Probe an idle server. Raises :class:`ProbeError` if a probe fails."""
    prompt = [TraceRequest(0.0, PROBE_PROMPT_TOKENS, 1)]
    decodes = [TraceRequest(0.0, 8, PROBE_OUTPUT_TOKENS)] * PROBE_DECODES
    results = [
        run_load(url, make_plan(trace, vocabulary, seed=seed), deadline_s=PROBE_TIMEOUT_S)
        for seed, trace in enumerate([prompt, prompt, decodes], start=1_000)
    ]
    for result in results:
        if failed := [request.error for request in result.requests if not request.ok]:
            raise ProbeError(f"a probe request failed: {failed[0]}")
    return _speed(results[1], results[2])  # the first prompt warmed up


def _speed(prefill: LoadResult, decode: LoadResult) -> MachineSpeed:
    ttft_s = prefill.requests[0].ttft_s or PROBE_TIMEOUT_S
    gaps_s = [gap for request in decode.requests for gap in request.gaps_s]
    return MachineSpeed(PROBE_PROMPT_TOKENS / ttft_s, max(quantile(gaps_s, 0.5), 1e-4))


def scale_to_machine(trace: Sequence[TraceRequest], speed: MachineSpeed, duration_s: float) -> Load:
    """The start of ``trace`` at lengths and a rate that keep this machine busy for about ``duration_s``.

    Lengths shrink as far as :data:`WANTED_REQUESTS` requests need, but not below useful means; prompts and answers get
    half of the time each. A machine that is fast enough gets them as they are, and more requests. Arrivals keep their
    bursts, but not the idle time between them (:func:`without_idle_time`).
    """
    busy_s = UTILISATION * duration_s
    first = trace[:WANTED_REQUESTS]
    mean_input = sum(request.input_tokens for request in first) / len(first)
    mean_output = sum(request.output_tokens for request in first) / len(first)
    share_s = max(busy_s / WANTED_REQUESTS, speed.request_s(LEAST_INPUT_TOKENS, LEAST_OUTPUT_TOKENS)) / 2
    input_factor = min(1.0, share_s * speed.prefill_tokens_per_s / mean_input)
    output_factor = min(1.0, share_s * speed.decode_tokens_per_s / mean_output)
    request_s = speed.request_s(mean_input * input_factor, mean_output * output_factor)
    count = min(len(trace), max(2, round(busy_s / request_s)))
    duration_s = min(duration_s, max(MIN_DURATION_S, count * request_s / UTILISATION))
    taken = without_idle_time(scale_lengths(trace[:count], input_factor, output_factor))
    scaled = at_rate(taken, count / duration_s)
    return Load(
        trace=scaled,
        input_factor=input_factor,
        output_factor=output_factor,
        duration_s=duration_s,
        ttft_slo_s=_round_up(max(1.0, 8 * mean_input * input_factor / speed.prefill_tokens_per_s), 0.5),
        tbt_slo_s=_round_up(max(0.02, 2.5 * speed.decode_step_s), 0.01),
    )


def without_idle_time(trace: Sequence[TraceRequest], longest: float = LONGEST_GAP) -> list[TraceRequest]:
    """The trace with every gap between arrivals cut to at most ``longest`` (> 1) mean gaps of the result.

    Production traces of a few minutes may hold bursts of dozens of requests a minute apart; a short replay would
    consist of one burst and silence.
    """
    gaps_s = np.diff([request.arrival_s for request in trace])
    gaps_s = np.minimum(gaps_s, _gap_bound(gaps_s, longest))
    arrivals_s = np.concatenate([[0.0], np.cumsum(gaps_s)])
    return [replace(request, arrival_s=float(at_s)) for request, at_s in zip(trace, arrivals_s, strict=True)]


def _gap_bound(gaps_s: NDArray[np.float64], longest: float) -> float:
    """The bound b with b = ``longest`` · mean(min(gaps, b)), or infinity if no gap is that long.

    With the k largest cut to b, and S the sum of the others: b = longest · (S + k·b) / n.
    """
    ascending = np.sort(gaps_s)
    count = ascending.size
    if count == 0 or ascending[-1] <= longest * ascending.mean():
        return float("inf")
    uncut_s = np.cumsum(ascending)
    for cut in range(1, count):
        bound_s = longest * uncut_s[count - cut - 1] / (count - longest * cut)
        if bound_s >= ascending[count - cut - 1]:
            return float(bound_s)
    return float("inf")


def _round_up(value: float, step: float) -> float:
    return round(-(-value // step) * step, 6)
