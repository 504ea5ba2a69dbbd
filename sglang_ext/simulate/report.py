"""What simulated systems brought, as text, JSON and a page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from learner.page import Cell, Figure, Section, Table, Text, render_html
from learner.plots import SERIES, gap_distribution, new_plot
from sglang_ext.served import LoadResult, Summary, finite

SCHEMA = 1
_SHOWN = (
    ("requests/s", "request_throughput"),
    ("goodput/s", "request_goodput"),
    ("SLO met", "slo_attainment"),
    ("deadlines met", "deadline_attainment"),
    ("mean TTFT ms", "mean_ttft_ms"),
    ("P99 TTFT ms", "p99_ttft_ms"),
    ("mean TBT ms", "mean_itl_ms"),
    ("P99 TBT ms", "p99_itl_ms"),
    ("max TBT ms", "max_itl_ms"),
    ("mean TPOT ms", "mean_tpot_ms"),
)
_MEANING = (
    "Goodput counts requests that meet the TTFT target and have 99 % of their own gaps within the TBT target; "
    "deadlines are ConfluxServe's: token i no later than arrival + TTFT target + i · TBT target."
)


class Simulated(NamedTuple):
    """One system's run. ``shares``: (begin, length, decode's share of the TPCs) of iterations with both phases."""

    result: LoadResult
    summary: Summary
    shares: list[tuple[float, float, float]]


def table(runs: Mapping[str, Simulated]) -> Table:
    """A row for each system."""
    rows: list[list[Cell]] = [
        [name, *(getattr(run.summary, field) for _, field in _SHOWN)] for name, run in runs.items()
    ]
    return Table(("system", *(title for title, _ in _SHOWN)), rows)


def text(runs: Mapping[str, Simulated], about: Mapping[str, str]) -> str:
    """For a terminal."""
    lines = [f"{what}: {value}" for what, value in about.items()]
    return "\n".join([*lines, "", table(runs).to_text(), "", _MEANING])


def figures(runs: Mapping[str, Simulated], about: Mapping[str, str]) -> dict[str, Any]:
    """For JSON: each system's summary under the names of the field's tools; null for what has no data."""
    systems = {name: dataclasses.asdict(run.summary) for name, run in runs.items()}
    return {"schema": SCHEMA, "simulated": True, "about": dict(about), "systems": finite(systems)}


def page(runs: Mapping[str, Simulated], about: Mapping[str, str], tbt_slo_s: float, ttft_slo_s: float) -> str:
    """One HTML page that needs nothing else."""
    gaps_s = {
        name: np.concatenate([np.empty(0), *(np.diff(request.event_s) for request in run.result.requests)])
        for name, run in runs.items()
    }
    known = {name: gaps for name, gaps in gaps_s.items() if gaps.size}
    between = [gap_distribution(known, tbt_slo_s)] if known else [Text("No request made two tokens.")]
    sections = [
        Section("Systems", [table(runs), Text(_MEANING)]),
        Section("Time to first token", [_ttfts(runs, ttft_slo_s)]),
        Section("Time between tokens", between),
        Section("Who had the SMs", [_shares(runs)]),
        Section("About", [Table(("what", "value"), [(what, value) for what, value in about.items()])]),
    ]
    return render_html("A trace on simulated time", sections, "Predicted, not measured: a latency model is the device.")


def _ttfts(runs: Mapping[str, Simulated], ttft_slo_s: float) -> Figure:
    plot, (axis,) = new_plot()
    for (name, run), colour in zip(runs.items(), _colours(len(runs)), strict=True):
        ttft_s = np.sort([request.ttft_s for request in run.result.requests if request.ttft_s is not None])
        axis.plot(ttft_s, np.arange(1, ttft_s.size + 1) / max(ttft_s.size, 1), color=colour, label=name)
    axis.axvline(ttft_slo_s, color="#1d2330", linestyle=":", label="target")
    axis.set(xscale="log", xlabel="TTFT, s", ylabel="share of requests", ylim=(0.0, 1.0))
    axis.legend(frameon=False, fontsize=8)
    return Figure.from_plot("Distribution of the time to first token", plot)


def _shares(runs: Mapping[str, Simulated]) -> Figure:
    """Decode's share of the TPCs while both phases ran, averaged over a hundredth of the time each."""
    plot, (axis,) = new_plot()
    for (name, run), colour in zip(runs.items(), _colours(len(runs)), strict=True):
        if not run.shares:
            continue
        begin, length, share = np.array(run.shares).T
        edges = np.linspace(0.0, max(run.result.duration_s, 1e-9), 101)
        weight = np.histogram(begin, edges, weights=length)[0]
        total = np.histogram(begin, edges, weights=length * share)[0]
        mean = np.divide(total, weight, out=np.full(100, math.nan), where=weight > 0.0)
        axis.plot(0.5 * (edges[1:] + edges[:-1]), mean, color=colour, label=name, linewidth=1.2)
    axis.set(xlabel="s", ylabel="decode's share of the TPCs beside prefill", ylim=(-0.02, 1.05))
    if axis.lines:
        axis.legend(frameon=False, fontsize=8)
    caption = "1: both in one batch. 0: prefill alone while requests waited for their next token."
    return Figure.from_plot("Share of the SMs over time", plot, caption)


def _colours(count: int) -> list[str]:
    return [SERIES[at % len(SERIES)] for at in range(count)]
