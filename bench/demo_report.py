"""What the demo found: tables for the terminal and one HTML page."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine_speed import PROBE_DECODES, Load, MachineSpeed
from learner.page import Section, Table, Text, write_html
from learner.plots import gap_distribution
from learner.record_file import RecordReader
from learner.records import Header, Iteration
from learner.replay import ReplayError, ReplayReport, Steps, replay
from learner.report import replay_json, replay_sections, write_json
from sglang_ext.served import LoadResult, Summary

GIVEN_UP = "given up at the deadline"
SHOWN_PREDICTORS = ("roofline", "persistence", "learner")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The load as its client saw it, the record as the server wrote it, and the record through a fresh learner.

    ``accuracy`` is None if the record is too short to be judged; ``live`` is the server's own state at the end.
    """

    result: LoadResult
    summary: Summary
    load: Load
    speed: MachineSpeed
    record: Path
    header: Header
    decisions: dict[tuple[str, str], int]
    versions: list[int]
    live: dict[str, Any]
    accuracy: tuple[ReplayReport, Steps] | None

    @classmethod
    def of(cls, result: LoadResult, load: Load, speed: MachineSpeed, record: Path, live: dict[str, Any]) -> Outcome:
        header, iterations = read_record(record)
        return cls(
            result=result,
            summary=result.summary(load.ttft_slo_s, load.tbt_slo_s),
            load=load,
            speed=speed,
            record=record,
            header=header,
            decisions=dict(Counter((iteration.mode, iteration.reason) for iteration in iterations).most_common()),
            versions=sorted({iteration.model_version for iteration in iterations}),
            live=live,
            accuracy=_replayed(header, iterations),
        )

    @property
    def failures(self) -> list[str]:
        """Errors of failed requests, those left out that merely ran past the end."""
        return [request.error for request in self.result.requests if request.error and request.error != GIVEN_UP]

    @property
    def unfinished(self) -> int:
        return sum(request.error == GIVEN_UP for request in self.result.requests)

    @property
    def iterations(self) -> int:
        return sum(self.decisions.values())


def read_record(path: Path) -> tuple[Header, list[Iteration]]:
    with RecordReader(path) as reader:
        return reader.header, list(reader)


def _replayed(header: Header, iterations: list[Iteration]) -> tuple[ReplayReport, Steps] | None:
    from tqdm import tqdm

    hidden = not sys.stdout.isatty()
    with tqdm(
        total=len(iterations), desc="  replaying", unit="it", file=sys.stdout, leave=False, disable=hidden
    ) as bar:
        try:
            return replay(header, iterations, progress=bar.update)
        except ReplayError:
            return None


def latency_table(outcome: Outcome) -> Table:
    summary = outcome.summary
    return Table(
        ("", "P50", "P99", "max", "target", "within"),
        [
            (
                "TTFT, ms",
                summary.median_ttft_ms,
                summary.p99_ttft_ms,
                summary.max_ttft_ms,
                summary.ttft_slo_ms,
                _percent(summary.ttft_attainment),
            ),
            (
                "TBT, ms (every gap)",
                summary.p50_itl_ms,
                summary.p99_itl_ms,
                summary.max_itl_ms,
                summary.tbt_slo_ms,
                _percent(summary.gap_attainment),
            ),
        ],
    )


def service_table(outcome: Outcome) -> Table:
    summary = outcome.summary
    return Table(
        ("", "value"),
        [
            ("requests completed", f"{summary.completed} of {len(outcome.result.requests)}"),
            ("unfinished at the end", outcome.unfinished),
            ("failed", len(outcome.failures)),
            ("SLO attainment: TTFT and 99 % of own gaps", _percent(summary.slo_attainment)),
            ("SLO attainment: every token by its deadline", _percent(summary.deadline_attainment)),
            ("requests/s", summary.request_throughput),
            ("of them within their targets", summary.request_goodput),
            ("output tokens/s", summary.output_throughput),
            ("events with more than one token", summary.burst_events),
            ("client: worst lateness, ms", summary.max_lateness_ms),
            ("client: worst event-loop lag, ms", summary.max_client_lag_ms),
        ],
    )


def decision_table(outcome: Outcome) -> Table:
    total = max(outcome.iterations, 1)
    rows = [(mode, reason, count, _percent(count / total)) for (mode, reason), count in outcome.decisions.items()]
    return Table(("mode", "reason", "iterations", "share"), rows)


def error_table(outcome: Outcome) -> Table:
    """Mean absolute percentage error of a step's predicted time, by predictor and half of the run."""
    if outcome.accuracy is None:
        return Table(("MAPE, %", "first half", "second half"), [])
    report, _ = outcome.accuracy
    rows = [
        (
            who,
            report.first_half.by_predictor[who].mape_pct,
            report.second_half.by_predictor[who].mape_pct,
            report.second_half.by_predictor[who].p99_ape_pct,
        )
        for who in SHOWN_PREDICTORS
    ]
    return Table(("prediction error: MAPE, %", "first half", "second half", "P99, second half"), rows)


def versions_line(outcome: Outcome) -> str:
    learnt = [version for version in outcome.versions if version]
    if not learnt:
        return "no decision was made with a learnt snapshot"
    return f"decisions used {len(learnt)} learnt snapshots (versions {learnt[0]} to {learnt[-1]})"


def print_outcome(outcome: Outcome) -> None:
    for table in (latency_table(outcome), service_table(outcome), decision_table(outcome), error_table(outcome)):
        print()
        print("\n".join("  " + line for line in table.to_text().splitlines()))
    print(f"\n  {outcome.iterations:,} iterations recorded; {versions_line(outcome)}")


def write_report(outcome: Outcome, folder: Path) -> Path:
    """Write ``report.html``, ``load.json`` and ``accuracy.json`` into ``folder``; return the page."""
    outcome.result.write_json(
        folder / "load.json",
        outcome.summary,
        input_factor=outcome.load.input_factor,
        output_factor=outcome.load.output_factor,
        load_duration_s=outcome.load.duration_s,
        machine=dataclasses.asdict(outcome.speed),
        live=outcome.live,
    )
    gaps_s = [gap for request in outcome.result.requests for gap in request.gaps_s]
    sections = [
        Section("Targets", [latency_table(outcome), service_table(outcome)]),
        Section("Decisions", [Text(versions_line(outcome).capitalize() + "."), decision_table(outcome)]),
    ]
    if gaps_s:
        picture = gap_distribution({"all requests": gaps_s}, outcome.load.tbt_slo_s)
        sections.insert(1, Section("Gaps between tokens, as clients saw them", [picture]))
    if outcome.accuracy is not None:
        report, steps = outcome.accuracy
        write_json(folder / "accuracy.json", replay_json(report, str(outcome.record)))
        sections.append(Section("Prediction error", [error_table(outcome)]))
        sections += replay_sections(report, steps)
    page = folder / "report.html"
    model, device = outcome.header.model.name, outcome.header.device.name
    load = outcome.load
    speed = outcome.speed
    subtitle = (
        f"{model} on {device}. {len(load.trace)} requests of a production trace in {load.duration_s:.0f} s, prompts × "
        f"{load.input_factor:.3g}, answers × {load.output_factor:.3g}, idle time between bursts cut; this machine "
        f"prefills {speed.prefill_tokens_per_s:,.0f} tokens/s and decodes {PROBE_DECODES} requests in "
        f"{1e3 * speed.decode_step_s:.0f} ms a step."
    )
    write_html(page, "conflux demo", sections, subtitle)
    return page


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
