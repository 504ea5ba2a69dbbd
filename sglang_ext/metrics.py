"""Prometheus metrics beside SGLang's, served on its ``/metrics``."""

from __future__ import annotations

from collections.abc import Collection

from learner.snapshot import GROUP_NAMES
from sglang_ext.slo import Attainment

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_RATIOS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_DECISION_SECONDS = (0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.002, 0.005, 0.01)


class Metrics:
    """Made in the scheduler process, after SGLang has pointed prometheus_client at its directory."""

    def __init__(self, model_name: str) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        labels = {"model_name": model_name}
        names = list(labels)

        def counter(name: str, text: str, *extra: str) -> Counter:
            return Counter(f"conflux:{name}", text, [*names, *extra])

        def gauge(name: str, text: str, *extra: str) -> Gauge:
            return Gauge(f"conflux:{name}", text, [*names, *extra], multiprocess_mode="mostrecent")

        self._labels = labels
        self._decisions = counter("decisions_total", "Iterations by executed mode and reason.", "mode", "reason")
        self._fallbacks = counter("fallbacks_total", "Iterations that could not run as decided, by reason.", "reason")
        self._forward = Histogram(
            "conflux:forward_seconds", "Measured time of a forward.", [*names, "phase"], buckets=_SECONDS
        )
        self._predicted = Histogram(
            "conflux:predicted_forward_seconds", "Predicted time of a forward.", [*names, "phase"], buckets=_SECONDS
        )
        self._error = Histogram(
            "conflux:prediction_error_ratio",
            "Absolute error of a forward's predicted time over its measured time.",
            [*names, "phase"],
            buckets=_RATIOS,
        )
        self._decision = Histogram(
            "conflux:decision_seconds", "Host time of a decision.", names, buckets=_DECISION_SECONDS
        )
        self._ttft = counter("ttft_slo_requests_total", "First tokens by whether they met their target.", "met")
        self._tbt = counter("tbt_slo_tokens_total", "Gaps between tokens by whether they met their target.", "met")
        self._version = gauge("learner_version", "Version of the learnt model in use (0: the roofline alone).")
        self._age = gauge("learner_age_seconds", "Time since the learner was last heard of.")
        self._restarts = counter("learner_restarts_total", "Times that another learner process answered.")
        self._dropped = counter("learner_records_dropped_total", "Timing records that the learner had no room for.")
        self._rejected = counter("learner_snapshots_rejected_total", "Snapshots that did not pass their checks.")
        self._drift = gauge("learner_drift", "1 while a group's predictions are further off than usual.", "group")
        self._sm_control = gauge("sm_control", "1 for the way of SM control that was chosen at the start.", "kind")
        self._counted: dict[tuple[str, str], int] = {}

    def decided(self, mode: str, reason: str) -> None:
        self._decisions.labels(**self._labels, mode=mode, reason=reason).inc()

    def fell_back(self, reason: str) -> None:
        self._fallbacks.labels(**self._labels, reason=reason).inc()

    def sm_control(self, kind: str, fell_back: bool) -> None:
        self._sm_control.labels(**self._labels, kind=kind).set(1)
        if fell_back:
            self.fell_back("sm_control")

    def deciding_took(self, seconds: float) -> None:
        self._decision.labels(**self._labels).observe(seconds)

    def forward(self, phase: str, predicted_s: float, measured_s: float) -> None:
        self._forward.labels(**self._labels, phase=phase).observe(measured_s)
        self._predicted.labels(**self._labels, phase=phase).observe(predicted_s)
        self._error.labels(**self._labels, phase=phase).observe(abs(predicted_s - measured_s) / measured_s)

    def attained(self, attainment: Attainment) -> None:
        for met, ttft, tbt in (
            ("true", attainment.ttft_met, attainment.tbt_met),
            ("false", attainment.ttft_missed, attainment.tbt_missed),
        ):
            self._up_to(self._ttft, "ttft", ttft, met=met)
            self._up_to(self._tbt, "tbt", tbt, met=met)

    def learner(
        self, *, version: int, age_s: float, restarts: int, dropped: int, rejected: int, drifting: Collection[str]
    ) -> None:
        self._version.labels(**self._labels).set(version)
        self._age.labels(**self._labels).set(age_s)
        self._up_to(self._restarts, "restarts", restarts)
        self._up_to(self._dropped, "dropped", dropped)
        self._up_to(self._rejected, "rejected", rejected)
        for group in GROUP_NAMES:
            self._drift.labels(**self._labels, group=group).set(group in drifting)

    def _up_to(self, counter, name: str, total: int, **extra: str) -> None:
        """Raise a counter to ``total``, which is counted elsewhere."""
        key = (name, extra.get("met", ""))
        child = counter.labels(**self._labels, **extra)
        child.inc(max(total - self._counted.get(key, 0), 0))
        self._counted[key] = total
