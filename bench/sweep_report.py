"""Tables and plots of sweeps (``python -m bench.sweep_report SWEEP.json … --out FOLDER``).

For each trace: rate against p99 TBT, p99 TTFT and attainment for every system, and each system's goodput, the highest
rate at which at least 95 % of the requests meet their targets: ``strict`` (TTFT, and 99 % of a request's own gaps) and
``deadlines`` (as ConfluxServe counts them: token i by TTFT target + i · TBT target). Between two rates attainment is
interpolated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ENOUGH = 0.95
KINDS = ("strict", "deadlines")
PLOTTED = (("p99_itl_ms", "p99 TBT, ms"), ("p99_ttft_ms", "p99 TTFT, ms"))

Points = list[dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+", help="what bench.sweep wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for sweep.md and the plots")
    given = parser.parse_args()
    points = [point for path in given.sweeps for point in json.loads(path.read_text())["points"]]
    if not points:
        print("error: these sweeps hold no points", file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    parts = []
    for model, trace in sorted({(point["model"], point["trace"]) for point in points}):
        own = [point for point in points if (point["model"], point["trace"]) == (model, trace)]
        picture = given.out / f"{model}-{trace}.svg".lower()
        draw(own, picture)
        parts.append(f"## {model}, {trace}\n\n{goodput_table(own)}\n\n![]({picture.name})\n\n{rate_table(own)}\n")
    (given.out / "sweep.md").write_text("\n".join(parts))
    print(given.out / "sweep.md")
    return 0


def goodput(points: Iterable[dict[str, Any]], kind: str, target: str) -> tuple[float, str]:
    """The highest rate at which attainment of ``target`` (ms, as text) is enough, and what is to be said of it.

    ``=``: attainment is enough at one rate and not at the next; ``≥``: at all rates; ``<``: at none, the number is the
    lowest rate. Where attainment rises again at a higher rate that does not count.
    """
    known = sorted((point["rate"], point[kind][target]) for point in points if target in point[kind])
    if not known:
        return math.nan, "="
    if known[0][1] < ENOUGH:
        return known[0][0], "<"
    for (rate, attained), (next_rate, next_attained) in itertools.pairwise(known):
        if next_attained < ENOUGH:
            return rate + (next_rate - rate) * (attained - ENOUGH) / (attained - next_attained), "="
    return known[-1][0], "≥"


def goodput_table(points: Points) -> str:
    """Requests per second, by system and target. A conflux system counts by the runs that were given the target."""
    targets = sorted({target for point in points for target in point["strict"]}, key=float)
    head = ["goodput, requests/s", *(f"{kind}, {target} ms" for target in targets for kind in KINDS)]
    rows = []
    for system, own in by_system(points).items():
        cells = []
        for target in targets:
            given = [point for point in own if not point["tbt_slo_ms"] or f"{point['tbt_slo_ms']:g}" == target]
            for kind in KINDS:
                rate, sign = goodput(given, kind, target)
                cells.append("–" if math.isnan(rate) else f"{'' if sign == '=' else sign + ' '}{rate:.2f}")
        rows.append([system, *cells])
    return table(head, rows)


def rate_table(points: Points) -> str:
    """Every point in the field's names."""
    names = ("completed", "failed", "request_throughput", "mean_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "max_itl_ms")
    rows = [
        [point["system"], f"{point['tbt_slo_ms']:g}" if point["tbt_slo_ms"] else "–", f"{point['rate']:g}"]
        + [f"{point[name]:.4g}" for name in names]
        for point in sorted(points, key=lambda point: (point["system"], point["tbt_slo_ms"], point["rate"]))
    ]
    return table(["system", "target, ms", "rate", *names], rows)


def by_system(points: Points) -> dict[str, Points]:
    """The points of each system, in the order of their first appearance."""
    found: dict[str, Points] = {}
    for point in points:
        found.setdefault(point["system"], []).append(point)
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(points: Points, picture: Path) -> None:
    """Rate against latencies and strict attainment, one line for each system and target."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    lines: dict[str, Points] = {}
    for point in sorted(points, key=lambda point: float(point["rate"])):
        target = f", {point['tbt_slo_ms']:g} ms" if point["tbt_slo_ms"] else ""
        lines.setdefault(point["system"] + target, []).append(point)
    targets = sorted({target for point in points for target in point["strict"]}, key=float)
    figure, axes = plt.subplots(1, len(PLOTTED) + len(targets), figsize=(4.2 * (len(PLOTTED) + len(targets)), 3.6))
    for label, own in lines.items():
        rates = [point["rate"] for point in own]
        for axis, (name, _) in zip(axes, PLOTTED, strict=False):
            axis.plot(rates, [point[name] for point in own], marker="o", markersize=3, linewidth=1, label=label)
        for axis, target in zip(axes[len(PLOTTED) :], targets, strict=True):
            attained = [100.0 * point["strict"].get(target, math.nan) for point in own]
            axis.plot(rates, attained, marker="o", markersize=3, linewidth=1, label=label)
    titles = [title for _, title in PLOTTED] + [f"requests within targets (TBT {target} ms), %" for target in targets]
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="requests/s")
        axis.grid(alpha=0.3)
    for axis in axes[: len(PLOTTED)]:
        axis.set_yscale("log")
    axes[0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
