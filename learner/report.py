"""The accuracy report of a replay: for people as HTML and as a terminal table, for programs as JSON."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from learner.hindsight import Hindsight
from learner.page import Cell, Section, Table, Text, render_html
from learner.plots import error_distribution, error_over_time, gap_distribution, predicted_against_measured
from learner.records import Header
from learner.replay import PREDICTORS, Group, ReplayReport, Steps

SCHEMA = 1

_COLUMNS = ("", "MAPE %", "P50 %", "P90 %", "P99 %", "max %", "bias %", "under %", "in bound %")


def provenance(header: Header) -> Table:
    """Where the numbers come from: model, device, precision, SLOs, versions."""
    model, device = header.model, header.device
    created = datetime.fromtimestamp(header.created_unix_s, UTC)
    rows: list[tuple[str, Cell]] = [
        ("recorded", created.strftime("%Y-%m-%d %H:%M:%S UTC")),
        (
            "model",
            f"{model.name} ({model.layers} layers, hidden {model.hidden}, {model.heads}/{model.kv_heads} heads of "
            f"{model.head_dim}, vocabulary {model.vocabulary})",
        ),
        ("device", f"{device.name}, {device.tpcs} TPC{'s' if device.tpcs > 1 else ''}"),
        ("whole device", f"{device.flops[-1][1] / 1e12:.4g} TFLOP/s, {device.bandwidth[-1][1] / 1e9:.4g} GB/s"),
        ("weights, KV", f"{header.dtype}, {header.kv_dtype}"),
        ("parallelism", f"TP {header.tp}, XP {header.xp}"),
        ("mode", header.mode),
        ("SLO", f"TBT {1e3 * header.tbt_slo_s:g} ms, TTFT {1e3 * header.ttft_slo_s:g} ms"),
    ]
    rows += [(f"device: {name}", text) for name, text in sorted(device.provenance.items())]
    rows += [(f"version: {name}", text) for name, text in sorted(header.versions.items())]
    return Table(("", "value"), rows)


def accuracy_table(group: Group, caption: str = "") -> Table:
    """One row per predictor."""
    rows: list[tuple[Cell, ...]] = []
    for who in PREDICTORS:
        one = group.by_predictor[who]
        rows.append(
            (
                who,
                one.mape_pct,
                one.p50_ape_pct,
                one.p90_ape_pct,
                one.p99_ape_pct,
                one.max_ape_pct,
                one.bias_pct,
                100.0 * one.under_estimate_share,
                None if one.coverage is None else 100.0 * one.coverage,
            )
        )
    return Table(_COLUMNS, rows, caption)


def comparison_table(groups: list[Group], first: str) -> Table:
    """One row per group: steps, the MAPE of every predictor, and how far the learner's bound holds."""
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        learner = group.by_predictor["learner"]
        rows.append(
            (
                group.name,
                group.steps,
                *(group.by_predictor[who].mape_pct for who in PREDICTORS),
                learner.p99_ape_pct,
                100.0 * learner.under_estimate_share,
                None if learner.coverage is None else 100.0 * learner.coverage,
            )
        )
    columns = (first, "steps", *(f"{who} %" for who in PREDICTORS), "P99 %", "under %", "in bound %")
    return Table(columns, rows, "MAPE by predictor; the learner's P99, under-estimates and steps within its bound")


def gap_figures(gaps_s: npt.ArrayLike) -> dict[str, float]:
    """Gaps between tokens under the names that SGLang's and vLLM's benchmarks give them, in ms."""
    gaps_ms = 1e3 * np.asarray(gaps_s, dtype=np.float64)
    if not gaps_ms.size:
        return {}
    p50, p90, p99 = np.percentile(gaps_ms, (50.0, 90.0, 99.0))
    return {
        "mean_itl_ms": float(gaps_ms.mean()),
        "median_itl_ms": float(p50),
        "p90_itl_ms": float(p90),
        "p99_itl_ms": float(p99),
        "max_itl_ms": float(gaps_ms.max()),
    }


def gap_section(gaps_s: Mapping[str, npt.ArrayLike], tbt_slo_s: float | None = None) -> Section | None:
    """Distribution and table of gaps between tokens, by name, in seconds; None if there are no gaps at all."""
    known = {name: gaps for name, gaps in gaps_s.items() if np.size(gaps)}
    if not known:
        return None
    columns = ("", "gaps", "mean ms", "P50 ms", "P90 ms", "P99 ms", "max ms")
    rows: list[tuple[Cell, ...]] = [
        (name, int(np.size(gaps)), *gap_figures(gaps).values()) for name, gaps in known.items()
    ]
    return Section("Time between tokens", [gap_distribution(known, tbt_slo_s), Table(columns, rows)])


def replay_sections(
    report: ReplayReport, steps: Steps, gaps_s: Mapping[str, npt.ArrayLike] | None = None
) -> list[Section]:
    """The sections of a replay's report, to be rendered alone or as part of a longer page.

    ``gaps_s`` adds the distribution of gaps between tokens, by name, in seconds.
    """
    learnt = steps.time_s[steps.version > 0]
    sections = [
        Section("Accuracy", _accuracy_blocks(report)),
        Section(
            "Over time",
            [
                error_over_time(report.windows, float(learnt[0]) if learnt.size else None),
                comparison_table([report.first_half, report.second_half], "half"),
            ],
        ),
        Section("Predicted and measured", [predicted_against_measured(steps), error_distribution(steps)]),
        Section(
            "By phase and mode",
            [comparison_table(report.phases, "phase"), comparison_table(report.modes, "mode")],
        ),
    ]
    if report.hindsight is not None:
        sections.append(Section("Decisions in hindsight", [Text(_HINDSIGHT), hindsight_table(report.hindsight)]))
    gaps = gap_section(gaps_s or {}, report.header.tbt_slo_s)
    if gaps is not None:
        sections.append(gaps)
    sections.append(Section("Provenance", [provenance(report.header)]))
    return sections


def replay_html(
    report: ReplayReport, steps: Steps, record: str, gaps_s: Mapping[str, npt.ArrayLike] | None = None
) -> str:
    """The whole page."""
    header = report.header
    subtitle = (
        f"{header.model.name} on {header.device.name}: {report.judged_steps:,} steps of {report.iterations:,} "
        f"iterations in {report.duration_s:,.0f} s, from {os.path.basename(record)}."
    )
    return render_html("Latency prediction accuracy", replay_sections(report, steps, gaps_s), subtitle)


def replay_json(report: ReplayReport, record: str, gaps_s: Mapping[str, npt.ArrayLike] | None = None) -> dict[str, Any]:
    """The report as plain values. Errors are in percent, shares from 0 to 1, times in the unit of their name."""
    figures: dict[str, Any] = {"schema": SCHEMA, "record": record, **msgspec.to_builtins(report)}
    if gaps_s:
        figures["gaps"] = {name: gap_figures(gaps) for name, gaps in gaps_s.items()}
    return figures


def write_json(path: str | os.PathLike[str], figures: Mapping[str, Any]) -> None:
    """Write indented JSON. Raises OSError."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")


def replay_text(report: ReplayReport) -> str:
    """The report for a terminal."""
    header = report.header
    lines = [
        f"{header.model.name} on {header.device.name}, {header.dtype}, TP {header.tp}, XP {header.xp}",
        _counted(report),
        "",
        accuracy_table(report.total).to_text(),
        "",
        comparison_table(
            [report.first_half, report.second_half, *report.phases, *_named("mode ", report.modes)], "part"
        ).to_text(),
    ]
    if report.hindsight is not None:
        lines += ["", hindsight_table(report.hindsight).to_text()]
    return "\n".join(lines)


_HINDSIGHT = (
    "What a better prediction would have decided. “outrun”: the plan took so long that another feasible one should "
    "have served more; “broken”: it exceeded the TBT target, which another one should have kept; “withheld”: a faster "
    "plan was refused by its bound, while its mean keeps the target. Other plans were not run: their own predictions "
    "speak for them."
)


def hindsight_table(found: Hindsight) -> Table:
    """Decisions that a better prediction would have changed, and what they cost."""

    def cost(tokens: float) -> str:
        return f"{100.0 * tokens / max(found.tokens, 1.0):.2f} % of tokens"

    rows: list[tuple[Cell, ...]] = [
        ("outrun", found.outrun, 100.0 * found.outrun / found.decisions, cost(found.outrun_tokens)),
        ("broken", found.broken, 100.0 * found.broken / found.decisions, f"{found.broken_ms:.2f} ms beyond the target"),
        ("withheld", found.withheld, 100.0 * found.withheld / found.decisions, cost(found.withheld_tokens)),
    ]
    caption = f"Of {found.decisions:,} decisions among two plans and more"
    return Table(("", "decisions", "%", "cost"), rows, caption)


def _named(prefix: str, groups: list[Group]) -> list[Group]:
    return [dataclasses.replace(group, name=prefix + group.name) for group in groups]


def _accuracy_blocks(report: ReplayReport) -> list[Text | Table]:
    blocks: list[Text | Table] = [
        Text(
            "Each step is predicted before it is learnt from. “learner” is a fresh one that sees the record in order; "
            "“roofline” is the formula alone; “persistence” repeats what the most similar earlier batch took; “live” "
            "is what the server predicted at the time. Errors are absolute percentage errors of the step time; bias is "
            "signed, positive when predictions are too long; “under” is the share of steps that took longer than "
            "predicted, “in bound” the share that took no longer than the upper bound."
        ),
        Text(_counted(report)),
        accuracy_table(report.total, "All steps"),
        accuracy_table(report.second_half, "Second half of the steps"),
    ]
    if report.live_learnt is not None:
        blocks.append(accuracy_table(report.live_learnt, "Steps that the server predicted with a learnt snapshot"))
    return blocks


def _counted(report: ReplayReport) -> str:
    left_out = report.unusable_steps + report.unjudged_steps
    live = f"live predictions up to version {report.last_live_version}"
    return (
        f"{report.judged_steps:,} steps of {report.iterations:,} iterations judged, {left_out:,} left out "
        f"({report.unjudged_steps:,} without a neighbour yet, {report.unusable_steps:,} with impossible timings); "
        f"{report.refits:,} refits; {live}"
    )
