"""Figures about predictions, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from learner.page import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Plot

    from learner.replay import Steps, Window

FloatArray = npt.NDArray[np.float64]

COLOURS = {"learner": "#1f5fbf", "roofline": "#d9730d", "persistence": "#6b7280", "live": "#0f8a6a"}
LINES = {"learner": "-", "roofline": "-", "persistence": "--", "live": "-."}
SERIES = ("#1f5fbf", "#d9730d", "#0f8a6a", "#8e4ec6", "#6b7280", "#c2410c")
MAX_POINTS = 5_000


def new_plot(columns: int = 1, width: float = 8.0, height: float = 4.2) -> tuple[Plot, list[Axes]]:
    """Return a figure with ``columns`` axes side by side, in the style of every figure here."""
    from matplotlib.figure import Figure as Canvas

    plot = Canvas(figsize=(width, height), layout="constrained")
    axes = [plot.add_subplot(1, columns, at + 1) for at in range(columns)]
    for axis in axes:
        axis.grid(True, color="#e8ebf1", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return plot, axes


def predicted_against_measured(steps: Steps) -> Figure:
    """Scatter of learner and roofline against the measurement, both axes logarithmic."""
    plot, axes = new_plot(columns=2, height=4.4)
    measured_ms = 1e3 * steps.measured_s
    every = max(1, len(steps) // MAX_POINTS)
    values_ms = [1e3 * steps.predicted_s(who) for who in ("roofline", "learner")]
    positive = np.concatenate([measured_ms, *values_ms])
    positive = positive[positive > 0]
    low, high = 0.8 * positive.min(), 1.25 * positive.max()
    for axis, who, predicted_ms in zip(axes, ("roofline", "learner"), values_ms, strict=True):
        axis.plot([low, high], [low, high], color="#1d2330", linewidth=0.9)
        for phase, marker in (("prefill", "s"), ("decode", "o"), ("mixed", "^")):
            of_phase = steps.phase[::every] == phase
            if of_phase.any():
                axis.scatter(
                    measured_ms[::every][of_phase],
                    predicted_ms[::every][of_phase],
                    s=11,
                    marker=marker,
                    alpha=0.5,
                    linewidths=0,
                    label=phase,
                    color={"prefill": SERIES[1], "decode": SERIES[0], "mixed": SERIES[3]}[phase],
                )
        axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=who)
        axis.set_xlabel("measured, ms")
        _plain_numbers(axis, "x", "y")
    axes[0].set_ylabel("predicted, ms")
    axes[1].legend(loc="upper left", frameon=False)
    note = f" Every {every}th step is drawn." if every > 1 else ""
    return Figure.from_plot(
        "Predicted against measured step times",
        plot,
        f"One point per step; on the line the prediction is exact, below it too short.{note}",
    )


def error_over_time(windows: Sequence[Window], first_learnt_s: float | None = None) -> Figure:
    """Lines of the MAPE of every predictor, window by window."""
    plot, (axis,) = new_plot()
    middle_s = [0.5 * (window.start_s + window.end_s) for window in windows]
    for who, colour in COLOURS.items():
        axis.plot(
            middle_s,
            [window.mape_pct[who] for window in windows],
            color=colour,
            linewidth=2.0 if who == "learner" else 1.5,
            linestyle=LINES[who],
            marker="o",
            markersize=3,
            label=who,
        )
    if first_learnt_s is not None:
        axis.axvline(first_learnt_s, color="#9aa3b2", linewidth=0.9, linestyle=":")
        axis.annotate(
            "first learnt snapshot in use", (first_learnt_s, 1.0), xycoords=("data", "axes fraction"), color="#566074",
            xytext=(4, -10), textcoords="offset points", fontsize=8,
        )  # fmt: skip
    axis.set(yscale="log", xlabel="time in the record, s", ylabel="MAPE, %")
    _plain_numbers(axis, "y")
    axis.legend(loc="best", ncols=2, frameon=False)
    return Figure.from_plot(
        "Error over time",
        plot,
        f"Mean absolute percentage error in {len(windows)} windows of equal numbers of steps.",
    )


def error_distribution(steps: Steps) -> Figure:
    """Share of steps whose absolute percentage error is at most x, for every predictor."""
    plot, (axis,) = new_plot()
    for who, colour in COLOURS.items():
        error = 100.0 * np.abs(steps.predicted_s(who) - steps.measured_s) / steps.measured_s
        _cumulative(axis, error, colour, who, LINES[who])
    axis.set(xscale="symlog", xlabel="absolute percentage error, %", ylabel="share of steps", ylim=(0, 1.01))
    axis.set_xlim(left=0.0)
    _plain_numbers(axis, "x")
    axis.legend(loc="lower right", frameon=False)
    return Figure.from_plot(
        "Distribution of the error", plot, "Share of steps with at most this error; left is better."
    )


def gap_distribution(gaps_s: Mapping[str, npt.ArrayLike], tbt_slo_s: float | None = None) -> Figure:
    """Share of gaps between tokens that are at most x, one line per name."""
    plot, (axis,) = new_plot()
    for at, (name, gaps) in enumerate(gaps_s.items()):
        _cumulative(axis, 1e3 * np.asarray(gaps, dtype=np.float64), SERIES[at % len(SERIES)], name, "-")
    if tbt_slo_s is not None:
        axis.axvline(1e3 * tbt_slo_s, color="#1d2330", linewidth=0.9, linestyle=":", label="TBT SLO")
    axis.set(xscale="log", xlabel="time between tokens, ms", ylabel="share of gaps", ylim=(0, 1.01))
    _plain_numbers(axis, "x")
    axis.legend(loc="lower right", frameon=False)
    return Figure.from_plot("Time between tokens", plot, "Share of all gaps between tokens that are at most this long.")


def _plain_numbers(axis: Axes, *which: str) -> None:
    """Label a logarithmic axis 3, 10, 30, not 3 × 10⁰."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for name in which:
        side = axis.xaxis if name == "x" else axis.yaxis
        low, high = side.get_view_interval()
        narrow = low > 0 and high / low < 50.0
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        side.set_minor_formatter(NullFormatter())
        if narrow:
            side.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))


def _cumulative(axis: Axes, values: FloatArray, colour: str, label: str, line: str) -> None:
    ordered = np.sort(values)
    if ordered.size > MAX_POINTS:  # every quantile that the picture can show, and both ends
        ordered = np.quantile(ordered, np.linspace(0.0, 1.0, MAX_POINTS))
    share = np.arange(1, ordered.size + 1) / max(1, ordered.size)
    axis.step(ordered, share, where="post", color=colour, linestyle=line, linewidth=1.6, label=label)
