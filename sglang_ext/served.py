"""What a load run measured: one value object per request, and their summary in the field's terms."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request as its client saw it. Times are seconds after the start of the run.

    ``event_s`` and ``event_tokens`` hold, per event that carried tokens, when it was read and how many tokens had come
    by then. ``error`` says why the request counts as failed; None: it got every token it asked for.
    """

    index: int
    scheduled_s: float
    sent_s: float
    end_s: float
    input_tokens: int
    requested_tokens: int
    event_s: list[float]
    event_tokens: list[int]
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def output_tokens(self) -> int:
        return self.event_tokens[-1] if self.event_tokens else 0

    @property
    def lateness_s(self) -> float:
        """By how much the client itself missed the planned time."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        return self.event_s[0] - self.sent_s if self.event_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Raw gaps between token events: nothing is averaged, and a burst does not shorten them."""
        return [later - earlier for earlier, later in itertools.pairwise(self.event_s)]

    @property
    def burst_events(self) -> int:
        """Events that carried more than one token."""
        return sum(now - then > 1 for then, now in itertools.pairwise([0, *self.event_tokens]))

    @property
    def tpot_s(self) -> float | None:
        """(E2E − TTFT) / (n − 1)."""
        if self.output_tokens < 2:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.output_tokens - 1)

    def meets(self, ttft_slo_s: float, tbt_slo_s: float) -> bool:
        """Strict: complete, first token in time, and 99 % of the request's own gaps within the TBT target."""
        if not self.ok or self.ttft_s is None or self.ttft_s > ttft_slo_s:
            return False
        gaps = self.gaps_s
        return sum(gap <= tbt_slo_s for gap in gaps) >= 0.99 * len(gaps)

    def meets_deadlines(self, ttft_slo_s: float, tbt_slo_s: float) -> bool:
        """Lenient, as in ConfluxServe's goodput: token i no later than sent + TTFT target + i · TBT target."""
        if not self.ok or not self.event_s:
            return False
        allowance_s = self.sent_s + ttft_slo_s
        before = [0, *self.event_tokens[:-1]]
        return all(at_s <= allowance_s + then * tbt_slo_s for at_s, then in zip(self.event_s, before, strict=True))


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers; field names as in the field's tools (``itl`` = TBT, the raw gaps). Rates are per second.

    Latencies cover every request that got tokens; attainment and goodput count failed requests as missed.
    """

    completed: int
    failed: int
    duration_s: float
    request_throughput: float
    output_throughput: float
    total_input_tokens: int
    total_output_tokens: int
    mean_ttft_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    max_ttft_ms: float
    mean_itl_ms: float
    p50_itl_ms: float
    p95_itl_ms: float
    p99_itl_ms: float
    max_itl_ms: float
    mean_tpot_ms: float
    ttft_slo_ms: float
    tbt_slo_ms: float
    ttft_attainment: float
    gap_attainment: float
    slo_attainment: float
    deadline_attainment: float
    request_goodput: float
    burst_events: int
    max_lateness_ms: float
    max_client_lag_ms: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All requests of a run. ``max_client_lag_s``: the longest that the client's own event loop was held up;
    ``start_s``: when it began, on :func:`time.perf_counter`'s clock."""

    requests: list[RequestResult]
    duration_s: float
    max_client_lag_s: float = 0.0
    start_s: float = 0.0

    def summary(self, ttft_slo_s: float, tbt_slo_s: float) -> Summary:
        """Attainment is ``meets`` (strict) and ``meets_deadlines`` (lenient); a quantity without data is NaN."""
        done = [request for request in self.requests if request.ok]
        ttft_s = [request.ttft_s for request in self.requests if request.ttft_s is not None]
        gaps_s = [gap for request in self.requests for gap in request.gaps_s]
        good = sum(request.meets(ttft_slo_s, tbt_slo_s) for request in self.requests)
        lenient = sum(request.meets_deadlines(ttft_slo_s, tbt_slo_s) for request in self.requests)
        count = len(self.requests)
        seconds = max(self.duration_s, 1e-9)
        tokens = sum(request.output_tokens for request in self.requests)
        return Summary(
            completed=len(done),
            failed=count - len(done),
            duration_s=self.duration_s,
            request_throughput=len(done) / seconds,
            output_throughput=tokens / seconds,
            total_input_tokens=sum(request.input_tokens for request in self.requests),
            total_output_tokens=tokens,
            mean_ttft_ms=1e3 * _mean(ttft_s),
            median_ttft_ms=1e3 * quantile(ttft_s, 0.5),
            p99_ttft_ms=1e3 * quantile(ttft_s, 0.99),
            max_ttft_ms=1e3 * quantile(ttft_s, 1.0),
            mean_itl_ms=1e3 * _mean(gaps_s),
            p50_itl_ms=1e3 * quantile(gaps_s, 0.5),
            p95_itl_ms=1e3 * quantile(gaps_s, 0.95),
            p99_itl_ms=1e3 * quantile(gaps_s, 0.99),
            max_itl_ms=1e3 * quantile(gaps_s, 1.0),
            mean_tpot_ms=1e3 * _mean([request.tpot_s for request in self.requests if request.tpot_s is not None]),
            ttft_slo_ms=1e3 * ttft_slo_s,
            tbt_slo_ms=1e3 * tbt_slo_s,
            ttft_attainment=sum(value <= ttft_slo_s for value in ttft_s) / count if count else float("nan"),
            gap_attainment=_mean([gap <= tbt_slo_s for gap in gaps_s]),
            slo_attainment=good / count if count else float("nan"),
            deadline_attainment=lenient / count if count else float("nan"),
            request_goodput=good / seconds,
            burst_events=sum(request.burst_events for request in self.requests),
            max_lateness_ms=1e3 * max((request.lateness_s for request in self.requests), default=0.0),
            max_client_lag_ms=1e3 * self.max_client_lag_s,
        )

    def write_json(self, path: Path, summary: Summary, **context: Any) -> None:
        """One JSON object: the summary's fields, ``context``, and every request with its raw event times."""
        requests = [asdict(request) for request in self.requests]
        path.write_text(json.dumps(finite({**asdict(summary), **context, "requests": requests})) + "\n")


def quantile(values: Sequence[float], q: float) -> float:
    """Linear-interpolated quantile; NaN if there are no values."""
    return float(np.quantile(values, q)) if values else float("nan")


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def finite(value: Any) -> Any:
    """NaN has no JSON form: it becomes null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
